"""Tool calls: the answer's pieces as text and calls, while they come. [R41]

    answer = text *( call text )
    call   = <tool_call> name *( pair ) </tool_call>
    pair   = <arg_key> key </arg_key> <arg_value> value </arg_value>

The tags are tokens, found by their ids: what the model only spells out is data. Name and key are stripped, a value is
taken as it is. Between pairs anything is passed over; </tool_call> ends a call wherever it stands. A tag out of place
is text where text is kept.

A name is sent once it is whole. A string is sent as it comes, so that a long file shows at once; a value of any other
type, or of an uncertain one, waits for its end, since typing may change its text.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto

from glm53d.chat.arguments import STRING, ArgumentKinds, encode, to_json
from glm53d.chat.conversation import Json
from glm53d.chat.events import Event, Piece, Text, ToolCallArguments, ToolCallEnd, ToolCallStart


class State(Enum):
    """What the next text is part of."""

    CONTENT = auto()
    NAME = auto()
    KEY = auto()
    BEHIND_KEY = auto()  # nothing: white space before a value; any other text, and the key has none
    VALUE = auto()
    BETWEEN = auto()  # nothing: behind the name or a pair
    DROPPED = auto()  # a call that is not passed on


_NEXT = {
    (State.CONTENT, "<tool_call>"): State.NAME,
    (State.NAME, "<arg_key>"): State.KEY,
    (State.NAME, "</tool_call>"): State.CONTENT,
    (State.KEY, "</arg_key>"): State.BEHIND_KEY,
    (State.KEY, "</tool_call>"): State.CONTENT,
    (State.BEHIND_KEY, "<arg_value>"): State.VALUE,
    (State.BEHIND_KEY, "<arg_key>"): State.KEY,
    (State.BEHIND_KEY, "</tool_call>"): State.CONTENT,
    (State.VALUE, "</arg_value>"): State.BETWEEN,
    (State.VALUE, "</tool_call>"): State.CONTENT,
    (State.BETWEEN, "<arg_key>"): State.KEY,
    (State.BETWEEN, "</tool_call>"): State.CONTENT,
    (State.DROPPED, "</tool_call>"): State.CONTENT,
}

BLANK = " \t\n\r\f\v"
"""White space as the native out state knows it, which keeps back a blank beginning of the answer by the same rule."""


def functions_of(tools: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """The schema of its parameters for each tool's name, from tools as a Conversation has them."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") for function in functions}


class ToolParser:
    """Makes events of the answer's pieces: the same in all, however the pieces are cut. A piece's cost is constant.

    White space before the answer's first word, and behind a call, is sent only when more text follows or when the turn
    has no call at all: an answer that is nothing but calls has no content.
    """

    def __init__(
        self,
        added: Mapping[str, int],
        functions: Mapping[str, Json] | None,
        max_calls: int | None = None,
        *,
        spells_all: bool = False,
    ):
        """added: the id of each added token by its spelling.

        spells_all: added tokens are text, whatever they are, as they are spelled.
        functions: see functions_of(). None: the request has no tools, and all is text [F-E9]. A call of any other is
        dropped, as are those beyond max_calls.
        """
        self.parses_calls = functions is not None
        self.num_calls = 0  # complete ones
        self.unknown: list[str] = []  # names that were called and are no function's
        self._spells_all = spells_all
        self._spelling = {id_: spelling for spelling, id_ in added.items()}
        self._functions = functions or {}
        self._max_calls = max_calls
        self._kinds: dict[str, ArgumentKinds] = {}  # of the functions called so far
        self._state = State.CONTENT
        self._events: list[Event] = []  # of this feed()
        self._content: list[str] = []  # behind them
        self._holds_content = self.parses_calls  # it is blank so far
        self._text: list[str] = []  # of the name, key or value, as far as it has come
        # Of the open call:
        self._index = -1
        self._name = ""
        self._key = ""
        self._keys: set[str] = set()  # those with a value
        self._has_repeated_key = False
        self._value_kinds = STRING
        self._arguments: list[str] = []  # behind the events

    def feed(self, pieces: Iterable[Piece]) -> list[Event]:
        """The events of the next pieces, cut anywhere."""
        for piece in pieces:
            if isinstance(piece, str):
                self._take_text(piece)
            elif self._spells_all:
                self._take_text(self._spelling[piece])
            else:
                self._take_tag(self._spelling[piece])
        return self._take_events()

    def finish(self) -> list[Event]:
        """The events that only the end of the turn decides. A call that is still open gets no end."""
        if self.num_calls == 0:
            self._holds_content = False
        return self._take_events()

    def _take_events(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if self._arguments:
            self._events.append(ToolCallArguments(self._index, "".join(self._arguments)))
            self._arguments.clear()
        if self._content and not self._holds_content:
            self._events.append(Text("".join(self._content)))
            self._content.clear()

    def _take_text(self, text: str) -> None:
        match self._state:
            case State.CONTENT:
                self._content.append(text)
                if text.strip(BLANK):
                    self._holds_content = False
            case State.VALUE if self._value_kinds == STRING:
                self._arguments.append(encode(text)[1:-1])
            case State.NAME | State.KEY | State.VALUE:
                self._text.append(text)
            case State.BEHIND_KEY if text.strip():
                self._state = State.BETWEEN

    def _take_tag(self, spelling: str) -> None:
        before = self._state
        after = _NEXT.get((before, spelling)) if self.parses_calls else None
        if after is None:
            # </think> is no text in an answer: it is a second one, or it follows a call that had ended the thinking.
            if before is not State.CONTENT or spelling != "</think>":
                self._take_text(spelling)
            return
        text = "".join(self._text)
        self._text.clear()
        if before is State.NAME and not self._begin_call(text.strip()):
            before, after = State.DROPPED, State.CONTENT if after is State.CONTENT else State.DROPPED
        elif before is State.VALUE:
            self._end_value(text)
        elif after is State.BEHIND_KEY:
            self._key = text.strip()
        elif after is State.VALUE:
            self._begin_value()
        if after is State.CONTENT and before is not State.DROPPED:
            self._end_call()
        self._state = after

    def _begin_call(self, name: str) -> bool:
        """Whether the call is passed on."""
        if name not in self._functions:
            self.unknown.append(name)
            return False
        if self.num_calls == self._max_calls:
            return False
        self._flush()
        self._index += 1
        self._name = name
        self._keys.clear()
        self._has_repeated_key = False
        self._events.append(ToolCallStart(self._index, f"call_{secrets.token_hex(12)}", name))
        return True

    def _begin_value(self) -> None:
        if self._name not in self._kinds:
            self._kinds[self._name] = ArgumentKinds(self._functions[self._name])
        self._value_kinds = self._kinds[self._name].of(self._key)
        before = ", " if self._keys else "{"
        self._has_repeated_key |= self._key in self._keys
        self._keys.add(self._key)
        self._arguments.append(f"{before}{encode(self._key)}: ")
        if self._value_kinds == STRING:
            self._arguments.append('"')

    def _end_value(self, text: str) -> None:
        self._arguments.append('"' if self._value_kinds == STRING else to_json(text, self._value_kinds))

    def _end_call(self) -> None:
        self._arguments.append("}" if self._keys else "{}")
        self._flush()
        self._events.append(ToolCallEnd(self._index, self._has_repeated_key))
        self.num_calls += 1
        self._holds_content = True
