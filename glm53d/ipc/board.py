"""The load board: rows that one process each writes and anybody reads, none ever waiting. [R8]

    load rows    one per attention-DP rank, written by the leader each step and when idle
    rank rows    one per rank, written by that rank: its phase while loading, its *loaded* report, its last words

A writer killed in the middle of a write leaves the row before it, whole.
"""

import numpy as np

from glm53d import _native
from glm53d.ipc.records import LOAD_ROW, RANK_ROW
from glm53d.ipc.segment import Segment


class Board:
    """The board of one world. Any number of processes may hold one; each row has a single writer."""

    def __init__(self, segment: Segment, world_id: int):
        """Raises AbiMismatch when the segment is no board of this world."""
        self._native = _native.Board(segment, world_id)

    def write_load(self, dp_rank: int, row: np.ndarray | bytes) -> None:
        """Replace a load row by a LOAD_ROW array of one element, or its bytes. The leader only."""
        self._native.write_load(dp_rank, row)

    def read_load(self, dp_rank: int) -> np.void:
        """The load row last written, zeros before the first."""
        return np.frombuffer(self._native.read_load(dp_rank), LOAD_ROW)[0]

    def write_rank(self, rank: int, row: np.ndarray) -> None:
        """Replace a rank row by a RANK_ROW array of one element. That rank only."""
        self._native.write_rank(rank, row)

    def read_rank(self, rank: int) -> np.void:
        """The rank row last written, zeros before the first."""
        return np.frombuffer(self._native.read_rank(rank), RANK_ROW)[0]

    def loads(self) -> np.ndarray:
        """All load rows, by attention-DP rank. Each row is whole; two rows may be of different steps."""
        return np.frombuffer(b"".join(map(self._native.read_load, range(self._native.num_dp))), LOAD_ROW)

    def ranks(self) -> np.ndarray:
        """All rank rows, by rank."""
        return np.frombuffer(b"".join(map(self._native.read_rank, range(self._native.num_ranks))), RANK_ROW)
