"""Which tokens leave now, as output records. [R37] [R38]

A request's first token goes at once; then a record leaves when `interval` tokens are not yet sent, or at its end. "Not
yet sent" decides, not "multiple of", so several tokens per step never skip a record. When the output ring is full
nothing is lost and nobody waits: ids stay in the token log and go with the next record; a last record is kept until it
fits.
"""

from collections import deque

import numpy as np

from glm53d._native import TokenLog
from glm53d.ipc.records import OUTPUT, FinishReason
from glm53d.sched.req import Req, Slots, out_head


class Throttle:
    """Makes output records of what has been put out. Owned by one Scheduler; the leader sends what take() gives."""

    def __init__(self, slots: Slots, log: TokenLog):
        self._slots = slots
        self._log = log
        self.now_ns = 0  # of the step being processed; set by the leader before each
        # (head [1], ids, error) of requests that have left their slot
        self._last: deque[tuple[np.ndarray, np.ndarray, bytes]] = deque()

    def due(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output records of those slots whose unsent ids should leave now. mark_sent() says which of them left.

        Returns:
            slots [n] int32; heads [n, itemsize] uint8, an OUTPUT each; ids int32, of all heads one after the other.
        """
        return self._leaving(slots, all=False)

    def _leaving(self, slots: np.ndarray, *, all: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        s = self._slots
        return self._log.leaving(slots, s.num_output, s.sent, s.interval, s.out_head_bytes, self.now_ns, all)

    def mark_sent(self, due: np.ndarray) -> None:
        """The records of these slots are in the ring."""
        self._slots.sent[due] = self._slots.num_output[due]

    def finish(self, req: Req, reason: FinishReason, *, matched_id: int = -1, matched_stop: int = -1) -> None:
        """A running request's last record, with all that is unsent. Only a match keeps text back for ever. [R38]"""
        heads, ids = self._all_of(req)
        heads["finish_reason"], heads["matched_id"], heads["matched_stop"] = reason, matched_id, matched_stop
        if matched_stop < 0:
            heads["held_bytes"] = 0
        self._last.append((heads, ids, b""))

    def fail(self, req: Req, message: str) -> None:
        """A running request's last record, with all that is unsent and why it does not go on: "code: sentence"."""
        heads, ids = self._all_of(req)
        heads["finish_reason"], heads["error_bytes"] = FinishReason.ERROR, len(message.encode())
        self._last.append((heads, ids, message.encode()))

    def flush(self, req: Req) -> None:
        """Everything unsent of a running request that loses its slot."""
        if self._slots.sent[req.slot] < self._slots.num_output[req.slot]:
            self._last.append((*self._all_of(req), b""))
            self._slots.sent[req.slot] = self._slots.num_output[req.slot]

    def _all_of(self, req: Req) -> tuple[np.ndarray, np.ndarray]:
        _, heads, ids = self._leaving(np.array([req.slot], np.int32), all=True)
        return heads.view(OUTPUT)[:, 0], ids

    def finish_unadmitted(self, req: Req, reason: FinishReason, message: str = "") -> None:
        """The only record of a request that never ran, or is waiting."""
        head = np.array([out_head(req, reason)])
        head["error_bytes"] = len(message.encode())
        self._last.append((head, np.empty(0, np.int32), message.encode()))

    def take_last(self) -> deque[tuple[np.ndarray, np.ndarray, bytes]]:
        """Records of requests that left their slot, oldest first; the leader removes from the left what it has sent."""
        return self._last
