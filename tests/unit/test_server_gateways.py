"""What gateways in front of us rely on: sglang-router and smg, as they were seen to send and read. One test a line."""

import pytest

from glm53d.errors import NotReady, Overloaded
from tests.helpers.http import client_of_fake_engine, raw_post

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
KEY = {"Authorization": "Bearer k"}
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}, NATIVE: {"text": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 5}, RESPONSES: {"input": "hi"},
}  # fmt: skip

# What sglang-router writes into every body, whatever the client sent.
ADDED = {
    CHAT: {
        "model": "unknown", "logprobs": False, "stream": False, "no_stop_trim": False, "ignore_eos": False,
        "continue_final_message": False, "skip_special_tokens": True, "separate_reasoning": True,
        "stream_reasoning": True, "return_hidden_states": False,
    },
    TEXT: {"model": "unknown", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0},
    MESSAGES: {"model": "unknown", "stream": False},
    RESPONSES: {
        "model": "unknown", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0,
        "priority": 0, "stream": None,
    },
    NATIVE: {
        "log_metrics": True, "background": False, "no_logs": False, "return_bytes": False, "return_entropy": False,
        "stream": False, "return_logprob": False, "return_hidden_states": False,
    },
}  # fmt: skip


@pytest.fixture
async def client():
    async with client_of_fake_engine(api_keys=("k",)) as client:
        yield client


async def test_health_is_open_and_says_503_while_no_work_is_taken(client):
    assert (await client.get("/health")).status == 200
    for state in ("starting", "draining"):
        client.engine.state = state
        assert (await client.get("/health")).status == 503


async def test_what_they_ask_a_worker_for_is_there(client):
    for path in (
        "/v1/models", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/version",
        "/v1/loads?include=core,disagg,queues,memory", "/get_load", "/metrics",
    ):  # fmt: skip
        assert (await client.request("GET", path, headers=KEY)).status == 200, path
    metrics = (await client.request("GET", "/metrics", headers=KEY)).body.decode()
    for rank in (0, 1):
        labels = f'{{engine="{rank}",model_name="nano"}}'
        assert f"vllm:num_requests_running{labels} 0.0\n" in metrics
        assert f"vllm:num_requests_waiting{labels} 0.0\n" in metrics
        assert f"vllm:kv_cache_usage_perc{labels} 0.05\n" in metrics
        pool = f'block_size="64",engine="{rank}",model_name="nano",num_gpu_blocks="100"'
        assert f"vllm:cache_config_info{{{pool}}} 1.0\n" in metrics
    card = (await client.request("GET", "/v1/models", headers=KEY)).json["data"][0]
    assert card["id"] and card["root"] and card["max_model_len"] and card["owned_by"]


@pytest.mark.parametrize("path", BODIES)
async def test_the_fields_they_add_are_taken(client, path):
    answer = await client.post(path, BODIES[path] | ADDED[path], KEY)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("path", BODIES)
async def test_null_is_taken_for_every_optional_field(client, path):
    schemas = (await client.request("GET", "/openapi.json", headers=KEY)).json
    body = schemas["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    names = schemas["components"]["schemas"][body.rpartition("/")[2]]["properties"]
    answer = await client.post(path, dict.fromkeys(names) | BODIES[path], KEY)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_may_name_its_rank(client, path):
    assert (await client.post(path, BODIES[path] | {"data_parallel_rank": 0}, KEY)).status == 200
    assert client.engine.jobs[-1].routing.dp_rank == 0


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=3), NotReady("loading", retry_after_s=3)])
@pytest.mark.parametrize("path", BODIES)
async def test_a_refusal_that_they_retry_elsewhere_is_json_and_says_when_to_come_back(client, path, error):
    client.engine.script.refuse = error
    answer = await client.post(path, BODIES[path], KEY)
    assert (answer.status, answer.headers["Retry-After"]) == (error.status, "3")
    assert answer.error["code"] == error.code


async def test_each_event_of_a_stream_is_a_write_of_its_own(client):
    request = raw_post(CHAT, {"messages": HI, "stream": True}).replace(
        b"Host: t", b"Host: t\r\nAuthorization: Bearer k"
    )
    reader, writer = await client.open(request)
    assert b"X-Accel-Buffering: no" in await reader.readuntil(b"\r\n\r\n")
    role = await reader.readuntil(b"\n\n\r\n")
    size, _, event = role.partition(b"\r\n")
    assert int(size, 16) == len(event) - 2 and event.count(b"data: ") == 1
    writer.close()


async def test_a_flush_is_answered(client):
    assert (await client.post("/flush_cache", b"", KEY)).status == 200
