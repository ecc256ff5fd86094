"""Multi-head latent attention over the chosen tokens, in two forms: absorbed for Gathered groups, expanded for Causal.

Cached per token is one row: a latent c and a rotated key r that all heads share. With kv_b = [Wk; Wv] of each head:

    expanded   k = [Wk c, r], v = Wv c for every token;    score = q . k;                       out = sum p v
    absorbed   nothing is made of a token's row;           score = [Wk^T q_nope, q_rope] . row; out = Wv sum p c

Both give the same numbers up to rounding. The scale is that of the head before absorption, 1 / sqrt(nope + rope).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.config import ModelConfig
from glm53d.model.groups import RankGroups
from glm53d.model.indexer import Indexer
from glm53d.model.kv_cache import KvCache, PlainRows, Rows
from glm53d.model.layers import Linear, RmsNorm, rotate
from glm53d.model.step import Causal, Gathered, Group, Step, parts
from glm53d.model.weights import ALL, Checkpoint, Weight

CPU_QUERIES = 128  # at once: what is ahead of all of them is not computed, a third of a long prompt's attention


class Attention:
    """One layer's attention, its indexer included if it is a full layer.

    Ranks of an attention group have a part of the heads each; the latents, their cache and the indexer are on all.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        checkpoint: Checkpoint,
        ranks: RankGroups,
        q_kv_norm_eps: float,
        *,
        full: bool,
    ):
        def read(name: str, rows: slice = ALL, columns: slice = ALL) -> Weight:
            return checkpoint.read_weight(f"{prefix}{name}.weight", rows, columns)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(checkpoint.read(f"{prefix}{name}.weight"), q_kv_norm_eps)

        def of_heads(width: int) -> slice:
            return slice(part.start * width, part.stop * width)

        prefix = f"model.layers.{layer}.self_attn."
        self.layer = layer
        self.ranks = ranks
        part = ranks.layout.attn_part("num_attention_heads", config.num_attention_heads)
        self.heads, self.kv_lora_rank = part.stop - part.start, config.kv_lora_rank
        self.qk_head_dim, self.nope_dim, self.v_head_dim = (
            config.qk_head_dim,
            config.qk_nope_head_dim,
            config.v_head_dim,
        )
        self.scale = config.qk_head_dim**-0.5
        self.indexer = Indexer(config, checkpoint, prefix + "indexer.") if full else None

        from_x = [read("q_a_proj"), read("kv_a_proj_with_mqa")]
        from_q = [read("q_b_proj", of_heads(self.qk_head_dim))]
        self.x_parts = [config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim]
        if full:
            from_x += [read("indexer.wk"), read("indexer.weights_proj")]
            from_q += [read("indexer.wq_b")]
            self.x_parts += [config.index_head_dim, config.index_n_heads]
        self.w_x, self.w_q = Linear(*from_x), Linear(*from_q)
        self.q_norm, self.kv_norm = norm("q_a_layernorm"), norm("kv_a_layernorm")
        width = self.nope_dim + self.v_head_dim
        kv_b = checkpoint.read(prefix + "kv_b_proj.weight", of_heads(width))
        self.kv_b = kv_b.view(self.heads, width, self.kv_lora_rank)
        self.w_k = self.kv_b[:, : self.nope_dim]  # [heads, nope, kv_lora_rank]
        self.w_v = self.kv_b[:, self.nope_dim :].transpose(1, 2)  # [heads, kv_lora_rank, v]
        self.w_o = Linear(read("o_proj", columns=of_heads(self.v_head_dim)))

    def __call__(
        self, x: Tensor, step: Step, angles: Tensor, cache: KvCache, chosen: list[Group]
    ) -> tuple[Tensor, list[Group]]:
        """Cache this step's rows, then attend. `chosen` is the last full layer's; this layer's is returned beside x."""
        q_latent, c, rope_key, *index = self.w_x(x).split(self.x_parts, -1)
        q_latent = self.q_norm(q_latent)
        row = torch.cat([self.kv_norm(c), rotate(rope_key[:, None], angles)[:, 0]], -1)
        latents = self._store(cache.latent[self.layer], row, step)

        q = self.w_q(q_latent)
        keys = cache.index_k[self.layer]
        if self.indexer is not None and keys is not None and not step.keeps_choice:
            index_k, index_w = index
            keys = self._store(keys, self.indexer.key(index_k, angles), step)
            chosen = self.indexer.choose(step.groups, q[:, self.heads * self.qk_head_dim :], index_w, angles, keys)

        q = q[:, : self.heads * self.qk_head_dim].unflatten(-1, (self.heads, self.qk_head_dim))
        q_nope, q_rope = q[..., : self.nope_dim], rotate(q[..., self.nope_dim :], angles)
        out = [
            self._absorbed(q_nope[group.tokens], q_rope[group.tokens], latents, group)
            if isinstance(group, Gathered)
            else self._expanded(q_nope[group.tokens], q_rope[group.tokens], latents, group)
            for group in chosen
        ]
        joined = out[0] if len(out) == 1 else torch.cat([x.new_empty(0, self.heads, self.v_head_dim), *out])
        return self.ranks.sum_heads(self.w_o(joined.flatten(1))), chosen

    def _store(self, pool: Rows, rows: Tensor, step: Step) -> Rows:
        """Put this step's rows into the pool; returns where the step's groups find all that they look at."""
        split = step.split
        if split is None:
            pool.write(step.out_cache_loc, rows)
            return pool
        every = self.ranks.gather_tokens(rows, step.dp_num_tokens)
        if self.ranks.layout.attn_dp_rank == split.owner:
            pool.write(split.locs[-split.num_new :], every)
            context = pool.read(split.locs)
        else:
            context = rows.new_empty(len(split.locs), rows.shape[1])
        return PlainRows(self.ranks.spread(context, split.owner))

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, pool: Rows, group: Gathered) -> Tensor:
        """[queries, heads, v]."""
        q = torch.cat([torch.bmm(q_nope.transpose(0, 1), self.w_k).transpose(0, 1), q_rope], -1)
        latents = []
        for part in parts(len(q), group.locs.shape[-1] * max(q.shape[1:])):
            rows = group.rows(part, pool)
            scores = torch.baddbmm(group.bias(part, q.dtype), q[part], rows.transpose(1, 2), alpha=self.scale)
            latents.append(torch.bmm(scores.softmax(-1), rows[..., : self.kv_lora_rank]))
        latent = latents[0] if len(latents) == 1 else torch.cat(latents)
        return torch.bmm(latent.transpose(0, 1), self.w_v).transpose(0, 1)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, pool: Rows, group: Causal) -> Tensor:
        """[queries, heads, v]."""
        q = torch.cat([q_nope, q_rope], -1).transpose(0, 1)
        c, rope_key = group.rows(slice(0, len(q_nope)), pool).tensor_split([self.kv_lora_rank], -1)
        k = torch.cat([torch.matmul(c, self.w_k.transpose(1, 2)), rope_key.expand(self.heads, -1, -1)], -1)
        # As wide as the keys, or torch has no fused form on a CPU: twice to four times the time.
        v = F.pad(torch.matmul(c, self.w_v), (0, max(0, self.qk_head_dim - self.v_head_dim)))
        out = []
        most = CPU_QUERIES if q.device.type == "cpu" else len(q_nope)
        for part in parts(len(q_nope), self.heads * k.shape[1], most=most):
            bias = group.bias(part, q.dtype).transpose(0, 1)  # [1, queries, seen]
            seen = bias.shape[-1]
            out.append(
                F.scaled_dot_product_attention(
                    q[None, :, part], k[None, :, :seen], v[None, :, :seen], attn_mask=bias[None], scale=self.scale
                )[0]
            )
        return torch.cat(out, 1)[..., : self.v_head_dim].transpose(0, 1)
