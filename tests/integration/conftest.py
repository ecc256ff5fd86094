"""Daemons that the integration tests share, and a client for them."""

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.helpers.daemon import Daemon, running, scripted

AGENT_TURN = (
    "They want to know which files there are, so I list them.</think>I look at the files first."
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls -la src</arg_value></tool_call><|observation|>"
)


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """conf/sim.toml with short steps and the books checked after each."""
    log = tmp_path_factory.mktemp("sim") / "log"
    overrides = ("sim.base_ms=0.5", "sim.per_prefill_token_us=1", "scheduler.debug_checks=true", "kv.page_size=16")
    with running(*overrides, config="sim.toml", log=log) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The built-in model, as `python glm53d.py` starts it, on a free port."""
    log = tmp_path_factory.mktemp("nano") / "log"
    with running("kv.num_pages=256", "kv.page_size=16", "scheduler.debug_checks=true", log=log) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Every answer of its engine thinks, says a word and calls a tool: one turn of an agent's loop."""
    with scripted(AGENT_TURN, log=tmp_path_factory.mktemp("agent") / "log") as daemon:
        yield daemon


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without limits of its own."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session
