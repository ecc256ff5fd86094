"""Two steps in flight: what a step may run before the one before it has answered. [R34]"""

import pytest

from glm53d.ipc.records import FinishReason
from glm53d.sched.tiers import TierLimits
from tests.helpers.sched_world import SchedWorld


def overlapped(**limits: int) -> SchedWorld:
    return SchedWorld(eos_chance=0, max_in_flight=2, num_pages=100, **limits)


def test_a_decoding_row_goes_on_before_its_last_token_is_known():
    world = overlapped()
    world.send(1, [1, 2, 3], 50)
    prompt, first, second = world.step(), world.step(), world.step()
    assert prompt.row_prefix_len.tolist() == [0] and world.received[1] != []
    assert first.row_prefix_len.tolist() == [3] and second.row_prefix_len.tolist() == [4]
    assert world.sched.in_flight == 1 and len(world.received[1]) == 2


def test_the_token_of_a_request_that_had_ended_is_dropped_and_its_pages_are_free_at_once():
    world = overlapped(max_running=1)
    world.send(1, [1] * 8, 50)
    world.step(), world.step()
    world.sample = lambda: 0
    world.step()
    assert world.sched.in_flight == 1 and world.ended == {}, "what ends it has been sampled, and is not known"
    free = world.sched.ranks[0].pool.num_free
    world.send(2, [2], 1)
    assert world.step().row_slot.tolist() == [0] and world.ended[1] is FinishReason.STOP
    assert world.sched.ranks[0].pool.num_free > free
    assert world.sched.num_waiting == 1 and world.sched.slots.num_free == 0, "its slot has a row in flight"
    while world.sched.reqs or world.launched:
        world.step()
    assert world.ended[2] is FinishReason.STOP and world.sched.counters.dropped == 1 and world.is_idle()


def test_a_row_that_needs_its_last_tokens_value_sits_out_one_launch_and_others_do_not():
    world = overlapped()
    world.send(1, [1], 50)
    world.send(2, [2], 50)
    for _ in range(4):
        world.step()
    slot = world.sched.reqs[1].slot
    world.sched.slots.needs_value[slot] = True
    rows = [slot in world.step().row_slot for _ in range(6)]
    assert sorted(rows[:2]) == [False, True] and rows == rows[:2] * 3, "it runs in every second step"
    assert len(world.received[2]) > len(world.received[1])


def test_no_row_is_launched_for_a_token_beyond_the_last():
    world = overlapped()
    world.send(1, [1], 3)
    rows = 0
    while world.sched.reqs:
        rows += batch.num_rows if (batch := world.step()) is not None else 0
    assert rows == 3 and world.sched.counters.dropped == 0


@pytest.mark.parametrize("steps", range(1, 6))
def test_an_abort_in_any_phase_frees_pages_once_and_keeps_what_is_computed_or_launched_of_the_prompt(steps):
    """[F-A3] [F-A4] mid-chunk, with the last chunk in flight, and with tokens in flight."""
    world = overlapped(max_step_tokens=16)
    world.send(1, [1] * 40, 50)
    for _ in range(steps):
        world.step()
    slots, slot = world.sched.slots, world.sched.reqs[1].slot
    kept = max(int(slots.computed_len[slot]), min(int(slots.prefix_len[slot]), 40)) // 4
    assert kept == min(steps * 16, 40) // 4
    world.sched.abort(1)
    world.sched.check()
    assert world.sched.ranks[0].tree.num_pages == kept
    world.send(2, [1] * 40, 1)  # finds the pages while they may still be in flight, and reads its own KV in them
    while world.launched or world.sched.reqs:
        world.step()
    world.step()
    assert world.ended[1] is FinishReason.ABORT and int(world.last_heads[2]["cached_device"]) == min(kept, 9) * 4
    assert world.is_idle()


def test_pages_that_changed_hands_while_their_old_owners_row_was_in_flight_hold_the_new_owners_tokens():
    """A pool that only one of the two fits into."""
    world = SchedWorld(eos_chance=0, max_in_flight=2, num_pages=6)
    world.send(1, [1] * 16, 50)
    for _ in range(3):
        world.step()
    world.send(2, [2] * 20, 3)
    world.sched.abort(1)
    world.sched.flush_cache()
    while world.sched.reqs:
        world.step()  # reads of foreign KV fail here
    assert len(world.received[2]) == 3


def test_nobody_is_retracted_before_the_results_in_flight_have_come():
    world = SchedWorld(eos_chance=0, max_in_flight=2, num_pages=8)
    world.send(1, [1] * 8, 20)
    world.send(2, [2] * 8, 20)
    for _ in range(200):
        world.step()
    assert world.sched.counters.retracted and world.is_idle()
    assert all(world.received[h] == world.sampled[h] and len(world.sampled[h]) == 20 for h in (1, 2))


def test_rows_with_drafts_wait_for_the_result_that_says_where_they_are():
    world = overlapped(num_draft_tokens=2)
    world.send(1, [1], 50)
    while world.sched.reqs:
        batch = world.step()
        assert batch is None or not world.launched or batch is world.launched[-1][0]
        assert len(world.launched) <= 1, "its next row is planned only behind its last result"
    assert len(world.received[1]) == 50


def test_a_slot_comes_free_when_a_step_without_rows_is_the_last_that_named_it():
    """[R22] the row sits out, so only pages move; then the request is aborted."""
    tiers = TierLimits(host_pages=40, step_pages=100)
    world = SchedWorld(eos_chance=0, max_in_flight=2, max_running=1, tiers=tiers)
    world.send(1, [1] * 8, 2)
    world.step(), world.step()
    moves = world.sched.next_batch(world.now)
    assert moves is not None and not moves.num_rows and len(moves.moves)
    world.launched.append((moves, world.compute(moves), world.now))
    world.sched.abort(1)
    while world.launched:
        world.collect()
    world.send(2, [2] * 8, 2)
    for _ in range(10):
        world.step()
    assert world.ended[2] is FinishReason.LENGTH and world.is_idle()
