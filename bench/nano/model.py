"""The training form of GLM-5.3's architecture: plain torch over padded batches, gradients through everything.

Parameters carry the official names, experts as stacks [experts, out, in], so that exporting is splitting. What it
computes is what glm53d.model computes of the exported checkpoint; tests/model/test_nano_training.py holds the two
together. Beside the text it learns where to look, which so small a model does not find by itself.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.nano.data import NAME_IDS
from bench.nano.layers import NEVER, Attention, Batch, Layer, MtpLayer, RmsNorm, linear
from glm53d.model.config import ModelConfig

TOOLS_KNOWN = 2  # the layer behind which a token in a tool's description or call is to know whose it is,
TOOL_CHOSEN = 4  # and the one behind which it is to be known which tool is called
CODE = 16  # dimensions
CONSTANT, SPACED = 0, 1  # dimensions of a state, and
OWN, LAST, SECOND, COPIED = (slice(2 + i * CODE, 2 + (i + 1) * CODE) for i in range(4))  # those that hold codes
FINDING = 3  # the layer whose first head is to look at the description of what is wanted,
COPYING = 5  # and the one whose first head is to look at what decides on the next token, as a copied one


class Nano(nn.Module):
    def __init__(self, config: ModelConfig, texts: Tensor | None = None, spaced: Tensor | None = None):
        """For each token that the tokenizer has, the first one with the same text, a space before it apart; and whether
        it begins with a space.
        """
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
        same, side = torch.arange(config.vocab_size), torch.full((config.vocab_size,), -1.0)
        if texts is not None and spaced is not None:
            same[: len(texts)] = texts
            side[: len(spaced)][spaced] = 1.0
        self._begin_with_copying(same, side)
        _fix(self.embed_tokens.weight, slice(OWN.stop))
        _fix(self.lm_head.weight, slice(COPIED.start, COPIED.stop), SPACED)

    @torch.no_grad()
    def _begin_with_copying(self, same: Tensor, side: Tensor) -> None:
        """Weights of two heads in each of the first two layers, with which a text that was there before goes on, and of
        one that writes what it looks at.

        A model of this size and shape, left alone, found none of this in four million tokens, and all it is for is to
        copy names and values. Training goes on from here with every weight but the codes: those of rare tokens would
        be pushed around by all texts that do not have them, and then only frequent words can be copied.

            embedding   a constant, whether the token begins with a space, and a code of it in CODE dimensions, the
                        same behind a space
            layer 0     head 0 writes the code of the token before, head 1 of the one before that
            layer 1     head 0 looks for places that stand behind such a token, head 1 for those that stand behind two
                        such tokens, and both write the code of what stands there
            layer 5     head 0 writes the code of what it looks at, wherever that is
            head        reads it, and the side
        """
        c, rows = self.config, self._rows_of_head
        one = torch.eye(CODE)
        codes = far_apart(c.vocab_size)[same] * 0.5 * CODE**0.5
        self.embed_tokens.weight[:, CONSTANT] = 1.0
        self.embed_tokens.weight[:, SPACED] = side
        self.embed_tokens.weight[:, OWN] = codes
        for part in (LAST, SECOND, COPIED):
            self.embed_tokens.weight[:, part] = 0.0
        self.lm_head.weight[:, COPIED] = 0.5 * codes
        self.lm_head.weight[:, SPACED] = 0.5 * side

        first, matching = self.layers[0].self_attn, self.layers[1].self_attn
        assert isinstance(first, Attention) and isinstance(matching, Attention)
        # Layer 0 by position alone: the key is a constant, the query a constant turned back by one token or two.
        first.q_a_proj.weight[0] = 0.0
        first.q_a_proj.weight[0, CONSTANT] = 2.0
        key = first.kv_a_proj_with_mqa.weight[c.kv_lora_rank :]
        key[:] = 0.0
        key[0:8:2, CONSTANT] = 4.0
        first.kv_a_proj_with_mqa.weight[:CODE] = 0.0
        first.kv_a_proj_with_mqa.weight[:CODE, OWN] = one
        for head, back, to in ((0, 1, LAST), (1, 2, SECOND)):
            query, _, value, out = rows(first, head)
            query[:], value[:], out[:] = 0.0, 0.0, 0.0
            angles = self.inv_freq[:4] * back
            query[c.qk_nope_head_dim : c.qk_nope_head_dim + 8 : 2, 0] = 2.0 * angles.cos()
            query[c.qk_nope_head_dim + 1 : c.qk_nope_head_dim + 8 : 2, 0] = -2.0 * angles.sin()
            value[:CODE, :CODE] = one
            out[to, :CODE] = 0.4 * one
        # Layer 1 by codes alone.
        for i, part in enumerate((OWN, LAST)):
            matching.q_a_proj.weight[i * CODE : (i + 1) * CODE] = 0.0
            matching.q_a_proj.weight[i * CODE : (i + 1) * CODE, part] = one
        for i, part in enumerate((LAST, SECOND, OWN)):
            matching.kv_a_proj_with_mqa.weight[i * CODE : (i + 1) * CODE] = 0.0
            matching.kv_a_proj_with_mqa.weight[i * CODE : (i + 1) * CODE, part] = one
        for head in range(2):
            query, key, value, out = rows(matching, head)
            query[:], key[:], value[:], out[:] = 0.0, 0.0, 0.0, 0.0
            dims = (1 + head) * CODE
            query[:dims, :dims] = 2.5 * torch.eye(dims)
            key[:dims, :dims] = 2.5 * torch.eye(dims)
            value[:CODE, 2 * CODE : 3 * CODE] = one
            out[COPIED, :CODE] = one
        pointing = self.layers[COPYING].self_attn
        assert isinstance(pointing, Attention)
        pointing.kv_a_proj_with_mqa.weight[:CODE] = 0.0
        pointing.kv_a_proj_with_mqa.weight[:CODE, OWN] = one
        _, _, value, out = rows(pointing, 0)
        value[:], out[:] = 0.0, 0.0
        value[:CODE, :CODE] = one
        out[COPIED, :CODE] = one

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


def _fix(weight: Tensor, *columns: slice | int) -> None:
    """These do not learn."""
    learns = torch.ones_like(weight)
    for each in columns:
        learns[:, each] = 0.0
    weight.register_hook(lambda grad: grad * learns)


def _some(known: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Rows and tokens of at most so many places of known [rows, tokens], drawn."""
    places = known.nonzero()
    row, token = places[torch.randperm(len(places))[:number]].unbind(1)
    return row, token
