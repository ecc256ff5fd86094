"""Pages of KV outside the pool that wants them: in host memory, in files, with another rank, on their way. [R32]

    files ◄──STORE── host pool ◄──SAVE── device pool       one host pool per attention-DP rank, beside its device pool;
      └─────FETCH──►     └──────LOAD──►  ▲                 the files are the node's
                                         └──PEER── another rank's device pool

A page is saved as soon as it is full, so that giving it up costs nothing, and again when it is given up if the host has
dropped it by then; what is in the host without a file is stored. So a prefix is there from its first page on, also
after a restart, though the pool never gave up its beginning. What comes back stays where it came from.

SAVE, LOAD and PEER are done before the step behind the one that carries them, so whoever planned them knows when; each
step carries a bounded number, and no step waits for one. STORE, FETCH and DROP are done by threads of the ranks:
results name those that have ended.

Pins keep what a move reads or fills until the step that carries it is planned, as ranks keep that order, also with
another rank's pool, where a lock in its tree is the pin; what threads do, until the result that ends it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from glm53d.ipc.records import PAGE_MOVE, MoveKind
from glm53d.kv.prefix import PrefixTree
from glm53d.kv.tier import TierIndex

FILE_MOVES = 4096  # that one step carries at most: what bounds its record
MAX_STEP_PAGES = 4096  # likewise, however small pages are
NO_MOVES = np.empty(0, PAGE_MOVE)
NO_ENTRIES = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class TierLimits:
    """How much fits where, per attention-DP rank but for the files, and what a page's move costs."""

    host_pages: int = 0  # 0: no host tier
    file_pages: int = 0  # 0: no storage tier
    step_pages: int = 64  # that one step saves, and that it loads
    load_ns: int = 0  # per page, from the host pool
    fetch_ns: int = 0  # from a file into the host pool
    peer_ns: int = -1  # from another rank's pool; -1: that is not done
    group_size: int = 1  # ranks of an attention-DP rank: each has its own copy of the pools


NO_TIERS = TierLimits()


@dataclass(slots=True)
class TierCounters:
    """Pages moved since the world began."""

    saved: int = 0
    loaded: int = 0
    copied: int = 0  # from another rank's pool
    stored: int = 0
    fetched: int = 0
    failed: int = 0  # files that could not be written, or were not what they should be


@dataclass(slots=True, eq=False)
class Loads:
    """Pages of one request on their way into its rank's pool, in order. moves[:sent] are in planned steps."""

    moves: np.ndarray  # [n] PAGE_MOVE
    entries: np.ndarray  # pinned in the host index, those not sent yet; in the order of the LOADs among moves
    peer: tuple[int, int]  # (attention-DP rank, node locked in its tree); rank -1: none
    from_files: int  # of the pages, those that were fetched for this request
    sent: int = 0

    @property
    def is_sent(self) -> bool:
        return self.sent == len(self.moves)


@dataclass(slots=True, eq=False)
class Fetch:
    """Files of one request on their way into a host pool, which keeps them until the request needs them no more."""

    handle: int
    dp_rank: int
    hashes: np.ndarray  # [n, 2]; none: it waits for another request's, and follows that
    entries: np.ndarray  # of the host index, pinned; of those that failed, -1
    files: np.ndarray  # of the index of files, pinned while on their way
    missing: np.ndarray  # how many ranks of the group have yet to read each
    left: int  # pages on their way
    is_over: bool = False  # the request needs them no more
    failed: list[int] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)  # handles


class Tiers:
    """The numbers of all slower tiers, and the moves of the next batch. Owned by one Scheduler."""

    def __init__(self, limits: TierLimits, trees: list[PrefixTree], stored: np.ndarray):
        """stored: [n, 2] uint64, the hashes of the files there are, least recently used first."""
        self.limits = limits
        self.counters = TierCounters()
        self.hosts = [TierIndex(limits.host_pages) for _ in trees]
        self.files = TierIndex(limits.file_pages)
        self.num_fetching = 0  # requests that wait for files
        self._trees = trees
        self._saves_left = [limits.step_pages] * len(trees)
        self._storing = [0] * len(trees)  # host pages pinned because they are being stored
        self._moves: list[np.ndarray] = []  # SAVE, LOAD and PEER of the next batch
        self._pinned: list[tuple[int, np.ndarray]] = []  # (rank, host entries) until that batch is planned
        self._file_moves: deque[np.ndarray] = deque()
        self._stores: dict[int, tuple[int, int, int]] = {}  # by id: (rank, host entry, file entry)
        self._fetches: dict[int, tuple[Fetch, int]] = {}  # by id: and which of its pages
        self._active: list[Fetch] = []  # those with pages on their way
        self._next_id = 0
        if len(stored):
            entries, _ = self.files.add(stored, filling=False)
            self._drop(stored[entries < 0])  # there is no room for the oldest

    @property
    def is_on(self) -> bool:
        """Pages may come from elsewhere than a rank's own pool."""
        return self.limits.host_pages > 0 or self.limits.peer_ns >= 0

    @property
    def has_moves(self) -> bool:
        """Something should go into a batch, even one without rows."""
        return bool(self._moves or self._file_moves)

    # ---- down --------------------------------------------------------------------------------------------------------

    def room_to_save(self, dp_rank: int) -> int:
        """Pages that the next batch may still take from a pool; any number when they are not saved."""
        return self._saves_left[dp_rank] if self.limits.host_pages else 1 << 62

    def save(self, dp_rank: int, pages: np.ndarray, hashes: np.ndarray) -> None:
        """Keep what these pages of a pool hold, as far as there is room; of a prefix the first pages come last."""
        if not self.limits.host_pages:
            return
        host = self.hosts[dp_rank]
        entries = host.find(hashes)
        absent = np.flatnonzero(entries < 0)
        if len(absent) > (room := self._saves_left[dp_rank]):  # a step's record and its time are bounded
            kept = np.ones(len(pages), bool)
            kept[absent[: len(absent) - room]] = False
            pages, hashes, entries = pages[kept], hashes[kept], entries[kept]
        added, _ = host.add(hashes, filling=False)
        if (new := added >= 0).any():
            host.pin(added[new])  # until the batch that fills them is planned
            self._pinned.append((dp_rank, added[new]))
            self._moves.append(_moves(MoveKind.SAVE, dp_rank, pages[new], added[new], hashes[new]))
            num_new = int(np.count_nonzero(new))
            self._saves_left[dp_rank] -= num_new
            self.counters.saved += num_new
        if self.limits.file_pages:
            entries = np.where(new, added, entries)
            lacks = (entries >= 0) & (self.files.find(hashes) < 0)
            self._store(dp_rank, entries[lacks], hashes[lacks])

    def _store(self, dp_rank: int, entries: np.ndarray, hashes: np.ndarray) -> None:
        """Write files of host pages. At most half a host pool waits for that: it must go on taking pages."""
        room = self.limits.host_pages // 2 - self._storing[dp_rank]
        if room <= 0 or not len(entries):
            return
        entries, hashes = entries[-room:], hashes[-room:]
        files, dropped = self.files.add(hashes, filling=True)
        self._drop(dropped, dp_rank)
        new = files >= 0
        entries, files = entries[new], files[new]
        self.hosts[dp_rank].pin(entries)
        self._storing[dp_rank] += len(entries)
        moves = _moves(MoveKind.STORE, dp_rank, entries, 0, hashes[new])
        moves["id"] = self._new_ids(len(moves))
        for move_id, entry, file in zip(moves["id"].tolist(), entries.tolist(), files.tolist(), strict=True):
            self._stores[move_id] = (dp_rank, entry, file)
        self._add_file_moves(moves)

    def _drop(self, hashes: np.ndarray, dp_rank: int = 0) -> None:
        self._add_file_moves(_moves(MoveKind.DROP, dp_rank, np.zeros(len(hashes), np.int32), 0, hashes))

    def clear(self) -> int:
        """Forget all pages of host and files that are not on their way; how many there were."""
        num_pages = 0
        for host in self.hosts:
            num_pages += len(host.clear())
        dropped = self.files.clear()
        self._drop(dropped)
        return num_pages + len(dropped)

    # ---- up ----------------------------------------------------------------------------------------------------------

    def num_found(self, dp_rank: int, hashes: np.ndarray, num_peer: int) -> tuple[int, int, int]:
        """How many pages behind a pool's own could come from its host pool, then another rank, then files.

        hashes: [n, 2] of the pages behind the pool's own, of which another rank has the first num_peer.
        """
        num_host = self.hosts[dp_rank].count(hashes) if self.limits.host_pages else 0
        at = max(num_host, num_peer)
        return num_host, at - num_host, self.files.count(hashes[at:]) if self.limits.file_pages else 0

    def fetch(self, handle: int, dp_rank: int, hashes: np.ndarray, num_peer: int) -> Fetch | None:
        """Bring a prefix's files into the host pool, as far as it then goes without a gap; None: there are none.

        hashes, num_peer: as for num_found.
        """
        host = self.hosts[dp_rank]
        here = host.find(hashes) >= 0
        here[:num_peer] = True
        files = self.files.find(hashes)
        reach = _first(~here & (files < 0))
        want = np.flatnonzero(~here[:reach])
        if not len(want):
            return None
        for other in self._active:
            if other.dp_rank == dp_rank and (other.hashes == hashes[want[0]]).all(axis=1).any():
                other.followers.append(handle)
                self.num_fetching += 1
                return Fetch(handle, dp_rank, hashes[:0], NO_ENTRIES, NO_ENTRIES, NO_ENTRIES, 0)
        entries = host.add(hashes[want[::-1]], filling=True)[0][::-1].copy()  # the first pages first
        reach = _first(entries < 0)  # no room for more, or another request brings it
        for entry in entries[reach:]:
            if entry >= 0:
                host.settle(int(entry), False)
        want, entries, files = want[:reach], entries[:reach], files[want[:reach]]
        if not len(want):
            return None
        self.files.pin(files)
        missing = np.full(len(want), self.limits.group_size, np.int64)
        fetch = Fetch(handle, dp_rank, hashes[want], entries, files, missing, len(want))
        self._active.append(fetch)
        moves = _moves(MoveKind.FETCH, dp_rank, np.zeros(len(want), np.int32), entries, hashes[want])
        moves["id"] = self._new_ids(len(moves))
        for i, move_id in enumerate(moves["id"].tolist()):
            self._fetches[move_id] = (fetch, i)
        self._add_file_moves(moves)
        self.num_fetching += 1
        return fetch

    def release(self, fetch: Fetch) -> None:
        """The request is admitted, or gone: what it fetched is kept no longer than other pages."""
        fetch.is_over = True
        if not fetch.left:
            self.hosts[fetch.dp_rank].unpin(fetch.entries[fetch.entries >= 0])

    def loads(
        self, dp_rank: int, hashes: np.ndarray, with_host: bool, peer: tuple[int, int], peer_pages: np.ndarray,
        fetch: Fetch | None,
    ) -> Loads | None:  # fmt: skip
        """What can come into a pool behind its own pages now; None: nothing. Their targets are yet to be filled in.

        Args:
            hashes: [n, 2] of the pages behind the pool's own.
            with_host: loading from the host pool is worth it.
            peer: (another rank, the node in its tree that ends with peer_pages, the rank's pages of the first hashes).
        """
        host = self.hosts[dp_rank]
        entries = host.find(hashes)
        is_host = (entries >= 0) & with_host
        here = is_host.copy()
        here[: len(peer_pages)] = True
        reach = _first(~here)
        if not reach:
            return None
        entries, is_host = entries[:reach], is_host[:reach]
        source = entries.copy()
        from_peer = np.flatnonzero(~is_host)
        source[from_peer] = peer_pages[from_peer]
        moves = _moves(MoveKind.LOAD, dp_rank, source, 0, hashes[:reach])
        moves["kind"][from_peer] = MoveKind.PEER
        moves["source_rank"][from_peer] = peer[0]
        if len(from_peer):
            self._trees[peer[0]].lock(peer[1])
        else:
            peer = (-1, 0)
        entries = entries[is_host]
        host.pin(entries)
        from_files = 0 if fetch is None else int(np.isin(entries, fetch.entries).sum())
        return Loads(moves, entries, peer, from_files)

    def load(self, loads: Iterable[Loads], dp_rank: int) -> None:
        """Put what one step may bring into a pool into the next batch, in order."""
        left = self.limits.step_pages
        for each in loads:
            moves = each.moves[each.sent : each.sent + left]
            num_host = int(np.count_nonzero(moves["kind"] == MoveKind.LOAD))
            each.sent += len(moves)
            left -= len(moves)
            self._moves.append(moves)
            self._pinned.append((dp_rank, each.entries[:num_host]))
            each.entries = each.entries[num_host:]
            self.counters.loaded += num_host
            self.counters.copied += len(moves) - num_host
            if not left:
                return

    def end_loads(self, loads: Loads, dp_rank: int) -> None:
        """All are in planned steps, or the request is gone."""
        self.hosts[dp_rank].unpin(loads.entries)
        if loads.peer[0] >= 0:
            self._trees[loads.peer[0]].unlock(loads.peer[1])

    # ---- the batch and its result ------------------------------------------------------------------------------------

    def take_moves(self) -> np.ndarray:
        """The moves of the batch being built, [n] PAGE_MOVE. From here on they count as planned."""
        moves, room = self._moves, FILE_MOVES
        while self._file_moves and room:
            first = self._file_moves.popleft()
            if len(first) > room:
                self._file_moves.appendleft(first[room:])
            moves.append(first[:room])
            room -= len(moves[-1])
        for dp_rank, entries in self._pinned:
            self.hosts[dp_rank].unpin(entries)
        self._moves, self._pinned = [], []
        self._saves_left = [self.limits.step_pages] * len(self._trees)
        return np.concatenate(moves) if moves else NO_MOVES

    def ended(self, done: np.ndarray, failed: np.ndarray) -> list[int]:
        """Moves with files have ended, as a result says; whose fetches are complete, or those that they follow."""
        complete: list[int] = []
        for ids, filled in ((done, True), (failed, False)):
            for move_id in ids.tolist():
                if move_id in self._stores:
                    self._end_store(*self._stores.pop(move_id), filled=filled)
                elif (fetch := self._end_fetch(move_id, filled=filled)) is not None:
                    complete += [fetch.handle, *fetch.followers]
        return complete

    def _end_store(self, dp_rank: int, entry: int, file: int, *, filled: bool) -> None:
        self.hosts[dp_rank].unpin(np.array([entry], np.int32))
        self.files.settle(file, filled)
        self._storing[dp_rank] -= 1
        self.counters.stored += filled
        self.counters.failed += not filled

    def _end_fetch(self, move_id: int, *, filled: bool) -> Fetch | None:
        """One rank has read a file, or could not; the fetch, if that was its last."""
        fetch, i = self._fetches[move_id]
        fetch.missing[i] -= 1
        if not filled:
            fetch.failed.append(i)
        if fetch.missing[i]:
            return None
        del self._fetches[move_id]
        entry, file = fetch.entries[i : i + 1].copy(), fetch.files[i : i + 1]
        good = i not in fetch.failed
        self.hosts[fetch.dp_rank].settle(int(entry[0]), good)
        if good:
            self.hosts[fetch.dp_rank].pin(entry)
            self.counters.fetched += 1
        else:
            fetch.entries[i] = -1
            self.files.condemn(file)
            self.counters.failed += 1
        self.files.unpin(file)
        fetch.left -= 1
        if fetch.left:
            return None
        self.num_fetching -= 1 + len(fetch.followers)
        self._active.remove(fetch)
        if fetch.is_over:
            self.release(fetch)
        return fetch

    # ---- books -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RuntimeError unless each index is whole and nothing is pinned that no move needs. [R13]"""
        for host in self.hosts:
            host.check()
        self.files.check()
        if self.limits.file_pages and not (self._stores or self._fetches) and self.files.num_pinned:
            raise RuntimeError(f"{self.files.num_pinned} files are kept for moves that have ended")
        if sum(self._storing) != len(self._stores):
            raise RuntimeError(f"{self._storing} host pages are kept for {len(self._stores)} files")

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _add_file_moves(self, moves: np.ndarray) -> None:
        if len(moves):
            self._file_moves.append(moves)

    def _new_ids(self, count: int) -> np.ndarray:
        start, self._next_id = self._next_id, (self._next_id + count) % (1 << 30)
        return (np.arange(start, start + count) % (1 << 30)).astype(np.int32)


def _moves(
    kind: MoveKind, dp_rank: int, source: np.ndarray, target: np.ndarray | int, hashes: np.ndarray
) -> np.ndarray:
    """Of one kind, one per source: [n] PAGE_MOVE."""
    moves = np.zeros(len(source), PAGE_MOVE)
    moves["kind"], moves["dp_rank"], moves["source"], moves["target"] = kind, dp_rank, source, target
    moves["hash_lo"], moves["hash_hi"] = hashes[:, 0], hashes[:, 1]
    return moves


def _first(wrong: np.ndarray) -> int:
    """How many elements stand before the first that is true."""
    return int(wrong.argmax()) if wrong.any() else len(wrong)
