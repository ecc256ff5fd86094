"""Grammars in a crowd: on several ranks, with few pages, beside hostile ones, with clients that leave. [R35] [F-G13]"""

import asyncio
import json
import re
from collections.abc import Iterator

import aiohttp
import pytest

from tests.helpers.daemon import Daemon, idle_info, running

REGEX = "[a-e]{8}-[0-9]{4}"
THINKS = {"messages": [{"role": "user", "content": "Say it."}], "thinking_budget": 8}
# Any of which may be missing: more CPU time than compiling may take.
HOSTILE = {"type": "object", "properties": {f"p{i}": {} for i in range(1800)}}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Four ranks, two pools of few pages, and little time to compile."""
    overrides = (
        "parallel.tp_size=4", "parallel.attn_dp_size=2", "sim.num_pages=24", "kv.page_size=8", "sim.base_ms=1",
        "sim.max_context_len=160", "scheduler.debug_checks=true", "grammar.compile_s=0.15",
    )  # fmt: skip
    with running(*overrides, config="sim.toml", log=tmp_path_factory.mktemp("crowd") / "log") as daemon:
        yield daemon


async def generate(http: aiohttp.ClientSession, daemon: Daemon, seed: int, **sampling: object) -> dict:
    body = {"text": f"prompt {seed}", "sampling_params": {"max_new_tokens": 40, "seed": seed} | sampling}
    async with http.post(daemon.url + "/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def hostile(seed: int) -> dict:
    """One that no cache knows."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": HOSTILE | {"title": f"number {seed}"}}}


async def refused(http: aiohttp.ClientSession, daemon: Daemon, seed: int) -> dict:
    body = THINKS | {"response_format": hostile(seed)}
    async with http.post(daemon.url + "/v1/chat/completions", json=body) as answer:
        assert answer.status == 400, await answer.text()
        return (await answer.json())["error"]


async def test_constrained_and_free_requests_share_steps_pages_and_ranks(crowd, http):
    constrained = [generate(http, crowd, seed, regex=REGEX) for seed in range(24)]
    free = [generate(http, crowd, 100 + seed, ignore_eos=True) for seed in range(12)]
    answers = await asyncio.gather(*constrained, *free)
    for answer in answers[:24]:
        assert re.fullmatch(REGEX, answer["text"]) and answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert all(len(answer["output_ids"]) == 40 for answer in answers[24:])


async def test_the_same_seed_says_the_same_alone_and_in_a_crowd(crowd, http):
    """[R51]"""
    alone = await generate(http, crowd, 7, regex=REGEX)
    crowded, *_ = await asyncio.gather(*(generate(http, crowd, seed, regex=REGEX) for seed in range(7, 19)))
    assert crowded["output_ids"] == alone["output_ids"]


async def test_a_hostile_grammar_is_a_400_and_those_beside_it_get_all_of_theirs(crowd, http):
    """F-G13: with its field; streams that run, and grammars that are new, go on meanwhile."""
    tries = [asyncio.create_task(refused(http, crowd, seed)) for seed in range(6)]
    others = await asyncio.gather(
        *(generate(http, crowd, seed, regex=f"x{seed}y+") for seed in range(6)),
        *(generate(http, crowd, seed, ignore_eos=True) for seed in range(4)),
    )
    assert all(re.fullmatch(f"x{seed}y+", others[seed]["text"]) for seed in range(6))
    assert all(len(answer["output_ids"]) == 40 for answer in others[6:])
    for error in await asyncio.gather(*tries):
        assert "grammar.compile_s" in error["message"] and error["param"] == "response_format.json_schema.schema"


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.1, 0.3])
async def test_clients_that_leave_while_their_grammar_is_tried_or_followed_leave_nothing(crowd, http, wait_s):
    """DESIGN, abort phases."""
    bodies = [THINKS | {"response_format": hostile(1000 + int(wait_s * 1000)), "stream": True}]
    bodies += [THINKS | {"regex": f"[a-z]{{200}}{i}{int(wait_s * 1000)}", "stream": True} for i in range(4)]
    tasks = [asyncio.create_task(http.post(crowd.url + "/v1/chat/completions", json=body)) for body in bodies]
    await asyncio.sleep(wait_s)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, aiohttp.ClientResponse):
            outcome.close()
    info = await idle_info(http, crowd.url)
    assert info["requests_in_flight"] == 0 and all(row["num_waiting"] == 0 for row in info["loads"])
    assert re.fullmatch(REGEX, (await generate(http, crowd, 1, regex=REGEX))["text"])


async def test_several_answers_follow_the_form_each_by_itself(crowd, http):
    """One text, compiled once."""
    body = THINKS | {"n": 4, "seed": 3, "response_format": {"type": "json_object"}, "max_tokens": 100}
    async with http.post(crowd.url + "/v1/chat/completions", json=body) as answer:
        choices = (await answer.json())["choices"]
    assert len(choices) == 4
    for choice in choices:
        assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


async def test_those_put_back_by_a_pause_go_on_in_their_form(crowd, http):
    running_ = [asyncio.create_task(generate(http, crowd, seed, regex="[a-z]{35}")) for seed in range(6)]
    await asyncio.sleep(0.05)
    for call, body in (("pause_generation", {"mode": "retract"}), ("continue_generation", {})):
        async with http.post(f"{crowd.url}/{call}", json=body) as answer:
            assert answer.status == 200, await answer.text()
    for answer in await asyncio.gather(*running_):
        assert re.fullmatch("[a-z]{35}", answer["text"]) or answer["meta_info"]["finish_reason"]["type"] == "length"
