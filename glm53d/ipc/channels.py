"""Every channel between main and the ranks, and which process holds which end. [R2]

    request    main     -> leader       what to generate, abort, control
    output     leader   -> main         tokens, read by main's native output pump
    batch      leader   -> followers    one Batch a step, seen by every follower
    result-N   rank N   -> leader       what a follower sampled
    signals    ranks    -> ranks        how far each is, for the others' memory
    memory-N   rank N   -> ranks        its KV pool, on the CPU: see mailbox.py
    board      ranks    -> anyone       load rows and rank rows

Main creates them before any rank starts, for one world: one life of all ranks. A restart creates new ones. Channels is
pickled to each rank when it is spawned; there each end is taken once, by the thread that uses it.
"""

from dataclasses import dataclass

from glm53d._native import (
    RingReader,
    RingWriter,
    board_init,
    board_segment_bytes,
    mark_rank_gone,
    mark_reader_gone,
    mark_writer_gone,
    ring_init,
    ring_segment_bytes,
)
from glm53d.ipc import mailbox
from glm53d.ipc.board import Board
from glm53d.ipc.mailbox import MailboxEnds, signals_segment_bytes
from glm53d.ipc.segment import Segment

# The leader reads a follower's result before it plans the next step. It is small where nobody asks for logprobs; where
# 4,096 tokens are sampled with 20 beside each, half of this holds it.
MAX_RESULT_RING_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel as the topology lists it."""

    name: str
    kind: str  # "ring", "board", "signals" or "memory"
    writer: str
    readers: tuple[str, ...]
    size: int  # of the segment, in bytes; of memory 0, because its rank finds out while loading


def plan(num_ranks: int, attn_dp_size: int, ring_bytes: int) -> list[Channel]:
    """All channels of such a world; allocates nothing. ring_bytes is each ring's capacity, a power of two."""
    followers = tuple(f"rank {rank}" for rank in range(1, num_ranks))
    one_reader = ring_segment_bytes(ring_bytes)
    channels = [
        Channel("request", "ring", "main", ("rank 0",), one_reader),
        Channel("output", "ring", "rank 0", ("main",), one_reader),
    ]
    if followers:
        size = ring_segment_bytes(ring_bytes, len(followers))
        channels.append(Channel("batch", "ring", "rank 0", followers, size))
    for rank, follower in enumerate(followers, 1):
        size = ring_segment_bytes(min(ring_bytes, MAX_RESULT_RING_BYTES))
        channels.append(Channel(f"result-{rank}", "ring", follower, ("rank 0",), size))
    if followers:
        ranks = ("rank 0", *followers)
        channels.append(Channel("signals", "signals", "every rank", ranks, signals_segment_bytes(num_ranks)))
        channels += [Channel(f"memory-{i}", "memory", rank, ranks, 0) for i, rank in enumerate(ranks)]
    size = board_segment_bytes(attn_dp_size, num_ranks)
    channels.append(Channel("board", "board", "every rank", ("main", "rank 0"), size))
    return channels


@dataclass(frozen=True, slots=True)
class MainEnds:
    """What main holds. The pump opens the reading end of outputs itself, in its own thread."""

    requests: RingWriter
    outputs: Segment
    board: Board


@dataclass(frozen=True, slots=True)
class LeaderEnds:
    """What rank 0 holds."""

    requests: RingReader
    outputs: RingWriter
    batches: RingWriter | None  # None: there is no follower
    results: tuple[RingReader, ...]  # of rank 1, 2 ...
    board: Board


@dataclass(frozen=True, slots=True)
class FollowerEnds:
    """What every other rank holds."""

    batches: RingReader
    results: RingWriter
    board: Board


@dataclass(frozen=True, slots=True)
class Channels:
    """The segments of one world. Taking an end a second time, in any process, raises IpcError."""

    world_id: int
    num_ranks: int
    plan: tuple[Channel, ...]
    segments: dict[str, Segment]  # by channel name

    @classmethod
    def create(cls, world_id: int, num_ranks: int, attn_dp_size: int, ring_bytes: int) -> "Channels":
        """Raises OSError when the memory cannot be had."""
        channels = plan(num_ranks, attn_dp_size, ring_bytes)
        segments: dict[str, Segment] = {}
        if num_ranks > 1:
            segments["signals"], memories = mailbox.create(world_id, num_ranks)
            segments |= {f"memory-{rank}": memory for rank, memory in enumerate(memories)}
        for channel in channels:
            if channel.name in segments:
                continue
            segments[channel.name] = segment = Segment.create(f"glm53d-{channel.name}", channel.size)
            if channel.kind == "board":
                board_init(segment, world_id, attn_dp_size, num_ranks)
            else:
                ring_init(segment, world_id, len(channel.readers))
        return cls(world_id, num_ranks, tuple(channels), segments)

    def main_ends(self) -> MainEnds:
        """In main, once."""
        return MainEnds(self._writer("request"), self.segments["output"], self.board())

    def leader_ends(self) -> LeaderEnds:
        """In rank 0, once."""
        return LeaderEnds(
            self._reader("request"),
            self._writer("output"),
            self._writer("batch") if self.num_ranks > 1 else None,
            tuple(self._reader(f"result-{rank}") for rank in self._followers()),
            self.board(),
        )

    def follower_ends(self, rank: int) -> FollowerEnds:
        """In that rank, 1 or above, once."""
        return FollowerEnds(self._reader("batch", rank - 1), self._writer(f"result-{rank}"), self.board())

    def mailbox_ends(self, rank: int) -> MailboxEnds | None:
        """In that rank, once; of one rank alone there are none."""
        if self.num_ranks == 1:
            return None
        memories = [self.segments[f"memory-{i}"] for i in range(self.num_ranks)]
        ring = self.segments["batch"] if rank > 0 else None
        return MailboxEnds.open(self.segments["signals"], memories, self.world_id, rank, ring)

    def board(self) -> Board:
        """The board, as often as wanted."""
        return Board(self.segments["board"], self.world_id)

    def mark_gone(self, rank: int) -> None:
        """The rank's process is dead: readers take what it published, then raise PeerGone; those that sleep wake."""
        if self.num_ranks > 1:
            mark_rank_gone(self.segments["signals"], self.world_id, rank)
        if rank > 0:
            self._writer_gone(f"result-{rank}")
            self._reader_gone("batch", rank - 1)
            return
        self._writer_gone("output")
        self._reader_gone("request")
        for follower in self._followers():
            self._reader_gone(f"result-{follower}")
        if self.num_ranks > 1:
            self._writer_gone("batch")

    def describe(self) -> list[dict[str, str | int]]:
        """One entry per channel, for people: name, kind, from, to, bytes."""
        return [
            {"name": c.name, "kind": c.kind, "from": c.writer, "to": ", ".join(c.readers), "bytes": c.size}
            for c in self.plan
        ]

    def _followers(self) -> range:
        return range(1, self.num_ranks)

    def _writer(self, name: str) -> RingWriter:
        return RingWriter(self.segments[name], self.world_id)

    def _reader(self, name: str, index: int = 0) -> RingReader:
        return RingReader(self.segments[name], self.world_id, index)

    def _writer_gone(self, name: str) -> None:
        mark_writer_gone(self.segments[name], self.world_id)

    def _reader_gone(self, name: str, index: int = 0) -> None:
        mark_reader_gone(self.segments[name], self.world_id, index)
