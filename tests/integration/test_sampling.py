"""Sampling fields over HTTP, on the built-in model: what they do to the ids that come out. [R36] [R51]"""

import asyncio
from typing import Any

import aiohttp
import openai

from tests.helpers.daemon import Daemon

PENALTIES = {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2}


async def ids_of(daemon: Daemon, http: aiohttp.ClientSession, **params: Any) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True} | params
    body = {"text": "One two one two one two one two one two", "sampling_params": params}
    async with http.post(daemon.url + "/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["output_ids"]


async def test_biased_ids_come_and_no_others_than_those_allowed(nano, http):
    assert await ids_of(nano, http, logit_bias={"77": 100}) == [77] * 24
    allowed = {"allowed_token_ids": [70, 75, 80], "frequency_penalty": 2}  # so that each of them comes
    assert set(await ids_of(nano, http, **allowed)) == {70, 75, 80}
    assert set(await ids_of(nano, http, logit_bias={"75": -100}, **allowed)) == {70, 80}


async def test_penalties_make_what_was_said_less_likely_and_negative_ones_more(nano, http):
    seeded = {"temperature": 1.0, "seed": 1, "max_new_tokens": 200}
    plain, frequent, present, rare = await asyncio.gather(
        ids_of(nano, http, **seeded),
        ids_of(nano, http, frequency_penalty=2, **seeded),
        ids_of(nano, http, presence_penalty=2, **seeded),
        ids_of(nano, http, frequency_penalty=-2, **seeded),
    )
    assert len(set(rare)) < len(set(plain)) < min(len(set(frequent)), len(set(present)))


async def test_penalised_answers_are_the_same_at_once_and_one_at_a_time(nano, http):
    params = [PENALTIES | {"seed": seed, "temperature": 0.8, "top_p": 0.95} for seed in range(6)]
    alone = [await ids_of(nano, http, **fields) for fields in params]
    assert await asyncio.gather(*(ids_of(nano, http, **fields) for fields in params)) == alone


async def test_the_sdk_takes_its_own_fields(nano):
    client = openai.AsyncOpenAI(base_url=nano.url + "/v1", api_key="-")
    answer = await client.chat.completions.create(
        model="glm-5.3-nano",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=20,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"75": -100},
        seed=1,
        extra_body={"repetition_penalty": 1.1, "allowed_token_ids": [70, 75, 80]},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 20
