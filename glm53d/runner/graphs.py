"""Decoding steps of a few fixed shapes, captured once and replayed: what a CUDA graph needs. [R34]

A graph repeats the kernels of its capture, at the same addresses and with the same sizes. So a step that only decodes
is padded to the next of a few sizes and computed from static buffers; all that is sent for it is the slot of each row:

    slots [groups * rows]     last ids, drafts and lengths are read on the device, at these slots
    padding rows              have a slot of their own, whose block table names a page of its own: what they write there
                              nobody reads, and nobody else's numbers change, as a row looks at no other

Every group gets the same number of rows, idle ones too, so that collectives have equal sizes; a group's rows come
first, then its padding. choose() looks at the Batch alone: all ranks take the same graph, and capture it in one step.

On the CPU nothing is gained by this, so there it serves tests alone: Eager runs what it was given, again and again,
into the same outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from glm53d.model.glm import Glm
from glm53d.model.kv_cache import KvCache
from glm53d.model.layout import Layout
from glm53d.model.step import plan_static
from glm53d.runner.rows import Rows

ROW_BUCKETS = (1, 2, 4, 8, 12, *range(16, 257, 8))
LEAST_CONTEXT = 256
MAX_ELEMENTS = 1 << 24  # of what a step gathers, rows times context: a step of more runs as it is


@dataclass(frozen=True, slots=True)
class Key:
    """What a graph is captured for."""

    num_rows: int  # of each attention-DP group
    context: int  # that each row can have


def choose(rows: Rows, decode_len: int, max_context: int) -> Key | None:
    """The graph that a step is padded to, or None: it computes prompts, nothing at all, or more than any graph has.

    max_context: of the block tables. decode_len: tokens that a decoding row computes.
    """
    if not len(rows.fed) or not (rows.fed & (rows.extend_len == decode_len)).all():
        return None
    most = max(rows.dp_num_tokens) // decode_len
    num_rows = next((size for size in ROW_BUCKETS if size >= most), None)
    longest = int(rows.seq_len.max())
    context = min(max(LEAST_CONTEXT, 1 << (longest - 1).bit_length()), max_context)
    if num_rows is None or num_rows * decode_len * context > MAX_ELEMENTS:
        return None
    return Key(num_rows, context)


class Backend(Protocol):
    """How a body is made repeatable."""

    def capture(self, body: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Run it once; gives what repeats it, and its outputs, which each repetition fills anew."""
        ...


class Eager:
    """Repeats by running again."""

    def capture(self, body: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """See Backend."""
        outputs = body()

        def replay() -> None:
            for output, new in zip(outputs, body(), strict=True):
                output.copy_(new)

        return replay, outputs


class CudaGraphs:
    """CUDA graphs that share one pool of memory, as only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one for all: libraries keep a workspace for each

    def capture(self, body: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """See Backend. A first run outside of the capture makes the libraries' own buffers."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of page files wait for events meanwhile, which a capture that concerns all threads would not survive.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            outputs = body()
        graph.replay()  # a capture records and does not run
        return graph.replay, outputs


@dataclass(slots=True, eq=False)
class SlotState:
    """What the device knows of each request slot; a step is told slots, not values. The last slot is for padding."""

    last_id: Tensor  # [max_slots + 1] int64: sampled, and not computed yet
    length: Tensor  # [max_slots + 1] int64: tokens so far, that one included
    drafts: Tensor  # [max_slots + 1, k] int64

    @classmethod
    def zeros(cls, max_slots: int, num_drafts: int, device: torch.device) -> "SlotState":
        """A padding row computes id 0 at position 0."""
        last_id, length = (torch.zeros(max_slots + 1, dtype=torch.int64, device=device) for _ in range(2))
        length[max_slots] = 1
        return cls(last_id, length, torch.zeros(max_slots + 1, num_drafts, dtype=torch.int64, device=device))

    def inputs(self, slots: Tensor) -> Tensor:
        """[len(slots), 1 + k]: the last id of each, and its drafts."""
        return torch.cat([self.last_id[slots, None], self.drafts[slots]], 1)


class Graphs:
    """The graphs of one runner, captured when first wanted."""

    def __init__(
        self, backend: Backend, model: Glm, cache: KvCache, state: SlotState, layout: Layout,
        to_device: Callable[[np.ndarray], Tensor],
    ):  # fmt: skip
        """cache: its last page, and the last slot of its block table, are for padding rows."""
        self._to_device = to_device
        self._backend, self._model, self._cache, self._state, self._layout = backend, model, cache, state, layout
        self._padding_slot = len(state.last_id) - 1
        cache.block_table[self._padding_slot] = cache.num_pages - 1
        self._decode_len = 1 + state.drafts.shape[1]
        self._max_context = cache.block_table.shape[1] * cache.page_size
        self._captured: dict[Key, tuple[Tensor, Callable[[], None], list[Tensor]]] = {}
        self._outputs: list[Tensor] = []  # of all graphs: each its own would be gigabytes of logits

    def choose(self, rows: Rows) -> Key | None:
        """See choose above."""
        return choose(rows, self._decode_len, self._max_context)

    def run(self, key: Key, rows: Rows) -> tuple[Tensor, Tensor]:
        """Compute a step that choose has given a graph.

        Returns:
            hidden: [num_tokens, hidden] of this group's tokens, behind the last norm.
            logits: [num_tokens, vocab_size] of them, float32, at the rank that owns its group's rows; elsewhere none.
            Both are static: the next step of any graph overwrites them.
        """
        slots = self._to_device(padded_slots(rows, key.num_rows, self._padding_slot, self._layout.attn_dp_size))
        if key in self._captured:
            static, replay, outputs = self._captured[key]
            static.copy_(slots)
            replay()
        else:
            static = slots
            replay, outputs = self._backend.capture(lambda: self._body(key, static))
            self._captured[key] = static, replay, outputs
        hidden, logits = outputs
        num_tokens = rows.dp_num_tokens[self._layout.attn_dp_rank]
        return hidden[:num_tokens], logits[:num_tokens]

    def _body(self, key: Key, slots: Tensor) -> list[Tensor]:
        """A step whose every size follows from the key."""
        rank, groups = self._layout.attn_dp_rank, self._layout.attn_dp_size
        own = slots[rank * key.num_rows : (rank + 1) * key.num_rows]
        first = self._state.length[own] - 1
        positions = (first[:, None] + torch.arange(self._decode_len, device=slots.device)).flatten()
        counts = [key.num_rows * self._decode_len] * groups
        input_ids, token_slots = self._state.inputs(slots).flatten(), own.repeat_interleave(self._decode_len)
        step = plan_static(self._cache, input_ids, counts, token_slots, positions, key.context)
        hidden = self._model.norm(self._model.forward(step, self._cache))
        made = [hidden, self._model.logits(hidden, counts)]
        if not self._outputs:  # outside of a capture, as every body is run before its own
            most_rows = next(size for size in ROW_BUCKETS if size >= min(self._padding_slot, ROW_BUCKETS[-1]))
            most = most_rows * self._decode_len
            self._outputs = [rows.new_empty(most if len(rows) else 0, rows.shape[1]) for rows in made]
        return [output[: len(rows)].copy_(rows) for output, rows in zip(self._outputs, made, strict=True)]


def padded_slots(rows: Rows, num_rows: int, padding_slot: int, attn_dp_size: int) -> np.ndarray:
    """[attn_dp_size * num_rows] int64: each group's slots, then padding."""
    slots = np.full((attn_dp_size, num_rows), padding_slot, np.int64)
    start = 0
    for group, count in enumerate(_rows_of_groups(rows)):
        slots[group, :count] = rows.slot[start : start + count]
        start += count
    return slots.reshape(-1)


def _rows_of_groups(rows: Rows) -> Sequence[int]:
    """How many rows each group has, of a step in which all have equally many tokens."""
    return [count // int(rows.extend_len[0]) for count in rows.dp_num_tokens]
