"""Logprobs on their way from ranks to the output ring: joined, bounded, cut into records. [R38]"""

import numpy as np
import pytest

from glm53d.config import Config, Parallel
from glm53d.errors import StartError
from glm53d.ipc.batch import Logprobs, StepResult
from glm53d.ipc.channels import MAX_RESULT_RING_BYTES
from glm53d.ipc.records import LOGPROB
from glm53d.sched.logprobs import MAX_RECORD_TOKENS, MAX_STEP_TARGETS, MAX_TOP, Unsent
from glm53d.server.logprobs import TopLogprobs
from glm53d.worker.leader import merge
from glm53d.worker.room import check_result_ring
from tests.helpers.sched_world import SchedWorld


def result(counts: list[int], rows: list[int], ids: list[int]) -> StepResult:
    found = Logprobs(np.array(rows, np.int32), np.zeros((len(rows), 3), LOGPROB))
    found.pairs["id"][:, 0] = ids
    return StepResult(
        1, np.array(counts, np.int32), np.zeros((len(counts), 1), np.int32), logprobs=found if rows else None
    )


def test_the_results_of_all_ranks_are_one_in_order_of_rows():
    """A rank may have only prompts that go on, and so no sample."""
    whole = merge(merge(result([1, 0, 0], [0, 0], [5, 6]), result([0, 0, 0], [], [])), result([0, 0, 0], [1], [7]))
    whole = merge(whole, result([0, 0, 1], [2], [8]))
    assert (whole.logprobs.rows.tolist(), whole.logprobs.pairs["id"][:, 0].tolist()) == ([0, 0, 1, 2], [5, 6, 7, 8])
    assert whole.counts.tolist() == [1, 0, 1]
    assert merge(result([1], [], []), result([0], [], [])).logprobs is None


def test_a_result_ring_takes_the_largest_step_or_the_rank_refuses_to_start():
    ranks = Config(parallel=Parallel(tp_size=2))
    check_result_ring(ranks, SchedWorld(max_running=4096).limits)
    check_result_ring(Config(), SchedWorld(max_running=1 << 14).limits)  # alone it writes none
    with pytest.raises(StartError, match=r"scheduler\.max_running_requests"):
        check_result_ring(ranks, SchedWorld(max_running=4096, num_draft_tokens=3, max_step_tokens=1 << 15).limits)
    pairs = np.zeros((4096 + MAX_STEP_TARGETS, 1 + MAX_TOP), LOGPROB)
    rows = np.zeros(len(pairs), np.int32)
    largest = StepResult(1, rows[:4096], rows[:4096, None], logprobs=Logprobs(rows, pairs))
    assert len(largest.encode(0)) + 64 <= MAX_RESULT_RING_BYTES // 2


def test_dialects_allow_what_rings_are_made_for():
    assert TopLogprobs.__metadata__[0].le == MAX_TOP


def test_of_a_chunk_the_targets_are_the_tokens_behind_those_from_where_they_are_asked_for():
    tokens = np.arange(100, 110, dtype=np.int32)
    unsent = Unsent.of(tokens, 2, 4)
    assert unsent.targets(tokens, 0, 3).tolist() == [-1, -1, -1]
    assert unsent.targets(tokens, 2, 4).tolist() == [-1, 104, 105, 106]
    assert unsent.targets(tokens, 6, 4).tolist() == [107, 108, 109, -1]
    assert not unsent.prompt and not Unsent.of(tokens, 2, -1).wants_prompt and Unsent.of(tokens, -1, 0) is None


def test_a_prompts_logprobs_stop_it_while_nobody_reads_and_come_in_small_records():
    world = SchedWorld(max_step_tokens=4096, num_pages=2000, max_context_len=6000, eos_chance=0)
    world.ring_room = 0
    prompt = [1 + i % 40 for i in range(5000)]
    world.send(1, prompt, 3, top_logprobs=1, logprob_start=0)
    for _ in range(20):
        world.step()
    computed = int(world.sched.slots.computed_len[world.sched.reqs[1].slot])
    assert MAX_STEP_TARGETS < computed <= 3 * MAX_STEP_TARGETS
    world.ring_room = None
    for _ in range(20):
        world.step()
    assert [row[0][0] for row in world.logprobs[1][0]] == prompt and len(world.logprobs[1][1]) == 3
    assert world.is_idle() and 2 * MAX_RECORD_TOKENS * LOGPROB.itemsize * (1 + MAX_TOP) < 1 << 16  # the smallest ring


def test_a_prompt_with_logprobs_uses_no_cached_page_from_there_on_and_leaves_its_own():
    world = SchedWorld(num_pages=100, max_step_tokens=64, eos_chance=0)
    prompt = list(range(1, 41))
    for handle, (start, cached) in enumerate([(0, 0), (0, 0), (21, 20), (-1, 36)], 1):
        world.send(handle, prompt, 2, top_logprobs=0, logprob_start=start)
        while handle not in world.ended:
            world.step()
        assert int(world.last_heads[handle]["cached_device"]) == cached
        assert [row[0][0] for row in world.logprobs[handle][0]] == (prompt[start:] if start >= 0 else [])


def test_what_is_forced_was_no_choice():
    world = SchedWorld(eos_chance=0, vocab=1000)
    world.send(1, [1, 2], 6, top_logprobs=2, thinking_budget=3)
    while 1 not in world.ended:
        world.step()
    rows = world.logprobs[1][1]
    at = world.received[1].index(world.limits.think_end)
    assert at == 3 and rows[at] == [(world.limits.think_end, 0.0), (-1, 0.0), (-1, 0.0)]
    assert all(value == world.logprob(2 + i, id_) for i, ((id_, value), *_) in enumerate(rows) if i != at)
