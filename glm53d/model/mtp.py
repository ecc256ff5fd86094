"""The MTP layer: from a position's hidden state and its next token, what the token after that might be. [R36]

    x = eh_proj [enorm(embed(token t + 1)) ; hnorm(h_t)]        h_t: behind the model's last norm
    x = one layer, with experts, KV rows and an indexer of its own
    shared_head.norm(x) -> the model's head -> token t + 2

A chain of drafts feeds the state behind shared_head.norm back in, with the token just drafted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.config import ModelConfig
from glm53d.model.glm import Glm, Layer
from glm53d.model.groups import RankGroups
from glm53d.model.kv_cache import KvCache
from glm53d.model.layers import RmsNorm
from glm53d.model.step import Group, Step
from glm53d.model.weights import Checkpoint


class Mtp:
    """This rank's share of the layer behind the model's own. Embedding, rope and head are the model's."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, ranks: RankGroups, model: Glm, q_kv_norm_eps: float
    ):
        layer = config.num_hidden_layers
        prefix = f"model.layers.{layer}."
        self.model = model
        self.shares_choice = config.index_share_for_mtp_iteration
        self.embed_norm, self.hidden_norm, self.norm = (
            RmsNorm(checkpoint.read(f"{prefix}{name}.weight"), config.rms_norm_eps)
            for name in ("enorm", "hnorm", "shared_head.norm")
        )
        self.join = checkpoint.read(prefix + "eh_proj.weight")
        self.layer = Layer(config, layer, checkpoint, ranks, q_kv_norm_eps)

    @torch.inference_mode()
    def forward(self, step: Step, hidden: Tensor, cache: KvCache) -> tuple[Tensor, list[Group]]:
        """Cache the layer's KV of a step's tokens.

        Args:
            step: its input_ids are, of each position, the token behind it.
            hidden: [num_tokens, hidden], of each position itself.
        Returns:
            The tokens' states behind shared_head.norm [num_tokens, hidden], and what the layer's indexer chose.
        """
        embedded = self.embed_norm(self.model.embedded(step))
        x = F.linear(torch.cat([embedded, self.hidden_norm(hidden)], -1), self.join)
        x, chosen = self.layer(x, step, self.model.rope.angles(step.positions), cache, step.groups)
        return self.norm(x), chosen
