"""Who waits, in the order of admission, and who has waited too long. [R28]

The order is by a number that never changes while a request waits (policy.queue_key), so a heap holds it and nothing is
sorted again as requests age: one heap of those that may go to any rank, and one for each rank that others must go to,
as that may be full while another has room. Entries of requests that were aborted stay until they come up, or until half
are such.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection

from glm53d.sched.req import Req, ReqState

_WAIT = (ReqState.WAITING, ReqState.FETCH)


class WaitingQueue:
    """Requests in state WAITING. Owned by one Scheduler."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[tuple[int, int], Req]]] = defaultdict(list)  # by wanted rank, -1: any
        self._behind: dict[int, list[tuple[tuple[int, int], Req]]] = {}  # by the handle of whom they wait for
        # (ns, arrival number, request, whether it is its deadline that passes then) of those that may expire
        self._expiries: list[tuple[int, int, Req, bool]] = []
        self._size = 0
        self.num_tokens = 0  # that are not cached, as estimated on arrival

    def __len__(self) -> int:
        return self._size

    def push(self, req: Req, key: tuple[int, int], behind: Req | None = None) -> None:
        """It waits from now on. behind: it is nobody's head before this one is released."""
        if behind is None:
            heapq.heappush(self._heaps[req.wanted_rank], (key, req))
        else:
            self._behind.setdefault(behind.handle, []).append((key, req))
        self._size += 1
        self.num_tokens += req.uncached

    def expire(self, req: Req, ns: int, *, is_late: bool) -> None:
        """Give it up then: because it will have waited too long, if it was never admitted by then; or because its
        deadline passes, if it has put out nothing.
        """
        heapq.heappush(self._expiries, (ns, req.order, req, is_late))

    def release(self, first: Req, dp_rank: int) -> list[Req]:
        """Those that wait behind this one take their places in the order. dp_rank: where they go, -1: as they want."""
        released = [(key, req) for key, req in self._behind.pop(first.handle, ()) if req.state is ReqState.WAITING]
        for key, req in released:
            if dp_rank >= 0:
                req.wanted_rank = dp_rank
            heapq.heappush(self._heaps[req.wanted_rank], (key, req))
        return [req for _, req in released]

    def head(self, blocked: Collection[int] = ()) -> Req | None:
        """Who is next, of those that need not go to a blocked rank."""
        first: tuple[tuple[int, int], Req] | None = None
        for wanted_rank, heap in self._heaps.items():
            if wanted_rank in blocked:
                continue
            while heap and heap[0][1].state is not ReqState.WAITING:
                heapq.heappop(heap)
            if heap and (first is None or heap[0][0] < first[0]):
                first = heap[0]
        return first[1] if first is not None else None

    def remove(self, req: Req) -> None:
        """It was admitted, or is over; its state says so by now, or will before the next call."""
        self._size -= 1
        self.num_tokens -= req.uncached
        heap = self._heaps[req.wanted_rank]
        if heap and req is heap[0][1]:
            heapq.heappop(heap)
        elif len(heap) > 2 * self._size + 64:
            heap[:] = [entry for entry in heap if entry[1] is not req and entry[1].state is ReqState.WAITING]
            heapq.heapify(heap)
        if len(self._expiries) > 2 * self._size + 64:
            self._expiries = [e for e in self._expiries if e[2] is not req and e[2].state in _WAIT]
            heapq.heapify(self._expiries)

    def pop_expired(self, now_ns: int) -> dict[Req, bool]:
        """Requests whose time is over, and whether it was their deadline; they still wait, here or for files."""
        expired: dict[Req, bool] = {}  # one that was away and came back has several entries
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, _, req, is_late = heapq.heappop(self._expiries)
            goes_on = req.num_output_ids if is_late else req.admitted_ns
            if req.state in _WAIT and not goes_on:
                expired.setdefault(req, is_late)
        return expired
