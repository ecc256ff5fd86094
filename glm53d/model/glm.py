"""The model, in call order: embed, layers of attention and MLP, norm, logits."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.attention import Attention
from glm53d.model.config import ModelConfig
from glm53d.model.kv_cache import KvCache
from glm53d.model.layers import Mlp, RmsNorm, Rope
from glm53d.model.moe import Moe
from glm53d.model.step import Group, Step
from glm53d.model.weights import Checkpoint


class Glm:
    """GLM-5.3's architecture in plain torch, on one rank. Holds weights only: what requests leave is in KvCache."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        q_kv_norm_eps: float,
        on_layer: Callable[[int], None],
    ):
        """Read all weights. on_layer(n) is told when n layers are there."""
        self.embed = checkpoint.read("model.embed_tokens.weight")
        self.rope = Rope(config, checkpoint.device)
        self.layers: list[Layer] = []
        for layer in range(config.num_hidden_layers):
            self.layers.append(Layer(config, layer, checkpoint, q_kv_norm_eps))
            on_layer(layer + 1)
        self.norm = RmsNorm(checkpoint.read("model.norm.weight"), config.rms_norm_eps)
        self.lm_head = checkpoint.read("lm_head.weight")

    @torch.inference_mode()
    def forward(self, step: Step, cache: KvCache) -> Tensor:
        """Compute a step's tokens and cache their KV; returns float32 logits [num_logits, vocab_size]."""
        x = F.embedding(step.input_ids, self.embed)
        angles = self.rope.angles(step.positions)
        chosen = step.groups
        for layer in self.layers:
            x, chosen = layer(x, step, angles, cache, chosen)
        return F.linear(self.norm(x[step.logits_idx]), self.lm_head).float()


class Layer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, checkpoint: Checkpoint, q_kv_norm_eps: float):
        prefix = f"model.layers.{layer}."
        sparse = config.mlp_layer_types[layer] == "sparse"
        self.attention_norm = RmsNorm(checkpoint.read(prefix + "input_layernorm.weight"), config.rms_norm_eps)
        self.attention = Attention(config, layer, checkpoint, q_kv_norm_eps)
        self.mlp_norm = RmsNorm(checkpoint.read(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps)
        self.mlp = Moe(config, checkpoint, prefix + "mlp.") if sparse else Mlp(checkpoint, prefix + "mlp.")

    def __call__(
        self, x: Tensor, step: Step, angles: Tensor, cache: KvCache, chosen: list[Group]
    ) -> tuple[Tensor, list[Group]]:
        attended, chosen = self.attention(self.attention_norm(x), step, angles, cache, chosen)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), chosen
