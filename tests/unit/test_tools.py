"""Tool calls out of pieces: the golden outputs, each field report, and what is sent when."""

import json
from pathlib import Path

import pytest

from glm53d.chat.events import Event, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart, collect
from glm53d.chat.reasoning import ReasoningParser
from glm53d.chat.tools import BLANK, ToolParser, functions_of
from tests.helpers.turns import ADDED, parse, pieces_of, single_tokens, stream_of

VECTORS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/output_vectors.jsonl").read_text().splitlines()
]
FUNCTIONS = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "get": None,
    "f": {"properties": {"s": {"type": "string"}, "u": {"type": ["string", "null"]}, "o": {"type": "object"}}},
}

OTHER_TAGS = "a<tool_call>b</arg_key></think><think>c<arg_key><arg_value>"  # that end no value
YS = {"u": None, "s": "y"}


def parser(functions=FUNCTIONS, max_calls: int | None = None) -> ToolParser:
    return ToolParser(ADDED, functions, max_calls)


def feed(text: str, **fields) -> list[Event]:
    tools = parser(**fields)
    return tools.feed(pieces_of(text)) + tools.finish()


def call(name: str, **arguments: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: row["name"])
@pytest.mark.parametrize("cut", [list, single_tokens], ids=["whole", "by token"])
def test_the_golden_outputs(row, cut):
    """With choice none a row is one without tools; that a chat then drops calls is tested with the server [F-E8]."""
    tools = row["tools"] if row["tool_choice"] != "none" else []
    answer, reason = parse(cut(pieces_of(row["text"])), tools, row["engine_stop"])
    assert {
        "reasoning": answer.reasoning or None,
        "content": answer.content or None,
        "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in answer.calls],
        "finish_reason": reason,
    } == row["expected"]


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: row["name"])
def test_the_golden_outputs_streamed(row):
    """Of a call that was cut off a stream has sent the beginning; a repeated key it has sent twice."""
    tools = row["tools"] if row["tool_choice"] != "none" else []
    reasoning, content, calls = stream_of(single_tokens(pieces_of(row["text"])), tools)
    expected = row["expected"]
    if not row["name"].startswith("skip/"):
        assert (reasoning or None, content or None) == (expected["reasoning"], expected["content"])
    complete = [{"name": name, "arguments": json.loads(joined)} for name, joined, is_complete in calls if is_complete]
    assert complete == [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in expected["tool_calls"]]
    for _, joined, is_complete in calls:
        assert is_complete or row["name"].startswith("cut/")
        assert is_complete or any(whole.startswith(joined) for whole in ('{"city": "Paris"}', '{"city": "Rome"}'))


def test_a_call_without_arguments_is_whole():
    """F-E1"""
    [start, *rest] = feed("<tool_call>get\n</tool_call>")
    assert (start.index, start.name) == (0, "get")
    assert rest == [ToolCallArguments(0, "{}"), ToolCallEnd(0)]


def test_without_parsers_every_tag_is_text():
    spelled = ToolParser(ADDED, None, spells_all=True)
    tags = [ADDED[tag] for tag in ("</think>", "<tool_call>", "<arg_key>")]
    assert spelled.feed(["a", *tags, "b"]) == [Text("a</think><tool_call><arg_key>b")] and not spelled.parses_calls


def test_a_name_is_sent_once_and_whole():
    """F-E6"""
    tools = parser()
    assert tools.feed([ADDED["<tool_call>"], "get"]) == []
    assert tools.feed(["_wea", "ther"]) == []
    [start] = tools.feed([ADDED["<arg_key>"]])
    assert start.name == "get_weather"


def test_a_string_streams_as_it_comes_and_is_escaped():
    """F-E17, F-E4"""
    tools = parser()
    tools.feed(pieces_of("<tool_call>f<arg_key>s</arg_key>"))
    assert tools.feed(pieces_of('<arg_value>{"a": ')) == [ToolCallArguments(0, '{"s": "{\\"a\\": ')]
    assert tools.feed(["1}\n"]) == [ToolCallArguments(0, "1}\\n")]
    assert tools.feed([ADDED["</arg_value>"]]) == [ToolCallArguments(0, '"')]
    assert tools.feed([ADDED["</tool_call>"]]) == [ToolCallArguments(0, "}"), ToolCallEnd(0)]


def test_a_file_of_ten_thousand_lines_is_sent_line_by_line():
    """F-E17"""
    tools, lines = parser(), [f'{i}: say "x"\n' for i in range(10_000)]
    tools.feed(pieces_of("<tool_call>f<arg_key>s</arg_key><arg_value>"))
    sent = [tools.feed([line]) for line in lines]
    assert sent == [[ToolCallArguments(0, json.dumps(line)[1:-1])] for line in lines]


def test_a_value_of_an_uncertain_type_waits_for_its_end():
    """F-E3"""
    tools = parser()
    assert tools.feed(pieces_of("<tool_call>f<arg_key>u</arg_key><arg_value>"))[1:] == [ToolCallArguments(0, '{"u": ')]
    assert tools.feed(["nu"]) == tools.feed(["ll"]) == []
    assert tools.feed([ADDED["</arg_value>"]]) == [ToolCallArguments(0, "null")]


def test_several_calls_in_one_step_all_come():
    """F-E10, F-E13: numbered by appearance."""
    events = feed(call("f", s="1") + call("get") + call("f", s="2"))
    assert [(e.index, e.name) for e in events if isinstance(e, ToolCallStart)] == [(0, "f"), (1, "get"), (2, "f")]
    assert [c.arguments for c in collect(events).calls] == ['{"s": "1"}', "{}", '{"s": "2"}']


def test_what_is_said_before_a_call_comes_before_it():
    """F-E12"""
    events = feed("Let me check." + call("get"))
    assert events[0] == Text("Let me check.")
    assert isinstance(events[1], ToolCallStart)


def test_without_tools_all_is_text_as_it_came():
    """F-E9"""
    text = "if limit < 2:" + call("get", a="1") + "\n"
    tools = parser(functions=None)
    assert tools.feed(pieces_of("\n")) == [Text("\n")]
    assert collect(tools.feed(pieces_of(text))).content == text
    assert tools.num_calls == 0


def test_a_call_of_an_unknown_tool_is_dropped_and_told():
    tools = parser()
    events = tools.feed(pieces_of("a" + call("nope", x="1") + call("get") + call("") + "b")) + tools.finish()
    answer = collect(events)
    assert (answer.content, [c.name for c in answer.calls]) == ("ab", ["get"])
    assert tools.unknown == ["nope", ""]


def test_calls_beyond_the_limit_are_dropped_and_not_unknown():
    tools = parser(max_calls=1)
    answer = collect(tools.feed(pieces_of(call("get") + call("f", s="1") + "b")) + tools.finish())
    assert (answer.content, [c.name for c in answer.calls], tools.unknown) == ("b", ["get"], [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<arg_key>s</arg_key> \n<arg_value>x</arg_value>", {"s": "x"}),
        ("stray<arg_key>s</arg_key><arg_value>x</arg_value>stray", None),  # the first one is part of the name
        ("<arg_key>u</arg_key><arg_value>null</arg_value>x<arg_key>s</arg_key><arg_value>y</arg_value>", YS),
        ("<arg_key>s</arg_key>x<arg_value>y</arg_value>", {}),
        ("<arg_key>s</arg_key></arg_key><arg_value>y</arg_value>", {}),
        ("<arg_key>s</arg_key><arg_key>u</arg_key><arg_value>y</arg_value>", {"u": "y"}),
        ("<arg_key>s", {}),
        ("<arg_key>s</arg_key>", {}),
        ("<arg_key>s</arg_key><arg_value>x", {"s": "x"}),
        ("<arg_key>u</arg_key><arg_value>null", {"u": None}),
        (f"<arg_key>s</arg_key><arg_value>{OTHER_TAGS}</arg_value>", {"s": OTHER_TAGS}),
        ("<arg_key>s</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value>2</arg_value>", {"s": "2"}),
        ("<arg_key>s</arg_key><arg_value>1</arg_value></arg_value><tool_call>", {"s": "1"}),
    ],
)  # fmt: skip
def test_odd_calls(text, arguments):
    """Every state meets what it does not expect; </tool_call> ends a call in each."""
    answer = collect(feed(f"<tool_call>f{text}</tool_call>B"))
    assert [json.loads(c.arguments) for c in answer.calls] == ([] if arguments is None else [arguments])
    assert answer.content == "B"


def test_of_a_repeated_key_the_plain_answer_has_the_last_and_a_stream_both():
    events = feed(
        "<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value>2</arg_value></tool_call>"
    )
    assert collect(events).calls[0].arguments == '{"s": "2"}'
    assert "".join(e.text for e in events if isinstance(e, ToolCallArguments)) == '{"s": "1", "s": "2"}'
    assert events[-1] == ToolCallEnd(0, has_repeated_key=True)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\n", "\n"),  # no call at all: as it came
        ("\n" + call("get") + " \t", ""),
        ("\na" + call("get") + "\n", "\na"),
        ("\n" + call("get") + "\n" + call("get") + "b", "\n\nb"),
        ("a\n" + call("get") + "\n" + call("get") + "\nb\n", "a\n\n\nb\n"),
        ("\n" + call("nope") + "\n", "\n\n"),
        ("\n<tool_call>get", "\n"),
        ("\u3000" + call("get"), "\u3000"),
    ],
)
def test_white_space_around_calls_is_sent_only_with_text(text, content):
    assert collect(feed(text)).content == content
    assert BLANK == " \t\n\r\f\v"


def test_a_tag_out_of_place_is_text_but_a_second_end_of_thinking_is_nothing():
    assert feed("a</tool_call>b</think>c<arg_key>") == [Text("a</tool_call>bc<arg_key>")]


def test_an_end_of_thinking_behind_a_call_in_the_thinking_is_nothing():
    """F-E7: </think> comes only after the call that has ended the thinking."""
    answer, reason = parse(pieces_of("Hm." + call("get") + "</think>B"), [{"name": "get"}], "stop")
    assert (answer.reasoning, answer.content, len(answer.calls), reason) == ("Hm.", "B", 1, "tool_calls")


def test_every_call_has_an_id_of_its_own():
    """F-E11"""
    ids = [c.id for c in collect(feed(call("get") * 50)).calls]
    assert len(set(ids)) == 50
    assert all(i.startswith("call_") and len(i) == 29 and int(i[5:], 16) >= 0 for i in ids)


def test_a_cut_call_gets_no_end():
    """F-E14"""
    events = feed(call("get") + "<tool_call>f<arg_key>s</arg_key><arg_value>Par")
    assert [type(e) for e in events[-2:]] == [ToolCallStart, ToolCallArguments]
    assert len(collect(events).calls) == 1


def test_thinking_keeps_its_white_space_and_loses_its_tags():
    answer, _ = parse(pieces_of("<think>\n a<think>b \n</think>\n\nc"), [], "stop")
    assert (answer.reasoning, answer.content) == ("\n ab \n", "\n\nc")


def test_thinking_and_answer_are_events_of_their_own_in_one_step():
    turn = ReasoningParser(ADDED, parser())
    assert turn.feed(pieces_of("a<arg_key></think>b")) == [Reasoning("a<arg_key>"), Text("b")]
    assert turn.feed([]) == []


def test_tools_are_known_in_both_forms():
    assert functions_of([{"type": "function", "function": {"name": "a", "parameters": {}}}, {"name": "b"}]) == {
        "a": {},
        "b": None,
    }
