"""Logprobs in each dialect's shape, plain and streamed: what is asked of the engine, and what is made of its tokens."""

import msgspec
import openai
import pytest

from glm53d._native import TokenLogprob
from glm53d.ipc.records import FinishReason
from glm53d.server import openai_completions
from glm53d.server.logprobs import PART, Legacy, MessageTokens, Native, TokenNames, in_parts
from tests.helpers.fake_engine import ADDED, END_OF_TURN, PROMPT_IDS, THINK_END, TOKENS, Script, logprob_of

CHAT, TEXT, NATIVE, RESPONSES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
SAID = [11, 12, 13, THINK_END, 21, 22, END_OF_TURN]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def script(client):
    client.engine.script = Script(
        [
            ("reasoning", "Let ", [11]),
            ("reasoning", "me ", [12]),
            ("reasoning", "think.", [13, THINK_END]),
            ("content", 'Hello "you"\n', [21]),
            ("content", "世界", [22]),
            ("content", "", [END_OF_TURN]),
        ]
    )
    return client.engine.script


def entry(id_: int, top: int) -> dict:
    def one(id_: int, logprob: float) -> dict:
        text = TOKENS.get(id_, f"<{id_}>")
        return {"token": text, "logprob": logprob, "bytes": None if id_ == END_OF_TURN else list(text.encode())}

    token = logprob_of(id_, top)
    return one(id_, token.logprob) | {"top_logprobs": [one(*pair) for pair in token.top]}


@pytest.mark.parametrize(("fields", "top"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 20}, 20)])
async def test_a_plain_chat_has_those_of_all_its_tokens(client, fields, top):
    answer = (await client.post(CHAT, {"messages": HI, "logprobs": True} | fields)).json
    (choice,) = answer["choices"]
    assert choice["logprobs"] == {"content": [entry(i, top) for i in SAID], "refusal": None}
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (
        "Let me think.",
        'Hello "you"\n世界',
    )
    job = client.engine.jobs[-1]
    assert (job.sampling.top_logprobs, job.sampling.logprob_start) == (top, None)


async def test_a_streamed_chat_has_each_on_the_chunk_with_its_text(client):
    """F-F5: a token without text comes with the next one, at last with the reason."""
    answer = await client.post(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": True})
    role, *chunks, done = answer.events
    assert done == "[DONE]" and "logprobs" not in role["choices"][0]
    seen = [(c["choices"][0]["delta"], c["choices"][0]["logprobs"]["content"]) for c in chunks]
    assert seen == [
        ({"reasoning_content": "Let "}, [entry(11, 2)]),
        ({"reasoning_content": "me "}, [entry(12, 2)]),
        ({"reasoning_content": "think."}, [entry(13, 2)]),
        ({"content": 'Hello "you"\n'}, [entry(THINK_END, 2), entry(21, 2)]),
        ({"content": "世界"}, [entry(22, 2)]),
        ({}, [entry(END_OF_TURN, 2)]),
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_tokens_of_calls_have_theirs_too(client, script):
    """F-F5"""
    name, end = ADDED["<tool_call>"], ADDED["</tool_call>"]
    script.pieces = [
        ("reasoning", "Let ", [11, THINK_END]),
        ("python", name, []),
        ("python", "get_weather", [41]),
        ("python", end, []),
    ]
    fields = {"messages": HI, "logprobs": True, "tools": [WEATHER]}
    answer = await client.post(CHAT, fields | {"stream": True})
    chunks = [event["choices"][0] for event in answer.events[1:-1]]
    tokens = [e["token"] for chunk in chunks for e in chunk["logprobs"]["content"]]
    assert tokens == ["Let ", "</think>", "<tool_call>", "<41>", "</tool_call>"]
    calls = [chunk["delta"]["tool_calls"][0] for chunk in chunks if "tool_calls" in chunk["delta"]]
    assert calls[0]["function"]["name"] == "get_weather" and calls[-1]["function"]["arguments"] == "{}"
    assert chunks[-1]["finish_reason"] == "tool_calls"


async def test_a_turn_that_was_all_answer_repeats_its_text_but_no_token(client, script):
    """F-F1"""
    script.pieces = [("reasoning", "Let ", [11])]
    answer = await client.post(CHAT, {"messages": HI, "logprobs": True, "stream": True})
    chunks = [event["choices"][0] for event in answer.events[1:-1]]
    assert [c["delta"] for c in chunks] == [{"reasoning_content": "Let "}, {"content": "Let "}, {}]
    assert [e["token"] for c in chunks for e in (c.get("logprobs") or {"content": []})["content"]] == ["Let "]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_asked_of_the_engine_unless_the_client_asks(client, path, stream):
    given = {CHAT: {"messages": HI}, TEXT: {"prompt": "a"}, NATIVE: {"text": "a"}, RESPONSES: {"input": "a"}}[path]
    assert (await client.post(path, given | {"stream": stream})).status == 200
    job = client.engine.jobs[-1]
    assert (job.sampling.top_logprobs, job.sampling.logprob_start) == (None, None)
    assert job.out.all_python == (stream and path == RESPONSES)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": -1}, "logprobs"),
        (TEXT, {"echo": 1}, "echo"),
        (NATIVE, {"return_logprob": 1}, "return_logprob"),
        (NATIVE, {"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        (NATIVE, {"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        (NATIVE, {"logprob_start_len": 0}, "logprob_start_len"),
        (NATIVE, {"top_logprobs_num": 1}, "top_logprobs_num"),
        (NATIVE, {"return_text_in_logprobs": True}, "return_text_in_logprobs"),
        (RESPONSES, {"top_logprobs": 2}, "top_logprobs"),
        (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_a_wrong_number_or_one_without_its_switch_is_refused_by_its_path(client, path, fields, param):
    """F-G5"""
    given = {CHAT: {"messages": HI}, TEXT: {"prompt": "a"}, NATIVE: {"text": "a"}, RESPONSES: {"input": "a"}}[path]
    answer = await client.post(path, given | fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body
    assert not client.engine.jobs


LISTS = {
    "tokens": ["Let ", "me ", "think.", "</think>", 'Hello "you"\n', "世界", "<3>"],
    "token_logprobs": [-i / 8 for i in SAID],
    "text_offset": [0, 4, 7, 13, 21, 33, 35],
}


def joined(parts: list[dict]) -> dict:
    """The lists of a stream's chunks, one behind the other."""
    return {key: [value for part in parts for value in part[key]] for key in parts[0]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_has_parallel_lists(client, stream):
    answer = await client.post(TEXT, {"prompt": "a", "logprobs": 2, "stream": stream})
    if stream:
        choices = [event["choices"][0] for event in answer.events[:-1]]
        assert choices.pop()["logprobs"] is None
        assert "".join(c["text"] for c in choices) == 'Let me think.</think>Hello "you"\n世界'
        lists = joined([c["logprobs"] for c in choices])
    else:
        lists = answer.json["choices"][0]["logprobs"]
    top = lists.pop("top_logprobs")
    assert lists == LISTS
    assert top[0] == {"Let ": -11 / 8, "me ": -11 / 8 - 1}
    assert [len(beside) for beside in top] == [2] * len(SAID)


async def test_none_beside_a_tokens_own_still_names_it(client):
    lists = (await client.post(TEXT, {"prompt": "a", "logprobs": 0})).json["choices"][0]["logprobs"]
    assert lists["top_logprobs"][0] == {"Let ": -11 / 8}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, False, 1])
async def test_an_echo_begins_the_text_and_the_lists_with_the_prompt(client, stream, logprobs):
    prompt = "".join(f"<{i}>" for i in PROMPT_IDS)
    answer = await client.post(TEXT, {"prompt": prompt, "echo": True, "logprobs": logprobs, "stream": stream})
    choices = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json["choices"]
    assert "".join(c["text"] for c in choices).startswith(prompt + "Let me think.")
    assert client.engine.jobs[-1].sampling.logprob_start == (0 if logprobs else None)
    parts = [c["logprobs"] for c in choices if c["logprobs"] is not None]
    assert bool(parts) == bool(logprobs)
    if parts:
        lists = joined(parts)
        assert lists["tokens"] == [f"<{i}>" for i in PROMPT_IDS] + LISTS["tokens"]
        assert lists["token_logprobs"][:2] == [None, -PROMPT_IDS[1] / 8]
        assert lists["top_logprobs"][0] is None
        assert lists["text_offset"][:6] == [0, 4, 8, 12, 16, 20]
        if stream:  # as its logprobs come, not all in one go
            assert [c["text"] for c in choices[:2]] == [prompt[:8], prompt[8:]]


async def test_a_prompt_of_ids_is_echoed_as_their_text(client):
    answer = await client.post(TEXT, {"prompt": [11, 12], "echo": True})
    assert answer.json["choices"][0]["text"].startswith("Let me Let me think.")


async def test_an_echo_leaves_even_if_nothing_was_said(client, script):
    script.pieces, script.reason = [], FinishReason.LENGTH
    answer = await client.post(TEXT, {"prompt": "ab", "echo": True, "logprobs": 0, "stream": True})
    *parts, last = (event["choices"][0] for event in answer.events[:-1])
    assert "".join(part["text"] for part in parts) == "ab" and last["finish_reason"] == "length"
    assert len(joined([part["logprobs"] for part in parts])["tokens"]) == 5


async def test_the_echo_of_a_prompt_is_made_once_for_all_its_answers(client, monkeypatch):
    made = []
    make = openai_completions._echo
    monkeypatch.setattr(openai_completions, "_echo", lambda *args: made.append(1) or make(*args))
    await client.post(TEXT, {"prompt": ["a", [11, 12]], "n": 3, "echo": True})
    assert len(made) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_generate_has_them_in_meta_info(client, stream):
    fields = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}
    fields |= {"stream": stream, "incremental_streaming_output": True}
    answer = await client.post(NATIVE, {"text": "a"} | fields)
    events = answer.events[:-1] if stream else [answer.json]
    parts = [e["meta_info"] for e in events if "output_token_logprobs" in e["meta_info"]]
    meta = {key: [value for part in parts for value in part[key]] for key in parts[0] if key.endswith("logprobs")}
    assert [i for event in events for i in event["output_ids"]] == SAID
    assert meta["output_token_logprobs"] == [[-i / 8, i, TOKENS.get(i, f"<{i}>")] for i in SAID]
    assert meta["output_top_logprobs"][0] == [[-11 / 8, 11, "Let "], [-11 / 8 - 1, 12, "me "]]
    assert [i for _, i, _ in meta["input_token_logprobs"]] == PROMPT_IDS
    assert (meta["input_token_logprobs"][0][0], meta["input_top_logprobs"][0]) == (None, None)
    assert events[-1]["meta_info"]["completion_tokens"] == len(SAID)


async def test_a_stream_that_repeats_ends_with_all_that_a_plain_answer_has(client):
    fields = {"text": "a", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    plain = (await client.post(NATIVE, fields)).json["meta_info"]
    *events, last = (await client.post(NATIVE, fields | {"stream": True})).events[:-1]
    for name in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs"):
        assert plain[name] and last["meta_info"][name] == plain[name]
    for meta in (event["meta_info"] for event in events):
        assert meta["output_top_logprobs"] == plain["output_top_logprobs"][: meta["completion_tokens"]]
        assert "input_token_logprobs" not in meta


async def test_each_prompt_of_a_batch_may_ask_for_its_own(client):
    texts = {"text": ["a", "b", "c"]}
    lists = {"return_logprob": [True, False, True], "logprob_start_len": [0, -1, 2], "top_logprobs_num": [1, 0, 2]}
    answers = (await client.post(NATIVE, texts | lists)).json
    asked = [(job.sampling.top_logprobs, job.sampling.logprob_start) for job in client.engine.jobs]
    assert asked == [(1, 0), (None, None), (2, 2)]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False, True]
    assert len(answers[2]["meta_info"]["input_token_logprobs"]) == len(PROMPT_IDS) - 2
    wrong = await client.post(NATIVE, texts | {"return_logprob": [True, False]})
    assert wrong.status == 400 and wrong.error["param"] == "return_logprob"


async def test_generate_names_no_text_and_none_beside_unless_asked(client):
    answer = await client.post(NATIVE, {"text": "a", "return_logprob": True})
    meta = answer.json["meta_info"]
    assert meta["output_token_logprobs"][0] == [-11 / 8, 11, None] and meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta and "input_top_logprobs" not in meta
    assert client.engine.jobs[-1].sampling.logprob_start is None


async def test_a_batch_of_prompts_has_them_in_each_event(client):
    fields = {"return_logprob": True, "stream": True, "incremental_streaming_output": True}
    answer = await client.post(NATIVE, {"text": ["a", "b"]} | fields)
    for index in range(2):
        mine = [event for event in answer.events[:-1] if event["index"] == index]
        ids = [i for e in mine for _, i, _ in e["meta_info"].get("output_token_logprobs", [])]
        assert ids == SAID == [i for e in mine for i in e["output_ids"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_them_on_its_message(client, stream):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = await client.post(RESPONSES, {"input": "a", "stream": stream} | fields)
    response = answer.named_events[-1]["response"] if stream else answer.json
    assert response["top_logprobs"] == 1
    reasoning, message = response["output"]
    assert message["content"][0]["logprobs"] == [entry(i, 1) for i in (21, 22, END_OF_TURN)]
    assert "logprobs" not in reasoning["content"][0]
    if stream:
        deltas = [e for e in answer.named_events if e["type"] == "response.output_text.delta"]
        assert [e["logprobs"] for e in deltas] == [[entry(21, 1)], [entry(22, 1)]]
        (done,) = (e for e in answer.named_events if e["type"] == "response.output_text.done")
        assert done["logprobs"] == message["content"][0]["logprobs"]


def test_of_a_turns_tokens_the_messages_are_behind_the_thinking_and_before_a_call():
    ids = [11, THINK_END, 21, ADDED["<tool_call>"], 41, ADDED["</tool_call>"], 22]
    tokens = [logprob_of(i, 0) for i in ids]
    assert [t.id for t in MessageTokens(ADDED, starts_in_reasoning=True).take(tokens)] == [21]
    assert [t.id for t in MessageTokens(ADDED, starts_in_reasoning=False).take(tokens)] == [11, THINK_END, 21]


def test_a_part_of_a_character_is_spelled_by_its_bytes_and_stands_where_the_character_begins(client):
    client.engine.vocab.token_bytes[:3] = [b"a\xe4", b"\xbd\xa0b", b"c"]
    names = TokenNames(client.engine, skip_special=True)
    lists = Legacy(names).of([logprob_of(i, 0) for i in (0, 1, 2)])
    assert lists["tokens"] == ["bytes:\\x61\\xe4", "bytes:\\xbd\\xa0\\x62", "c"]
    assert lists["text_offset"] == [0, 1, 3]
    assert Legacy(names).of([logprob_of(i, 0) for i in (0, 2, 2)])["text_offset"] == [0, 2, 3], "behind a U+FFFD"
    assert msgspec.json.decode(names.entry(logprob_of(1, 0)))["bytes"] == [0xBD, 0xA0, 0x62]


async def test_what_is_made_in_parts_is_what_is_made_at_once(client):
    names = TokenNames(client.engine, skip_special=True)
    tokens = [logprob_of(i, 2, is_prompt=i < 300) for i in range(2 * PART + 50)]
    makers = (lambda: names.content, lambda: Legacy(names).of, lambda: Native(names, with_top=True, with_text=True).of)
    for maker in makers:
        assert await in_parts(maker(), tokens) == maker()(tokens)
        assert await in_parts(maker(), []) == maker()([])


def test_what_is_not_finite_is_null(client):
    names = TokenNames(client.engine, skip_special=True)
    token = TokenLogprob(11, None, [(12, float("-inf")), (13, float("nan"))])
    entry = msgspec.json.decode(names.entry(token))
    assert [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])] == [None] * 3
    fields = msgspec.json.encode(Native(names, with_top=True, with_text=True).of([token]))
    assert msgspec.json.decode(fields)["output_token_logprobs"] == [[None, 11, "Let "]]


async def test_the_schema_says_how_many_can_be_named(client):
    schemas = (await client.get("/openapi.json")).json["components"]["schemas"]
    fields = {"ChatBody": "top_logprobs", "GenerateBody": "top_logprobs_num", "CompletionBody": "logprobs"}
    for kind, name in fields.items():
        bounds = [one for one in schemas[kind]["properties"][name]["anyOf"] if one["type"] == "integer"]
        assert [(one["minimum"], one["maximum"]) for one in bounds] == [(0, 20)]


async def test_the_openai_sdk_reads_them(client):
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as sdk:
        ask = {"model": "nano", "messages": HI, "logprobs": True, "top_logprobs": 2}
        answer = await sdk.chat.completions.create(**ask)
        tokens = answer.choices[0].logprobs.content
        stream = await sdk.chat.completions.create(stream=True, **ask)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert [t for c in chunks if c.logprobs for t in c.logprobs.content] == tokens
        assert [t.token for t in tokens][:3] == ["Let ", "me ", "think."]
        assert tokens[0].top_logprobs[1].logprob == -11 / 8 - 1
        text = await sdk.completions.create(model="nano", prompt="ab", echo=True, logprobs=1)
        assert text.choices[0].logprobs.token_logprobs[0] is None
        response = await sdk.responses.create(
            model="nano", input="a", include=["message.output_text.logprobs"], top_logprobs=1
        )
        assert response.output[1].content[0].logprobs[0].token == 'Hello "you"\n'
