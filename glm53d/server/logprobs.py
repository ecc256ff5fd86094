"""Logprobs in the dialects' words: how a token is called, and which chunk of a stream it belongs to. [F-F5]

They are the model's own: natural logarithms of its probabilities before temperature, penalties and all else that
sampling does. Every token of the output has one, that which ended it included; a stream has each on the chunk that
carries its text, or where it has none that shows, on the next one.
"""

import asyncio
import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Annotated

from msgspec import Meta, Raw

from glm53d._native import TokenLogprob
from glm53d.chat.conversation import Json
from glm53d.chat.events import Event, Piece
from glm53d.chat.reasoning import ReasoningParser
from glm53d.chat.tools import ToolParser
from glm53d.errors import InvalidRequest
from glm53d.front.engine import Engine
from glm53d.front.job import Pieces
from glm53d.server.body import encode

PART = 200
"""Tokens whose logprobs are made in one go: with 20 beside each that is some milliseconds."""

TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
"""How many of the likeliest ids are named beside each token. [F-G5]"""


def needs(switch: str, is_on: bool, name: str, is_wanted: bool) -> None:
    """Raise InvalidRequest for a field that says more of logprobs that were not asked for."""
    if is_wanted and not is_on:
        raise InvalidRequest(f"`{name}` needs `{switch}`.", name)


def _number(logprob: float | None) -> bytes:
    """As JSON, which has no word for what is not finite."""
    return b"%a" % logprob if logprob is not None and isfinite(logprob) else b"null"


class TokenNames:
    """What tokens are called in the answer to one request.

    Answers have them by the hundred thousand: so they are made as JSON, from what is kept by id. As dicts and lists
    they took eight times as long, most of it in the garbage collector.
    """

    def __init__(self, engine: Engine, *, skip_special: bool):
        self._vocab = engine.vocab
        self._skip_special = skip_special
        self._entries: dict[int, tuple[bytes, bytes]] = {}  # before and behind the logprob
        self._texts: dict[int, str] = {}

    def text(self, id: int) -> str:
        r"""The token as text. One that is no whole characters is spelled by its bytes, as `bytes:\xe4\xbd`."""
        if (text := self._texts.get(id)) is None:
            data = self._vocab.token_bytes[id]
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._texts[id] = text
        return text

    def adds(self, token: TokenLogprob) -> bytes:
        """What the token adds to an answer's text; in a prompt, which is repeated as it came, special ones show too."""
        return self._vocab.token_bytes[token.id] if token.is_prompt else self._shown(token.id) or b""

    def _shown(self, id: int) -> bytes | None:
        """What the id adds to the output's text; None: it is special, and those are skipped."""
        if self._skip_special and self._vocab.special[id]:
            return None
        return self._vocab.token_bytes[id]

    def entry(self, token: TokenLogprob) -> Raw:
        """A token of a chat or a response, with those beside it."""
        beside = b",".join([self._entry(*pair) for pair in token.top])
        return Raw(self._entry(token.id, token.logprob)[:-1] + b',"top_logprobs":[' + beside + b"]}")

    def _entry(self, id: int, logprob: float | None) -> bytes:
        if (parts := self._entries.get(id)) is None:
            shown = self._shown(id)
            whole = encode({"token": self.text(id), "bytes": None if shown is None else list(shown)})
            parts = self._entries[id] = whole[:-1] + b',"logprob":', b"}"
        return b"%b%b%b" % (parts[0], _number(logprob), parts[1])

    def content(self, tokens: Sequence[TokenLogprob]) -> dict[str, Json]:
        """`logprobs` of a chat's choice."""
        return {"content": [self.entry(token) for token in tokens], "refusal": None}


class Legacy:
    """`logprobs` of one completion: parallel lists, of its next tokens each time."""

    def __init__(self, names: TokenNames):
        self.names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_chars = 0  # of the text of all tokens so far

    def of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Json]:
        """text_offset is in characters; in the middle of one, where that begins."""
        return {
            "tokens": [self.names.text(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [self._offset(token) for token in tokens],
        }

    def _top(self, token: TokenLogprob) -> dict[str, float] | None:
        """The token itself is always among them."""
        if token.logprob is None:
            return None
        return {self.names.text(id): logprob for id, logprob in [*token.top, (token.id, token.logprob)]}

    def _offset(self, token: TokenLogprob) -> int:
        data = self.names.adds(token)
        is_cut = bool(data) and bool(self._decoder.getstate()[0]) and data[0] & 0xC0 != 0x80
        at = self.num_chars + is_cut  # a character that has no end is one U+FFFD
        self.num_chars += len(self._decoder.decode(data))
        return at


class Native:
    """Fields of `meta_info`, as SGLang has them: a token is [logprob, id, text], its text null unless asked for."""

    def __init__(self, names: TokenNames, *, with_top: bool, with_text: bool):
        self.names = names
        self._with_top = with_top
        self._with_text = with_text
        self._texts: dict[int, bytes] = {}  # as JSON

    def of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Json]:
        """Of the next tokens of the prompt and the output."""
        fields: dict[str, Json] = {}
        for name, is_prompt in (("input", True), ("output", False)):
            mine = [token for token in tokens if token.is_prompt == is_prompt]
            fields[f"{name}_token_logprobs"] = [Raw(self._triple(token.id, token.logprob)) for token in mine]
            if self._with_top:
                fields[f"{name}_top_logprobs"] = [self._top(token) for token in mine]
        return fields

    def _top(self, token: TokenLogprob) -> Raw | None:
        if token.logprob is None:
            return None
        return Raw(b"[" + b",".join([self._triple(*pair) for pair in token.top]) + b"]")

    def _triple(self, id: int, logprob: float | None) -> bytes:
        return b"[%b,%d,%b]" % (_number(logprob), id, self._text(id) if self._with_text else b"null")

    def _text(self, id: int) -> bytes:
        if (text := self._texts.get(id)) is None:
            text = self._texts[id] = encode(self.names.text(id))
        return text


async def in_parts(
    make: Callable[[Sequence[TokenLogprob]], dict[str, Json]], tokens: Sequence[TokenLogprob]
) -> dict[str, Json]:
    """make(tokens), whose lists have a value for each token, with the loop's other work in between."""
    whole = make(tokens[:PART])
    for start in range(PART, len(tokens), PART):
        await asyncio.sleep(0)
        for key, values in make(tokens[start : start + PART]).items():
            if values:
                whole[key] += values
    return whole


class Tokens:
    """The pieces of one stream, each text with its tokens; text that awaits the rest of its token waits here."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def feed(self, pieces: Pieces) -> list[tuple[list[Piece], list[TokenLogprob]]]:
        """What was said, and by which tokens: several, if they share a character; those of the prompt say nothing."""
        found: list[tuple[list[Piece], list[TokenLogprob]]] = []
        goes_on = False
        for piece in pieces:
            is_token = isinstance(piece, TokenLogprob)
            if is_token and goes_on:
                found[-1][1].append(piece)
            elif is_token:
                found.append((self._pieces, [piece]))
                self._pieces = []
            else:
                self._pieces.append(piece)
            goes_on = is_token
        return found


class TokenDeltas:
    """A chat's stream with logprobs: its deltas, and with each the tokens whose text it carries.

    What one wake brings is joined, so that there are as many chunks as without logprobs, or nearly.
    """

    def __init__(
        self,
        names: TokenNames,
        parser: ReasoningParser | ToolParser,
        deltas: Callable[[list[Event]], Iterable[dict[str, Json]]],
    ):
        """deltas: those of a parser's events."""
        self.names = names
        self._parser = parser
        self._deltas = deltas
        self._tokens = Tokens()
        self._waiting: list[TokenLogprob] = []  # their text has not come, or there is none

    def feed(self, pieces: Pieces) -> list[tuple[dict[str, Json], dict[str, Json]]]:
        """The deltas of the next pieces, each with its `logprobs`."""
        chunks: list[tuple[dict[str, Json], list[TokenLogprob]]] = []
        for said, tokens in self._tokens.feed(pieces):
            self._waiting += tokens
            self._add(chunks, self._parser.feed(said))
            if len(self._waiting) >= PART:
                chunks.append(({"content": ""}, self._waiting))
                self._waiting = []
        return [(delta, self.names.content(tokens)) for delta, tokens in chunks]

    def finish(self) -> list[tuple[dict[str, Json], dict[str, Json]]]:
        """Those that only the end of the turn decides."""
        chunks: list[tuple[dict[str, Json], list[TokenLogprob]]] = []
        self._add(chunks, self._parser.finish())
        return [(delta, self.names.content(tokens)) for delta, tokens in chunks]

    def rest(self) -> dict[str, Json]:
        """`logprobs` behind all deltas: of tokens without text."""
        return self.names.content(self._waiting)

    def _add(self, chunks: list[tuple[dict[str, Json], list[TokenLogprob]]], events: list[Event]) -> None:
        deltas = list(self._deltas(events))
        for delta in deltas:
            (key,) = delta
            if chunks and chunks[-1][0].keys() == delta.keys() and isinstance(delta[key], str):
                chunks[-1][0][key] += delta[key]
            else:
                chunks.append((delta, []))
        if deltas:
            chunks[-1][1].extend(self._waiting)
            self._waiting.clear()


class MessageTokens:
    """Of a turn's tokens those of its message: behind the thinking, before a call. A response has no others."""

    def __init__(self, added: Mapping[str, int], *, starts_in_reasoning: bool):
        self._think_end, self._call = added["</think>"], added["<tool_call>"]
        self._in_reasoning = starts_in_reasoning
        self._is_over = False

    def take(self, tokens: Iterable[TokenLogprob]) -> list[TokenLogprob]:
        """Those of the next tokens."""
        found = []
        for token in tokens:
            self._is_over |= token.id == self._call
            if not self._in_reasoning and not self._is_over:
                found.append(token)
            self._in_reasoning &= token.id != self._think_end
        return found
