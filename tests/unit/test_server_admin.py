"""What the server says about itself, and /abort_request."""

import asyncio

import pytest

from glm53d.config import Engine
from tests.helpers.http import client_of_fake_engine, until

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client():
    async with client_of_fake_engine() as client:
        yield client


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready"])
async def test_health_follows_the_engine(client, path):
    assert (await client.get(path)).status == 200
    client.engine.state = "unhealthy"
    assert (await client.get(path)).status == 503
    assert (await client.get("/live")).status == 200


async def test_models_lists_every_name_and_says_that_nano_is_untrained(client):
    cards = (await client.get("/v1/models")).json["data"]
    assert [card["id"] for card in cards] == ["nano", "alias"]
    for card in cards:
        assert (card["object"], card["owned_by"], card["root"]) == ("model", "glm53d", "nano")
        assert card["max_model_len"] == 100
        assert "untrained" in card["description"]


async def test_models_says_that_a_simulation_is_one():
    async with client_of_fake_engine(engine=Engine(kind="sim")) as client:
        assert "simulated" in (await client.get("/v1/models")).json["data"][0]["description"]


async def test_a_head_request_to_the_root_is_answered(client):
    """F-J2"""
    answer = await client.request("HEAD", "/")
    assert (answer.status, answer.body) == (200, b"")


async def test_server_info_and_loads_are_the_engines(client):
    assert (await client.get("/server_info")).json == client.engine.server_info()
    assert (await client.get("/get_loads")).json == client.engine.loads()


@pytest.mark.parametrize("body", [{}, {"rid": None}, {"rid": ""}, {"abort_all": False}])
async def test_an_abort_must_say_which(client, body):
    answer = await client.post("/abort_request", body)
    assert (answer.status, answer.error["param"]) == (400, "rid")


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_abort_by_rid_ends_that_request_and_says_so(client, path):
    client.engine.script.hold = True
    body = {"messages": HI, "text": "a", "stream": True}
    mine, other = (asyncio.create_task(client.post(path, body | {"rid": rid})) for rid in ("mine", "other"))
    await until(lambda: len(client.engine.live) == 2)
    assert (await client.post("/abort_request", {"rid": "mine"})).json == {"aborted": 1}
    last = (await mine).events[-2]
    if path == CHAT:
        assert last["choices"][0]["finish_reason"] == "abort"
    else:
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert not other.done()
    assert (await client.post("/abort_request", {"abort_all": True})).json == {"aborted": 1}
    await other


async def test_metrics_count_requests_tokens_and_rows_of_the_board(client):
    await client.post(CHAT, {"messages": HI})
    await client.post(CHAT, {"messages": HI, "stream": True})
    await client.post(CHAT, {})
    await client.get("/nowhere/at/all")
    answer = await client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    samples = dict(line.rsplit(" ", 1) for line in answer.body.decode().splitlines() if not line.startswith("#"))
    assert samples[f'glm53d_requests_total{{endpoint="{CHAT}",status="200"}}'] == "2.0"
    assert samples[f'glm53d_requests_total{{endpoint="{CHAT}",status="400"}}'] == "1.0"
    assert samples['glm53d_requests_total{endpoint="unknown",status="404"}'] == "1.0"
    assert samples[f'glm53d_generations_total{{endpoint="{CHAT}",reason="stop"}}'] == "2.0"
    kinds = {"prompt": "10.0", "cached": "4.0", "completion": "12.0", "reasoning": "8.0"}
    assert {kind: samples[f'glm53d_tokens_total{{kind="{kind}"}}'] for kind in kinds} == kinds
    assert samples["glm53d_ttft_seconds_count"] == "2.0"
    assert samples["glm53d_queue_seconds_sum"] == "0.0002"
    assert samples['glm53d_rank_num_running{dp_rank="0"}'] == "0.0"
    assert samples['glm53d_rank_steps_total{dp_rank="0"}'] == "12.0"
