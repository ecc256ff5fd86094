"""Several answers to one request, and several prompts in one, through the whole daemon. [R20]"""

import asyncio
import contextlib
from itertools import pairwise

import openai

from tests.helpers.daemon import events, idle_info

PROMPT = {"model": "glm-5.3", "prompt": "a prompt of a few pages " * 20, "max_tokens": 12}


async def complete(http, url: str, **fields) -> dict:
    async with http.post(url + "/v1/completions", json=PROMPT | fields) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_answers_differ_and_the_first_is_that_of_the_seed_alone(nano, http):
    """[R51]"""
    alone = (await complete(http, nano.url, seed=7))["choices"][0]["text"]
    several = await complete(http, nano.url, seed=7, n=4)
    texts = [choice["text"] for choice in several["choices"]]
    assert texts[0] == alone and len(set(texts)) > 1
    assert (await complete(http, nano.url, seed=8))["choices"][0]["text"] == texts[1]


async def test_the_prompt_is_computed_once_and_its_pages_are_shared(sim, http):
    async with http.post(sim.url + "/flush_cache") as answer:
        assert answer.status == 200
    before = (await idle_info(http, sim.url))["loads"][0]["prefill_tokens"]
    usage = (await complete(http, sim.url, n=8))["usage"]
    computed = (await idle_info(http, sim.url))["loads"][0]["prefill_tokens"] - before
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0 and usage["completion_tokens"] == 8 * 12
    assert computed <= usage["prompt_tokens"] + 7 * 16  # a page at most for each of the others


async def test_the_openai_sdk_streams_several_answers(sim):
    client = openai.AsyncOpenAI(base_url=sim.url + "/v1", api_key="none")
    body = {"model": "glm-5.3", "messages": [{"role": "user", "content": "hi"}], "n": 3}
    plain = await client.chat.completions.create(**body)
    texts = ["", "", ""]
    async for chunk in await client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in plain.choices]


async def test_a_client_that_leaves_ends_all_answers(sim, http):
    body = PROMPT | {"n": 5, "stream": True, "max_tokens": 100_000, "ignore_eos": True}
    async with http.post(sim.url + "/v1/completions", json=body) as stream:
        await stream.content.readline()
    info = await idle_info(http, sim.url)
    assert info["requests_in_flight"] == 0 and info["loads"][0]["pages_owned"] == 0


async def test_answers_interleave(sim, http):
    body = PROMPT | {"n": 3, "stream": True, "max_tokens": 40, "ignore_eos": True}
    async with http.post(sim.url + "/v1/completions", json=body) as stream:
        got = await asyncio.wait_for(events(stream), 30)
    order = [event["choices"][0]["index"] for event in got[:-1]]
    assert sum(a != b for a, b in pairwise(order)) > 20
    assert [event["choices"][0]["index"] for event in got[:-1] if event["choices"][0]["finish_reason"]] == [0, 1, 2]


async def test_each_of_several_prompts_is_answered_as_if_it_were_alone(nano):
    """[R51]"""
    prompts = ["a first prompt", [5, 6, 7, 8], "and another one"]
    async with openai.AsyncOpenAI(base_url=nano.url + "/v1", api_key="none") as sdk:
        fields = {"model": "glm-5.3-nano", "max_tokens": 8, "seed": 3, "temperature": 0.7}
        alone = [(await sdk.completions.create(prompt=prompt, **fields)) for prompt in prompts]
        batch = await sdk.completions.create(prompt=prompts, n=2, **fields)
        texts = [""] * 6
        async for chunk in await sdk.completions.create(prompt=prompts, n=2, stream=True, **fields):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.index for choice in batch.choices] == list(range(6))
    assert [choice.text for choice in batch.choices[::2]] == [one.choices[0].text for one in alone]
    assert texts == [choice.text for choice in batch.choices]
    assert batch.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)


async def test_a_batch_of_generate_is_a_list_and_a_stream_tells_its_parts_apart(nano, http):
    async def generate(**fields) -> list:
        async with http.post(nano.url + "/generate", json=fields) as answer:
            assert answer.status == 200, await answer.text()
            return await (events(answer) if fields.get("stream") else answer.json())

    params = {"max_new_tokens": 6, "temperature": 0}
    batch = {"input_ids": [[5, 6, 7], [8, 9]], "sampling_params": params}
    answers = await generate(**batch)
    alone = [await generate(input_ids=ids, sampling_params=params) for ids in batch["input_ids"]]
    assert [one["output_ids"] for one in answers] == [one["output_ids"] for one in alone]
    *parts, done = await generate(**batch, stream=True, incremental_streaming_output=True)
    ids = [[i for part in parts if part["index"] == index for i in part["output_ids"]] for index in range(2)]
    assert ids == [one["output_ids"] for one in answers] and done == "[DONE]"


async def test_a_batch_with_one_prompt_that_does_not_fit_is_refused_whole(sim, http):
    before = (await idle_info(http, sim.url))["loads"][0]["prefill_tokens"]
    for body in ({"text": ["hi", "word " * 300_000]}, {"text": ["word " * 300_000, "hi"], "stream": True}):
        async with http.post(sim.url + "/generate", json=body) as answer:
            assert answer.status == 400 and (await answer.json())["error"]["code"] == "context_length_exceeded"
    info = await idle_info(http, sim.url)
    assert info["requests_in_flight"] == 0 and info["loads"][0]["prefill_tokens"] == before


async def test_a_client_that_leaves_while_its_batch_is_being_made_leaves_nothing(sim, http):
    """[R22]"""
    texts = [f"{i} " + "word " * 10_000 for i in range(30)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05), http.post(sim.url + "/generate", json={"text": texts}):
            pass
    info = await idle_info(http, sim.url)
    assert info["requests_in_flight"] == info["loads"][0]["pages_owned"] == 0
