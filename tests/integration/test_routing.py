"""Where a request goes and what it shares, down to the pages of the ranks. [R19] [R25]"""

import asyncio

import aiohttp

from tests.helpers.daemon import idle_info, running

PROMPT = {"prompt": "a prefix that fills some pages " * 20, "max_tokens": 2}


async def cached(http: aiohttp.ClientSession, url: str, headers: dict | None = None, **fields) -> int:
    async with http.post(url + "/v1/completions", json=PROMPT | fields, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_equal_prompts_with_another_salt_share_nothing(sim, http):
    """[R19]"""
    async with http.post(sim.url + "/flush_cache") as answer:
        assert answer.status == 200
    for fields in ({}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "b"}):
        assert await cached(http, sim.url, **fields) == 0
        assert await cached(http, sim.url, **fields) > 0


async def test_a_request_goes_to_the_rank_it_names(tmp_path):
    """[R25]"""
    parallel = ("parallel.tp_size=2", "parallel.attn_dp_size=2", "kv.page_size=16")
    with running(*parallel, config="sim.toml", log=tmp_path / "log") as daemon:
        async with aiohttp.ClientSession() as http:
            assert await cached(http, daemon.url, data_parallel_rank=1) == 0
            assert await cached(http, daemon.url, data_parallel_rank=1) > 0
            assert await cached(http, daemon.url, data_parallel_rank=0) == 0
            assert await cached(http, daemon.url, {"x-override-routed-dp-rank": "1"}, data_parallel_rank=0) > 0
            loads = (await idle_info(http, daemon.url))["loads"]
            assert all(load["pages_cached"] > 0 for load in loads)


async def test_the_health_probe_is_answered_when_every_slot_is_taken(tmp_path):
    """[R4]"""
    with running("server.max_requests=2", config="sim.toml", log=tmp_path / "log") as daemon:
        async with aiohttp.ClientSession() as http:
            body = PROMPT | {"max_tokens": 2000, "ignore_eos": True}
            requests = [asyncio.create_task(http.post(daemon.url + "/v1/completions", json=body)) for _ in range(2)]
            while (await info(http, daemon.url))["requests_in_flight"] < 2:
                await asyncio.sleep(0.01)
            async with http.post(daemon.url + "/v1/completions", json=PROMPT) as refused:
                assert refused.status == 429
            async with http.get(daemon.url + "/health_generate") as probe:
                assert probe.status == 200
            async with http.post(daemon.url + "/abort_request", json={"abort_all": True}) as answer:
                assert (await answer.json())["aborted"] == 2
            assert [(await request).status for request in requests] == [200, 200]


async def info(http: aiohttp.ClientSession, url: str) -> dict:
    async with http.get(url + "/server_info") as answer:
        return await answer.json()
