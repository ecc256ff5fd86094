"""The daemon from socket to socket: starts it with the simulated engine, puts fixed loads on it, prints a table.

    python -m bench.e2e [--config conf/sim.toml] [--set section.key=value]

Two daemons, one after the other, on a free port: one whose steps take no time, so that all there is to see is the CPU
half, and one with steps of 5 ms, as a model has. Prompts have 1,000 tokens unless said, and no two begin alike. Client,
main and rank share the machine: with fewer than three free CPUs they take turns, and latencies show it. CPU time is by
process, from the kernel's own account. "other work" says how many CPUs served somebody else meanwhile: near 0, or the
numbers are not worth much.

"aim" is what this project wants to reach on two CPUs. The first row is the floor below all that streams: the one send
that each frame costs, to a reader that is awake.
"""

import argparse
import json
import selectors
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from bench.corpus import Corpus
from bench.cpu import CpuMeter, cpu_rows
from bench.loadgen import Connection, Target, closed_loop, long_among_streams
from bench.measure import Row, make_parser, percentile, report
from tests.helpers.daemon import running

STEP_MS = 5.0
NO_STEP_TIME = ("sim.base_ms=0", "sim.per_prefill_token_us=0", "sim.per_decode_row_us=0")
STEPS_OF_5_MS = (f"sim.base_ms={STEP_MS}", *NO_STEP_TIME[1:])
SCRIPT = "sim.text=The answer is a script that begins again when it is over, so it never ends by itself. "
PROMPT, LONG_PROMPT = 1_000, 100_000  # tokens

AIMS = {
    "one client: time to first text p50": 0.6,
    "8 clients, not streamed: requests/s": 2_000.0,
    "8 clients, not streamed: CPU per request, all": 800.0,
    "64 streams, no step time: tokens/s": 160_000.0,
    "64 streams, no step time: frames/s": 160_000.0,
    "64 streams, no step time: CPU per token, all": 8.0,
    "64 streams, 5 ms steps: CPU per token, all": 11.0,
    "64 streams, 5 ms steps: inter-token p99": 5.5,
    "64 streams, 5 ms steps: inter-token p99.9": 7.0,
    "8 streams, a long prompt arrives: largest gap beyond the step": 1.5,
    "long prompt, all of it cached: answered": 8.0,
}


@dataclass(slots=True, eq=False)
class Bench:
    """One running daemon and the prompts it gets."""

    target: Target
    pids: dict[str, int]
    corpus: Corpus
    chars_per_token: float

    def prompt(self, tokens: int) -> str:
        """A text of about so many tokens that begins like no other."""
        return self.corpus.take(round(tokens * self.chars_per_token))

    def requests(self, count: int, max_tokens: int, *, stream: bool) -> list[bytes]:
        """As many requests, each with a prompt of its own."""
        return [self.target.request(self.prompt(PROMPT), max_tokens, stream=stream) for _ in range(count)]

    async def closed(self, name: str, requests: list[bytes], concurrency: int, unit: str) -> list[Row]:
        """A closed load and what it cost by process."""
        await closed_loop(self.target, self.requests(concurrency, 2, stream=True), concurrency)  # warm
        meter = CpuMeter(self.pids)
        outcome = await closed_loop(self.target, requests, concurrency)
        spent = meter.spent_us()
        per = outcome.tokens if unit == "token" else len(outcome.answers)
        rows = outcome.rows(name) + cpu_rows(name, spent, per, unit)
        return [*rows, Row(f"{name}: other work on this machine", "CPUs", meter.disturbance())]


async def without_step_time(bench: Bench) -> list[Row]:
    """What the CPU half does when nothing else takes time."""
    one = await bench.closed("one client", bench.requests(200, 1, stream=True), 1, "request")
    many = await bench.closed("8 clients, not streamed", bench.requests(600, 1, stream=False), 8, "request")
    streams = await bench.closed("64 streams, no step time", bench.requests(256, 256, stream=True), 64, "token")
    return [
        *_only(one, "first text", "CPU", "other"),
        *_only(many, "requests/s", "CPU", "other"),
        *streams,
        await cached(bench),
    ]


async def with_steps(bench: Bench) -> list[Row]:
    """What clients see while a model takes 5 ms for a step."""
    rows = await bench.closed("64 streams, 5 ms steps", bench.requests(64, 512, stream=True), 64, "token")
    return [*_only(rows, "tokens/s", "inter-token", "CPU", "other"), *await stalled(bench)]


async def cached(bench: Bench) -> Row:
    """A prompt whose pages are all there: text, hashes and match of 100K tokens, and one step."""
    request = bench.target.request(bench.prompt(LONG_PROMPT), 1, stream=True)
    connection = await Connection.open(bench.target)
    await connection.ask(request)
    answers = [await connection.ask(request) for _ in range(5)]
    connection.close()
    for answer in answers:
        answer.parse()
    took = [answer.e2e_ms for answer in answers]
    return Row("long prompt, all of it cached: answered", "ms", percentile(took, 0.5), min(took), max(took))


async def stalled(bench: Bench) -> list[Row]:
    """Eight streams, and a prompt of 100K tokens that comes among them."""
    name = "8 streams, a long prompt arrives"
    requests = [bench.target.request(bench.prompt(PROMPT), 500, stream=True) for _ in range(8)]
    long = bench.target.request(bench.prompt(LONG_PROMPT), 1, stream=True)
    _, answer, gaps = await long_among_streams(bench.target, requests, long, lead_s=0.5)
    return [
        Row(f"{name}: inter-token p50 meanwhile", "ms", percentile(gaps, 0.5)),
        Row(f"{name}: largest gap beyond the step", "ms", max(gaps) - STEP_MS),
        Row(f"{name}: its first text, {answer.prompt_tokens:,} tokens", "ms", answer.ttft_ms),
    ]


def send_floor(frame_bytes: int = 210, streams: int = 64, rounds: int = 300) -> Row:
    """CPU of sending a frame over loopback, each to another connection than the last, with the kernel's part of it."""
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as listener:
        pairs = [(socket.create_connection(listener.getsockname()), listener.accept()[0]) for _ in range(streams)]
    reader = threading.Thread(target=_drain, args=([theirs for _, theirs in pairs],))
    reader.start()
    for ours, _ in pairs:
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    frame, start = bytes(frame_bytes), time.thread_time_ns()
    for _ in range(rounds):
        for ours, _ in pairs:
            ours.sendall(frame)
    spent = time.thread_time_ns() - start
    for ours, _ in pairs:
        ours.close()
    reader.join()
    return Row("floor: one send of a frame on loopback", "µs", spent / (rounds * streams) / 1e3)


def _drain(connections: list[socket.socket]) -> None:
    """Read whatever comes until every other end is closed."""
    by_fd = {connection.fileno(): connection for connection in connections}
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                connection = by_fd[key.fd]
                if not connection.recv(1 << 16):
                    selector.unregister(connection)
                    connection.close()


def _only(rows: list[Row], *parts: str) -> list[Row]:
    return [row for row in rows if any(part in row.what for part in parts)]


@contextmanager
def daemon(config: Path, overrides: list[str]) -> Iterator[Bench]:
    """A daemon that is ready and has answered once, which says how long its tokens are."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(*overrides, config=str(config.resolve()), log=Path(folder) / "log") as server,
    ):
        with urllib.request.urlopen(server.url + "/server_info") as answer:
            ranks = json.load(answer)["ranks"]
        pids = {"main": server.process.pid} | {f"rank {rank['rank']}": rank["pid"] for rank in ranks}
        target, corpus = Target(server.port), Corpus()
        sample = corpus.take(20_000)
        first = uvloop.run(closed_loop(target, [target.request(sample, 1, stream=False)], 1))
        yield Bench(target, pids, corpus, len(sample) / first.answers[0].prompt_tokens)


def measure(args: argparse.Namespace) -> list[Row]:
    """All loads, with the aims beside them."""
    rows = [send_floor()]
    for pace, loads in ((NO_STEP_TIME, without_step_time), (STEPS_OF_5_MS, with_steps)):
        with daemon(args.config, ["engine.kind=sim", SCRIPT, *pace, *args.set]) as bench:
            rows += uvloop.run(loads(bench))
    if unknown := AIMS.keys() - {row.what for row in rows}:
        raise SystemExit(f"aims for what was not measured: {sorted(unknown)}")
    return [replace(row, aim=AIMS.get(row.what)) for row in rows]


def main() -> None:
    parser = make_parser(__doc__, rounds=False)
    parser.add_argument("--config", type=Path, default=Path("conf/sim.toml"))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the daemon")
    args = parser.parse_args()
    report("end to end", measure(args), args.json)


if __name__ == "__main__":
    main()
