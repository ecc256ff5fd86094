"""Vocab: what a tokenizer.json says about each id. Encoding is encode.py's, decoding decode.py's."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from glm53d.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Vocab:
    """The ids of one tokenizer, by number and by name. Every list has `size` entries; an id may have no token."""

    path: Path
    size: int  # highest id + 1
    token_bytes: list[bytes] = field(repr=False)  # what the id adds to a text; b"" for an id without a token
    special: list[bool] = field(repr=False)  # dropped by skip_special_tokens
    added: dict[str, int] = field(repr=False)  # control tokens: matched whole in raw prompts, never made from chat text

    @classmethod
    def load(cls, path: Path) -> "Vocab":
        """Read a tokenizer.json. Raises CheckpointError when it is not byte-level BPE with plain added tokens."""
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is not a tokenizer.json of a byte-level BPE tokenizer: {error}") from None
        _check(file, path)
        size = 1 + max(max(file.model.vocab.values(), default=-1), max((t.id for t in file.added_tokens), default=-1))
        token_bytes = [b""] * size
        for token, id_ in file.model.vocab.items():
            token_bytes[id_] = _unspell(token)
        special = [False] * size
        for added in file.added_tokens:
            token_bytes[added.id] = added.content.encode()
            special[added.id] = added.special
        return cls(path, size, token_bytes, special, {added.content: added.id for added in file.added_tokens})

    @property
    def num_base(self) -> int:
        """Ids below it are ordinary tokens, the added ones are at or above it."""
        return min(self.added.values(), default=self.size)

    @property
    def think_end(self) -> int:
        """The id that ends the model's reasoning."""
        return self.control_id("</think>")

    @property
    def call_begin(self) -> int:
        """The id that begins a tool call."""
        return self.control_id("<tool_call>")

    @property
    def calls_ends(self) -> tuple[int, int]:
        """The ids that end a turn of the model's with tool calls: the end of turn behind them, whose results come next,
        and the end of a call, where the request allows one only.
        """
        return self.control_id("<|observation|>"), self.control_id("</tool_call>")

    def control_id(self, spelling: str) -> int:
        """The id of an added token, as "<think>". Raises CheckpointError when the tokenizer has none so spelled."""
        if spelling not in self.added:
            raise CheckpointError(f"{self.path} lacks the added token {spelling}, which GLM-5.3's tokenizer has.")
        return self.added[spelling]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct, tag_field="type", tag="BPE"):
    vocab: dict[str, int]


class _Kind(msgspec.Struct):
    type: str


class _File(msgspec.Struct):
    """The fields used here; others are skipped without being built, the 300,000 merges among them."""

    model: _Model
    decoder: _Kind | None = None
    added_tokens: list[_AddedToken] = []


def _check(file: _File, path: Path) -> None:
    if file.decoder is None or file.decoder.type != "ByteLevel":
        kind = file.decoder.type if file.decoder else "none"
        raise CheckpointError(f"{path}: its decoder is {kind}; a byte-level one is needed (ByteLevel), as GLM-5.3 has.")
    missing = sum(spelling not in file.model.vocab for spelling in map(chr, _BYTE_OF_SPELLING))
    if missing:
        raise CheckpointError(
            f"{path}: {missing} of the 256 bytes have no token; a byte-level vocabulary has them all."
        )
    if any(token.single_word or token.lstrip or token.rstrip for token in file.added_tokens):
        raise CheckpointError(f"{path}: an added token has single_word, lstrip or rstrip; none of GLM-5.3's has.")
    if min([*file.model.vocab.values(), *(token.id for token in file.added_tokens)]) < 0:
        raise CheckpointError(f"{path}: an id is negative.")


def _byte_of_spelling() -> dict[int, int]:
    """Byte-level files write each byte as one printable character: itself where it is one, else from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{byte: byte for byte in visible}, **{0x100 + i: byte for i, byte in enumerate(hidden)}}


_BYTE_OF_SPELLING = _byte_of_spelling()
# For str.translate: a character that spells no byte goes where latin-1 cannot follow.
_TRANSLATION = {**dict.fromkeys(range(256), 0xFFFF), **_BYTE_OF_SPELLING}


def _unspell(token: str) -> bytes:
    """The bytes that a base token stands for; one with other characters stands for itself, as in the HF decoder."""
    try:
        return token.translate(_TRANSLATION).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
