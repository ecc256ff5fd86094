"""Where a prefix can come from when a rank's own pool lacks it, and what moving it is worth. [R25] [R27]"""

import numpy as np

from glm53d.kv.prefix import PrefixTree
from glm53d.sched import policy
from glm53d.sched.measure import Rate
from glm53d.sched.tiers import Fetch, Loads, Tiers

NO_PAGES = np.empty(0, np.int32)


class Sources:
    """Asks the trees and tiers of one Scheduler. hashes are those of all pages of a prefix that may come from a cache.

    A page is worth moving when that takes less than computing it, at the measured rate; before there is one, always.
    """

    def __init__(self, trees: list[PrefixTree], tiers: Tiers, prefill_rate: Rate, page_size: int):
        self._trees = trees
        self._tiers = tiers
        self._prefill_rate = prefill_rate
        self._page_size = page_size

    def cached_by_rank(self, hashes: np.ndarray) -> list[float]:
        """Pages in each rank's pool; those that would come from elsewhere count as the share that they save."""
        counts = [tree.peek(hashes) for tree in self._trees]
        if not self._tiers.is_on:
            return [float(count) for count in counts]
        limits = self._tiers.limits
        load, fetch = self._saved_share(limits.load_ns), self._saved_share(limits.load_ns + limits.fetch_ns)
        copy = self._saved_share(limits.peer_ns) if limits.peer_ns >= 0 else 0.0
        most = max(counts) if copy else 0
        cached = []
        for dp_rank, count in enumerate(counts):
            num_host, num_peer, num_files = self._tiers.num_found(dp_rank, hashes[count:], max(0, most - count))
            cached.append(count + load * num_host + copy * num_peer + fetch * num_files)
        return cached

    def fetch(self, handle: int, dp_rank: int, hashes: np.ndarray, matched: int) -> Fetch | None:
        """Have files brought into a rank's host memory, behind `matched` pages in its pool; None: there are none."""
        limits = self._tiers.limits
        if not limits.file_pages or self._saved_share(limits.fetch_ns + limits.load_ns) == 0.0:
            return None
        _, num_peer = self._peer(dp_rank, hashes)
        return self._tiers.fetch(handle, dp_rank, hashes[matched:], max(0, num_peer - matched))

    def loads(self, dp_rank: int, hashes: np.ndarray, matched: int, fetch: Fetch | None, now: int) -> Loads | None:
        """What can come into a rank's pool now, behind `matched` pages there; None: nothing. now: of last use."""
        peer, num_peer = self._peer(dp_rank, hashes)
        node, pages = 0, NO_PAGES
        if num_peer > matched:
            _, node = self._trees[peer].match(hashes[:num_peer], now)
            pages = self._trees[peer].pages(node)[matched:]
        with_host = self._saved_share(self._tiers.limits.load_ns) > 0.0
        return self._tiers.loads(dp_rank, hashes[matched:], with_host, (peer, node), pages, fetch)

    def _peer(self, dp_rank: int, hashes: np.ndarray) -> tuple[int, int]:
        """The other rank that has most of it, and how many pages; (-1, 0) where copying is not worth it."""
        peer_ns = self._tiers.limits.peer_ns
        if len(self._trees) == 1 or peer_ns < 0 or self._saved_share(peer_ns) == 0.0:
            return -1, 0
        counts = [(tree.peek(hashes), -rank) for rank, tree in enumerate(self._trees) if rank != dp_rank]
        count, rank = max(counts)
        return -rank, count

    def _saved_share(self, move_ns: int) -> float:
        return policy.saved_share(move_ns, self._prefill_rate.ns_of(self._page_size))
