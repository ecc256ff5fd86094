"""Cuts: where a long text may be taken apart so that encoding the pieces gives the ids of encoding the whole. [R18]

Byte-level BPE never merges across the pieces its pre-tokenizer makes, so a place is safe when GLM-5.3's pre-tokenizer

    (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\\r\\n\\p{L}\\p{N}]?\\p{L}+ | \\p{N}{1,3} | ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*
    | \\s*[\\r\\n]+ | \\s+(?!\\S) | \\s+

always has a border there, and finds the same pieces on either side without seeing the other. BORDER knows three kinds:

    x|blank     x no white space: no alternative goes from such a character on to a blank that is no line end
    letter|y    y no letter: no alternative goes on behind a letter but to letters
    newline|y   y no white space: what takes a line end takes no such character after it, and white space that ends with
                a line end is taken by `\\s*[\\r\\n]+`, so the look-ahead of `\\s+(?!\\S)` is never asked there

To the right of each, matching starts afresh: nothing in the expression looks back. Characters are named one by one or
by blocks assigned since Unicode 2, so that it does not matter whose Unicode tables are newer.
"""

import re
from collections.abc import Iterator

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""The pre-tokenizer's expression for which the borders are proven."""

LETTER = "A-Za-z\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
OTHER = "!-@\\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"  # ASCII and CJK punctuation, ASCII digits
BORDER = re.compile(rf"(?<=[{LETTER}{OTHER}])(?=[ \t])|(?<=[{LETTER}])(?=[{OTHER}\n])|(?<=\n)(?=[{LETTER}{OTHER}])")

MAX_SLICE_BYTES = 1 << 16
"""Slices are as long as this where a border allows it: handing one on copies it under the GIL."""


def slices(text: str, max_bytes: int = MAX_SLICE_BYTES) -> Iterator[str]:
    """The text in pieces of at most max_bytes of UTF-8, longer only where there is no border. max_bytes >= 8.

    A cut depends on nothing far behind it, so a text that has grown at its end keeps its slices.
    """
    size = max_bytes if text.isascii() else max_bytes // 4  # four bytes is the longest character
    window = max(1, size // 16)
    start = 0
    while len(text) - start > size:
        cut = _first_border(text, start + size - window, window)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _first_border(text: str, pos: int, window: int) -> int | None:
    """The first border at or behind pos. One search scans one window: none holds the GIL for long."""
    while pos < len(text):
        # One character more than the window: a border needs both its neighbours.
        if found := BORDER.search(text, pos, pos + window + 1):
            return found.start()
        pos += window
    return None
