"""Messages between processes: the shared-memory ring against multiprocessing's Pipe and Queue.

    python -m bench.micro.ring

"one way": half a round trip with a process that echoes. "spins": the reader looks for the default world.spin_us, then
sleeps, as a rank does; "sleeps": it lies down at once and each message costs a wake. "passed on": one of many records
that flow in one direction. "a step": a record goes to eight processes and each answers, as a node's ranks do each step.

Wall time: it needs as many free CPUs as processes that spin, or it measures the kernel's scheduler.
"""

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue

from bench.measure import Row, make_parser, report, timed_row
from glm53d._native import RingReader, RingWriter, ring_init, ring_segment_bytes
from glm53d.ipc.segment import Segment

WORLD, CAPACITY = 1, 1 << 20
DATA = 1  # a record type; the ring itself gives them no meaning
DEADLINE_NS = 10_000_000_000
SPIN_NS = 20_000
FOLLOWERS = 8
FLOW = 512  # records that flow one way before the answer
AIM_STEP_US = 50.0


def new_ring(num_readers: int = 1) -> Segment:
    """A fresh ring."""
    segment = Segment.create("bench", ring_segment_bytes(CAPACITY, num_readers))
    ring_init(segment, WORLD, num_readers)
    return segment


def read(reader: RingReader, spin_ns: int) -> bytes:
    """The next record, waiting for it."""
    while (found := reader.read()) is None:
        reader.wait(spin_ns, DEADLINE_NS)
    return found[1]


def echo_ring(there: Segment, back: Segment, index: int, spin_ns: int) -> None:
    """Answer each record by itself, an empty one and then end."""
    reader, writer = RingReader(there, WORLD, index), RingWriter(back, WORLD)
    data = b" "
    while data:
        data = read(reader, spin_ns)
        writer.try_write(DATA, [data])


def sink_ring(there: Segment, back: Segment) -> None:
    """Answer only every FLOW-th record; an empty one ends."""
    reader, writer = RingReader(there, WORLD, 0), RingWriter(back, WORLD)
    count = 0
    while True:
        reader.wait(SPIN_NS, DEADLINE_NS)
        for _, data in reader.read_all():
            if not data:
                return
            count += 1
            if count % FLOW == 0:
                writer.try_write(DATA, [data])


def echo_pipe(end: Connection, every: int) -> None:
    """Answer every so many messages; an empty one ends."""
    count = 0
    while data := end.recv_bytes():
        count += 1
        if count % every == 0:
            end.send_bytes(data)


def echo_queue(there: "SimpleQueue[bytes]", back: "SimpleQueue[bytes]") -> None:
    """Answer each item; an empty one ends."""
    while data := there.get():
        back.put(data)


@contextmanager
def processes(targets: Sequence[Callable[[], None]], stop: Callable[[], object]) -> Iterator[None]:
    """Run these in processes of their own; stop() makes them end."""
    context = mp.get_context("spawn")
    running = [context.Process(target=target, daemon=True) for target in targets]
    for process in running:
        process.start()
    try:
        yield
    finally:
        stop()
        for process in running:
            process.join(DEADLINE_NS / 1e9)
            process.kill()  # nothing, where it ended by itself


@contextmanager
def rings(spin_ns: int, followers: int = 1) -> Iterator[Callable[[bytes], None]]:
    """A call that sends a record to every follower and waits for all answers."""
    there, back = new_ring(followers), [new_ring() for _ in range(followers)]
    writer, readers = RingWriter(there, WORLD), [RingReader(segment, WORLD, 0) for segment in back]

    def exchange(data: bytes) -> None:
        writer.try_write(DATA, [data])
        for reader in readers:
            read(reader, spin_ns)

    targets = [partial(echo_ring, there, segment, i, spin_ns) for i, segment in enumerate(back)]
    with processes(targets, lambda: exchange(b"")):
        exchange(b"ready")
        yield exchange


@contextmanager
def ring_flow() -> Iterator[Callable[[bytes], None]]:
    """A call that sends FLOW records and waits until all were read."""
    there, back = new_ring(), new_ring()
    writer, reader = RingWriter(there, WORLD), RingReader(back, WORLD, 0)

    def exchange(data: bytes) -> None:
        for _ in range(FLOW):
            writer.try_write(DATA, [data])
        read(reader, SPIN_NS)

    with processes([partial(sink_ring, there, back)], lambda: writer.try_write(DATA, [b""])):
        exchange(b"ready")
        yield exchange


@contextmanager
def pipes(followers: int = 1, every: int = 1) -> Iterator[Callable[[bytes], None]]:
    """The same with a Pipe for each follower; each answers only the last of `every` messages."""
    ends = [mp.Pipe() for _ in range(followers)]

    def exchange(data: bytes) -> None:
        for _ in range(every):
            for ours, _ in ends:
                ours.send_bytes(data)
        for ours, _ in ends:
            ours.recv_bytes()

    def stop() -> None:
        for ours, _ in ends:
            ours.send_bytes(b"")

    with processes([partial(echo_pipe, theirs, every) for _, theirs in ends], stop):
        exchange(b"ready")
        yield exchange


@contextmanager
def queues() -> Iterator[Callable[[bytes], None]]:
    """The same with two queues, the kind without a feeder thread."""
    context = mp.get_context("spawn")
    there, back = context.SimpleQueue(), context.SimpleQueue()

    def exchange(data: bytes) -> None:
        there.put(data)
        back.get()

    with processes([partial(echo_queue, there, back)], lambda: there.put(b"")):
        exchange(b"ready")
        yield exchange


def measure(rounds: int) -> list[Row]:
    """One way by size and manner of waiting, a flow, and a step of eight followers."""
    rows = []

    def add(what: str, ours: Callable[[], object], against: str, theirs: Callable[[], object], per: int,
            aim: float | None = None) -> None:  # fmt: skip
        clock = time.perf_counter_ns
        rows.append(timed_row(what, ours, rounds=rounds, per=per, against=(against, theirs), aim=aim, clock=clock))

    with pipes() as pipe, queues() as queue:
        for size in (64, 4096):
            data = bytes(size)
            for name, spin_ns in (("spins", SPIN_NS), ("sleeps", 0)):
                with rings(spin_ns) as ring:
                    what = f"one way, {size} B, reader {name}"
                    add(what, partial(ring, data), "Pipe", partial(pipe, data), 2)
                    if size == 64:
                        add(f"{what}, again", partial(ring, data), "SimpleQueue", partial(queue, data), 2)
    with ring_flow() as ring, pipes(every=FLOW) as pipe:
        data = bytes(64)
        add("passed on, 64 B", partial(ring, data), "Pipe", partial(pipe, data), FLOW)
    with rings(0, FOLLOWERS) as ring, pipes(FOLLOWERS) as pipe:
        data = bytes(4096)
        add(
            f"a step to {FOLLOWERS} followers and back",
            partial(ring, data),
            "Pipes",
            partial(pipe, data),
            1,
            AIM_STEP_US,
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args()
    report("ring", measure(args.rounds), args.json)


if __name__ == "__main__":
    main()
