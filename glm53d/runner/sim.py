"""The simulated engine: no model; a step takes the time a formula says, and tokens come from a script. [R43]

Everything else is real: rings, scheduler, throttle, HTTP. So it measures the CPU half at full speed, and plans layouts
one does not have.
"""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from glm53d.config import Config
from glm53d.errors import StartError
from glm53d.ipc.batch import Batch, StepResult
from glm53d.ipc.records import ROW_FEED, ROW_SAMPLE
from glm53d.runner.base import Loaded, Progress


class SimRunner:
    """A Runner whose tokens are known before: script[position in the answer], or drawn from (seed, position).

    Args:
        attn_dp_rank: rows of other ranks are not ours.
        num_base_ids: ids below it are ordinary text; unscripted answers use only these.
        tokenizer: tokenizer.json, for the script.
        eos_ids: where the script has one before min_new_tokens, its first token is said instead.
    """

    def __init__(
        self,
        config: Config,
        attn_dp_rank: int,
        max_slots: int,
        num_base_ids: int,
        tokenizer: Path,
        eos_ids: Sequence[int] = (),
    ):
        self._sim = config.sim
        self._page_size = config.kv.page_size
        self._dp_rank = attn_dp_rank
        self._num_base_ids = num_base_ids
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._script = np.empty(0, np.int32)
        self._ends = np.empty(0, bool)  # where the script ends a turn
        self._seed = np.zeros(max_slots, np.uint64)
        self._prompt_len = np.zeros(max_slots, np.int64)
        self._min_position = np.zeros(max_slots, np.int64)  # where an end of turn may stand at the earliest
        self._launched: deque[StepResult] = deque()  # in order; end_ns is when each will be over
        self._end_ns = 0  # of the last one

    def load(self, progress: Progress) -> Loaded:
        """Reads the script."""
        progress("script", 50)
        if self._sim.text:
            ids = Tokenizer.from_file(str(self._tokenizer)).encode(self._sim.text, add_special_tokens=False).ids
            if not ids:
                raise StartError("sim.text gives no token")
            self._script = np.array(ids, np.int32)
            self._ends = np.isin(self._script, self._eos_ids)
        return Loaded(self._sim.num_pages, self._page_size, self._sim.max_context_len, 0, 0)

    def launch(self, batch: Batch) -> None:
        """Note when the step will be over, and what it samples. It begins when the one before is over."""
        start = max(time.monotonic_ns(), self._end_ns)
        for init in batch.inits:
            self._seed[init["slot"]] = init["seed"]
            self._prompt_len[init["slot"]] = init["num_prompt_ids"]
            self._min_position[init["slot"]] = int(init["num_prompt_ids"]) + int(init["min_new_tokens"])
        fed = (batch.row_flags & ROW_FEED) != 0
        mine = batch.row_dp_rank == self._dp_rank
        sampled = mine & ((batch.row_flags & ROW_SAMPLE) != 0)
        prefill_tokens = int(batch.dp_num_tokens[self._dp_rank]) - int(np.count_nonzero(mine & fed))
        us = self._sim.base_ms * 1e3 + self._sim.per_prefill_token_us * prefill_tokens
        us += self._sim.per_decode_row_us * int(np.count_nonzero(mine & fed))
        slot = batch.row_slot[sampled]
        position = (batch.row_prefix_len[sampled] + batch.row_extend_len[sampled]).astype(np.int64)
        counts = sampled.astype(np.int32)
        ids = np.full((batch.num_rows, 1), -1, np.int32)
        ids[sampled, 0] = self._next_ids(slot, position)
        self._end_ns = start + int(us * 1e3)
        self._launched.append(StepResult(batch.step, counts, ids, start, self._end_ns))

    def _next_ids(self, slot: np.ndarray, position: np.ndarray) -> np.ndarray:
        if len(self._script):
            at = (position - self._prompt_len[slot]) % len(self._script)
            return self._script[np.where(self._ends[at] & (position < self._min_position[slot]), 0, at)]
        mixed = (self._seed[slot] + position.astype(np.uint64)) * np.uint64(
            0x9E3779B97F4A7C15
        )  # splitmix64's finaliser
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(self._num_base_ids)).astype(np.int32)

    def collect(self) -> StepResult:
        """Sleep until the oldest step is over."""
        result = self._launched.popleft()
        if (left := result.end_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        return result

    def close(self) -> None:
        """Nothing is held."""
