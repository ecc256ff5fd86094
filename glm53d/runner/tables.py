"""Sampling tables: what some requests do to their logits, as rows that a request has while it runs. [R36] [R51]

    bias [num_rows, vocab] float32   added to the logits; -inf: never sampled (logit_bias, allowed_token_ids)
    said [num_rows, vocab] int32     twice the times that the request put an id out, plus 1 if it is in the prompt and
                                     that counts

Rows are few and given out by the scheduler; a request without any of this has none, and costs nothing. What a step
samples is counted here, on the device, before the next step runs: no id goes to the host first.

Of a step's drafts, those before a position count there as if they had been put out. If they were not what is sampled,
what is sampled behind them is worth nothing anyway.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from glm53d.ipc.batch import Batch

ROWS_AT_ONCE = 64
"""Of logits; so temporary arrays do not grow with the batch: each takes 40 MB, for 155,000 ids."""


def in_parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Rows of logits, so many as may be worked on at once."""
    return (rows[i : i + ROWS_AT_ONCE] for i in range(0, len(rows), ROWS_AT_ONCE))


class SamplingTables:
    """The rows of one attention-DP rank, on the device. Owned by one Sampler."""

    def __init__(self, num_rows: int, vocab_size: int, dp_rank: int, drafts: Tensor):
        """Args:
        num_rows: of each attention-DP rank; 0: another rank of the group samples.
        drafts: [max_slots, k], where the runner finds them.
        """
        max_slots, device = len(drafts), drafts.device
        self.drafts = drafts
        self.num_rows, self.vocab_size, self.device = num_rows, vocab_size, device
        self.first_row = dp_rank * num_rows
        self.row = np.zeros(max_slots, np.int64)  # of each slot, if either of these; on the host, which decides by it
        self.is_biased = np.zeros(max_slots, bool)
        self.is_penalised = np.zeros(max_slots, bool)
        self.bias = torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device)
        self.said = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self.penalties = torch.zeros(3, num_rows, 1, dtype=torch.float32, device=device)

    def init_slots(self, batch: Batch) -> None:
        """Forget the requests that had the slots before, and take over what the batch's tables say."""
        new = batch.inits["slot"]
        self.is_biased[new] = self.is_penalised[new] = False
        if not len(batch.tables):
            return
        tables = batch.tables[self._is_mine(batch.tables["row"])]
        frequency, presence = tables["frequency_penalty"], tables["presence_penalty"]
        repetition = tables["repetition_penalty"]
        row, slot = tables["row"] - self.first_row, tables["slot"]
        self.row[slot] = row
        self.is_penalised[slot] = (frequency != 0.0) | (presence != 0.0) | (repetition != 1.0)
        self.is_biased[slot] = np.isneginf(tables["base_bias"]) | np.isin(tables["row"], batch.bias_row)
        at = self._to_device(row, torch.int64)
        self.penalties[:, at, 0] = self._to_device(np.stack([frequency, presence, repetition]), torch.float32)
        self.said[at] = 0
        self.bias[at] = self._to_device(tables["base_bias"], torch.float32)[:, None]
        self._fill(self.bias, batch.bias_row, batch.bias_id, batch.bias)
        self._fill(self.said, batch.said_row, batch.said_id, batch.said)

    def add_bias(self, logits: Tensor, slots: np.ndarray) -> Tensor:
        """[n, vocab] logits of the slots' requests, and their biases."""
        rows = np.flatnonzero(self.is_biased[slots])
        if not len(rows):
            return logits
        logits = logits.clone()
        for part in in_parts(rows):
            row, table_row = self._to_device(np.stack([part, self.row[slots[part]]]), torch.int64)
            logits.index_add_(0, row, self.bias[table_row])
        return logits

    def penalise(self, logits: Tensor, slots: np.ndarray, num_before: np.ndarray) -> Tensor:
        """[n, vocab] logits of the slots' requests, less what ids cost that were said.

        Repetition first: a positive logit is divided by it, a negative one multiplied, of ids in the prompt or put out.
        Then off go frequency times how often an id was put out, and presence if it was.

        num_before: [n] how many of the slot's drafts stand before the position that the logits are for.
        """
        rows = np.flatnonzero(self.is_penalised[slots])
        if not len(rows):
            return logits
        logits = logits.clone()
        for part in in_parts(rows):
            index = np.stack([part, slots[part], self.row[slots[part]], num_before[part]])
            row, slot, table_row, num_drafts = self._to_device(index, torch.int64)
            said = self.said[table_row]
            if num_before[part].any():
                counts = torch.arange(self.drafts.shape[1], device=self.device) < num_drafts[:, None]
                said.scatter_add_(1, torch.where(counts, self.drafts[slot], 0), 2 * counts.int())
            frequency, presence, repetition = self.penalties[:, table_row]
            before = logits[row]
            repeated = torch.where(before > 0, before / repetition, before * repetition)
            after = torch.where(said > 0, repeated, before)
            times = said >> 1
            after -= frequency * times
            after -= presence * (times > 0)
            logits[row] = after
        return logits

    def count(self, slots: np.ndarray, samples: Tensor, num_accepted: Tensor) -> None:
        """Take in what was put out: of each slot the first 1 + num_accepted of its samples [n, 1 + k]."""
        rows = np.flatnonzero(self.is_penalised[slots])
        if not len(rows):
            return
        row, table_row = self._to_device(np.stack([rows, self.row[slots[rows]]]), torch.int64)
        counts = torch.arange(samples.shape[1], device=self.device) <= num_accepted[row, None]
        ids = torch.where(counts, samples[row], 0)
        self.said.index_put_((table_row[:, None].expand_as(ids), ids), 2 * counts.int(), accumulate=True)

    def _fill(self, table: Tensor, row: np.ndarray, id: np.ndarray, value: np.ndarray) -> None:
        """table[row, id] = value, of this rank's rows; an id that no token has, and no logit, is nothing."""
        mine = self._is_mine(row) & (id < self.vocab_size)
        at = self._to_device(np.stack([row[mine] - self.first_row, id[mine]]), torch.int64)
        table[at[0], at[1]] = self._to_device(value[mine], table.dtype)

    def _is_mine(self, row: np.ndarray) -> np.ndarray:
        return (row >= self.first_row) & (row < self.first_row + self.num_rows)

    def _to_device(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)
