"""A step's result applied: tokens in, end found, pages handed on or freed. [R30] [R33] [R38]"""

import numpy as np

from glm53d.ipc.batch import Batch, StepResult
from glm53d.ipc.records import ROW_FEED, FinishReason
from glm53d.sched.req import ReqState
from glm53d.sched.scheduler import Scheduler


def apply(sched: Scheduler, batch: Batch, result: StepResult, now_ns: int) -> None:
    """Take what a step sampled into the books of its requests, and end those that are over.

    A block of several tokens is cut at the first end of turn, at max_output and at the token that completes a stop
    string: what comes after is neither counted, sent nor cached. Vectorised over the batch; only prompts and finished
    requests are looked at one by one.
    """
    slots = sched.slots
    sched.throttle.now_ns = now_ns
    slots.prefix_len[batch.row_slot] += batch.row_extend_len
    fed = (batch.row_flags & ROW_FEED) != 0
    num_prefill = int(batch.row_extend_len.sum()) - int(np.count_nonzero(fed))
    sched.counters.steps += 1
    sched.counters.prefill_tokens += num_prefill
    if num_prefill:
        _prompts(sched, batch, now_ns)

    rows = np.flatnonzero(result.counts > 0)
    if not len(rows):
        return
    slot, ids = batch.row_slot[rows], result.ids[rows]
    counts, ended = _cut(sched, slot, ids, result.counts[rows])
    stopped = _match_stops(sched, slot, ids, counts)
    sched.log.append(slot, counts, ids)
    slots.seq_len[slot] += counts
    slots.num_output[slot] += counts
    sched.counters.decode_tokens += int(counts.sum())
    full = slots.num_output[slot] >= slots.max_output[slot]
    ended[list(stopped)] = True
    for i in np.flatnonzero(ended | full).tolist():
        req = slots.reqs[slot[i]]
        assert req is not None
        if i in stopped:  # also where an end of turn completes it: what is cut off counts
            sched.throttle.finish(req, FinishReason.STOP, matched_stop=stopped[i])
        elif ended[i]:
            sched.throttle.finish(req, FinishReason.STOP, matched_id=int(ids[i, counts[i] - 1]))
        else:
            sched.throttle.finish(req, FinishReason.LENGTH)
        sched.finish(req)


def _prompts(sched: Scheduler, batch: Batch, now_ns: int) -> None:
    """What the rows that computed prompt tokens mean for their requests."""
    slots = sched.slots
    for slot in batch.row_slot[(batch.row_flags & ROW_FEED) == 0]:
        req = slots.reqs[slot]
        assert req is not None
        head = slots.out_heads[slot]
        if not head["first_forward_ns"]:
            head["first_forward_ns"] = now_ns
        if slots.prefix_len[slot] == len(req.tokens):
            head["prefill_done_ns"] = now_ns
            sched.prompt_done(req)
        sched.keep_prefix(req)
        assert req.state in (ReqState.PREFILL, ReqState.DECODE)


def _cut(sched: Scheduler, slot: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many of each row's tokens count, and whether the last of these ends the turn. [R38]

    Args:
        slot: [n] int32. ids: [n, width] int32. counts: [n] int32, at least 1.
    Returns:
        counts [n] int32, at least 1; ended [n] bool.
    """
    slots = sched.slots
    counts = np.minimum(counts, slots.max_output[slot] - slots.num_output[slot]).astype(np.int32)
    ends = sched.is_eos[np.clip(ids, 0, len(sched.is_eos) - 1)] & ~slots.ignore_eos[slot][:, None]
    if slots.has_stop_ids[slot].any():
        for i in np.flatnonzero(slots.has_stop_ids[slot]):
            req = slots.reqs[slot[i]]
            assert req is not None
            ends[i] |= np.isin(ids[i], req.stop_ids)
    ends &= np.arange(ids.shape[1]) < counts[:, None]
    ended = ends.any(1)
    return np.where(ended, ends.argmax(1) + 1, counts).astype(np.int32), ended


def _match_stops(sched: Scheduler, slot: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> dict[int, int]:
    """Look for stop strings in the tokens that count; the index of its string for each row that says one. [R40]

    Args:
        slot, ids: as in _cut. counts: [n] int32; of a row with a match it becomes the token that completes it.
    """
    slots = sched.slots
    rows = np.flatnonzero(slots.has_stop_strings[slot])
    if not len(rows):
        return {}
    fed = sched.stops.feed(slot[rows], counts[rows], ids[rows])
    counts[rows] = fed[:, 0]
    slots.out_heads["held_bytes"][slot[rows]] = fed[:, 2]
    return {row: matched for row, matched in zip(rows.tolist(), fed[:, 1].tolist(), strict=True) if matched >= 0}
