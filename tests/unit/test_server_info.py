"""What the server says about itself, and in whose words: gateways read other engines' fields."""

import re
from pathlib import Path

import pytest

from glm53d.config import Engine, Model
from glm53d.ipc.records import LOAD_ROW
from glm53d.obs.metrics import Metrics
from glm53d.version import VERSION
from tests.helpers.http import client_of_fake_engine

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready"])
async def test_health_follows_the_engine(client, path):
    assert (await client.get(path)).status == 200
    client.engine.state = "unhealthy"
    assert (await client.get(path)).status == 503
    assert (await client.get("/live")).status == 200


async def test_models_lists_every_name_and_says_what_nano_is(client):
    cards = (await client.get("/v1/models")).json["data"]
    assert [card["id"] for card in cards] == ["nano", "alias"]
    for card in cards:
        assert (card["object"], card["owned_by"], card["root"]) == ("model", "glm53d", "nano")
        assert card["max_model_len"] == 100
        assert "3 million parameters" in card["description"]
        assert (await client.get(f"/v1/models/{card['id']}")).json == card
    assert (await client.get("/v1/models/other")).error["code"] == "model_not_found"


async def test_models_says_that_a_simulation_is_one():
    async with client_of_fake_engine(engine=Engine(kind="sim")) as client:
        assert "simulated" in (await client.get("/v1/models")).json["data"][0]["description"]


async def test_the_owner_of_the_models_is_what_the_configuration_says():
    async with client_of_fake_engine(model=Model(owned_by="sglang")) as client:
        assert {card["owned_by"] for card in (await client.get("/v1/models")).json["data"]} == {"sglang"}


async def test_a_head_request_is_answered_like_its_get(client):
    """F-J2: Claude Code asks for / before its first request."""
    for path in ("/", "/health", "/v1/models"):
        answer = await client.request("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_the_engines_facts_and_the_fields_of_gateways(client, path):
    info = (await client.get(path)).json
    assert info | client.engine.server_info() == info
    wanted = {"served_model_name": "nano", "dp_size": 1, "tp_size": 1, "version": VERSION, "context_length": 100}
    assert info | wanted == info
    assert info["max_total_num_tokens"] == 2 * 100 * 64


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_says_what_kind_of_model_answers(client, path):
    info = (await client.get(path)).json
    assert info["model_type"] == "glm_moe_dsa" and info["is_generation"] is True
    assert info["served_model_name"] == "nano" and info["context_length"] == 100


async def test_the_version_is_the_packages(client):
    assert (await client.get("/version")).json == {"version": VERSION}


async def test_loads_are_the_boards_rows_and_the_same_in_gateways_words(client):
    assert (await client.get("/get_loads")).json == client.engine.loads()
    report = (await client.get("/v1/loads?include=core,disagg,queues,memory")).json
    assert report["dp_rank_count"] == 2 and [load["dp_rank"] for load in report["loads"]] == [0, 1]
    load = report["loads"][0]
    assert load["num_used_tokens"] == 5 * 64 and load["max_total_num_tokens"] == 100 * 64
    assert load["token_usage"] == 0.05 and load["cache_hit_rate"] == 0.25
    assert report["aggregate"]["num_used_tokens"] == 2 * 5 * 64
    assert load["cached_tokens_details"] == {"device": 10, "host": 4, "storage": 6}
    assert load["host_used_tokens"] == 7 * 64 and load["storage_used_tokens"] == 8 * 64
    short = (await client.get("/get_load")).json
    assert short[1] == {"dp_rank": 1, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 320}
    assert (await client.get("/loads")).status == 404


async def test_the_model_name_that_a_gateway_makes_of_none_is_taken_for_none(client):
    answer = await client.post(CHAT, {"messages": HI, "model": "unknown"})
    assert (answer.status, answer.json["model"]) == (200, "nano")
    assert (await client.post(CHAT, {"messages": HI, "model": "other"})).status == 404


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
    stages = {"parse": 1, "render": 1, "tokenize": 3, "queue": 1, "prefill": 3, "first_token": 1}
    for stage, tenths_of_ms in stages.items():
        seconds = float(samples[f'glm53d_stage_seconds_sum{{stage="{stage}"}}'])
        assert seconds == pytest.approx(2 * tenths_of_ms * 1e-4)
    assert samples['glm53d_rank_num_running{dp_rank="0"}'] == "0.0"
    assert samples['glm53d_rank_num_running{dp_rank="1"}'] == "0.0"
    assert samples["glm53d_node_steps_total"] == "12.0", "each of the two rows has the node's count"


def test_the_metrics_that_operators_are_told_of_are_there():
    row = dict.fromkeys(LOAD_ROW.names, 0)
    shown = Metrics("nano", 64, lambda: [row], dict).render().decode()
    told = set(re.findall(r"`(glm53d_[a-z0-9_]*[a-z0-9])[`{]", (ROOT / "docs" / "operate.md").read_text()))
    assert len(told) > 15
    assert "# TYPE glm53d_node_received_total counter" in shown
    assert {name for name in told if f"# TYPE {name} " not in shown} == set()
