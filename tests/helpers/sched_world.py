"""A node without processes: the real scheduler, ranks that only remember what a KV cache would hold.

Every page remembers the ids whose KV was written into it. Before a row computes, the world checks that the pages its
table names hold exactly its own sequence: so a page shared wrongly, freed early or written twice is seen at the first
read.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

import numpy as np

from glm53d._native import ByteVocab, page_hashes
from glm53d.ipc.batch import Batch, Logprobs, StepResult
from glm53d.ipc.records import (
    BIAS,
    GENERATE,
    LOGPROB,
    OUTPUT,
    ROW_FEED,
    ROW_SAMPLE,
    STOP_BEFORE_CALLS,
    FinishReason,
    GrammarKind,
    padded,
)
from glm53d.kv.events import KvEvents
from glm53d.sched import policy, results
from glm53d.sched.grammar import Grammars
from glm53d.sched.limits import Limits
from glm53d.sched.logprobs import MAX_RECORD_TOKENS
from glm53d.sched.req import Req, ReqState
from glm53d.sched.scheduler import NO_HASHES, Scheduler
from glm53d.sched.tiers import NO_TIERS, TierLimits
from glm53d.worker.room import largest_batch
from tests.helpers.kv_index import KvIndex
from tests.helpers.kv_world import KvWorld

KEY = bytes(range(16))
WRONG = -7  # a draft that is refused


def generate_record(
    handle: int,
    prompt: Sequence[int] | np.ndarray,
    max_new: int,
    *,
    page_size: int = 4,
    output: list[int] | None = None,
    stop_ids: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    bias: dict[int, float] | None = None,
    grammar: str = "",
    **fields: float,
) -> bytes:
    """A generate record as main would send it."""
    ids, out = np.array(prompt, np.int32), np.array(output or [], np.int32)
    hashes = page_hashes(ids, page_size, KEY, bytes(16))
    head = np.zeros(1, GENERATE)
    head["handle"], head["num_prompt_ids"], head["num_output_ids"] = handle, len(ids), len(out)
    head["num_page_hashes"], head["num_stop_ids"], head["max_new_tokens"] = len(hashes), len(stop_ids), max_new
    strings = b"".join(len(s).to_bytes(2, "little") + s for s in map(str.encode, stop))
    head["stop_bytes"] = len(strings)
    head["bootstrap_room"] = -1
    head["stream_interval"], head["dp_rank"], head["cached_device"], head["thinking_budget"] = 1, -1, -1, -1
    head["top_logprobs"] = head["logprob_start"] = -1
    head["repetition_penalty"], head["num_logit_bias"] = 1.0, len(bias or {})
    head["grammar_bytes"], head["grammar_kind"] = len(grammar.encode()), GrammarKind.FROM_START if grammar else 0
    for name, value in fields.items():
        head[name] = value
    parts = [head.tobytes()]
    stops, biases = np.frombuffer(strings, np.uint8), np.array(list((bias or {}).items()), BIAS)
    text = np.frombuffer(grammar.encode(), np.uint8)
    for array in (ids, out, hashes, np.array(stop_ids, np.int32), stops, biases, text):
        parts.append(padded(array.tobytes()))
    return b"".join(parts)


def prompt_area(batch: Batch) -> np.ndarray:
    """New tokens times their context, of each row; 0 of rows that decode."""
    area = batch.row_extend_len.astype(np.int64) * (batch.row_prefix_len + batch.row_extend_len)
    return np.where(batch.row_flags & ROW_FEED, 0, area)


class SchedWorld:
    """Drives one Scheduler step by step and keeps what clients would have received.

    tokens: the bytes of each id, where text matters. The last id ends reasoning. step_ns: how long a step takes.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        eos_chance: float = 0.02,
        vocab: int = 50,
        tokens: list[bytes] | None = None,
        step_ns: Callable[[Batch], int] = lambda batch: 1,
        tiers: TierLimits = NO_TIERS,
        stored: np.ndarray = NO_HASHES,
        grammars: Grammars | None = None,
        **limits: int | str | tuple[int, ...],
    ):
        tokens = tokens or [b" %d" % i for i in range(vocab)]
        vocab = len(tokens)
        sizes = {"attn_dp_size": 1, "num_pages": 40, "page_size": 4, "max_context_len": 120, "max_running": 8,
                 "max_step_tokens": 24, "max_step_area": 1 << 30, "call_begin": -1, "calls_ends": (0,),
                 } | limits  # fmt: skip
        self.limits = Limits(
            **sizes, eos_ids=(0,), vocab_size=vocab, think_end=vocab - 1, hash_key=KEY, tiers=tiers,
        )  # fmt: skip
        num_ranks, page_size = self.limits.attn_dp_size, self.limits.page_size
        self.sched = Scheduler(
            self.limits, ByteVocab(tokens, [False] * vocab), stored=stored, grammars=grammars,
            kv_events=KvEvents(num_ranks, page_size),
        )  # fmt: skip
        self.cached = [KvIndex(page_size, KEY, bytes(16)) for _ in range(num_ranks)]  # as a router sees it
        self.rng = random.Random(seed)
        self.vocab, self.eos_chance = vocab, eos_chance
        self.now = 1
        self.step_ns = step_ns
        self.launched: deque[tuple[Batch, StepResult, int]] = deque()  # and when its result is there
        self.free_at = 0  # when the last step launched is over
        self.prompts: dict[int, list[int]] = {}
        self._prompt_ids: dict[int, np.ndarray] = {}
        self.sampled: dict[int, list[int]] = {}
        self.forced: set[int] = set()  # whose thinking was ended
        self.received: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.last_heads: dict[int, np.void] = {}
        # Of the prompt and of the output, a row of (id, logprob) for each token.
        self.asked: dict[int, tuple[int, int]] = {}  # top_logprobs, logprob_start
        self.logprobs: dict[int, tuple[list, list]] = defaultdict(lambda: ([], []))
        self.kv = KvWorld(sizes["attn_dp_size"], sizes["num_pages"], sizes["page_size"], tiers, self.rng)
        self.table = np.full((sizes["max_running"], sizes["num_pages"] + 1), -1, np.int64)
        self.min_len = np.zeros(sizes["max_running"], np.int64)  # where a slot's turn may end at the earliest
        self.tables: dict[int, tuple[int, Counter[int]]] = {}  # by slot: its row, and what it takes for said
        self.ring_room: int | None = None  # output records that still fit; None: any number

    def send(
        self,
        handle: int,
        prompt: list[int],
        max_new: int,
        *,
        stop: tuple[str, ...] = (),
        bias: dict[int, float] | None = None,
        grammar: str = "",
        **fields: float,
    ) -> None:
        """A request arrives."""
        fields, size = {"arrival_ns": self.now} | fields, self.limits.page_size
        self.asked[handle] = int(fields.get("top_logprobs", -1)), int(fields.get("logprob_start", -1))
        record = generate_record(
            handle, prompt, max_new, page_size=size, stop=stop, bias=bias, grammar=grammar, **fields
        )
        self.receive(handle, prompt, [], record)

    def receive(self, handle: int, prompt: list[int], output: list[int], record: bytes) -> None:
        """A request arrives as main made it; a resumed one has put out something already."""
        self.prompts[handle], self._prompt_ids[handle] = prompt, np.array(prompt, np.int64)
        self.sampled[handle], self.received[handle] = list(output), list(output)
        self.sched.receive(record, self.now)

    def step(self, *, collect: bool = True) -> Batch | None:
        """Plan and launch a step; collect the oldest when no more may be in flight, or none was planned; send.
        collect False: only in the latter case, so that something may happen before.

        Books are in balance after it. Ranks compute a step when it is launched, before any later one; its result comes
        when it is collected, and requests may have been aborted, expired or ended in between.
        """
        waiting = [req for req in self.sched.reqs.values() if req.state is ReqState.WAITING]
        batch = None
        if (planned := self.sched.next_batch(self.now)) is not None:
            record = planned.encode()
            assert len(record) <= largest_batch(self.limits)
            batch = Batch.decode(record)
        if planned is not None and waiting:
            self.check_admitted([req for req in waiting if req.slot >= 0])
        if batch is not None:
            result = self.compute(batch)
            self.free_at = max(self.now, self.free_at) + self.step_ns(batch)
            self.launched.append((batch, result, self.free_at))
        if self.launched and (batch is None or (collect and len(self.launched) == self.limits.max_in_flight)):
            self.collect()
        elif batch is None:
            self.now += 1
        self.deliver()
        self.sched.check()
        self.follow_events()
        return batch

    def follow_events(self) -> None:
        """Who knows only the events knows what is in the trees."""
        for dp_rank, events in self.sched.kv_events.take():
            self.cached[dp_rank].take(events)
        assert [len(index.blocks) for index in self.cached] == [rank.tree.num_pages for rank in self.sched.ranks]

    def collect(self) -> None:
        """The oldest step in flight is over."""
        batch, result, end_ns = self.launched.popleft()
        self.now = max(self.now, end_ns)
        for slot, count in zip(batch.row_slot, result.counts, strict=True):
            if count and (req := self.sched.slots.reqs[slot]) is not None and not self.sched.slots.gone[slot]:
                self.calls_in_thought(req.handle, slot)
                if req.head["grammar_kind"] != GrammarKind.FROM_START:
                    self.end_thinking(req)
                self.cut_thought(req.handle, slot)
        results.apply(self.sched, batch, result, self.now)

    def calls_in_thought(self, handle: int, slot: int) -> None:
        """Before a grammar begins, a call that is begun stands for the end of thinking. [F-E7]"""
        if self.sched.slots.think_free[slot]:
            begin, end = self.limits.call_begin, self.vocab - 1
            self.sampled[handle] = [end if token == begin else token for token in self.sampled[handle]]

    def end_thinking(self, req: Req) -> None:
        """What a used up budget makes of what was sampled. [R46]"""
        said, end, budget = self.sampled[req.handle], self.vocab - 1, int(req.head["thinking_budget"])
        ends = {end, self.limits.call_begin} if req.head["flags"] & STOP_BEFORE_CALLS else {end}
        if 0 <= budget <= len(said) and ends.isdisjoint(said[:budget]) and req.handle not in self.forced:
            self.forced.add(req.handle)
            self.sampled[req.handle] = [*said[:budget], end]

    def cut_thought(self, handle: int, slot: int) -> None:
        """What was sampled behind the end of thinking, before the grammar that begins there gave a mask. [F-E15]"""
        said, end = self.sampled[handle], self.vocab - 1
        if self.sched.slots.think_free[slot] and end in said:
            self.sampled[handle] = said[: said.index(end) + 1]

    def pause(self, *, retract: bool) -> None:
        """As the leader does it."""
        while retract and self.launched:
            self.collect()
        self.sched.pause(retract=retract)

    def waits_for_another(self, req: Req) -> bool:
        """One of several answers whose prompt the first one has yet to compute. [R20]"""
        first = self.sched.reqs.get(int(req.head["group"]), req)
        return first is not req and not self.sched.prompt_is_computed(first)

    def check_admitted(self, admitted: list[Req]) -> None:
        """They went first where they are, and no rank was left idle that somebody may go to. [R28]"""
        nobody = (1 << 62, 0)
        first = defaultdict(lambda: nobody)  # key by wanted rank, of those that still wait
        for req in self.sched.reqs.values():
            if req.state is ReqState.WAITING and not self.waits_for_another(req):
                first[req.wanted_rank] = min(first[req.wanted_rank], self.key(req))
        for req in admitted:
            before = min(first[-1], first[req.dp_rank])
            assert self.key(req) < before, "one was admitted before one that goes first"
        if admitted or self.sched.tiers.is_on or not self.sched.slots.num_free:
            return  # the plan, saves or slots may have no room for another
        for rank in self.sched.ranks:
            if not (rank.prefilling or rank.decoding):
                assert min(first[-1], first[rank.index]) == nobody, "a rank is idle that one who waits may go to"

    def key(self, req: Req) -> tuple[int, int]:
        """Its place in the queue."""
        return policy.queue_key(req, self.limits.ageing_ns)

    def compute(self, batch: Batch) -> StepResult:
        """What ranks do: apply changes, read and write KV, sample."""
        page, at = self.limits.page_size, 0
        for slot, start, count in zip(batch.run_slot, batch.run_start, batch.run_count, strict=True):
            self.table[slot, start : start + count] = batch.pages[at : at + count]
            at += count
        self.fill_tables(batch)
        inits = batch.inits
        self.min_len[inits["slot"]] = inits["num_prompt_ids"].astype(np.int64) + inits["min_new_tokens"]
        self.kv.begin_step(batch)
        counts = np.zeros(batch.num_rows, np.int32)
        ids = np.full((batch.num_rows, self.limits.decode_len), -1, np.int32)
        assert (np.diff(batch.row_dp_rank) >= 0).all() and batch.dp_num_tokens.max() <= self.limits.max_step_tokens
        area = np.bincount(batch.row_dp_rank, prompt_area(batch))
        assert area.max(initial=0) <= max(self.limits.max_step_area, self.limits.max_context_len)
        at, start_ns = 0, max(self.now, self.free_at)
        asked: list[tuple[int, int, int]] = []
        for i, slot in enumerate(batch.row_slot):
            prefix, extend, dp = int(batch.row_prefix_len[i]), int(batch.row_extend_len[i]), int(batch.row_dp_rank[i])
            tokens = batch.input_ids[at : at + extend]
            at += extend
            handle = self.sched.slots.reqs[slot].handle
            sequence, kv = self._sequence(handle), self.kv.pages[dp].reshape(-1)
            end, masked = prefix + extend, i in batch.mask_row
            new = [self.sample_legal(batch.masks[batch.mask_row == i][0]) if masked else self.sample()]
            if batch.row_flags[i] & ROW_FEED:  # the last id and drafts, of which the first few are right
                new += [self.sample() for _ in range(0 if masked else self.rng.randrange(extend))]
                if not masked and end < self.min_len[slot]:
                    new = [token or 1 for token in new]  # too early to end
                tokens = np.array([sequence[-1], *new[:-1], *[WRONG] * (extend - len(new))])
                assert prefix == len(sequence) - 1, f"slot {slot} decodes in the wrong place"
            else:
                assert np.array_equal(tokens, sequence[prefix:end]), f"slot {slot} computes ids that are not its own"
            places = self.table[slot, np.arange(end) // page] * page + np.arange(end) % page
            assert np.array_equal(kv[places[:prefix]], sequence[:prefix]), f"slot {slot} reads KV that is not its own"
            kv[places[prefix:]] = tokens
            if batch.row_flags[i] & ROW_SAMPLE:
                assert end >= len(sequence), f"slot {slot} samples in the middle"
                if slot in self.tables:
                    assert self.tables[slot][1] == self.said(handle), f"slot {slot} penalises what it has not said"
                    self.tables[slot][1].update({token: 2 * new.count(token) for token in new})
                counts[i], ids[i, : len(new)] = len(new), new
                self.sampled[handle] += new
            if len(batch.top_logprobs) and batch.top_logprobs[i] >= 0:
                targets = batch.targets[at - extend : at].tolist() if len(batch.targets) else [-1] * extend
                asked += [(i, prefix + j + 1, token) for j, token in enumerate(targets) if token >= 0]
                first = prefix + 1 if batch.row_flags[i] & ROW_FEED else end
                asked += [(i, first + j, token) for j, token in enumerate(new[: counts[i]])]
        done, failed = self.kv.end_step(batch)
        logprobs = self.logprobs_of(batch, asked)
        return StepResult(batch.step, counts, ids, start_ns, logprobs=logprobs, done=done, failed=failed)

    @staticmethod
    def logprob(position: int, token: int) -> float:
        """What our ranks make of a token that stands there; the others named beside it are the ids behind it."""
        return -(position + token / 256)

    def logprobs_of(self, batch: Batch, asked: list[tuple[int, int, int]]) -> Logprobs | None:
        """Of (row, position, token)s."""
        if not asked:
            return None
        pairs = np.full((len(asked), 1 + int(batch.top_logprobs.max())), -1, LOGPROB)
        for pair, (row, position, token) in zip(pairs, asked, strict=True):
            for i in range(1 + int(batch.top_logprobs[row])):
                pair[i] = token + i, self.logprob(position, token + i)
        return Logprobs(np.array([row for row, *_ in asked], np.int32), pairs)

    def fill_tables(self, batch: Batch) -> None:
        """New slots have no row; then rows of the sampling tables, each its own rank's and one slot's at a time."""
        for slot in batch.inits["slot"]:
            self.tables.pop(slot, None)
        for table in batch.tables:
            slot, row, req = table["slot"], table["row"], self.sched.slots.reqs[table["slot"]]
            assert row // self.limits.max_biased == req.dp_rank
            mine = batch.said_row == row
            said = Counter(dict(zip(batch.said_id[mine].tolist(), batch.said[mine].tolist(), strict=True)))
            self.tables[slot] = row, said
        rows = [row for slot, (row, _) in self.tables.items() if self.sched.slots.reqs[slot] is not None]
        assert len(rows) == len(set(rows)), "two requests have one row"

    def said(self, handle: int) -> Counter[int]:
        """Twice the times each id was put out, plus 1 if it is in the prompt and the repetition penalty is on."""
        repeats = self.sched.reqs[handle].head["repetition_penalty"] != 1.0
        said = Counter({token: 1 for token in self.prompts[handle] if repeats})
        for token in self.sampled[handle]:
            said[token] += 2
        return said

    def _sequence(self, handle: int) -> np.ndarray:
        return np.concatenate([self._prompt_ids[handle], np.array(self.sampled[handle], np.int64)])

    def sample(self) -> int:
        """Id 0, the end of turn, with its chance."""
        return 0 if self.rng.random() < self.eos_chance else self.rng.randrange(1, self.vocab)

    def sample_legal(self, mask: np.ndarray) -> int:
        """One of the ids that a mask leaves, each alike."""
        return int(self.rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))

    def deliver(self) -> None:
        """What the leader does with output records, into a ring that may be full."""
        throttle = self.sched.throttle
        last: deque = throttle.take_last()
        while last and self._room():
            head, ids, _, logprobs = last.popleft()
            self._receive(head[0], ids, logprobs)
        if not last:
            due, heads, ids = throttle.due(self.sched.decoding_slots())
            sent = at = 0
            for head in heads.view(OUTPUT)[:, 0] if len(heads) else ():
                if not self._room():
                    break
                self._receive(head, ids[at : at + int(head["num_ids"])])
                at += int(head["num_ids"])
                sent += 1
            throttle.mark_sent(due[:sent])

    def _room(self) -> bool:
        if self.ring_room is None:
            return True
        self.ring_room -= 1
        return self.ring_room >= 0

    def _receive(self, head: np.void, ids: np.ndarray, logprobs: bytes = b"") -> None:
        assert head.dtype == OUTPUT
        handle = int(head["handle"])
        assert handle not in self.ended, "nothing comes after the end"
        assert int(head["token_offset"]) == len(self.received[handle]), "ids come in order, none twice, none lost"
        self.received[handle] += [int(t) for t in ids]
        assert int(head["num_output_ids"]) == len(self.received[handle])
        self.last_heads[handle] = head
        if width := int(head["logprob_width"]):
            rows = np.frombuffer(logprobs, LOGPROB).reshape(-1, width)
            num_prompt = int(head["num_prompt_logprobs"])
            assert len(rows) == num_prompt + len(ids) <= MAX_RECORD_TOKENS
            assert rows["id"][num_prompt:, 0].tolist() == ids.tolist()
            assert not num_prompt or not self.logprobs[handle][1], "a prompt's leave before any of the output"
            for mine, part in zip(self.logprobs[handle], (rows[:num_prompt], rows[num_prompt:]), strict=True):
                mine += [[(int(id_), float(value)) for id_, value in row] for row in part]
        if (reason := FinishReason(int(head["finish_reason"]))) != FinishReason.NONE:
            self.ended[handle] = reason

    def is_idle(self) -> bool:
        """Nothing waits, runs, or is held."""
        free = all(r.pool.num_free + r.tree.num_pages == self.limits.num_pages for r in self.sched.ranks)
        locked = any(r.tree.num_pages != r.tree.evictable_pages for r in self.sched.ranks)
        return (
            not self.sched.reqs
            and not self.launched
            and not self.sched.num_running
            and not self.sched.num_waiting
            and free
            and not locked
        )
