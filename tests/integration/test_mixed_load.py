"""Many requests of all kinds at once, then nothing is left. [R13] [F-I7]"""

import asyncio
import contextlib
import os
import random

import aiohttp
import pytest

from tests.helpers.daemon import Daemon, idle_info, memory

CHAT = "/v1/chat/completions"
BAD = [b"{", b'{"model":"glm-5.3"}', b'{"messages":[],"model":"glm-5.3"}', b'{"model":"glm-5.3","messages":"no"}']


MANY = 5000 if os.environ.get("GLM53D_LONG") == "1" else 500
# Bytes a process may grow by while it serves MANY requests more: the allocator's pieces, and caches that are not full.
MOST_GROWTH = 12 << 20


def still(info: dict) -> dict:
    """What must be the same before and after."""
    return {
        "tasks": info["tasks"],
        "streams": info["streams"],
        "text_jobs": info["text_jobs"],
        "in_flight": info["requests_in_flight"],
        "locked": sum(load["pages_locked"] for load in info["loads"]),
        "owned": sum(load["pages_owned"] for load in info["loads"]),
        "unbalanced": sum(
            load["pages_total"] - load["pages_free"] - load["pages_cached"] - load["pages_locked"] - load["pages_owned"]
            for load in info["loads"]
        ),
        "pids": [rank["pid"] for rank in info["ranks"]],
    }


async def one(http: aiohttp.ClientSession, url: str, rng: random.Random) -> str:
    """One request of a random kind; what came of it."""
    kind = rng.choice(["short", "long", "stream", "leaves", "leaves early", "bad", "completion", "ids"])
    prompt = " ".join(rng.choice(["alpha", "beta", "数据", "🚀", "x = 1;"]) for _ in range(rng.randint(1, 60)))
    body = {"model": "glm-5.3", "messages": [{"role": "user", "content": prompt}], "max_tokens": rng.randint(1, 30)}
    if kind == "bad":
        async with http.post(url + CHAT, data=rng.choice(BAD)) as answer:
            assert answer.status == 400, await answer.text()
        return "refused"
    if kind == "leaves early":
        with contextlib.suppress(TimeoutError):
            request = http.post(url + CHAT, json=body | {"max_tokens": 5000, "ignore_eos": True})
            await asyncio.wait_for(request, rng.random() * 0.1)
        return "left"
    if kind == "leaves":
        async with http.post(
            url + CHAT, json=body | {"max_tokens": 5000, "ignore_eos": True, "stream": True}
        ) as answer:
            assert answer.status == 200
            for _ in range(rng.randint(0, 5)):
                await answer.content.readline()
            answer.close()
        return "left"
    if kind == "completion":
        body = {"model": "glm-5.3", "prompt": prompt, "max_tokens": 5}
        async with http.post(url + "/v1/completions", json=body) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] <= 5
        return "answered"
    if kind == "ids":
        ids = [rng.randrange(1000) for _ in range(rng.randint(1, 50))]
        async with http.post(
            url + "/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 5}}
        ) as answer:
            assert (await answer.json())["meta_info"]["prompt_tokens"] == len(ids)
        return "answered"
    if kind == "long":
        body["messages"][0]["content"] = prompt * 15
    body["stream"] = kind == "stream"
    async with http.post(url + CHAT, json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    return "answered"


async def storm(daemon: Daemon, http: aiohttp.ClientSession, count: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    await one(http, daemon.url, random.Random(3))  # so that lazily made things exist before the first look
    before = still(await idle_info(http, daemon.url))
    gate = asyncio.Semaphore(40)
    async with aiohttp.ClientSession() as many:  # its connections, a task of the server each, are closed with it

        async def gated(seed: int) -> str:
            async with gate:
                return await one(many, daemon.url, random.Random(seed))

        done = await asyncio.gather(*(gated(rng.randrange(1 << 30)) for _ in range(count)))
    assert {"answered", "left", "refused"} <= set(done)
    after = still(await idle_info(http, daemon.url))
    for _ in range(100):  # a closed connection is noticed one loop turn later
        if after["tasks"] <= before["tasks"]:
            break
        await asyncio.sleep(0.05)
        after = still(await idle_info(http, daemon.url))
    assert after["tasks"] <= before["tasks"]
    assert after | {"tasks": 0} == before | {"tasks": 0}
    assert after["locked"] == after["owned"] == after["unbalanced"] == 0


@pytest.mark.timeout(300)
async def test_after_200_mixed_requests_to_the_simulation_all_is_back_to_zero(sim, http):
    await storm(sim, http, 200)


@pytest.mark.timeout(600)
async def test_after_200_mixed_requests_to_the_nano_model_all_is_back_to_zero(nano, http):
    await storm(nano, http, 200)


@pytest.mark.timeout(1800)
async def test_main_and_rank_0_stay_as_large_as_they_are_however_many_requests_come(sim, http):
    """[F-I7] Many small ones, some aborted, some refused, some whose client leaves."""
    await storm(sim, http, MANY)
    pids = (sim.process.pid, (await idle_info(http, sim.url))["ranks"][0]["pid"])
    before = [memory(pid) for pid in pids]
    await storm(sim, http, MANY, seed=2)
    grown = [memory(pid) - was for pid, was in zip(pids, before, strict=True)]
    assert max(grown) < MOST_GROWTH, grown
