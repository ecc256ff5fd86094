"""/v1/messages and count_tokens: what reaches the engine, and answers in the shapes and order that clients expect."""

import json

import pytest

from glm53d.chat.template import CONTROL, Template
from glm53d.config import Template as TemplateConfig
from glm53d.errors import ContextTooLong, EngineError, NotReady, Overloaded
from glm53d.ipc.records import FinishReason
from glm53d.server.common import DOCUMENT
from tests.helpers.fake_engine import ADDED, THINK_END
from tests.helpers.http import Client, client_of_fake_engine, raw_post
from tests.unit.test_server_tools import PARIS, python

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
BODY = {"model": "nano", "max_tokens": 100, "messages": HI}
TOOLS = [
    {
        "name": "get_weather",
        "description": "Says it.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    },
    {"type": "custom", "name": "ping", "input_schema": {"type": "object"}},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
]
THOUGHT = ("reasoning", "Hm.", [11, THINK_END])
USAGE = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 2,
    "output_tokens": 6,
    "output_tokens_details": {"thinking_tokens": 4},
}


async def plain(client: Client, **fields) -> dict:
    answer = await client.post(PATH + "?beta=true", BODY | fields)
    assert answer.status == 200, answer.body
    return answer.json


async def streamed(client: Client, **fields) -> list[dict]:
    """The events of an answer, pings left out, checked for what holds of all: one open block at a time, in order."""
    answer = await client.post(PATH, BODY | {"stream": True} | fields)
    assert answer.status == 200, answer.body
    events = [event for event in answer.named_events if event["type"] != "ping"]
    kind_of = {"thinking_delta": "thinking", "signature_delta": "thinking", "text_delta": "text"}
    index, kind = -1, None
    assert [events[0]["type"], *(event["type"] for event in events[-2:])] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert kind is None
                index, kind = index + 1, event["content_block"]["type"]
            case "content_block_delta":
                assert kind == kind_of.get(event["delta"]["type"], "tool_use")
            case "content_block_stop":
                assert kind is not None
                kind = None
        assert event["index"] == index
    assert kind is None
    return events


def blocks_of(events: list[dict]) -> list[dict]:
    """The content that the events add up to, `input` as the JSON text."""
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            if blocks[-1]["type"] == "tool_use":
                assert blocks[-1]["input"] == {}
                blocks[-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            (_, kind), (name, text) = event["delta"].items()
            name = "input" if kind == "input_json_delta" else name
            blocks[-1][name] += text
    return blocks


# ---- answers ---------------------------------------------------------------------------------------------------------


async def test_a_plain_answer_has_thinking_and_text_in_blocks_of_their_own(client):
    """F-H8, F-H9"""
    answer = await plain(client, rid="r")
    timings = answer.pop("timings")
    assert set(timings) == {"queue_time", "first_token_latency", "decode_throughput"}
    assert answer == {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "nano",
        "content": [
            {"type": "thinking", "thinking": "Let me think.", "signature": "glm53d"},
            {"type": "text", "text": 'Hello "you"\n世界'},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
        "reasoning_effort": "max",
    }


async def test_a_stream_opens_and_closes_each_block_with_its_own_kind(client):
    """F-H9: the order and every field."""
    events = await streamed(client, rid="r")
    start, delta = events[0], events[-2]
    assert start["message"] | {"usage": None} == {
        "id": "msg_r", "type": "message", "role": "assistant", "model": "nano", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": None,
    }  # fmt: skip
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (5, 0, 0)
    assert events[1:-2] == [
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Let me "}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "think."}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "glm53d"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": 'Hello "you"\n'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "世界"}},
        {"type": "content_block_stop", "index": 1},
    ]  # fmt: skip
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"] == USAGE
    assert set(delta["timings"]) == {"queue_time", "first_token_latency", "decode_throughput"}


@pytest.mark.parametrize(
    "said",
    [
        [THOUGHT, ("content", "Let me look. ", [12]), *python(PARIS + "B" + PARIS)],
        [THOUGHT, *python("\n" + PARIS + PARIS)],
        [THOUGHT, *python(PARIS + "<tool_call>ping</tool_call>")],
        [("reasoning", "Hm", [11]), *python(PARIS)],  # F-E7
    ],
)
async def test_calls_are_blocks_and_a_stream_adds_up_to_the_plain_answer(client, said):
    client.engine.script.pieces = said
    answer = await plain(client, tools=TOOLS)
    events = await streamed(client, tools=TOOLS)
    assert answer["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"
    blocks = blocks_of(events)
    for block, same in zip(blocks, answer["content"], strict=True):
        if block["type"] == "tool_use":
            assert block.pop("id") != same.pop("id")
            block["input"] = json.loads(block["input"])
        assert block == same
    kinds = "".join(block["type"][0:2] for block in blocks)
    assert kinds in ("thtetotetototo", "thtetoteto", "thtoto", "thto"), kinds


async def test_a_call_that_is_cut_off_is_max_tokens(client):
    """F-E14: a stream closes its block, whose input is no whole JSON."""
    client.engine.script.pieces = [THOUGHT, *python(PARIS + PARIS.partition("</arg_value>")[0])]
    client.engine.script.reason = FinishReason.LENGTH
    answer = await plain(client, tools=TOOLS)
    assert (answer["stop_reason"], [b["type"] for b in answer["content"]]) == ("max_tokens", ["thinking", "tool_use"])
    events = await streamed(client, tools=TOOLS)
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert blocks_of(events)[-1]["input"] == '{"city": "Paris'


async def test_a_turn_that_never_ended_its_thinking_was_all_answer(client):
    """F-F1: a stream has sent it as thinking, and repeats it."""
    client.engine.script.pieces = [("reasoning", "The answer is 4.", [11])]
    answer = await plain(client)
    assert answer["content"] == [{"type": "text", "text": "The answer is 4."}]
    thinking, text = blocks_of(await streamed(client))
    assert (thinking["thinking"], text) == ("The answer is 4.", {"type": "text", "text": "The answer is 4."})
    client.engine.script.reason = FinishReason.LENGTH
    assert [block["type"] for block in (await plain(client))["content"]] == ["thinking"]
    assert [block["type"] for block in blocks_of(await streamed(client))] == ["thinking"]


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, "\nUser:", ("stop_sequence", "\nUser:")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.ABORT, None, ("abort", None)),
    ],
)
async def test_how_it_ended(client, reason, stop, expected):
    client.engine.script.reason, client.engine.script.matched_stop = reason, stop
    answer, events = await plain(client), await streamed(client)
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected
    assert tuple(events[-2]["delta"].values()) == expected


async def test_with_a_template_of_ones_own_all_is_text():
    async with client_of_fake_engine(template=TemplateConfig(path="x", parsers="none")) as client:
        client.engine.script.pieces = [("content", "a</think>b", [1])]
        assert (await plain(client))["content"] == [{"type": "text", "text": "a</think>b"}]
        assert blocks_of(await streamed(client)) == [{"type": "text", "text": "a</think>b"}]


async def test_an_empty_answer_has_no_text(client):
    client.engine.script.pieces = [("reasoning", "Hm.", [11, THINK_END])]
    assert [block["type"] for block in (await plain(client))["content"]] == ["thinking"]
    assert [block["type"] for block in blocks_of(await streamed(client))] == ["thinking"]


async def test_a_silent_stream_gets_pings():
    """F-H11 [R47]"""
    async with client_of_fake_engine(keepalive_s=0.02) as client:
        client.engine.script.hold, client.engine.script.pieces = True, []
        reader, writer = await client.open(raw_post(PATH, BODY | {"stream": True}))
        await reader.readuntil(b"event: message_start\n")
        for _ in range(3):
            await reader.readuntil(b'\r\nevent: ping\ndata: {"type":"ping"}\n\n\r\n')
        client.engine.live[0].release.set()
        assert b"event: message_stop\n" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full"), 429, "rate_limit_error"),
        (NotReady("loading"), 503, "overloaded_error"),
        (EngineError("broken"), 500, "api_error"),
    ],
)
async def test_an_error_before_the_first_byte_has_a_status_and_anthropics_shape(client, error, status, kind):
    client.engine.script.refuse = error
    for stream in (False, True):
        answer = await client.post(PATH, BODY | {"stream": stream})
        assert (answer.status, answer.json["type"]) == (status, "error")
        assert (answer.error["type"], answer.error["message"]) == (kind, error.message)
        assert ("Retry-After" in answer.headers) == (status in (429, 503))


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for(client):
    client.engine.script.refuse = ContextTooLong("The prompt has 300 tokens; at most 99 fit.")
    answer = await client.post(PATH, BODY)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert answer.error["message"].startswith("prompt is too long: ")


async def test_an_error_inside_a_stream_is_its_last_event(client):
    """F-G3"""
    client.engine.script.fail = EngineError("The ranks are gone.")
    answer = await client.post(PATH, BODY | {"stream": True})
    *events, last = answer.named_events
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error" and last["error"]["message"] == "The ranks are gone."
    assert not any(event["type"] in ("message_delta", "message_stop") for event in events)


async def test_keys_and_models_are_refused_in_anthropics_shape():
    async with client_of_fake_engine(api_keys=("k",)) as client:
        for path in (PATH, COUNT):
            answer = await client.post(path, BODY)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error")
            answer = await client.post(path, BODY | {"model": "claude-x"}, {"x-api-key": "k"})
            assert (answer.status, answer.error["type"]) == (404, "not_found_error")


BAD = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}]},
     "messages[0].content[0].input"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": " f", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "strict": "yes"}]}, "tools[0].strict"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),  # of no tools
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
]  # fmt: skip
BAD_SAMPLING = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": 5}, "stop_sequences"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema.not"),
    ({"output_config": {"format": {"type": "text"}}, "output_format": {"type": "text"}}, "output_format"),
    ({"tools": [{"name": "f", "strict": True, "input_schema": {"required": ["a"], "additionalProperties": False}}]},
     "tools[0].input_schema.properties.a"),
    ({"n": 2}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"messages": [*HI, {"role": "assistant", "content": "I say"}]}, "messages[1].role"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [*((path, *case) for path in (PATH, COUNT) for case in BAD), *((PATH, *case) for case in BAD_SAMPLING)],
    ids=lambda value: str(value)[:60],
)
async def test_a_wrong_field_is_refused_by_its_path(client, path, fields, param):
    answer = await client.post(path, BODY | fields)
    assert (answer.status, answer.json["type"]) == (400, "error"), answer.body
    assert (answer.error["type"], answer.error["param"]) == ("invalid_request_error", param), answer.error
    assert client.engine.jobs == client.engine.tokenized == []


async def test_deep_json_in_tools_and_calls_is_refused(client):
    """F-G11 and JSON of too many values."""
    many = {"enum": [0] * 100_000}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": many}
    for fields in (
        {"tools": [{"name": "f", "input_schema": many}]},
        {"messages": [{"role": "assistant", "content": [use]}, *HI]},
    ):
        answer = await client.post(PATH, BODY | fields)
        assert answer.status == 400 and "too many values" in answer.error["message"]
    deep: dict = {}
    for _ in range(100):
        deep = {"a": deep}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": deep}
    for fields in (
        {"tools": [{"name": "f", "input_schema": deep}]},
        {"messages": [{"role": "assistant", "content": [use]}, *HI]},
    ):
        assert (await client.post(PATH, BODY | fields)).status == 400


# ---- what reaches the engine -----------------------------------------------------------------------------------------


async def conversation(client: Client, **fields):
    await plain(client, **fields)
    return client.engine.jobs[-1].conversation


async def test_blocks_become_messages_in_the_models_terms(client):
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                                     {"type": "image", "source": {"type": "base64", "data": "x"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "glm53d"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "one", "is_error": True},
            {"type": "tool_result", "tool_use_id": "t2",
             "content": [{"type": "text", "text": "two"}, {"type": "image", "source": {}}]},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "c"},
        ]},
    ]  # fmt: skip
    conv = await conversation(client, messages=said, system="S")
    assert conv.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}], "reasoning_content": "Hm.", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
            {"id": "t2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ]},
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": [{"type": "text", "text": "two"}, {"type": "image"}]},
        {"role": "tool", "tool_call_id": "t3", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]  # fmt: skip


DEFERRED = [*TOOLS[:1], {"name": "ping", "input_schema": {}, "defer_loading": True}]
SEARCHED = [
    *HI,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "search", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "ping"}]}
    ]},
]  # fmt: skip


async def test_a_tool_that_the_clients_search_finds_is_shown_in_the_result(client):
    conv = await conversation(client, messages=SEARCHED, tools=DEFERRED)
    assert conv.messages[-1]["content"] == [{"type": "tool_reference", "name": "ping"}]
    assert [tool["function"].get("defer_loading") for tool in conv.tools] == [None, True]
    text = Template({spelling: i for i, spelling in enumerate(CONTROL.split())}).render_text(conv)
    head, result = text.split("<|user|>")
    assert '"ping"' not in head and '<tool_response><tools>\n{"name": "ping"' in result


async def test_without_tools_references_are_left_out_and_for_a_search_that_is_not_here_nothing_is_deferred(client):
    conv = await conversation(client, messages=SEARCHED)
    assert conv.messages[-1] == {"role": "tool", "tool_call_id": "t", "content": []}
    theirs = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    conv = await conversation(client, tools=[*DEFERRED, theirs])
    assert not any("defer_loading" in tool["function"] for tool in conv.tools)


async def test_a_document_is_its_text_or_a_reminder(client):
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
    notes = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a: b"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [pdf]}
    conv = await conversation(client, messages=[{"role": "user", "content": [pdf, notes, result]}])
    assert conv.messages == [
        {"role": "user", "content": [DOCUMENT, {"type": "text", "text": "a: b"}]},
        {"role": "tool", "tool_call_id": "t", "content": [DOCUMENT]},
    ]
    assert "unable to process this document" in DOCUMENT["text"]


async def test_system_messages_stay_where_they_stand(client):
    """F-H7"""
    said = [*HI, {"role": "system", "content": "900 tokens left"}, {"role": "user", "content": "go on"}]
    conv = await conversation(
        client, messages=said, system=[{"type": "text", "text": "S"}, {"type": "text", "text": "T"}]
    )
    assert [message["role"] for message in conv.messages] == ["system", "user", "system", "user"]
    assert conv.messages[0]["content"] == [{"type": "text", "text": "S"}, {"type": "text", "text": "T"}]


async def test_tools_are_functions_and_others_are_ignored_and_logged(client, caplog):
    """F-H4"""
    caplog.set_level("INFO")
    conv = await conversation(client, tools=TOOLS)
    assert conv.tools == [
        {"type": "function", "function": {
            "name": "get_weather", "description": "Says it.", "parameters": TOOLS[0]["input_schema"]}},
        {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}},
    ]  # fmt: skip
    assert client.engine.jobs[-1].out.python_ids == (ADDED["<tool_call>"],)
    assert any("'web_search_20250305'" in record.message for record in caplog.records)
    only_others = await conversation(client, tools=TOOLS[2:])
    assert only_others.tools is None and client.engine.jobs[-1].out.python_ids == ()


async def test_tool_choice_none_and_no_parallel_calls(client):
    client.engine.script.pieces = [THOUGHT, *python(PARIS + PARIS)]
    off = await plain(client, tools=TOOLS, tool_choice={"type": "none"})
    assert (off["stop_reason"], client.engine.jobs[-1].conversation.tools) == ("end_turn", None)
    one = await plain(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["thinking", "tool_use"]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "max"),
        ({"thinking": {"type": "adaptive"}}, "max"),
        ({"thinking": {"type": "enabled"}}, "max"),
        ({"thinking": {"type": "disabled"}}, "low"),
        ({"output_config": {"effort": "medium"}}, "high"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "xhigh"}}, "max"),
    ],
)
async def test_thinking_and_effort_become_the_models_level(client, fields, effort):
    assert (await plain(client, **fields))["reasoning_effort"] == effort
    assert client.engine.jobs[-1].conversation.reasoning_effort == effort


async def test_sampling_fields_reach_the_engine(client):
    await plain(client, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"], max_tokens=9, seed=3)
    sampling = client.engine.jobs[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.5, 0.9, 7, ("a", "b"))
    assert (sampling.max_new_tokens, sampling.seed) == (9, 3)


@pytest.mark.parametrize(
    ("fields", "headers", "session"),
    [
        ({"metadata": {"user_id": "u_session_1"}}, {}, "u_session_1"),
        ({"metadata": {"user_id": "u"}}, {"X-Claude-Code-Session-Id": "s"}, "s"),
        ({"metadata": {}}, {}, ""),
        ({"metadata": {"user_id": "u"}, "prompt_cache_key": "k"}, {"X-Claude-Code-Session-Id": "s"}, "k"),
    ],
)
async def test_the_session_key_is_a_header_or_the_user(client, fields, headers, session):
    """F-J4"""
    await client.post(PATH, BODY | fields, headers)
    assert client.engine.jobs[-1].routing.session == session


async def test_count_tokens_counts_the_same_prompt_without_the_engine(client):
    """F-H10"""
    fields = {"tools": TOOLS, "system": "S", "thinking": {"type": "disabled"}}
    answer = await client.post(COUNT + "?beta=true", {"messages": HI} | fields)
    assert (answer.status, answer.json) == (200, {"input_tokens": 5})
    assert client.engine.jobs == []
    assert client.engine.tokenized == [await conversation(client, **fields)]
