"""Control calls: what main waits for, and what the scheduler does between two steps. [R26]"""

import asyncio

import numpy as np
import pytest

from glm53d.errors import EngineError, NotReady
from glm53d.front.control import Control
from glm53d.ipc.records import CONTROL, CONTROL_RESULT, PROBE, ControlOp
from tests.helpers.sched_world import SchedWorld


class Leader:
    """Keeps what was sent and answers when told to."""

    def __init__(self, timeout_s: float = 60.0):
        self.sent: list[np.void] = []
        self.control = Control(lambda record: self.sent.append(np.frombuffer(record, CONTROL, 1)[0]), timeout_s)

    def answer(self, record: np.void, value: int = 0) -> None:
        result = np.zeros(1, CONTROL_RESULT)
        result["call_id"], result["op"], result["value"] = record["call_id"], record["op"], value
        self.control.answered(result.tobytes())


async def start(call) -> asyncio.Task:
    """The call as a task that has sent its record."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    return task


async def test_each_call_gets_the_answer_with_its_own_id():
    leader = Leader()
    flush, pause = await start(leader.control.flush_cache()), await start(leader.control.pause(retract=True))
    assert [(r["op"], r["arg"]) for r in leader.sent] == [(ControlOp.FLUSH_CACHE, 0), (ControlOp.PAUSE, 1)]
    leader.answer(leader.sent[1], 5)
    leader.answer(leader.sent[0], 9)
    assert (await flush, await pause) == (9, 5)


async def test_a_world_is_paused_from_the_answer_to_the_answer():
    leader = Leader()
    pause = await start(leader.control.pause(retract=False))
    assert not leader.control.is_paused
    leader.answer(leader.sent[0])
    await pause
    assert leader.control.is_paused
    resume = await start(leader.control.resume())
    leader.answer(leader.sent[1])
    await resume
    assert not leader.control.is_paused


async def test_a_call_without_an_answer_ends_at_its_deadline_and_a_late_one_changes_nothing():
    leader = Leader(timeout_s=0.01)
    with pytest.raises(NotReady, match="FLUSH_CACHE"):
        await leader.control.flush_cache()
    leader.answer(leader.sent[0])
    late = await start(leader.control.resume())
    leader.answer(leader.sent[1], 2)
    assert await late == 2


async def test_a_pause_that_comes_about_behind_its_deadline_is_still_known():
    leader = Leader(timeout_s=0.01)
    with pytest.raises(NotReady, match="PAUSE"):
        await leader.control.pause(retract=False)
    leader.answer(leader.sent[0])
    assert leader.control.is_paused


async def test_a_world_that_is_gone_is_an_error():
    leader = Leader()
    call = await start(leader.control.flush_cache())
    leader.control.fail_all(EngineError("rank 0 has ended"))
    with pytest.raises(EngineError, match="rank 0"):
        await call


def run_dry(world: SchedWorld) -> None:
    """Steps until nothing is left to do; the world checks the books after each."""
    while world.sched.reqs:
        world.step()
    world.step()


def test_flushing_frees_what_is_cached_and_keeps_what_runs():
    world = SchedWorld(eos_chance=0)
    world.send(1, list(range(1, 21)), 1)
    run_dry(world)
    world.send(2, list(range(21, 41)), 8)
    world.step()
    rank = world.sched.ranks[0]
    cached, held = rank.tree.evictable_pages, rank.tree.num_pages - rank.tree.evictable_pages
    assert cached > 0 and held > 0
    assert world.sched.flush_cache() == cached
    assert (rank.tree.num_pages, rank.tree.evictable_pages) == (held, 0)
    run_dry(world)
    assert len(world.received[2]) == 8 and world.is_idle()


@pytest.mark.parametrize("retract", [False, True])
def test_a_pause_plans_nothing_and_then_all_goes_on_where_it_was(retract):
    world = SchedWorld(eos_chance=0, num_pages=100)
    for handle in range(1, 5):
        world.send(handle, list(range(1, 4 + 7 * handle)), 12)
    world.step()
    world.step()
    assert world.sched.pause(retract=retract) == 4
    assert world.step() is None
    assert (world.sched.num_running == 0) == retract
    if retract:  # they give back what they held: all that is left is cached
        assert world.sched.flush_cache() > 0
        assert world.sched.ranks[0].pool.num_free == 100
    assert world.sched.resume() == 4
    run_dry(world)
    assert {handle: len(ids) for handle, ids in world.received.items()} == dict.fromkeys(range(1, 5), 12)
    assert world.is_idle()


def test_a_paused_scheduler_answers_a_probe_takes_requests_and_aborts_them():
    world = SchedWorld()
    world.sched.pause(retract=False)
    world.send(7, [1], 1, flags=PROBE)
    world.send(8, [1, 2, 3], 5)
    world.step()
    assert set(world.ended) == {7} and world.sched.num_waiting == 1
    world.sched.abort(8)
    world.step()
    assert set(world.ended) == {7, 8} and world.is_idle()
