"""Thinking budgets: the end of thinking enters like a sampled id, and the model goes on behind it. [R46]"""

import random

import pytest

from glm53d.ipc.records import STOP_BEFORE_CALLS, THINKING_FORCED, FinishReason
from tests.helpers.sched_world import SchedWorld

CALL, END = 48, 49  # of thinking


def answer(budget: int, says: list[int], flags: int = 0, **limits: int) -> tuple[SchedWorld, list[int]]:
    """What a client gets of a model that says so, then id 7 for ever; 12 tokens at most."""
    world = SchedWorld(num_pages=100, call_begin=CALL, **limits)
    script = iter(says)
    world.sample = lambda: next(script, 7)
    world.send(1, [1, 2, 3], 12, thinking_budget=budget, flags=flags)
    while world.sched.reqs or world.launched:
        world.step()
    world.step()
    assert world.is_idle() and world.sched.slots.num_thinking == 0
    return world, world.received[1]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("budget", [0, 1, 2, 4, 5])
def test_thinking_ends_where_the_budget_does_and_the_answer_goes_on(budget, max_in_flight):
    world, ids = answer(budget, [], max_in_flight=max_in_flight)
    assert ids == [7] * budget + [END] + [7] * (11 - budget)
    assert int(world.last_heads[1]["flags"]) == THINKING_FORCED and world.sched.counters.thinking_forced == 1


@pytest.mark.parametrize("says", [[END], [5, END], [5, 5, 5, END], [5, 5, 5, 5, END]])
def test_who_ends_thinking_in_time_is_left_alone(says):
    world, ids = answer(4, says)
    if len(says) <= 4:
        assert ids == says + [7] * (12 - len(says)) and world.sched.counters.thinking_forced == 0
    else:
        assert ids[:5] == [5, 5, 5, 5, END]


@pytest.mark.parametrize("says", [[CALL], [5, CALL], [5, 5, 5, CALL]])
def test_a_call_ends_thinking_where_the_request_has_tools(says):
    world, ids = answer(4, says, STOP_BEFORE_CALLS)
    assert ids == says + [7] * (12 - len(says)) and world.sched.counters.thinking_forced == 0
    assert answer(4, says)[1][4] == END, "without tools it is a word like any other"


def test_a_retracted_request_in_a_call_thinks_no_more():
    world = SchedWorld(num_pages=8, eos_chance=0, call_begin=CALL)
    world.sample = lambda: CALL if all(len(said) < 5 for said in world.received.values()) else 7
    for handle in (1, 2):
        world.send(handle, [handle] * 8, 20, thinking_budget=11, flags=STOP_BEFORE_CALLS)
    while world.sched.reqs:
        world.step()
    assert world.sched.counters.retracted >= 1 and world.sched.counters.thinking_forced == 0


def test_an_end_of_turn_at_the_last_token_allowed_ends_the_turn():
    world, ids = answer(2, [5, 0])
    assert ids == [5, 0] and world.ended[1] is FinishReason.STOP and world.sched.counters.thinking_forced == 0


def test_a_block_of_drafts_is_cut_where_the_budget_ends():
    for seed in range(8):
        world, ids = answer(5, [], num_draft_tokens=2, seed=seed)
        assert ids == [7] * 5 + [END] + [7] * 6 and int(world.last_heads[1]["flags"]) == THINKING_FORCED


def test_a_forced_end_of_thinking_is_no_draft_that_was_right():
    """[R42]"""

    class NoneRight(random.Random):
        def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
            return 0 if stop is None else super().randrange(start, stop, step)

    world = SchedWorld(eos_chance=0, num_draft_tokens=2)
    world.rng, world.sample = NoneRight(1), lambda: 7
    world.send(1, [1, 2, 3], 12, thinking_budget=3)
    while world.sched.reqs:
        world.step()
    assert int(world.last_heads[1]["flags"]) == THINKING_FORCED and int(world.last_heads[1]["num_accepted"]) == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("says", [[5, 5, CALL], [5, 5, END]])
def test_what_ends_thinking_behind_the_budget_comes_too_late_with_drafts_as_without(says, seed):
    """[R36]"""
    for drafts in (0, 3):
        world, ids = answer(2, says, STOP_BEFORE_CALLS, num_draft_tokens=drafts, seed=seed)
        assert ids[:3] == [5, 5, END] and int(world.last_heads[1]["flags"]) == THINKING_FORCED


def test_a_retracted_request_has_the_rest_of_its_budget():
    world = SchedWorld(num_pages=8, eos_chance=0)
    world.sample = lambda: 7
    for handle in (1, 2):
        world.send(handle, [handle] * 8, 20, thinking_budget=11)
    while world.sched.reqs:
        world.step()
    assert world.sched.counters.retracted >= 1 and world.received[1] == world.received[2] == [7] * 11 + [END] + [7] * 8
    assert all(int(head["flags"]) == THINKING_FORCED for head in world.last_heads.values())


def test_without_a_budget_nothing_is_forced():
    world, ids = answer(-1, [])
    assert ids == [7] * 12 and int(world.last_heads[1]["flags"]) == 0
