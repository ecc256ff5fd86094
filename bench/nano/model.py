"""The training form of GLM-5.3's architecture: plain torch over padded batches, gradients through everything.

    x += attention(norm x);  x += mlp(norm x)          MLA; an indexer on full layers; experts behind the first layer

Parameters carry the official names, experts as stacks [experts, out, in], so that exporting is splitting. What it
computes is what glm53d.model computes of the exported checkpoint; tests/model/test_nano_training.py holds the two
together. Its indexer learns from what attention looks at, and chooses only once `sparse` is set.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.nano.data import NAME_IDS
from glm53d.model.config import ModelConfig

NEVER = -1e9
TOOLS_KNOWN = 2  # the layer behind which a token in a tool's description or call is to know whose it is,
TOOL_CHOSEN = 4  # and the one behind which it is to be known which tool is called
CODE = 16  # dimensions
FINDING = 3  # the layer whose first head is to look at the description of what is wanted,
COPYING = 5  # and the one whose first head is to look at the token that comes next, where it is a copied one


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


class Nano(nn.Module):
    def __init__(self, config: ModelConfig, texts: Tensor | None = None):
        """texts: for each token that the tokenizer has, the first one with the same text, a space before it apart."""
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, 0.0, 0.5)
        self.layers = nn.ModuleList(
            Layer(config, full=index == "full", sparse=mlp == "sparse")
            for index, mlp in zip(config.indexer_types, config.mlp_layer_types, strict=True)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size, 0.25)
        self.mtp = MtpLayer(config)
        self.tool_heads = nn.ModuleList(  # for training alone
            linear(config.hidden_size, NAME_IDS * config.vocab_size, 0.25) for _ in range(2)
        )
        dim = config.qk_rope_head_dim
        self.inv_freq: Tensor
        self.register_buffer(
            "inv_freq", 1.0 / config.rope_theta ** (torch.arange(0, dim, 2).float() / dim), persistent=False
        )
        same = torch.arange(config.vocab_size)
        if texts is not None:
            same[: len(texts)] = texts
        self._begin_with_copying(same)

    @torch.no_grad()
    def _begin_with_copying(self, same: Tensor) -> None:
        """Weights of two heads in each of the first two layers, with which a text that was there before goes on, and of
        one that writes what it looks at.

        A model of this size and shape, left alone, found none of this in four million tokens, and all it is for is to
        copy names and values. Nothing is fixed: training goes on from here with every weight.

            embedding   a constant, and a code of the token in CODE dimensions, the same behind a space
            layer 0     head 0 writes the code of the token before, head 1 of the one before that
            layer 1     head 0 looks for places that stand behind such a token, head 1 for those that stand behind two
                        such tokens, and both write the code of what stands there
            layer 5     head 0 writes the code of what it looks at, wherever that is
            head        reads it
        """
        c, rows = self.config, self._rows_of_head
        constant, own, last, second, copied = 0, *(slice(1 + i * CODE, 1 + (i + 1) * CODE) for i in range(4))
        one = torch.eye(CODE)
        codes = far_apart(c.vocab_size)[same] * 0.5 * CODE**0.5
        self.embed_tokens.weight[:, constant] = 1.0
        self.embed_tokens.weight[:, own] = codes
        for part in (last, second, copied):
            self.embed_tokens.weight[:, part] = 0.0
        self.lm_head.weight[:, copied] = 0.5 * codes

        first, matching = self.layers[0].self_attn, self.layers[1].self_attn
        assert isinstance(first, Attention) and isinstance(matching, Attention)
        # Layer 0 by position alone: the key is a constant, the query a constant turned back by one token or two.
        first.q_a_proj.weight[0] = 0.0
        first.q_a_proj.weight[0, constant] = 2.0
        key = first.kv_a_proj_with_mqa.weight[c.kv_lora_rank :]
        key[:] = 0.0
        key[0:8:2, constant] = 4.0
        first.kv_a_proj_with_mqa.weight[:CODE] = 0.0
        first.kv_a_proj_with_mqa.weight[:CODE, own] = one
        for head, back, to in ((0, 1, last), (1, 2, second)):
            query, _, value, out = rows(first, head)
            query[:], value[:], out[:] = 0.0, 0.0, 0.0
            angles = self.inv_freq[:4] * back
            query[c.qk_nope_head_dim : c.qk_nope_head_dim + 8 : 2, 0] = 2.0 * angles.cos()
            query[c.qk_nope_head_dim + 1 : c.qk_nope_head_dim + 8 : 2, 0] = -2.0 * angles.sin()
            value[:CODE, :CODE] = one
            out[to, :CODE] = 0.4 * one
        # Layer 1 by codes alone.
        for i, part in enumerate((own, last)):
            matching.q_a_proj.weight[i * CODE : (i + 1) * CODE] = 0.0
            matching.q_a_proj.weight[i * CODE : (i + 1) * CODE, part] = one
        for i, part in enumerate((last, second, own)):
            matching.kv_a_proj_with_mqa.weight[i * CODE : (i + 1) * CODE] = 0.0
            matching.kv_a_proj_with_mqa.weight[i * CODE : (i + 1) * CODE, part] = one
        for head in range(2):
            query, key, value, out = rows(matching, head)
            query[:], key[:], value[:], out[:] = 0.0, 0.0, 0.0, 0.0
            dims = (1 + head) * CODE
            query[:dims, :dims] = 2.5 * torch.eye(dims)
            key[:dims, :dims] = 2.5 * torch.eye(dims)
            value[:CODE, 2 * CODE : 3 * CODE] = one
            out[copied, :CODE] = one
        pointing = self.layers[COPYING].self_attn
        assert isinstance(pointing, Attention)
        pointing.kv_a_proj_with_mqa.weight[:CODE] = 0.0
        pointing.kv_a_proj_with_mqa.weight[:CODE, own] = one
        _, _, value, out = rows(pointing, 0)
        value[:], out[:] = 0.0, 0.0
        value[:CODE, :CODE] = one
        out[copied, :CODE] = one

    def _rows_of_head(self, attention: Attention, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of a head's weights: query and key and value rows, and what o_proj does with the value."""
        c = self.config
        query = attention.q_b_proj.weight.unflatten(0, (c.num_attention_heads, -1))[head]
        key, value = attention.kv_b_proj.weight.unflatten(0, (c.num_attention_heads, -1))[head].tensor_split(
            [c.qk_nope_head_dim]
        )
        return query, key, value, attention.o_proj.weight[:, head * c.v_head_dim : (head + 1) * c.v_head_dim]

    def batch(self, tokens: int, *, sparse: bool, teach: bool) -> Batch:
        """For rows of so many tokens."""
        angle = torch.arange(tokens).float()[:, None] * self.inv_freq
        return Batch(angle.cos(), angle.sin(), sparse, teach, losses=[], seen=[])

    def forward(self, ids: Tensor, batch: Batch) -> Tensor:
        """[rows, tokens] ids -> [rows, tokens, hidden] states behind the last norm."""
        x = self.embed_tokens(ids)
        batch.behind, batch.looks = [], []
        for layer in self.layers:
            x = layer(x, batch)
            batch.behind.append(x)
        batch.settle()
        return self.norm(x)

    def tool_loss(self, batch: Batch, tools: Tensor, called: Tensor, chosen: Tensor, number: int) -> Tensor:
        """How well `number` tokens of each kind know the first ids of a tool's name, each [rows, tokens, NAME_IDS]:
        those that describe one, those that call it, and those before it is called.

        Which tool a parameter or a word belongs to stands in no place next to it, neither in its description nor in a
        call, and which tool is described in the words that were just thought is not known from the last of them. Calls
        need all three from the beginning, and by themselves, one in a hundred tokens, do not teach it. One head reads
        descriptions and calls, so that what one looks for is what the other has.
        """
        assert batch.behind is not None
        total = torch.zeros(())
        known_by, chosen_by = self.tool_heads
        for layer, head, names in (
            (TOOLS_KNOWN, known_by, tools),
            (TOOLS_KNOWN, known_by, called),
            (TOOL_CHOSEN, chosen_by, chosen),
        ):
            row, token = _some((names >= 0).all(-1), number)
            logits = head(batch.behind[layer][row, token]).unflatten(-1, (NAME_IDS, -1)).flatten(0, 1)
            wanted = names[row, token].flatten()
            total = total + F.cross_entropy(logits, wanted, reduction="sum") / max(1, len(wanted))
        return total

    def look_loss(self, batch: Batch, layer: int, places: Tensor, number: int) -> Tensor:
        """How well the first head of a layer, at `number` tokens, finds the place that it is to look at; places [rows,
        tokens], below 0 where it may look anywhere.

        Which value begins here and where it stands, or that no tool does what is wanted, are no text that goes on: from
        the tokens alone, one in twenty, it is learned too late.
        """
        assert batch.looks is not None
        queries, keys = batch.looks[layer]
        row, token = _some(places >= 0, number)
        dots = (queries @ keys.mT)[row, token].float() * self.config.qk_head_dim**-0.5
        dots = dots.masked_fill(torch.arange(dots.shape[-1]) > token[:, None], NEVER)
        return F.cross_entropy(dots, places[row, token], reduction="sum") / max(1, len(row))

    def draft(self, states: Tensor, ids: Tensor, batch: Batch) -> Tensor:
        """States of all tokens but the last -> states that give, by the same head, the token after the next."""
        mtp = self.mtp
        x = mtp.eh_proj(torch.cat([mtp.enorm(self.embed_tokens(ids[:, 1:])), mtp.hnorm(states[:, :-1])], -1))
        cut = Batch(batch.cos[:-1], batch.sin[:-1], batch.sparse, batch.teach, losses=batch.losses, seen=[])
        x = mtp(x, cut)
        cut.settle()
        return mtp.shared_head_norm(x)


def far_apart(number: int) -> Tensor:
    """[number, CODE] vectors of length 1, drawn from the 4,320 shortest ones of the Barnes-Wall lattice: in 16
    dimensions no set of as many has larger angles, at least 60 degrees. Random ones come as near as 30.
    """
    even = torch.tensor([[1.0 - 2 * (s >> i & 1) for i in range(8)] for s in range(256) if s.bit_count() % 2 == 0])
    found = []
    for mask, flip in itertools.product(range(1, CODE), (0, 1)):
        half = [x for x in range(CODE) if ((mask & x).bit_count() + flip) % 2]
        found.append(torch.zeros(len(even), CODE).index_copy_(1, torch.tensor(half), even))
    for pair in itertools.combinations(range(CODE), 2):
        signs = torch.tensor(list(itertools.product((-2.0, 2.0), repeat=2)))
        found.append(torch.zeros(4, CODE).index_copy_(1, torch.tensor(pair), signs))
    every = torch.cat(found) / 8**0.5
    return every[torch.randperm(len(every))[:number]]


def _some(known: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Rows and tokens of at most so many places of known [rows, tokens], drawn."""
    places = known.nonzero()
    row, token = places[torch.randperm(len(places))[:number]].unbind(1)
    return row, token


def _later(tokens: int) -> Tensor:
    """[tokens, tokens]: NEVER where the second is behind the first."""
    return torch.full((tokens, tokens), NEVER).triu(1)
