"""Gaps in running streams while prompts are computed: bounded, from measured step times. [R29] [F-I1] [F-I5]"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53d.ipc.batch import Batch
from glm53d.ipc.records import ROW_FEED
from glm53d.sched.measure import LongestGap, StepCost
from glm53d.sched.policy import Budget
from tests.helpers.sched_world import SchedWorld, prompt_area

MS = 1_000_000


def pace(batch: Batch) -> int:
    """5 ms, 0.2 ms per row, 20 us per prompt token, and what attention costs: 1 ms per million of area."""
    fed = (batch.row_flags & ROW_FEED) != 0
    prompt_tokens = int(batch.row_extend_len[~fed].sum())
    return int(5 * MS + 0.2 * MS * np.count_nonzero(fed) + 20_000 * prompt_tokens + prompt_area(batch).sum())


def flooded(target_ms: float, steps: int = 400, prompt_len: int = 5000) -> tuple[list[int], SchedWorld]:
    """Four streams, and a queue of long prompts that never empties; each step's time behind the first hundred."""
    world = SchedWorld(
        1, eos_chance=0, num_pages=4000, page_size=16, max_context_len=20_000, max_running=16, max_step_tokens=4096,
        target_itl_ns=int(target_ms * MS), step_ns=pace,
    )  # fmt: skip
    for handle in range(1, 5):
        world.send(handle, [handle], 10_000)
    handle, times = 100, []
    for i in range(steps):
        while world.sched.num_waiting < 3:
            handle += 1
            world.send(handle, [1 + (handle + i) % 40 for i in range(prompt_len)], 3)
        before = world.now
        world.step()
        if i >= 100:
            times.append(world.now - before)
    return times, world


@pytest.mark.parametrize("target_ms", [8, 15, 40])
def test_a_queue_of_long_prompts_that_never_empties_stretches_no_gap_above_the_target(target_ms):
    """[F-I1]"""
    times, world = flooded(target_ms)
    assert max(times) <= target_ms * MS
    assert world.sched.longest_gap.longest_ns(world.now) <= target_ms * MS
    assert sum(times) / len(times) > 0.75 * target_ms * MS, "what the target leaves is used"


def test_without_a_target_a_step_takes_what_a_full_chunk_takes():
    times, world = flooded(0, steps=120)
    assert max(times) > 80 * MS and world.sched.longest_gap.longest_ns(world.now) > 80 * MS


def test_prompts_go_on_page_by_page_where_no_target_can_be_kept():
    """A decoding step alone takes more than 5 ms."""
    times, world = flooded(2, steps=150, prompt_len=200)
    assert world.sched.counters.finished > 0 and max(times) < 7 * MS


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 600_000), st.integers(1, 600_000)), min_size=1, max_size=5),
    area=st.integers(1 << 21, 1 << 31),
    budget_ns=st.one_of(st.just(float("inf")), st.floats(-1e6, 1e9)),
    per_token=st.floats(0, 1e5),
    per_area=st.floats(0, 10),
)
def test_chunks_stay_within_tokens_area_and_time(prompts, area, budget_ns, per_token, per_area):
    """[F-I5] and each prompt at the head makes progress."""
    budget = Budget(2048, area, budget_ns, per_token, per_area, least=16)
    chunks = [(prefix, budget.chunk(prefix, left)) for prefix, left in prompts]
    assert chunks[0][1] > 0 and sum(n for _, n in chunks) <= 2048
    assert sum(n * (prefix + n) for prefix, n in chunks) <= area
    took = sum(per_token * n + per_area * n * (prefix + n / 2) for prefix, n in chunks)
    if chunks[0][1] > 16 and budget_ns < float("inf"):
        assert took <= max(budget_ns, 0) * 1.001 + 1


def test_three_long_prompts_on_a_warm_prefix_share_the_area_of_a_step():
    """[F-I5] their tokens alone would fit."""
    budget = Budget(3000, 1 << 30)
    assert [budget.chunk(500_000, 1000) for _ in range(3)] == [1000, 1000, 143]


def test_step_cost_learns_each_of_its_terms():
    cost, rng = StepCost(), np.random.default_rng(0)
    for _ in range(300):
        rows, tokens = int(rng.integers(1, 64)), int(rng.integers(1, 2048)) * int(rng.integers(0, 2))
        area = tokens * float(rng.integers(0, 100_000))
        cost.add(rows, tokens, area, int(4e6 + 1e5 * rows + 2e4 * tokens + 0.5 * area))
    assert cost.decode_ns(10) == pytest.approx(5e6, rel=1e-3)
    assert cost.prefill_ns() == pytest.approx((2e4, 0.5), rel=1e-2)


def test_the_longest_gap_is_forgotten_after_two_windows():
    gap = LongestGap(window_ns=100)
    gap.add(7, 1000)
    gap.add(3, 1050)
    assert gap.longest_ns(1050) == 7
    gap.add(4, 1101)
    assert (gap.longest_ns(1101), gap.longest_ns(1190), gap.longest_ns(1250), gap.longest_ns(1400)) == (7, 7, 4, 0)
