"""/v1/responses: what reaches the engine, and answers in the shape and order that clients expect."""

import asyncio
import json

import pytest

from glm53d.config import Template
from glm53d.errors import EngineError, Overloaded
from glm53d.ipc.records import FinishReason
from glm53d.server.common import DOCUMENT
from tests.helpers.fake_engine import THINK_END
from tests.helpers.http import Client, client_of_fake_engine, raw_post, until
from tests.unit.test_server_tools import PARIS, python

PATH = "/v1/responses"
BODY = {"model": "nano", "input": "hi"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "name": "get_weather", "description": "Says it.", "parameters": WEATHER, "strict": False},
    {"type": "function", "name": "ping"},
    {"type": "namespace", "name": "multi_agent_v1", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "apply_patch"},
    {"type": "local_shell"},
]
THOUGHT = ("reasoning", "Hm.", [11, THINK_END])


async def plain(client: Client, **fields) -> dict:
    answer = await client.post(PATH, BODY | fields)
    assert answer.status == 200, answer.body
    return answer.json


async def streamed(client: Client, **fields) -> list[dict]:
    """The events of an answer, checked for what holds of all: numbered, each between its item's begin and end. F-H5"""
    answer = await client.post(PATH, BODY | {"stream": True} | fields)
    assert answer.status == 200, answer.body
    events = answer.named_events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    index, item_id = -1, None
    for event in events[2:-1]:
        if event["type"] == "response.output_item.added":
            index, item_id = index + 1, event["item"]["id"]
            assert event["item"]["status"] == "in_progress"
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == item_id
        else:
            assert event["item_id"] == item_id
        assert event["output_index"] == index
        if "text" in event["type"] or "content_part" in event["type"]:
            assert event["content_index"] == 0
    return events


def types_of(events: list[dict]) -> list[str]:
    """Without the common beginning, repeated deltas once."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(types) if i == 0 or kind != types[i - 1]]


def comparable(response: dict) -> dict:
    """Without what is new in every answer."""
    gone = dict.fromkeys(("id", "created_at", "completed_at", "timings"))
    output = [item | {"id": item["id"].split("_")[0], "call_id": None} for item in response["output"]]
    return response | gone | {"output": output}


# ---- answers ---------------------------------------------------------------------------------------------------------

TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
TEXT_EVENTS += ["content_part.done", "output_item.done"]
REASONING_EVENTS = [kind.replace("output_text", "reasoning_text") for kind in TEXT_EVENTS]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


async def test_a_plain_answer_has_reasoning_then_message_and_exact_usage(client):
    answer = await plain(client, rid="r", metadata={"a": "b"}, temperature=0.5, instructions="Be brief.")
    output = answer["output"]
    assert output == [
        {
            "type": "reasoning", "id": "rs_r_0", "status": "completed", "summary": [], "encrypted_content": None,
            "content": [{"type": "reasoning_text", "text": "Let me think."}],
        },
        {
            "type": "message", "id": "msg_r_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": 'Hello "you"\n世界', "annotations": [], "logprobs": []}],
        },
    ]  # fmt: skip
    assert (answer["id"], answer["object"], answer["status"], answer["model"]) == (
        "resp_r", "response", "completed", "nano",
    )  # fmt: skip
    assert answer["usage"] == {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 4}, "total_tokens": 11,
    }  # fmt: skip
    assert (answer["metadata"], answer["temperature"], answer["instructions"]) == ({"a": "b"}, 0.5, "Be brief.")
    assert (answer["store"], answer["previous_response_id"], answer["error"]) == (False, None, None)
    assert set(answer["timings"]) == {"queue_time", "first_token_latency", "decode_throughput"}


async def test_a_stream_tells_of_each_item_in_order_and_ends_with_the_whole_response(client):
    """F-H5"""
    events = await streamed(client)
    assert types_of(events) == ["created", "in_progress", *REASONING_EVENTS, *TEXT_EVENTS, "completed"]
    for kind, whole in (("reasoning_text", "Let me think."), ("output_text", 'Hello "you"\n世界')):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert len(deltas) == 2 and "".join(deltas) == whole
        [done] = [event for event in events if event["type"] == f"response.{kind}.done"]
        assert done["text"] == whole
    response = events[-1]["response"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]
    assert events[0]["response"]["id"] == response["id"] and events[0]["response"]["status"] == "in_progress"
    assert (events[0]["response"]["output"], events[0]["response"]["usage"]) == ([], None)
    assert comparable(response) == comparable(await plain(client))


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ([("content", "Look. ", [12]), *python(PARIS + "B" + PARIS)], "rmfmf"),
        (python("\n" + PARIS + "\n<tool_call>ping</tool_call>\n"), "rff"),
    ],
)
async def test_calls_are_items_and_a_stream_ends_with_the_plain_answer(client, said, kinds):
    client.engine.script.pieces = [THOUGHT, *said]
    answer, events = await plain(client, tools=TOOLS), await streamed(client, tools=TOOLS)
    assert "".join(item["type"][0] for item in answer["output"]) == kinds
    assert comparable(events[-1]["response"]) == comparable(answer)
    events_of = {"r": REASONING_EVENTS, "m": TEXT_EVENTS, "f": CALL_EVENTS}
    assert types_of(events) == [
        "created", "in_progress", *(event for kind in kinds for event in events_of[kind]), "completed",
    ]  # fmt: skip
    call = next(item for item in events[-1]["response"]["output"] if item["type"] == "function_call")
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == (
        "get_weather", {"city": "Paris"}, "completed",
    )  # fmt: skip
    deltas = "".join(event["delta"] for event in events if event.get("item_id") == call["id"] and "delta" in event)
    assert deltas == call["arguments"]


async def test_a_call_that_is_cut_off_makes_it_incomplete_and_is_never_done(client):
    """F-E14"""
    client.engine.script.pieces = [THOUGHT, *python(PARIS + PARIS.partition("</arg_value>")[0])]
    client.engine.script.reason = FinishReason.LENGTH
    answer, events = await plain(client, tools=TOOLS), await streamed(client, tools=TOOLS)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["type"] for item in answer["output"]] == ["reasoning", "function_call"]
    assert events[-1]["type"] == "response.incomplete"
    assert comparable(events[-1]["response"]) == comparable(answer)
    assert sum(event["type"] == "response.output_item.done" for event in events) == 2
    assert sum(event["type"] == "response.output_item.added" for event in events) == 3


async def test_a_message_that_is_cut_off_is_incomplete(client):
    client.engine.script.reason = FinishReason.LENGTH
    answer, events = await plain(client), await streamed(client)
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    assert comparable(events[-1]["response"]) == comparable(answer)


async def test_a_turn_that_never_ended_its_thinking_was_all_answer(client):
    """F-F1: a stream has sent it as reasoning, and repeats it."""
    client.engine.script.pieces = [("reasoning", "The answer is 4.", [11])]
    [message] = (await plain(client))["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "The answer is 4.")
    reasoning, repeated = (await streamed(client))[-1]["response"]["output"]
    assert reasoning["content"][0]["text"] == repeated["content"][0]["text"] == "The answer is 4."


async def test_with_a_template_of_ones_own_all_is_a_message():
    async with client_of_fake_engine(template=Template(path="x", parsers="none")) as client:
        client.engine.script.pieces = [("content", "a</think>b", [1])]
        answer = await plain(client)
        assert [item["content"][0]["text"] for item in answer["output"]] == ["a</think>b"]
        assert comparable((await streamed(client))[-1]["response"]) == comparable(answer)
        tags = [("content", client.engine.vocab.added[tag], [3]) for tag in ("</think>", "<tool_call>")]
        client.engine.script.pieces = [("content", "a", [1]), *tags, ("content", "f", [2])]
        tools = [{"type": "function", "name": "f", "parameters": {}}]
        [item] = (await streamed(client, tools=tools))[-1]["response"]["output"]
        assert item["content"][0]["text"] == "a</think><tool_call>f"


async def test_an_empty_answer_has_no_message(client):
    client.engine.script.pieces = [THOUGHT]
    assert [item["type"] for item in (await plain(client))["output"]] == ["reasoning"]
    assert [item["type"] for item in (await streamed(client))[-1]["response"]["output"]] == ["reasoning"]


# ---- ends and errors -------------------------------------------------------------------------------------------------


async def test_one_that_runs_is_cancelled_by_its_id(client):
    """[R48]"""
    client.engine.script.hold = True
    running = asyncio.create_task(client.post(PATH, BODY | {"stream": True, "rid": "r"}))
    await until(lambda: client.engine.live)
    answer = await client.post("/v1/responses/resp_r/cancel", b"")
    assert (answer.status, answer.json["id"], answer.json["status"]) == (200, "resp_r", "cancelled")
    events = (await running).named_events
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
    again = await client.post("/v1/responses/resp_r/cancel", b"")
    assert (again.status, again.error["code"]) == (404, "not_found")


async def test_an_error_inside_a_stream_is_response_failed(client):
    """F-G3"""
    client.engine.script.fail = EngineError("The ranks are gone.")
    events = await streamed(client)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "engine_error", "message": "The ranks are gone."}
    assert not any(event["type"] == "response.completed" for event in events)


async def test_an_error_before_the_first_byte_has_a_status(client):
    client.engine.script.refuse = Overloaded("full")
    for stream in (False, True):
        answer = await client.post(PATH, BODY | {"stream": stream})
        assert (answer.status, answer.error["code"], "Retry-After" in answer.headers) == (429, "overloaded", True)


async def test_a_silent_stream_gets_comments():
    """F-H11 [R47]"""
    async with client_of_fake_engine(keepalive_s=0.02) as client:
        client.engine.script.hold, client.engine.script.pieces = True, []
        reader, writer = await client.open(raw_post(PATH, BODY | {"stream": True}))
        await reader.readuntil(b"event: response.in_progress\n")
        for _ in range(3):
            await reader.readuntil(b"\r\n: keep-alive\n\n\r\n")
        client.engine.live[0].release.set()
        assert b"event: response.completed\n" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


BAD = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": ["hi"]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "message", "role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": ["x"]}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{"type": "function", "name": "f", "strict": 1}]}, "tools[0].strict"),
    ({"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"anyOf": [{}]}}]},
     "tools[0].parameters.anyOf"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"oneOf": [{}, {}]}}}}, "text.format.schema.oneOf"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tool_calls": 2}, "max_tool_calls"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"n": 2}, "n"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
async def test_a_wrong_field_is_refused_by_its_path(client, fields, param):
    answer = await client.post(PATH, BODY | fields)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), answer.body
    assert answer.error["param"] == param, answer.error
    assert client.engine.jobs == []


# ---- what reaches the engine -----------------------------------------------------------------------------------------


async def messages(client: Client, **fields) -> list[dict]:
    await plain(client, **fields)
    return client.engine.jobs[-1].conversation.messages


async def test_input_is_a_string_or_items(client):
    assert await messages(client, input="hi", instructions="S") == [
        {"role": "system", "content": "S"}, {"role": "user", "content": "hi"},
    ]  # fmt: skip
    said = [
        {"role": "developer", "content": "D"},
        {"type": "message", "id": "m", "role": "user", "status": "completed",
         "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"},
                     {"type": "input_file", "filename": "a.pdf", "file_data": "x"}]},
    ]  # fmt: skip
    assert await messages(client, input=said) == [
        {"role": "system", "content": "D"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, DOCUMENT]},
    ]


def call_item(id: str, name: str = "f", arguments: str = "{}") -> dict:
    return {"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": name, "arguments": arguments}


def call_in_prompt(id: str, name: str = "f", arguments: dict | None = None) -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def reasoning(text: str) -> dict:
    return {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def said(text: str) -> dict:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


async def test_the_items_of_a_turn_are_one_message(client):
    """F-J1: echoed reasoning comes back into the prompt."""
    history = [
        {"role": "user", "content": "q"},
        reasoning("Hm."),
        said("I look."),
        call_item("c1", arguments='{"x": 1}'),
        call_item("c2", "g", ""),
        {"type": "function_call_output", "id": "o", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        reasoning("So."),
        said("Done."),
    ]
    assert (await messages(client, input=history))[1:] == [
        {"role": "assistant", "reasoning_content": "Hm.", "content": [{"type": "text", "text": "I look."}],
         "tool_calls": [call_in_prompt("c1", arguments={"x": 1}), call_in_prompt("c2", "g")]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "reasoning_content": "So.", "content": [{"type": "text", "text": "Done."}]},
    ]  # fmt: skip


async def test_turns_are_told_apart(client):
    """A turn begins with its reasoning, or a second message; what is said behind a call belongs to its turn."""
    history = [said("a"), said("b"), call_item("c1"), said("c"), reasoning("r"), call_item("c2"), reasoning("s")]
    turns = await messages(client, input=[*history, {"type": "reasoning", "summary": [], "encrypted_content": "x"}])
    a, b, c = ({"type": "text", "text": text} for text in "abc")
    assert turns == [
        {"role": "assistant", "content": [a]},
        {"role": "assistant", "content": [b, c], "tool_calls": [call_in_prompt("c1")]},
        {"role": "assistant", "reasoning_content": "r", "tool_calls": [call_in_prompt("c2")]},
        {"role": "assistant", "reasoning_content": "s"},
        {"role": "assistant", "reasoning_content": ""},
    ]


async def test_function_tools_work_and_others_are_ignored_and_logged(client, caplog):
    """F-H4"""
    caplog.set_level("INFO")
    answer = await plain(client, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)
    function = {"name": "get_weather", "description": "Says it.", "parameters": WEATHER}
    assert client.engine.jobs[-1].conversation.tools == [
        {"type": "function", "function": function}, {"type": "function", "function": {"name": "ping"}},
    ]  # fmt: skip
    assert answer["tools"] == [{"type": "function", **function}, {"type": "function", "name": "ping"}]
    [line] = [record.message for record in caplog.records if "ignored" in record.message]
    assert all(repr(kind) in line for kind in ("namespace", "web_search", "custom", "local_shell"))


async def test_tool_choice_none_and_no_parallel_calls(client):
    client.engine.script.pieces = [THOUGHT, *python(PARIS + PARIS)]
    off = await plain(client, tools=TOOLS, tool_choice="none")
    assert [item["type"] for item in off["output"]] == ["reasoning"]
    assert client.engine.jobs[-1].conversation.tools is None
    one = await plain(client, tools=TOOLS, parallel_tool_calls=False)
    assert [item["type"] for item in one["output"]] == ["reasoning", "function_call"]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "max"),
        ({"reasoning": {"summary": "auto"}}, "max"),
        ({"reasoning": {"effort": "minimal"}}, "low"),
        ({"reasoning": {"effort": "medium", "summary": None}}, "high"),
    ],
)
async def test_the_effort_becomes_the_models_level(client, fields, effort):
    assert (await plain(client, **fields))["reasoning"]["effort"] == effort
    assert client.engine.jobs[-1].conversation.reasoning_effort == effort


async def test_what_nothing_is_stored_for_is_taken(client):
    """F-J1: what Codex sends and servers may ignore."""
    fields = {
        "store": False, "include": ["reasoning.encrypted_content"], "client_metadata": {"a": "b"}, "user": "u",
        "service_tier": "auto", "stream_options": {"include_obfuscation": False}, "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "safety_identifier": "x", "background": False,
    }  # fmt: skip
    await plain(client, **fields, prompt_cache_key="k")
    assert client.engine.jobs[-1].routing.session == "k"
