"""A load client for OpenAI chat completions: HTTP/1.1 over raw asyncio, answers kept as bytes until the clock stops.

    python -m bench.loadgen --port 8000 --concurrency 8 --requests 200 --max-tokens 1
    python -m bench.loadgen --port 8000 --rate 50 --requests 500 --stream
    python -m bench.loadgen --port 8000 --streams 8 --max-tokens 900 --long-chars 300000

Three loads. Closed: so many clients, each with one request at a time; shows what a server can do. Open (--rate):
requests arrive at random moments whatever the server does, each timed from the moment it was due; shows what users get.
Long (--long-chars): one long prompt comes among running streams, and the gaps in those are what counts.

All requests differ from their first characters on, so a prefix cache helps only where a load repeats one on purpose.
Give --pid main=PID (repeatable) for the CPU time of the server's processes.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import uvloop

from bench.corpus import Corpus
from bench.cpu import CpuMeter, cpu_rows
from bench.measure import Row, make_parser, percentile, report

# A frame that carries generated text: the first frame of many servers has only a role.
TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text)": ?"[^"]')
CONNECTIONS_BEFORE = 64  # opened before an open load starts; more are opened when all are busy


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    port: int
    host: str = "127.0.0.1"
    model: str | None = None  # None: the server's first

    def request(self, text: str, max_tokens: int, *, stream: bool) -> bytes:
        """One chat request as it goes over the wire."""
        body: dict[str, object] = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        if self.model is not None:
            body["model"] = self.model
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body, ensure_ascii=False).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


@dataclass(slots=True, eq=False)
class Answer:
    """What came back for one request. Times are CLOCK_MONOTONIC in ns; `parse` fills what stands in the body."""

    due_ns: int  # when it was to be sent
    head: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)  # when bytes with frames arrived, one entry a read
    first_text_ns: int = 0
    end_ns: int = 0
    status: int = 0
    frames: int = 0  # with generated text
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """To the first generated text, or of a plain answer to its end."""
        return ((self.first_text_ns or self.end_ns) - self.due_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        return (self.end_ns - self.due_ns) / 1e6

    def gaps_ms(self, since_ns: int = 0, until_ns: int = 2**63) -> list[float]:
        """Between reads that carried frames; of those gaps that reach into the given time."""
        pairs = itertools.pairwise(self.reads)
        return [(b - a) / 1e6 for a, b in pairs if b >= since_ns and a <= until_ns]

    def parse(self) -> None:
        """Read status, usage and frames. Raises RuntimeError for anything but a whole success."""
        body = b"".join(self.chunks)
        self.chunks.clear()
        self.status = int(self.head.split(b" ", 2)[1])
        if self.status != 200 or b'"error":' in body:
            raise RuntimeError(f"the server answered {self.status}: {body[:300].decode(errors='replace')}")
        usage = re.findall(rb'"prompt_tokens": ?(\d+), ?"completion_tokens": ?(\d+)', body)
        if not usage:
            raise RuntimeError(f"an answer without usage: {body[-300:].decode(errors='replace')}")
        self.prompt_tokens, self.completion_tokens = map(int, usage[-1])
        self.frames = len(TEXT.findall(body)) if self.reads else 0


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._tail = b""

    @classmethod
    async def open(cls, target: Target) -> "Connection":
        """Connect. Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, target.host, target.port)
        return connection

    async def ask(self, request: bytes, due_ns: int | None = None) -> Answer:
        """Send a request and wait for the whole answer. Raises ConnectionError when the server hangs up."""
        self._answer = answer = Answer(due_ns or time.monotonic_ns())
        self._tail = b""
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return answer

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed the connection: {exc}"))

    def data_received(self, data: bytes) -> None:
        now, answer = time.monotonic_ns(), self._answer
        if answer is None or self._done.done():
            return
        if not answer.head:
            head, border, data = (self._tail + data).partition(b"\r\n\r\n")
            if not border:
                self._tail = head
                return
            answer.head, self._tail = head, b""
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            self._left = int(length[1]) if length else -1  # -1: chunked
        if not data:
            return
        answer.chunks.append(data)
        if b"data: " in data:
            answer.reads.append(now)
            if not answer.first_text_ns and TEXT.search(data):
                answer.first_text_ns = now
        if self._left >= 0:
            self._left -= len(data)
            ended = self._left == 0
        else:
            self._tail = (self._tail + data)[-5:]
            ended = self._tail == b"0\r\n\r\n"
        if ended:
            answer.end_ns = now
            self._done.set_result(None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished load: its answers, parsed, and how long it took."""

    answers: list[Answer]
    wall_s: float

    @property
    def tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self.answers)

    @property
    def frames(self) -> int:
        return sum(answer.frames for answer in self.answers)

    def rows(self, name: str) -> list[Row]:
        """What any load has to say."""
        ttft, gaps = [a.ttft_ms for a in self.answers], [gap for a in self.answers for gap in a.gaps_ms()]
        rows = [
            Row(f"{name}: requests/s", "1/s", len(self.answers) / self.wall_s, better="more"),
            Row(f"{name}: time to first text p50", "ms", percentile(ttft, 0.5)),
            Row(f"{name}: time to first text p99", "ms", percentile(ttft, 0.99)),
            Row(f"{name}: tokens/s", "1/s", self.tokens / self.wall_s, better="more"),
        ]
        if gaps:
            rows.append(Row(f"{name}: frames/s", "1/s", self.frames / self.wall_s, better="more"))
            for label, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
                rows.append(Row(f"{name}: inter-token {label}", "ms", percentile(gaps, share)))
        return rows


async def closed_loop(target: Target, requests: Sequence[bytes], concurrency: int) -> Outcome:
    """So many clients send the requests, each its next one when it has the answer to its last."""
    left = list(reversed(requests))
    connections = [await Connection.open(target) for _ in range(concurrency)]
    answers: list[Answer] = []

    async def client(connection: Connection) -> None:
        while left:
            answers.append(await connection.ask(left.pop()))

    return await _timed(answers, [client(connection) for connection in connections], connections)


async def open_loop(target: Target, requests: Sequence[bytes], per_second: float, seed: int = 0) -> Outcome:
    """Send the requests at random moments, so many a second on average, whatever is still unanswered."""
    rng = random.Random(seed)
    idle = [await Connection.open(target) for _ in range(CONNECTIONS_BEFORE)]
    connections, answers = list(idle), list[Answer]()

    async def user(request: bytes, due_ns: int) -> None:
        await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
        if not idle:
            connections.append(await Connection.open(target))
            idle.append(connections[-1])
        connection = idle.pop()
        answers.append(await connection.ask(request, due_ns))
        idle.append(connection)

    due_ns, users = time.monotonic_ns(), []
    for request in requests:
        due_ns += round(rng.expovariate(per_second) * 1e9)
        users.append(user(request, due_ns))
    return await _timed(answers, users, connections)


async def long_among_streams(
    target: Target, streams: Sequence[bytes], long: bytes, lead_s: float
) -> tuple[Outcome, Answer, list[float]]:
    """Start the streams, then send the long prompt: (the streams, its answer, the streams' gaps in ms meanwhile).

    Raises RuntimeError when a stream ends before the long prompt's answer does: then it was not beside it all the time.
    """
    answers: list[Answer] = []
    late = await Connection.open(target)
    connections = [await Connection.open(target) for _ in streams]

    async def stream(connection: Connection, request: bytes) -> None:
        answers.append(await connection.ask(request))

    async def arrive() -> Answer:
        await asyncio.sleep(lead_s)
        return await late.ask(long)

    arriving = asyncio.ensure_future(arrive())
    work = [stream(connection, request) for connection, request in zip(connections, streams, strict=True)]
    outcome = await _timed(answers, work, connections)
    answer = await arriving
    late.close()
    answer.parse()
    if min(one.end_ns for one in answers) < answer.end_ns:
        raise RuntimeError("the streams ended before the long prompt was answered: give them more tokens")
    gaps = [gap for one in answers for gap in one.gaps_ms(answer.due_ns, answer.end_ns)]
    return outcome, answer, gaps


async def _timed(answers: list[Answer], work: Sequence, connections: Sequence[Connection]) -> Outcome:
    start = time.monotonic()
    await asyncio.gather(*work)
    wall_s = time.monotonic() - start
    for answer in answers:
        answer.parse()
    for connection in connections:
        connection.close()
    return Outcome(answers, wall_s)


async def run(args: argparse.Namespace) -> list[Row]:
    """The load that the command line asks for."""
    target, corpus = Target(args.port, args.host, args.model), Corpus(args.seed)
    count = args.streams if args.long_chars else args.requests
    requests = [
        target.request(corpus.take(args.chars), args.max_tokens, stream=args.stream or bool(args.long_chars))
        for _ in range(count)
    ]
    meter = CpuMeter({name: int(pid) for name, _, pid in (one.partition("=") for one in args.pid)})
    extra: list[Row] = []
    if args.long_chars:
        long = target.request(corpus.take(args.long_chars), 1, stream=True)
        outcome, answer, during = await long_among_streams(target, requests, long, lead_s=1.0)
        extra = [
            Row("largest gap while the long prompt was in work", "ms", max(during)),
            Row(f"the long prompt, {answer.prompt_tokens:,} tokens", "ms", answer.e2e_ms),
        ]
    elif args.rate:
        outcome = await open_loop(target, requests, args.rate, args.seed)
    else:
        outcome = await closed_loop(target, requests, args.concurrency)
    spent = meter.spent_us()
    rows = outcome.rows("load") + extra
    if args.pid:
        rows += cpu_rows("load", spent, len(outcome.answers), "request")
        rows += cpu_rows("load", spent, outcome.tokens, "token")
        rows.append(Row("other work on this machine", "CPUs", meter.disturbance()))
    return rows


def main() -> None:
    parser = make_parser(__doc__, rounds=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", help="absent: the server chooses")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--chars", type=int, default=2600, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=8, help="closed load: clients")
    parser.add_argument("--rate", type=float, help="open load: requests a second")
    parser.add_argument("--long-chars", type=int, help="long load: characters of the long prompt")
    parser.add_argument("--streams", type=int, default=8, help="long load: streams beside it")
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID", help="a process to account for")
    args = parser.parse_args()
    report("load", uvloop.run(run(args)), args.json)


if __name__ == "__main__":
    main()
