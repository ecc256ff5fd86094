"""Who waits, in the order of admission, and who has waited too long. [R28]

The order is by a number that never changes while a request waits (policy.queue_key), so a heap holds it and nothing is
sorted again as requests age. Entries of requests that were aborted stay until they come up, or until half are such.
"""

import heapq

from glm53d.sched.req import Req, ReqState


class WaitingQueue:
    """Requests in state WAITING. Owned by one Scheduler."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Req]] = []
        self._behind: dict[int, list[tuple[tuple[int, int], Req]]] = {}  # by the handle of whom they wait for
        self._expiries: list[tuple[int, int, Req]] = []  # (ns, arrival number, request) of those that may expire
        self._size = 0
        self.num_tokens = 0  # that are not cached, as estimated on arrival

    def __len__(self) -> int:
        return self._size

    def push(self, req: Req, key: tuple[int, int], expires_ns: int = 0, behind: Req | None = None) -> None:
        """It waits from now on. expires_ns: when it is to be given up, 0: never. behind: it is nobody's head before
        this one is released.
        """
        if behind is None:
            heapq.heappush(self._heap, (key, req))
        else:
            self._behind.setdefault(behind.handle, []).append((key, req))
        if expires_ns:
            heapq.heappush(self._expiries, (expires_ns, req.order, req))
        self._size += 1
        self.num_tokens += req.uncached

    def release(self, first: Req) -> list[Req]:
        """Those that wait behind this one take their places in the order; who they are."""
        released = [entry for entry in self._behind.pop(first.handle, ()) if entry[1].state is ReqState.WAITING]
        for entry in released:
            heapq.heappush(self._heap, entry)
        return [req for _, req in released]

    def head(self) -> Req | None:
        """Who is next."""
        while self._heap and self._heap[0][1].state is not ReqState.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, req: Req) -> None:
        """It was admitted, or is over; its state says so by now, or will before the next call."""
        self._size -= 1
        self.num_tokens -= req.uncached
        if self._heap and req is self._heap[0][1]:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if entry[1] is not req and entry[1].state is ReqState.WAITING]
            heapq.heapify(self._heap)
        if len(self._expiries) > 2 * self._size + 64:
            self._expiries = [e for e in self._expiries if e[2] is not req and e[2].state is ReqState.WAITING]
            heapq.heapify(self._expiries)

    def pop_expired(self, now_ns: int) -> list[Req]:
        """Requests whose time is over; they still wait, here or for files. Those once admitted do not expire."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, _, req = heapq.heappop(self._expiries)
            if req.state in (ReqState.WAITING, ReqState.FETCH) and not req.admitted_ns:
                expired.append(req)
        return list(dict.fromkeys(expired))  # who was away for files and came back has two entries
