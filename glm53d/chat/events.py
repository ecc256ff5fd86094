"""Events: what a turn of the model says, of no dialect. Parsers make them in order of generation, dialects map them.

A stream sends each as it comes, a plain answer adds them up with collect(): so both say the same, whatever the split.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from glm53d.chat.arguments import last_of_each_key

Piece = str | int
"""A part of the model's output: text, or the id of an added token that is not special, such as <tool_call>."""


# Structs, not dataclasses: some are made per token, and a frozen dataclass costs ten times as much to make.
class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of the thinking."""

    text: str


class Text(msgspec.Struct, frozen=True, gc=False):
    """More of the answer."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool that the request has. index: 0, 1, 2 ... in order of appearance."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments; all of a call joined are the text of one JSON object, unless the call is cut off."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call is complete. A call without an end must not be executed: the turn was cut off in it."""

    index: int
    has_repeated_key: bool = False  # in the arguments' text each stands as it came; the last one counts


Event = Reasoning | Text | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call; arguments is the text of a JSON object without repeated keys."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole turn."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def parts(events: Iterable[Event]) -> Iterator[Reasoning | Text | Call]:
    """What a stream of these events adds up to, in order; neighbouring texts are one. A call cut off is left out."""
    kind: type[Reasoning] | type[Text] = Text
    texts: list[str] = []
    arguments: list[str] = []
    start = ToolCallStart(0, "", "")
    for event in events:
        if texts and not isinstance(event, kind):
            yield kind("".join(texts))
            texts.clear()
        match event:
            case Reasoning(text) | Text(text) if text:
                kind = type(event)
                texts.append(text)
            case ToolCallStart():
                start = event
                arguments.clear()
            case ToolCallArguments(_, text):
                arguments.append(text)
            case ToolCallEnd(_, has_repeated_key):
                joined = "".join(arguments)
                yield Call(start.id, start.name, last_of_each_key(joined) if has_repeated_key else joined)
    if texts:
        yield kind("".join(texts))


def collect(events: Iterable[Event]) -> Answer:
    """The plain answer that a stream of these events adds up to. A call that was cut off is left out."""
    whole = list(parts(events))
    return Answer(
        "".join(part.text for part in whole if isinstance(part, Reasoning)),
        "".join(part.text for part in whole if isinstance(part, Text)),
        [part for part in whole if isinstance(part, Call)],
    )
