"""Backend: the library that turns plain text into ids; the fast one where it equals the reference. [R18]"""

import logging
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from glm53d.errors import CheckpointError
from glm53d.text import cuts

log = logging.getLogger(__name__)

PROBES = (
    "Hello, world! I'm sure you're right; it's 3.14, 1,234,567 or 0x1F. THEY'LL SEE, WE'VE DONE 'EM.",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # TODO\n\n\n    if x <= 10 and not y:\r\n        pass\r\n",
    "  two   three    four\t\ttabs \n \n\n  mixed \u00a0\u3000\u2028 spaces   ",
    '<tools>\n{"name": "f", "parameters": {"a": [1, -2.5e10, null]}}\n</tools><|user|></think>/nothink[gMASK]',
    "今天天气很好,我们去公园散步吧。日本の首都は東京です。안녕하세요 Здравствуйте Ελληνικά العربية हिन्दी ไทย",
    "Zoë naïve café Ångström ſ İı ﬁ e\u0301 n\u0303 Ⅷ ½ ٣ 𝔘𝔫𝔦 𠀀",
    "😀👩\u200d💻🇫🇷❤️ → “quoted” … — • \x00\x07\x7f\ufeff\ufffd\U0010ffff",
    "don'T '' 's'S a'b 12345678 a1b2 _x__y-- !!??\n\n#$%^&*()+={}[]|\\:;\"'<>,./~`",
    "https://example.com/a?b=c&d=%20#e user@host:~/src$ ls -la | grep '\\.py$' && echo \"$HOME\"\n",
    "",
)
"""Texts of many kinds on which the fast encoder must equal the reference one."""


class Backend(Protocol):
    """A library that encodes plain text, without added tokens. It lets go of the GIL."""

    name: str

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(int32 ids of all texts in a row, where each starts and the last one ends)."""
        ...


def load(path: Path) -> tuple[Backend, bool]:
    """What encodes the texts of a tokenizer.json, and whether cuts.py knows borders of its pre-tokenizer.

    Raises CheckpointError when the file cannot be read or is no tokenizer.
    """
    fields = _fields(path)
    return _choose(msgspec.json.encode(fields | {"added_tokens": msgspec.Raw(b"[]")}).decode(), path), _may_cut(fields)


class _Fastokens:
    name = "fastokens"

    def __init__(self, tokenizer_json: str):
        from fastokens import Tokenizer

        self._tokenizer = Tokenizer.from_json_str(tokenizer_json)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, starts = self._tokenizer.encode_batch_flat(texts)
        return np.frombuffer(ids, np.int32), np.frombuffer(starts, np.int64)


class _Tokenizers:
    name = "tokenizers"

    def __init__(self, tokenizer_json: str):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer_json)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        # The batch form even for one text: only that one lets go of the GIL.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts = [np.array(encoding.ids, np.int32) for encoding in encodings]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return np.concatenate([np.empty(0, np.int32), *parts]), starts


def _fields(path: Path) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} is not a tokenizer.json: {error}") from None


def _may_cut(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether nothing but the known pattern takes a text apart, and nothing changes it before."""
    try:
        normalizer = msgspec.json.decode(fields.get("normalizer", b"null"))
        first, second = msgspec.convert(msgspec.json.decode(fields["pre_tokenizer"]), _Sequence).pretokenizers
    except (KeyError, ValueError, msgspec.ValidationError):
        return False
    split = {"type": "Split", "pattern": {"Regex": cuts.PATTERN}, "behavior": "Isolated", "invert": False}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return normalizer is None and first == split and plain.items() <= second.items()


class _Sequence(msgspec.Struct, tag_field="type", tag="Sequence"):
    pretokenizers: list[dict[str, Any]]


def _choose(tokenizer_json: str, path: Path) -> Backend:
    """fastokens if it is there and equals tokenizers on the probes, else tokenizers, with a warning."""
    try:
        reference = _Tokenizers(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is refused by the tokenizers library: {error}") from None
    try:
        fast = _Fastokens(tokenizer_json)
    except (ImportError, ValueError) as error:
        log.warning("tokenizing is slower: fastokens cannot be used (%s); tokenizers encodes", error)
        return reference
    for texts in (list(PROBES), ["".join(PROBES)]):
        for ours, theirs in zip(fast.encode(texts), reference.encode(texts), strict=True):
            if not np.array_equal(ours, theirs):
                log.warning("tokenizing is slower: fastokens differs from tokenizers on a probe; tokenizers encodes")
                return reference
    return fast
