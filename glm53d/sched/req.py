"""Req, one request as its scheduler sees it, and Slots, what changes every step of those that run, as arrays. [R33]"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from glm53d.grammar.compiler import Matcher
from glm53d.ipc.records import (
    BIAS,
    GENERATE,
    HELPER,
    IGNORE_EOS,
    ONLY_BIASED,
    OUTPUT,
    STOP_BEFORE_CALLS,
    THINKING_FORCED,
    FinishReason,
    Packer,
    align8,
)
from glm53d.sched.logprobs import Unsent
from glm53d.sched.tiers import Fetch, Loads

_generate, _output = Packer(GENERATE), Packer(OUTPUT)

MAX_LEVEL = 16  # of a request's priority, up and down: what bounds how long it can be overtaken


class ReqState(IntEnum):
    """Where a request stands. Legal changes are in NEXT."""

    GRAMMAR = 0  # its grammar is being compiled: it is in no queue yet
    WAITING = 1  # in the queue: new or retracted; holds no page
    FETCH = 2  # part of its prefix is on its way from files to host memory; holds no page of a pool
    MOVING = 3  # has a slot and pages; part of its prefix is on its way into them
    PREFILL = 4  # has a slot and pages; tokens of its prompt, or forced ones, are in no step yet
    DECODE = 5  # in every step
    DONE = 6  # nothing of it is left


NEXT = {
    ReqState.GRAMMAR: (ReqState.WAITING, ReqState.DONE),
    ReqState.WAITING: (ReqState.FETCH, ReqState.MOVING, ReqState.PREFILL, ReqState.DONE),
    ReqState.FETCH: (ReqState.WAITING, ReqState.DONE),
    ReqState.MOVING: (ReqState.PREFILL, ReqState.WAITING, ReqState.DONE),
    ReqState.PREFILL: (ReqState.DECODE, ReqState.WAITING, ReqState.DONE),
    ReqState.DECODE: (ReqState.PREFILL, ReqState.WAITING, ReqState.DONE),
    ReqState.DONE: (),
}


@dataclass(slots=True, eq=False)
class Req:
    """One request. Owned by one Scheduler; nothing else keeps a reference.

    While it waits, tokens is its whole sequence: the prompt and what it has put out. While it runs, tokens is what it
    was admitted with and the scheduler's token log has what came since; the numbers that change are in Slots.
    """

    handle: int
    head: dict[str, Any]  # GenerateRecord's fields: parameters as main sent them
    tokens: np.ndarray  # [num_tokens] int32
    num_prompt_ids: int
    num_output_ids: int  # while it waits; Slots.num_output while it runs
    hashes: np.ndarray  # [n, 2] uint64 of the sequence's full pages, as far as known
    stop_ids: np.ndarray  # int32, beyond the model's own end-of-turn ids
    stop_strings: list[bytes]
    logit_bias: np.ndarray  # BIAS
    grammar: bytes  # of its output, from where head["grammar_kind"] says; b"": none
    rid: str
    order: int  # arrival number
    turn: int  # where ranks that are equal to it begin: its bootstrap room, else its arrival number [R25]
    wanted_rank: int = -1  # attention-DP rank that it must go to, -1: any
    level: int = 0  # priority, one less for a helper; larger goes first and is retracted last
    session: int = 0  # whose turn it is, 0: nobody's; a helper is no turn
    deadline_ns: int = 0  # for its first token, 0: none
    uncached: int = 0  # tokens that must be computed, as estimated when it began to wait
    state: ReqState = ReqState.WAITING
    slot: int = -1
    dp_rank: int = -1
    node: int = 0  # of the prefix tree, locked while it runs
    tree_pages: int = 0  # leading pages of its table that the tree owns; the others are its own
    table_row: int = -1  # of its rank's sampling tables, while it runs and if it needs one
    fetch: Fetch | None = None  # while it waits: files of its prefix, on their way or in host memory for it
    loads: Loads | None = None  # while it is MOVING
    cached: tuple[int, int, int] | None = None  # tokens found by tier at first admission, never changed after [F-D7]
    logprobs: Unsent | None = None  # None: it has not asked for any
    matcher: Matcher | None = None  # its place in its grammar, from when that is compiled
    num_retractions: int = 0
    thinking_forced: bool = False  # the end of its thinking was not the model's own
    num_accepted: int = 0  # draft tokens, before it took its slot
    inbox_ns: int = 0
    waiting_since_ns: int = 0
    queue_ns: int = 0
    admitted_ns: int = 0

    @property
    def has_stops(self) -> bool:
        """Stop ids or stop strings of its own."""
        return len(self.stop_ids) > 0 or len(self.stop_strings) > 0

    @property
    def is_penalised(self) -> bool:
        """What was said counts for what is sampled."""
        head = self.head
        return bool(head["frequency_penalty"] or head["presence_penalty"] or head["repetition_penalty"] != 1.0)

    @property
    def needs_table(self) -> bool:
        """A row of the sampling tables."""
        return self.is_penalised or len(self.logit_bias) > 0 or bool(self.head["flags"] & ONLY_BIASED)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Of tokens of its prompt that are in no result yet."""
        return self.logprobs is not None and self.logprobs.wants_prompt

    def become(self, state: ReqState) -> None:
        """The one way to change state."""
        assert state in NEXT[self.state], f"request {self.handle:#x}: {self.state.name} -> {state.name}"
        self.state = state

    @classmethod
    def from_record(cls, data: bytes, order: int, now_ns: int) -> "Req":
        """A request as main sent it; a resumed one comes with the ids it has already put out. [R53]"""
        head = _generate.unpack(data)
        offset = GENERATE.itemsize

        def part(dtype: type | np.dtype, count: int) -> np.ndarray:
            nonlocal offset
            if not count:
                return np.empty(0, dtype)
            array: np.ndarray = np.frombuffer(data, dtype, count, offset)
            offset += align8(array.nbytes)
            return array

        prompt = part(np.int32, head["num_prompt_ids"])
        output = part(np.int32, head["num_output_ids"])
        hashes = part(np.uint64, 2 * head["num_page_hashes"]).reshape(-1, 2)
        stop_ids = part(np.int32, head["num_stop_ids"])
        stop_strings = _split(bytes(part(np.uint8, head["stop_bytes"])))
        logit_bias = part(BIAS, head["num_logit_bias"])
        grammar = bytes(part(np.uint8, head["grammar_bytes"]))
        rid = bytes(part(np.uint8, head["rid_bytes"])).decode()
        is_helper = bool(head["flags"] & HELPER)
        level = head["priority"] - is_helper
        was_admitted = head["cached_device"] >= 0
        return cls(
            cached=(head["cached_device"], head["cached_host"], head["cached_storage"]) if was_admitted else None,
            handle=head["handle"], head=head, tokens=np.concatenate([prompt, output]) if len(output) else prompt,
            num_prompt_ids=len(prompt), num_output_ids=len(output), hashes=hashes, stop_ids=stop_ids,
            stop_strings=stop_strings, logit_bias=logit_bias, grammar=grammar, rid=rid, order=order,
            wanted_rank=head["dp_rank"],
            turn=order if head["bootstrap_room"] < 0 else head["bootstrap_room"],
            level=max(-MAX_LEVEL, min(level, MAX_LEVEL)),
            session=0 if is_helper else head["session"], deadline_ns=head["deadline_ns"],
            thinking_forced=bool(head["flags"] & THINKING_FORCED), inbox_ns=now_ns,
            waiting_since_ns=now_ns, logprobs=Unsent.of(prompt, head["top_logprobs"], head["logprob_start"]),
            state=ReqState.GRAMMAR if grammar else ReqState.WAITING,
        )  # fmt: skip


class Slots:
    """What changes every step of the requests that run, by slot. Owned by one Scheduler.

    For a running slot: KV exists for the first computed_len tokens, and launched steps write it up to prefix_len; equal
    while none is in flight, and then below seq_len. sent <= num_output: ids in between wait for the throttle.

    A slot is reused only when no launched step has a row of it: a request that ends before leaves it `gone`. [R34]
    """

    def __init__(self, max_slots: int, page_size: int):
        self.page_size = page_size
        self.seq_len = np.zeros(max_slots, np.int64)  # tokens known: prompt and output
        self.prefix_len = np.zeros(max_slots, np.int64)
        self.computed_len = np.zeros(max_slots, np.int64)
        self.end_len = np.zeros(max_slots, np.int64)  # seq_len at which it ends, having put out max_output
        self.think_left = np.full(
            max_slots, -1, np.int64
        )  # tokens until thinking is ended by force, -1: it is not [R46]
        self.num_thinking = 0  # running requests with such a limit: while 0, nobody looks
        self.may_call = np.zeros(max_slots, bool)  # a call ends thinking, too [F-E7]
        self.needs_value = np.zeros(max_slots, bool)  # its next step hangs on the value of its last token
        # With a grammar a slot is in one of three ways: think_free until the grammar begins behind its thinking;
        # constrained: its next id must be one of its matcher's mask; and held while that mask is not there. [R35]
        self.think_free = np.zeros(max_slots, bool)
        self.constrained = np.zeros(max_slots, bool)
        self.held = np.zeros(max_slots, bool)
        self.num_with_grammar = 0  # running requests in any of them: while 0, nobody looks
        self.num_output = np.zeros(max_slots, np.int64)
        self.max_output = np.zeros(max_slots, np.int64)
        self.ignore_eos = np.zeros(max_slots, bool)
        self.has_stop_ids = np.zeros(max_slots, bool)
        self.has_stop_strings = np.zeros(max_slots, bool)
        self.num_with_stops = 0  # running requests with either: while 0, nobody looks
        self.top_logprobs = np.full(max_slots, -1, np.int32)  # -1: it has not asked for any
        self.asking: list[int] = []  # slots that have
        self.token_ns = np.zeros(max_slots, np.int64)  # when it had its last token since admission, 0: not yet
        self.num_pages = np.zeros(max_slots, np.int64)
        self.table = np.zeros((max_slots, 64), np.int32)  # page numbers; columns double on need
        self.sent = np.zeros(max_slots, np.int64)
        self.interval = np.ones(max_slots, np.int64)
        self.out_heads = np.zeros(max_slots, OUTPUT)  # each slot's next output record, kept up to date
        self.out_head_bytes = self.out_heads.view(np.uint8).reshape(max_slots, OUTPUT.itemsize)  # the same memory
        self.reqs: list[Req | None] = [None] * max_slots
        self._free = list(range(max_slots - 1, -1, -1))
        self.gone = np.zeros(max_slots, np.int8)  # above 0: a row of it in a result does not count
        # (last step launched with it, slot, whether it is free behind that) for each of these counts
        self._leaving: list[tuple[int, int, bool]] = []

    @property
    def any_gone(self) -> bool:
        return bool(self._leaving)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, req: Req, max_output: int) -> int:
        """Give a waiting request a slot and fill the slot's row."""
        slot = self._free.pop()
        head = req.head
        self.reqs[slot] = req
        req.slot = slot
        self.seq_len[slot] = len(req.tokens)
        self.prefix_len[slot] = self.computed_len[slot] = 0
        self.num_output[slot] = self.sent[slot] = req.num_output_ids
        self.max_output[slot] = max_output
        self.end_len[slot] = req.num_prompt_ids + max_output
        self.ignore_eos[slot] = bool(head["flags"] & IGNORE_EOS)
        self.may_call[slot] = bool(head["flags"] & STOP_BEFORE_CALLS)
        self.has_stop_ids[slot] = len(req.stop_ids) > 0
        self.has_stop_strings[slot] = len(req.stop_strings) > 0
        self.num_with_stops += req.has_stops
        self.top_logprobs[slot] = -1 if req.logprobs is None else req.logprobs.width - 1
        if req.logprobs is not None:
            self.asking.append(slot)
        self.token_ns[slot] = self.num_pages[slot] = 0
        self.interval[slot] = max(1, head["stream_interval"])
        self.out_head_bytes[slot] = np.frombuffer(out_head(req), np.uint8)
        return slot

    def release(self, req: Req, last_step: int) -> None:
        """Take the slot back; its pages are already gone. last_step: the last one launched."""
        slot = req.slot
        self.reqs[slot] = None
        self.num_with_stops -= req.has_stops
        if req.logprobs is not None:
            self.asking.remove(slot)
        if self.num_with_grammar:
            self.leave_grammar(slot)
        if self.think_left[slot] >= 0:
            self.limit_thinking(np.array([slot]), np.array([-1]))
        self.needs_value[slot] = False
        req.slot = -1
        if self.prefix_len[slot] > self.computed_len[slot] or self.gone[slot]:
            self.gone[slot] += 1
            self._leaving.append((last_step, slot, True))
        else:
            self._free.append(slot)

    def limit_thinking(self, slots: np.ndarray, left: np.ndarray) -> None:
        """So many tokens may come before thinking is ended. Before the last of them a row waits for its value. [R34]"""
        self.num_thinking += int(np.count_nonzero(left >= 0)) - int(np.count_nonzero(self.think_left[slots] >= 0))
        self.think_left[slots] = left
        self.needs_value[slots] = (left == 0) | (left == 1) | self.constrained[slots]

    def await_grammar(self, slot: int) -> None:
        """Its grammar begins behind the end of its thinking."""
        self.num_with_grammar += 1
        self.think_free[slot] = True

    def begin_grammar(self, slot: int, *, has_mask: bool) -> None:
        """From its next id on its grammar holds. A constrained row waits for each token's value.

        An end of turn then ends it, ignored or not: behind a form that is complete nothing else is legal, for ever.
        """
        self.num_with_grammar += not self.think_free[slot]
        self.think_free[slot] = False
        self.constrained[slot] = self.needs_value[slot] = True
        self.ignore_eos[slot] = False
        self.held[slot] = not has_mask

    def leave_grammar(self, slot: int) -> None:
        """Whoever takes the slot next has none of it."""
        self.num_with_grammar -= bool(self.think_free[slot] or self.constrained[slot])
        self.think_free[slot] = self.constrained[slot] = self.held[slot] = False

    def void(self, slot: int, last_step: int) -> None:
        """What launched steps compute for a slot, up to that one, does not count: its request goes on otherwise."""
        self.gone[slot] += 1
        self._leaving.append((last_step, slot, False))

    def collected(self, step: int) -> None:
        """A step's result is in: slots that only it still named are free."""
        while self._leaving and self._leaving[0][0] <= step:
            _, slot, leaves = self._leaving.pop(0)
            self.gone[slot] -= 1
            if leaves:
                self._free.append(slot)

    def add_pages(self, slot: int, pages: np.ndarray) -> None:
        """Append pages to a slot's table."""
        have, need = int(self.num_pages[slot]), int(self.num_pages[slot]) + len(pages)
        if need > self.table.shape[1]:
            self._widen(need)
        self.table[slot, have:need] = pages
        self.num_pages[slot] = need

    def _widen(self, need: int) -> None:
        wider = np.zeros((len(self.table), max(need, 2 * self.table.shape[1])), np.int32)
        wider[:, : self.table.shape[1]] = self.table
        self.table = wider


def out_head(req: Req, reason: FinishReason = FinishReason.NONE) -> bytes:
    """The fixed part of an output record of a request, as far as it does not change from step to step."""
    device, host, storage = req.cached or (0, 0, 0)
    return _output(
        handle=req.handle,
        finish_reason=reason,
        matched_id=-1,
        matched_stop=-1,
        num_prompt_ids=req.num_prompt_ids,
        token_offset=req.num_output_ids,
        num_output_ids=req.num_output_ids,
        cached_device=device,
        cached_host=host,
        cached_storage=storage,
        num_retractions=req.num_retractions,
        num_accepted=req.num_accepted,
        flags=THINKING_FORCED if req.thinking_forced else 0,
        dp_rank=req.dp_rank,
        inbox_ns=req.inbox_ns,
        admitted_ns=req.admitted_ns,
        queue_ns=req.queue_ns,
    )


def _split(data: bytes) -> list[bytes]:
    """Strings that lie one behind the other, each behind its length."""
    strings, at = [], 0
    while at < len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "little")
        strings.append(data[at + 2 : end])
        at = end
    return strings
