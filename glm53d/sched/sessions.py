"""Prefixes kept for sessions that will go on: an agent that was handed a tool call comes back with its result. [R45]

A kept prefix is a lock on the last node of its chain in a rank's tree, so eviction passes it by. It ends when a turn
that goes on from it is admitted, after a time, or when others need the room: what is kept never makes anybody wait.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from glm53d.kv.prefix import PrefixTree

MAX_CHAINS = 8  # of one session: an agent's own, and those of sub-agents that carry its key


@dataclass(slots=True)
class Kept:
    """One prefix."""

    dp_rank: int
    node: int
    num_pages: int
    num_asked: int  # of these pages, those of the prompt: the answer may come back without its thoughts
    last_hash: bytes  # the chained hash of the last one asked: whose prompt has it in that place goes on from here

    def goes_on_in(self, hashes: np.ndarray) -> bool:
        """hashes: [n, 2] uint64, of a prompt's pages."""
        return len(hashes) >= self.num_asked and hashes[self.num_asked - 1].tobytes() == self.last_hash


@dataclass(slots=True)
class Session:
    """What is kept for one."""

    expires_ns: int = 0
    chains: list[Kept] = field(default_factory=list)  # the latest last


@dataclass(slots=True)
class SessionCounters:
    """Since the world began, of prefixes."""

    kept: int = 0
    resumed: int = 0
    expired: int = 0
    evicted: int = 0


class Sessions:
    """What is kept, of the least recently used session first. Owned by one Scheduler, whose trees it locks nodes of."""

    def __init__(self, trees: list[PrefixTree], ttl_ns: int, max_pages: int):
        """max_pages: per tree; a page counts once for each prefix that has it. ttl_ns 0: nothing is kept."""
        self._trees = trees
        self._ttl_ns = ttl_ns
        self._max_pages = max_pages
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # by key; each keeps something
        self._pages = [0] * len(trees)
        self.counters = SessionCounters()

    def __len__(self) -> int:
        return sum(len(session.chains) for session in self._sessions.values())

    def keep(self, key: int, dp_rank: int, node: int, hashes: np.ndarray, num_asked: int, now_ns: int) -> None:
        """A turn that will go on is over; what no longer fits beside its pages goes. Nothing if it alone is too much.

        hashes: [n, 2] uint64, of the pages up to the node's last; the first num_asked are its prompt's.
        """
        num_pages = len(hashes)
        if not self._ttl_ns or not 0 < num_pages <= self._max_pages:
            return
        self._drop_prefixes(key, hashes)
        self._trees[dp_rank].lock(node)
        session = self._sessions.setdefault(key, Session())
        num_asked = min(max(1, num_asked), num_pages)
        session.chains.append(Kept(dp_rank, node, num_pages, num_asked, hashes[num_asked - 1].tobytes()))
        self._pages[dp_rank] += num_pages
        self.counters.kept += 1
        self.touch(key, now_ns)
        if len(session.chains) > MAX_CHAINS:
            self._drop(key, session.chains[0])
            self.counters.evicted += 1
        while self._pages[dp_rank] > self._max_pages:
            self.evict(dp_rank)

    def touch(self, key: int, now_ns: int) -> None:
        """A turn of the session waits for admission: the time begins anew."""
        if (session := self._sessions.get(key)) is not None:
            session.expires_ns = now_ns + self._ttl_ns
            self._sessions.move_to_end(key)

    def rank_of(self, key: int, hashes: np.ndarray) -> int:
        """Where a prefix of a session's prompt is kept, the longest; -1: nowhere."""
        prefixes = self._prefixes(key, hashes)
        return max(prefixes, key=lambda kept: kept.num_pages).dp_rank if prefixes else -1

    def resume(self, key: int, hashes: np.ndarray) -> None:
        """A turn of the session was admitted and holds what it uses."""
        self.counters.resumed += self._drop_prefixes(key, hashes)

    def expire(self, now_ns: int) -> None:
        """Let go of those whose next turn did not come in time."""
        while self._sessions:  # in order of use is in order of time
            key, session = next(iter(self._sessions.items()))
            if session.expires_ns > now_ns:
                return
            for kept in list(session.chains):
                self._drop(key, kept)
                self.counters.expired += 1

    def evict(self, dp_rank: int) -> bool:
        """Let go of a rank's least recently used; False: it has none."""
        for key, session in self._sessions.items():
            for kept in session.chains:
                if kept.dp_rank == dp_rank:
                    self._drop(key, kept)
                    self.counters.evicted += 1
                    return True
        return False

    def _prefixes(self, key: int, hashes: np.ndarray) -> list[Kept]:
        session = self._sessions.get(key)
        return [kept for kept in session.chains if kept.goes_on_in(hashes)] if session is not None else []

    def _drop_prefixes(self, key: int, hashes: np.ndarray) -> int:
        """How many there were."""
        prefixes = self._prefixes(key, hashes)
        for kept in prefixes:
            self._drop(key, kept)
        return len(prefixes)

    def _drop(self, key: int, kept: Kept) -> None:
        session = self._sessions[key]
        session.chains.remove(kept)
        if not session.chains:
            del self._sessions[key]
        self._pages[kept.dp_rank] -= kept.num_pages
        self._trees[kept.dp_rank].unlock(kept.node)
