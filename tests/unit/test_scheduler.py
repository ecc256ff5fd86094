"""What the scheduler promises, case by case."""

import numpy as np
import pytest

from glm53d.ipc.batch import Mode, StepResult
from glm53d.ipc.records import HELPER, IGNORE_EOS, PROBE, FinishReason
from glm53d.sched import policy, results
from glm53d.sched.placement import POLICIES, RankLoad, least_cost
from glm53d.sched.req import Req, ReqState
from glm53d.sched.scheduler import Scheduler
from tests.helpers.sched_world import SchedWorld, generate_record


def run_dry(world: SchedWorld, steps: int = 500) -> None:
    for _ in range(steps):
        world.step()
        if not world.sched.reqs:
            world.step()
            return
    raise AssertionError("requests are left")


def test_a_long_prompt_is_cut_into_chunks_of_the_budget():
    """[R29]"""
    world = SchedWorld(max_step_tokens=16)
    world.send(1, list(range(1, 41)), 2)
    lengths = [int(batch.row_extend_len[0]) for _ in range(3) if (batch := world.step())]
    assert lengths == [16, 16, 8]


def test_a_second_prompt_reuses_the_pages_of_the_first_while_that_still_runs():
    """[R27] pages are shared from the moment a chunk is computed."""
    world = SchedWorld(num_pages=100, eos_chance=0)
    world.send(1, [7] * 17, 60)
    world.step()
    world.send(2, [7] * 17, 3)
    batch = world.step()
    assert int(batch.row_prefix_len[1]) == 16 and int(batch.row_extend_len[1]) == 1
    run_dry(world)
    assert int(world.last_heads[2]["cached_device"]) == 16


def test_a_full_cache_hit_leaves_one_token_to_compute():
    """[R27] its logits are the answer."""
    world = SchedWorld()
    world.send(1, [5] * 16, 1)
    run_dry(world)
    world.send(2, [5] * 16, 1)
    batch = world.step()
    assert int(batch.row_prefix_len[0]) == 12 and int(batch.row_extend_len[0]) == 4


def test_two_requests_with_one_prompt_computed_at_once_keep_one_copy_of_its_pages():
    world = SchedWorld(num_pages=100, eos_chance=0)
    world.send(1, [3] * 8, 50)
    world.send(2, [3] * 8, 50)
    world.step()
    assert world.sched.ranks[0].tree.num_pages == 2
    world.step()  # reads through the swapped table
    world.sched.abort(1), world.sched.abort(2)
    assert world.is_idle()


def test_a_request_that_outgrows_the_pool_alone_ends_with_length():
    """[F-I2]"""
    world = SchedWorld(num_pages=5, eos_chance=0, max_context_len=1000)
    world.send(1, [1] * 9, 1000)
    run_dry(world)
    assert world.ended[1] is FinishReason.LENGTH and len(world.received[1]) == 5 * 4 - 9 and world.is_idle()


def test_a_retracted_request_goes_on_where_it_was_and_its_cached_tokens_stay():
    """[R30] [F-D7]"""
    world = SchedWorld(num_pages=8, eos_chance=0)
    world.send(1, [1] * 8, 20)
    world.send(2, [2] * 8, 20)
    run_dry(world)
    assert world.sched.counters.retracted >= 1
    assert len(world.received[1]) == len(world.received[2]) == 20
    assert all(int(world.last_heads[h]["cached_device"]) == 0 for h in (1, 2))
    assert max(int(world.last_heads[h]["num_retractions"]) for h in (1, 2)) >= 1


def test_a_prompt_that_can_never_fit_is_answered_with_an_error():
    world = SchedWorld(num_pages=4)
    world.send(1, [1] * 16, 1)
    world.step()
    assert world.ended[1] is FinishReason.ERROR and world.is_idle()


@pytest.mark.parametrize("drafts", [0, 2])
def test_who_wants_no_token_gets_the_end_when_the_prompt_is_computed(drafts):
    world = SchedWorld(num_pages=100, num_draft_tokens=drafts)
    world.send(1, [7] * 17, 0)
    run_dry(world)
    assert (world.ended[1], world.received[1]) == (FinishReason.LENGTH, []) and world.is_idle()
    assert world.sched.counters.prefill_tokens == 17 and int(world.last_heads[1]["num_accepted"]) == 0


def test_an_end_of_turn_id_ends_unless_it_is_to_be_ignored():
    world = SchedWorld()
    world.sample = lambda: 0
    world.send(1, [1, 2], 5)
    world.send(2, [1, 2], 5, flags=IGNORE_EOS)
    run_dry(world)
    assert (world.ended[1], world.received[1]) == (FinishReason.STOP, [0])
    assert (world.ended[2], world.received[2]) == (FinishReason.LENGTH, [0] * 5)
    assert int(world.last_heads[1]["matched_id"]) == 0 and int(world.last_heads[2]["matched_id"]) == -1


def test_a_stop_id_of_the_request_ends_it():
    world = SchedWorld()
    world.sample = lambda: 9
    world.receive(1, [1], [], generate_record(1, [1], 5, stop_ids=(8, 9)))
    run_dry(world)
    assert world.ended[1] is FinishReason.STOP and world.received[1] == [9]


def test_a_stop_id_does_not_end_a_request_before_its_min_new_tokens():
    world = SchedWorld()
    world.sample = lambda: 9
    world.receive(1, [1], [], generate_record(1, [1], 8, stop_ids=(9,), min_new_tokens=4))
    run_dry(world)
    assert world.ended[1] is FinishReason.STOP and world.received[1] == [9] * 4


def test_a_block_of_tokens_is_cut_at_the_first_end_of_turn():
    """[F-D3] what comes after is neither counted nor sent."""
    world = SchedWorld()
    world.send(1, [1, 2, 3], 10)
    batch = world.sched.next_batch(world.now)
    results.apply(
        world.sched, batch, StepResult(1, np.array([3], np.int32), np.array([[7, 0, 8]], np.int32)), world.now
    )
    world.deliver()
    assert world.received[1] == [7, 0] and world.ended[1] is FinishReason.STOP


def test_a_block_of_tokens_is_cut_at_max_new_tokens():
    world = SchedWorld()
    world.send(1, [1, 2, 3], 2)
    batch = world.sched.next_batch(world.now)
    results.apply(
        world.sched, batch, StepResult(1, np.array([3], np.int32), np.array([[7, 6, 5]], np.int32)), world.now
    )
    world.deliver()
    assert world.received[1] == [7, 6] and world.ended[1] is FinishReason.LENGTH


def test_an_interval_sends_the_first_token_at_once_and_then_every_so_many():
    """[R37]"""
    world = SchedWorld(eos_chance=0)
    world.send(1, [1], 12, stream_interval=5)
    arrived = []
    for _ in range(13):
        world.step()
        arrived.append(len(world.received[1]))
    assert arrived == [1, 1, 1, 1, 1, 6, 6, 6, 6, 6, 11, 12, 12]


def test_nothing_overtakes_a_large_request_at_the_head_of_the_queue():
    """[R28] no starvation behind many small ones."""
    world = SchedWorld(num_pages=20, eos_chance=0, max_running=8)
    world.send(1, [1] * 40, 20)
    world.step()
    world.send(2, [2] * 60, 1)  # needs more than what is left
    world.send(3, [3] * 4, 1)
    for _ in range(5):
        world.step()
    assert world.sched.num_waiting == 2
    run_dry(world)
    assert len(world.received[2]) == 1


def test_a_head_that_must_go_to_a_full_rank_holds_up_only_those_for_that_rank():
    """[R25] [R28] nor do those that go past it take the room it waits for."""
    world = SchedWorld(attn_dp_size=2, num_pages=24, eos_chance=0)
    world.send(1, [1] * 40, 40, dp_rank=0)
    world.step()
    world.send(2, [2] * 80, 1, dp_rank=0)
    for handle in range(3, 30):
        world.send(handle, [handle] * 4, 2)
    world.send(30, [30] * 4, 2, dp_rank=0)
    while 1 in world.sched.reqs:
        world.step()
    assert world.ended.keys() == {1, *range(3, 30)}
    assert all(int(world.last_heads[handle]["dp_rank"]) == 1 for handle in range(3, 30))
    run_dry(world)
    assert world.ended.keys() == set(range(1, 31)) and world.last_heads[2]["dp_rank"] == 0


def test_a_head_that_any_rank_may_take_holds_up_those_for_a_rank_with_room_too():
    """[R28] who came first goes first."""
    world = SchedWorld(attn_dp_size=2, num_pages=20, eos_chance=0)
    for rank in (0, 1):
        world.send(1 + rank, [1 + rank] * 40, 20, dp_rank=rank)
    world.step()
    world.send(3, [3] * 60, 1)
    world.send(4, [4] * 4, 1, dp_rank=1)
    for _ in range(5):
        world.step()
    assert world.sched.num_waiting == 2
    run_dry(world)


def test_a_higher_priority_is_admitted_first():
    world = SchedWorld(max_running=1)
    world.send(1, [1], 1)
    world.send(2, [2], 1)
    world.send(3, [3], 1, priority=5)
    order = []
    for _ in range(8):
        world.step()
        order += [h for h in world.ended if h not in order]
    assert order == [3, 1, 2]


@pytest.mark.parametrize(("later_ns", "order"), [(9, [2, 1]), (11, [1, 2])])
def test_a_level_of_priority_is_a_head_start_and_no_more(later_ns, order):
    """[R28] who waited longer than that goes first, whatever the other's priority."""
    world = SchedWorld(max_running=1, ageing_ns=10)
    world.send(1, [1], 1, arrival_ns=100)
    world.send(2, [2], 1, arrival_ns=100 + later_ns, priority=1)
    run_dry(world)
    assert list(world.ended) == order


def test_a_helper_goes_behind_the_main_request_that_comes_after_it():
    """[F-J3]"""
    world = SchedWorld(max_running=1)
    world.send(1, [1], 1, flags=HELPER)
    world.send(2, [2], 1)
    run_dry(world)
    assert list(world.ended) == [2, 1]


def test_a_request_that_waits_too_long_is_given_up_and_a_retracted_one_is_not():
    world = SchedWorld(max_running=1, eos_chance=0, queue_timeout_ns=5)
    world.send(1, [1], 20)
    world.send(2, [2], 1)
    run_dry(world)
    assert world.ended == {2: FinishReason.ERROR, 1: FinishReason.LENGTH} and world.sched.counters.expired == 1
    world = SchedWorld(num_pages=8, eos_chance=0, queue_timeout_ns=3)
    world.send(1, [1] * 8, 20)
    world.send(2, [2] * 8, 20)
    run_dry(world)
    assert world.sched.counters.retracted and set(world.ended.values()) == {FinishReason.LENGTH}


def test_a_deadline_that_passes_before_the_first_token_ends_the_request_even_between_chunks():
    world = SchedWorld(eos_chance=0, max_step_tokens=16, num_pages=100)
    world.send(1, [1] * 100, 5, deadline_ns=world.now + 4)
    world.send(2, [2] * 4, 5, deadline_ns=world.now + 40)
    run_dry(world)
    assert (world.ended[1], world.ended[2]) == (FinishReason.ERROR, FinishReason.LENGTH) and world.is_idle()
    assert world.received[1] == [] and world.sched.ranks[0].tree.num_pages >= 16, "computed chunks stay cached"


def test_a_deadline_that_cannot_be_met_behind_others_at_the_measured_rate_is_refused_at_once():
    world = SchedWorld(eos_chance=0, num_pages=200, step_ns=lambda batch: 1000 * batch.num_tokens)
    world.send(1, [1] * 40, 1)
    run_dry(world)
    world.send(5, [5], 1)
    world.send(2, [2] * 40, 1, deadline_ns=world.now + 30_000)
    world.send(3, [3] * 40, 1, deadline_ns=world.now + 100_000)
    world.send(4, [1] * 41, 1, deadline_ns=world.now + 30_000)  # but the prefix is there
    run_dry(world)
    assert [world.ended[h] for h in (2, 3, 4)] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]


def test_short_prompts_make_no_machine_look_slow():
    """A step has a fixed cost, so its speed shows in full ones: a deadline that can be met is tried."""
    world = SchedWorld(
        eos_chance=0, num_pages=2000, page_size=16, max_context_len=20_000, max_step_tokens=4096,
        step_ns=lambda batch: 5_000_000 + 20_000 * batch.num_tokens,
    )  # fmt: skip
    for handle in range(1, 61):
        world.send(handle, [handle % 49] * 20, 1)
        run_dry(world)
    world.send(100, [2] * 15_000, 1, deadline_ns=world.now + 2_000_000_000)
    run_dry(world)
    assert world.ended[100] is FinishReason.LENGTH
    for handle in range(101, 161):
        world.send(handle, [handle % 49] * 20, 1)
        run_dry(world)
    assert world.sched.prefill_rate.per_second == pytest.approx(4096 / 0.087, rel=0.01)
    world.send(199, [3], 1)
    world.send(200, [3] * 15_000, 1, deadline_ns=world.now + 200_000_000)
    batch = world.step()
    assert batch is not None and batch.num_tokens == 1 and world.ended[200] is FinishReason.ERROR
    run_dry(world)


def test_one_slow_step_does_not_refuse_deadlines_for_ever():
    """Who has no prompt before it is tried, whatever was measured, and by that is measured anew."""
    slow = [100_000]
    world = SchedWorld(eos_chance=0, num_pages=200, step_ns=lambda batch: slow.pop() if slow else 1)
    world.send(1, [1] * 60, 1)
    run_dry(world)
    assert world.sched.prefill_rate.ns_of(60) > 100_000
    for handle in range(2, 40):
        world.send(handle, [handle] * 60, 1, deadline_ns=world.now + 100_000)
        run_dry(world)
        assert world.ended[handle] is FinishReason.LENGTH


def test_a_deadline_for_the_first_token_is_none_for_an_answer_that_begins_behind_forced_thinking():
    """Its tokens are computed again then, as a prompt's are."""
    world = SchedWorld(eos_chance=0)
    world.sample = lambda: 7
    world.send(1, [1] * 8, 40, deadline_ns=world.now + 5, thinking_budget=10)
    run_dry(world)
    assert world.ended[1] is FinishReason.LENGTH and len(world.received[1]) == 40


def test_a_deadline_holds_for_who_waits_again_before_its_first_token():
    world = SchedWorld(eos_chance=0, num_pages=30, max_context_len=116)
    world.send(1, [1] * 80, 5, deadline_ns=12)
    world.step()
    world.pause(retract=True)
    while world.now < 15:
        world.step()
    assert world.ended[1] is FinishReason.ERROR and world.sched.counters.expired == 1


def test_who_waits_for_the_first_answers_prompt_does_not_wait_in_the_queue():
    """[R20] the prompt takes longer than anything may wait."""
    world = SchedWorld(eos_chance=0, queue_timeout_ns=10, step_ns=lambda batch: 5, num_pages=80, max_context_len=200)
    for handle in (1, 2, 3):
        world.send(handle, [i % 40 for i in range(100)], 3, group=1)
    run_dry(world)
    assert set(world.ended.values()) == {FinishReason.LENGTH} and len(world.ended) == 3


def test_who_may_run_behind_the_first_answers_prompt_waits_no_longer_than_others():
    world = SchedWorld(eos_chance=0, queue_timeout_ns=10, max_running=1)
    for handle in (1, 2):
        world.send(handle, [1] * 8, 30, group=1)
    run_dry(world)
    assert (world.ended[1], world.ended[2]) == (FinishReason.LENGTH, FinishReason.ERROR)


def test_waiting_tokens_are_those_that_must_be_computed():
    """[R8]"""
    world = SchedWorld(max_running=1, eos_chance=0, num_pages=100)
    world.send(1, [7] * 17, 30)
    world.step()
    world.send(2, [7] * 20, 1)
    assert world.sched.waiting.num_tokens == 20 - 16
    world.sched.abort(2)
    assert world.sched.waiting.num_tokens == 0


def test_an_abort_of_a_waiting_request_answers_and_takes_nothing_with_it():
    """[R22]"""
    world = SchedWorld(max_running=1, eos_chance=0)
    world.send(1, [1], 50)
    world.step()
    for handle in (2, 3, 4):
        world.send(handle, [handle], 2)
    world.sched.abort(3)
    world.deliver()
    assert world.ended[3] is FinishReason.ABORT and world.sched.num_waiting == 2
    run_dry(world)
    assert len(world.received[2]) == len(world.received[4]) == 2


def test_an_unknown_handle_is_counted_as_stale():
    """[R12]"""
    world = SchedWorld()
    world.sched.abort(77)
    assert world.sched.counters.stale == 1


def test_a_probe_is_answered_without_a_step_while_others_run():
    """[R4]"""
    world = SchedWorld(eos_chance=0)
    world.send(1, [1], 50)
    world.step()
    world.send(2, [2], 1, flags=PROBE)
    world.deliver()
    assert world.ended[2] is FinishReason.STOP and world.sched.num_running == 1


def test_a_resumed_request_goes_on_from_the_ids_it_had_put_out():
    """[R53]"""
    world = SchedWorld(eos_chance=0)
    world.receive(1, [1, 2, 3], [7, 8], generate_record(1, [1, 2, 3], 5, output=[7, 8], cached_device=0))
    run_dry(world)
    assert len(world.received[1]) == 5 and world.received[1][:2] == [7, 8]
    assert int(world.last_heads[1]["num_prompt_ids"]) == 3


def test_a_state_that_may_not_follow_raises():
    req = Req.from_record(generate_record(1, [1], 1), 0, 0)
    with pytest.raises(AssertionError):
        req.become(ReqState.DECODE)


def test_aborts_deep_in_a_blocked_queue_do_not_pile_up():
    """[F-I7]"""
    world = SchedWorld(max_running=1, eos_chance=0)
    world.send(1, [1], 100)
    world.step()
    world.send(2, [2], 1)
    for handle in range(3, 1000):
        world.send(handle, [3], 1)
        world.sched.abort(handle)
    assert sum(map(len, world.sched.waiting._heaps.values())) < 200


@pytest.mark.parametrize(
    ("loads", "best"),
    [
        ([RankLoad(0, 0, 0), RankLoad(0, 0, 64)], 1),  # a cached prefix wins between idle ranks [F-I3]
        ([RankLoad(0, 0, 0), RankLoad(500, 0, 64)], 0),  # but not when it saves less than the wait [F-I4]
        ([RankLoad(0, 0, 0), RankLoad(0, 900, 64, 1)], 0),  # nor when it saves less than those beside it cost [F-I4]
        ([RankLoad(0, 900, 0), RankLoad(0, 100, 0)], 1),
        ([RankLoad(0, 0, 0), RankLoad(0, 0, 0)], 0),
    ],
)
def test_placement_takes_the_rank_with_the_least_cost(loads, best):
    """[R25]"""
    assert least_cost(128, loads, 0)[0] == best


def test_one_page_that_all_share_does_not_pin_them_to_one_rank():
    """[F-I4] with no queue anywhere: each comes when the prompts before it are computed."""
    world = SchedWorld(attn_dp_size=8, eos_chance=0, num_pages=200, page_size=4, max_running=24)
    for handle in range(1, 25):
        world.send(handle, [7] * 4 + [100 + handle] * 8, 100)
        for _ in range(3):
            world.step()
    assert [len(rank.decoding) for rank in world.sched.ranks] == [3] * 8
    run_dry(world)


def test_a_conversation_stays_where_its_prefix_is():
    """[F-I3] though others run there."""
    world = SchedWorld(attn_dp_size=8, eos_chance=0, num_pages=400, page_size=4, max_context_len=1200)
    said, ranks = [7] * 600, []
    for turn in range(8):
        world.send(100 + turn, [turn] * 9, 60)
        world.send(1 + turn, said, 2)
        while 1 + turn not in world.ended:
            world.step()
            ranks += [
                (turn, req.dp_rank) for req in world.sched.reqs.values() if req.handle == 1 + turn and req.slot >= 0
            ]
        said = [*said, *world.received[1 + turn], *range(20)]
    assert len({rank for _, rank in ranks}) == 1 and {turn for turn, _ in ranks} == set(range(8))
    run_dry(world)


def test_a_session_goes_where_its_prefix_is_kept_when_nothing_else_speaks_against_it():
    """[R25] a tie-break, never a rule."""
    kept = RankLoad(0, 900, 64, keeps_session=True)
    assert least_cost(128, [RankLoad(0, 0, 64), kept], 0)[0] == 1
    assert least_cost(128, [RankLoad(0, 0, 65), kept], 0)[0] == 0


@pytest.mark.parametrize(
    ("name", "turn", "order"),
    [
        ("round_robin", 4, [1, 2, 0]),
        ("total_requests", 0, [2, 0, 1]),
        ("total_tokens", 0, [1, 2, 0]),
        ("least_cost", 0, [2, 1, 0]),
        ("follow_bootstrap_room", 7, [1]),
    ],
)
def test_each_placement_policy_orders_ranks_by_what_it_looks_at(name, turn, order):
    """[R25]"""
    loads = [RankLoad(400, 90, 64, 2), RankLoad(10, 20, 0, 3), RankLoad(0, 70, 64, 1)]
    assert POLICIES[name](128, loads, turn) == order


def test_a_bootstrap_room_names_the_rank_under_its_policy_alone():
    """[R25] a request waits for that rank, whatever room the others have."""
    rooms = [5, 1, 2**63 - 1, 9, 13]
    for placement, ranks in (("follow_bootstrap_room", [1, 1, 3, 1, 1]), ("total_requests", None)):
        world = SchedWorld(attn_dp_size=4, eos_chance=0, placement=placement)
        for handle, room in enumerate(rooms, 1):
            world.send(handle, [handle], 50, bootstrap_room=room)
        world.step()
        placed = [world.sched.reqs[handle].dp_rank for handle in range(1, 6)]
        assert placed == ranks if ranks else len(set(placed)) == 4


@pytest.mark.parametrize("placement", list(POLICIES))
def test_equal_ranks_fill_evenly(placement):
    world = SchedWorld(attn_dp_size=4, eos_chance=0, placement=placement)
    for handle in range(1, 9):
        world.send(handle, [handle], 50)
    world.step()
    assert [len(rank.decoding) for rank in world.sched.ranks] == [2, 2, 2, 2]


def test_the_victim_is_of_the_lowest_priority_then_the_least_progressed_then_the_youngest():
    """[R30]"""

    def req(order: int, priority: int = 0) -> Req:
        return Req.from_record(generate_record(order, [1], 1, priority=priority), order, 0)

    old, young, low = req(1), req(2), req(3, -1)
    assert policy.victim([(old, 5), (young, 5)]) is young
    assert policy.victim([(old, 4), (young, 5)]) is old
    assert policy.victim([(old, 0), (low, 50)]) is low
    assert policy.victim([(old, 0)]) is None


def test_limits_leave_room_for_one_output_token():
    world = SchedWorld(num_pages=10, page_size=4, max_context_len=100)
    assert world.limits.max_req_input_len == 39
    assert isinstance(world.sched, Scheduler)


def test_all_ranks_share_a_prompt_that_is_alone():
    """[R1] With what each may compute in a step; not a short rest, not beside another prompt, not beside a stream."""
    world = SchedWorld(attn_dp_size=2, max_step_tokens=24, eos_chance=0)
    world.send(1, list(range(1, 50)) + list(range(1, 50)), 8)
    first, second, third = world.step(), world.step(), world.step()
    assert (first.mode, first.dp_num_tokens.tolist()) == (Mode.CP, [24, 24])
    assert (second.mode, second.dp_num_tokens.tolist()) == (Mode.CP, [24, 24])
    assert (third.mode, third.num_tokens) == (Mode.DP, 2)
    world.send(2, list(range(50, 0, -1)), 4)
    assert world.step().mode is Mode.DP
    run_dry(world)
    world.send(3, list(range(20, 0, -1)) * 2, 2)
    world.send(4, list(range(30, 0, -1)) * 2, 2)
    assert world.step().mode is Mode.DP
    run_dry(world)


def test_limits_and_pages_leave_room_for_drafts():
    """[R36] A decoding request verifies two drafts, and two more may be written behind those."""
    world = SchedWorld(num_pages=10, page_size=4, max_context_len=100, num_draft_tokens=2)
    assert world.limits.max_req_input_len == 40 - 4 - 1
    sched = world.sched
    world.send(1, [1, 2, 3], 20)
    batch = sched.next_batch(1)
    assert int(batch.run_count.sum()) * 4 >= 3 + 4
    results.apply(sched, batch, StepResult(batch.step, np.array([1], np.int32), np.array([[5, -1, -1]], np.int32)), 1)
    for count in (3, 1, 2):
        batch = sched.next_batch(1)
        assert batch.row_extend_len.tolist() == [3] and batch.input_ids.tolist() == [-1, -1, -1]
        assert sched.slots.num_pages[0] * 4 >= sched.slots.seq_len[0] + 4
        before = int(batch.row_prefix_len[0])
        ids = np.array([[7, 8, 9]], np.int32)
        results.apply(sched, batch, StepResult(batch.step, np.array([count], np.int32), ids), 1)
        assert int(sched.slots.prefix_len[0]) == before + count == int(sched.slots.seq_len[0]) - 1
    assert int(sched.slots.out_heads[0]["num_accepted"]) == 3
    assert sched.counters.prefill_tokens == 3


def siblings(world: SchedWorld, prompt: list[int], count: int, **fields: int) -> None:
    """Several answers to one prompt: handles 1, 2 ..."""
    for handle in range(1, count + 1):
        world.send(handle, prompt, 5, group=1, **fields)


def test_of_several_answers_one_computes_the_prompt_and_the_others_find_its_pages():
    """[R20] on the same rank, whatever the load there."""
    world = SchedWorld(attn_dp_size=2, eos_chance=0, num_pages=100)
    siblings(world, list(range(1, 42)), 4)
    assert world.step().num_rows == 1 and world.sched.num_waiting == 3
    run_dry(world)
    assert [int(world.last_heads[handle]["cached_device"]) for handle in range(1, 5)] == [0, 40, 40, 40]
    assert len({int(world.last_heads[handle]["dp_rank"]) for handle in range(1, 5)}) == 1
    assert world.sched.counters.prefill_tokens == 41 + 3 * 1 and world.is_idle()


def test_siblings_in_the_queue_hold_up_nobody_else():
    world = SchedWorld(eos_chance=0, num_pages=100)
    siblings(world, list(range(1, 42)), 3)
    world.send(9, [7] * 4, 1)
    world.step()
    batch = world.step()
    assert batch.num_rows == 2  # the rest of the first prompt, and the whole of 9
    run_dry(world)
    assert set(world.ended) == {1, 2, 3, 9} and world.is_idle()


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_sibling_that_is_aborted_leaves_the_others_to_go_on(gone, steps):
    """[R20] [R22] the first too, queued, in its prompt or behind it."""
    world = SchedWorld(eos_chance=0, num_pages=100)
    siblings(world, list(range(1, 42)), 3)
    for _ in range(steps):
        world.step()
    world.sched.abort(gone)
    run_dry(world)
    assert world.ended.pop(gone) is FinishReason.ABORT
    assert set(world.ended.values()) == {FinishReason.LENGTH} and len(world.ended) == 2 and world.is_idle()


def test_a_rank_that_the_client_named_stays_when_the_first_of_several_goes():
    world = SchedWorld(attn_dp_size=2, eos_chance=0, num_pages=100)
    siblings(world, [5] * 9, 2, dp_rank=1)
    world.sched.abort(1)
    run_dry(world)
    assert int(world.last_heads[2]["dp_rank"]) == 1
