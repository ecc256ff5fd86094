"""However a turn is cut, a dialect's stream has its events in order and adds up to its plain answer. [R41]"""

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from glm53d.chat.conversation import Json
from glm53d.chat.events import Piece
from glm53d.chat.reasoning import ReasoningParser
from glm53d.chat.tools import ToolParser, functions_of
from glm53d.front.job import Finish, Job, Usage
from glm53d.ipc.records import FinishReason
from glm53d.server import anthropic, responses
from tests.helpers.turns import ADDED, pieces_of
from tests.property.test_parsers import TOOLS, cuts, steps_of, turns

END = Finish(FinishReason.STOP, Usage(5, 6, 0, 0))
TEXT = anthropic.text_frame(0)


def events_of(stream: bytes) -> list[dict[str, Json]]:
    return [json.loads(line.removeprefix("data: ")) for line in stream.decode().split("\n") if line.startswith("data:")]


def parser_of(tools: list[dict]) -> ToolParser:
    return ToolParser(ADDED, functions_of(tools) if tools else None)


def response_of(steps: list[list[Piece]], tools: list[dict]) -> list[dict[str, Json]]:
    turn = ReasoningParser(ADDED, parser_of(tools))
    output = responses.Output({"id": "resp_r", "output": []})
    stream = output.begin() + b"".join(output.feed(turn.feed(step)) for step in steps)
    return events_of(stream + output.feed(turn.finish()) + output.finish(Job("r", 0), END))


def without_call_ids(output: list[dict[str, Json]]) -> list[dict[str, Json]]:
    return [item | {"call_id": None} for item in output]


@settings(max_examples=300, deadline=None)
@given(turns, cuts, st.sampled_from([TOOLS, []]))
def test_a_response_is_the_same_however_it_was_cut_and_each_item_is_told_whole(turn, sizes, tools):
    """F-H5"""
    pieces = pieces_of(turn)
    events = response_of(steps_of(pieces, sizes), tools)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    assert without_call_ids(output) == without_call_ids(response_of([pieces], tools)[-1]["response"]["output"])
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    for item in output:
        told = [event for event in events if event.get("item_id") == item["id"]]
        deltas = "".join(event["delta"] for event in told if "delta" in event)
        if item["type"] != "function_call":
            assert deltas == item["content"][0]["text"] != ""
        else:  # a key that was repeated is there twice in the stream
            assert json.loads(deltas) == json.loads(item["arguments"])


@settings(max_examples=300, deadline=None)
@given(turns, cuts, st.booleans())
def test_blocks_are_numbered_on_from_those_framed_natively_and_add_up_to_the_plain_answer(turn, sizes, has_text):
    """F-H9"""
    pieces: list[Piece] = [ADDED["<tool_call>"], *pieces_of("f</tool_call>" + turn)]
    blocks = anthropic.Blocks(parser_of(TOOLS))
    natively = TEXT.enter + TEXT.prefix + b"said" + TEXT.suffix + TEXT.leave if has_text else b""
    stream = b"".join(
        blocks.frame(frames, p) for frames, p in [(natively, []), *((b"", s) for s in steps_of(pieces, sizes))]
    )
    events = events_of(stream + blocks.finish(""))
    order = "".join({"start": "(", "delta": ".", "stop": ")"}[event["type"].split("_")[-1]] for event in events)
    assert re.fullmatch(r"(\(\.*\))*", order)
    content: list[dict[str, Json]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({key: value or "" for key, value in event["content_block"].items()})
        elif event["type"] == "content_block_delta":
            (_, kind), (name, text) = event["delta"].items()
            content[-1]["input" if kind == "input_json_delta" else name] += text
        assert event["index"] == len(content) - 1
    finish = Finish(FinishReason.STOP, END.usage, text="said" if has_text else "", pieces=pieces)
    plain = json.loads(anthropic.body.encode(anthropic.content_of(finish, parser_of(TOOLS))))
    whole = [block for block in content if block["type"] == "text" or is_json(block["input"])]
    assert [
        (block["type"], block.get("text"), block.get("name"), "input" in block and json.loads(block["input"]))
        for block in whole
    ] == [(block["type"], block.get("text"), block.get("name"), block.get("input", False)) for block in plain]


def is_json(text: str) -> bool:
    """Whether the call was complete."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
