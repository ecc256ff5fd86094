"""Memory that every rank can reach: page copies between KV pools, and the ids that all ranks need of each step. [R11]

    local      this rank's memory        | ids, two rooms | KV pools |        peer(r)    the same of rank r, to be read
    signal(r)  tells rank r that we are done with something, and waits until it has told us

ShmMailbox is the form for the CPU, CudaMailbox (cuda_ipc.py) that for GPUs. Signals are words in host memory in both:
what is waited for so is rare on a GPU (a page copy), and of two kernels that wait for each other on one GPU, only one
runs at a time.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from glm53d.errors import EngineError, StartError
from glm53d.ipc.mailbox import MailboxEnds, Signals
from glm53d.model.kv_cache import KvCache
from glm53d.model.layout import Layout
from glm53d.runner.base import available_bytes

SPIN_NS = 20_000
ID_BYTES = 8


class Signal:
    """Between this rank and one other: what one tells, the other waits for, so many times and in this order."""

    def __init__(self, signals: Signals, rank: int, timeout_s: float):
        self._signals, self._rank = signals, rank
        self._num_told = self._num_heard = 0
        self._timeout_s = timeout_s

    def tell(self) -> None:
        """All that we wrote before is there for the other to read; all that we read is the other's to overwrite."""
        self._num_told += 1
        self._signals.set(self._rank, self._num_told)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the other has told us once more. Raises PeerGone when it is gone, EngineError when it does not in time.

        timeout_s: other than the usual one.
        """
        self._num_heard += 1
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        while (left := deadline_ns - time.monotonic_ns()) > 0:
            if self._signals.wait(self._rank, self._num_heard, SPIN_NS, left):
                return
        raise EngineError(f"rank {self._rank} did not answer within {timeout_s:g} s")


class Mailbox(Protocol):
    """One rank's end. Made by all ranks at the same point, as it waits until all memory is there."""

    @property
    def local(self) -> Tensor:
        """[num_bytes] uint8 on the device, zero at first. Others read it; nobody else writes it."""
        ...

    def peer(self, rank: int) -> Tensor:
        """Rank `rank`'s memory [num_bytes]; of our own rank, local."""
        ...

    def signal(self, rank: int) -> Signal:
        """The one between us and that other rank."""
        ...

    def close(self) -> None:
        """Nobody waits for us any more. The memory is free when nobody has it mapped."""
        ...


class ShmMailbox:
    """The form for the CPU: memory segments that all ranks map."""

    def __init__(self, ends: MailboxEnds, num_bytes: int, timeout_s: float):
        """Raises StartError when the memory cannot be had.

        It is backed as it is made, unlike a process's own: more than there is would not be refused, but have the kernel
        kill whatever process it chooses. So all ranks look before any takes.
        """
        self._ends = ends
        self._rank, num_ranks = ends.signals.rank, ends.signals.num_ranks
        self._signals = [Signal(ends.signals, rank, timeout_s) for rank in range(num_ranks)]
        meet(self, self._rank, num_ranks)
        check_fits(num_bytes, num_ranks)
        meet(self, self._rank, num_ranks)
        try:
            ends.memories[self._rank].set_size(num_bytes)
        except OSError as error:
            raise StartError(f"{num_bytes} bytes of shared memory for KV cannot be had: {error.strerror}") from None
        meet(self, self._rank, num_ranks)
        self._memories = [torch.from_numpy(memory.array()) for memory in ends.memories]
        for memory in ends.memories:
            memory.close()

    @property
    def local(self) -> Tensor:
        """See Mailbox."""
        return self._memories[self._rank]

    def peer(self, rank: int) -> Tensor:
        """See Mailbox."""
        return self._memories[rank]

    def signal(self, rank: int) -> Signal:
        """See Mailbox."""
        return self._signals[rank]

    def close(self) -> None:
        """See Mailbox."""
        self._ends.signals.close()


def meet(mailbox: Mailbox, rank: int, num_ranks: int, timeout_s: float | None = None) -> None:
    """Until all ranks have come here: what each wrote before, all can read behind. Raises as Signal.wait does."""
    others = [mailbox.signal(other) for other in range(num_ranks) if other != rank]
    for signal in others:
        signal.tell()
    for signal in others:
        signal.wait(timeout_s)


def check_fits(num_bytes: int, num_ranks: int = 1) -> None:
    """Raise StartError where KV of so many bytes on each rank is more than the memory that is free."""
    if num_bytes * num_ranks > (free := available_bytes()):
        each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise StartError(
            f"KV of {num_bytes} bytes{each} does not fit the {free} bytes of memory that are free: lower kv.num_pages "
            "or kv.memory_bytes"
        )


class IdExchange:
    """What the owners of rows have sampled, to every rank, on the CPU: the inputs of the step after.

    gloo's all-gather of as many ids took 3 to 8 times as long, with 2 and 4 ranks on two busy cores. Each has two rooms
    and takes them in turn. Who writes a room again has met all ranks since, so they have read it.
    """

    def __init__(self, mailbox: Mailbox, layout: Layout, max_ids: int):
        """max_ids: that one group ever shares at once. The memory begins with its rooms: see room_bytes."""
        self._mailbox, self._layout = mailbox, layout
        self._owners = range(0, layout.tp_size, layout.attn_tp_size)
        self._rooms = [
            mailbox.peer(rank)[: 2 * max_ids * ID_BYTES].view(torch.int64).view(2, max_ids) for rank in self._owners
        ]
        self._turn = 0

    @staticmethod
    def room_bytes(max_ids: int) -> int:
        """At the start of each rank's memory, aligned for what stands behind."""
        return -(-2 * max_ids * ID_BYTES // 256) * 256

    def share_ids(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """[counts[attn_dp_rank]] int64 at an owner -> [sum(counts)]: what RankGroups.share_ids gives."""
        layout, turn = self._layout, self._turn
        self._turn = 1 - turn
        if layout.owns_rows:
            self._rooms[layout.attn_dp_rank][turn, : len(ids)] = ids
        meet(self._mailbox, layout.rank, layout.tp_size)
        return torch.cat([room[turn, :count] for room, count in zip(self._rooms, counts, strict=True)])


class PeerPages:
    """Copies of KV pages from one attention-DP rank's pool to another's."""

    def __init__(self, mailbox: Mailbox, cache: KvCache, layout: Layout, start: int):
        """start: where in each rank's memory the pools begin."""
        self._mailbox, self._cache, self._layout = mailbox, cache, layout
        self._start = start

    def copy(self, source_dp: np.ndarray, source: np.ndarray, target_dp: np.ndarray, target: np.ndarray) -> None:
        """Page target[i] of attention-DP rank target_dp[i] becomes page source[i] of source_dp[i].

        Every rank calls this for the same step with the same arrays, before it computes; no page is a source and a
        target in it. A source's pages are as all earlier steps have left them, and it goes on when they have been read.
        """
        me = self._layout.attn_dp_rank
        readers = np.unique(target_dp[(source_dp == me) & (target_dp != me)]).tolist()
        sources = np.unique(source_dp[(target_dp == me) & (source_dp != me)]).tolist()
        self._finish()
        for reader in readers:
            self._mailbox.signal(self._rank_in(reader)).tell()
        for of in sources:
            rank, rows = self._rank_in(of), (target_dp == me) & (source_dp == of)
            self._mailbox.signal(rank).wait()
            theirs = self._cache.shape.pages(self._mailbox.peer(rank)[self._start :], self._cache.num_pages)
            self._cache.copy_pages(theirs, self._index(source[rows]), self._index(target[rows]))
        self._finish()
        for of in sources:
            self._mailbox.signal(self._rank_in(of)).tell()
        for reader in readers:
            self._mailbox.signal(self._rank_in(reader)).wait()

    def _rank_in(self, dp_rank: int) -> int:
        """Of another group, the rank at our own place: all of a group store the same rows."""
        return dp_rank * self._layout.attn_tp_size + self._layout.attn_tp_rank

    def _index(self, pages: np.ndarray) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._mailbox.local.device)

    def _finish(self) -> None:
        """What is queued on the device has run: signals are host words and do not wait for it."""
        if self._mailbox.local.is_cuda:
            torch.cuda.current_stream().synchronize()
