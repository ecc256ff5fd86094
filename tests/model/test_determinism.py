"""A request gets what its prompt, seed and parameters give: no neighbour, chunk or retraction changes it. [R51]"""

import random
from pathlib import Path

import pytest

from glm53d.config import Config, Kv, Model, Scheduler
from glm53d.model.config import ModelConfig
from tests.model.synthetic import make_checkpoint
from tests.model.world import Alone, ServedWorld

NUM_NEW, WHOLE = 24, 4096
GREEDY: dict[str, float] = {}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}


def served(folder: Path, num_pages: int, max_running: int, max_step_tokens: int) -> ServedWorld:
    config = Config(
        model=Model(path=str(folder), max_context_len=128, q_kv_norm_eps=1e-6),
        kv=Kv(page_size=2, num_pages=num_pages),
        scheduler=Scheduler(max_running_requests=max_running, max_step_tokens=max_step_tokens),
    )
    return ServedWorld(Alone(), config, ModelConfig.load(folder).vocab_size)


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_a_request_alone_whatever_runs_beside_it(seed, tmp_path):
    """float32 on the CPU; half of the checkpoints greedily, half by seed."""
    rng = random.Random(seed)
    make_checkpoint(tmp_path, seed)
    sampling = SEEDED if seed % 2 else GREEDY
    alone = served(tmp_path, num_pages=256, max_running=1, max_step_tokens=WHOLE)
    prompts = [[rng.randrange(1, alone.vocab) for _ in range(rng.randint(1, 60))] for _ in range(6)]
    prompts.append([*prompts[0], *prompts[1]][:70])
    for handle, prompt in enumerate(prompts, 1):
        alone.send(handle, prompt, NUM_NEW, seed=handle, **sampling)
        while not alone.is_idle():
            alone.step()
        alone.sched.flush_cache()  # nor on what is cached
    assert not alone.num_mixed

    longest = max(len(alone.prompts[handle]) + len(alone.received[handle]) for handle in alone.prompts)
    crowd = served(tmp_path, (longest + 12) // 2, max_running=5, max_step_tokens=rng.randint(6, 30))
    for handle in rng.sample(range(1, len(prompts) + 1), len(prompts)):
        crowd.send(handle, prompts[handle - 1], NUM_NEW, seed=handle, **sampling)
        for _ in range(rng.randint(0, 4)):
            crowd.step()
    while not crowd.is_idle():
        crowd.step()
    assert crowd.received == alone.received
    assert crowd.num_mixed
    assert crowd.sched.counters.retracted


def test_another_seed_gives_other_tokens(tmp_path):
    make_checkpoint(tmp_path, 1)
    world = served(tmp_path, num_pages=256, max_running=4, max_step_tokens=WHOLE)
    for handle in (1, 2):
        world.send(handle, [5, 6, 7], NUM_NEW, seed=handle, **SEEDED)
    while not world.is_idle():
        world.step()
    assert world.received[1] != world.received[2]
