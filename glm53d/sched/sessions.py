"""Prefixes kept for sessions that will go on: an agent that was handed a tool call comes back with its result. [R45]

A kept prefix is a lock on the last node of its chain in a rank's tree, so eviction passes it by. It ends when the
session's next turn is admitted, after a time, or when others need the room: what is kept never makes anybody wait.
"""

from collections import OrderedDict
from dataclasses import dataclass

from glm53d.kv.prefix import PrefixTree


@dataclass(slots=True)
class Kept:
    """One session's prefix."""

    dp_rank: int
    node: int
    num_pages: int
    expires_ns: int


@dataclass(slots=True)
class SessionCounters:
    """Since the world began."""

    kept: int = 0
    resumed: int = 0
    expired: int = 0
    evicted: int = 0


class Sessions:
    """What is kept, least recently used first. Owned by one Scheduler, whose trees it locks nodes of."""

    def __init__(self, trees: list[PrefixTree], ttl_ns: int, max_pages: int):
        """max_pages: per tree; a page counts once for each session that keeps it. ttl_ns 0: nothing is kept."""
        self._trees = trees
        self._ttl_ns = ttl_ns
        self._max_pages = max_pages
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # by session
        self._pages = [0] * len(trees)
        self.counters = SessionCounters()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, session: int, dp_rank: int, node: int, num_pages: int, now_ns: int) -> None:
        """A turn that will go on is over. What no longer fits beside it goes, and if it alone is too much, it does."""
        if not self._ttl_ns or not num_pages:
            return
        if session in self._kept:
            self._drop(session)
        self._trees[dp_rank].lock(node)
        self._kept[session] = Kept(dp_rank, node, num_pages, now_ns + self._ttl_ns)
        self._pages[dp_rank] += num_pages
        self.counters.kept += 1
        while self._pages[dp_rank] > self._max_pages:
            self.evict(dp_rank)

    def touch(self, session: int, now_ns: int) -> None:
        """A turn of it waits for admission: the time begins anew."""
        if (kept := self._kept.get(session)) is not None:
            kept.expires_ns = now_ns + self._ttl_ns
            self._kept.move_to_end(session)

    def rank_of(self, session: int) -> int:
        """Where a session's prefix is kept, -1: nowhere."""
        kept = self._kept.get(session)
        return -1 if kept is None else kept.dp_rank

    def resume(self, session: int) -> None:
        """A turn of it was admitted and holds what it uses."""
        if session in self._kept:
            self._drop(session)
            self.counters.resumed += 1

    def expire(self, now_ns: int) -> None:
        """Let go of those whose next turn did not come in time."""
        while self._kept:  # in order of use is in order of time
            session, kept = next(iter(self._kept.items()))
            if kept.expires_ns > now_ns:
                return
            self._drop(session)
            self.counters.expired += 1

    def evict(self, dp_rank: int) -> bool:
        """Let go of a rank's least recently used; False: it has none."""
        session = next((session for session, kept in self._kept.items() if kept.dp_rank == dp_rank), 0)
        if not session:
            return False
        self._drop(session)
        self.counters.evicted += 1
        return True

    def _drop(self, session: int) -> None:
        kept = self._kept.pop(session)
        self._pages[kept.dp_rank] -= kept.num_pages
        self._trees[kept.dp_rank].unlock(kept.node)
