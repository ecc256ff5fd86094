"""The connection: who leaves, who is slow, who waits, who speaks HTTP/1.0. [R22] [R41] [R47]"""

import asyncio
import socket
import struct

import pytest

from glm53d.config import Config, Server
from glm53d.errors import ConfigError, EngineError
from glm53d.server.app import serve
from tests.helpers.http import client_of_fake_engine, raw_post, until

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
STREAM = {"messages": HI, "stream": True}


@pytest.fixture
async def client():
    async with client_of_fake_engine() as client:
        client.engine.script.hold = True
        yield client


def leave(writer: asyncio.StreamWriter, with_reset: bool) -> None:
    if with_reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort() if with_reset else writer.close()


@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(client, stream, with_reset):
    """F-A1, F-A2"""
    _, writer = await client.open(raw_post(CHAT, {"messages": HI, "stream": stream}))
    await until(lambda: client.engine.live)
    aborted = client.engine.live[0]
    leave(writer, with_reset)
    await until(lambda: aborted.aborted)
    assert client.engine.live == []
    text = (await client.get("/metrics")).body.decode()
    assert f'glm53d_requests_total{{endpoint="{CHAT}",status="499"}} 1.0' in text


async def test_a_client_that_leaves_before_its_prompt_is_ready_cancels_submit(client):
    client.engine.script.hold_submit = True
    _, writer = await client.open(raw_post(CHAT, STREAM))
    await asyncio.sleep(0.02)
    leave(writer, with_reset=False)
    await until(lambda: client.engine.submits_cancelled == 1)


async def test_frames_after_the_client_has_left_are_dropped_quietly(client):
    _, writer = await client.open(raw_post(CHAT, STREAM))
    await until(lambda: client.engine.live)
    stream = client.engine.live[0]
    await until(lambda: stream.write is not None)
    leave(writer, with_reset=True)
    await until(lambda: stream.aborted)
    stream.write(stream.frame("content", "late", []))
    assert (await client.get("/live")).status == 200


async def test_headers_and_role_leave_before_the_first_token(client):
    """F-H11"""
    client.engine.script.pieces = []
    reader, writer = await client.open(raw_post(CHAT, STREAM))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"Transfer-Encoding: chunked" in head
    assert b'"role":"assistant"' in await reader.readuntil(b"\n\n")
    assert client.engine.live[0].release.is_set() is False
    writer.close()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
async def test_a_silent_stream_gets_comments(path):
    """F-H11 [R47]"""
    async with client_of_fake_engine(keepalive_s=0.02) as client:
        client.engine.script.hold, client.engine.script.pieces = True, []
        prompt = STREAM if path == CHAT else {"prompt": "hi", "text": "hi", "stream": True}
        reader, writer = await client.open(raw_post(path, prompt))
        for _ in range(3):
            await reader.readuntil(b"\r\n: keep-alive\n\n\r\n")
        client.engine.live[0].release.set()
        tail = await reader.readuntil(b"0\r\n\r\n")
        assert b"data: [DONE]\n\n" in tail
        writer.close()


async def test_the_connection_serves_on_after_a_stream(client):
    client.engine.script.hold = False
    reader, writer = await client.open(raw_post(CHAT, STREAM))
    for _ in range(2):
        await reader.readuntil(b"\r\n\r\n")
        body = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.write(raw_post(CHAT, STREAM))
    writer.close()


async def test_http_1_0_gets_the_bare_events_and_the_end_of_the_connection(client):
    client.engine.script.hold = False
    reader, writer = await client.open(raw_post(CHAT, STREAM, version="1.0"))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"\n\ndata: [DONE]\n\n")
    writer.close()


async def test_a_slow_reader_is_told_to_the_engine_and_gets_all_in_the_end(client):
    """[R41]"""
    reader, writer = await client.open(raw_post(CHAT, STREAM))
    await until(lambda: client.engine.live)
    stream = client.engine.live[0]
    await until(lambda: stream.write is not None)
    sent = 0
    while not stream.slow:  # nobody reads: the sockets' buffers fill, then the transport's
        stream.write(stream.frame("content", "x" * 60_000, []))
        sent += 1
        await asyncio.sleep(0)
    stream.release.set()
    body = bytearray()
    while not body.endswith(b"0\r\n\r\n"):
        body += await reader.read(1 << 20)
    assert body.count(b"x" * 60_000) == sent
    assert b"data: [DONE]\n\n" in body
    assert stream.slow == [True]  # over before it had read all: there was nobody to tell
    writer.close()


async def test_a_slow_reader_that_catches_up_is_no_longer_slow(client):
    reader, writer = await client.open(raw_post(CHAT, STREAM))
    await until(lambda: client.engine.live)
    stream = client.engine.live[0]
    await until(lambda: stream.write is not None)
    for turn in (1, 2):
        while stream.slow.count(True) < turn:
            stream.write(stream.frame("content", "x" * 60_000, []))
            await asyncio.sleep(0)
        while stream.slow.count(False) < turn:
            await reader.read(1 << 20)
    assert stream.slow == [True, False, True, False]
    writer.close()


async def test_stopping_the_server_ends_every_handler():
    async with client_of_fake_engine() as client:
        client.engine.script.hold = True
        _, writer = await client.open(raw_post(CHAT, STREAM))
        await until(lambda: client.engine.live)
        stream = client.engine.live[0]
    assert stream.aborted
    writer.close()


async def test_a_port_that_is_taken_is_a_start_error():
    async with client_of_fake_engine() as client:
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{client.port}"):
            await serve(client.engine, Config(server=Server(port=client.port)))


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": STREAM["messages"]}), ("/v1/completions", {"prompt": "hi"})]
)
async def test_every_answer_says_how_long_it_waited_and_how_fast_it_came(path, body):
    """[R24]"""
    wanted = {"queue_time": 0.0001, "first_token_latency": 0.001, "decode_throughput": 500.0}
    async with client_of_fake_engine() as client:
        plain = (await client.post(path, body)).json
        events = (await client.post(path, body | {"stream": True})).events
        meta = (await client.post("/generate", {"text": "hi"})).json["meta_info"]
    assert plain["timings"] == wanted and meta | wanted == meta
    assert events[-2]["timings"] == wanted and events[-2]["choices"][0]["finish_reason"] == "stop"
    assert not any("timings" in event for event in events[:-2])


@pytest.mark.parametrize("error", [EngineError("the rank has ended"), RuntimeError("a bug")])
async def test_a_failure_before_the_first_token_is_told_in_the_stream_and_never_a_clean_end(error):
    """F-G1"""
    async with client_of_fake_engine() as client:
        client.engine.script.pieces, client.engine.script.fail = [], error
        events = (await client.post(CHAT, STREAM)).events
    assert events[-1] == "[DONE]" and events[-2]["error"]["type"] == "server_error"
    assert not any(choice["finish_reason"] for event in events[:-2] for choice in event["choices"])
