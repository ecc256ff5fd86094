"""Outputs that have a form, on their whole way: each schema and set of tools by HTTP, and the SDKs' own helpers. [R35]

The simulation draws from what a grammar allows, rather what is short or ends something; the built-in model says what
its weights say, greedily.
"""

import asyncio
import json
from typing import Literal

import aiohttp
import anthropic
import jsonschema
import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, Field

from glm53d.nano.weights import PACKAGE
from glm53d.text.vocab import Vocab
from tests.helpers.daemon import Daemon, events, idle_info, running
from tests.helpers.draws import json_of
from tests.helpers.forms import BOOL, INT, SCHEMAS, STR, TOOL_SETS, closed, tool
from tests.model.synthetic import make_checkpoint

pytestmark = pytest.mark.timeout(900)  # the built-in model says 10,000 tokens here, on whatever CPU there is

HI = [{"role": "user", "content": "Say it."}]
AT_ONCE = 8
CLOSING = ('"', "]", "}", "</arg_value>", "</tool_call>", "<|observation|>")
VOCAB = Vocab.load(PACKAGE / "tokenizer.json")
# A model that has learnt none of these schemas does not end its texts where it may as well go on.
NANO = {
    "temperature": 0,
    "thinking_budget": 4,
    "logit_bias": {str(VOCAB.token_bytes.index(token.encode())): 12 for token in CLOSING},
}


class Step(BaseModel):
    text: str = Field(max_length=10)
    kind: Literal["read", "write"]


class Plan(BaseModel):
    """A plan of steps."""

    steps: list[Step] = Field(max_length=2)
    done: bool
    score: float | None


class Verdict(BaseModel):
    """Without bounds: Anthropic's SDK takes them out of the schema that it sends, and checks them all the same."""

    is_right: bool
    kind: Literal["read", "write"]


class Search(BaseModel):
    """Looks for something."""

    query: str = Field(max_length=10)
    limit: int = Field(ge=1, le=9)
    exact: bool | None


async def chat(http: aiohttp.ClientSession, daemon: Daemon, **fields) -> dict:
    """The one choice of a plain answer."""
    body = {"messages": HI, "max_tokens": 400, "seed": 1} | fields
    async with http.post(f"{daemon.url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    [choice] = answer["choices"]
    return choice


async def chats(http: aiohttp.ClientSession, daemon: Daemon, bodies: list[dict]) -> list[dict]:
    """Some of them at a time, which share steps and so batches."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(body: dict) -> dict:
        async with turns:
            return await chat(http, daemon, **body)

    return await asyncio.gather(*map(one, bodies))


def json_schema(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(("engine", "fields"), [("sim", {}), ("nano", NANO)])
async def test_content_is_json_of_its_schema(request, http, engine, fields):
    daemon = request.getfixturevalue(engine)
    choices = await chats(http, daemon, [fields | json_schema(schema) for schema in SCHEMAS.values()])
    ends = [choice["finish_reason"] for choice in choices]
    assert set(ends) <= {"stop", "length"} and ends.count("stop") >= 0.9 * len(ends)
    for (name, schema), choice in zip(SCHEMAS.items(), choices, strict=True):
        if choice["finish_reason"] == "stop":
            said = choice["message"]["content"]
            assert jsonschema.Draft202012Validator(schema).is_valid(json_of(said)), (name, said)
            assert choice["message"]["reasoning_content"], "thinking came first"


@pytest.mark.parametrize(("engine", "fields"), [("sim", {}), ("nano", NANO)])
async def test_a_turn_that_must_call_calls_with_valid_arguments(request, http, engine, fields):
    daemon = request.getfixturevalue(engine)
    bodies = [fields | {"tools": tools, "tool_choice": "required"} for tools in TOOL_SETS.values()]
    choices = await chats(http, daemon, bodies)
    ends = [choice["finish_reason"] for choice in choices]
    assert set(ends) <= {"tool_calls", "length"} and ends.count("tool_calls") >= 0.9 * len(ends)
    for (name, tools), choice in zip(TOOL_SETS.items(), choices, strict=True):
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
        message = choice["message"]
        assert message["content"] is None and message["reasoning_content"], name
        for call in message.get("tool_calls", ()):
            said = call["function"]
            judge = jsonschema.Draft202012Validator(schemas[said["name"]])
            assert judge.is_valid(json_of(said["arguments"])), (name, said)


async def test_a_named_tool_is_called_once_and_one_call_at_most_is_one(sim, http):
    tools = [tool("say", closed("text", text={"type": "string", "maxLength": 20})), tool("ping")]
    named = {"type": "function", "function": {"name": "say"}}
    bodies = [{"tools": tools, "tool_choice": named, "seed": seed} for seed in range(5)]
    bodies += [{"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "seed": s} for s in range(5)]
    for body, choice in zip(bodies, await chats(http, sim, bodies), strict=True):
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert body["tool_choice"] == "required" or call["function"]["name"] == "say"


async def test_a_forced_call_that_is_cut_off_is_length_in_every_dialect(sim, http):
    """F-E14, and a fault elsewhere: a forced call of a large schema ran on without end, or half of it was executed."""
    schema = closed("text", text={"type": "string", "minLength": 900})

    async def post(path: str, body: dict) -> dict:
        async with http.post(sim.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    choice = await chat(http, sim, tools=[tool("say", schema)], tool_choice="required", max_tokens=150)
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    anthropics = {"tools": [{"name": "say", "input_schema": schema}], "tool_choice": {"type": "any"}}
    message = await post("/v1/messages", {"messages": HI, "max_tokens": 150} | anthropics)
    assert message["stop_reason"] == "max_tokens"
    assert {block["type"] for block in message["content"]} <= {"thinking"}
    responses = {"tools": [{"type": "function", "name": "say", "parameters": schema}], "tool_choice": "required"}
    response = await post("/v1/responses", {"input": "hi", "max_output_tokens": 150} | responses)
    assert response["status"] == "incomplete"
    assert {item["type"] for item in response["output"]} <= {"reasoning"}


async def test_a_stream_of_a_forced_call_says_what_the_plain_answer_does(sim, http):
    """F-E15: forced, behind thinking, in pieces."""
    body = {"messages": HI, "seed": 3, "max_tokens": 400, "tools": TOOL_SETS["an editor's"], "tool_choice": "required"}
    plain = await chat(http, sim, **body)
    async with http.post(f"{sim.url}/v1/chat/completions", json=body | {"stream": True}) as response:
        chunks = (await events(response))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert not any(delta.get("content") for delta in deltas)
    assert "".join(part.get("name") or "" for part in parts) == "".join(
        call["function"]["name"] for call in plain["message"]["tool_calls"]
    )
    assert "".join(part["arguments"] for part in parts) == "".join(
        call["function"]["arguments"] for call in plain["message"]["tool_calls"]
    )
    assert chunks[-1]["choices"][0]["finish_reason"] == plain["finish_reason"] == "tool_calls"


async def test_with_drafts_a_form_begins_behind_the_thinking_too(tmp_path, http):
    """F-E15: one step gives several tokens, and `.`, </think>, <tool_call> may all be among them."""
    make_checkpoint(tmp_path / "model", 2, predictable=True, vocab_size=2048)
    ends = [VOCAB.added[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    model = (f"model.path={tmp_path / 'model'}", f"tokenizer.path={PACKAGE}", "model.max_context_len=512")
    drafts = ("speculation.num_draft_tokens=4", "kv.num_pages=128", "kv.page_size=16", "scheduler.debug_checks=true")
    said = {"</think>": 3, "<|observation|>": 12} | dict.fromkeys(CLOSING[:-1], 3)
    bias = {str(VOCAB.token_bytes.index(token.encode())): more for token, more in said.items()}
    with running(*model, *drafts, log=tmp_path / "log") as daemon:
        forms = [{"tools": TOOL_SETS["optional only"], "tool_choice": "required"}, json_schema(SCHEMAS["enum"])]
        bodies = [{"seed": seed, "logit_bias": bias, "max_tokens": 200} | form for form in forms for seed in range(8)]
        choices = await chats(http, daemon, bodies)
        ends = [choice["finish_reason"] for choice in choices]
        assert ends.count("length") < 8 and any(choice["message"]["reasoning_content"] for choice in choices)
        for body, choice in zip(bodies, choices, strict=True):
            message = choice["message"]
            if choice["finish_reason"] != "length":
                assert ("tools" in body) == ("tool_calls" in message)
                arguments = [json_of(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
                assert all(isinstance(value, dict) for value in arguments)
                assert arguments or json_of(message["content"]) in SCHEMAS["enum"]["enum"]
        load = (await idle_info(http, daemon.url))["loads"][0]
        assert load["decode_tokens"] > load["steps"], "drafts were accepted"


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"regex": "(ab|cd){2,3}"}, lambda text: len(text) in (4, 6)),
        ({"ebnf": 'root ::= "a" [0-9]+ "."'}, lambda text: text[0] == "a" and text[1:-1].isdigit() and text[-1] == "."),
        ({"json_schema": json.dumps(closed("a", a=BOOL))}, lambda text: json.loads(text)["a"] in (True, False)),
    ],
)
async def test_raw_prompts_have_their_form_from_the_first_token_on(sim, http, fields, good):
    native = {"text": "x", "sampling_params": {"max_new_tokens": 200, "seed": 5} | fields}
    async with http.post(f"{sim.url}/generate", json=native) as response:
        answer = await response.json()
    assert good(answer["text"]) and answer["meta_info"]["finish_reason"]["type"] == "stop"
    async with http.post(f"{sim.url}/v1/completions", json={"prompt": "x", "max_tokens": 200} | fields) as response:
        [choice] = (await response.json())["choices"]
    assert good(choice["text"]) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "(?=a)b"}, "regex"),
        ({"regex": "(a"}, "regex"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        (json_schema(closed(a={"type": "string", "pattern": "(a)\\1"})), "response_format.json_schema.schema"),
        ({"tools": [tool("f", closed(a={"type": "string", "pattern": "["}), strict=True)]}, "tools"),
    ],
)
async def test_what_does_not_compile_is_refused_before_the_stream_begins(sim, http, fields, param, stream):
    """F-G12: it passes the check of its words, and fails in the engine; the others go on."""
    body = {"messages": HI, "stream": stream} | fields
    async with http.post(f"{sim.url}/v1/chat/completions", json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param
    assert (await chat(http, sim, max_tokens=4))["finish_reason"] == "length"


async def test_openai_parses_chats_and_tools_into_models(sim):
    async with openai.AsyncOpenAI(base_url=f"{sim.url}/v1", api_key="none", max_retries=0) as sdk:
        model = (await sdk.models.list()).data[0].id
        parsed = await sdk.chat.completions.parse(model=model, messages=HI, response_format=Plan, seed=1)
        assert isinstance(parsed.choices[0].message.parsed, Plan)
        tools = [pydantic_function_tool(Search)]
        called = await sdk.chat.completions.parse(
            model=model, messages=HI, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=1
        )
        [call] = called.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Search)
        async with sdk.chat.completions.stream(model=model, messages=HI, response_format=Plan, seed=2) as stream:
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Plan)


async def test_openai_parses_responses_into_models(sim):
    async with openai.AsyncOpenAI(base_url=f"{sim.url}/v1", api_key="none", max_retries=0) as sdk:
        model = (await sdk.models.list()).data[0].id
        response = await sdk.responses.parse(model=model, input="Say it.", text_format=Plan)
        assert isinstance(response.output_parsed, Plan)
        assert response.text.format.type == "json_schema"


async def test_anthropic_parses_messages_into_models(sim):
    async with anthropic.AsyncAnthropic(base_url=sim.url, api_key="none", max_retries=0) as sdk:
        model = (await sdk.models.list()).data[0].id
        message = await sdk.messages.parse(model=model, messages=HI, max_tokens=1000, output_format=Verdict)
        assert isinstance(message.parsed_output, Verdict)
        tools = [{"name": "say", "input_schema": closed("n", n=INT, note=STR)}]
        called = await sdk.messages.create(
            model=model, messages=HI, max_tokens=1000, tools=tools, tool_choice={"type": "tool", "name": "say"}
        )
        [use] = [block for block in called.content if block.type == "tool_use"]
        assert called.stop_reason == "tool_use" and isinstance(use.input["n"], int)
