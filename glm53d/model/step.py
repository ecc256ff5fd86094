"""Step: one flat batch as the model sees it, with its tokens grouped by the form of attention that suits them.

A row that computes a few tokens goes with its neighbours into one Absorbed group: every token is a query of its own and
gathers the KV rows it looks at. A row that computes many is an Expanded group: its whole context is read once, as keys
and values, for all of its queries.

A group also says which tokens its queries look at. It starts with all of them; a full layer's indexer narrows it, and
the shared layers behind take the narrowed one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glm53d.model.kv_cache import KvCache

MAX_ABSORBED_LEN = 8  # tokens of a row; above, reading the context once for all queries is cheaper than once per query
MAX_ELEMENTS = 1 << 24  # of any temporary array: 64 MB in float32, whatever the prompt's length


@dataclass(slots=True, eq=False)
class Absorbed:
    """Queries of any rows, each with its own list of KV rows."""

    tokens: slice
    locs: Tensor  # [num_queries, num_keys]; where bias is -inf, a row of the same request
    bias: Tensor  # [num_queries, 1, num_keys] added to scores: 0, or -inf for what a query does not see


@dataclass(slots=True, eq=False)
class Expanded:
    """The queries of one row, at positions prefix_len, prefix_len + 1, ..."""

    tokens: slice
    prefix_len: int
    locs: Tensor  # [seq_len]: all KV rows of the request, by position
    chosen: Tensor | None = None  # [num_queries, topk] positions, -1 for none; None: each query sees all up to itself

    def bias(self, part: slice, dtype: torch.dtype) -> Tensor:
        """[queries of part, seen] like Absorbed.bias, `seen` being the tokens up to the last of these queries."""
        seen, device = self.prefix_len + part.stop, self.locs.device
        if self.chosen is None:
            position = torch.arange(self.prefix_len + part.start, seen, device=device)
            ahead = torch.arange(seen, device=device) > position[:, None]
            return torch.zeros(ahead.shape, dtype=dtype, device=device).masked_fill_(ahead, -torch.inf)
        chosen = self.chosen[part]
        bias = torch.full((len(chosen), seen + 1), -torch.inf, dtype=dtype, device=device)
        bias.scatter_(1, torch.where(chosen < 0, seen, chosen), 0.0)  # column `seen` takes the -1s and is cut off
        return bias[:, :seen]


Group = Absorbed | Expanded


@dataclass(slots=True, eq=False)
class Step:
    """Inputs of one forward pass. All tensors are int64 on the model's device."""

    input_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    out_cache_loc: Tensor  # [num_tokens]
    logits_idx: Tensor  # [num_logits] tokens whose logits are wanted
    groups: list[Group]


def plan_step(
    cache: KvCache,
    input_ids: Tensor,
    slots: np.ndarray,
    prefix_len: np.ndarray,
    extend_len: np.ndarray,
    wants_logits: np.ndarray,
) -> Step:
    """Lay out rows of one step: row i computes extend_len[i] tokens behind prefix_len[i] in request slot slots[i].

    Args:
        cache: its block tables already hold the pages of all tokens up to prefix_len + extend_len.
        input_ids: [num_tokens] int64 on the device, row after row.
        wants_logits: [num_rows] bool: the row's last token needs logits.
    """
    device = input_ids.device
    ends = np.cumsum(extend_len)
    token_slot = np.repeat(slots, extend_len)
    positions = np.arange(len(token_slot)) - np.repeat(ends - extend_len - prefix_len, extend_len)
    host = torch.from_numpy(np.stack([token_slot, positions]).astype(np.int64))
    slot, position = host.to(device)
    logits_idx = torch.from_numpy((ends[wants_logits] - 1).astype(np.int64)).to(device)
    groups: list[Group] = []
    for rows in _runs(extend_len):
        tokens = slice(int(ends[rows.start] - extend_len[rows.start]), int(ends[rows.stop - 1]))
        if extend_len[rows.start] <= MAX_ABSORBED_LEN:
            longest = int(positions[tokens].max()) + 1
            groups.append(_absorbed(cache, tokens, slot[tokens], position[tokens], longest))
        else:
            prefix, seq_len = int(prefix_len[rows.start]), int(prefix_len[rows.start] + extend_len[rows.start])
            groups.append(Expanded(tokens, prefix, cache.locs(slot[tokens.start], seq_len)))
    return Step(input_ids, position, cache.locs_at(slot, position), logits_idx, groups)


def parts(num_queries: int, elements_per_query: int) -> Iterator[slice]:
    """Cut queries so that a temporary array of elements_per_query each stays under MAX_ELEMENTS."""
    size = max(1, MAX_ELEMENTS // elements_per_query)
    return (slice(start, min(start + size, num_queries)) for start in range(0, num_queries, size))


def _runs(extend_len: np.ndarray) -> Iterator[slice]:
    """Rows of one group: neighbours with few tokens together, each row with many alone."""
    start = 0
    for row, length in enumerate(extend_len):
        if length > MAX_ABSORBED_LEN:
            if start < row:
                yield slice(start, row)
            yield slice(row, row + 1)
            start = row + 1
    if start < len(extend_len):
        yield slice(start, len(extend_len))


def _absorbed(cache: KvCache, tokens: slice, slot: Tensor, position: Tensor, longest: int) -> Absorbed:
    locs = cache.locs(slot, longest)
    ahead = torch.arange(longest, device=locs.device) > position[:, None]
    # What a query does not see still enters a product with weight 0, and 0 * nan is nan: so it must be its own row.
    locs = torch.where(ahead, locs[:, :1], locs)
    bias = torch.zeros(ahead.shape, dtype=cache.latent[0].dtype, device=locs.device).masked_fill_(ahead, -torch.inf)
    return Absorbed(tokens, locs, bias[:, None])
