"""Queues are bounded: what does not fit is refused at the door with a time to come back. [R22]"""

import asyncio

import aiohttp
import pytest

from tests.helpers.daemon import events, running

LONG = {"model": "glm-5.3", "prompt": "x", "max_tokens": 100, "ignore_eos": True}


async def statuses(url: str, count: int) -> list[int]:
    """Of so many requests sent at once; each refusal says when to come back."""

    async def one(http: aiohttp.ClientSession) -> int:
        async with http.post(url + "/v1/completions", json=LONG) as answer:
            body = await answer.json()
            if answer.status != 200:
                assert int(answer.headers["Retry-After"]) > 0 and body["error"]["code"] == "overloaded"
            return answer.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        return sorted(await asyncio.gather(*(one(http) for _ in range(count))))


async def test_more_requests_in_flight_than_allowed_are_refused_with_429(tmp_path):
    with running("server.max_requests=4", config="sim.toml", log=tmp_path / "log") as daemon:
        assert await statuses(daemon.url, 9) == [200] * 4 + [429] * 5
        assert await statuses(daemon.url, 4) == [200] * 4


async def test_more_waiting_requests_than_allowed_are_refused_with_429(tmp_path):
    limits = ("scheduler.max_running_requests=1", "scheduler.max_waiting_requests=2")
    with running(*limits, config="sim.toml", log=tmp_path / "log") as daemon:
        assert await statuses(daemon.url, 50) == [200] * 3 + [429] * 47
        assert await statuses(daemon.url, 3) == [200] * 3


async def test_more_waiting_tokens_than_allowed_are_refused_with_429(tmp_path):
    limits = ("scheduler.max_running_requests=1", "scheduler.max_waiting_tokens=1")
    with running(*limits, config="sim.toml", log=tmp_path / "log") as daemon:
        first = asyncio.create_task(statuses(daemon.url, 2))
        await asyncio.sleep(0.3)
        assert await statuses(daemon.url, 3) == [429] * 3
        assert await first == [200] * 2


async def test_a_request_that_waits_too_long_is_answered_with_503(tmp_path):
    limits = ("scheduler.max_running_requests=1", "scheduler.queue_timeout_s=0.2")
    with running(*limits, config="sim.toml", log=tmp_path / "log") as daemon:
        async with aiohttp.ClientSession() as http:
            first = asyncio.create_task(statuses(daemon.url, 1))
            await asyncio.sleep(0.1)
            async with http.post(daemon.url + "/v1/completions", json=LONG) as answer:
                assert answer.status == 503 and int(answer.headers["Retry-After"]) > 0
                assert (await answer.json())["error"]["code"] == "queue_timeout"
            assert await first == [200]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_first_token_cannot_come_in_time_is_answered_with_504(tmp_path, stream):
    with running("scheduler.max_running_requests=1", config="sim.toml", log=tmp_path / "log") as daemon:
        async with aiohttp.ClientSession() as http:
            first = asyncio.create_task(statuses(daemon.url, 1))
            await asyncio.sleep(0.1)
            body = LONG | {"first_token_timeout": 0.05, "stream": stream}
            async with http.post(daemon.url + "/v1/completions", json=body) as answer:
                if stream:  # it was taken, so its status was 200
                    error, done = await events(answer)
                    assert (answer.status, done) == (200, "[DONE]")
                else:
                    error = await answer.json()
                    assert answer.status == 504
                assert error["error"]["code"] == "deadline_exceeded"
            assert await first == [200]
            async with http.post(daemon.url + "/v1/completions", json=LONG | {"first_token_timeout": 60}) as answer:
                assert answer.status == 200


async def test_aborting_all_while_prompts_are_being_made_ends_each_with_a_clear_error(sim, http):
    """[R22] an abort may come before the leader has heard of the request."""
    body = {"model": "glm-5.3", "messages": [{"role": "user", "content": "word " * 20_000}], "max_tokens": 50_000}
    requests = [
        asyncio.create_task(http.post(sim.url + "/v1/chat/completions", json=body).__aenter__()) for _ in range(6)
    ]
    for _ in range(40):
        async with http.post(sim.url + "/abort_request", json={"abort_all": True}) as answer:
            assert answer.status == 200
        await asyncio.sleep(0.005)
    async with http.post(sim.url + "/abort_request", json={"abort_all": True}) as answer:
        assert answer.status == 200
    answers = await asyncio.wait_for(asyncio.gather(*requests), 30)
    for answer in answers:
        got = await answer.json()
        assert (answer.status == 500 and "aborted" in got["error"]["message"]) or (
            got["choices"][0]["finish_reason"] == "abort"
        )
