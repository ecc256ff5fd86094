"""From output records to what a client joins: framed, collected or all in Python, every way says the same. [R41]

A token is one byte, so characters are cut everywhere; records are cut anywhere.
"""

import json
import select
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53d._native import ByteVocab, Pump, RingWriter, ring_init, ring_segment_bytes
from glm53d.chat.events import Piece, Reasoning, Text, collect
from glm53d.chat.reasoning import ReasoningParser
from glm53d.chat.tools import ToolParser, functions_of
from glm53d.ipc.records import OUTPUT, FinishReason, RecordType
from glm53d.ipc.segment import Segment
from tests.helpers.turns import ADDED, TAGS, joined, pieces_of
from tests.property.test_parsers import TOOLS, turns

VECTORS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/output_vectors.jsonl").read_text().splitlines()
]
WORLD = 7
BYTES = [bytes([i]) for i in range(256)]
IDS = {tag: 256 + i for i, tag in enumerate(TAGS)}
TAG_OF = {256 + i: ADDED[tag] for i, tag in enumerate(TAGS)}  # as the helpers number them
FRAMES = (b'data: {"content":"', b'"}\n\n', b"", b""), (b'data: {"reasoning":"', b'"}\n\n', b"", b"")


@dataclass
class Delivered:
    """All that the pump gave for one request, step by step: frames and behind them pieces."""

    steps: list[tuple[list[dict], list[Piece]]] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""


def deliver(turn: str, cuts: list[int], reason: FinishReason, how: str, *, has_tools: bool) -> Delivered:
    """Write the turn as records of so many tokens and take what the pump makes of them."""
    ids = [i for p in pieces_of(turn) for i in (p.encode() if isinstance(p, str) else [IDS[TAGS[p - 100]]])]
    segment = Segment.create("test", ring_segment_bytes(1 << 18))
    ring_init(segment, WORLD, 1)
    vocab = ByteVocab([*BYTES, *map(str.encode, TAGS)], [False] * (256 + len(TAGS)))
    pump = Pump(segment, WORLD, vocab, 1, IDS["<think>"], IDS["</think>"], list(IDS.values()))
    writer = RingWriter(segment, WORLD)
    frames = FRAMES if how == "framed" else (None, None)
    python_ids = [IDS["<tool_call>"]] if has_tools else []
    pump.open(1 << 32, *frames, True, False, True, python_ids, how == "python")
    pump.start()
    offset = 0
    for size in [*cuts, len(ids)]:
        head = np.zeros(1, OUTPUT)
        part = ids[offset : offset + size]
        head["handle"], head["token_offset"], head["num_ids"] = 1 << 32, offset, len(part)
        offset += len(part)
        head["finish_reason"] = reason if offset == len(ids) else FinishReason.NONE
        assert writer.try_write(RecordType.OUTPUT, [head.tobytes() + np.array(part, np.int32).tobytes()])
        if offset == len(ids):
            break
    got, is_over = Delivered(), False
    while not is_over:
        assert select.select([pump.fileno()], [], [], 20)[0], "the pump has made nothing"
        for _, data, pieces, finish, text, reasoning, *_ in pump.take():
            events = [json.loads(frame.removeprefix(b"data: ")) for frame in data.split(b"\n\n") if frame]
            got.steps.append((events, [p if isinstance(p, str) else TAG_OF[p] for p in pieces]))
            got.text, got.reasoning, is_over = text.decode(), reasoning.decode(), finish is not None
    writer.close()
    pump.stop()
    return got


def heard(turn: str, cuts: list[int], reason: FinishReason, how: str, tools: list[dict]) -> tuple:
    """What the client of a dialect that works in this way joins, what it is told at the end included."""
    got = deliver(turn, cuts, reason, how, has_tools=bool(tools))
    parser = ToolParser(ADDED, functions_of(tools) if tools else None)
    whole = ReasoningParser(ADDED, parser) if how == "python" else parser
    events = []
    if how == "collected":
        [(_, pieces)] = got.steps
        events += [Reasoning(got.reasoning), *parser.feed([got.text, *pieces]), *parser.finish()]
        return joined(events)
    for frames, pieces in got.steps:
        events += [Reasoning(f["reasoning"]) if "reasoning" in f else Text(f["content"]) for f in frames]
        events += whole.feed(pieces)
    events += whole.finish()
    reasoning, content, calls = joined(events)
    if got.text:  # F-F1: thinking that was the answer is repeated as such
        assert (reasoning, content, calls) == (got.text, "", [])
        return "", got.text, []
    return reasoning, content, calls


@settings(max_examples=200, deadline=None)
@given(turns, st.lists(st.integers(1, 9), max_size=20), st.sampled_from([TOOLS, []]), st.booleans())
def test_every_way_out_says_the_same(turn, cuts, tools, stops):
    reason = FinishReason.STOP if stops else FinishReason.LENGTH
    framed, collected, python = (heard(turn, cuts, reason, how, tools) for how in ("framed", "collected", "python"))
    assert framed == collected == python


@pytest.mark.parametrize("how", ["framed", "collected", "python"])
def test_the_golden_outputs_through_the_pump(how):
    """A token a record."""
    for row in VECTORS:
        tools = row["tools"] if row["tool_choice"] != "none" else []
        reason = FinishReason[row["engine_stop"].upper()]
        reasoning, content, calls = heard(row["text"], [1] * len(row["text"].encode()), reason, how, tools)
        expected = row["expected"]
        assert (reasoning or None, content or None) == (expected["reasoning"], expected["content"]), row["name"]
        assert [(name, json.loads(text)) for name, text, is_complete in calls if is_complete] == [
            (c["name"], json.loads(c["arguments"])) for c in expected["tool_calls"]
        ], row["name"]


def test_events_of_a_collected_turn_add_up_to_its_answer():
    """What a plain dialect does, written out once."""
    turn = "Hm.</think>A<tool_call>f<arg_key>integer</arg_key><arg_value>5</arg_value></tool_call>"
    got = deliver(turn, [], FinishReason.STOP, "collected", has_tools=True)
    answer = collect(ToolParser(ADDED, functions_of(TOOLS)).feed([got.text, *got.steps[0][1]]))
    assert (got.reasoning, answer.content, answer.calls[0].arguments) == ("Hm.", "A", '{"integer": 5}')
