"""Placement policies against each other: agents' sessions on a simulated node of eight attention-DP ranks. [R25]

    python -m bench.placement [--sessions 20] [--turns 43]

The real scheduler under a virtual clock. Sessions run side by side, each with turns whose prompt is the last turn's
prompt, its answer and a tool's result; between two turns a tool works. All begin with one of two system prompts, and
beside each fourth turn a sub-agent asks, sharing the system prompt only. The defaults are what coding agents were seen
to send: 43 turns a session, 142,000 tokens in and 444 out, 96 % of a prompt the same as the last one's. A step takes as
long as its slowest rank's 12 ms + 20 us a prompt token + 50 us a decoding row.

The last two rows are least_cost with pages that come from another rank's pool, 35 us each, and also from host memory,
138 us each: of 3.45 MB, at 100 and at 25 GB a second. Pages are saved before a step and brought beside it.
"""

import argparse
import heapq
from dataclasses import dataclass, field

import numpy as np

from bench.measure import percentile, render_columns
from glm53d._native import ByteVocab
from glm53d.ipc.batch import Batch, StepResult
from glm53d.ipc.records import OUTPUT, ROW_FEED, ROW_SAMPLE, MoveKind
from glm53d.sched import results
from glm53d.sched.limits import Limits
from glm53d.sched.placement import POLICIES
from glm53d.sched.scheduler import Scheduler
from glm53d.sched.tiers import NO_TIERS, TierLimits
from tests.helpers.sched_world import generate_record

MS = 1_000_000
RANKS, PAGE, POOL, CALLS_END, VOCAB = 8, 64, 10_500, 0, 1000
SYSTEM, FIRST, RESULT, ANSWER, SUB_AGENT = 12_000, 8000, 5300, 444, 4000  # tokens
ASIDE, DOCUMENT, DOCUMENT_LEN = -1, -2, 20_000  # numbers of turns: a sub-agent's, a document's
TOOL_MS = (200, 20_000)  # how long a tool works
PEER_NS, HOST_NS = 35_000, 138_000  # to move a page
COPIES = TierLimits(peer_ns=PEER_NS, step_pages=77)
WITH_HOST = TierLimits(peer_ns=PEER_NS, load_ns=HOST_NS, step_pages=77, host_pages=4 * POOL)


@dataclass(slots=True)
class Turn:
    """One request, and what is measured of it."""

    session: int
    number: int  # of the session's turns, or what else it is
    sent_ns: int
    prompt: np.ndarray
    output: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy came to."""

    policy: str
    mean_ttft_ms: float
    p99_ttft_ms: float
    cached: float  # share of all prompt tokens
    balance: float  # prompt tokens computed by the busiest rank, over the mean
    seconds: float  # until all sessions were over

    def columns(self) -> list[str]:
        return [
            self.policy, f"{self.mean_ttft_ms:,.0f}", f"{self.p99_ttft_ms:,.0f}", f"{100 * self.cached:.1f}",
            f"{self.balance:.2f}", f"{self.seconds:,.0f}",
        ]  # fmt: skip


class Node:
    """Eight ranks under one policy."""

    def __init__(
        self,
        placement: str,
        sessions: int,
        turns: int,
        seed: int = 1,
        num_pages: int = POOL,
        ttl_s: int = 300,
        documents_per_s: float = 0.0,
        tiers: TierLimits = NO_TIERS,
    ):
        """documents_per_s: prompts of no session, each read once, that come as long as agents are at work."""
        limits = Limits(
            attn_dp_size=RANKS, num_pages=num_pages, page_size=PAGE, max_context_len=num_pages * PAGE, max_running=256,
            max_step_tokens=2048, max_step_area=1 << 30, eos_ids=(CALLS_END,), vocab_size=VOCAB, think_end=1,
            call_begin=-1, calls_ends=(CALLS_END,), placement=placement, session_ttl_ns=ttl_s * 1000 * MS,
            max_session_pages=num_pages // 2, tiers=tiers,
        )  # fmt: skip
        self.sched = Scheduler(limits, ByteVocab([b"x"] * VOCAB, [False] * VOCAB))
        self.rng, self.turns, self.now, self.handle = np.random.default_rng(seed), turns, 0, 0
        self.systems = [self.words(SYSTEM) for _ in range(2)]
        self.flying: dict[int, Turn] = {}
        self.arrivals: list[tuple[int, int, Turn]] = []
        self.ttft_ms: list[float] = []
        self.rank_tokens = np.zeros(RANKS)
        self.prompt_tokens = 0  # of agents
        self.document_every_ns = int(1e9 / documents_per_s) if documents_per_s else 0
        self.sessions_left = sessions
        for session in range(1, sessions + 1):
            at = int(self.rng.integers(20_000)) * MS
            self.arrive(Turn(session, 0, at, np.concatenate([self.systems[session % 2], self.words(FIRST)])))
        if self.document_every_ns:
            self.arrive(Turn(0, DOCUMENT, 0, self.words(DOCUMENT_LEN)))

    def words(self, count: int) -> np.ndarray:
        return self.rng.integers(2, VOCAB, count, np.int32)

    def arrive(self, turn: Turn) -> None:
        self.handle += 1
        heapq.heappush(self.arrivals, (turn.sent_ns, self.handle, turn))

    def run(self) -> Outcome:
        """Until all sessions are over."""
        while self.arrivals or self.sched.reqs:
            while self.arrivals and self.arrivals[0][0] <= self.now:
                _, handle, turn = heapq.heappop(self.arrivals)
                self.send(handle, turn)
            batch = self.sched.next_batch(self.now)
            if batch is None:
                self.now = max(self.now, self.arrivals[0][0])
            else:
                self.step(batch)
        return Outcome(
            self.sched.limits.placement,
            mean_ttft_ms=sum(self.ttft_ms) / len(self.ttft_ms),
            p99_ttft_ms=percentile(self.ttft_ms, 0.99),
            cached=self.sched.counters.cached_tokens / self.prompt_tokens,
            balance=float(self.rank_tokens.max() / self.rank_tokens.mean()),
            seconds=self.now / 1e9,
        )

    def send(self, handle: int, turn: Turn) -> None:
        is_document = turn.number == DOCUMENT
        record = generate_record(
            handle, turn.prompt, 1 if is_document else ANSWER, page_size=PAGE, session=turn.session,
            arrival_ns=turn.sent_ns,
        )  # fmt: skip
        self.flying[handle] = turn
        self.sched.receive(record, self.now)
        if not is_document:
            self.prompt_tokens += len(turn.prompt)
        elif self.sessions_left:
            self.arrive(Turn(0, DOCUMENT, turn.sent_ns + self.document_every_ns, self.words(DOCUMENT_LEN)))

    def step(self, batch: Batch) -> None:
        """What ranks do, and the time it takes."""
        rows = np.bincount(batch.row_dp_rank[(batch.row_flags & ROW_FEED) != 0], minlength=RANKS)
        prompt_tokens = batch.dp_num_tokens - rows
        self.rank_tokens += prompt_tokens
        start, took = self.now, 20_000 * prompt_tokens + 50_000 * rows + 12 * MS * bool(batch.num_rows)
        if len(batch.moves):
            saves, loads, copies = (
                np.bincount(batch.moves["dp_rank"][batch.moves["kind"] == kind], minlength=RANKS)
                for kind in (MoveKind.SAVE, MoveKind.LOAD, MoveKind.PEER)
            )
            took = HOST_NS * saves + np.maximum(took, HOST_NS * loads + PEER_NS * copies)
        self.now += int(took.max())
        counts = ((batch.row_flags & ROW_SAMPLE) != 0).astype(np.int32)
        ids = np.full((batch.num_rows, 1), -1, np.int32)
        for i in np.flatnonzero(counts).tolist():
            req = self.sched.slots.reqs[batch.row_slot[i]]
            assert req is not None
            turn = self.flying[req.handle]
            if not turn.output and turn.number != DOCUMENT:
                self.ttft_ms.append((self.now - turn.sent_ns) / MS)
            makes_calls = turn.number != ASIDE and len(turn.output) == ANSWER - 1
            ids[i, 0] = CALLS_END if makes_calls else 2 + len(turn.output) % (VOCAB - 2)
            turn.output.append(int(ids[i, 0]))
        results.apply(self.sched, batch, StepResult(batch.step, counts, ids, start), self.now)
        last = self.sched.throttle.take_last()
        while last:
            head = last.popleft()[0].view(OUTPUT)[0]
            if head["finish_reason"]:  # else it was retracted, and goes on
                self.next_turn(self.flying.pop(int(head["handle"])))

    def next_turn(self, turn: Turn) -> None:
        """What its client does with the answer."""
        self.sessions_left -= turn.number + 1 == self.turns
        if turn.number < 0 or turn.number + 1 == self.turns:
            return
        at = self.now + int(self.rng.integers(*TOOL_MS)) * MS
        prompt = np.concatenate([turn.prompt, np.array(turn.output, np.int32), self.words(RESULT)])
        self.arrive(Turn(turn.session, turn.number + 1, at, prompt))
        if turn.number % 4 == 3:
            prompt = np.concatenate([self.systems[turn.session % 2], self.words(SUB_AGENT)])
            self.arrive(Turn(turn.session, ASIDE, self.now, prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=20, help="agents at work side by side")
    parser.add_argument("--turns", type=int, default=43, help="of each")
    args = parser.parse_args()
    table = [["policy", "mean TTFT ms", "p99 TTFT ms", "cached %", "max/mean rank", "all done s"]]
    table += [Node(name, args.sessions, args.turns).run().columns() for name in POLICIES]
    for name, tiers in (("+ page copies", COPIES), ("+ page copies, host memory", WITH_HOST)):
        _, *columns = Node("least_cost", args.sessions, args.turns, tiers=tiers).run().columns()
        table.append([name, *columns])
    print(render_columns(table))


if __name__ == "__main__":
    main()
