"""The engine alone: what happens to a request that has not reached the ranks yet. [R22]"""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from glm53d.config import Config
from glm53d.errors import EngineError, InvalidRequest, NotReady, Overloaded
from glm53d.front.engine import Engine, EngineLimits, Stream
from glm53d.front.grammar import GrammarCheck
from glm53d.front.health import State, Waiting
from glm53d.front.job import Job, SamplingParams
from glm53d.front.prompt import Prompt
from glm53d.front.wire import PROBE_RID
from glm53d.ipc.records import OUTPUT, FinishReason, RecordType


class Surroundings:
    """An engine between a text half that waits for may_encode and a ring that has room when told."""

    def __init__(self) -> None:
        self.may_encode = threading.Event()
        self.has_room = True
        self.fails = False  # what makes a prompt
        self.waiting = Waiting(0, 0, 0, 0, 0)  # as the leader shows
        self.sent: list[RecordType] = []
        self.opened: list[int] = []
        self.health = SimpleNamespace(
            accepts_work=True,
            state=State.UP,
            waiting=lambda: self.waiting,
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
        text = SimpleNamespace(prepare=self._prepare, encode=self._encode, chain_seed=bytes(16))
        self.engine = Engine(Config(), None, ("nano",), {}, self.health)
        grammars = GrammarCheck(Path(), (), Config().grammar)
        self.engine.open(ends, text, pump, EngineLimits(99, 100), [], grammars)

    async def submit(self) -> "asyncio.Task[Stream]":
        """The engine's submit() as a task that has taken its slot."""
        task = asyncio.create_task(self.engine.submit(Job("mine", time.monotonic_ns(), ids=np.ones(3, np.int32))))
        await asyncio.sleep(0)
        return task

    async def burst(self) -> "list[asyncio.Task[Stream]]":
        """Those of ten requests at once that are taken, where one may run and two may wait."""
        config = self.engine.config
        limits = replace(config.scheduler, max_running_requests=1, max_waiting_requests=2)
        self.engine.config = replace(config, scheduler=limits)
        tasks = [await self.submit() for _ in range(10)]
        return [task for task in tasks if not (task.done() and isinstance(task.exception(), Overloaded))]

    def _prepare(self, job: Job, longest: int, may_truncate: bool) -> Prompt:
        assert job.rid == PROBE_RID or self.may_encode.wait(30)
        self.may_truncate = may_truncate
        if self.fails:
            raise InvalidRequest("no prompt")
        assert job.ids is not None
        return Prompt(job.ids, np.empty((0, 2), np.uint64), 0)

    def _encode(self, prompt: str, longest: int) -> np.ndarray:
        assert threading.current_thread() is not threading.main_thread()
        return np.arange(len(prompt), dtype=np.int32)

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


async def test_counting_tokens_is_not_the_event_loops_work(around):
    """[F-H10] [F-I6]"""
    assert len(await around.engine.tokenize("a prompt")) == 8


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


async def test_who_asks_for_a_probe_while_one_is_on_its_way_hears_of_that_one(around):
    """[R4] It needs no key: it must not take the slots of who has one."""
    asked = [asyncio.create_task(around.engine.health_generate()) for _ in range(50)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(around.engine.table) == 1
    asked[0].cancel()
    around.engine.fail_all(NotReady("gone"))
    around.may_encode.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(isinstance(result, NotReady) for result in results[1:]) and len(around.engine.table) == 0
    around.sent.clear()
    again = asyncio.create_task(around.engine.health_generate())
    while not around.sent:
        await asyncio.sleep(0)
    assert len(around.engine.table) == 1
    around.engine.fail_all(NotReady("gone again"))
    with pytest.raises(NotReady, match="gone again"):
        await again


async def test_a_probe_does_not_wait_for_the_making_of_prompts(around):
    """[R4]"""
    waiting = [await around.submit() for _ in range(around.engine.config.text.threads + 1)]
    asked = asyncio.create_task(around.engine.health_generate())
    while not around.sent:
        await asyncio.sleep(0)
    around.engine.fail_all(NotReady("gone"))
    around.may_encode.set()
    results = await asyncio.gather(asked, *waiting, return_exceptions=True)
    assert isinstance(results[0], NotReady)


@pytest.mark.parametrize(("start", "may_truncate"), [(None, True), (0, False)])
async def test_a_prompt_whose_logprobs_are_asked_for_loses_nothing_of_its_beginning(around, start, may_truncate):
    """They are of places in it, and `echo` says all of it."""
    around.engine.config = replace(
        around.engine.config, text=replace(around.engine.config.text, allow_auto_truncate=True)
    )
    around.may_encode.set()
    sampling = SamplingParams(top_logprobs=0, logprob_start=start)
    await around.engine.submit(Job("mine", time.monotonic_ns(), ids=np.ones(3, np.int32), sampling=sampling))
    assert around.may_truncate is may_truncate and around.engine.abort_rid("mine") == 1


async def test_of_a_burst_no_more_are_taken_than_may_run_and_wait_and_each_end_makes_room(around):
    """What the leader has not shown yet is counted, whatever ends it. [R22]"""
    tasks = await around.burst()
    assert len(tasks) == 3 and not await around.burst()
    assert around.engine.abort_rid("mine") == 3

    tasks = await around.burst()
    assert len(tasks) == 3
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    tasks, around.fails = await around.burst(), True
    assert len(tasks) == 3
    around.may_encode.set()
    assert [type(end) for end in await asyncio.gather(*tasks, return_exceptions=True)] == [InvalidRequest] * 3
    around.fails = False

    around.has_room = False
    tasks = await around.burst()
    assert len(tasks) == 3
    while len(around.opened) < 3:
        await asyncio.sleep(0)
    assert around.engine.abort_rid("mine") == 3
    around.has_room = True
    await asyncio.wait(tasks)

    tasks = await around.burst()
    await asyncio.wait(tasks)
    assert around.sent == [RecordType.GENERATE] * 3 and not await around.burst()
    for shown, num_taken in ((Waiting(2, 9, 0, 1, 3), 0), (Waiting(1, 9, 0, 1, 3), 1)):
        around.waiting = shown
        assert len(await around.burst()) == num_taken


@pytest.mark.parametrize(("reason", "stop"), [(99, -1), (int(FinishReason.STOP), 7)])
async def test_a_last_record_that_cannot_be_read_fails_its_request_and_takes_nothing_from_others(around, reason, stop):
    around.may_encode.set()
    streams = [await (await around.submit()) for _ in range(2)]
    heads = np.zeros(2, OUTPUT)
    heads["finish_reason"], heads["matched_stop"] = [reason, FinishReason.LENGTH], [stop, -1]
    nothing = b""
    around.pump.take = lambda: [
        (0, nothing, [], b"short", nothing, nothing, nothing, int(RecordType.CONTROL_RESULT), 0),
        *(
            (handle, nothing, [], head.tobytes(), nothing, nothing, nothing, 0, 0)
            for handle, head in zip(around.opened, heads, strict=True)
        ),
    ]
    around.engine.on_wake()
    with pytest.raises(Exception):  # noqa: B017  whatever reading it raises
        await streams[0].finished()
    assert (await streams[1].finished()).reason is FinishReason.LENGTH
