"""Control calls through the rings: flush, pause, continue, log level. [R26]"""

import asyncio
import contextlib
import json
import time

import aiohttp
import pytest

from tests.helpers.daemon import events, idle_info, running

LONG = {"model": "glm-5.3", "prompt": "words that fill some pages " * 20, "max_tokens": 40, "ignore_eos": True}


async def post(http: aiohttp.ClientSession, url: str, body: dict | None = None) -> dict:
    async with http.post(url, json=body or {}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def cached(http: aiohttp.ClientSession, url: str, body: dict) -> int:
    usage = (await post(http, url + "/v1/completions", body))["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


async def test_flushing_drops_what_nobody_uses_and_says_how_much(sim, http):
    await cached(http, sim.url, LONG)
    assert await cached(http, sim.url, LONG) > 0
    await idle_info(http, sim.url)
    assert (await post(http, sim.url + "/flush_cache"))["pages"] > 0
    load = (await idle_info(http, sim.url))["loads"][0]
    assert load["pages_free"] == load["pages_total"]
    assert (await post(http, sim.url + "/flush_cache"))["pages"] == 0
    assert await cached(http, sim.url, LONG) == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_while_paused_nothing_is_computed_and_afterwards_all_goes_on(sim, http, mode):
    body = LONG | {"max_tokens": 300, "stream": True, "stream_options": {"include_usage": True}}
    whole = (await post(http, sim.url + "/v1/completions", LONG | {"max_tokens": 300}))["choices"][0]["text"]
    async with http.post(sim.url + "/v1/completions", json=body) as stream:
        first = json.loads((await stream.content.readline())[6:])["choices"][0]["text"]
        rest = asyncio.create_task(events(stream))
        try:
            assert (await post(http, sim.url + "/pause_generation", {"mode": mode}))["requests"] == 1
            steps = (await loads(http, sim.url))["steps"]
            late = asyncio.create_task(post(http, sim.url + "/v1/completions", LONG | {"max_tokens": 3}))
            await asyncio.sleep(0.3)
            load = await loads(http, sim.url)
            assert load["steps"] == steps and not rest.done() and not late.done()
            assert (load["pages_owned"] > 0) == (mode == "in_place")
            async with http.get(sim.url + "/health") as health:  # paused is no illness
                assert (health.status, (await health.json())["paused"]) == (200, True)
            async with http.get(sim.url + "/health_generate") as probe:  # answered without a step
                assert probe.status == 200
        finally:
            assert (await post(http, sim.url + "/continue_generation"))["status"] == "running"
        got = await asyncio.wait_for(rest, 30)
        await asyncio.wait_for(late, 30)
    assert first + "".join(e["choices"][0]["text"] for e in got[:-1] if e["choices"]) == whole
    assert got[-2]["usage"]["completion_tokens"] == 300
    async with http.get(sim.url + "/health") as health:
        assert "paused" not in await health.json()


async def test_a_paused_request_can_be_aborted_and_its_stream_kept_alive(tmp_path):
    overrides = ("server.keepalive_s=0.1", "sim.base_ms=1")
    with running(*overrides, config="sim.toml", log=tmp_path / "log") as daemon:
        async with aiohttp.ClientSession() as http:
            async with http.post(daemon.url + "/v1/completions", json=LONG | {"stream": True, "rid": "mine"}) as stream:
                await stream.content.readline()
                await post(http, daemon.url + "/pause_generation")
                while await stream.content.readline() != b": keep-alive\n":
                    pass
                await post(http, daemon.url + "/v1/requests/mine/cancel")
                assert (await asyncio.wait_for(events(stream), 10))[-2]["choices"][0]["finish_reason"] == "abort"
            await post(http, daemon.url + "/continue_generation")
            info = await idle_info(http, daemon.url)
            assert info["requests_in_flight"] == 0 and info["loads"][0]["pages_owned"] == 0


async def test_the_log_level_reaches_every_rank(tmp_path):
    parallel = ("parallel.tp_size=2", "parallel.attn_dp_size=2")
    with running(*parallel, config="sim.toml", log=tmp_path / "log") as daemon:
        async with aiohttp.ClientSession() as http:
            for level in ("debug", "error"):
                assert await post(http, daemon.url + "/configure_logging", {"log_level": level}) == {"log_level": level}
                await post(http, daemon.url + "/v1/completions", LONG | {"max_tokens": 2, "rid": f"at-{level}"})
    log = (tmp_path / "log").read_text()
    assert "rid=at-debug" in log and "rid=at-error" not in log


async def test_a_control_call_whose_ranks_hang_fails_at_its_deadline(tmp_path):
    """A step takes longer than the call may wait; the ranks do it in the end."""
    overrides = ("server.control_timeout_s=0.2", "sim.base_ms=5000")
    with running(*overrides, config="sim.toml", log=tmp_path / "log") as daemon:
        async with aiohttp.ClientSession() as http:
            request = asyncio.create_task(post(http, daemon.url + "/v1/completions", LONG | {"max_tokens": 1}))
            while not (await loads(http, daemon.url))["num_running"]:
                await asyncio.sleep(0.02)
            begun = time.monotonic()
            async with http.post(daemon.url + "/flush_cache") as answer:
                body = await answer.json()
                assert (answer.status, body["error"]["code"]) == (503, "not_ready")
            assert time.monotonic() - begun < 4  # before the step was over
            await request
            with contextlib.suppress(aiohttp.ClientError):
                await post(http, daemon.url + "/flush_cache")


async def loads(http: aiohttp.ClientSession, url: str) -> dict:
    async with http.get(url + "/get_loads") as answer:
        return (await answer.json())[0]
