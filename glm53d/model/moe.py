"""The mixture of experts: a sigmoid router, its chosen experts, and one expert that sees every token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.config import ModelConfig
from glm53d.model.layers import Mlp
from glm53d.model.weights import Checkpoint


class Moe:
    """sum of weight * expert(x) over the chosen, plus shared(x).

    The bias decides who is chosen and nothing else: weights are the chosen's unbiased scores, normalised and scaled.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str):
        self.num_chosen = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.gate = checkpoint.read_float32(prefix + "gate.weight")
        self.bias = checkpoint.read_float32(prefix + "gate.e_score_correction_bias")
        self.experts = [Mlp(checkpoint, f"{prefix}experts.{i}.") for i in range(config.n_routed_experts)]
        self.shared = Mlp(checkpoint, prefix + "shared_experts.")

    def __call__(self, x: Tensor) -> Tensor:
        # In float32 throughout: rounded scores would choose other experts.
        scores = F.linear(x.float(), self.gate).sigmoid()
        chosen = (scores + self.bias).topk(self.num_chosen, -1, sorted=False).indices
        weights = scores.gather(1, chosen)
        weights = weights * (self.scaling / (weights.sum(-1, keepdim=True) + 1e-20))
        return self._experts(x, chosen, weights) + self.shared(x)

    def _experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens sorted by expert, so that each expert is one product over its tokens."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        sorted_x = x[order // self.num_chosen].split(counts)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, sorted_x, strict=True) if len(part)])
        # Summed per token in the order of its own choice, not of the experts' turn: other tokens change nothing.
        by_token = torch.empty_like(out).index_copy_(0, order, out).unflatten(0, chosen.shape)
        return torch.bmm(weights.to(x.dtype)[:, None], by_token)[:, 0]
