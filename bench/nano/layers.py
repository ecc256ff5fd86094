"""The layers of the training form: attention with its indexer, experts, and what a batch carries through them.

    x += attention(norm x);  x += mlp(norm x)          MLA; an indexer on full layers; experts behind the first layer

An indexer learns from what attention looks at, and chooses only once `sparse` is set.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm53d.model.config import ModelConfig

NEVER = -1e9


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def linear(out_of: int, to: int, gain: float = 1.0) -> nn.Linear:
    """Without a bias, and with outputs as large as its inputs times gain."""
    made = nn.Linear(out_of, to, bias=False)
    nn.init.normal_(made.weight, 0.0, gain * out_of**-0.5)
    return made


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of x [..., tokens, dim]. They come out as halves: only products of two are used."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)


@dataclass(slots=True)
class Batch:
    """Rows of equal length, shorter ones padded behind. What attention needs of their form, and what indexers leave."""

    cos: Tensor
    sin: Tensor
    sparse: bool  # attend to what indexers chose
    teach: bool  # let indexers learn from attention
    hidden: Tensor | None = None  # [rows, 1, tokens, tokens] 0 or NEVER: what the last full layer left out
    losses: list[Tensor] | None = None
    behind: list[Tensor] | None = None  # [rows, tokens, hidden] of each layer
    looks: list[tuple[Tensor, Tensor]] | None = None  # queries and keys of each layer's first head
    scores: Tensor | None = None  # of the last full layer's indexer, and what its layers have looked at
    seen: list[Tensor] | None = None

    def settle(self) -> None:
        """The last full layer's layers are through: how far is its indexer from what they looked at?"""
        if self.scores is None or not self.seen or self.losses is None:
            return
        target = torch.stack(self.seen).mean(0)
        self.losses.append(-(target * self.scores.log_softmax(-1).clamp_min(-100)).sum(-1).mean())
        self.scores, self.seen = None, []


class Indexer(nn.Module):
    """Scores of all earlier tokens; learns by itself, from inputs without a gradient."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.dim, self.rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        self.wq_b = linear(config.q_lora_rank, self.heads * self.dim)
        self.wk = linear(config.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, self.heads)

    def forward(self, x: Tensor, q_latent: Tensor, batch: Batch) -> Tensor:
        """[rows, tokens, tokens] float32, NEVER for later tokens."""
        x, q_latent = x.detach(), q_latent.detach()
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.wk(x))[:, None]
        q, k = (
            torch.cat([rotate(part[..., : self.rope], batch.cos, batch.sin), part[..., self.rope :]], -1)
            for part in (q, k)
        )
        weights = self.weights_proj(x).transpose(1, 2)[..., None] * (self.heads * self.dim) ** -0.5
        scores = (F.relu(q @ k.mT) * weights).sum(1).float()
        return scores + _later(scores.shape[-1])


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, *, full: bool):
        super().__init__()
        self.config = config
        heads, eps = config.num_attention_heads, config.rms_norm_eps
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RmsNorm(config.q_lora_rank, eps)
        self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.latent_dim)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, eps)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size, 0.3)
        self.indexer = Indexer(config) if full else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        c = self.config
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_rope = self._heads(self.q_b_proj(q_latent)).split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, rope_key = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = rotate(rope_key[:, None], batch.cos, batch.sin).expand(-1, c.num_attention_heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rope, batch.cos, batch.sin)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        if batch.looks is not None:
            batch.looks.append((q[:, 0], k[:, 0]))
        tokens = x.shape[1]
        if self.indexer is not None:
            batch.settle()
            batch.hidden = None
            if batch.teach or (batch.sparse and tokens > c.index_topk):
                scores = self.indexer(x, q_latent, batch)
                if batch.teach:
                    batch.scores = scores
                if batch.sparse and tokens > c.index_topk:
                    worst = scores.detach().topk(c.index_topk, -1).values[..., -1:]
                    batch.hidden = torch.where(scores.detach() < worst, NEVER, 0.0)[:, None]
        if batch.teach and batch.seen is not None:
            with torch.no_grad():
                dots = (q @ k.mT).float() * c.qk_head_dim**-0.5 + _later(tokens)
                batch.seen.append(dots.softmax(-1).mean(1))
        # Of equal width, or torch has no fused form on a CPU: half of a step's time.
        v = F.pad(v, (0, c.qk_head_dim - c.v_head_dim))
        if batch.hidden is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.hidden + _later(tokens))
        out = out[..., : c.v_head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """Stacked experts. The bias is no parameter: it moves towards experts that get too few tokens."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        n, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate = nn.Parameter(torch.randn(n, hidden) * hidden**-0.5)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(n))
        self.experts_gate_up = nn.Parameter(torch.randn(n, 2 * width, hidden) * hidden**-0.5)
        self.experts_down = nn.Parameter(torch.randn(n, hidden, width) * 0.3 * width**-0.5)
        self.shared_experts = Mlp(hidden, width * config.n_shared_experts)
        self.load = torch.zeros(n)

    def forward(self, x: Tensor) -> Tensor:
        k, n = self.config.num_experts_per_tok, self.config.n_routed_experts
        flat = x.flatten(0, 1)
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(flat.float(), self.gate).sigmoid()
            chosen = (scores + self.bias).topk(k, -1).indices
            weights = scores.gather(1, chosen)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor
        order = chosen.flatten().argsort(stable=True)
        load = torch.bincount(chosen.flatten(), minlength=n)
        self.load += load
        out = []
        for expert, part in enumerate(flat[order // k].split(load.tolist())):
            gate, up = F.linear(part, self.experts_gate_up[expert]).chunk(2, -1)
            out.append(F.linear(F.silu(gate) * up, self.experts_down[expert]))
        weighted = torch.cat(out) * weights.flatten()[order, None]
        routed = torch.zeros_like(flat, dtype=torch.float32).index_add_(0, order // k, weighted.float())
        return routed.view_as(x) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the bias by the load since the last time."""
        self.bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, *, full: bool, sparse: bool):
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, full=full)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Moe(config) if sparse else Mlp(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(Layer):
    """The layer behind the others: from a state and the next token to the token after it."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, full=True, sparse=True)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.eh_proj = linear(2 * hidden, hidden)
        self.shared_head_norm = RmsNorm(hidden, eps)


def _later(tokens: int) -> Tensor:
    """[tokens, tokens]: NEVER where the second is behind the first."""
    return torch.full((tokens, tokens), NEVER).triu(1)
