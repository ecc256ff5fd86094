"""What ranks' memory and files hold, without ranks: every page remembers the ids whose KV it has.

Moves happen as late or as early as ranks may do them, drawn at random: what a step carries before its rows or behind
them, what threads do some steps later. So a page that is reused too early is seen at the first read.
"""

import random
from collections import deque

import numpy as np

from glm53d.ipc.batch import Batch
from glm53d.ipc.records import MoveKind
from glm53d.sched.tiers import TierLimits

NOTHING = -1


class KvWorld:
    """Pools, host pools and files of one node. fails: the chance that a file cannot be read or written."""

    def __init__(self, num_ranks: int, num_pages: int, page_size: int, tiers: TierLimits, rng: random.Random):
        self.pages = np.full((num_ranks, num_pages, page_size), NOTHING, np.int64)
        self.hosts = np.full((num_ranks, tiers.host_pages, page_size), NOTHING, np.int64)
        self.files: dict[tuple[int, int], np.ndarray] = {}
        self.fails = 0.0
        self.group_size = tiers.group_size
        self.rng = rng
        self._late: list[np.void] = []  # LOADs and PEERs of the step
        self._writes: list[deque[np.void]] = [deque() for _ in range(num_ranks)]  # by rank, in order
        self._reads: list[tuple[np.void, int]] = []  # and how many ranks of the group have yet to do it

    def begin_step(self, batch: Batch) -> None:
        """What comes before its rows."""
        for move in batch.moves:
            kind = MoveKind(move["kind"])
            if kind is MoveKind.SAVE:
                self.hosts[move["dp_rank"], move["target"]] = self.pages[move["dp_rank"], move["source"]]
            elif kind in (MoveKind.LOAD, MoveKind.PEER):
                if self.rng.random() < 0.5:
                    self._bring(move)
                else:
                    self._late.append(move)
            elif kind is MoveKind.FETCH:
                self._reads.append((move, self.group_size))
            else:
                self._writes[move["dp_rank"]].append(move)

    def end_step(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """What comes behind its rows, and what threads have done meanwhile: (done, failed)."""
        for move in self._late:
            self._bring(move)
        self._late = []
        done: list[int] = []
        failed: list[int] = []
        for queue in self._writes:
            while queue and self.rng.random() < 0.6:
                self._write(queue.popleft(), done, failed)
        while self._reads and (self.rng.random() < 0.6 or batch.wait_us):
            move, left = self._reads.pop(0)
            self._read(move, done, failed)
            if left > 1:
                self._reads.append((move, left - 1))
        return np.array(done, np.int32), np.array(failed, np.int32)

    @property
    def is_quiet(self) -> bool:
        """No thread has anything to do."""
        return not self._reads and not any(self._writes)

    def _bring(self, move: np.void) -> None:
        if move["kind"] == MoveKind.LOAD:
            page = self.hosts[move["dp_rank"], move["source"]]
        else:
            page = self.pages[move["source_rank"], move["source"]]
        self.pages[move["dp_rank"], move["target"]] = page

    def _write(self, move: np.void, done: list[int], failed: list[int]) -> None:
        name = int(move["hash_lo"]), int(move["hash_hi"])
        if move["kind"] == MoveKind.DROP:
            self.files.pop(name, None)
        elif self.rng.random() < self.fails:
            failed.append(int(move["id"]))
        else:
            self.files[name] = self.hosts[move["dp_rank"], move["source"]].copy()
            done.append(int(move["id"]))

    def _read(self, move: np.void, done: list[int], failed: list[int]) -> None:
        name = int(move["hash_lo"]), int(move["hash_hi"])
        if name not in self.files or self.rng.random() < self.fails:
            self.files.pop(name, None)  # corrupt: it is deleted
            failed.append(int(move["id"]))
            return
        self.hosts[move["dp_rank"], move["target"]] = self.files[name]
        done.append(int(move["id"]))
