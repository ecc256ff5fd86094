"""What reaches the port and is no request: an answer in JSON, a closed connection, no traceback. [R14]"""

import asyncio
import json
import logging
import socket

import pytest

from glm53d.server.connection import MAX_HEADER_BYTES, Connection
from glm53d.server.sse import EventStream
from tests.helpers.http import raw_post

CHAT = "/v1/chat/completions"
STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4", 400, "HTTP/2 is not spoken here"),
        (b"NONSENSE\r\n\r\n", 400, "no HTTP/1.1 request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "HTTPS"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "no HTTP/1.1 request"),
        (b"GET /live HTTP/1.1\r\nno colon\r\n\r\n", 400, "no HTTP/1.1 request"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Content-Length"),
        (b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\n\r\n", 431, "over the limit"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n", 431, "over the limit"),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 200 + b"\r\n", 400, "Too many headers"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_bytes_that_are_no_request_are_refused_in_json_and_the_connection_closed(
    client, caplog, data, status, message
):
    with caplog.at_level(logging.DEBUG):
        reader, writer = await client.open(data)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # to its end: it closes
        writer.close()
    assert int(head.split()[1]) == status and b"application/json" in head
    assert message in json.loads(body)["error"]["message"]
    assert [r for r in caplog.records if r.exc_info or r.levelno > logging.DEBUG] == []
    assert (await client.get("/live")).status == 200


@pytest.mark.parametrize("data", [b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nHost: t\r\n"])
async def test_a_head_that_does_not_come_to_its_end_does_not_hold_a_connection_for_ever(client, monkeypatch, data):
    monkeypatch.setattr("glm53d.server.connection._KEEPALIVE_TIMEOUT_S", 0.05)
    reader, writer = await client.open(data)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_an_upgrade_to_http_2_is_ignored(client):
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    reader, writer = await client.open(b"GET /live HTTP/1.1\r\nHost: t\r\n" + upgrade + b"\r\n")
    assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
    writer.close()


async def test_a_header_as_long_as_agents_send_is_taken(client):
    answer = await client.request("GET", "/live", headers={"X-Long": "a" * (MAX_HEADER_BYTES - 100)})
    assert answer.status == 200


async def test_connections_do_not_wait_for_full_packets_and_live_longer_than_a_gateways_pool(client, monkeypatch):
    transports, timeouts = [], []
    made = Connection.connection_made

    def connection_made(self, transport):
        transports.append(transport)
        timeouts.append(self.keepalive_timeout)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    reader, writer = await client.open(raw_post(CHAT, STREAM))
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    sock = transports[0].get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    assert timeouts[0] > 60
    for line in (
        "Content-Type: text/event-stream",
        "Cache-Control: no-cache",
        "X-Accel-Buffering: no",
        "X-Request-Id: ",
    ):
        assert line in head
    writer.close()


async def test_a_client_that_leaves_in_the_middle_of_a_write_is_no_failure_of_ours(client, caplog, monkeypatch):
    """[R22] Between two looks at the transport: the handler is not cancelled yet when its write fails."""

    async def open(self, first):
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(EventStream, "open", open)
    reader, writer = await client.open(raw_post(CHAT, STREAM))
    assert await reader.read() == b""
    writer.close()
    assert client.engine.live == [] and caplog.records == []
    assert 'status="499"' in (await client.get("/metrics")).body.decode()
