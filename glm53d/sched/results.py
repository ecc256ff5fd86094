"""A step's result applied: tokens in, end found, pages handed on or freed. [R30] [R33] [R38]"""

import numpy as np

from glm53d._native import cut
from glm53d.ipc.batch import Batch, Mode, StepResult
from glm53d.ipc.records import ROW_FEED, ROW_SAMPLE, THINKING_FORCED, FinishReason
from glm53d.sched.logprobs import keep_output, take_prompts
from glm53d.sched.scheduler import MAX_DRAFTS, Counters, Scheduler

NO_ROWS = np.empty(0, np.int64)
GOES_ON, END_OF_TURN, FULL = 0, 1, 2  # verdicts of native cut()


def apply(sched: Scheduler, batch: Batch, result: StepResult, now_ns: int) -> None:
    """Take what a step sampled into the books of its requests, and end those that are over.

    A block of several tokens is cut at the first end of turn, at max_output and at the token that completes a stop
    string: what comes after is neither counted, sent nor cached. Vectorised over the batch; only prompts and finished
    requests are looked at one by one.
    """
    slots = sched.slots
    sched.throttle.now_ns = now_ns
    sched.in_flight -= 1
    sched.counters.steps += 1
    took_ns, sched.last_result_ns = now_ns - max(result.start_ns, sched.last_result_ns), now_ns
    prompts = (batch.row_flags & ROW_FEED) == 0
    sched.end_moves(result)
    if not batch.num_rows:
        slots.collected(batch.step)
        return
    if sched.limits.target_itl_ns and batch.mode is Mode.DP:  # no stream runs beside a prompt that all ranks share
        _measure(sched, batch, prompts, took_ns)
    if num_prompts := int(np.count_nonzero(prompts)):
        num_tokens = batch.num_tokens - (batch.num_rows - num_prompts) * sched.limits.decode_len
        sched.counters.prefill_tokens += num_tokens
        if not (batch.row_flags[prompts] & ROW_SAMPLE).all():
            sched.prefill_rate.add(num_tokens, took_ns)

    if sched.limits.num_draft_tokens:
        _count_drafts(sched.counters, batch, prompts, result.counts)
    slot, ids, counts, computed = batch.row_slot, result.ids, result.counts, batch.row_prefix_len + batch.row_extend_len
    if slots.any_gone:  # rows of requests that ended while the step ran
        here = slots.gone[slot] == 0
        sched.counters.dropped += int(counts[~here].sum())
        slot, ids, counts, computed, prompts = slot[here], ids[here], counts[here], computed[here], prompts[here]
        slots.collected(batch.step)
    slots.computed_len[slot] = computed
    asked = {}
    if slots.asking:
        asked = take_prompts(batch, result, {i: req.logprobs for i in slots.asking if (req := slots.reqs[i])})
    if num_prompts:
        _prompts(sched, slot[prompts], now_ns)
    if not counts.all():
        rows = counts > 0
        slot, ids, counts = slot[rows], ids[rows], counts[rows]
    if not len(slot):
        return
    forced = thought = NO_ROWS
    if slots.num_with_grammar:
        ids = _calls_in_thought(sched, slot, ids, counts)
    num_own = counts  # the model's
    if slots.num_thinking:
        ids, counts, forced = _end_thinking(sched, slot, ids, counts)
        num_own = counts.copy()
        num_own[forced] -= 1
    if slots.num_with_grammar:
        counts, thought = _cut_thought(sched, slot, ids, counts)
    cuts = cut(slot, ids, counts, slots.num_output, slots.max_output, slots.ignore_eos, sched.is_eos)
    counts, verdict = cuts[:, 0].copy(), cuts[:, 1]
    stopped = _look_closer(sched, slot, ids, counts, verdict) if slots.num_with_stops else {}
    num_new, gap_ns = sched.log.advance(slot, counts, ids, slots.seq_len, slots.num_output, slots.token_ns, now_ns)
    for i in np.flatnonzero(slots.top_logprobs[slot] >= 0).tolist() if asked else ():
        req = slots.reqs[slot[i]]
        assert req is not None and req.logprobs is not None
        keep_output(req.logprobs, asked[slot[i]], ids[i, : counts[i]])
    sched.counters.decode_tokens += num_new
    sched.longest_gap.add(gap_ns, now_ns)
    if sched.limits.num_draft_tokens:
        # Drafts that were refused or cut off are computed for nothing.
        slots.prefix_len[slot] = slots.computed_len[slot] = slots.seq_len[slot] - 1
        accepted = np.maximum(np.minimum(counts, num_own) - 1, 0)  # of none nothing was wanted
        slots.out_heads["num_accepted"][slot] += accepted.astype(np.uint32)
    if slots.num_with_grammar:
        _follow_grammars(sched, slot, ids, counts, verdict, thought)
    if len(forced) or len(thought):
        _compute_forced(sched, slot, counts, verdict, forced, thought)
    for i in verdict.nonzero()[0].tolist():
        req = slots.reqs[slot[i]]
        assert req is not None
        matched_id = -1
        if i in stopped:  # also where an end of turn completes it: what is cut off counts
            sched.throttle.finish(req, FinishReason.STOP, matched_stop=stopped[i])
        elif verdict[i] == END_OF_TURN:
            matched_id = int(ids[i, counts[i] - 1])
            sched.throttle.finish(req, FinishReason.STOP, matched_id=matched_id)
        else:
            sched.throttle.finish(req, FinishReason.LENGTH)
        sched.finish(req, made_calls=matched_id in sched.limits.calls_ends)


def _count_drafts(counters: Counters, batch: Batch, prompts: np.ndarray, counts: np.ndarray) -> None:
    """How many drafts were right, by place. Rows that a grammar narrows take none of them."""
    verified = ~prompts
    verified[batch.mask_row] = False
    places = np.arange(1, MAX_DRAFTS + 1)
    counters.drafts_verified += int(np.count_nonzero(verified))
    counters.drafts_accepted += (counts[verified, None] > places).sum(axis=0)


def _measure(sched: Scheduler, batch: Batch, prompts: np.ndarray, took_ns: int) -> None:
    """Learn from the step's time, which is that of the rank with most to do. Prompts' context is a chunk's mean."""
    num_ranks = len(sched.ranks)
    if not prompts.any():
        most_rows = batch.dp_num_tokens.max() // sched.limits.decode_len
        sched.cost.add(int(most_rows), 0, 0.0, took_ns)
        return
    rank, tokens = batch.row_dp_rank[prompts], batch.row_extend_len[prompts].astype(np.float64)
    area = tokens * (batch.row_prefix_len[prompts] + tokens / 2)
    most_rows = np.bincount(batch.row_dp_rank[~prompts], minlength=num_ranks).max()
    most_tokens = np.bincount(rank, weights=tokens, minlength=num_ranks).max()
    most_area = np.bincount(rank, weights=area, minlength=num_ranks).max()
    sched.cost.add(int(most_rows), int(most_tokens), float(most_area), took_ns)


def _prompts(sched: Scheduler, prompt_slots: np.ndarray, now_ns: int) -> None:
    """What the rows that computed prompt tokens mean for their requests."""
    slots = sched.slots
    for slot in prompt_slots.tolist():
        req = slots.reqs[slot]
        assert req is not None
        head = slots.out_heads[slot]
        if not head["first_forward_ns"]:
            head["first_forward_ns"] = now_ns
        sched.keep_prefix(req)
        if slots.computed_len[slot] == len(req.tokens):
            head["prefill_done_ns"] = now_ns
        if sched.prompt_is_computed(req):
            sched.release_siblings(req)


def _end_thinking(
    sched: Scheduler, slot: np.ndarray, ids: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put the end of thinking behind the last token that a budget allows, as if it had been sampled. [R46]

    Returns:
        ids and counts, copies where changed; indices of the rows that this was done to.
    """
    slots, end = sched.slots, sched.limits.think_end
    left, place = slots.think_left[slot], np.arange(ids.shape[1])
    seen = (place < counts[:, None]) & (place < left[:, None])
    said = (sched.ends_thinking(slot, ids) & seen).any(axis=1)
    goes_on = (left >= 0) & ~said
    forced = goes_on & (counts >= left)
    slots.limit_thinking(slot, np.where(goes_on & ~forced, left - counts, -1))
    rows = np.flatnonzero(forced)
    if len(rows):
        ids, counts = np.pad(ids, ((0, 0), (0, 1)), constant_values=-1), counts.copy()
        ids[rows, left[rows]] = end
        counts[rows] = left[rows] + 1
    return ids, counts, rows


def _calls_in_thought(sched: Scheduler, slot: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """A call ends thinking [F-E7]. Where a grammar is to hold behind that, the end of thinking stands for its
    tag, which the grammar then may allow. Returns ids, a copy where changed.
    """
    begun = (ids == sched.limits.call_begin) & sched.slots.think_free[slot][:, None]
    if not begun.any():
        return ids
    return np.where(begun & (np.arange(ids.shape[1]) < counts[:, None]), sched.limits.think_end, ids)


def _cut_thought(
    sched: Scheduler, slot: np.ndarray, ids: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A grammar that begins behind thinking does so exactly there: what was sampled behind it had no mask. [F-E15]

    Returns:
        counts, a copy where changed; indices of the rows whose thinking has ended.
    """
    place = np.arange(ids.shape[1])
    ends = (ids == sched.limits.think_end) & (place < counts[:, None]) & sched.slots.think_free[slot][:, None]
    rows = np.flatnonzero(ends.any(axis=1))
    if len(rows):
        counts = counts.copy()
        counts[rows] = ends[rows].argmax(axis=1) + 1
    return counts, rows


def _follow_grammars(
    sched: Scheduler, slot: np.ndarray, ids: np.ndarray, counts: np.ndarray, verdict: np.ndarray, thought: np.ndarray
) -> None:
    """Tell grammars which ids came, and begin those of the rows that have thought."""
    slots = sched.slots
    for i in np.flatnonzero(slots.constrained[slot] & (verdict == GOES_ON)).tolist():
        req = slots.reqs[slot[i]]
        assert req is not None
        sched.advance_grammar(req, ids[i, : counts[i]].tolist())
    if sched.grammars is not None:
        sched.grammars.flush()
    for i in thought[verdict[thought] == GOES_ON].tolist():
        req = slots.reqs[slot[i]]
        assert req is not None
        if sched.log.get(slot[i])[-1] == sched.limits.think_end:  # else a stop string has cut it off
            sched.begin_grammar(req)


def _compute_forced(
    sched: Scheduler, slot: np.ndarray, counts: np.ndarray, verdict: np.ndarray, forced: np.ndarray, thought: np.ndarray
) -> None:
    """Where ranks know another last token than we do, all that is new is computed from its ids, as a prompt's are.

    That is behind a forced end of thinking; and behind one where a grammar begins, for ranks have sampled on.
    """
    slots, rows = sched.slots, np.union1d(forced, thought)
    for i in rows[slots.prefix_len[slot[rows]] > slots.computed_len[slot[rows]]].tolist():
        slots.void(slot[i], sched.step)
    slots.prefix_len[slot[rows]] = slots.computed_len[slot[rows]] = slots.seq_len[slot[rows]] - counts[rows]
    is_forced = np.isin(rows, forced)
    for i, force in zip(rows.tolist(), is_forced.tolist(), strict=True):
        req = slots.reqs[slot[i]]
        assert req is not None
        if not counts[i] or sched.log.get(slot[i])[-1] != sched.limits.think_end:
            continue  # it ended before
        if force:
            sched.counters.thinking_forced += 1
            req.thinking_forced = True
            slots.out_heads[slot[i]]["flags"] |= THINKING_FORCED
        if verdict[i] == GOES_ON:
            sched.compute_forced(req)


def _look_closer(
    sched: Scheduler, slot: np.ndarray, ids: np.ndarray, counts: np.ndarray, verdict: np.ndarray
) -> dict[int, int]:
    """Stop ids and stop strings, for the rows that have any. [R40]

    Args:
        slot: [n] int32. ids: [n, width] int32. counts, verdict: [n] int32 of native cut(); both are brought up to date.
    Returns:
        For each row that said a stop string, the string's index.
    """
    slots, stopped = sched.slots, {}
    for i in np.flatnonzero(slots.has_stop_ids[slot]).tolist():
        req = slots.reqs[slot[i]]
        assert req is not None
        early = max(0, req.head["min_new_tokens"] - int(slots.num_output[slot[i]]) - 1)  # too soon to end there
        hits = early + np.flatnonzero(np.isin(ids[i, early : counts[i]], req.stop_ids))
        if len(hits):
            counts[i], verdict[i] = hits[0] + 1, END_OF_TURN
    rows = np.flatnonzero(slots.has_stop_strings[slot])
    if len(rows):
        fed = sched.stops.feed(slot[rows], counts[rows], ids[rows])
        shorter = fed[:, 0] < counts[rows]
        counts[rows] = fed[:, 0]
        verdict[rows[shorter]] = GOES_ON  # what ended it lies behind the match
        slots.out_heads["held_bytes"][slot[rows]] = fed[:, 2]
        stopped = {row: match for row, match in zip(rows.tolist(), fed[:, 1].tolist(), strict=True) if match >= 0}
        verdict[list(stopped)] = END_OF_TURN
    return stopped
