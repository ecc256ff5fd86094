"""Readers that stop: they cost no more than their own text, and nobody else waits for them. [R41]"""

import asyncio
import json
import socket
import time
from pathlib import Path

import aiohttp

from tests.helpers.daemon import Daemon, idle_info, memory, running

NUM_READERS = 10
NUM_TOKENS = 3000
# It stands in every event. So a stream has 12 MB, and what the kernel takes of it for a reader that stops is soon full.
NAME = "a-name-of-some-length-" * 200
BODY = {
    "prompt": "hi", "stream": True, "ignore_eos": True, "max_tokens": NUM_TOKENS,
    "stream_options": {"include_usage": True},
}  # fmt: skip
# Frames of single tokens would be 120 MB for all readers. Merged they are a text of some 15 KB each, behind what their
# transports hold: 64 KiB and what one wake brought, on a busy machine many frames. Measured: 10 MB.
MOST_GROWTH = 30 << 20


def stopped_reader(daemon: Daemon) -> socket.socket:
    """A client that has asked for a stream and reads nothing of it."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before connecting, or it is not taken
    reader.connect(("127.0.0.1", daemon.port))
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    reader.sendall(head.encode() + body)
    return reader


def read(reader: socket.socket) -> tuple[list[dict], bytes]:
    """All events of a stream, and its end."""
    reader.settimeout(120)
    data = bytearray()
    while more := reader.recv(1 << 20):
        data += more
    reader.close()
    lines = data.split(b"\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {") and line.endswith(b"}")]
    return events, bytes(data[-40:])


def text_of(events: list[dict]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def test_readers_that_stop_cost_no_more_than_their_text_and_slow_nobody(tmp_path: Path):
    fast = ("sim.base_ms=0.1", "sim.per_decode_row_us=0", f"model.name={NAME}")
    with running(*fast, config="sim.toml", log=tmp_path / "log") as daemon:
        timeout = aiohttp.ClientTimeout(total=150)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            readers = [stopped_reader(daemon) for _ in range(NUM_READERS)]
            text = text_of(read(readers[0])[0])  # all others read as well, one after the other
            assert [text_of(read(reader)[0]) for reader in readers[1:]] == [text] * (NUM_READERS - 1)
            before = memory(daemon.process.pid)
            readers = [stopped_reader(daemon) for _ in range(NUM_READERS)]
            async with http.post(daemon.url + "/v1/completions", json=BODY) as stream:  # beside them
                lines = [json.loads(line[6:]) async for line in stream.content if line.startswith(b"data: {")]
            assert text_of(lines) == text
            while (await idle_info(http, daemon.url))["loads"][0]["num_running"]:
                pass  # the engine has given all that they asked for
            assert memory(daemon.process.pid) - before < MOST_GROWTH
            for reader in readers:
                events, end = read(reader)
                assert text_of(events) == text
                assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
                assert b"data: [DONE]" in end
                assert len(events) < NUM_TOKENS  # merged, while nobody read
            info = await idle_info(http, daemon.url)
        assert info["requests_in_flight"] == 0


async def test_a_reader_that_stops_for_good_is_cut_off(tmp_path: Path):
    """Whether its answer still grows or has long been made: nothing of it is left."""
    fast = ("sim.base_ms=0.1", "sim.per_decode_row_us=0", f"model.name={NAME}", "server.send_timeout_s=1")
    with running(*fast, config="sim.toml", log=tmp_path / "log") as daemon:
        async with aiohttp.ClientSession() as http:
            reader, end = stopped_reader(daemon), time.monotonic() + 60
            while "has taken nothing for 1 s" not in daemon.log.read_text():
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            info = await idle_info(http, daemon.url)
        assert info["requests_in_flight"] == 0
        assert b"[DONE]" not in read(reader)[1], "what the kernel still had is not the whole"
