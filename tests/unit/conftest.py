"""Unit tests that need a loop run on the daemon's: uvloop buffers, pauses and closes in a way of its own."""

from collections.abc import Callable
from typing import Any

import uvloop


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], uvloop.Loop]]:
    return {"uvloop": uvloop.new_event_loop}
