"""A server on a fake engine, and a client for it: real HTTP on a free port of the loopback."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from glm53d.config import Config, Engine, Grammar, Model, Parallel, Server, Template
from glm53d.server.app import serve
from tests.helpers.fake_engine import FakeEngine


@dataclass
class Answer:
    """A response, read to its end."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of each event; comments are left out."""
        blocks = self.body.decode().split("\n\n")
        assert blocks[-1] == ""
        data = [block.removeprefix("data: ") for block in blocks[:-1] if block.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in data]

    @property
    def named_events(self) -> list[dict[str, Any]]:
        """The data of each event, of a dialect in which its name stands before it and is its type."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        found = []
        for block in blocks:
            if not block.startswith(":"):
                name, data = block.split("\n")
                found.append(json.loads(data.removeprefix("data: ")))
                assert name == "event: " + found[-1]["type"]
        return found


class Client:
    """Speaks to one server."""

    def __init__(self, engine: FakeEngine, port: int, session: aiohttp.ClientSession):
        self.engine = engine
        self.port = port
        self._session = session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def request(self, method: str, path: str, body: bytes | None = None, headers: dict | None = None) -> Answer:
        async with self._session.request(method, self.url + path, data=body, headers=headers) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str) -> Answer:
        return await self.request("GET", path)

    async def post(self, path: str, body: Any, headers: dict | None = None) -> Answer:
        """Post an object as JSON, or bytes as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, raw, headers)

    async def open(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection on which these bytes were sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        await writer.drain()
        return reader, writer


def raw_post(path: str, body: dict, version: str = "1.1") -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    return b"POST %b HTTP/%b\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        version.encode(),
        len(data),
        data,
    )


@asynccontextmanager
async def client_of_fake_engine(
    engine: Engine | None = None,
    model: Model | None = None,
    parallel: Parallel | None = None,
    template: Template | None = None,
    grammar: Grammar | None = None,
    **server: Any,
) -> AsyncIterator[Client]:
    """A client of a fresh server; whole sections of its config, and by keyword fields of [server]."""
    config = Config(
        server=Server(port=0, **server),
        engine=engine or Engine(),
        model=model or Model(),
        parallel=parallel or Parallel(),
        template=template or Template(),
        grammar=grammar or Grammar(),
    )
    fake = FakeEngine(config)
    http = await serve(fake, config)
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(fake, http.port, session)
    finally:
        await http.stop()


async def until(condition: Any) -> None:
    """Let the loop turn until a condition holds; the suite's timeout guards it."""
    while not condition():
        await asyncio.sleep(0.001)
