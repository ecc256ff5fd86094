"""Where a request goes and with whom it shares pages, as bodies and headers say it. [R19] [R25] [R45]"""

import numpy as np
import pytest

from glm53d.config import Parallel
from glm53d.front.job import Routing
from glm53d.front.wire import PROBE_RID
from tests.helpers.http import Client, client_of_fake_engine

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
    "/generate": {"text": "hi"},
}
OVERRIDE = "x-override-routed-dp-rank"


@pytest.fixture
async def client():
    async with client_of_fake_engine(parallel=Parallel(tp_size=4, attn_dp_size=4)) as client:
        yield client


@pytest.fixture(params=BODIES)
def path(request):
    return request.param


async def routed(client: Client, path: str, fields: dict, headers: dict | None = None) -> Routing:
    answer = await client.post(path, BODIES[path] | fields, headers)
    assert answer.status == 200, answer.body
    return client.engine.jobs[-1].routing


async def test_without_a_word_the_scheduler_chooses(client, path):
    assert await routed(client, path, {"data_parallel_rank": None, "cache_salt": "", "extra_key": None}) == Routing()


@pytest.mark.parametrize(
    ("fields", "headers", "rank"),
    [
        ({"data_parallel_rank": 0}, {}, 0),
        ({"data_parallel_rank": 3}, {}, 3),
        ({"routed_dp_rank": 2}, {}, 2),
        ({}, {OVERRIDE: "1"}, 1),
        ({"data_parallel_rank": 3}, {OVERRIDE: "1"}, 1),
    ],
)
async def test_a_rank_is_taken_from_the_body_and_the_header_overrides_it(client, path, fields, headers, rank):
    assert (await routed(client, path, fields, headers)).dp_rank == rank


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"data_parallel_rank": 4}, {}, "data_parallel_rank"),
        ({"data_parallel_rank": -1}, {}, "data_parallel_rank"),
        ({"data_parallel_rank": "0"}, {}, "data_parallel_rank"),
        ({"routed_dp_rank": 2**31}, {}, "routed_dp_rank"),
        *(({}, {OVERRIDE: text}, OVERRIDE) for text in ("4", "-1", "", "one", "0x1", "²", "9" * 5000)),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_rank_that_is_not_there_is_refused_by_name(client, path, fields, headers, param):
    answer = await client.post(path, BODIES[path] | fields, headers)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert client.engine.jobs == []


@pytest.mark.parametrize(
    "name", ["session-id", "X-Claude-Code-Session-Id", "x-session-affinity", "X-Session-Id", "x-smg-routing-key"]
)
async def test_the_session_key_of_each_agent_is_found(client, path, name):
    """F-J4"""
    assert (await routed(client, path, {}, {name: "one"})).session == "one"


async def test_the_session_key_in_the_body_counts_first(client, path):
    """F-J4: Codex sends both."""
    assert (await routed(client, path, {"prompt_cache_key": "mine"}, {"session-id": "other"})).session == "mine"


async def test_any_bytes_make_a_session_key(client):
    reader, writer = await client.open(
        b"POST /generate HTTP/1.1\r\nHost: t\r\nsession-id: \xff\xfe\r\nContent-Length: 13\r\n\r\n" + b'{"text":"hi"}'
    )
    assert (await reader.readline()).split()[1] == b"200"
    assert 0 < client.engine.jobs[-1].routing.session_hash < 2**64
    writer.close()


async def test_salts_are_equal_only_when_both_parts_are(client, path):
    """[R19]"""
    pairs = [{}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "b"}, {"cache_salt": "ab"}]
    seeds = []
    for _ in range(2):
        seeds.append([(await routed(client, path, fields)).chain_seed(bytes(16)) for fields in pairs])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == len(pairs) and seeds[0][0] == bytes(16)


def test_a_salted_seed_depends_on_the_seed_of_the_checkpoint():
    salted = Routing(salt=b"a")
    assert salted.chain_seed(bytes(16)) != salted.chain_seed(bytes(15) + b"\1")
    assert len(np.frombuffer(salted.chain_seed(bytes(16)), np.uint64)) == 2


async def test_the_rid_of_the_health_probe_is_not_for_clients(client, path):
    """[R4] such a request would be answered without being computed."""
    answer = await client.post(path, BODIES[path] | {"rid": PROBE_RID})
    assert (answer.status, answer.error["param"]) == (400, "rid")


async def test_fields_that_say_nothing_to_us_are_taken(client, path):
    """What SDKs and gateways add of their own."""
    added = {
        "user": "u", "metadata": {"user_id": "u", "n": 1}, "store": False, "service_tier": "auto", "log_metrics": True,
        "return_entropy": False, "priority": None, "safety_identifier": "x", "verbosity": "low", "unheard_of": [1],
    }  # fmt: skip
    assert (await client.post(path, BODIES[path] | added)).status == 200


async def test_the_priority_reaches_the_engine(client, path):
    await routed(client, path, {"priority": -3})
    assert client.engine.jobs[-1].sampling.priority == -3


async def test_a_bootstrap_room_and_a_timeout_reach_the_engine(client, path):
    room = 2**63 - 1
    routing = await routed(client, path, {"bootstrap_room": room, "first_token_timeout": 2.5})
    assert (routing.bootstrap_room, routing.dp_rank) == (room, None)
    assert client.engine.jobs[-1].first_token_timeout_s == 2.5
