"""/v1/completions and /generate: text and ids in, text and ids out."""

import json

import openai
import pytest

from glm53d.errors import EngineError
from glm53d.front.job import SamplingParams
from glm53d.ipc.records import FinishReason
from glm53d.server.native_stream import MAX_REPEATS, SoFar

TEXT, NATIVE = "/v1/completions", "/generate"
WHOLE = 'Let me think.Hello "you"\n世界'


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("a <|user|> b", "a <|user|> b", None),
        (["one"], "one", None),
        ([1, 2, 999], None, [1, 2, 999]),
        ([[1, 2]], None, [1, 2]),
    ],
)
async def test_one_prompt_is_taken_in_each_form(client, prompt, text, ids):
    answer = await client.post(TEXT, {"prompt": prompt, "max_tokens": 4})
    assert answer.status == 200, answer.body
    job = client.engine.jobs[-1]
    assert job.text == text
    assert (None if job.ids is None else job.ids.tolist()) == ids
    assert job.ids is None or job.ids.dtype == "int32"
    assert job.conversation is None
    assert job.sampling.max_new_tokens == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "a", "max_tokens": 0, "echo": True}),
        (NATIVE, {"text": "a", "sampling_params": {"max_new_tokens": 0}}),
    ],
)
async def test_a_prompt_may_be_all_that_is_wanted(client, path, body):
    assert (await client.post(path, body)).status == 200
    assert client.engine.jobs[-1].sampling.max_new_tokens == 0


async def test_a_text_completion_keeps_reasoning_in_its_text(client):
    body = (await client.post(TEXT, {"prompt": "a", "rid": "r"})).json
    assert (body["id"], body["object"]) == ("cmpl-r", "text_completion")
    assert body["choices"] == [
        {"index": 0, "text": WHOLE, "logprobs": None, "finish_reason": "stop", "matched_stop": 3}
    ]
    assert body["usage"]["total_tokens"] == 11


async def test_a_text_stream_goes_pieces_finish_usage_done(client):
    client.engine.script.reason = FinishReason.LENGTH
    answer = await client.post(TEXT, {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert [c["choices"][0]["text"] for c in chunks] == ["Let me ", "think.", 'Hello "you"\n', "世界", ""]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["length"]
    assert all(c["usage"] is None for c in chunks)
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 5)


async def test_the_openai_sdk_reads_text_completions(client):
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as sdk:
        answer = await sdk.completions.create(model="nano", prompt="a")
        assert answer.choices[0].text == WHOLE
        stream = await sdk.completions.create(model="nano", prompt=[1, 2], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == WHOLE


async def test_generate_answers_text_ids_and_latencies(client):
    body = (await client.post(NATIVE, {"input_ids": [4, 5], "rid": "r"})).json
    assert body["text"] == WHOLE
    assert body["output_ids"] == [11, 12, 13, 7, 21, 22]
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 3},
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "cached_tokens": 2,
        "cached_tokens_details": {"device": 2, "host": 0, "storage": 0},
        "queue_time": 1e-4,
        "first_token_latency": 1e-3,
        "decode_throughput": pytest.approx(5 / 0.01),
    }
    assert client.engine.jobs[-1].ids.tolist() == [4, 5]


async def test_a_generate_stream_repeats_all_that_was_said_and_ends_with_the_plain_answer(client):
    plain = (await client.post(NATIVE, {"text": "a", "rid": "r"})).json
    *events, last, done = (await client.post(NATIVE, {"text": "a", "rid": "r", "stream": True})).events
    assert done == "[DONE]"
    assert plain["meta_info"].pop("e2e_latency") >= 0 and last["meta_info"].pop("e2e_latency") >= 0
    assert last == plain
    assert [event["text"] for event in events] == [WHOLE[:7], WHOLE[:13], WHOLE[:-2], WHOLE]
    assert [event["output_ids"] for event in events] == [plain["output_ids"][:n] for n in (2, 4, 5, 6)]
    assert [event["meta_info"] for event in events] == [
        {"id": "r", "finish_reason": None, "prompt_tokens": 5, "completion_tokens": n, "cached_tokens": None}
        for n in (2, 4, 5, 6)
    ]


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True}], ids=str)
async def test_sglangs_own_clients_read_a_generate_stream(client, fields):
    """Its frontend language takes what is new of each text, its benchmark the growth of the count of tokens."""
    answer = await client.post(NATIVE, {"text": "a", "stream": True} | fields)
    at, said, metas, num_tokens, growth = 0, "", [], 0, []
    for line in answer.body.decode().splitlines():
        if not line.startswith("data:") or line == "data: [DONE]":
            continue
        data = json.loads(line[5:].strip("\n"))
        new = data["text"][at:]
        at += len(new)
        said += new
        metas.append(data["meta_info"])
        growth.append(data["meta_info"]["completion_tokens"] - num_tokens)
        num_tokens = data["meta_info"]["completion_tokens"]
    assert said == data["text"] and said.replace("</think>", "") == WHOLE
    assert all(meta["finish_reason"] is None for meta in metas[:-1])
    assert metas[-1]["finish_reason"]["type"] == "stop"
    assert sum(growth) == 6 and min(growth[:-1]) > 0
    if fields:
        ids = [id for _, id, _ in metas[-1]["output_token_logprobs"]]
        assert len(ids) == 6
        for meta in metas:
            assert [id for _, id, _ in meta["output_token_logprobs"]] == ids[: meta["completion_tokens"]]


def test_a_long_answer_is_repeated_less_often_than_it_grows():
    so_far, sizes = SoFar(), []
    for i in range(20_000):
        so_far.add("x", [i], {})
        if so_far.is_due:
            event = so_far.told("r")
            sizes.append(len(event["text"]))
            assert len(event["output_ids"]) == event["meta_info"]["completion_tokens"] == len(event["text"])
    assert sizes[:MAX_REPEATS] == list(range(1, MAX_REPEATS + 1))
    assert sum(sizes) <= MAX_REPEATS * 20_000 and sizes[-1] > 20_000 * (1 - 2 / MAX_REPEATS)
    assert so_far.whole({})["text"] == "x" * 20_000


async def test_an_incremental_generate_stream_has_deltas_with_ids_then_meta_info(client):
    client.engine.script.reason = FinishReason.LENGTH
    fields = {"stream": True, "incremental_streaming_output": True}
    *deltas, last, done = (await client.post(NATIVE, {"text": "a"} | fields)).events
    assert done == "[DONE]"
    assert deltas == [
        {"text": "Let me ", "output_ids": [11, 12]},
        {"text": "think.", "output_ids": [13, 7]},
        {"text": 'Hello "you"\n', "output_ids": [21]},
        {"text": "世界", "output_ids": [22]},
    ]
    assert (last["text"], last["output_ids"]) == ("", [])
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


async def test_generate_takes_the_native_names_of_sampling(client):
    params = {"max_new_tokens": 8, "min_new_tokens": 0, "temperature": 0, "top_k": 3, "skip_special_tokens": False}
    assert (await client.post(NATIVE, {"text": "a", "sampling_params": params, "priority": 2})).status == 200
    job = client.engine.jobs[-1]
    assert job.sampling == SamplingParams(0.0, 0.95, 3, max_new_tokens=8, priority=2)
    assert job.out.with_ids
    assert not job.out.skip_special_tokens


async def test_a_generate_stream_that_fails_ends_with_the_error_and_done(client):
    client.engine.script.fail = EngineError("The ranks are gone.")
    *_, error, done = (await client.post(NATIVE, {"text": "a", "stream": True})).events
    assert (error["error"]["code"], done) == ("engine_error", "[DONE]")


@pytest.mark.parametrize("path", ["/v1/chat/completions", TEXT, NATIVE])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "stop", "matched"),
    [(FinishReason.STOP, "\nUser:", "\nUser:"), (FinishReason.STOP, None, 3), (FinishReason.LENGTH, None, None)],
)
async def test_what_ended_the_text_is_told_in_every_dialect(client, path, stream, reason, stop, matched):
    """[R40] a string, an id, or nothing."""
    client.engine.script.reason, client.engine.script.matched_stop = reason, stop
    body = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "text": "a", "stream": stream}
    answer = await client.post(path, body)
    last = answer.events[-2] if stream else answer.json
    if path == NATIVE:
        assert last["meta_info"]["finish_reason"].get("matched") == matched
    else:
        assert last["choices"][0]["matched_stop"] == matched


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "prompt_tokens_details"),
        ("/v1/completions", {"prompt": "x"}, "prompt_tokens_details"),
        ("/v1/responses", {"input": "x"}, "input_tokens_details"),
    ],
)
async def test_cached_tokens_are_told_apart_by_tier_when_a_slower_one_gave_some(client, path, body, where):
    """[R27] Anthropic's usage has no place for that; /generate always has it."""
    by_tier: dict = {"device": 1, "host": 2, "storage": 1}
    client.engine.cached = tuple(by_tier.values())
    by_tier |= {"storage_backend": "file"}
    usage = (await client.post(path, body)).json["usage"]
    writes = {"cache_write_tokens": 0} if path == "/v1/responses" else {}  # its SDK has it
    assert usage[where] == {"cached_tokens": 4, "cached_tokens_details": by_tier} | writes
    meta = (await client.post(NATIVE, {"text": "x"})).json["meta_info"]
    assert (meta["cached_tokens"], meta["cached_tokens_details"]) == (4, by_tier)
