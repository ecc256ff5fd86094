"""Logprobs over real HTTP: with the simulated engine's formula, and with the built-in model. [R38] [F-F5]"""

import asyncio
import math

import openai
import pytest

from tests.helpers.daemon import events

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
PROMPT = "Once upon a time there was a server, 你好, and it 🚀 said all that it was asked to say."


async def post(http, daemon, path: str, body: dict) -> dict:
    async with http.post(daemon.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def stream(http, daemon, path: str, body: dict) -> list:
    async with http.post(daemon.url + path, json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        *got, done = await events(answer)
    assert done == "[DONE]"
    return got


def formula(position: int) -> float:
    """What the simulated engine makes of the id at a position."""
    return -(1 + position % 8) / 8


def spelled(entries: list[dict]) -> str:
    return b"".join(bytes(entry["bytes"] or ()) for entry in entries).decode()


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 60}, {"stop": ["never said", "答え", "server"]}, {"n": 3}])
async def test_a_chats_tokens_each_have_one_streamed_or_not(sim, http, fields):
    """Those that ended it too, though their text does not show."""
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3} | fields
    plain, got = await post(http, sim, CHAT, body), await stream(http, sim, CHAT, body)
    first = plain["usage"]["prompt_tokens"]
    chunks = [chunk["choices"][0] for chunk in got]
    total = 0
    for choice in plain["choices"]:
        entries, message = choice["logprobs"]["content"], choice["message"]
        total += len(entries)
        assert [entry["logprob"] for entry in entries] == [formula(first + i) for i in range(len(entries))]
        for entry in entries:
            assert [top["logprob"] for top in entry["top_logprobs"]] == [entry["logprob"] - i for i in range(3)]
            assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        whole = message["reasoning_content"] + ("</think>" + message["content"] if message["content"] else "")
        assert spelled(entries).startswith(whole)
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert [e for chunk in mine for e in (chunk.get("logprobs") or {"content": []})["content"]] == entries
        for chunk in mine[1:-1]:
            (text,) = chunk["delta"].values()
            said = spelled([e for e in chunk["logprobs"]["content"] if e["token"] != "</think>"])
            assert said == text or (choice["matched_stop"] == "server" and chunk is mine[-2] and said.startswith(text))
    assert total == plain["usage"]["completion_tokens"]


async def test_a_completion_echoes_its_prompt_with_logprobs_again_and_again(sim, http):
    """What is cached is of no use to it, and it leaves its pages to others."""
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 20}
    for _ in range(2):
        answer = await post(http, sim, TEXT, body)
        (choice,), usage = answer["choices"], answer["usage"]
        lists, num_prompt = choice["logprobs"], usage["prompt_tokens"]
        assert choice["text"].startswith(PROMPT) and usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert len(lists["tokens"]) == num_prompt + usage["completion_tokens"]
        assert lists["token_logprobs"] == [None] + [formula(i) for i in range(1, len(lists["tokens"]))]
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"].startswith(token, offset)
    got = [chunk["choices"][0] for chunk in await stream(http, sim, TEXT, body)]
    assert "".join(chunk["text"] for chunk in got) == choice["text"]
    for key, values in lists.items():
        assert [value for chunk in got for value in (chunk["logprobs"] or {key: []})[key]] == values
    plain = await post(http, sim, TEXT, {"prompt": PROMPT, "max_tokens": 1})
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("start", [-1, 0, 1, 7])
async def test_generate_begins_the_prompts_where_it_is_told(sim, http, start):
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 30}, "return_logprob": True, "top_logprobs_num": 2}
    body["logprob_start_len"] = start
    plain = await post(http, sim, NATIVE, body)
    meta, num_prompt = plain["meta_info"], plain["meta_info"]["prompt_tokens"]
    wanted = range(start, num_prompt) if start >= 0 else range(0)
    assert [value for value, *_ in meta["input_token_logprobs"]] == [formula(i) if i else None for i in wanted]
    assert [id_ for _, id_, _ in meta["output_token_logprobs"]] == plain["output_ids"]
    *_, whole = await stream(http, sim, NATIVE, body)
    *got, last = await stream(http, sim, NATIVE, body | {"incremental_streaming_output": True})
    for key in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs"):
        assert [value for event in got for value in event["meta_info"][key]] == meta[key]
        assert key not in last["meta_info"] and whole["meta_info"][key] == meta[key]
    assert "".join(event["text"] for event in got) == plain["text"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_prompt_is_scored_and_nothing_is_said(sim, http, is_streamed):
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    answer = (await stream(http, sim, NATIVE, body))[-1] if is_streamed else await post(http, sim, NATIVE, body)
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["output_token_logprobs"] == []
    values = [value for value, *_ in meta["input_token_logprobs"]]
    assert values == [None, *map(formula, range(1, meta["prompt_tokens"]))]
    echo = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = (await post(http, sim, TEXT, echo))["choices"][0]
    assert choice["text"] == PROMPT and len(choice["logprobs"]["tokens"]) == meta["prompt_tokens"]


async def test_long_prompts_come_in_parts_and_what_cannot_be_is_refused(sim, http):
    ids = list(range(40, 240)) * 25  # five steps, and forty records
    body = {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0}
    answers = await asyncio.gather(*(post(http, sim, NATIVE, body) for _ in range(3)))
    for answer in answers:
        assert [id_ for _, id_, _ in answer["meta_info"]["input_token_logprobs"]] == ids
        assert [len(top) for top in answer["meta_info"]["input_top_logprobs"][1:]] == [20] * (len(ids) - 1)
    for length, start in ((10, 10), (60_000, 0)):
        wrong = body | {"input_ids": [50] * length, "logprob_start_len": start}
        async with http.post(sim.url + NATIVE, json=wrong) as answer:
            assert answer.status == 400, await answer.text()


async def test_greedy_tokens_of_the_model_are_its_likeliest(nano, http):
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "max_tokens": 24, "temperature": 0}
    cold = (await post(http, nano, CHAT, body))["choices"][0]["logprobs"]["content"]
    assert len(cold) == 24
    for entry in cold:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert entry["logprob"] == values[0] and values == sorted(values, reverse=True)
        assert 0.0 < sum(map(math.exp, values)) <= 1.0001
    drawn = (await post(http, nano, CHAT, body | {"temperature": 2.0, "seed": 3, "max_tokens": 1}))["choices"][0]
    beside = drawn["logprobs"]["content"][0]["top_logprobs"]
    assert [top["token"] for top in beside] == [top["token"] for top in cold[0]["top_logprobs"]]
    assert [top["logprob"] for top in beside] == pytest.approx(
        [t["logprob"] for t in cold[0]["top_logprobs"]], abs=1e-4
    )


async def test_the_openai_sdk_reads_them(sim):
    client = openai.AsyncOpenAI(base_url=sim.url + "/v1", api_key="none")
    ask = {"model": "glm-5.3", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    plain = await client.chat.completions.create(**ask)
    chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(stream=True, **ask)]
    assert [t for c in chunks if c.logprobs for t in c.logprobs.content] == plain.choices[0].logprobs.content
    text = await client.completions.create(model="glm-5.3", prompt=PROMPT, echo=True, logprobs=1, max_tokens=5)
    assert len(text.choices[0].logprobs.tokens) == text.usage.total_tokens


@pytest.mark.parametrize(
    ("stop", "trim", "text"), [("_", True, "<tool"), ("o", False, "<to"), ("ll>", True, "<tool_ca"), ("<", True, "")]
)
async def test_a_stop_string_may_begin_inside_an_added_token(nano, http, stop, trim, text):
    """There the token is text like any other, streamed or not."""
    (call,) = (await post(http, nano, "/tokenize", {"prompt": "<tool_call>"}))["tokens"]
    body = {"prompt": "x", "allowed_token_ids": [call], "max_tokens": 3, "temperature": 0, "stop": [stop]}
    for logprobs in (None, 0):
        asked = body | {"logprobs": logprobs, "no_stop_trim": not trim}
        plain, got = await post(http, nano, TEXT, asked), await stream(http, nano, TEXT, asked)
        assert plain["choices"][0]["text"] == text and plain["choices"][0]["matched_stop"] == stop
        assert "".join(chunk["choices"][0]["text"] for chunk in got) == text
