"""Batch: what one step runs on every rank, as arrays. Built by the scheduler, read by every runner. [R1]

    rows            one per request that computes in this step, ordered by attention-DP rank
      slot          the request's place in the device-side slot arrays (last id, block table, sampling parameters)
      prefix_len    tokens whose KV exists          extend_len   tokens computed now: input_ids has them, row after row
      flags         ROW_SAMPLE: sample after the row's last token.  ROW_FEED: its inputs are the slot's last sampled id
                    and, behind it, the slot's drafts; then each of them is sampled after
    mode            DP: each row is computed by its own attention-DP rank.  CP: the one row, a prompt's, is computed by
                    all of them, each so many of its tokens as dp_num_tokens says; its KV stays with its own rank
    inits           sampling parameters of slots that a new request takes; applied before the step
    tables          of new slots that bias or penalise ids, the rows of the sampling tables, and behind them as triples
                    (row, id, value) what these begin with: bias_*, and said_*, whose value is twice the times that
                    the id was put out, plus 1 if it is in the prompt and that counts
    top_logprobs    of each row: how many of the likeliest ids its answer names beside each token's own, -1: it has not
                    asked for logprobs; empty: no row has
    targets         of each token of the step: the prompt's next one, where its logprob is asked for, else -1; empty:
                    nowhere
    moves           pages between tiers and ranks: PAGE_MOVE records, those that end with the step first
    masks           of rows whose next id a grammar narrows: which ids are legal as the first that the row samples, and
                    then nothing is sampled behind it; mask_row says whose each is
    runs            pages appended to block tables before the step: block_table[slot, start : start + count] = pages

A position's KV slot is block_table[slot, position // page_size] * page_size + position % page_size, so out_cache_loc
and positions follow from the rows and are not sent. Records carry slots, not token values: what was sampled stays on
the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from glm53d.ipc.records import BATCH, LOGPROB, PAGE_MOVE, RESULT, SLOT_INIT, TABLE_INIT, Packer, align8, padded

I32, F32 = np.dtype(np.int32), np.dtype(np.float32)
_head = Packer(BATCH)


def _empty(dtype: np.dtype = I32) -> Callable[[], np.ndarray]:
    """Gives the same array to every batch, as most parts of most batches are empty; nobody writes to it."""
    array = np.empty(0, dtype)
    array.flags.writeable = False
    return lambda: array


_NONE, _NO_MASKS = _empty(), _empty()().reshape(0, 0)


class Mode(IntEnum):
    """How attention is spread over the attention-DP ranks; the numbers are those of the record."""

    DP = 0
    CP = 2


@dataclass(slots=True, eq=False)
class Batch:
    """One step. All arrays are int32 and one-dimensional unless said; owned by the scheduler until the next one."""

    step: int
    world_id: int
    row_slot: np.ndarray = field(default_factory=_NONE)
    row_dp_rank: np.ndarray = field(default_factory=_NONE)
    row_prefix_len: np.ndarray = field(default_factory=_NONE)
    row_extend_len: np.ndarray = field(default_factory=_NONE)
    row_flags: np.ndarray = field(default_factory=_NONE)
    input_ids: np.ndarray = field(default_factory=_NONE)  # [num_tokens]; -1 in a ROW_FEED row
    inits: np.ndarray = field(default_factory=_empty(SLOT_INIT))
    run_slot: np.ndarray = field(default_factory=_NONE)
    run_start: np.ndarray = field(default_factory=_NONE)
    run_count: np.ndarray = field(default_factory=_NONE)
    pages: np.ndarray = field(default_factory=_NONE)  # [sum(run_count)]
    dp_num_tokens: np.ndarray = field(default_factory=_NONE)  # [attn_dp_size]: that each computes
    tables: np.ndarray = field(default_factory=_empty(TABLE_INIT))
    bias_row: np.ndarray = field(default_factory=_NONE)
    bias_id: np.ndarray = field(default_factory=_NONE)
    bias: np.ndarray = field(default_factory=_empty(F32))
    said_row: np.ndarray = field(default_factory=_NONE)
    said_id: np.ndarray = field(default_factory=_NONE)
    said: np.ndarray = field(default_factory=_NONE)
    top_logprobs: np.ndarray = field(default_factory=_NONE)  # [num_rows] or [0]
    targets: np.ndarray = field(default_factory=_NONE)  # [num_tokens] or [0]
    moves: np.ndarray = field(default_factory=_empty(PAGE_MOVE))
    mask_row: np.ndarray = field(default_factory=_NONE)  # ascending
    # [len(mask_row), words]: bit i of word w says that id 32 w + i is legal
    masks: np.ndarray = field(default_factory=lambda: _NO_MASKS)
    mode: Mode = field(default=Mode.DP, kw_only=True)
    wait_us: int = field(default=0, kw_only=True)  # how long its result may wait for a file: nothing is computed

    @property
    def num_rows(self) -> int:
        return len(self.row_slot)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def encode(self) -> bytes:
        """The record as it stands in the batch ring."""
        num_masks, mask_words = self.masks.shape
        head = _head(
            step=self.step, world_id=self.world_id, num_rows=self.num_rows, num_tokens=self.num_tokens,
            num_inits=len(self.inits), num_runs=len(self.run_slot), num_pages=len(self.pages),
            num_tables=len(self.tables), num_bias=len(self.bias), num_said=len(self.said),
            attn_dp_size=len(self.dp_num_tokens), mode=self.mode, num_top_logprobs=len(self.top_logprobs),
            num_targets=len(self.targets), num_moves=len(self.moves), wait_us=self.wait_us,
            num_masks=num_masks, mask_words=mask_words,
        )  # fmt: skip
        return b"".join([head, *(padded(array.tobytes()) for array in self._tail() if array.size)])

    def _tail(self) -> list[np.ndarray]:
        return [
            self.row_slot, self.row_dp_rank, self.row_prefix_len, self.row_extend_len, self.row_flags, self.input_ids,
            self.inits, self.run_slot, self.run_start, self.run_count, self.pages, self.dp_num_tokens,
            self.tables, self.bias_row, self.bias_id, self.bias, self.said_row, self.said_id, self.said,
            self.top_logprobs, self.targets, self.moves, self.mask_row, self.masks,
        ]  # fmt: skip

    @classmethod
    def decode(cls, data: bytes | np.ndarray) -> "Batch":
        """Inverse of encode. The arrays are views of data."""
        head = _head.unpack(data if isinstance(data, bytes) else data.data)
        rows, runs, tables, bias, said, masks = (
            head[f"num_{name}"] for name in ("rows", "runs", "tables", "bias", "said", "masks")
        )
        lengths = [rows, rows, rows, rows, rows, head["num_tokens"], head["num_inits"], runs, runs, runs,
                   head["num_pages"], head["attn_dp_size"], tables, bias, bias, bias, said, said, said,
                   head["num_top_logprobs"], head["num_targets"], head["num_moves"],
                   masks, masks * head["mask_words"]]  # fmt: skip
        arrays, offset = [], BATCH.itemsize
        for length, empty in zip(lengths, _EMPTIES, strict=True):
            if length:
                arrays.append(np.frombuffer(data, empty.dtype, length, offset))
                offset += align8(length * empty.itemsize)
            else:
                arrays.append(empty)
        arrays[-1] = arrays[-1].reshape(masks, head["mask_words"])
        return cls(head["step"], head["world_id"], *arrays, mode=Mode(head["mode"]), wait_us=head["wait_us"])


_EMPTIES = Batch(0, 0)._tail()


@dataclass(slots=True, eq=False)
class Logprobs:
    """Of tokens of a step's rows, in order: the prompt's targets, then what was sampled."""

    rows: np.ndarray  # [n] int32, ascending: rows of the batch
    pairs: np.ndarray  # [n, width] LOGPROB: the token itself, then the likeliest ids; id -1 where a row asks for fewer


def join(ours: Logprobs | None, theirs: Logprobs | None) -> Logprobs | None:
    """Those of different rows in one; their widths are one step's."""
    if ours is None or theirs is None:
        return ours or theirs
    rows, pairs = np.concatenate([ours.rows, theirs.rows]), np.concatenate([ours.pairs, theirs.pairs])
    order = np.argsort(rows, kind="stable")
    return Logprobs(rows[order], pairs[order])


@dataclass(slots=True, eq=False)
class StepResult:
    """What one step sampled.

    Row i of the batch gave ids[i, :counts[i]]; counts is 0 for a row without ROW_SAMPLE and for a row whose KV another
    attention-DP rank owns. logprobs: of rows that ask for them; None: no row of ours does. done, failed: ids of moves
    with files that have ended since the last result.
    """

    step: int
    counts: np.ndarray  # [num_rows] int32
    ids: np.ndarray  # [num_rows, width] int32, width = 1 + the most draft tokens
    start_ns: int = 0
    end_ns: int = 0
    logprobs: Logprobs | None = None
    done: np.ndarray = field(default_factory=_NONE)
    failed: np.ndarray = field(default_factory=_NONE)

    def encode(self, world_id: int) -> bytes:
        """The record as it stands in a result ring."""
        head = np.zeros((), RESULT)
        head["step"], head["world_id"] = self.step, world_id
        head["start_ns"], head["end_ns"] = self.start_ns, self.end_ns
        head["num_rows"], head["width"] = self.ids.shape
        parts = [padded(self.counts.tobytes()), padded(self.ids.tobytes())]
        if self.logprobs is not None:
            head["num_logprobs"], head["logprob_width"] = self.logprobs.pairs.shape
            parts += [padded(self.logprobs.rows.tobytes()), self.logprobs.pairs.tobytes()]
        head["num_done"], head["num_failed"] = len(self.done), len(self.failed)
        parts += [padded(self.done.tobytes()), self.failed.tobytes()]
        return b"".join([head.tobytes(), *parts])

    @classmethod
    def decode(cls, data: bytes) -> "StepResult":
        """Inverse of encode. The arrays are read-only views of data."""
        head = np.frombuffer(data, RESULT, 1)[0]
        rows, width = int(head["num_rows"]), int(head["width"])
        counts = np.frombuffer(data, I32, rows, RESULT.itemsize)
        at = RESULT.itemsize + align8(rows * 4)
        ids = np.frombuffer(data, I32, rows * width, at).reshape(rows, width)
        at += align8(ids.nbytes)
        logprobs = None
        if num := int(head["num_logprobs"]):
            num_pairs, places = num * int(head["logprob_width"]), np.frombuffer(data, I32, num, at)
            at += align8(num * 4)
            logprobs = Logprobs(places, np.frombuffer(data, LOGPROB, num_pairs, at).reshape(num, -1))
            at += logprobs.pairs.nbytes
        num_done = int(head["num_done"])
        done = np.frombuffer(data, I32, num_done, at)
        failed = np.frombuffer(data, I32, int(head["num_failed"]), at + align8(num_done * 4))
        times = int(head["start_ns"]), int(head["end_ns"])
        return cls(int(head["step"]), counts, ids, *times, logprobs, done, failed)
