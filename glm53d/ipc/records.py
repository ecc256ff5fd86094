"""Each shared-memory record as a numpy dtype, taken from native/include/glm53d/records.h: the single source. [R10]

The module's names are made from the native lists, so a field added in records.h is here without an edit. What native
code passes on and does not look into has its meaning here alone: the kinds of controls and moves, and flags.
"""

import struct
from enum import IntEnum
from typing import Any

import numpy as np

from glm53d import _native
from glm53d._native import FinishReason as FinishReason
from glm53d._native import RecordType as RecordType


def _dtype(name: str) -> np.dtype:
    layout = _native.record_layouts()[name]
    return np.dtype(
        {
            "names": [field for field, _, _ in layout.fields],
            "formats": [fmt for _, fmt, _ in layout.fields],
            "offsets": [offset for _, _, offset in layout.fields],
            "itemsize": layout.size,
        }
    )


GENERATE = _dtype("GenerateRecord")
BIAS = _dtype("Bias")
ABORT = _dtype("AbortRecord")
CONTROL = _dtype("ControlRecord")
CONTROL_RESULT = _dtype("ControlResultRecord")
OUTPUT = _dtype("OutputRecord")
SLOT_INIT = _dtype("SlotInit")
TABLE_INIT = _dtype("TableInit")
LOGPROB = _dtype("Logprob")
PAGE_MOVE = _dtype("PageMove")
BATCH = _dtype("BatchRecord")
RESULT = _dtype("ResultRecord")
LOAD_ROW = _dtype("LoadRow")
RANK_ROW = _dtype("RankRow")


class ControlOp(IntEnum):
    """What a control record asks for. arg and value of its result, 0 where not said."""

    SHUTDOWN = 1
    FLUSH_CACHE = 2  # value: pages dropped
    PAUSE = 3  # arg 1: retract what runs. value: requests that wait or stand still
    CONTINUE = 4  # value: the same
    LOG_LEVEL = 5  # arg: a number of the logging module; for followers too
    COLLECT = 6  # to followers only: give the oldest step's result, no other step comes before it


class MoveKind(IntEnum):
    """What a page move does. The first three are done before the next step begins, in this order; the others by a
    thread, at any time.
    """

    SAVE = 1  # device page source -> host page target, before the step writes any page
    LOAD = 2  # host page source -> device page target
    PEER = 3  # device page source of source_rank -> device page target
    STORE = 4  # host page source -> file; by one rank of the group
    FETCH = 5  # file -> host page target
    DROP = 6  # the file goes; by one rank of the group, behind what it stored before


class RankState(IntEnum):
    """RankRow.state: how far a rank has come. It only grows."""

    STARTING = 0
    LOADED = 1
    RUNNING = 2
    STOPPED = 3
    FAILED = 4


# RankRow.phase, in order; the first is that of a row nobody has written
LOAD_PHASES = ("", "imports", "rendezvous", "script", "weights", "kv cache", "loaded")


class GrammarKind(IntEnum):
    """GenerateRecord.grammar_kind: from where on the grammar holds."""

    NONE = 0
    FROM_START = 1
    AFTER_THINKING = 2  # from the token behind </think> on


# GenerateRecord.flags
IGNORE_EOS, PROBE, THINKING_FORCED = 1, 2, 4
HELPER = 64  # a small request beside an agent's main one, such as its title: it goes behind others
ONLY_BIASED = 128  # only ids that logit_bias names are sampled
# How main makes text of the ids, and so what stop strings are looked for in: with the one that matched, without special
# tokens, only what is behind the end of reasoning, and only what is before the first call.
NO_STOP_TRIM, SKIP_SPECIAL, STOP_IN_CONTENT, STOP_BEFORE_CALLS = 8, 16, 32, 256
# Batch rows' flags: the row's last token is sampled; its first input id is the slot's last sampled id, and drafts are
# the others.
ROW_SAMPLE, ROW_FEED = 1, 2


class Packer:
    """Makes records of one kind from fields by name, in one call, and reads them; a field that is not named is 0.

    For what is made once per request or step: numpy writes and reads a scalar record's fields one by one, each a call.
    """

    def __init__(self, dtype: np.dtype):
        fields = dtype.fields
        assert fields is not None
        self._names = tuple(dtype.names or ())
        self._struct = struct.Struct("<" + "".join(_CODES[fields[name][0].str] for name in self._names))
        assert self._struct.size == dtype.itemsize  # records have no padding
        self._zeros = (0,) * len(self._names)
        self._known = frozenset(self._names)

    def __call__(self, **fields: float) -> bytes:
        """The record's bytes. Raises struct.error when a value does not fit its field."""
        assert fields.keys() <= self._known, fields.keys() - self._known
        return self._struct.pack(*map(fields.get, self._names, self._zeros))

    def row(self, *values: float) -> bytes:
        """The record's bytes from all its fields in order, for one that is made so often that names cost too much."""
        return self._struct.pack(*values)

    def unpack(self, data: bytes | memoryview) -> dict[str, Any]:
        """The fields of the record that data begins with: int, or float. Raises struct.error when it is too short."""
        return dict(zip(self._names, self._struct.unpack_from(data), strict=True))


_CODES = {"<u8": "Q", "<i8": "q", "<u4": "I", "<i4": "i", "<f4": "f"}


def align8(n: int) -> int:
    """The next multiple of 8: where the next part of a record's tail starts."""
    return (n + 7) & ~7


def padded(part: bytes) -> bytes:
    """A part of a tail, with zeros up to where the next one starts."""
    return part + bytes(-len(part) % 8)
