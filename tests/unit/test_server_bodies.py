"""Bad bodies: each kind, on each endpoint that takes it, is a 400 that names the field; the server goes on. [R14]"""

import asyncio
import gzip
import json

import pytest

from glm53d.server.body import LARGE
from glm53d.server.exchange import BODIES_AT_ONCE
from tests.helpers.http import Client, client_of_fake_engine, raw_post

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]
GOOD = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}, NATIVE: {"text": "hi"}}
NESTED = json.loads('{"a": ' * 80 + "1" + "}" * 80)


async def refused(client: Client, path: str, body, param: str | None) -> str:
    """Check that a body is refused with this param, and a good one still served; the message."""
    answer = await client.post(path, body)
    assert answer.status == 400, answer.body
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param, answer.error
    assert client.engine.jobs == []
    assert (await client.post(path, GOOD[path])).status == 200
    return answer.error["message"]


SAMPLING = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),  # F-G9
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 1.5),
    ("seed", 2**63),
    ("seed", "x"),
    ("ignore_eos", 1),
    ("skip_special_tokens", "no"),
    ("stop_token_ids", 5),
    ("stop", 5),
    ("stop", {"a": "b"}),
    ("stop", ""),
    ("stop", "x" * 1025),
    ("stop", "é" * 513),
    ("stop", ["x"] * 17),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", True),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("presence_penalty", "0"),
    ("repetition_penalty", 0),  # a divisor
    ("repetition_penalty", -1),
    ("repetition_penalty", 2.1),
    ("logit_bias", [1]),
    ("logit_bias", {str(id): 1 for id in range(1025)}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1] * 1025),
    ("no_stop_trim", 1),
    ("include_stop_str_in_output", "yes"),
]
SAMPLING_DEEP = [
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1, 2**31]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1, 1000]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"logit_bias": {"5": 1, "9999999": 5}}, "logit_bias.9999999"),  # F-G7
    ({"logit_bias": {"1000": 5}}, "logit_bias.1000"),
    ({"logit_bias": {"-1": 5}}, "logit_bias.-1"),
    ({"logit_bias": {"05": 5}}, "logit_bias.05"),
    ({"logit_bias": {"٣": 5}}, "logit_bias.٣"),
    ({"logit_bias": {"dog": 5}}, "logit_bias.dog"),
    ({"logit_bias": {"9" * 5000: 5}}, "logit_bias." + "9" * 5000),
    ({"logit_bias": {"5": 100.1}}, "logit_bias[...]"),
    ({"logit_bias": {"5": -101}}, "logit_bias[...]"),
    ({"logit_bias": {"5": "1"}}, "logit_bias[...]"),
    ({"allowed_token_ids": [1, 1000]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"stop": ["x", ""]}, "stop[1]"),
    ({"stop": ["x", "y" * 1025]}, "stop[1]"),
    ({"stop": ["x", 1]}, "stop[1]"),
    ({"stop": [["x"]]}, "stop[0]"),
]
NOT_SERVED = [
    ("n", 17),
    ("n", 0),
    ("n", 5_000_000),  # F-G4
    ("n", True),
    ("bad_words", ["x"]),
    ("structural_tag", {"triggers": []}),
]
# Of the form that the answer must have: what says nothing, cannot be read, or cannot be enforced. [R35]
BAD_FORMS = [
    ({"regex": ""}, "regex"),
    ({"regex": 5}, "regex"),
    ({"regex": "x" * 16_385}, "regex"),
    ({"ebnf": 'root ::= "a'}, "ebnf"),
    ({"ebnf": "root ::= " + "(" * 20_000}, "ebnf"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": "[]"}, "json_schema"),
    ({"json_schema": {"not": {}}}, "json_schema.not"),
    ({"json_schema": {"properties": {"a": {"items": [{}]}}}}, "json_schema.properties.a.items"),
    ({"json_schema": {"anyOf": [{}, {"$ref": "#/$defs/a"}]}}, "json_schema.anyOf[1].$ref"),
    ({"json_schema": {"$ref": "https://example.org/schema.json"}}, "json_schema.$ref"),
    ({"json_schema": {"$ref": "#"}}, "json_schema"),
    ({"json_schema": {"anyOf": [{"type": "text"}]}}, "json_schema.anyOf[0].type"),
    ({"json_schema": NESTED}, "json_schema"),  # F-G11
    ({"json_schema": {"enum": list(range(5000))}}, "json_schema"),
    ({"guided_json": {"type": []}}, "guided_json.type"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
    ({"structured_outputs": {"json": {"if": {}}}}, "structured_outputs.json.if"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"regex": "a", "guided_regex": "b"}, "guided_regex"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ({"json_schema": {}, "regex": "a"}, "regex"),
]


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("fields", "param"),
    [*(({name: value}, name) for name, value in SAMPLING + NOT_SERVED), *SAMPLING_DEEP, *BAD_FORMS],
    ids=lambda value: str(value)[:40],
)
async def test_a_sampling_field_out_of_its_range_is_refused_by_its_path(client, path, fields, param):
    if path == NATIVE:
        fields, param = {"sampling_params": fields}, f"sampling_params.{param}"
    await refused(client, path, GOOD[path] | fields, param)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"priority": 2**31}, "priority"),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"rid": ""}, "rid"),
        ({"rid": "a b"}, "rid"),
        ({"rid": "a\r\nX: y"}, "rid"),
        ({"rid": "x" * 129}, "rid"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"bootstrap_host": "h"}, "bootstrap_host"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_room": 2**63}, "bootstrap_room"),
        ({"first_token_timeout": 0}, "first_token_timeout"),
        ({"first_token_timeout": 1e9}, "first_token_timeout"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"lora_path": "l"}, "lora_path"),
        ({"custom_logit_processor": "p"}, "custom_logit_processor"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
         "response_format.json_schema.schema.properties.a.not"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_wrong_field_of_the_openai_dialects_is_refused_by_its_path(client, path, fields, param):
    await refused(client, path, GOOD[path] | fields, param)


def message(**fields) -> dict:
    return {"messages": [HI[0], fields]}


def call(arguments) -> dict:
    return message(role="assistant", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": arguments}}])


def tool(**function) -> dict:
    return {"type": "function", "function": function}


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
SCHEMA = "tools[0].function.parameters"
BAD_PARAMETERS = [
    ({"type": "array"}, ""),
    ({"properties": {"a": {"uniqueItems": True}}}, ".properties.a.uniqueItems"),
    ({"properties": {"a": {"enum": []}}}, ".properties.a.enum"),
    ({"properties": {"a": {"enum": ["<arg_key>"]}}}, ".properties.a"),  # no text spells a tag
    ({"properties": {"a": False}, "required": ["a"]}, ".properties.a"),
    ({"properties": {" a": {}}}, ""),  # what the model writes as a key is stripped
    ({"anyOf": [{"required": ["a"]}]}, ".anyOf"),
    ({"properties": {f"a{i}": {} for i in range(65)}}, ""),
    ({"properties": {"a": {"type": "object", "minProperties": 2}}}, ".properties.a.minProperties"),
]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        (message(content="x"), "messages[1].role"),
        (message(role="robot", content="x"), "messages[1].role"),
        (message(role=3, content="x"), "messages[1].role"),
        (message(role="user"), "messages[1].content"),
        (message(role="user", content=None), "messages[1].content"),
        (message(role="developer"), "messages[1].content"),
        (message(role="user", content=5), "messages[1].content"),
        (message(role="user", content={"type": "text"}), "messages[1].content"),
        (message(role="user", content=["x"]), "messages[1].content[0]"),
        (message(role="user", content=[{"type": "text"}]), "messages[1].content[0].text"),
        (message(role="user", content=[{"type": "text", "text": 1}]), "messages[1].content[0].text"),
        (message(role="user", content=[{"type": "hologram"}]), "messages[1].content[0].type"),
        (message(role="user", content=[{"type": ["text"]}]), "messages[1].content[0].type"),
        (message(role="user", content=[{"type": "refusal", "refusal": "x"}]), "messages[1].content[0].type"),
        (message(role="assistant", content=[{"type": "refusal"}]), "messages[1].content[0].refusal"),
        (message(role="user", content=[{"type": "tool_reference", "name": "f"}]), "messages[1].content[0].type"),
        (message(role="tool", content=[{"type": "tool_reference"}]), "messages[1].content[0].name"),
        (message(role="assistant", reasoning_content=1), "messages[1].reasoning_content"),
        (message(role="assistant", tool_calls={}), "messages[1].tool_calls"),
        (message(role="assistant", tool_calls=[{}]), "messages[1].tool_calls[0].function"),
        (message(role="assistant", tool_calls=[{"function": {}}]), "messages[1].tool_calls[0].function.name"),
        (message(role="assistant", function_call={"arguments": "{}"}), "messages[1].function_call.name"),
        (
            message(role="assistant", function_call={"name": "f", "arguments": "["}),
            "messages[1].function_call.arguments",
        ),
        (call("[1]"), ARGUMENTS),
        (call("{"), ARGUMENTS),
        (call('{"a": NaN}'), ARGUMENTS),
        (call('{"a": "\\ud800"}'), ARGUMENTS),
        (call('{"a": ' + "[" * 80 + "]" * 80 + "}"), ARGUMENTS),
        (call('{"a": ' + "[" * 5000 + "]" * 5000 + "}"), ARGUMENTS),
        (call(json.loads('{"a": ' + "[" * 80 + "]" * 80 + "}")), ARGUMENTS),
        *(({"messages": HI, name: 0}, name) for name in ("max_tokens", "max_completion_tokens")),
        ({"messages": HI, "tools": {}}, "tools"),
        *(({"messages": HI, "tools": [tool]}, "tools[0].type") for tool in ({"function": {"name": "f"}}, {"type": 5})),
        ({"messages": HI, "tools": [tool(name="f"), {"type": "function"}]}, "tools[1].function"),
        *(
            ({"messages": HI, "tools": [tool(name=n)]}, "tools[0].function.name")
            for n in (None, 5, "", " f", "x" * 129)
        ),
        ({"messages": HI, "tools": [tool(name="f", parameters=[])]}, "tools[0].function.parameters"),
        ({"messages": HI, "tools": [tool(name="f", strict="yes")]}, "tools[0].function.strict"),
        ({"messages": HI, "tools": [tool(name="f", parameters=NESTED)]}, "tools[0].function"),
        ({"messages": HI, "tools": [tool(name="f") | {"beside": NESTED}]}, "tools[0]"),
        ({"messages": HI, "tools": [tool(name="f")], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": HI, "tools": [tool(name="f")], "tool_choice": "any"}, "tool_choice"),
        ({"messages": HI, "tools": [tool(name="f")], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": HI, "tools": [tool(name="f")], "tool_choice": tool(name="g")}, "tool_choice"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
        *(
            ({"messages": HI, "tools": [tool(name="f", strict=True, parameters=parameters)]}, f"{SCHEMA}{where}")
            for parameters, where in BAD_PARAMETERS
        ),
        ({"messages": HI, "tools": [tool(name="f")], "tool_choice": "required", "regex": "a"}, "regex"),
        ({"messages": HI, "tools": [tool(name="f")], "tool_choice": "required", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"messages": HI, "functions": [{"name": 5}]}, "functions[0].name"),
        ({"messages": HI, "functions": [{"name": "f"}], "tools": [tool(name="f")]}, "functions"),
        ({"messages": HI, "functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"messages": HI, "top_logprobs": 100_000}, "top_logprobs"),  # F-G5
        ({"messages": HI, "reasoning_effort": "extreme"}, "reasoning_effort"),  # F-F3
        ({"messages": HI, "reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"messages": HI, "reasoning": {"max_tokens": -5}}, "reasoning.max_tokens"),
        ({"messages": HI, "thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens"),
        ({"messages": HI, "chat_template_kwargs": {"clear_thinking": 1}}, "chat_template_kwargs.clear_thinking"),
        ({"messages": HI, "chat_template_kwargs": {"reasoning_effort": "x"}}, "chat_template_kwargs.reasoning_effort"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
        ({"messages": HI, "input_ids": [1]}, "input_ids"),
        ({"messages": HI, "separate_reasoning": False}, "separate_reasoning"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_chat_is_refused_by_its_path(client, body, param):
    await refused(client, CHAT, body, param)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([-1], "prompt[0]"),
        ([1, "x"], "prompt[1]"),
        ([1, 1000], "prompt[1]"),
        ([1, 2**31], "prompt[1]"),
        ([1, 1.5], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([[-1]], "prompt[0][0]"),  # F-G8
        ([[]], "prompt[0]"),
        ([[1], 2], "prompt[1]"),
        (["a", 2], "prompt[1]"),
        (["a", ""], "prompt[1]"),
        ([[1], [2, 1000]], "prompt[1][1]"),
        (["a"] * 2000, "prompt"),
    ],
    ids=str,
)
async def test_a_bad_prompt_is_refused_by_its_path(client, prompt, param):
    await refused(client, TEXT, {"prompt": prompt}, param)


async def test_a_missing_prompt_is_named(client):
    await refused(client, TEXT, {}, "prompt")


@pytest.mark.parametrize(("field", "value"), [("suffix", "x"), ("best_of", 2)])
async def test_a_text_completion_refuses_what_it_does_not_serve_by_name(client, field, value):
    await refused(client, TEXT, {"prompt": "hi", field: value}, field)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"text": ["a"] * 2000}, "text"),
        ({"text": ["a"] * 200, "sampling_params": {"n": 16}}, "text"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "sampling_params[1].n"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_k": -2}]}, "sampling_params[1].top_k"),
        ({"text": ["a", "b"], "rid": ["a"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["a", "b c"]}, "rid[1]"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, 1000]}, "input_ids[1]"),
        ({"input_ids": [-1]}, "input_ids[0]"),
        ({"input_ids": [[1], []]}, "input_ids[1]"),
        ({"input_ids": [[1], [1, 1000]]}, "input_ids[1][1]"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[[1]]]}, "input_ids[0][0]"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 2, "max_new_tokens": 1}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "return_prompt_token_ids": True}, "return_prompt_token_ids"),
        ({"text": "a", "sampling_params": {"stream_interval": 5}}, "sampling_params.stream_interval"),
        ({"text": "a", "rid": ["a"]}, "rid"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_generate_body_is_refused_by_its_path(client, body, param):
    await refused(client, NATIVE, body, param)


async def test_an_unknown_reasoning_effort_is_answered_with_the_levels(client):
    """F-F3"""
    told = await refused(client, CHAT, {"messages": HI, "reasoning_effort": "extreme"}, "reasoning_effort")
    assert all(level in told for level in ("none", "minimal", "low", "medium", "high", "xhigh", "max"))


@pytest.mark.parametrize(
    "fields",
    [
        # What a router adds to every chat (field report on gateways), and other values that ask for nothing.
        {"logprobs": False, "stream": False, "no_stop_trim": False, "ignore_eos": False},
        {"continue_final_message": False, "skip_special_tokens": True, "separate_reasoning": True},
        {"stream_reasoning": True, "return_hidden_states": False},
        {"tools": [], "tool_choice": "auto"},  # F-H3
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}},
        {"response_format": {"type": "text"}, "stop": [], "cache_salt": ""},
        {"temperature": None, "top_p": None, "stop": None, "tools": None, "stream_options": None, "max_tokens": None},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "made_up": [1, {"a": 2}]},
        {"top_k": 0},
        {"top_k": -1},
        {"seed": -5},
        {"max_tokens": 10**30},
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_neutral_or_unknown_field_is_no_reason_to_refuse(client, fields):
    assert (await client.post(CHAT, {"messages": HI} | fields)).status == 200


async def test_of_a_key_that_comes_twice_the_last_value_counts(client):
    answer = await client.post(TEXT, b'{"prompt": "a", "prompt": "b"}')
    assert answer.status == 200
    assert client.engine.jobs[-1].text == "b"


async def test_a_body_over_the_limit_is_413_by_its_length_and_by_its_bytes():
    """F-G14"""
    async with client_of_fake_engine(max_body_bytes=2000) as client:
        assert (await client.post(CHAT, {"messages": HI})).status == 200
        for body in ({"messages": [{"role": "user", "content": "x" * 3000}]}, {"messages": HI, "pad": "x" * 3000}):
            answer = await client.post(CHAT, body)
            assert answer.status == 413
            assert answer.error["code"] == "payload_too_large"
        chunked = (
            b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nbb8\r\n" + b" " * 3000 + b"\r\n"
        )
        reader, writer = await client.open(chunked)
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()


@pytest.mark.parametrize("field", ["messages", "tools", "unknown"])
@pytest.mark.parametrize(
    ("value", "number"), [('"a"', 300_000), ("[]", 600_000), ('{"b":1}', 600_000), ("1", 5_000_000)]
)
async def test_a_large_body_of_too_many_values_is_refused_before_they_are_made(client, field, value, number):
    """F-G4. They would take seconds, in which no stream goes on, and two hundred times the memory."""
    values = ",".join([value] * number)
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "{field}": [{values}]}}'.encode()
    answer = await client.post(CHAT, body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert "the limit is" in answer.error["message"]


async def test_a_large_text_is_taken_whatever_it_consists_of(client):
    text = json.dumps({"a": [1, {"b": "\\"}]}) * 40_000
    assert len(json.dumps(text)) > LARGE
    assert (await client.post(CHAT, {"messages": [{"role": "user", "content": text}]})).status == 200


async def test_a_body_that_does_not_come_is_408_and_the_connection_ends():
    async with client_of_fake_engine(body_timeout_s=0.05) as client:
        reader, writer = await client.open(raw_post(CHAT, {"messages": HI})[:-10])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert b"Connection: close" in head
        assert b'"code":"request_timeout"' in await reader.readuntil(b"}}")
        writer.close()


async def test_no_more_bodies_are_read_at_once_than_there_is_room_for():
    """[R14] Who sends slowly holds memory."""
    async with client_of_fake_engine(max_body_bytes=4000) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 3900\r\n\r\n"
        slow = [(await client.open(head + b" " * 10))[1] for _ in range(BODIES_AT_ONCE)]
        body = {"messages": HI, "user": "a" * 3000}
        while (answer := await client.post(CHAT, body)).status == 200:  # until all of them are being read
            await asyncio.sleep(0.01)
        assert (answer.status, answer.error["code"]) == (429, "overloaded") and "Retry-After" in answer.headers
        for writer in slow:
            writer.close()
        while (answer := await client.post(CHAT, body)).status == 429:
            await asyncio.sleep(0.01)
        assert answer.status == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate"])
async def test_a_compressed_body_is_refused(client, encoding):
    answer = await client.post("/generate", gzip.compress(b'{"text": "a"}'), {"Content-Encoding": encoding})
    assert answer.status == 400
    assert "Content-Encoding" in answer.error["message"]


async def test_the_path_and_the_method_are_refused_in_the_same_shape(client):
    nowhere, wrong = await client.post("/v1/nothing", {}), await client.get(CHAT)
    assert (nowhere.status, nowhere.error["code"]) == (404, "not_found")
    assert (wrong.status, wrong.error["code"], wrong.headers["Allow"]) == (405, "method_not_allowed", "POST")


async def test_what_the_library_refuses_below_messages_has_its_dialects_shape(client):
    nowhere, wrong = await client.post("/v1/messages/batches", {}), await client.get("/v1/messages")
    assert nowhere.json["type"] == "error" and nowhere.error["type"] == "not_found_error"
    assert wrong.json["type"] == "error" and (wrong.status, wrong.headers["Allow"]) == (405, "POST")
    other = await client.post("/v1/messages_of_another_kind", {})
    assert "type" not in other.json


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/nothing"])
async def test_an_expectation_that_is_not_known_is_refused_in_json(client, path):
    answer = await client.post(path, b"{}", {"Expect": "miracles"})
    assert (answer.status, answer.error["message"]) == (417, "Expectation Failed.")
    assert answer.json.get("type") == ("error" if path == "/v1/messages" else None)


async def test_a_client_that_asks_first_is_told_to_go_on(client):
    body = json.dumps(GOOD[CHAT]).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await client.open(head.encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_model_that_is_not_served_is_404(client, path):
    answer = await client.post(path, GOOD[path] | {"model": "gpt"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert (await client.post(path, GOOD[path] | {"model": "alias"})).json["model"] == "alias"
