"""Step: one flat batch as the model sees it, its tokens in groups that say which KV rows each of them looks at.

    Gathered    each query has its own list of rows: the tokens of rows that compute a few, decoding above all
    Causal      the queries of one row that computes many: all of its context, up to each query's own position

At the start of a step a query looks at its whole context. A full layer's indexer narrows groups with more context than
it chooses: to Gathered, or Causal to Causal that hides the others, where reading a list for each query would cost more
than reading everything once. The shared layers behind it take the narrowed ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.kv_cache import KvCache, Rows

MAX_GATHERED_LEN = 8  # tokens of a row; above, its context is read once for all of them instead of once for each
MAX_ELEMENTS = 1 << 24  # of any temporary array: 64 MB in float32, whatever the prompt's length


@dataclass(slots=True, eq=False)
class Gathered:
    """Queries, each with its own list of KV rows."""

    tokens: slice
    locs: Tensor  # [num_queries, num_keys]; where hidden, a row of the same request
    hidden: Tensor  # [num_queries, 1, num_keys] of the model's dtype: 0, or -inf for what a query does not see

    def rows(self, part: slice, pool: Rows) -> Tensor:
        """What queries of a part look at in a layer's pool: [queries, num_keys, width]."""
        return pool.read(self.locs[part])

    def bias(self, part: slice, dtype: torch.dtype) -> Tensor:
        """Added to the part's scores: 0, or -inf for what a query does not see. [queries, 1, num_keys]."""
        return self.hidden[part].to(dtype)

    def locs_of(self, chosen: Tensor) -> Tensor:
        """KV rows of keys chosen per query, [num_queries, topk] like `chosen`."""
        return self.locs.gather(1, chosen)


@dataclass(slots=True, eq=False)
class Causal:
    """The queries of one row, at positions prefix_len, prefix_len + 1, ...; each sees all tokens up to itself, or
    those of them that an indexer has chosen.

    The methods are Gathered's, but a part's rows are [seen, width]: those up to its last query, once for all of it.
    """

    tokens: slice
    prefix_len: int
    locs: Tensor  # [seq_len]: the row's KV rows by position
    hidden: Tensor | None = None  # [num_queries, seq_len] bool: what an indexer has not chosen, or is ahead

    def rows(self, part: slice, pool: Rows) -> Tensor:
        return pool.read(self.locs[: self.prefix_len + part.stop])

    def bias(self, part: slice, dtype: torch.dtype) -> Tensor:
        seen, device = self.prefix_len + part.stop, self.locs.device
        if self.hidden is not None:
            hidden = self.hidden[part, :seen]
        else:
            position = torch.arange(self.prefix_len + part.start, seen, device=device)
            hidden = torch.arange(seen, device=device) > position[:, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]

    def locs_of(self, chosen: Tensor) -> Tensor:
        return self.locs[chosen]


Group = Gathered | Causal


@dataclass(slots=True, eq=False)
class Split:
    """A step in which all attention-DP groups compute one row's tokens, a slice each; the owner keeps the row's KV.

    The step's groups then index the row by position: each layer's rows go around, from the owner's pool to all.
    """

    owner: int  # the attention-DP rank
    locs: Tensor  # [seq_len]: the row's KV rows by position, in the owner's pool
    num_new: int  # the last of them are written in this step


@dataclass(slots=True, eq=False)
class Step:
    """Inputs of one forward pass. All tensors are int64 on the model's device."""

    input_ids: Tensor  # [sum(dp_num_tokens)]: of all attention-DP groups; what follows is of this rank's own
    dp_num_tokens: list[int]  # of each group
    dp_num_logits: list[int]
    positions: Tensor  # [num_tokens]
    out_cache_loc: Tensor  # [num_tokens]
    logits_idx: Tensor  # [num_logits] tokens whose logits are wanted
    groups: list[Group]
    split: Split | None = None
    keeps_choice: bool = False  # the groups are what an indexer has chosen: none is asked, and none caches a key
    is_static: bool = False  # no size in it may depend on a value: it is captured into a graph


def plan_step(
    cache: KvCache,
    input_ids: Tensor,
    dp_num_tokens: list[int],
    dp_num_logits: list[int],
    slots: np.ndarray,
    prefix_len: np.ndarray,
    extend_len: np.ndarray,
    num_logits: np.ndarray,
) -> Step:
    """Lay out this rank's rows of one step: row i computes extend_len[i] tokens behind prefix_len[i] in slot slots[i].

    Args:
        cache: its block tables already hold the pages of all tokens up to prefix_len + extend_len.
        input_ids: [sum(dp_num_tokens)] int64 on the device, row after row, those of all attention-DP groups.
        num_logits: [num_rows]: so many of the row's last tokens need logits.
    """
    device = input_ids.device
    ends = np.cumsum(extend_len)
    token_slot = np.repeat(slots, extend_len)
    positions = np.arange(len(token_slot)) - np.repeat(ends - extend_len - prefix_len, extend_len)
    host = torch.from_numpy(np.stack([token_slot, positions]).astype(np.int64))
    slot, position = host.to(device)
    logits_idx = torch.from_numpy(last_tokens(ends, num_logits)).to(device)
    groups: list[Group] = []
    for rows in _runs(extend_len):
        tokens = slice(int(ends[rows.start] - extend_len[rows.start]), int(ends[rows.stop - 1]))
        if extend_len[rows.start] <= MAX_GATHERED_LEN:
            for part, longest in _cut(tokens, positions):
                groups.append(_gathered(cache, part, slot[part], position[part], longest))
        else:
            prefix, seq_len = int(prefix_len[rows.start]), int(prefix_len[rows.start] + extend_len[rows.start])
            groups.append(Causal(tokens, prefix, cache.locs(slot[tokens.start], seq_len)))
    locs = cache.locs_at(slot, position)
    return Step(input_ids, dp_num_tokens, dp_num_logits, position, locs, logits_idx, groups)


def plan_static(
    cache: KvCache, input_ids: Tensor, dp_num_tokens: list[int], slots: Tensor, positions: Tensor, context: int
) -> Step:
    """Lay out decoding tokens, each of which gives logits, in sizes that follow from the arguments' sizes alone.

    Args:
        slots, positions: [num_tokens] of this rank's, int64 on the device; no position is at or above context.
    """
    group = _gathered(cache, slice(0, len(slots)), slots, positions, context)
    every = torch.arange(len(slots), device=slots.device)
    locs = cache.locs_at(slots, positions)
    return Step(input_ids, dp_num_tokens, dp_num_tokens, positions, locs, every, [group], is_static=True)


def plan_split(
    cache: KvCache,
    input_ids: Tensor,
    dp_num_tokens: list[int],
    rank: int,
    owner: int,
    slot: int,
    prefix_len: int,
    *,
    wants_logits: bool,
) -> Step:
    """Lay out this rank's slice of the one row that all attention-DP groups compute; the last slice has its logits.

    Args: rank, owner: attention-DP ranks: this one's, and the row's. wants_logits: of the row's last token.
    """  # fmt: skip
    device, num_new = input_ids.device, len(input_ids)
    start = prefix_len + sum(dp_num_tokens[:rank])
    seq_len, mine = prefix_len + num_new, dp_num_tokens[rank]
    positions = torch.arange(start, start + mine, device=device)
    locs = cache.locs(torch.tensor(slot, device=device), seq_len)
    groups: list[Group] = [Causal(slice(0, mine), start, torch.arange(seq_len, device=device))] if mine else []
    has_last = wants_logits and rank == len(dp_num_tokens) - 1
    logits_idx = torch.tensor([mine - 1] if has_last else [], dtype=torch.int64, device=device)
    dp_num_logits = [int(wants_logits and i == owner) for i in range(len(dp_num_tokens))]
    split = Split(owner, locs, num_new)
    return Step(input_ids, dp_num_tokens, dp_num_logits, positions, locs[:0], logits_idx, groups, split)


def choice_of(groups: list[Group], tokens: list[int], room: int) -> Gathered:
    """What these tokens' queries look at, as queries of their own, with room for so many rows more, hidden as yet."""
    found: list[tuple[Tensor, Tensor]] = []  # locs and hidden, each [num_keys]
    for token in tokens:
        group = next(group for group in groups if group.tokens.start <= token < group.tokens.stop)
        at = token - group.tokens.start
        if isinstance(group, Gathered):
            found.append((group.locs[at], group.hidden[at, 0].float()))
        else:
            locs = group.locs[: group.prefix_len + at + 1]
            if group.hidden is not None:
                locs = locs[~group.hidden[at, : len(locs)]]
            found.append((locs, torch.zeros(len(locs), device=locs.device)))
    width = max(len(locs) for locs, _ in found) + room
    # What is hidden must be a row of the same request: see _gathered.
    locs = torch.stack([torch.cat([row, row[:1].expand(width - len(row))]) for row, _ in found])
    hidden = torch.stack([F.pad(row, (0, width - len(row)), value=-torch.inf) for _, row in found])
    return Gathered(slice(0, len(tokens)), locs, hidden[:, None])


def last_tokens(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Indices of the last counts[i] tokens before each ends[i], row after row, int64."""
    last = np.cumsum(counts)
    return np.arange(int(counts.sum())) + np.repeat(ends - last, counts)


def parts(num_queries: int, elements_per_query: int, first: int = 0, most: int = MAX_ELEMENTS) -> Iterator[slice]:
    """Cut queries, from the first on, so that a temporary array of elements_per_query each stays under MAX_ELEMENTS and
    none has more than `most`."""
    size = max(1, min(most, MAX_ELEMENTS // elements_per_query))
    return (slice(start, min(start + size, num_queries)) for start in range(first, num_queries, size))


def _runs(extend_len: np.ndarray) -> Iterator[slice]:
    """Rows of one group: neighbours with few tokens together, each row with many alone."""
    start = 0
    for row, length in enumerate(extend_len):
        if length > MAX_GATHERED_LEN:
            if start < row:
                yield slice(start, row)
            yield slice(row, row + 1)
            start = row + 1
    if start < len(extend_len):
        yield slice(start, len(extend_len))


def _cut(tokens: slice, positions: np.ndarray) -> Iterator[tuple[slice, int]]:
    """Cut queries so that those of a part, times the longest context among them, stay under MAX_ELEMENTS; and that."""
    longest = int(positions[tokens].max()) + 1
    if longest * (tokens.stop - tokens.start) <= MAX_ELEMENTS:  # nearly always
        yield tokens, longest
        return
    start = longest = 0
    for i, seen in enumerate((positions[tokens] + 1).tolist(), tokens.start):
        if longest and (i + 1 - start) * max(longest, seen) > MAX_ELEMENTS:
            yield slice(start, i), longest
            longest = 0
        start, longest = start if longest else i, max(longest, seen)
    yield slice(start, tokens.stop), longest


def _gathered(cache: KvCache, tokens: slice, slot: Tensor, position: Tensor, longest: int) -> Gathered:
    locs = cache.locs(slot, longest)
    ahead = torch.arange(longest, device=locs.device) > position[:, None]
    # What a query does not see still enters a product with weight 0, and 0 * nan is nan: so it must be its own row.
    locs = torch.where(ahead, locs[:, :1], locs)
    hidden = torch.zeros(ahead.shape, dtype=cache.dtype, device=locs.device).masked_fill_(ahead, -torch.inf)
    return Gathered(tokens, locs, hidden[:, None])
