"""Which tokens leave now, as output records. [R37] [R38]

A request's first token goes at once; then a record leaves when `interval` tokens are not yet sent, or at its end. "Not
yet sent" decides, not "multiple of", so several tokens per step never skip a record. When the output ring is full
nothing is lost and nobody waits: ids stay in the token log and go with the next record; a last record is kept until it
fits.

A request with logprobs has them in its records, a row for each id. Its records are made here one by one, cut where they
would be long, and go the way of the last ones; those of its prompt leave before any id.
"""

from collections import deque

import numpy as np

from glm53d._native import TokenLog
from glm53d.ipc.records import OUTPUT, FinishReason
from glm53d.sched.logprobs import MAX_RECORD_TOKENS
from glm53d.sched.req import Req, Slots, out_head

Record = tuple[np.ndarray, np.ndarray, bytes, bytes]
"""OUTPUT [1], int32 ids, error, logprobs: the parts of an output record."""


class Throttle:
    """Makes output records of what has been put out. Owned by one Scheduler; the leader sends what take() gives."""

    def __init__(self, slots: Slots, log: TokenLog):
        self._slots = slots
        self._log = log
        self.now_ns = 0  # of the step being processed; set by the leader before each
        self._last: deque[Record] = deque()

    def due(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output records of those slots whose unsent ids should leave now, but for requests with logprobs.

        mark_sent() says which of them left.

        Returns:
            slots [n] int32; heads [n, itemsize] uint8, an OUTPUT each; ids int32, of all heads one after the other.
        """
        if self._slots.asking:
            slots = slots[self._slots.top_logprobs[slots] < 0]
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
        self._put(req, heads, ids)

    def fail(self, req: Req, message: str) -> None:
        """A running request's last record, with all that is unsent and why it does not go on: "code: sentence"."""
        heads, ids = self._all_of(req)
        heads["finish_reason"], heads["error_bytes"] = FinishReason.ERROR, len(message.encode())
        self._put(req, heads, ids, message.encode())

    def flush(self, req: Req) -> None:
        """Everything unsent of a running request that loses its slot."""
        has_prompt = req.logprobs is not None and req.logprobs.prompt
        if has_prompt or self._slots.sent[req.slot] < self._slots.num_output[req.slot]:
            self._put(req, *self._all_of(req))
            self._slots.sent[req.slot] = self._slots.num_output[req.slot]

    def _put(self, req: Req, heads: np.ndarray, ids: np.ndarray, error: bytes = b"") -> None:
        """A record, with what logprobs the request has of it; in several, each with its part, if it is long."""
        if req.logprobs is None:
            self._last.append((heads, ids, error, b""))
            return
        prompt, output = req.logprobs.take()
        assert len(output) == len(ids), f"request {req.handle:#x}: {len(ids)} ids, {len(output)} logprobs"
        rows, num_prompt, at = np.concatenate([prompt, output]), len(prompt), 0
        while len(rows) - at > MAX_RECORD_TOKENS:
            part = heads.copy()
            part["finish_reason"] = part["error_bytes"] = 0
            self._last.append(_part(part, ids, rows, num_prompt, at, at + MAX_RECORD_TOKENS, b""))
            at += MAX_RECORD_TOKENS
        self._last.append(_part(heads, ids, rows, num_prompt, at, len(rows), error))

    def _all_of(self, req: Req) -> tuple[np.ndarray, np.ndarray]:
        _, heads, ids = self._leaving(np.array([req.slot], np.int32), all=True)
        return heads.view(OUTPUT)[:, 0], ids

    def finish_unadmitted(self, req: Req, reason: FinishReason, message: str = "") -> None:
        """The only record of a request that never ran, or is waiting."""
        head = np.frombuffer(out_head(req, reason), OUTPUT).copy()
        head["error_bytes"] = len(message.encode())
        self._last.append((head, np.empty(0, np.int32), message.encode(), b""))

    def take_last(self) -> deque[Record]:
        """Records of requests that left their slot, and those with logprobs that are due, oldest first.

        The leader removes from the left what it has sent; while anything is left, nothing more becomes due.
        """
        if not self._last:
            self._put_due()
        return self._last

    def _put_due(self) -> None:
        slots = self._slots
        for slot in slots.asking:
            req, unsent = slots.reqs[slot], slots.num_output[slot] - slots.sent[slot]
            assert req is not None and req.logprobs is not None
            if req.logprobs.prompt or (unsent and (not slots.sent[slot] or unsent >= slots.interval[slot])):
                self.flush(req)


def _part(
    heads: np.ndarray, ids: np.ndarray, rows: np.ndarray, num_prompt: int, start: int, end: int, error: bytes
) -> Record:
    """Of a record's rows of logprobs, those of the prompt before those of the ids, the ones from start to end."""
    first, behind = max(0, start - num_prompt), max(0, end - num_prompt)
    heads["num_prompt_logprobs"], heads["logprob_width"] = end - start - (behind - first), rows.shape[1]
    heads["token_offset"] += first
    heads["num_ids"], heads["num_output_ids"] = behind - first, heads["token_offset"] + behind - first
    return heads, ids[first:behind], error, rows[start:end].tobytes()
