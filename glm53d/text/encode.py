"""Text to ids: segments of a rendered chat, or a raw prompt. int32 arrays throughout. [R17] [R18]

One encoder, built from the tokenizer.json without its added tokens, encodes plain text; ids of control tokens are put
between. So what a chat's text spells never becomes a control token, and a raw prompt, where a spelled one is meant, is
cut at them first. Both give the ids of encoding the whole text at once, because a tokenizer cuts there too before it
looks at anything else.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from glm53d.errors import CheckpointError, InvalidRequest
from glm53d.text.vocab import Vocab

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


class Encoder:
    """Text -> ids of one tokenizer. Any number of threads may use it at once; the work runs without the GIL."""

    def __init__(self, path: Path, vocab: Vocab, max_threads: int):
        """Build from a tokenizer.json; takes seconds for a file of 20 MB.

        Args:
            vocab: of the same file; its added tokens are those of raw prompts.
            max_threads: threads of the tokenizer library for one long text. Its pool belongs to the process: the first
                Encoder decides, or FASTOKENS_BPE_THREADS and RAYON_NUM_THREADS when they are set.
        Raises:
            CheckpointError: the file cannot be read or is no tokenizer.
        """
        os.environ.setdefault("FASTOKENS_BPE_THREADS", str(max_threads))
        os.environ.setdefault("RAYON_NUM_THREADS", str(max_threads))
        self._backend = _choose_backend(_without_added_tokens(path), path)
        self._added = vocab.added
        # The longest first: of two that start at the same place, tokenizers take the longer one.
        spellings = sorted(vocab.added, key=len, reverse=True)
        self._border = re.compile(f"({'|'.join(map(re.escape, spellings))})") if spellings else None

    @property
    def backend(self) -> str:
        """The library that encodes: "fastokens", or "tokenizers" when that one is missing or differed."""
        return self._backend.name

    def encode_text(self, text: str) -> np.ndarray:
        """Ids of a raw prompt: what spells an added token is that token."""
        parts = self._border.split(text) if self._border else [text]
        return self.encode_segments([self._added.get(part, part) for part in parts if part])

    def encode_segments(self, segments: Sequence[str | int]) -> np.ndarray:
        """Ids of texts and control ids in their order. Text is only ever text, whatever it spells.

        Raises InvalidRequest for text with a lone surrogate, which has no UTF-8 form.
        """
        texts: list[str] = []
        control_ids: list[int] = []
        num_texts_before: list[int] = []
        for segment in segments:
            if isinstance(segment, str):
                texts.append(segment)
            else:
                control_ids.append(segment)
                num_texts_before.append(len(texts))
        try:
            ids, starts = self._backend.encode(texts)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text has a lone surrogate (U+{ord(error.object[error.start]):04X}), which is not valid Unicode."
            ) from None
        return np.insert(ids, starts[num_texts_before], control_ids)


class _Backend(Protocol):
    name: str

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(int32 ids of all texts in a row, where each starts and the last one ends). May raise UnicodeEncodeError."""
        ...


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
        for text in texts:
            text.encode()  # the library's own error for a lone surrogate names neither it nor its place
        # The batch form even for one text: only that one lets go of the GIL.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts = [np.array(encoding.ids, np.int32) for encoding in encodings]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return np.concatenate([np.empty(0, np.int32), *parts]), starts


def _without_added_tokens(path: Path) -> str:
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} is not a tokenizer.json: {error}") from None
    fields["added_tokens"] = msgspec.Raw(b"[]")
    return msgspec.json.encode(fields).decode()


def _choose_backend(tokenizer_json: str, path: Path) -> _Backend:
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
