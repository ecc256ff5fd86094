"""/v1/chat/completions: what reaches the engine, what comes back, in the order and shape that SDKs expect."""

import json

import openai
import pytest

from glm53d.errors import ContextTooLong, EngineError, NotReady, Overloaded
from glm53d.front.job import SamplingParams
from glm53d.ipc.records import FinishReason
from glm53d.server.common import DOCUMENT
from tests.helpers.fake_engine import THINK_END, VOCAB_SIZE
from tests.helpers.http import Client

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def conversation_of(client: Client, messages: list, **fields):
    answer = await client.post(CHAT, {"messages": messages} | fields)
    assert answer.status == 200, answer.body
    return client.engine.jobs[-1].conversation


async def test_a_plain_answer_has_reasoning_apart_and_exact_usage(client):
    answer = await client.post(CHAT, {"messages": HI, "rid": "r1"})
    body = answer.json
    assert body["id"] == "chatcmpl-r1"
    assert answer.headers["X-Request-Id"] == "r1"
    assert (body["object"], body["model"]) == ("chat.completion", "nano")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": 'Hello "you"\n世界',
                "reasoning_content": "Let me think.",
            },
            "finish_reason": "stop",
            "matched_stop": 3,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "completion_tokens_details": {"reasoning_tokens": 4},
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    ("pieces", "reason", "content", "reasoning"),
    [
        ([("reasoning", "All of it", [11])], FinishReason.STOP, "All of it", None),  # F-F1
        ([("reasoning", "Cut", [11])], FinishReason.LENGTH, None, "Cut"),
        ([("reasoning", "Cut", [11, THINK_END])], FinishReason.LENGTH, None, "Cut"),
        ([("reasoning", "Thought", [11, THINK_END])], FinishReason.STOP, "", "Thought"),
        ([("reasoning", "", [THINK_END]), ("content", "Answer", [11])], FinishReason.STOP, "Answer", None),
        ([], FinishReason.STOP, "", None),
    ],
)
async def test_a_turn_without_end_of_thinking_is_answer_if_it_stopped_and_thought_if_cut(
    client, pieces, reason, content, reasoning
):
    client.engine.script.pieces, client.engine.script.reason = pieces, reason
    choice = (await client.post(CHAT, {"messages": HI})).json["choices"][0]
    assert choice["finish_reason"] == reason.name.lower()
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (content, reasoning)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
    ],
)
async def test_thinking_is_told_apart_whatever_switch_a_client_turns(client, fields):
    """F-F2: this model has none, so it thinks all the same."""
    message = (await client.post(CHAT, {"messages": HI} | fields)).json["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ('Hello "you"\n世界', "Let me think.")
    assert client.engine.jobs[-1].out.starts_in_reasoning


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_a_stream_repeats_as_content_what_was_all_answer(client, reason):
    """F-F1"""
    client.engine.script.pieces, client.engine.script.reason = [("reasoning", 'All "of" it', [11])], reason
    answer = await client.post(CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, _ = answer.events
    repeated = [{"content": 'All "of" it'}] if reason is FinishReason.STOP else []
    assert [c["choices"][0]["delta"] for c in chunks[1:]] == [{"reasoning_content": 'All "of" it'}, *repeated, {}]
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] == (0 if repeated else 1)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_a_stream_goes_role_reasoning_content_finish_done(client, options):
    answer = await client.post(CHAT, {"messages": HI, "stream": True, "stream_options": options})
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me "},
        {"reasoning_content": "think."},
        {"content": 'Hello "you"\n'},
        {"content": "世界"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 5 + ["stop"]
    assert {(c["id"], c["object"], c["model"], c["created"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "nano", chunks[0]["created"])
    }
    assert not any("usage" in c for c in chunks)


async def test_usage_comes_once_behind_the_finish_and_is_null_before(client):
    """F-D6"""
    answer = await client.post(CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last, done = answer.events
    assert done == "[DONE]"
    assert all(c["usage"] is None for c in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (ContextTooLong("The prompt has 200 tokens; at most 99 fit."), 400, "context_length_exceeded", None),  # F-G2
        (Overloaded("64 requests are in flight.", 3), 429, "overloaded", "3"),
        (NotReady("A rank is gone.", 7), 503, "not_ready", "7"),
        (EngineError("The scheduler failed."), 500, "engine_error", None),
        (ValueError("secret detail"), 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_byte_is_a_status(client, error, status, code, retry_after, stream):
    client.engine.script.refuse = error
    answer = await client.post(CHAT, {"messages": HI, "stream": stream})
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers.get("Retry-After") == retry_after
    assert b"secret" not in answer.body


async def test_no_work_is_taken_before_the_ranks_are_loaded(client):
    """F-B4"""
    client.engine.state = "starting"
    answer = await client.post(CHAT, {"messages": HI})
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
    assert "starting" in answer.error["message"]
    assert client.engine.jobs == []


async def test_a_plain_request_that_fails_in_the_engine_is_500_and_logged_with_its_rid(client, caplog):
    client.engine.script.fail = EngineError("The ranks are gone.")
    answer = await client.post(CHAT, {"messages": HI, "rid": "r1"})
    assert (answer.status, answer.error["message"]) == (500, "The ranks are gone.")
    assert [record.rid for record in caplog.records] == ["r1"]
    assert client.engine.live == []


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (EngineError("The ranks are gone."), "The ranks are gone."),
        (KeyError("secret"), "An internal error; see the log."),
    ],
)
async def test_an_error_after_the_first_byte_is_the_last_event_before_done(client, fail, message):
    """F-G3"""
    client.engine.script.fail = fail
    answer = await client.post(CHAT, {"messages": HI, "stream": True})
    assert answer.status == 200
    *_, content, error, done = answer.events
    assert content["choices"][0]["finish_reason"] is None
    assert error["error"]["message"] == message
    assert error["error"]["type"] == "server_error"
    assert done == "[DONE]"
    assert client.engine.live == []


async def test_roles_are_mapped_and_other_turns_keep_their_fields(client):
    """F-H1, F-H2, F-F4"""
    conversation = await conversation_of(
        client,
        [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "x"]}'}},
                    {"id": "c2", "function": {"name": "g", "arguments": ""}},
                    {"function": {"name": "h", "arguments": {"b": None}}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
            {"role": "function", "name": "g", "content": "ok"},
            {"role": "user", "content": "b", "tool_calls": None, "name": "bob"},
        ],
    )
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "x"]}}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
                {"id": None, "type": "function", "function": {"name": "h", "arguments": {"b": None}}},
            ],
        },
        {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "c1"},
        {"role": "tool", "content": "ok"},
        {"role": "user", "content": "b"},
    ]
    assert conversation.tools is None


async def test_what_no_later_turn_should_fail_for_is_shown_in_its_place(client):
    """A file as a reminder, a refusal as text, the tools that a search has found by their names."""
    messages = [
        {"role": "user", "content": [{"type": "file", "file": {"filename": "a.pdf", "file_data": "x"}}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "tool", "content": [{"type": "tool_reference", "name": "f"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "defer_loading": True}}]
    conversation = await conversation_of(client, messages, tools=tools)
    shown = [[DOCUMENT], [{"type": "text", "text": "No."}], [{"type": "tool_reference", "name": "f"}]]
    assert [message["content"] for message in conversation.messages] == shown
    assert (await conversation_of(client, messages)).messages[2]["content"] == []


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": "a", "thinking": "b", "reasoning": "c"}, "a"),
        ({"reasoning_content": None, "thinking": "b", "reasoning": "c"}, "b"),
        ({"reasoning": "c"}, "c"),
        ({"reasoning_content": ""}, ""),
        ({}, None),
    ],
)
async def test_each_spelling_of_reasoning_reaches_the_template(client, fields, reasoning):
    """F-F4"""
    conversation = await conversation_of(client, [*HI, {"role": "assistant", "content": "x", **fields}, *HI])
    assert conversation.messages[1].get("reasoning_content") == reasoning


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({}, "max"),
        *(({"reasoning_effort": e}, "low") for e in ("none", "minimal", "low")),
        *(({"reasoning_effort": e}, "high") for e in ("medium", "high")),
        *(({"reasoning_effort": e}, "max") for e in ("xhigh", "max", None)),
        ({"reasoning": {"effort": "low"}}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": False}}, "high"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "low"),
    ],
)
async def test_every_effort_a_client_knows_is_mapped_to_one_of_the_model(client, fields, level):
    """F-F3"""
    assert (await conversation_of(client, HI, **fields)).reasoning_effort == level
    plain = await client.post(CHAT, {"messages": HI} | fields)
    stream = await client.post(CHAT, {"messages": HI, "stream": True} | fields)
    assert plain.json["reasoning_effort"] == stream.events[-2]["reasoning_effort"] == level


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": False},
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False},
        {"reasoning": {"enabled": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
    ],
)
async def test_who_wants_no_thinking_gets_the_least_and_it_is_still_told_apart(client, fields):
    """F-F2"""
    assert (await conversation_of(client, HI, **fields)).reasoning_effort == "low"
    assert (await conversation_of(client, HI, **fields, reasoning_effort="high")).reasoning_effort == "high"
    message = (await client.post(CHAT, {"messages": HI} | fields)).json["choices"][0]["message"]
    assert message["reasoning_content"] == "Let me think." and "think" not in message["content"]


@pytest.mark.parametrize(
    "fields",
    [{"thinking": True}, {"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"enable_thinking": True}}],
)
async def test_who_wants_thinking_gets_the_most(client, fields):
    assert (await conversation_of(client, HI, **fields)).reasoning_effort == "max"


@pytest.mark.parametrize(
    ("fields", "clear"),
    [
        ({}, False),
        ({"clear_thinking": True}, True),
        ({"thinking": {"type": "enabled", "clear_thinking": True}}, True),
        ({"chat_template_kwargs": {"clear_thinking": True}}, True),
        ({"clear_thinking": False, "chat_template_kwargs": {"clear_thinking": True}}, False),
    ],
)
async def test_clear_thinking_is_taken_in_each_spelling(client, fields, clear):
    assert (await conversation_of(client, HI, **fields)).clear_thinking is clear


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingParams(temperature=1.0, top_p=0.95)),
        ({"temperature": 0, "top_p": 1}, SamplingParams(temperature=0.0, top_p=1.0)),
        ({"top_k": -1}, SamplingParams(top_p=0.95, top_k=0)),
        ({"top_k": 7, "min_p": 0.25}, SamplingParams(top_p=0.95, top_k=7, min_p=0.25)),
        ({"seed": -1}, SamplingParams(top_p=0.95, seed=2**64 - 1)),
        ({"max_tokens": 9, "min_tokens": 2}, SamplingParams(top_p=0.95, max_new_tokens=9, min_new_tokens=2)),
        ({"max_tokens": 9, "max_completion_tokens": 8}, SamplingParams(top_p=0.95, max_new_tokens=8)),
        ({"max_tokens": 10**30}, SamplingParams(top_p=0.95, max_new_tokens=2**31 - 1)),
        (
            {"ignore_eos": True, "stop_token_ids": [1, VOCAB_SIZE - 1], "priority": -3},
            SamplingParams(top_p=0.95, ignore_eos=True, stop_ids=(1, VOCAB_SIZE - 1), priority=-3),
        ),
        ({"stop": "\nUser:"}, SamplingParams(top_p=0.95, stop=("\nUser:",))),
        ({"stop": ["é" * 512, "b"] * 8}, SamplingParams(top_p=0.95, stop=("é" * 512, "b") * 8)),
        ({"stop": ["a"], "no_stop_trim": True}, SamplingParams(top_p=0.95, stop=("a",), no_stop_trim=True)),
        ({"include_stop_str_in_output": True}, SamplingParams(top_p=0.95, no_stop_trim=True)),
    ],
)
async def test_sampling_is_normalised_over_the_checkpoints_defaults(client, fields, expected):
    assert (await client.post(CHAT, {"messages": HI} | fields)).status == 200
    assert client.engine.jobs[-1].sampling == expected


async def test_two_requests_may_carry_one_rid_and_both_are_served(client):
    """F-G15"""
    first = await client.post(CHAT, {"messages": HI}, {"X-Request-Id": "same"})
    second = await client.post(CHAT, {"messages": HI, "rid": "same"})
    assert first.json["id"] == second.json["id"] == "chatcmpl-same"
    bad = await client.post(CHAT, {"messages": HI}, {"X-Request-Id": "two words"})
    assert (bad.status, bad.error["param"]) == (400, "X-Request-Id")


@pytest.mark.parametrize(
    ("path", "sent", "status"),
    [(CHAT, {"messages": 5}, 400), ("/nowhere", {}, 404), ("/tokenize", {"prompt": "a"}, 200)],
)
async def test_every_answer_has_an_id_the_clients_own_if_it_gave_one(client, path, sent, status):
    answer = await client.post(path, sent, {"X-Request-Id": "mine"})
    assert (answer.status, answer.headers["X-Request-Id"]) == (status, "mine")
    fresh = [(await client.post(path, sent)).headers["X-Request-Id"] for _ in range(2)]
    assert len(set(fresh)) == 2
    assert (await client.post(path, sent, {"X-Request-Id": "two words"})).headers["X-Request-Id"] != "two words"


async def test_the_openai_sdk_reads_the_plain_answer(client):
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as sdk:
        answer = await sdk.chat.completions.create(model="nano", messages=HI, reasoning_effort="high")
        assert answer.choices[0].message.content == 'Hello "you"\n世界'
        assert answer.choices[0].message.reasoning_content == "Let me think."
        assert answer.usage.completion_tokens_details.reasoning_tokens == 4
        assert answer.usage.prompt_tokens_details.cached_tokens == 2
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.chat.completions.create(model="nano", messages=HI, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as unknown:
            await sdk.chat.completions.create(model="gpt", messages=HI)
        assert unknown.value.code == "model_not_found"
        client.engine.script.refuse = Overloaded("Full.")
        with pytest.raises(openai.RateLimitError):
            await sdk.chat.completions.create(model="nano", messages=HI)


async def test_the_openai_sdk_reads_the_stream(client):
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(
            model="nano", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == 'Hello "you"\n世界'
        assert chunks[-1].usage.total_tokens == 11
        client.engine.script.fail = EngineError("The ranks are gone.")
        stream = await sdk.chat.completions.create(model="nano", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="ranks are gone"):
            async for _ in stream:
                pass


async def test_ids_and_names_are_escaped_in_frames(client):
    answer = await client.post(CHAT, {"messages": HI, "rid": 'a"b\\c', "stream": True})
    assert {json.dumps(c["id"]) for c in answer.events[:-1]} == {json.dumps('chatcmpl-a"b\\c')}
