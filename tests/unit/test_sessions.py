"""A session's prefix is kept between a tool call and its result. [R45]"""

import numpy as np

from glm53d.ipc.records import HELPER
from glm53d.kv.prefix import PrefixTree
from glm53d.sched.sessions import MAX_CHAINS, Sessions
from tests.helpers.sched_world import SchedWorld

CALLS_END, OTHER_END = 0, 9


def world_of(last_id: int = CALLS_END, **limits: int | tuple[int, ...]) -> SchedWorld:
    """Sixteen pages, of which sessions may keep eight for 100 ns; each answer is one id."""
    world = SchedWorld(**{"num_pages": 16, "session_ttl_ns": 100, "max_session_pages": 8} | limits)
    world.sample = lambda: last_id
    return world


def run(world: SchedWorld, handle: int, first: int, length: int, **fields: int) -> int:
    """One request from its arrival to its end; the tokens it found."""
    world.send(handle, [first] * length, 1, **fields)
    while world.sched.reqs:
        world.step()
    return int(world.last_heads[handle]["cached_device"])


def test_what_a_turn_with_calls_has_computed_is_there_for_the_next_one_whoever_came_between():
    world = world_of()
    run(world, 1, 1, 20, session=5)
    for handle in range(2, 8):
        run(world, handle, handle, 28)
    assert run(world, 8, 1, 24, session=5) == 20
    assert (world.sched.sessions.counters.kept, world.sched.sessions.counters.resumed) == (2, 1)


def test_the_end_of_the_only_call_is_the_end_of_a_turn_with_calls():
    """A stop id, where a request allows one call."""
    for call_end, num_kept in ((7, 1), (8, 0)):
        world = world_of(7, calls_ends=(CALLS_END, call_end))
        world.send(1, [1] * 20, 9, session=5, stop_ids=[7])
        while world.sched.reqs:
            world.step()
        assert len(world.received[1]) == 1 and len(world.sched.sessions) == num_kept


def test_a_turn_that_ends_otherwise_a_helpers_and_one_without_session_are_not_kept():
    world = world_of(OTHER_END)
    run(world, 1, 1, 20, session=5)
    assert len(world.sched.sessions) == 0
    world = world_of()
    run(world, 1, 1, 20, session=5, flags=HELPER)
    run(world, 2, 1, 20)
    assert len(world.sched.sessions) == 0


def test_a_helper_of_the_session_leaves_what_is_kept_alone():
    """[F-J3]"""
    world = world_of()
    run(world, 1, 1, 20, session=5)
    run(world, 2, 2, 8, session=5, flags=HELPER)
    assert len(world.sched.sessions) == 1 and world.sched.sessions.counters.resumed == 0


def test_a_sub_agent_with_the_sessions_key_leaves_what_its_agent_will_go_on_from():
    world = world_of(num_pages=30, max_session_pages=30)
    run(world, 1, 1, 40, session=5)
    run(world, 2, 2, 8, session=5)
    assert (len(world.sched.sessions), world.sched.sessions.counters.resumed) == (2, 0)
    for handle in (3, 4):
        run(world, handle, handle, 50)
    assert run(world, 5, 2, 12, session=5) == 8
    assert run(world, 6, 1, 44, session=5) == 40
    assert world.sched.sessions.counters.resumed == 2


def test_a_session_keeps_a_few_prefixes_the_latest_and_of_each_what_goes_on_from_it():
    world = world_of(num_pages=100, max_session_pages=100)
    for first in range(1, MAX_CHAINS + 3):
        run(world, first, first, 20, session=5)
    assert len(world.sched.sessions) == MAX_CHAINS and world.sched.sessions.counters.evicted == 2
    for handle in (20, 21):  # the latest goes on: what it said takes the place of what it had said
        run(world, handle, MAX_CHAINS + 2, 4 * handle, session=5)
    assert len(world.sched.sessions) == MAX_CHAINS and world.sched.sessions.counters.evicted == 2
    assert world.sched.flush_cache() and world.is_idle()


def test_what_is_too_long_to_be_kept_leaves_what_others_keep():
    world = world_of(num_pages=40)
    run(world, 1, 1, 16, session=1)
    run(world, 2, 2, 40, session=2)
    assert len(world.sched.sessions) == 1 and world.sched.sessions.counters.evicted == 0
    assert run(world, 3, 1, 20, session=1) == 16


def test_a_turn_goes_to_the_rank_that_keeps_what_it_goes_on_from():
    trees = [PrefixTree(), PrefixTree()]
    sessions = Sessions(trees, 100, 8)
    chains = [np.arange(first, first + 8, dtype=np.uint64).reshape(4, 2) for first in (10, 20)]
    for rank, hashes in enumerate(chains):
        node, _ = trees[rank].insert(0, hashes, np.arange(4, dtype=np.int32), 1)
        sessions.keep(5, rank, node, hashes, 3, 0)
    longer = [np.concatenate([hashes, hashes + 100]) for hashes in chains]
    assert [sessions.rank_of(5, hashes) for hashes in longer] == [0, 1]
    assert sessions.rank_of(5, chains[1][:2]) == sessions.rank_of(6, longer[0]) == -1
    changed = np.concatenate([chains[1][:3], chains[1][3:] + 100])  # its answer came back without its thoughts
    assert sessions.rank_of(5, changed) == 1
    sessions.resume(5, changed)
    assert len(sessions) == 1


def test_what_is_kept_makes_nobody_wait():
    world = world_of()
    run(world, 1, 1, 20, session=5)
    run(world, 2, 2, 62)
    assert world.sched.sessions.counters.evicted == 1 and world.sched.counters.retracted == 0


def test_a_session_that_does_not_come_back_in_time_is_forgotten_and_a_waiting_turn_counts_as_back():
    world = world_of(max_running=1)
    run(world, 1, 1, 20, session=5)
    world.now += 90
    world.sched.sessions.touch(5, world.now)
    world.now += 90
    world.step()
    assert len(world.sched.sessions) == 1
    world.now += 20
    world.step()
    assert len(world.sched.sessions) == 0 and world.sched.sessions.counters.expired == 1 and world.is_idle()


def test_sessions_keep_no_more_than_their_share_the_longest_unused_goes_first():
    world = world_of()
    for handle in (1, 2, 3):
        run(world, handle, handle, 16, session=handle)
    assert world.sched.sessions.counters.evicted == 1
    assert [run(world, 10 + h, h, 20, session=h) for h in (2, 3)] == [16, 16]


def test_a_flushed_cache_keeps_nothing():
    world = world_of()
    run(world, 1, 1, 20, session=5)
    assert world.sched.flush_cache() == 5 and world.is_idle()
