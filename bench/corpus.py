"""Text to measure with: the standard library's own sources, the same wherever the same Python is."""

import os
import random
from pathlib import Path

NANO_TOKENIZER = Path(__file__).resolve().parents[1] / "glm53d" / "nano" / "tokenizer.json"


class Corpus:
    """English and code. No two slices of one Corpus begin alike, so no prefix cache helps with any of them."""

    def __init__(self, seed: int = 0):
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self._text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
        self._random = random.Random(seed)

    def take(self, chars: int) -> str:
        """So many characters, from a random place on."""
        start = self._random.randrange(len(self._text))
        unique = f"{self._random.getrandbits(64):016x}\n"
        text = self._text[start : start + chars]
        while len(text) < chars:
            text += self._text[: chars - len(text)]
        return (unique + text)[:chars]
