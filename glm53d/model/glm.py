"""The model, in call order: embed, layers of attention and MLP, norm, logits."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.attention import Attention
from glm53d.model.config import ModelConfig
from glm53d.model.cpu_layer import CpuLayer
from glm53d.model.groups import RankGroups
from glm53d.model.kv_cache import KvCache
from glm53d.model.layers import Mlp, RmsNorm, Rope
from glm53d.model.moe import Moe
from glm53d.model.step import Group, Step
from glm53d.model.weights import Checkpoint


class Glm:
    """This rank's share of GLM-5.3 in plain torch. Holds weights only: what requests leave is in KvCache.

    Embedding and head are cut by vocabulary over all ranks: every rank looks up the ids of all groups, and computes the
    logits of its ids for the rows of all groups.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ranks: RankGroups,
        q_kv_norm_eps: float,
        on_layer: Callable[[int], None],
    ):
        """Read this rank's weights. on_layer(n) is told when n layers are there."""
        self.ranks = ranks
        self.vocab_size, self.shard = config.vocab_size, ranks.layout.vocab_shard(config.vocab_size)
        self.first_id = ranks.layout.rank * self.shard
        self.embed = self._vocab_shard(checkpoint, "model.embed_tokens.weight")
        self.rope = Rope(config, checkpoint.device)
        self.layers: list[Layer] = []
        for layer in range(config.num_hidden_layers):
            self.layers.append(Layer(config, layer, checkpoint, ranks, q_kv_norm_eps))
            on_layer(layer + 1)
        self.norm = RmsNorm(checkpoint.read("model.norm.weight"), config.rms_norm_eps)
        self.lm_head = self._vocab_shard(checkpoint, "lm_head.weight").T.contiguous()  # [hidden, shard], as in Linear

    def _vocab_shard(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """This rank's rows, and zeros where they lie behind the vocabulary."""
        rows = checkpoint.read(name, slice(self.first_id, min(self.first_id + self.shard, self.vocab_size)))
        return F.pad(rows, (0, 0, 0, self.shard - len(rows)))

    @torch.inference_mode()
    def forward(self, step: Step, cache: KvCache) -> Tensor:
        """Cache the KV of a step's tokens; returns their states behind the last layer [num_tokens, hidden]."""
        x = self.embedded(step)
        angles = self.rope.angles(step.positions)
        chosen = step.groups
        for layer in self.layers:
            x, chosen = layer(x, step, angles, cache, chosen)
        return x

    def embedded(self, step: Step) -> Tensor:
        """[num_tokens, hidden] of this rank's tokens."""
        if self.ranks.layout.tp_size == 1:
            return F.embedding(step.input_ids, self.embed)
        at = step.input_ids - self.first_id
        inside = (at >= 0) & (at < self.shard)
        part = F.embedding(torch.where(inside, at, 0), self.embed) * inside[:, None]
        return self.ranks.sum_all(part, step.dp_num_tokens)

    def at_owner(self, step: Step, states: Tensor) -> Tensor:
        """States of the tokens that give logits, at the group that owns their rows, if others have computed them."""
        split = step.split
        if split is None or not sum(step.dp_num_logits):
            return states
        last = len(step.dp_num_logits) - 1
        states = self.ranks.gather_tokens(states, [int(i == last) for i in range(last + 1)])
        return states if self.ranks.layout.attn_dp_rank == split.owner else states[:0]

    @torch.inference_mode()
    def logits(self, x: Tensor, dp_num_logits: Sequence[int]) -> Tensor:
        """Of states behind the last norm, each group's own.

        Returns float32 [num_logits, vocab_size] on the rank that owns the rows, [0, vocab_size] elsewhere.
        """
        if not sum(dp_num_logits):
            return x.new_empty(0, self.vocab_size, dtype=torch.float32)
        shard = self.ranks.gather_tokens(x, dp_num_logits) @ self.lm_head
        return self.ranks.join_vocab(shard, dp_num_logits)[:, : self.vocab_size].float()


class Layer:
    """x += attention(norm(x)); x += mlp(norm(x)). What is returned may be x itself, overwritten."""

    def __init__(
        self, config: ModelConfig, layer: int, checkpoint: Checkpoint, ranks: RankGroups, q_kv_norm_eps: float
    ):
        """An MTP layer, which stands behind the model's own, is full and sparse."""
        prefix = f"model.layers.{layer}."
        is_mtp = layer >= config.num_hidden_layers
        full = is_mtp or config.indexer_types[layer] == "full"
        sparse = is_mtp or config.mlp_layer_types[layer] == "sparse"
        self.ranks = ranks
        self.attention_norm = RmsNorm(checkpoint.read(prefix + "input_layernorm.weight"), config.rms_norm_eps)
        self.attention = Attention(config, layer, checkpoint, ranks, q_kv_norm_eps, full=full)
        self.mlp_norm = RmsNorm(checkpoint.read(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps)
        if sparse:
            self.mlp: Moe | Mlp = Moe(config, checkpoint, prefix + "mlp.", ranks)
        else:
            part = ranks.layout.attn_part("intermediate_size", config.intermediate_size)
            self.mlp = Mlp(checkpoint, prefix + "mlp.", part)
        self.on_cpu = CpuLayer.of(self, config)

    def __call__(
        self, x: Tensor, step: Step, angles: Tensor, cache: KvCache, chosen: list[Group]
    ) -> tuple[Tensor, list[Group]]:
        if self.on_cpu is not None and self.on_cpu.takes(step, cache):
            return self.on_cpu(x, step, angles, cache, chosen)
        attended, chosen = self.attention(self.attention_norm(x), step, angles, cache, chosen)
        x = x + attended
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, Moe):
            return x + self.mlp(normed, step.dp_num_tokens, is_static=step.is_static), chosen
        return x + self.ranks.sum_heads(self.mlp(normed)), chosen
