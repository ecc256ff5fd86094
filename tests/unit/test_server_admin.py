"""Calls that change the server's course: abort, cancel, flush, pause, continue, log level."""

import asyncio
import logging

import pytest

from tests.helpers.http import until

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("body", [b"", {}, {"rid": None}, {"rid": ""}, {"abort_all": False}])
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


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-"])
async def test_cancel_takes_the_rid_or_the_id_of_the_answer(client, prefix):
    """[R48]"""
    client.engine.script.hold = True
    request = asyncio.create_task(client.post(CHAT, {"messages": HI, "rid": "cmpl-x"}))
    await until(lambda: client.engine.live)
    answer = await client.post(f"/v1/requests/{prefix}cmpl-x/cancel", b"")
    assert answer.json == {"id": f"{prefix}cmpl-x", "cancelled": 1}
    assert (await request).json["choices"][0]["finish_reason"] == "abort"
    assert (await client.post("/v1/requests/cmpl-x/cancel", b"")).status == 404


@pytest.mark.parametrize(
    ("path", "body", "call", "answer"),
    [
        ("/flush_cache", b"", "flush_cache", {"success": True, "pages": 3}),
        ("/pause_generation", b"", "pause retract=False", {"status": "paused", "requests": 0}),
        ("/pause_generation", {"mode": "in_place"}, "pause retract=False", {"status": "paused", "requests": 0}),
        ("/pause_generation", {"mode": "retract"}, "pause retract=True", {"status": "paused", "requests": 0}),
        ("/continue_generation", {"any": 1}, "resume", {"status": "running", "requests": 0}),
    ],
)
async def test_a_control_call_goes_to_the_ranks_and_answers_with_what_they_say(client, path, body, call, answer):
    assert (await client.post(path, body)).json == answer
    assert client.engine.calls == [call]


async def test_pausing_can_abort_what_is_in_flight(client):
    client.engine.script.hold = True
    request = asyncio.create_task(client.post(CHAT, {"messages": HI}))
    await until(lambda: client.engine.live)
    assert (await client.post("/pause_generation", {"mode": "abort"})).status == 200
    assert (await request).json["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("path", ["/flush_cache", "/pause_generation", "/continue_generation"])
async def test_a_control_call_that_the_ranks_cannot_take_is_a_503(client, path):
    client.engine.state = "starting"
    assert (await client.post(path, b"")).status == 503
    assert client.engine.calls == []


async def test_the_log_level_changes_in_main_and_in_the_ranks(client):
    before = logging.getLogger().level
    try:
        assert (await client.post("/configure_logging", {"log_level": "error"})).json == {"log_level": "error"}
        assert logging.getLogger().level == logging.ERROR
    finally:
        logging.getLogger().setLevel(before)
    assert client.engine.calls == [f"set_log_level {logging.ERROR}"]
