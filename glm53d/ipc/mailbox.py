"""What ranks share among themselves: signals, and the memory of each that the others may read. [R11]

signals    one segment: a counter for each ordered pair of ranks, and the handles of device memory
memory-N   rank N's own, on the CPU: made without size by main, sized by rank N once it knows how much it needs,
           then mapped by the others. On CUDA it stays empty: there the memory is the device's, opened by handle
"""

from collections.abc import Sequence
from dataclasses import dataclass

from glm53d._native import Signals, signals_init, signals_segment_bytes
from glm53d.ipc.segment import Segment

__all__ = ["MailboxEnds", "Signals", "create", "signals_segment_bytes"]


@dataclass(frozen=True, slots=True)
class MailboxEnds:
    """What one rank holds. Its runner makes a Mailbox of it."""

    signals: Signals
    memories: tuple[Segment, ...]  # of each rank
    ring: Segment | None  # the batch ring, which a GPU copies from where it lies; the leader reads none

    @classmethod
    def open(
        cls, signals: Segment, memories: Sequence[Segment], world_id: int, rank: int, ring: Segment | None = None
    ) -> "MailboxEnds":
        """In that rank, once. Raises AbiMismatch when the segment is of another world."""
        return cls(Signals(signals, world_id, rank), tuple(memories), ring)


def create(world_id: int, num_ranks: int) -> tuple[Segment, list[Segment]]:
    """The segments of one world: signals, and each rank's memory, still without size."""
    signals = Segment.create("glm53d-signals", signals_segment_bytes(num_ranks))
    signals_init(signals, world_id, num_ranks)
    return signals, [Segment.create(f"glm53d-memory-{rank}", 0) for rank in range(num_ranks)]
