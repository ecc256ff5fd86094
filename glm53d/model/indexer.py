"""The DSA indexer of a full layer: which index_topk tokens each query attends to, here and on shared layers behind."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.config import ModelConfig
from glm53d.model.kv_cache import Rows
from glm53d.model.layers import rotate
from glm53d.model.step import Causal, Gathered, Group, parts
from glm53d.model.weights import Checkpoint

READ_ONCE = 8  # a context of so many times what is chosen costs about as much to read as a list for each of its queries
K_NORM_EPS = 1e-6  # a LayerNorm with an eps of its own, not the config's


class Indexer:
    """Scores every visible token by sum_h w_h relu(q_h . k) and keeps the best.

    Of equal scores the lower position wins, so a choice depends on nothing but the scores.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str):
        self.heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.topk = config.index_topk
        self.k_norm_weight = checkpoint.read(prefix + "k_norm.weight")
        self.k_norm_bias = checkpoint.read(prefix + "k_norm.bias")

    def key(self, k: Tensor, angles: Tensor) -> Tensor:
        """What is cached of a token: [num_tokens, head_dim], rope on its first part."""
        k = F.layer_norm(k, (self.head_dim,), self.k_norm_weight, self.k_norm_bias, K_NORM_EPS)
        return self._rotated(k[:, None], angles)[:, 0]

    def choose(self, groups: list[Group], q: Tensor, w: Tensor, angles: Tensor, keys: Rows) -> list[Group]:
        """Narrow each group to the best tokens of each query.

        Args:
            groups: with all visible tokens.
            q: [num_tokens, heads * head_dim], not yet rotated.  w: [num_tokens, heads].
            keys: the layer's cached keys, those of this step included.
        """
        if all(group.locs.shape[-1] <= self.topk for group in groups):
            return groups  # everything visible is chosen; nothing needs a score
        q = self._rotated(q.unflatten(-1, (self.heads, self.head_dim)), angles).float()
        w = w.float()[:, None] * (self.heads * self.head_dim) ** -0.5  # of q . k and of the sum
        return [self._narrowed(group, q[group.tokens], w[group.tokens], keys) for group in groups]

    def _narrowed(self, group: Group, q: Tensor, w: Tensor, keys: Rows) -> Group:
        num_keys = group.locs.shape[-1]
        if num_keys <= self.topk:
            return group
        first = 0
        if isinstance(group, Causal):  # the first queries see no more than is chosen
            first = min(max(0, self.topk - group.prefix_len), len(q))
            if num_keys <= READ_ONCE * self.topk:
                return self._with_others_hidden(group, q, w, keys, first)
        chosen = torch.full((len(q), self.topk), -1, device=q.device)
        if isinstance(group, Causal):
            every = torch.arange(self.topk, device=q.device)
            position = torch.arange(group.prefix_len, group.prefix_len + first, device=q.device)
            chosen[:first] = torch.where(every <= position[:, None], every, -1)
        for part, scores in self._scored(group, q, w, keys, first):
            best = top_positions(scores, self.topk)
            chosen[part, : best.shape[1]] = best
        hidden = torch.zeros_like(chosen, dtype=keys.dtype).masked_fill_(chosen < 0, -torch.inf)
        return Gathered(group.tokens, group.locs_of(chosen.clamp_min(0)), hidden[:, None])

    def _with_others_hidden(self, group: Causal, q: Tensor, w: Tensor, keys: Rows, first: int) -> Causal:
        num_keys = len(group.locs)
        position = torch.arange(group.prefix_len, num_keys, device=q.device)
        hidden = torch.arange(num_keys, device=q.device) > position[:, None]
        for part, scores in self._scored(group, q, w, keys, first):
            ranks = ranked(scores)
            hidden[part, : scores.shape[1]] |= ranks < largest(ranks, self.topk)
        return Causal(group.tokens, group.prefix_len, group.locs, hidden)

    def _scored(self, group: Group, q: Tensor, w: Tensor, keys: Rows, first: int) -> Iterator[tuple[slice, Tensor]]:
        """Queries from the first on, in parts, with [queries, keys] scores."""
        for part in parts(len(q), group.locs.shape[-1] * max(self.heads, self.head_dim), first):
            seen, bias = group.rows(part, keys).float(), group.bias(part, torch.float32)
            dots = torch.matmul(q[part], seen.transpose(-1, -2))  # [queries, heads, keys]
            yield part, torch.baddbmm(bias, w[part], dots.relu_())[:, 0]

    def _rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        return torch.cat([rotate(x[..., : self.rope_dim], angles), x[..., self.rope_dim :]], -1)


def ranked(scores: Tensor) -> Tensor:
    """int64 of the order of scores [queries, keys], of equal ones the lower position first: no two are equal.

    A top-k kernel breaks ties as it likes. So score and position become one integer: the float's bits, made to order
    like an integer, above the complement of the position. A stable sort is 8 times slower at 16K scores.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which is its equal and must be so in bits
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.long() << 32 | (0xFFFFFFFF - torch.arange(scores.shape[1], device=scores.device))


def top_positions(scores: Tensor, k: int) -> Tensor:
    """Positions of the (at most) k best scores of each row, best first, of equals the lowest; -1 where that is -inf."""
    best = ranked(scores).topk(min(k, scores.shape[1]), dim=1).values
    return torch.where(best >> 32 == NEGATIVE_INFINITY, -1, 0xFFFFFFFF - (best & 0xFFFFFFFF))


def largest(ranks: Tensor, k: int) -> Tensor:
    """[queries, 1]: the k-th largest of each row."""
    if ranks.device.type == "cpu":  # in a tenth of topk's time
        return torch.from_numpy(np.partition(ranks.numpy(), -k, axis=1)[:, -k, None])
    return ranks.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)


NEGATIVE_INFINITY = -0x7F800001  # the bits of -inf, made to order like an integer
