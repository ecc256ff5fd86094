"""Changes: what ranks must be told before the next step, as it gathers between two Batches. [R1] [R36]"""

import numpy as np

from glm53d._native import TokenLog
from glm53d.ipc.batch import Batch
from glm53d.ipc.records import SLOT_INIT, Packer
from glm53d.sched.req import Req
from glm53d.sched.tables import add_tables

_pack_slot_init = Packer(SLOT_INIT)


class Changes:
    """New slots' sampling parameters, rows of the sampling tables, pages of block tables. Owned by one Scheduler."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._begun: list[tuple[Req, bytes]] = []  # and its SLOT_INIT; the last one of a request counts
        self._tables: list[Req] = []  # whose rows of the sampling tables are to be filled
        self._runs: list[tuple[int, int, np.ndarray]] = []  # (slot, start, pages)
        self.num_pages = 0  # in all runs

    def begin(self, req: Req, min_new_tokens: int) -> None:
        """A request has a slot, or other parameters from here on."""
        head = req.head
        init = _pack_slot_init(
            slot=req.slot, dp_rank=req.dp_rank, num_prompt_ids=req.num_prompt_ids, min_new_tokens=min_new_tokens,
            seed=head["seed"], top_k=head["top_k"], temperature=head["temperature"], top_p=head["top_p"],
            min_p=head["min_p"],
        )  # fmt: skip
        self._begun.append((req, init))

    def fill_table(self, req: Req) -> None:
        """Its row of the sampling tables is new, or wrong: it is filled in the next step that computes for it."""
        self._tables.append(req)

    def has_table(self, req: Req) -> bool:
        """Whether its next step fills a row of the sampling tables."""
        return bool(self._tables) and any(other is req for other in self._tables)

    def add_pages(self, slot: int, start: int, pages: np.ndarray) -> None:
        """The slot's block table has these pages from `start` on."""
        self._runs.append((slot, start, pages))
        self.num_pages += len(pages)

    def forget(self, req: Req) -> None:
        """The request loses its slot: nothing more of it."""
        self._begun = [begun for begun in self._begun if begun[0] is not req]
        if self._tables:
            self._tables = [other for other in self._tables if other is not req]
        self._runs = [run for run in self._runs if run[0] != req.slot]
        self.num_pages = sum(len(pages) for _, _, pages in self._runs)

    def add_to(self, batch: Batch, log: TokenLog) -> None:
        """Put all of it into the batch; of the tables, those of requests that have a row in it."""
        if self._begun:
            batch.inits = np.frombuffer(b"".join(init for _, init in self._begun), SLOT_INIT)
            self._begun = []
        if self._tables:  # with the first of their prompt's tokens, which the batch has room for
            due = [req for req in self._tables if req.slot in batch.row_slot]
            self._tables = [req for req in self._tables if req.slot not in batch.row_slot]
            tokens = [np.concatenate([req.tokens, log.get(req.slot)]) for req in due]
            add_tables(batch, list(zip(due, tokens, strict=True)), self._vocab_size)
        if self._runs:
            batch.run_slot = np.array([slot for slot, _, _ in self._runs], np.int32)
            batch.run_start = np.array([start for _, start, _ in self._runs], np.int32)
            batch.run_count = np.array([len(pages) for _, _, pages in self._runs], np.int32)
            batch.pages = np.concatenate([pages for _, _, pages in self._runs])
            self._runs, self.num_pages = [], 0
