"""The engine alone: what happens to a request that has not reached the ranks yet. [R22]"""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from glm53d.config import Config
from glm53d.errors import EngineError, NotReady
from glm53d.front.engine import Engine, EngineLimits, Stream
from glm53d.front.grammar import GrammarCheck
from glm53d.front.health import State, Waiting
from glm53d.front.job import Job
from glm53d.front.prompt import Prompt
from glm53d.ipc.records import FinishReason, RecordType


class Surroundings:
    """An engine between a text half that waits for may_encode and a ring that has room when told."""

    def __init__(self) -> None:
        self.may_encode = threading.Event()
        self.has_room = True
        self.sent: list[RecordType] = []
        self.opened: list[int] = []
        self.health = SimpleNamespace(
            accepts_work=True,
            state=State.UP,
            waiting=lambda: Waiting(0, 0, 0),
            become=lambda *to: self.became.append(to),
        )
        self.became: list[tuple[State, str]] = []
        self.pump = pump = SimpleNamespace(
            start=lambda on_wake: None,
            stop=lambda: None,
            open=lambda handle, *spec: self.opened.append(handle),
            close=lambda handle: self.opened.remove(handle),
            take=list,
            corrupt=False,
        )
        ends = SimpleNamespace(requests=SimpleNamespace(try_write=self._try_write))
        text = SimpleNamespace(prepare=self._prepare, chain_seed=bytes(16))
        self.engine = Engine(Config(), None, ("nano",), {}, self.health)
        grammars = GrammarCheck(Path(), (), Config().grammar)
        self.engine.open(ends, text, pump, EngineLimits(99, 100), [], grammars)

    async def submit(self) -> "asyncio.Task[Stream]":
        """The engine's submit() as a task that has taken its slot."""
        task = asyncio.create_task(self.engine.submit(Job("mine", time.monotonic_ns(), ids=np.ones(3, np.int32))))
        await asyncio.sleep(0)
        return task

    def _prepare(self, job: Job, longest: int, may_truncate: bool) -> Prompt:
        assert self.may_encode.wait(30)
        assert job.ids is not None
        return Prompt(job.ids, np.empty((0, 2), np.uint64), 0)

    def _try_write(self, kind: RecordType, parts: list[bytes]) -> bool:
        if self.has_room:
            self.sent.append(kind)
        return self.has_room


@pytest.fixture
async def around():
    around = Surroundings()
    yield around
    around.may_encode.set()
    around.engine.close()


async def test_an_abort_while_the_prompt_is_made_ends_as_an_abort_and_sends_nothing(around):
    task = await around.submit()
    assert around.engine.abort_rid("mine") == 1
    around.may_encode.set()
    finish = await (await task).finished()
    assert (finish.reason, finish.usage.completion_tokens) == (FinishReason.ABORT, 0)
    assert around.sent == [] and around.opened == [] and len(around.engine.table) == 0


async def test_an_abort_while_the_ring_is_full_ends_as_an_abort_and_sends_nothing(around):
    around.has_room = False
    around.may_encode.set()
    task = await around.submit()
    while not around.opened:
        await asyncio.sleep(0)
    assert around.engine.abort_rid(None) == 1
    around.has_room = True
    finish = await (await task).finished()
    assert (finish.reason, finish.usage.prompt_tokens) == (FinishReason.ABORT, 3)
    assert around.sent == [] and around.opened == [] and len(around.engine.table) == 0


async def test_a_request_whose_prompt_is_made_when_the_ranks_die_fails(around):
    task = await around.submit()
    around.engine.fail_all(NotReady("gone"))
    around.may_encode.set()
    with pytest.raises(NotReady, match="gone"):
        await task
    assert len(around.engine.table) == 0


async def test_an_output_ring_that_cannot_be_read_fails_who_waits_and_shows_in_health(around):
    around.may_encode.set()
    stream = await (await around.submit())
    around.pump.corrupt = True
    around.engine.on_wake()
    with pytest.raises(EngineError, match="output ring cannot be read"):
        await stream.finished()
    assert [state for state, _ in around.became] == [State.UNHEALTHY] and len(around.engine.table) == 0
