"""Several tokens a step, through real processes: the simulated engine guesses like an MTP layer. [R36]"""

import aiohttp

from tests.helpers.daemon import idle_info, running

PROMPT = {"prompt": "a prompt", "seed": 7, "max_tokens": 43, "ignore_eos": True, "logprobs": 2}
FAST = ("sim.base_ms=0.2", "sim.per_prefill_token_us=1", 'sim.text=""', "scheduler.debug_checks=true")


async def answer(*settings: str, log) -> tuple[dict, dict]:
    """What a daemon with these settings says, and its books once it is idle."""
    with running(*FAST, *settings, config="sim.toml", log=log) as daemon:
        async with aiohttp.ClientSession() as http:
            async with http.post(daemon.url + "/v1/completions", json=PROMPT) as response:
                assert response.status == 200, await response.text()
                body = await response.json()
            return body, await idle_info(http, daemon.url)


async def test_drafts_change_neither_tokens_nor_logprobs_and_are_counted(tmp_path):
    alone, _ = await answer(log=tmp_path / "alone")
    guessed, info = await answer("speculation.num_draft_tokens=3", log=tmp_path / "guessed")
    assert guessed["choices"] == alone["choices"]
    assert guessed["usage"]["completion_tokens"] == 43
    assert 0 < guessed["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] < 43
    assert info["loads"][0]["pages_locked"] == info["loads"][0]["pages_owned"] == 0


async def test_where_every_draft_is_right_a_step_gives_them_all(tmp_path):
    settings = ("speculation.num_draft_tokens=2", "sim.draft_acceptance=1")
    body, info = await answer(*settings, log=tmp_path / "log")
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 28  # 1, then 14 steps of 3
    assert info["loads"][0]["steps"] == 15
