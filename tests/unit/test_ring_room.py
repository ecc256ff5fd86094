"""What a step may hold is bounded, and the batch ring takes it: else the daemon does not start. [R9]"""

import numpy as np
import pytest

from glm53d.config import Config, Parallel, World
from glm53d.errors import StartError
from glm53d.ipc.records import BIAS
from glm53d.sched.limits import Limits
from glm53d.worker.room import check_batch_ring, largest_batch
from tests.helpers.sched_world import SchedWorld

GLM = Limits(
    attn_dp_size=8, num_pages=20_000, page_size=64, max_context_len=1 << 20, max_running=256, max_step_tokens=2048,
    max_step_area=1 << 30, eos_ids=(0,), vocab_size=154_880, think_end=1, call_begin=2, calls_ends=(3,),
)  # fmt: skip


def config(tp_size: int, ring_bytes: int) -> Config:
    return Config(parallel=Parallel(tp_size=tp_size), world=World(ring_bytes=ring_bytes))


def test_the_default_ring_takes_the_steps_of_the_whole_model_with_a_mask_in_every_row():
    assert largest_batch(GLM) > 256 * 154_880 // 8
    check_batch_ring(config(8, World().ring_bytes), GLM)


def test_a_ring_that_is_too_small_refuses_the_start_and_names_the_one_that_is_not():
    with pytest.raises(StartError, match=r"give world\.ring_bytes 33554432") as raised:
        check_batch_ring(config(8, 1 << 20), GLM)
    assert "\n" not in raised.value.message
    check_batch_ring(config(8, 1 << 25), GLM)
    check_batch_ring(config(1, 1 << 20), GLM)  # nobody reads batches


def test_many_that_find_a_huge_prefix_at_once_are_admitted_in_several_steps():
    """Each admission names all its pages, cached ones too."""
    world = SchedWorld(num_pages=400, max_context_len=1200, max_running=64, max_step_tokens=1200, eos_chance=0)
    world.send(1, [1] * 1000, 2)
    while world.sched.reqs:
        world.step()
    for handle in range(2, 42):
        world.send(handle, [1] * 1000 + [handle], 20)
    admitted, before = [], 0
    while world.sched.num_waiting:
        world.step()
        admitted.append(world.sched.num_running - before)
        before = world.sched.num_running
    assert len(admitted) > 3 and min(admitted) >= 1
    while world.sched.reqs:
        world.step()
    assert all(len(world.received[handle]) == 20 for handle in range(2, 42))


def test_many_that_have_said_much_fill_their_sampling_tables_in_several_steps():
    world = SchedWorld(
        vocab=500, num_pages=2000, max_context_len=600, max_step_tokens=6000, max_running=20, eos_chance=0
    )
    rng = np.random.default_rng(0)
    for handle in range(1, 13):
        prompt = rng.permutation(np.arange(1, 500))[:400].tolist()
        bias = {int(i): 1.0 for i in rng.permutation(500)[:300]}
        world.send(handle, prompt, 3, repetition_penalty=1.5, bias=bias)
    entries = []
    while world.sched.reqs:
        batch = world.step()
        if batch is not None and len(batch.tables):
            entries.append(len(batch.bias) + len(batch.said))
    assert len(entries) > 3 and max(entries) <= world.limits.max_table_entries
    assert BIAS.itemsize == 8 and all(len(world.received[handle]) == 3 for handle in range(1, 13))
