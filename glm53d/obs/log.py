"""The log: one line a record on standard error, nothing per token.

    2026-03-01 12:00:00.250 INFO    main    request done: 12 tokens rid=5e0c handle=4294967297

A line about one request is written with extra={"rid": rid}, or a handle, and ends with them.
"""

import logging
import sys
import traceback
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]

ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
ESCAPES |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""A rid or a message may come from a client: none starts a line of its own, or steers a terminal."""


def setup(level: Level, process: str = "main") -> None:
    """Log to standard error from now on, as this process ("main", "rank 3"). Once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def set_level(number: int) -> None:
    """Write no line below this from now on, in this process: a number of number_of()."""
    logging.getLogger().setLevel(number)


def number_of(level: Level) -> int:
    """The level as a number that fits a record."""
    return logging.getLevelNamesMapping()[level.upper()]


class LineFormatter(logging.Formatter):
    """A record as one line, whatever is in it."""

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """An exception is one line too: what it says, then where it was raised and who called, innermost first."""
        text = f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')}.{int(record.msecs):03d} {record.levelname:<7} "
        text += f"{self._process:<7} {record.getMessage()}"
        for name in ("rid", "handle"):
            if (value := getattr(record, name, None)) is not None:
                text += f" {name}={value}"
        if record.exc_info and (error := record.exc_info[1]):
            text += f" | {type(error).__name__}: {error}"
            for frame in reversed(traceback.extract_tb(error.__traceback__)):
                text += f" < {frame.filename}:{frame.lineno} {frame.name}"
        return text.translate(ESCAPES)
