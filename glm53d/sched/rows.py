"""The decoding rows of a step: columns kept from step to step, and which of them go into this one. [R33] [R34]"""

from dataclasses import dataclass

import numpy as np

from glm53d.ipc.records import ROW_FEED, ROW_SAMPLE


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Columns of a Batch that stay the same while the same requests decode. int32, never written to."""

    dp_rank: np.ndarray
    extend_len: np.ndarray
    flags: np.ndarray
    input_ids: np.ndarray

    @classmethod
    def make(cls, num: int, decode_len: int) -> "DecodeRows":
        """For so many decoding requests, decode_len tokens each, all of attention-DP rank 0."""
        flags = np.full(num, ROW_SAMPLE | ROW_FEED, np.int32)
        extend_len, input_ids = np.full(num, decode_len, np.int32), np.full(num * decode_len, -1, np.int32)
        return cls(np.zeros(num, np.int32), extend_len, flags, input_ids)

    def first(self, per_rank: list[int]) -> "DecodeRows":
        """The columns for so many requests of each attention-DP rank; these here have room for all together."""
        num, decode_len = sum(per_rank), len(self.input_ids) // len(self.flags)
        dp_rank = self.dp_rank[:num]
        if len(per_rank) > 1:
            dp_rank = np.repeat(np.arange(len(per_rank), dtype=np.int32), per_rank)
        return DecodeRows(dp_rank, self.extend_len[:num], self.flags[:num], self.input_ids[: num * decode_len])


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """Decoding slots that go into the next step, and their columns."""

    slots: np.ndarray
    prefix_len: np.ndarray
    columns: DecodeRows

    @classmethod
    def of(cls, slots: np.ndarray, prefix_len: np.ndarray, columns: DecodeRows, sit_out: np.ndarray) -> "ReadyRows":
        """All decoding slots but those at the indices sit_out."""
        if not len(sit_out):
            return cls(slots, prefix_len, columns)
        if not (n := len(slots) - len(sit_out)):
            return NONE_READY
        stays = np.ones(len(slots), bool)
        stays[sit_out] = False
        input_ids = columns.input_ids[: len(columns.input_ids) // len(slots) * n]
        rest = DecodeRows(columns.dp_rank[stays], columns.extend_len[:n], columns.flags[:n], input_ids)
        return cls(slots[stays], prefix_len[stays], rest)


_NONE = np.empty(0, np.int32)
NONE_READY = ReadyRows(_NONE, _NONE, DecodeRows(_NONE, _NONE, _NONE, _NONE))
