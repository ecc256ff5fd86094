"""The scheduler of the whole node: what every rank computes next, and which pages it may use. [R26]–[R31]

    receive() ─► waiting ──admit──► prefilling ──► decoding ──► done      one Scheduler, on rank 0, plans for all ranks
                    ▲                   │              │
                    └────── retract ────┴──────────────┘      next_batch() ─► Batch ─► StepResult ─► results.apply()

Integers in, Batch out: no clock (times are passed in), no thread, no torch. Recency is the step number. Each
attention-DP rank has its own page pool and prefix tree; slots are numbered over the whole node.

Overlap [R34]. With max_in_flight 2, step k+1 is planned before k has a result: a decoding row goes on with the token
that k will sample, whatever it is. If that ends the request, its row in k+1 was for nothing and its token is dropped.
Ranks compute steps in the order of their launch, so pages may change hands as soon as their owner ends: what a launched
step still writes there is written before any later step's owner writes or reads. Slots carry results, so they may not.

Over 400 lines, because admission, planning, retraction and leaving all change the same pools, trees and slots: cut in
two, each half would write the other's state. What has a state of its own, or none, has a file of its own: limits,
policy, placement, queue, rows, changes, sources, tiers, sessions, tables, grammar, logprobs, throttle, results.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from glm53d._native import ByteVocab, StopTable, TokenLog, page_hashes, ready_rows
from glm53d.grammar.compiler import Matcher
from glm53d.ipc.batch import Batch, Mode, StepResult
from glm53d.ipc.records import (
    NO_STOP_TRIM,
    PROBE,
    ROW_SAMPLE,
    SKIP_SPECIAL,
    STOP_BEFORE_CALLS,
    STOP_IN_CONTENT,
    FinishReason,
    GrammarKind,
)
from glm53d.kv.books import check as check_books
from glm53d.kv.events import KvEvents
from glm53d.kv.pages import PagePool
from glm53d.kv.prefix import PrefixTree
from glm53d.sched import policy
from glm53d.sched.changes import Changes
from glm53d.sched.grammar import FAILED, Grammars
from glm53d.sched.limits import Limits
from glm53d.sched.logprobs import MAX_STEP_TARGETS
from glm53d.sched.measure import LongestGap, Rate, StepCost
from glm53d.sched.placement import POLICIES, RankLoad
from glm53d.sched.queue import WaitingQueue
from glm53d.sched.req import Req, ReqState, Slots
from glm53d.sched.rows import DecodeRows, ReadyRows
from glm53d.sched.sessions import Sessions
from glm53d.sched.sources import Sources
from glm53d.sched.tables import entries_of
from glm53d.sched.throttle import Throttle
from glm53d.sched.tiers import Loads, Tiers

MAX_DRAFTS = 5  # of a request and step
LATE = "deadline_exceeded: The first token could not come before the request's deadline."
TIMED_OUT = "queue_timeout: The request waited too long to be admitted (scheduler.queue_timeout_s)."
TURN_HEAD = 4  # ids at a prompt's end that begin the answer, which may be others when it comes back
POLL_US = 2000  # how long a step without rows waits for a file that a request waits for
AIM = 0.9  # of target_itl_ns: what a step is planned for, as none takes exactly what was predicted


@dataclass(slots=True, eq=False)
class DpRank:
    """One attention-DP rank's pool, tree and running requests."""

    index: int
    pool: PagePool
    tree: PrefixTree
    moving: list[Req] = field(default_factory=list)  # admission order
    prefilling: list[Req] = field(default_factory=list)  # likewise
    decoding: list[int] = field(default_factory=list)  # slots, admission order
    table_rows: list[int] = field(default_factory=list)  # of the sampling tables, that nobody has


@dataclass(slots=True)
class Counters:
    """Since the world began; the leader publishes them on the board."""

    received: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0  # of cached_tokens
    cached_storage_tokens: int = 0  # likewise
    decode_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0
    dropped: int = 0  # tokens sampled for requests that had ended while their step ran, or whose grammar had begun
    drafts_verified: int = 0  # times that a request's drafts were held against the model
    drafts_accepted: np.ndarray = field(default_factory=lambda: np.zeros(MAX_DRAFTS, np.int64))  # by place among them
    thinking_forced: int = 0  # times that thinking was ended because its budget was used up
    expired: int = 0  # waited too long, or could not meet their deadline
    stale: int = 0
    books_checked: int = 0


NO_HASHES = np.empty((0, 2), np.uint64)


class Scheduler:
    """Plans one step at a time for all ranks."""

    def __init__(
        self,
        limits: Limits,
        vocab: ByteVocab,
        world_id: int = 0,
        stored: np.ndarray = NO_HASHES,
        grammars: Grammars | None = None,
        kv_events: KvEvents | None = None,
    ):
        """vocab is main's: both count the same bytes of text. [R40] stored: hashes of page files, oldest first.
        grammars: None: no request has one. kv_events: where it tells what is cached; None: nobody asks.
        """
        self.limits = limits
        self.kv_events = kv_events
        self.grammars = grammars
        self.world_id = world_id
        self.ranks = [
            DpRank(i, PagePool(limits.num_pages, debug=limits.debug), PrefixTree()) for i in range(limits.attn_dp_size)
        ]
        for rank in self.ranks:
            rank.table_rows = [rank.index * limits.max_biased + i for i in reversed(range(limits.max_biased))]
        trees = [rank.tree for rank in self.ranks]
        self.sessions = Sessions(trees, limits.session_ttl_ns, limits.max_session_pages)
        self.tiers = Tiers(limits.tiers, trees, stored)
        self._fetching: dict[int, Req] = {}  # by handle: in state FETCH
        self._place = POLICIES[limits.placement]
        self.slots = Slots(limits.max_running, limits.page_size)
        self.log = TokenLog(limits.max_running)  # what running requests have put out since admission
        self.stops = StopTable(limits.max_running, vocab, limits.think_end, limits.call_begin)
        self.reqs: dict[int, Req] = {}  # by handle: waiting and running
        self.waiting = WaitingQueue()
        self.throttle = Throttle(self.slots, self.log)
        self.counters = Counters()
        self.cost = StepCost()
        self.prefill_rate = Rate()
        self.sources = Sources(trees, self.tiers, self.prefill_rate, limits.page_size)
        self.longest_gap = LongestGap()
        self.last_result_ns = 0  # when the last step's result was applied
        self.step = 0
        self.in_flight = 0  # steps planned, and so launched, whose result has not been applied
        self.is_paused = False
        self.is_eos = np.zeros(limits.vocab_size, bool)
        self.is_eos[list(limits.eos_ids)] = True
        self._decode_slots: np.ndarray | None = None  # all decoding slots by rank; None: membership changed
        self._all_rows = DecodeRows.make(limits.max_running, limits.decode_len)
        self._decode_rows = self._all_rows  # as many as decode
        self._forced: list[Req] = []  # that must compute tokens they have not sampled, and may lack pages for them
        self._changes = Changes(limits.vocab_size)

    # ---- inbox -------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, now_ns: int) -> None:
        """A generate record from main. A health probe is answered at once while others run. [R4]"""
        req = Req.from_record(data, self.counters.received, now_ns)
        self.counters.received += 1
        if req.head["flags"] & PROBE and (self.num_running or self.is_paused):
            self.throttle.finish_unadmitted(req, FinishReason.STOP)
            return
        if len(req.tokens) > self.limits.max_req_input_len:
            message = f"context_length_exceeded: {len(req.tokens)} tokens, at most {self.limits.max_req_input_len} fit"
            self.throttle.finish_unadmitted(req, FinishReason.ERROR, message)
            return
        size = self.limits.page_size
        hashes = req.hashes[: policy.usable_prefix(req, size)]
        if self.limits.placement == "follow_bootstrap_room" and req.wanted_rank < 0:
            [req.wanted_rank] = self._place(len(req.tokens), [RankLoad(0, 0, 0)] * len(self.ranks), req.turn)
        req.uncached = len(req.tokens) - size * max(rank.tree.peek(hashes) for rank in self.ranks)
        self.sessions.touch(req.session, now_ns)
        self.reqs[req.handle] = req
        if req.grammar:
            self._open_grammar(req)
        else:
            self._enqueue(req)

    def abort(self, handle: int) -> None:
        """Forget a request, in whatever state; its computed pages stay cached.

        An unknown handle is stale. [R12] [R22]
        """
        req = self.reqs.get(handle)
        if req is None:
            self.counters.stale += 1
            return
        self.counters.aborted += 1
        if req.slot < 0:
            self._give_up(req, FinishReason.ABORT)
        else:
            self.throttle.finish(req, FinishReason.ABORT)
            self.finish(req)

    def _give_up(self, req: Req, reason: FinishReason, message: str = "") -> None:
        """End a request that has no slot, wherever it waits."""
        if req.state is ReqState.WAITING:
            self.waiting.remove(req)
        elif req.state is ReqState.FETCH:
            del self._fetching[req.handle]
        self._end_unadmitted(req, reason, message)

    def _end_unadmitted(self, req: Req, reason: FinishReason, message: str = "") -> None:
        self._release_fetch(req)
        req.become(ReqState.DONE)
        self._forget(req)
        self.throttle.finish_unadmitted(req, reason, message)

    def flush_cache(self) -> int:
        """Free every cached page that no running request holds and no move needs, in all tiers; how many."""
        num_pages = self.tiers.clear()
        for rank in self.ranks:
            while self.sessions.evict(rank.index):
                pass
            pages, hashes = rank.tree.evict(rank.tree.evictable_pages)
            rank.pool.free(pages)
            if self.kv_events is not None:
                self.kv_events.removed(rank.index, hashes)
            num_pages += len(pages)
        return num_pages

    def pause(self, *, retract: bool) -> int:
        """Plan no further step; requests still come and can be aborted. How many wait or stand still.

        retract: running requests go back to the queue, and their pages to whom needs them; no step may be in flight.
        """
        self.is_paused = True
        if retract:
            for rank in self.ranks:
                for req in list(self._running(rank)):
                    self._retract(req)
        return len(self.reqs)

    def resume(self) -> int:
        """Plan again; for how many requests."""
        self.is_paused = False
        return len(self.reqs)

    def abort_all(self) -> None:
        """Abort whatever is waiting or running."""
        for handle in list(self.reqs):
            self.abort(handle)

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def next_batch(self, now_ns: int) -> Batch | None:
        """Choose the tokens every rank computes next; None when nothing can run. [R29]

        Every decoding request gets its tokens; what is left of each rank's budget extends admitted prompts in admission
        order, the last perhaps by a chunk only, then admits waiting ones. So no prompt, however long, delays an ITL by
        more than one step, and a step is as long as max_step_tokens, max_step_area and target_itl_ns together allow.
        """
        if self.in_flight >= self.limits.max_in_flight:
            return None
        if self.grammars is not None:
            self._take_grammars(self.grammars)
        self._expire(now_ns)
        if not (self.reqs or self.tiers.is_on) or self.is_paused or (ready := self._ready()) is None:
            return None
        if self.tiers.is_on:
            self._end_moving()
        chunks = self._prompt_chunks(now_ns) if self.waiting or any(rank.prefilling for rank in self.ranks) else []
        if self.tiers.is_on:
            for rank in self.ranks:
                loads = [req.loads for req in rank.moving if req.loads is not None]
                self.tiers.load(loads, rank.index)
        if not len(ready.slots) and not chunks:
            return self._build_moves(ready)
        is_alone = len(chunks) == 1 and not any(rank.decoding for rank in self.ranks)
        if len(self.ranks) > 1 and is_alone and not chunks[0][0].wants_prompt_logprobs:
            return self._build_alone(ready, *chunks[0])
        return self._build(ready, chunks)

    def _build_moves(self, ready: ReadyRows) -> Batch | None:
        """A step without rows, for pages that should move or may have moved."""
        waits = self.tiers.num_fetching > 0 and not self.in_flight
        if not self.tiers.has_moves and not waits:
            return None
        batch = self._build(ready, [])
        if waits and not any(rank.moving for rank in self.ranks):
            batch.wait_us = POLL_US
        return batch

    def _build_alone(self, ready: ReadyRows, req: Req, num_tokens: int) -> Batch:
        """One prompt and nothing else: all ranks compute it together, with all their budgets, if that is worth it."""
        num_ranks, prefix_len = len(self.ranks), int(self.slots.prefix_len[req.slot])
        limits = self.limits
        budget = policy.Budget(
            tokens=num_ranks * limits.max_step_tokens,
            area=num_ranks * max(limits.max_step_area, limits.max_context_len),
        )
        together = budget.chunk(prefix_len, len(req.tokens) - prefix_len)
        if together < num_ranks * policy.SPLIT_LEAST:
            return self._build(ready, [(req, num_tokens)])
        batch = self._build(ready, [(req, together)])
        batch.mode = Mode.CP
        batch.dp_num_tokens = np.full(num_ranks, together // num_ranks, np.int32)
        batch.dp_num_tokens[: together % num_ranks] += 1
        return batch

    def decoding_slots(self) -> np.ndarray:
        """Slots of decoding requests, ordered by rank. Changes only when one begins or ends to decode."""
        if self._decode_slots is None:
            self._decode_slots = np.array([slot for rank in self.ranks for slot in rank.decoding], np.int32)
            self._decode_rows = self._all_rows.first([len(rank.decoding) for rank in self.ranks])
        return self._decode_slots

    def _ready(self) -> ReadyRows | None:
        """The decoding rows of the next step, with pages for what it writes; retracts or ends some if need be. [R30]

        None: pages are short, and the results of steps in flight must come first. They may end a request, and nobody is
        retracted whose last token is not known yet.
        """
        slots, limits = self.slots, self.limits
        while self._forced:
            req = self._forced[-1]
            if req.state is ReqState.PREFILL and not self._grow(req, int(slots.seq_len[req.slot]) + limits.headroom):
                return None
            self._forced.pop()
        while True:
            decode = self.decoding_slots()
            prefix_len, sit_out, need_pages = ready_rows(
                decode, slots.seq_len, slots.prefix_len, slots.end_len, slots.num_pages, slots.needs_value,
                limits.page_size, limits.headroom, limits.num_draft_tokens == 0,
            )  # fmt: skip
            if slots.num_with_grammar:  # whose mask is not there sits out too
                sit_out = np.union1d(sit_out, np.flatnonzero(slots.held[decode]))
            if not len(need_pages):
                return ReadyRows.of(decode, prefix_len, self._decode_rows, sit_out)
            for i in need_pages.tolist():
                req = slots.reqs[decode[i]]
                if req is None or req.state is not ReqState.DECODE:
                    continue  # retracted for one before it
                if not self._grow(req, int(prefix_len[i]) + 1 + limits.headroom):
                    return None

    def _grow(self, req: Req, num_tokens: int) -> bool:
        """See that a running request has pages for so many tokens; False: results in flight must come first."""
        count = policy.pages_for(num_tokens, self.limits.page_size) - int(self.slots.num_pages[req.slot])
        if count > 0 and (pages := self._pages_for_running(req, count)) is not None:
            self._append_pages(req, pages)
            return True
        return count <= 0 or not self.in_flight

    def _pages_for_running(self, req: Req, count: int) -> np.ndarray | None:
        """Pages for a running request, retracting others of its rank until there are, then who copies from it.

        None when it had to go itself, or when steps are in flight and retracting would be next.
        """
        rank = self.ranks[req.dp_rank]
        while (pages := self._allocate(rank, count)) is None:
            if self.in_flight:
                return None
            running = [(r, int(self.slots.num_output[r.slot])) for r in self._running(rank)]
            loser = policy.victim(running) or self._copier_from(rank)
            if loser is None:  # alone and out of pages: the pool is its limit [F-I2]
                self.throttle.finish(req, FinishReason.LENGTH)
                self.finish(req)
                return None
            self._retract(loser)
            if loser is req:
                return None
        return pages

    def _copier_from(self, rank: DpRank) -> Req | None:
        """A request of another rank that holds pages of this one's tree while it copies them."""
        for req in (req for other in self.ranks for req in other.moving):
            if req.loads is not None and req.loads.peer[0] == rank.index:
                return req
        return None

    def _prompt_chunks(self, now_ns: int) -> list[tuple[Req, int]]:
        """What of which prompts fits into the step beside the decoding rows; admits as many as get something of it."""
        budgets = self._budgets()
        chunks: list[tuple[Req, int]] = []
        targets_left, entries_left = MAX_STEP_TARGETS, self.limits.max_table_entries

        def take(req: Req) -> None:
            nonlocal targets_left, entries_left
            if self.slots.held[req.slot]:
                return  # retracted when it waited for its mask, and still does
            num_entries = 0
            if self._changes.has_table(req):
                num_entries = entries_of(req, int(self.slots.seq_len[req.slot]), self.limits.vocab_size)
                if num_entries > entries_left:
                    return
            prefix_len = int(self.slots.prefix_len[req.slot])
            left = int(self.slots.seq_len[req.slot]) - prefix_len
            unsent = req.logprobs if req.wants_prompt_logprobs else None
            if unsent is not None:
                left = min(left, targets_left) if unsent.num_prompt <= MAX_STEP_TARGETS else 0
            num_tokens = budgets[req.dp_rank].chunk(prefix_len, left) if left else 0
            if unsent is not None:
                targets_left -= num_tokens
            if num_tokens:
                entries_left -= num_entries
                chunks.append((req, num_tokens))

        for rank in self.ranks:
            for req in rank.prefilling:
                take(req)
        blocked: list[int] = []
        while (new := self._admit(budgets, blocked, now_ns)) is not None:
            if new.state is ReqState.PREFILL:
                take(new)
        return chunks

    def _budgets(self) -> list[policy.Budget]:
        """Of each rank, for prompts. Gaps are bounded while any stream runs, wherever: ranks go in lock-step."""
        limits, most_rows = self.limits, max(len(rank.decoding) for rank in self.ranks)
        ns, per_token, per_area, most = math.inf, 0.0, 0.0, limits.max_step_tokens
        if limits.target_itl_ns and most_rows:
            ns = limits.target_itl_ns * AIM - self.cost.decode_ns(most_rows)
            per_token, per_area = self.cost.prefill_ns()
            most = max(limits.page_size, 2 * self.cost.most_tokens)
        return [
            policy.Budget(
                tokens=min(most, limits.max_step_tokens - limits.decode_len * len(rank.decoding)),
                area=max(limits.max_step_area, limits.max_context_len),
                ns=ns,
                per_token=per_token,
                per_area=per_area,
                least=limits.page_size,
            )
            for rank in self.ranks
        ]

    def _build(self, ready: ReadyRows, chunks: list[tuple[Req, int]]) -> Batch:
        """Put decoding rows and chunks into one Batch, rows ordered by rank; from here on it counts as launched."""
        slots = self.slots
        self.step += 1
        self.in_flight += 1
        batch = Batch(self.step, self.world_id)
        batch.row_slot, batch.row_prefix_len = ready.slots, ready.prefix_len
        rows = ready.columns
        batch.row_dp_rank, batch.row_extend_len, batch.row_flags, batch.input_ids = (
            rows.dp_rank, rows.extend_len, rows.flags, rows.input_ids,
        )  # fmt: skip
        if chunks:
            self._add_chunks(batch, chunks)
        if len(self.ranks) > 1:
            num_tokens = np.bincount(batch.row_dp_rank, weights=batch.row_extend_len, minlength=len(self.ranks))
            batch.dp_num_tokens = num_tokens.astype(np.int32)
        else:
            batch.dp_num_tokens = np.array([batch.num_tokens], np.int32)
        if slots.asking:
            self._ask_for_logprobs(batch, [req for req, _ in chunks if req.wants_prompt_logprobs])
        slots.prefix_len[batch.row_slot] += batch.row_extend_len
        for req, _ in chunks:
            if slots.prefix_len[req.slot] == slots.seq_len[req.slot]:
                self._begin_decode(req)
        if slots.num_with_grammar:
            self._add_masks(batch)
        self._changes.add_to(batch, self.log)
        if self.tiers.has_moves:
            batch.moves = self.tiers.take_moves()
        return batch

    def _ask_for_logprobs(self, batch: Batch, prompts: list[Req]) -> None:
        """Put into the batch which rows want logprobs, and which tokens of these prompts."""
        batch.top_logprobs = self.slots.top_logprobs[batch.row_slot]
        if not prompts:
            return
        batch.targets = np.full(batch.num_tokens, -1, np.int32)
        ends = np.cumsum(batch.row_extend_len)
        for req in prompts:
            assert req.logprobs is not None
            row = int(np.flatnonzero(batch.row_slot == req.slot)[0])
            start, count = int(batch.row_prefix_len[row]), int(batch.row_extend_len[row])
            batch.targets[ends[row] - count : ends[row]] = req.logprobs.targets(req.tokens, start, count)

    def _add_chunks(self, batch: Batch, chunks: list[tuple[Req, int]]) -> None:
        """Prompt rows behind the decode rows; then, with several ranks, all of them in order of rank."""
        ids, columns = [batch.input_ids], []
        for req, num_tokens in chunks:
            start = int(self.slots.prefix_len[req.slot])
            flags = ROW_SAMPLE if start + num_tokens == self.slots.seq_len[req.slot] else 0
            columns.append((req.slot, start, req.dp_rank, num_tokens, flags))
            ids.append(self._known_ids(req, start, num_tokens))
        rows = np.array(columns, np.int32).T.copy()
        if batch.num_rows:
            decode = batch.row_slot, batch.row_prefix_len, batch.row_dp_rank, batch.row_extend_len, batch.row_flags
            rows = np.concatenate([np.stack(decode), rows], axis=1)
        batch.input_ids = np.concatenate(ids)
        if len(self.ranks) > 1:
            order = np.argsort(rows[2], kind="stable")
            ends = np.cumsum(rows[3])
            starts = ends - rows[3]
            batch.input_ids = np.concatenate([batch.input_ids[starts[i] : ends[i]] for i in order])
            rows = rows.take(order, axis=1)
        batch.row_slot, batch.row_prefix_len, batch.row_dp_rank, batch.row_extend_len, batch.row_flags = rows

    def _known_ids(self, req: Req, start: int, count: int) -> np.ndarray:
        """Ids of a running request; those since admission are in the log."""
        if (in_log := start - len(req.tokens)) >= 0:
            return self.log.get(req.slot, in_log)[:count]
        return req.tokens[start : start + count]

    def _min_new_tokens(self, req: Req) -> int:
        """Before so many, ranks sample no end of turn; with a grammar to come a turn does not end before that. [R35]"""
        return 1 << 31 if self.slots.think_free[req.slot] else req.head["min_new_tokens"]

    # ---- grammars ----------------------------------------------------------------------------------------------------

    def _open_grammar(self, req: Req) -> None:
        """It waits for its grammar, then in the queue; if others have used that before, at once there."""
        assert self.grammars is not None
        if (matcher := self.grammars.open(req.grammar, req.handle)) is not None:
            self._opened(req, matcher)

    def _opened(self, req: Req, matcher: Matcher) -> None:
        req.matcher = matcher
        said = req.tokens[req.num_prompt_ids :]
        if self._grammar_holds(req) and len(said):  # a resumed request
            begin = 0
            if req.head["grammar_kind"] == GrammarKind.AFTER_THINKING:
                begin = int(np.flatnonzero(said == self.limits.think_end)[0]) + 1
            assert self.grammars is not None
            self.grammars.advance(matcher, said[begin:].tolist())
            self.grammars.flush()
        req.become(ReqState.WAITING)
        self._enqueue(req)

    def _grammar_holds(self, req: Req) -> bool:
        """Of a request that waits: for its next token."""
        from_start = req.head["grammar_kind"] == GrammarKind.FROM_START
        return from_start or bool((req.tokens[req.num_prompt_ids :] == self.limits.think_end).any())

    def ends_thinking(self, slots: np.ndarray | int, ids: np.ndarray) -> np.ndarray:
        """Which of these ids would end the thinking of a slot, or of a slot for each row."""
        may_call = np.expand_dims(self.slots.may_call[slots], -1)
        return (ids == self.limits.think_end) | ((ids == self.limits.call_begin) & may_call)

    def begin_grammar(self, req: Req) -> None:
        """Its thinking has just ended."""
        assert req.matcher is not None
        self.slots.begin_grammar(req.slot, has_mask=req.matcher.mask is not None)
        self._changes.begin(req, self._min_new_tokens(req))  # from here on its turn may end

    def advance_grammar(self, req: Req, ids: list[int]) -> None:
        """It has put these out; it goes on when its next mask is there. flush() follows."""
        assert self.grammars is not None and req.matcher is not None
        self.slots.held[req.slot] = True
        self.grammars.advance(req.matcher, ids)

    def _take_grammars(self, grammars: Grammars) -> None:
        """What jobs have finished: grammars of requests that wait for them, masks of rows that are held."""
        for handle, opened in grammars.compiled():
            if (req := self.reqs.get(handle)) is None:
                continue  # aborted meanwhile
            if isinstance(opened, str):
                self._give_up(req, FinishReason.ERROR, FAILED + opened)
            else:
                self._opened(req, opened)
        for matcher in grammars.advanced():
            if (req := self.reqs.get(matcher.handle)) is None:
                continue
            if matcher.error and req.slot >= 0:
                self.throttle.fail(req, FAILED + matcher.error)
                self.finish(req)
            elif matcher.error:  # retracted meanwhile
                self._give_up(req, FinishReason.ERROR, FAILED + matcher.error)
            elif req.slot >= 0:
                self.slots.held[req.slot] = False

    def _add_masks(self, batch: Batch) -> None:
        """Which ids are legal in the rows that a grammar holds for."""
        rows = np.flatnonzero(self.slots.constrained[batch.row_slot] & ((batch.row_flags & ROW_SAMPLE) != 0))
        if len(rows):
            batch.mask_row = rows.astype(np.int32)
            batch.masks = np.stack([self._mask(slot) for slot in batch.row_slot[rows].tolist()])

    def _mask(self, slot: int) -> np.ndarray:
        req = self.slots.reqs[slot]
        assert req is not None and req.matcher is not None and req.matcher.mask is not None
        return req.matcher.mask

    # ---- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, budgets: list[policy.Budget], blocked: list[int], now_ns: int) -> Req | None:
        """Admit the request at the head of the queue if a rank has room, pages and budget for it. [R28]

        Nothing overtakes the head, so a huge request is not starved by small ones. One that must go to a certain rank
        is at the head for that rank alone: while it waits, the rank is `blocked` for those behind it.
        """
        while self.slots.num_free and (req := self.waiting.head(blocked)) is not None:
            if self._try_admit(req, budgets, blocked, now_ns):
                return req
            if req.wanted_rank < 0:
                return None
            blocked.append(req.wanted_rank)
        return None

    def _try_admit(self, req: Req, budgets: list[policy.Budget], blocked: list[int], now_ns: int) -> bool:
        """Its pages are taken whole, with one page of headroom per decoding request, so that admission does not force a
        retraction at once. If part of its prefix is in files, it leaves the queue until that is in host memory.
        """
        size = self.limits.page_size
        num_pages = policy.pages_for(len(req.tokens) + self.limits.headroom, size)
        if self._changes.num_pages + num_pages > self.limits.max_new_pages:
            return False  # the batch has no room to say which they are
        usable = policy.usable_prefix(req, size)
        self._hash_up_to(req, usable)
        for dp_rank in self._preference(req, usable, blocked):
            rank = self.ranks[dp_rank]
            num_running = len(rank.moving) + len(rank.prefilling) + len(rank.decoding)
            fits_a_step = (num_running + 1) * self.limits.decode_len <= self.limits.max_step_tokens
            if budgets[dp_rank].is_spent or budgets[dp_rank].tokens <= 0 or not fits_a_step:
                continue
            if req.needs_table and not rank.table_rows:
                continue
            matched, node = rank.tree.match(req.hashes[:usable], self.step)
            if self.tiers.is_on and req.fetch is None:
                req.fetch = self.sources.fetch(req.handle, dp_rank, req.hashes[:usable], matched)
                if req.fetch is not None:
                    self.waiting.remove(req)
                    req.become(ReqState.FETCH)
                    self._fetching[req.handle] = req
                    return True
            need = num_pages - matched
            rank.tree.lock(node)  # before evicting, or the match itself could go
            pages = self._allocate(rank, need, headroom=len(rank.decoding), at_once=False)
            if pages is None:
                rank.tree.unlock(node)
                if not self.tiers.room_to_save(dp_rank):
                    return False  # it gets the rest in the next steps
                continue
            self.waiting.remove(req)
            loads = None
            if self.tiers.is_on:
                loads = self.sources.loads(dp_rank, req.hashes[:usable], matched, req.fetch, self.step)
            self._start(req, dp_rank, node, rank.tree.pages(node), pages, loads, now_ns)
            return True
        return False

    def _preference(self, req: Req, usable: int, blocked: list[int]) -> list[int]:
        if req.wanted_rank >= 0:
            return [req.wanted_rank]
        if len(self.ranks) == 1:
            return [] if blocked else [0]
        size, slots = self.limits.page_size, self.slots
        session_rank = self.sessions.rank_of(req.session, req.hashes)
        cached = self.sources.cached_by_rank(req.hashes[:usable])
        loads = [
            RankLoad(
                queued_prefill=sum(
                    int(slots.seq_len[r.slot] - slots.prefix_len[r.slot]) for r in [*rank.moving, *rank.prefilling]
                ),
                running=int(slots.seq_len[rank.decoding].sum()),
                cached=int(cached[rank.index] * size),
                num_requests=len(rank.moving) + len(rank.prefilling) + len(rank.decoding),
                keeps_session=rank.index == session_rank,
            )
            for rank in self.ranks
        ]
        order = [rank for rank in self._place(len(req.tokens), loads, req.turn) if rank not in blocked]
        if req.fetch is not None and req.fetch.dp_rank in order:
            order.remove(req.fetch.dp_rank)
            order.insert(0, req.fetch.dp_rank)
        return order

    def _start(
        self, req: Req, dp_rank: int, node: int, matched: np.ndarray, pages: np.ndarray, loads: Loads | None,
        now_ns: int,
    ) -> None:  # fmt: skip
        cached = len(matched) * self.limits.page_size
        if req.cached is None:
            self._count_cached(req, len(matched), loads)
        if loads is not None:
            loads.moves["target"] = pages[: len(loads.moves)]
        self._release_fetch(req)
        req.loads = loads
        req.become(ReqState.PREFILL if loads is None else ReqState.MOVING)
        req.dp_rank, req.node, req.tree_pages = dp_rank, node, len(matched)
        req.queue_ns += now_ns - req.waiting_since_ns
        req.admitted_ns = req.admitted_ns or now_ns
        slot = self.slots.take(req, self._max_output(req))
        self.slots.prefix_len[slot] = self.slots.computed_len[slot] = cached
        if (budget := req.head["thinking_budget"]) >= 0 and req.head["grammar_kind"] != GrammarKind.FROM_START:
            said = req.tokens[req.num_prompt_ids :]
            left = -1 if self.ends_thinking(slot, said).any() else max(0, budget - len(said))
            self.slots.limit_thinking(np.array([slot]), np.array([left]))
        if req.stop_strings:
            self._watch_stops(req)
        if req.matcher is not None and self._grammar_holds(req):
            self.slots.begin_grammar(slot, has_mask=req.matcher.mask is not None)
        elif req.matcher is not None:
            self.slots.await_grammar(slot)
        self.sessions.resume(req.session, req.hashes)
        self._changes.begin(req, self._min_new_tokens(req))
        if req.needs_table:
            # Whoever had it may still be in a launched step; that is over before the step that fills it anew.
            req.table_row = self.ranks[dp_rank].table_rows.pop()
            self._changes.fill_table(req)
        self._append_pages(req, np.concatenate([matched, pages]))
        rank = self.ranks[dp_rank]
        (rank.prefilling if loads is None else rank.moving).append(req)
        if self.prompt_is_computed(req):  # retracted before, and its pages are still there
            self.release_siblings(req)

    def _count_cached(self, req: Req, num_matched: int, loads: Loads | None) -> None:
        """Of its prefix, what was found in which tier: another rank's pool is one of the device tier. [R27]"""
        size = self.limits.page_size
        num_host = num_files = num_peer = 0
        if loads is not None:
            num_files, num_host = loads.from_files, len(loads.entries) - loads.from_files
            num_peer = len(loads.moves) - len(loads.entries)
        req.cached = ((num_matched + num_peer) * size, num_host * size, num_files * size)
        self.counters.cached_tokens += sum(req.cached)
        self.counters.cached_host_tokens += req.cached[1]
        self.counters.cached_storage_tokens += req.cached[2]

    def _end_moving(self) -> None:
        """Requests whose last page was in the last batch compute from this one on."""
        for rank in self.ranks:
            for req in [r for r in rank.moving if r.loads is not None and r.loads.is_sent]:
                slot, size = req.slot, self.limits.page_size
                assert req.loads is not None
                self.slots.prefix_len[slot] += len(req.loads.moves) * size
                self.slots.computed_len[slot] = self.slots.prefix_len[slot]
                rank.moving.remove(req)
                self._end_loads(req)
                req.become(ReqState.PREFILL)
                rank.prefilling.append(req)
                self.keep_prefix(req)
                if self.prompt_is_computed(req):
                    self.release_siblings(req)

    def _end_loads(self, req: Req) -> None:
        assert req.loads is not None
        self.tiers.end_loads(req.loads, req.dp_rank)
        req.loads = None

    def _release_fetch(self, req: Req) -> None:
        if req.fetch is not None:
            self.tiers.release(req.fetch)
            req.fetch = None

    def end_moves(self, result: StepResult) -> None:
        """Who has waited for files that are there now, or are no use, goes back to its place in the queue."""
        for handle in self.tiers.ended(result.done, result.failed):
            if (req := self._fetching.pop(handle, None)) is not None:
                assert req.fetch is not None
                if not len(req.fetch.hashes):  # it waited for another's, and may yet fetch what comes behind them
                    req.fetch = None
                req.become(ReqState.WAITING)
                self._enqueue(req)

    def _watch_stops(self, req: Req) -> None:
        """Look for its stop strings from here on; a retracted or resumed request has said something already. [R53]"""
        flags = req.head["flags"]
        self.slots.out_heads[req.slot]["held_bytes"] = self.stops.open(
            req.slot, req.stop_strings, req.tokens[req.num_prompt_ids :], skip_special=bool(flags & SKIP_SPECIAL),
            in_content=bool(flags & STOP_IN_CONTENT), before_calls=bool(flags & STOP_BEFORE_CALLS),
            keep_match=bool(flags & NO_STOP_TRIM), min_ids=int(req.head["min_new_tokens"]),
        )  # fmt: skip

    def _max_output(self, req: Req) -> int:
        return min(req.head["max_new_tokens"], self.limits.max_seq_len - req.num_prompt_ids)

    def _allocate(
        self, rank: DpRank, count: int, headroom: int = 0, *, at_once: bool = True
    ) -> np.ndarray | None:
        """Pages from the pool, evicting what nobody uses, then what sessions keep; None when there are too few.

        at_once: if many must be evicted, not only as many as one step saves.
        """
        short = count + headroom - rank.pool.num_free
        while short > rank.tree.evictable_pages and self.sessions.evict(rank.index):
            pass
        if short > rank.tree.evictable_pages:
            return None
        while short > 0:
            num_evicted = short if at_once else min(short, self.tiers.room_to_save(rank.index))
            if not num_evicted:
                return None
            pages, hashes = rank.tree.evict(num_evicted)
            self.tiers.save(rank.index, pages, hashes)
            if self.kv_events is not None:
                self.kv_events.removed(rank.index, hashes)
            rank.pool.free(pages)
            short -= num_evicted
        return rank.pool.alloc(count)

    def _append_pages(self, req: Req, pages: np.ndarray) -> None:
        self._changes.add_pages(req.slot, int(self.slots.num_pages[req.slot]), pages)
        self.slots.add_pages(req.slot, pages)

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def _begin_decode(self, req: Req) -> None:
        """A request's last prompt token is in a step: from the next one on it decodes."""
        req.become(ReqState.DECODE)
        rank = self.ranks[req.dp_rank]
        rank.prefilling.remove(req)
        rank.decoding.append(req.slot)
        self._decode_slots = None

    def compute_forced(self, req: Req) -> None:
        """What the model did not say itself must be computed before it goes on: first thing in the next step."""
        req.become(ReqState.PREFILL)
        rank = self.ranks[req.dp_rank]
        rank.decoding.remove(req.slot)
        rank.prefilling.insert(0, req)
        self._forced.append(req)
        if req.table_row >= 0:  # ranks have counted what they sampled instead
            self._changes.fill_table(req)
        self._decode_slots = None

    def keep_prefix(self, req: Req) -> None:
        """Hand a request's full pages to the prefix tree, so that others share them from now on.

        Of a prompt also those that a launched step is still writing: ranks run steps in launch order, so whoever finds
        them reads them later. Behind the prompt only what is computed: a launched token may turn out not to count.
        """
        rank, slot = self.ranks[req.dp_rank], req.slot
        launched = min(int(self.slots.prefix_len[slot]), len(req.tokens))
        full = max(launched, int(self.slots.computed_len[slot])) // self.limits.page_size
        if full <= req.tree_pages:
            return
        self._hash_up_to(req, full)
        mine = self.slots.table[slot, req.tree_pages : full].copy()
        node, kept = rank.tree.insert(req.node, req.hashes[req.tree_pages : full], mine, self.step)
        rank.tree.lock(node)
        rank.tree.unlock(req.node)
        twice = kept != mine  # another request was first: use its pages, give ours back
        if twice.any():
            self.slots.table[slot, req.tree_pages : full] = kept
            self._changes.add_pages(slot, req.tree_pages, kept)
            rank.pool.free(mine[twice])
        if self.tiers.is_on:
            new = np.flatnonzero(~twice)[::-1]
            self.tiers.save(rank.index, mine[new], req.hashes[req.tree_pages : full][new])
        if self.kv_events is not None and not twice.all():
            self._tell_stored(req, full, first=req.tree_pages + int(np.count_nonzero(twice)))
        req.node, req.tree_pages = node, full

    def _tell_stored(self, req: Req, full: int, first: int) -> None:
        """The pages [first, full) of a running request have come into its rank's tree."""
        assert self.kv_events is not None
        tokens = req.tokens
        if full * self.limits.page_size > len(tokens):
            tokens = np.concatenate([tokens, self.log.get(req.slot)])
        self.kv_events.stored(req.dp_rank, req.hashes[:full], first, tokens)

    def finish(self, req: Req, *, made_calls: bool = False) -> None:
        """A running request is over: its full pages stay cached, the rest and its slot are free.

        made_calls: the client will come back with their results, so the pages are kept for its session.
        """
        if made_calls and req.session:
            self.keep_prefix(req)
            hashes = req.hashes[: req.tree_pages]
            num_asked = (req.num_prompt_ids - TURN_HEAD) // self.limits.page_size
            self.sessions.keep(req.session, req.dp_rank, req.node, hashes, num_asked, self.throttle.now_ns)
        self._leave_rank(req)
        req.become(ReqState.DONE)
        self._forget(req)
        self.counters.finished += 1

    def _retract(self, req: Req) -> None:
        """Send a running request back to the queue with its tokens kept; clients see a pause only. [R22] [R30]

        No step may be in flight: the token that it would sample belongs to the request.
        """
        assert self.slots.computed_len[req.slot] == self.slots.prefix_len[req.slot]
        req.tokens = np.concatenate([req.tokens, self.log.get(req.slot)])
        req.num_output_ids = int(self.slots.num_output[req.slot])
        req.num_accepted = int(self.slots.out_heads[req.slot]["num_accepted"])
        self.throttle.flush(req)
        self._leave_rank(req)
        req.become(ReqState.WAITING)
        req.num_retractions += 1
        req.waiting_since_ns = self.throttle.now_ns
        self.counters.retracted += 1
        req.uncached = len(req.tokens)
        self._enqueue(req)

    def _leave_rank(self, req: Req) -> None:
        rank, slot = self.ranks[req.dp_rank], req.slot
        self.keep_prefix(req)
        rank.pool.free(self.slots.table[slot, req.tree_pages : int(self.slots.num_pages[slot])].copy())
        rank.tree.unlock(req.node)
        req.node = req.tree_pages = 0
        if req.state is ReqState.MOVING:
            rank.moving.remove(req)
            self._end_loads(req)
        elif req.state is ReqState.PREFILL:
            rank.prefilling.remove(req)
        else:
            rank.decoding.remove(slot)
            self._decode_slots = None
        self._changes.forget(req)
        if req.table_row >= 0:
            rank.table_rows.append(req.table_row)
            req.table_row = -1
        self.log.clear(slot)
        self.stops.close(slot)
        self.slots.release(req, self.step)

    def _forget(self, req: Req) -> None:
        del self.reqs[req.handle]
        self.release_siblings(req)

    # ---- the queue ---------------------------------------------------------------------------------------------------

    def _enqueue(self, req: Req) -> None:
        first = self.reqs.get(req.head["group"])  # of several answers, the one that computes the prompt [R20]
        waits = first is not None and first is not req and not self.prompt_is_computed(first)
        if waits:
            req.uncached = min(req.uncached, self.limits.page_size)  # it will find the rest
        if req.deadline_ns and not req.num_output_ids:  # who has begun to answer goes on
            # Less what its prompt will take: when it can no longer be met. But if no prompt is before it, it is tried,
            # or a rate that is wrong would never be measured anew.
            is_first = not self.waiting and not any(rank.moving or rank.prefilling for rank in self.ranks)
            takes_ns = 0 if is_first else self.prefill_rate.ns_of(req.uncached)
            self.waiting.expire(req, max(1, req.deadline_ns - takes_ns), is_late=True)
        if not waits:
            self._expire_in_queue(req, req.waiting_since_ns)
        self.waiting.push(req, policy.queue_key(req, self.limits.ageing_ns), behind=first if waits else None)

    def _expire_in_queue(self, req: Req, since_ns: int) -> None:
        if self.limits.queue_timeout_ns and not req.admitted_ns:
            self.waiting.expire(req, since_ns + self.limits.queue_timeout_ns, is_late=False)

    def prompt_is_computed(self, req: Req) -> bool:
        """Whether its prompt's full pages are there to be shared."""
        return req.slot >= 0 and int(self.slots.computed_len[req.slot]) >= req.num_prompt_ids

    def release_siblings(self, first: Req) -> None:
        """Its prompt is computed, or it is gone: the other answers to the request may run, where its pages are."""
        for req in self.waiting.release(first, first.dp_rank):
            self._expire_in_queue(req, self.throttle.now_ns)

    def _expire(self, now_ns: int) -> None:
        """Give up what waited too long, what has a deadline that it cannot meet any more, and what sessions keep."""
        self.sessions.expire(now_ns)
        for req, is_late in self.waiting.pop_expired(now_ns).items():
            self._give_up(req, FinishReason.ERROR, LATE if is_late else TIMED_OUT)
            self.counters.expired += 1
        for rank in self.ranks:
            late = [req for req in (*rank.moving, *rank.prefilling) if 0 < req.deadline_ns <= now_ns]
            for req in late:
                if not self.slots.num_output[req.slot]:  # who has begun to answer goes on
                    self.throttle.fail(req, LATE)
                    self.finish(req)
                    self.counters.expired += 1

    # ---- views -------------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self.limits.max_running - self.slots.num_free

    @property
    def num_waiting(self) -> int:
        opening = self.grammars.num_opening if self.grammars is not None else 0
        return len(self.waiting) + len(self._fetching) + opening

    def _running(self, rank: DpRank) -> Iterator[Req]:
        yield from rank.moving
        yield from rank.prefilling
        for slot in rank.decoding:
            req = self.slots.reqs[slot]
            assert req is not None
            yield req

    def owned_pages(self, rank: DpRank) -> np.ndarray:
        """Pages that one running request holds alone, for the books."""
        tables = [
            self.slots.table[r.slot, r.tree_pages : int(self.slots.num_pages[r.slot])] for r in self._running(rank)
        ]
        return np.concatenate(tables) if tables else np.empty(0, np.int32)

    def check(self) -> None:
        """Raise with detail when pages and tree do not balance. [R13] [R31]"""
        for rank in self.ranks:
            check_books(rank.pool, rank.tree, self.owned_pages(rank))
        self.tiers.check()
        self.counters.books_checked += 1

    def _hash_up_to(self, req: Req, count: int) -> None:
        """Know the hashes of a sequence's first `count` pages; main sent those of the prompt. [R19]"""
        have, size = len(req.hashes), self.limits.page_size
        if have >= count:
            return
        tokens = req.tokens
        if count * size > len(tokens):  # output since admission is in the log
            tokens = np.concatenate([tokens, self.log.get(req.slot)])
        seed = (req.hashes[-1] if have else np.array([req.head["chain_lo"], req.head["chain_hi"]], np.uint64)).tobytes()
        more = page_hashes(tokens[have * size : count * size], size, self.limits.hash_key, seed)
        req.hashes = np.concatenate([req.hashes, more])
