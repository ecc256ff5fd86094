"""A layer for steps of a few tokens on a CPU: three native calls instead of some eighty operations.

An operation on so few numbers takes longer to start than to compute: bench/micro/model.py has both. It is the same
arithmetic, in float32; tests/model/test_cpu_layer.py holds the two forms together.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm53d import _native
from glm53d.model.config import ModelConfig
from glm53d.model.indexer import K_NORM_EPS
from glm53d.model.kv_cache import KvCache, PlainRows, Rows
from glm53d.model.layers import Linear, Mlp
from glm53d.model.moe import Moe
from glm53d.model.step import Gathered, Group, Step

if TYPE_CHECKING:
    from glm53d.model.glm import Layer

MAX_TOKENS = 32
MAX_BYTES = 16 << 20  # of a layer's weights: larger ones come from memory, and torch reads them with all its threads


class CpuLayer:
    """Of one layer that is whole on this rank, in float32 on the CPU, with plain weights."""

    def __init__(self, layer: "Layer", config: ModelConfig):
        attention, mlp = layer.attention, layer.mlp
        self.attention, self.indexer = attention, attention.indexer
        moe = mlp if isinstance(mlp, Moe) else None
        mlps: list[Mlp] = [*moe.experts, moe.shared] if moe else [mlp]  # type: ignore[list-item]
        index = self.indexer
        # The native layer knows where these lie and keeps none of them alive.
        self.weights: dict[str, Any] = {
            "attention_norm": layer.attention_norm.weight.numpy(), "mlp_norm": layer.mlp_norm.weight.numpy(),
            "q_norm": attention.q_norm.weight.numpy(), "kv_norm": attention.kv_norm.weight.numpy(),
            "index_norm": index.k_norm_weight.numpy() if index else None,
            "index_norm_bias": index.k_norm_bias.numpy() if index else None,
            "from_x": _plain(attention.w_x), "from_q": _plain(attention.w_q), "out": _plain(attention.w_o),
            "kv_b": attention.kv_b.flatten(0, 1).numpy(),
            "router": moe.gate.numpy() if moe else None, "router_bias": moe.bias.numpy() if moe else None,
            "gate_up": [_plain(each.gate_up) for each in mlps], "down": [_plain(each.down) for each in mlps],
        }  # fmt: skip
        self.native = _native.CpuLayer(
            hidden=config.hidden_size, q_rank=config.q_lora_rank, kv_rank=config.kv_lora_rank,
            rope=config.qk_rope_head_dim, nope=attention.nope_dim, value=attention.v_head_dim, heads=attention.heads,
            index_heads=index.heads if index else 0, index_dim=index.head_dim if index else 0,
            width=len(self.weights["down"][0]), chosen=moe.num_chosen if moe else 0,
            floor=float(layer.attention_norm.floor), q_floor=float(attention.q_norm.floor),
            kv_floor=float(attention.kv_norm.floor), index_eps=K_NORM_EPS, scaling=moe.scaling if moe else 0.0,
            **self.weights,
        )  # fmt: skip

    @classmethod
    def of(cls, layer: "Layer", config: ModelConfig) -> "CpuLayer | None":
        """None where a layer is of another kind."""
        weight, mlp = layer.attention_norm.weight, layer.mlp
        linears = [layer.attention.w_x, layer.attention.w_q, layer.attention.w_o]
        for each in [*mlp.experts, mlp.shared] if isinstance(mlp, Moe) else [mlp]:
            linears += [each.gate_up, each.down]
        plain = [each.plain for each in linears if each.plain is not None and each.plain.dtype == torch.float32]
        is_plain, is_small = len(plain) == len(linears), sum(each.nbytes for each in plain) <= MAX_BYTES
        is_whole = layer.ranks.layout.tp_size == 1 and config.n_shared_experts == 1
        return cls(layer, config) if is_plain and is_small and is_whole and weight.device.type == "cpu" else None

    def takes(self, step: Step, cache: KvCache) -> bool:
        """The step is of the kind this is for."""
        return (
            0 < len(step.positions) <= MAX_TOKENS
            and all(isinstance(group, Gathered) for group in step.groups)
            and isinstance(cache.latent[self.attention.layer], PlainRows)
            and not step.is_static
        )

    def __call__(
        self, x: Tensor, step: Step, angles: Tensor, cache: KvCache, chosen: list[Group]
    ) -> tuple[Tensor, list[Group]]:
        """As Layer, but x is overwritten."""
        num_tokens, attention, native = len(x), self.attention, self.native
        pool, keys = cache.latent[attention.layer].data.data_ptr(), cache.index_k[attention.layer]
        index = self.indexer if not step.keeps_choice else None
        queries = x.new_empty(num_tokens, native.all_queries)
        index_w = x.new_empty(num_tokens, self.indexer.heads if self.indexer else 0)
        native.project(
            num_tokens, x.data_ptr(), angles.data_ptr(), step.out_cache_loc.data_ptr(), pool,
            keys.data.data_ptr() if index and keys else 0, queries.data_ptr(), index_w.data_ptr(),
        )  # fmt: skip
        if index is not None and keys is not None:
            chosen = [self._choose(group, index.topk, queries, index_w, angles, keys) for group in step.groups]
        attended = x.new_empty(num_tokens, attention.heads * attention.v_head_dim)
        for group in chosen:
            assert isinstance(group, Gathered)
            locs, hidden = group.locs.contiguous(), group.hidden.contiguous()
            native.attend(
                len(locs), locs.shape[1], queries[group.tokens].data_ptr(), pool, locs.data_ptr(), hidden.data_ptr(),
                attended[group.tokens].data_ptr(),
            )  # fmt: skip
        native.finish(num_tokens, attended.data_ptr(), x.data_ptr())
        return x, chosen

    def _choose(self, group: Group, topk: int, queries: Tensor, index_w: Tensor, angles: Tensor, keys: Rows) -> Group:
        assert isinstance(group, Gathered)
        num_queries, num_keys = group.locs.shape
        if num_keys <= topk:
            return group
        locs, hidden = group.locs.contiguous(), group.hidden.contiguous()
        chosen, chosen_hidden = locs.new_empty(num_queries, topk), hidden.new_empty(num_queries, 1, topk)
        self.native.choose(
            num_queries, num_keys, topk, queries[group.tokens].data_ptr(), index_w[group.tokens].data_ptr(),
            angles[group.tokens].data_ptr(), keys.data.data_ptr(), locs.data_ptr(), hidden.data_ptr(),
            chosen.data_ptr(), chosen_hidden.data_ptr(),
        )  # fmt: skip
        return Gathered(group.tokens, chosen, chosen_hidden)


def _plain(linear: Linear) -> NDArray[np.float32]:
    """[in, out]."""
    assert linear.plain is not None
    return linear.plain.numpy()
