"""A turn of the model written out, as pieces in any cut, and what the parsers make of it."""

import re
from collections.abc import Iterable, Sequence

from glm53d.chat.events import (
    Answer,
    Event,
    Piece,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from glm53d.chat.reasoning import ReasoningParser
from glm53d.chat.tools import ToolParser, functions_of

TAGS = "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>".split()  # noqa: SIM905
ADDED = {tag: 100 + i for i, tag in enumerate(TAGS)}
_TAG = re.compile("(" + "|".join(map(re.escape, TAGS)) + ")")


def pieces_of(text: str) -> list[Piece]:
    """Tags as ids, the text between them as it is."""
    return [ADDED.get(part, part) for part in _TAG.split(text) if part]


def single_tokens(pieces: Iterable[Piece]) -> list[Piece]:
    """Cut as far as it goes: each character alone."""
    return [part for piece in pieces for part in (piece if isinstance(piece, str) else [piece])]


def events_of(steps: Iterable[Sequence[Piece]], tools: list[dict]) -> tuple[list[Event], int]:
    """The events of a turn that comes in these steps, and how many calls are complete."""
    answer = ToolParser(ADDED, functions_of(tools) if tools else None)
    turn = ReasoningParser(ADDED, answer)
    events = [event for step in steps for event in turn.feed(step)] + turn.finish()
    return events, answer.num_calls


def parse(pieces: list[Piece], tools: list[dict], engine_stop: str) -> tuple[Answer, str]:
    """The plain answer and its finish reason; the native rule for a turn that was all answer included."""
    events, num_calls = events_of([pieces], tools)
    answer = collect(events)
    ends_thinking = ADDED["</think>"] in pieces or (tools and ADDED["<tool_call>"] in pieces)
    if engine_stop == "stop" and not ends_thinking:
        answer = Answer("", answer.reasoning, answer.calls)
    return answer, "length" if engine_stop == "length" else "tool_calls" if num_calls else "stop"


def stream_of(pieces: list[Piece], tools: list[dict]) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """What a client joins from a stream of single pieces: reasoning, content, calls as (name, arguments, complete)."""
    events, _ = events_of([[piece] for piece in pieces], tools)
    return joined(events)


def joined(events: Iterable[Event]) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """The same of events."""
    reasoning = content = ""
    calls: list[list] = []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning += text
            case Text(text):
                content += text
            case ToolCallStart(index, _, name):
                assert index == len(calls)
                calls.append([name, "", False])
            case ToolCallArguments(index, text):
                assert index == len(calls) - 1
                calls[-1][1] += text
            case ToolCallEnd(index):
                assert index == len(calls) - 1
                calls[-1][2] = True
    return reasoning, content, [tuple(call) for call in calls]
