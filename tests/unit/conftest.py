"""Unit tests that need a loop run on the daemon's: uvloop buffers, pauses and closes in a way of its own."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from tests.helpers.http import Client, client_of_fake_engine


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], uvloop.Loop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A client of a fresh server on a fake engine, both as they are without configuration."""
    async with client_of_fake_engine() as client:
        yield client
