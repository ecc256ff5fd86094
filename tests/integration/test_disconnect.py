"""Clients that leave or abort and come back: what was computed stays, what was sent stays apart. [R22]"""

import asyncio

import aiohttp

from tests.helpers.daemon import idle_info, running


async def test_a_prompt_whose_client_left_is_taken_up_where_it_was(tmp_path):
    """F-A3: a prefill of many chunks is left in its middle; the retry finds the finished ones cached."""
    slow = ("sim.per_prefill_token_us=200", "scheduler.max_step_tokens=256", "scheduler.max_running_requests=64")
    body = {"prompt": "one of many words " * 1500, "max_tokens": 1}
    with running(*slow, "kv.page_size=16", config="sim.toml", log=tmp_path / "log") as daemon:
        async with aiohttp.ClientSession() as http:
            request = asyncio.create_task(http.post(daemon.url + "/v1/completions", json=body))
            while (await load(http, daemon.url))["prefill_tokens"] < 512:
                await asyncio.sleep(0.01)
            request.cancel()
            computed = (await idle_info(http, daemon.url))["loads"][0]["prefill_tokens"]
            async with http.post(daemon.url + "/v1/completions", json=body) as answer:
                usage = (await answer.json())["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert computed < usage["prompt_tokens"], "the whole prompt was computed for nobody"
            assert computed - 16 <= cached <= computed


async def test_an_id_that_was_aborted_can_be_used_again_at_once(sim, http):
    """F-A5: late output of the first request never reaches the second."""
    body = {"text": "say it", "rid": "again", "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
    async with http.post(sim.url + "/generate", json=body | {"rid": "other"}) as answer:
        expected = (await answer.json())["output_ids"]
    endless = body | {"sampling_params": {"max_new_tokens": 100_000, "ignore_eos": True}, "stream": True}
    for _ in range(5):
        async with http.post(sim.url + "/generate", json=endless) as old:
            await old.content.readline()
            async with http.post(sim.url + "/abort_request", json={"rid": "again"}):
                pass
            async with http.post(sim.url + "/generate", json=body) as answer:
                got = await answer.json()
            assert got["output_ids"] == expected and got["meta_info"]["finish_reason"]["type"] == "length"


async def load(http: aiohttp.ClientSession, url: str) -> dict:
    async with http.get(url + "/get_loads") as answer:
        return (await answer.json())[0]
