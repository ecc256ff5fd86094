"""Prefixes that come from host memory, files or another rank: who waits, who does not, and what is counted. [R32]"""

import numpy as np
import pytest

from glm53d._native import page_hashes
from glm53d.ipc.records import FinishReason, MoveKind
from glm53d.sched import policy
from glm53d.sched.req import ReqState
from glm53d.sched.tiers import TierLimits
from tests.helpers.sched_world import KEY, SchedWorld

PROMPTS = {handle: [handle] * 4 + list(range(10, 34)) + [handle] for handle in range(1, 9)}  # 7 full pages each


def hashes_of(handle: int) -> np.ndarray:
    return page_hashes(np.array(PROMPTS[handle], np.int32), 4, KEY, bytes(16))


def tiered(stored: tuple[int, ...] = (), *, num_pages: int = 12, attn_dp_size: int = 1, **limits: int) -> SchedWorld:
    """A pool that holds one prompt and a bit of another, beside a larger host pool; stored: prompts in files."""
    sizes = {"host_pages": 40, "file_pages": 100, "step_pages": 100} | limits
    hashes = [hashes_of(handle) for handle in stored]
    known = np.concatenate(hashes) if hashes else np.empty((0, 2), np.uint64)
    world = SchedWorld(
        eos_chance=0,
        step_ns=lambda batch: 1000,
        num_pages=num_pages,
        attn_dp_size=attn_dp_size,
        tiers=TierLimits(**sizes),
        stored=known,
    )
    for handle, pages in zip(stored, hashes, strict=True):
        for i, (lo, hi) in enumerate(pages.tolist()):
            world.kv.files[lo, hi] = np.array(PROMPTS[handle][4 * i : 4 * i + 4])
    return world


def ask(world: SchedWorld, handle: int, of: int | None = None, **fields: int) -> None:
    world.send(handle, PROMPTS[of or handle], 2, **fields)


def run_dry(world: SchedWorld) -> None:
    for _ in range(500):
        world.step()
        if not world.sched.reqs:
            return
    raise AssertionError("requests are left")


def cached(world: SchedWorld, handle: int) -> tuple[int, int, int]:
    head = world.last_heads[handle]
    return int(head["cached_device"]), int(head["cached_host"]), int(head["cached_storage"])


def test_a_prefix_that_its_pool_gave_up_comes_from_host_memory():
    world = tiered()
    for handle in (1, 2):
        ask(world, handle)
        run_dry(world)
    ask(world, 3, of=1)
    run_dry(world)
    device, host, storage = cached(world, 3)
    assert device + host == 28 and host >= 8 and storage == 0
    assert world.sched.counters.cached_host_tokens == host and world.is_idle()


def test_a_request_whose_pages_are_copied_holds_up_nobody():
    """One page a step: others decode and begin meanwhile."""
    world = tiered(step_pages=1, num_pages=10)
    for handle in (1, 2):
        ask(world, handle)
        run_dry(world)
    ask(world, 4, of=1)
    while world.sched.reqs[4].state is not ReqState.MOVING:
        world.step()
    world.send(5, [7, 7, 7], 3)
    world.step()
    assert world.sched.reqs[4].state is ReqState.MOVING and 5 in world.received and len(world.received[5]) == 1
    run_dry(world)
    assert cached(world, 4)[1] > 0


def test_a_request_waits_for_its_files_and_others_do_not():
    world = tiered(stored=(1,))
    go_on, nothing = world.kv.end_step, np.empty(0, np.int32)
    world.kv.end_step = lambda batch: (nothing, nothing)  # type: ignore[method-assign]  # no thread gets on
    ask(world, 1)
    batch = world.step()
    assert batch.num_rows == 0 and (batch.moves["kind"] == MoveKind.FETCH).sum() == 7
    req = world.sched.reqs[1]
    assert req.state is ReqState.FETCH and world.sched.num_waiting == 1 and world.sched.slots.num_free == 8
    world.send(2, [7, 7, 7], 2)
    while 2 in world.sched.reqs:
        world.step()
    assert req.state is ReqState.FETCH
    world.kv.end_step = go_on  # type: ignore[method-assign]
    run_dry(world)
    assert cached(world, 1) == (0, 0, 28) and world.sched.counters.cached_storage_tokens == 28


def test_a_step_without_rows_waits_a_little_for_a_file_that_somebody_waits_for():
    world = tiered(stored=(1,))
    ask(world, 1)
    batch = world.step()
    assert batch.num_rows == 0 and batch.wait_us > 0
    world = tiered()
    ask(world, 1)
    assert world.step().wait_us == 0


@pytest.mark.parametrize("steps", range(12))
def test_a_request_can_be_aborted_wherever_its_pages_are(steps):
    """DESIGN 7, "tier move in flight": files on their way, then pages one by one, then its own tokens."""
    world = tiered(stored=(1,), step_pages=1)
    ask(world, 1)
    for _ in range(steps):
        world.step()
    if 1 in world.sched.reqs:
        world.sched.abort(1)
        world.sched.check()
    ask(world, 2, of=1)
    run_dry(world)
    while not world.kv.is_quiet:
        world.send(99, [3], 1)
        run_dry(world)
        del world.ended[99], world.received[99]
    world.step()
    assert world.ended[2] is FinishReason.LENGTH and sum(cached(world, 2)) == 28 and world.is_idle()
    assert not any(host.num_pinned for host in world.sched.tiers.hosts)


def test_a_damaged_file_is_a_miss_from_there_on():
    world = tiered(stored=(1,))
    del world.kv.files[list(world.kv.files)[3]]
    ask(world, 1)
    run_dry(world)
    assert cached(world, 1) == (0, 0, 12)
    assert (world.sched.tiers.counters.fetched, world.sched.tiers.counters.failed) == (6, 1)


def test_two_that_wait_for_the_same_files_both_get_on():
    world = tiered(stored=(1,), num_pages=30)
    ask(world, 1)
    ask(world, 2, of=1)
    run_dry(world)
    assert world.sched.tiers.counters.fetched == 7 and set(world.ended) == {1, 2}
    assert cached(world, 1) == (0, 0, 28) and sum(cached(world, 2)) == 28


def test_who_waits_for_the_files_of_one_that_is_gone_gets_on():
    world = tiered(stored=(1,), num_pages=30)
    ask(world, 1)
    ask(world, 2, of=1)
    world.step()
    if 1 in world.sched.reqs:
        world.sched.abort(1)
    run_dry(world)
    assert world.ended[2] is FinishReason.LENGTH and sum(cached(world, 2)) == 28 and world.is_idle()


def test_a_disk_that_does_not_answer_keeps_nobody_for_ever():
    world = SchedWorld(
        eos_chance=0, num_pages=12, queue_timeout_ns=50,
        tiers=TierLimits(host_pages=40, file_pages=100), stored=hashes_of(1),
    )  # fmt: skip
    world.kv.end_step = lambda batch: (np.empty(0, np.int32), np.empty(0, np.int32))  # type: ignore[method-assign]
    ask(world, 1)
    run_dry(world)
    assert world.ended[1] is FinishReason.ERROR and world.sched.counters.expired == 1 and world.now >= 50


def test_of_files_that_host_memory_cannot_take_the_first_pages_come():
    world = tiered(stored=(1,), host_pages=4)
    ask(world, 1)
    run_dry(world)
    assert cached(world, 1) == (0, 0, 16)


def test_what_was_found_at_first_admission_stays_after_a_retraction():
    """[F-D7]"""
    world = tiered(stored=(1,), num_pages=12)
    ask(world, 1)
    while not world.received[1]:
        world.step()
    first = cached(world, 1)
    world.pause(retract=True)
    world.sched.resume()
    run_dry(world)
    assert cached(world, 1) == first == (0, 0, 28)
    assert int(world.last_heads[1]["num_retractions"]) == 1


def test_a_prefix_on_another_rank_is_copied_when_that_is_cheaper():
    """[R25]"""
    for peer_ns, expected in ((0, (28, 0, 0)), (-1, (0, 0, 0)), (10**12, (0, 0, 0))):
        world = tiered(host_pages=0, file_pages=0, attn_dp_size=2, num_pages=30, peer_ns=peer_ns)
        ask(world, 1, dp_rank=0)
        run_dry(world)
        ask(world, 2, of=1, dp_rank=1)
        run_dry(world)
        assert cached(world, 2) == expected and world.is_idle()
        assert world.sched.tiers.counters.copied == expected[0] // 4


def test_the_source_of_a_copy_is_locked_until_its_last_page_is_in_a_step():
    world = tiered(host_pages=0, file_pages=0, attn_dp_size=2, num_pages=30, peer_ns=0, step_pages=3)
    ask(world, 1, dp_rank=0)
    run_dry(world)
    ask(world, 2, of=1, dp_rank=1)
    locked = []
    while 2 in world.sched.reqs and not world.received[2]:
        world.step()
        tree = world.sched.ranks[0].tree
        locked.append(tree.num_pages - tree.evictable_pages)
    assert locked[0] == 7 and locked[-1] == 0


def test_who_is_alone_on_a_rank_has_its_pool_though_another_rank_copies_from_it():
    """[F-I2] [R30] the copy begins anew, or what is gone by then is computed."""
    prompt = list(range(10, 49)) * 2
    world = SchedWorld(eos_chance=0, attn_dp_size=2, num_pages=24, tiers=TierLimits(peer_ns=0, step_pages=1))
    world.send(1, prompt[:60], 2, dp_rank=0)
    run_dry(world)
    world.send(2, [7] * 30, 50, dp_rank=0)
    for _ in range(20):
        world.step()
    world.send(3, prompt[:60], 2, dp_rank=1)
    run_dry(world)
    assert len(world.received[2]) == 50 and len(world.received[3]) == 2 and world.is_idle()
    assert int(world.last_heads[3]["num_retractions"]) > 0


def test_placement_counts_a_prefix_in_host_memory_as_what_it_saves():
    """[R25] A session goes where its pages are, though the pool gave them up."""
    world = tiered(attn_dp_size=2, num_pages=12)
    ask(world, 1, dp_rank=1)
    run_dry(world)
    for handle in (2, 3):
        ask(world, handle, dp_rank=1)
        run_dry(world)
    assert world.sched.ranks[1].tree.peek(hashes_of(1)) < 7
    ask(world, 4, of=1)
    run_dry(world)
    assert int(world.last_heads[4]["dp_rank"]) == 1 and cached(world, 4)[1] > 0


def test_a_page_is_worth_the_share_of_its_computing_that_moving_saves():
    assert policy.saved_share(25, 100) == 0.75
    assert policy.saved_share(100, 100) == policy.saved_share(500, 100) == 0.0
    assert policy.saved_share(500, 0) == 1.0, "nothing has been measured yet"


def test_an_admission_pushes_out_no_more_in_a_step_than_it_saves():
    """And goes on in the next ones."""
    world = tiered(num_pages=12, step_pages=2, host_pages=5)  # the host pool cannot have them all
    ask(world, 1)
    run_dry(world)
    ask(world, 2)
    saves = []
    while 2 in world.sched.reqs:
        batch = world.step()
        if batch is not None:
            saves.append(int((batch.moves["kind"] == MoveKind.SAVE).sum()))
    assert len([count for count in saves if count]) > 1 and world.ended[2] is FinishReason.LENGTH


def test_a_flush_empties_every_tier():
    world = tiered()
    for handle in (1, 2):
        ask(world, handle)
        run_dry(world)
    while not world.kv.is_quiet:
        world.send(3, [1], 1)
        run_dry(world)
        del world.ended[3]
    world.step()
    assert world.kv.files and world.sched.flush_cache() > 0
    assert world.step() is not None, "files go with a step of their own"
    ask(world, 4, of=1)
    run_dry(world)
    assert cached(world, 4) == (0, 0, 0)


def test_a_folder_with_more_files_than_fit_is_cut_to_size_by_age():
    world = tiered(stored=(1, 2), file_pages=9)
    batch = world.step()
    assert (batch.moves["kind"] == MoveKind.DROP).sum() == 5 and len(world.sched.tiers.files) == 9
    ask(world, 2)
    run_dry(world)
    assert cached(world, 2)[2] == 28
