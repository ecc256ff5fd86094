"""Batch: what one step runs on every rank, as arrays. Built by the scheduler, read by every runner. [R1]

    rows            one per request that computes in this step, ordered by attention-DP rank
      slot          the request's place in the device-side slot arrays (last id, block table, sampling parameters)
      prefix_len    tokens whose KV exists          extend_len   tokens computed now: input_ids has them, row after row
      flags         ROW_SAMPLE: sample after the row's last token.  ROW_FEED: its inputs are the slot's last sampled id
                    and, behind it, the slot's drafts; then each of them is sampled after
    mode            DP: each row is computed by its own attention-DP rank.  CP: the one row, a prompt's, is computed by
                    all of them, each so many of its tokens as dp_num_tokens says; its KV stays with its own rank
    inits           sampling parameters of slots that a new request takes; applied before the step
    runs            pages appended to block tables before the step: block_table[slot, start : start + count] = pages

A position's KV slot is block_table[slot, position // page_size] * page_size + position % page_size, so out_cache_loc
and positions follow from the rows and are not sent. Records carry slots, not token values: what was sampled stays on
the device.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from glm53d.ipc.records import BATCH, RESULT, SLOT_INIT, align8, padded

I32 = np.dtype(np.int32)


def _empty(dtype: np.dtype = I32) -> np.ndarray:
    return np.empty(0, dtype)


class Mode(IntEnum):
    """How attention is spread over the attention-DP ranks; the numbers are those of the record."""

    DP = 0
    CP = 2


@dataclass(slots=True, eq=False)
class Batch:
    """One step. All arrays are int32 and one-dimensional unless said; owned by the scheduler until the next one."""

    step: int
    world_id: int
    row_slot: np.ndarray = field(default_factory=_empty)
    row_dp_rank: np.ndarray = field(default_factory=_empty)
    row_prefix_len: np.ndarray = field(default_factory=_empty)
    row_extend_len: np.ndarray = field(default_factory=_empty)
    row_flags: np.ndarray = field(default_factory=_empty)
    input_ids: np.ndarray = field(default_factory=_empty)  # [num_tokens]; -1 in a ROW_FEED row
    inits: np.ndarray = field(default_factory=lambda: _empty(SLOT_INIT))
    run_slot: np.ndarray = field(default_factory=_empty)
    run_start: np.ndarray = field(default_factory=_empty)
    run_count: np.ndarray = field(default_factory=_empty)
    pages: np.ndarray = field(default_factory=_empty)  # [sum(run_count)]
    dp_num_tokens: np.ndarray = field(default_factory=_empty)  # [attn_dp_size]: that each computes
    mode: Mode = field(default=Mode.DP, kw_only=True)

    @property
    def num_rows(self) -> int:
        return len(self.row_slot)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def encode(self) -> bytes:
        """The record as it stands in the batch ring."""
        head = np.zeros((), BATCH)
        head["step"], head["world_id"] = self.step, self.world_id
        head["num_rows"], head["num_tokens"] = self.num_rows, self.num_tokens
        head["num_inits"], head["num_runs"], head["num_pages"] = len(self.inits), len(self.run_slot), len(self.pages)
        head["attn_dp_size"], head["mode"] = len(self.dp_num_tokens), self.mode
        return b"".join([head.tobytes(), *(padded(array.tobytes()) for array in self._tail())])

    def _tail(self) -> list[np.ndarray]:
        return [
            self.row_slot, self.row_dp_rank, self.row_prefix_len, self.row_extend_len, self.row_flags, self.input_ids,
            self.inits, self.run_slot, self.run_start, self.run_count, self.pages, self.dp_num_tokens,
        ]  # fmt: skip

    @classmethod
    def decode(cls, data: bytes | np.ndarray) -> "Batch":
        """Inverse of encode. The arrays are views of data."""
        head = np.frombuffer(data, BATCH, 1)[0]
        rows, runs = int(head["num_rows"]), int(head["num_runs"])
        lengths = [rows, rows, rows, rows, rows, int(head["num_tokens"]), int(head["num_inits"]), runs, runs, runs,
                   int(head["num_pages"]), int(head["attn_dp_size"])]  # fmt: skip
        arrays, offset = [], BATCH.itemsize
        for i, length in enumerate(lengths):
            dtype = SLOT_INIT if i == 6 else I32
            arrays.append(np.frombuffer(data, dtype, length, offset))
            offset += align8(length * dtype.itemsize)
        return cls(int(head["step"]), int(head["world_id"]), *arrays, mode=Mode(int(head["mode"])))


@dataclass(slots=True, eq=False)
class StepResult:
    """What one step sampled.

    Row i of the batch gave ids[i, :counts[i]]; counts is 0 for a row without ROW_SAMPLE and for a row whose KV another
    attention-DP rank owns.
    """

    step: int
    counts: np.ndarray  # [num_rows] int32
    ids: np.ndarray  # [num_rows, width] int32, width = 1 + the most draft tokens
    start_ns: int = 0
    end_ns: int = 0

    def encode(self, world_id: int) -> bytes:
        """The record as it stands in a result ring."""
        head = np.zeros((), RESULT)
        head["step"], head["world_id"] = self.step, world_id
        head["start_ns"], head["end_ns"] = self.start_ns, self.end_ns
        head["num_rows"], head["width"] = self.ids.shape
        return b"".join([head.tobytes(), padded(self.counts.tobytes()), self.ids.tobytes()])

    @classmethod
    def decode(cls, data: bytes) -> "StepResult":
        """Inverse of encode. The arrays are read-only views of data."""
        head = np.frombuffer(data, RESULT, 1)[0]
        rows, width = int(head["num_rows"]), int(head["width"])
        counts = np.frombuffer(data, I32, rows, RESULT.itemsize)
        ids = np.frombuffer(data, I32, rows * width, RESULT.itemsize + align8(rows * 4)).reshape(rows, width)
        return cls(int(head["step"]), counts, ids, int(head["start_ns"]), int(head["end_ns"]))
