"""Rank 0's loop: inbox -> plan -> launch, or collect -> results -> outputs -> board. All it calls returns to it.

With overlap the scheduler plans a second step before the first one's result, so a turn launches as long as it gets a
plan, and collects when it gets none.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from glm53d._native import RingReader
from glm53d.errors import EngineError
from glm53d.ipc.batch import Batch, StepResult, join
from glm53d.ipc.channels import LeaderEnds
from glm53d.ipc.records import ABORT, CONTROL, CONTROL_RESULT, LOAD_ROW, ControlOp, Packer, RecordType, padded
from glm53d.kv.events import KvEvent
from glm53d.obs import log as logs
from glm53d.runner.base import Runner
from glm53d.sched import results
from glm53d.sched.scheduler import Scheduler
from glm53d.worker.grammar import ThreadPool

log = logging.getLogger(__name__)

_load_row = Packer(LOAD_ROW).row
FOR_FOLLOWERS = (ControlOp.SHUTDOWN, ControlOp.LOG_LEVEL)
COLLECT = Packer(CONTROL)(op=ControlOp.COLLECT)
IDLE_WAIT_NS = 100_000_000  # how often an idle leader shows on the board that it lives
# Before a step is planned: whose mask comes later sits it out. With a step in flight the wait costs the others nothing.
MASKS_WAIT_S = 0.0005
GRAMMAR_WAIT_S = 0.001  # how often main is listened to while all there is to do is some grammar's job
BOOKS_EVERY_NS = 1_000_000_000  # the books are checked when idle, but not after each of many short requests


@dataclass(slots=True, eq=False)
class Leader:
    """Plans for all ranks and runs its own share. One thread; returns when main asks for shutdown or is gone."""

    sched: Scheduler
    runner: Runner
    ends: LeaderEnds
    spin_ns: int
    compiling: ThreadPool  # jobs of sched.grammars
    masking: ThreadPool
    publish_kv: Callable[[list[tuple[int, list[KvEvent]]]], None] | None = None
    stopping: bool = False
    launched: deque[tuple[Batch, int]] = field(default_factory=deque)  # in flight, oldest first, and when launched
    answers: deque[bytes] = field(default_factory=deque)  # control results that wait for room in the output ring
    last_step_ns: int = 0
    _books_at: tuple[int, int] = (-1, -1)  # step and aborts when the books were last checked
    _books_due_ns: int = 0

    def run(self) -> None:
        """Until shutdown. Raises PeerGone when main or a follower is gone, EngineError when a step goes wrong."""
        while not self.stopping:
            self.drain_inbox()
            self.masking.wait_new(MASKS_WAIT_S)
            batch = self.sched.next_batch(time.monotonic_ns())
            if batch is not None:
                self.launch(batch)
                continue
            if self.launched:
                self.collect()
                self.send_outputs()
            else:
                self.send_outputs()
                self.on_idle()

    def drain_inbox(self) -> None:
        """Take the records that main has sent: so many at a time, so that no step waits for long."""
        now = time.monotonic_ns()
        for kind, data in self.ends.requests.read_all():
            if kind == RecordType.GENERATE:
                self.sched.receive(data, now)
            elif kind == RecordType.ABORT:
                self.sched.abort(int(np.frombuffer(data, ABORT, 1)["handle"][0]))
            elif kind == RecordType.CONTROL:
                self.control(np.frombuffer(data, CONTROL, 1)[0], data)
            else:
                raise EngineError(f"record of unknown type {kind} in the request ring")

    def control(self, record: np.void, data: bytes) -> None:
        """Do what main asks for, pass on what followers must do too, and answer. [R26]"""
        op, arg, value = int(record["op"]), int(record["arg"]), 0
        if op == ControlOp.SHUTDOWN:
            self.sched.abort_all()
            self.stopping = True
        elif op == ControlOp.FLUSH_CACHE:
            value = self.sched.flush_cache()
        elif op == ControlOp.PAUSE:
            while self.launched:  # the pause begins behind them; who is retracted takes along what was sampled
                self.collect()
            value = self.sched.pause(retract=bool(arg))
        elif op == ControlOp.CONTINUE:
            value = self.sched.resume()
        elif op == ControlOp.LOG_LEVEL:
            logs.set_level(arg)
        else:
            raise EngineError(f"unknown control operation {op}")
        if op in FOR_FOLLOWERS and self.ends.batches is not None:
            self.publish(RecordType.CONTROL, data)
        answer = np.zeros(1, CONTROL_RESULT)
        answer["call_id"], answer["op"], answer["value"] = record["call_id"], op, value
        self.answers.append(answer.tobytes())
        self.show_load()  # who asked may look at once

    def launch(self, batch: Batch) -> None:
        """Publish the step to every rank and start our share."""
        self.launched.append((batch, time.monotonic_ns()))
        self.show_load()
        if self.ends.batches is not None:
            self.publish(RecordType.BATCH, batch.encode())
        self.runner.launch(batch)

    def collect(self) -> None:
        """Wait for the oldest step launched, gather what was sampled, and apply it."""
        batch, launched_ns = self.launched.popleft()
        if self.ends.batches is not None and self.sched.in_flight < self.sched.limits.max_in_flight:
            self.publish(RecordType.CONTROL, COLLECT)
        result = self.runner.collect()
        for ring in self.ends.results:
            result = merge(result, self.result_of(ring, batch))
        end = time.monotonic_ns()
        self.last_step_ns = end - max(launched_ns, self.sched.last_result_ns)
        results.apply(self.sched, batch, result, end)
        if self.sched.limits.debug:
            self.sched.check()

    def publish(self, kind: RecordType, data: bytes) -> None:
        """Put a record before every follower; each is at most max_in_flight steps behind."""
        assert self.ends.batches is not None
        if not self.ends.batches.try_write(kind, [data]):
            raise EngineError("the batch ring is full: a follower does not read")

    def result_of(self, ring: RingReader, batch: Batch) -> StepResult:
        """The follower's result of this very step."""
        while (record := ring.read()) is None:  # a step that does not end ends the world, see supervisor.py
            ring.wait(self.spin_ns, IDLE_WAIT_NS)
        kind, data = record
        result = StepResult.decode(data)
        if kind != RecordType.RESULT or result.step != batch.step:
            raise EngineError(f"a follower answered step {result.step} to step {batch.step}")
        return result

    def send_outputs(self) -> None:
        """Put due output records into the ring, with one publish and at most one wake.

        A full ring leaves them for later.
        """
        throttle, ring = self.sched.throttle, self.ends.outputs
        while self.answers and ring.try_append(RecordType.CONTROL_RESULT, [self.answers[0]]):
            self.answers.popleft()
        last = throttle.take_last()
        while last:
            head, ids, error, logprobs = last[0]
            if not ring.try_append(RecordType.OUTPUT, [head.tobytes(), padded(ids.tobytes()), padded(error), logprobs]):
                break
            last.popleft()
        if not last:
            due, heads, ids = throttle.due(self.sched.decoding_slots())
            if len(due):
                sent = ring.try_append_outputs(heads, ids)
                throttle.mark_sent(due[:sent])
        ring.publish()
        if self.publish_kv is not None and self.sched.kv_events is not None:
            self.publish_kv(self.sched.kv_events.take())

    def on_idle(self) -> None:
        """Nothing can run: check the books if something changed, show the load, sleep until main writes. [R31]"""
        state, now = (self.sched.step, self.sched.counters.aborted), time.monotonic_ns()
        if self._books_at != state and now >= self._books_due_ns:
            self.sched.check()
            self._books_at, self._books_due_ns = state, now + BOOKS_EVERY_NS
        self.show_load()
        if self.sched.grammars is not None and self.sched.grammars.num_jobs:
            self.masking.wait_any(self.compiling, GRAMMAR_WAIT_S)
        else:  # without spinning: where nothing runs, what comes next comes from outside
            self.ends.requests.wait(0, IDLE_WAIT_NS)

    def show_load(self) -> None:
        """Write each attention-DP rank's row on the board: once a step as it begins, and when idle. [R8]"""
        sched, c, now, start = self.sched, self.sched.counters, time.monotonic_ns(), 0
        kept, tiers, t = sched.sessions.counters, sched.tiers, sched.tiers.counters
        step_start_ns = self.launched[0][1] if self.launched else 0
        decode, longest_gap_ns = sched.decoding_slots(), sched.longest_gap.longest_ns(now)
        for i, rank in enumerate(sched.ranks):
            free, tree = rank.pool.num_free, rank.tree
            end = start + len(rank.decoding)
            evictable, in_tree = tree.evictable_pages, tree.num_pages
            row = _load_row(
                sched.step, step_start_ns, self.last_step_ns, now,
                len(rank.decoding) + len(rank.prefilling) + len(rank.moving), sched.num_waiting if i == 0 else 0,
                sched.slots.seq_len[decode[start:end]].sum() if rank.decoding else 0,
                sched.waiting.num_tokens if i == 0 else 0,
                sched.limits.num_pages, free, evictable, in_tree - evictable, sched.limits.num_pages - free - in_tree,
                tree.num_nodes, c.steps, c.prefill_tokens, c.cached_tokens, c.decode_tokens, c.finished, c.aborted,
                c.retracted, c.stale, c.books_checked, c.expired, c.dropped,
                c.thinking_forced, kept.kept, kept.resumed, kept.expired, kept.evicted,
                sched.prefill_rate.per_second, longest_gap_ns,
                tiers.hosts[i].capacity, len(tiers.hosts[i]),
                tiers.files.capacity if i == 0 else 0, len(tiers.files) if i == 0 else 0,
                c.cached_host_tokens, c.cached_storage_tokens, t.saved, t.loaded, t.copied, t.stored, t.fetched,
                t.failed, c.drafts_verified, *c.drafts_accepted.tolist(), c.received,
            )  # fmt: skip
            start = end
            self.ends.board.write_load(i, row)


def merge(ours: StepResult, theirs: StepResult) -> StepResult:
    """One result of two: each row was sampled by the one rank that owns its KV."""
    take, logprobs = theirs.counts > 0, join(ours.logprobs, theirs.logprobs)
    if len(theirs.done) or len(theirs.failed):
        done, failed = np.concatenate([ours.done, theirs.done]), np.concatenate([ours.failed, theirs.failed])
        ours = replace(ours, done=done, failed=failed)
    if not take.any():
        return replace(ours, logprobs=logprobs)
    width = max(ours.ids.shape[1], theirs.ids.shape[1])
    counts, ids = ours.counts.copy(), np.full((len(take), width), -1, np.int32)
    ids[:, : ours.ids.shape[1]] = ours.ids
    counts[take] = theirs.counts[take]
    ids[take, : theirs.ids.shape[1]] = theirs.ids[take]
    return replace(ours, counts=counts, ids=ids, logprobs=logprobs)
