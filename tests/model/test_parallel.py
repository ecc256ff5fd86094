"""Every layout of 1, 2 and 4 ranks gives the tokens of one rank: heads, experts, widths and vocabulary split. [R1]"""

import itertools
from pathlib import Path
from typing import Literal

import pytest

from glm53d.config import Config, Kv, Model, Parallel, Scheduler, Speculation
from glm53d.errors import StartError
from glm53d.model.config import ModelConfig
from glm53d.world.plan import memory_plan
from tests.model.synthetic import make_checkpoint
from tests.model.world import Alone, Ranks, ServedWorld, serve

NUM_NEW = 8


def layouts(size: int) -> list[tuple[int, int]]:
    """(attn_dp_size, ep_size)."""
    sizes = [n for n in (1, 2, 4) if n <= size]
    return list(itertools.product(sizes, sizes))


def config_of(
    folder: Path,
    tp_size: int = 1,
    attn_dp_size: int = 1,
    ep_size: int = 1,
    kv_dtype: Literal["auto", "fp8"] = "auto",
    num_draft_tokens: int = 0,
) -> Config:
    return Config(
        model=Model(path=str(folder), max_context_len=128),
        kv=Kv(page_size=4, num_pages=64, dtype=kv_dtype),
        parallel=Parallel(tp_size=tp_size, attn_dp_size=attn_dp_size, ep_size=ep_size),
        scheduler=Scheduler(max_running_requests=6, max_step_tokens=24),
        speculation=Speculation(num_draft_tokens=num_draft_tokens),
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[list[int]]]]:
    """Folders, and what one rank answers."""
    found = []
    for seed in range(2):
        folder = tmp_path_factory.mktemp("official") / str(seed)
        make_checkpoint(folder, seed)
        found.append((folder, serve(served(Alone(), config_of(folder)), seed, NUM_NEW)))
    return found


def served(ranks: Ranks | Alone, config: Config) -> ServedWorld:
    return ServedWorld(ranks, config, ModelConfig.load(Path(config.model.path)).vocab_size)


def test_every_layout_gives_the_tokens_of_one_rank(ranks, checkpoints, record_property):
    for (attn_dp_size, ep_size), (seed, (folder, expected)) in zip(
        layouts(ranks.size), itertools.cycle(enumerate(checkpoints)), strict=False
    ):
        config = config_of(folder, ranks.size, attn_dp_size, ep_size)
        world = served(ranks, config)
        plan = memory_plan(ModelConfig.load(folder), config, 1 << 30, mtp=False)
        assert world.loaded.weight_bytes == plan.weight_bytes  # so no rank has read more than its share
        answers = serve(world, seed, NUM_NEW)
        assert answers == expected, f"attn_dp_size {attn_dp_size}, ep_size {ep_size}"
        assert world.num_mixed and world.sched.counters.cached_tokens
        assert attn_dp_size == 1 or world.num_idle
        record_property(f"tp {ranks.size} dp {attn_dp_size} ep {ep_size}", f"seed {seed}: {world.sched.step} steps")


def test_fp8_rows_are_the_same_on_every_rank(ranks, checkpoints):
    """Sums over ranks differ in the last bits, and such a bit may round a row the other way: so no tokens far along."""
    folder = checkpoints[1][0]
    expected = serve(served(Alone(), config_of(folder, kv_dtype="fp8")), 1, NUM_NEW)
    for attn_dp_size in (1, ranks.size):
        world = served(ranks, config_of(folder, ranks.size, attn_dp_size, 1, "fp8"))
        assert serve(world, 1, NUM_NEW) == expected


PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.9, "top_p": 0.9, "top_k": 20}, PENALISED], ids=["seeded", "penalised"]
)
def test_sampling_from_shards_is_that_of_one_rank(ranks, checkpoints, sampling):
    folder = checkpoints[0][0]
    expected = serve(served(Alone(), config_of(folder)), 5, NUM_NEW, **sampling)
    for attn_dp_size in (1, ranks.size):
        world = served(ranks, config_of(folder, ranks.size, attn_dp_size, ranks.size))
        assert serve(world, 5, NUM_NEW, **sampling) == expected


def test_drafts_are_made_and_verified_by_all_ranks_together(ranks, checkpoints):
    folder, expected = checkpoints[1]
    for attn_dp_size in (1, ranks.size):
        config = config_of(folder, ranks.size, attn_dp_size, ranks.size // attn_dp_size, num_draft_tokens=3)
        world = served(ranks, config)
        plan = memory_plan(ModelConfig.load(folder), config, 1 << 30, mtp=True)
        assert world.loaded.weight_bytes == plan.weight_bytes
        assert world.loaded.kv_bytes_per_token == plan.kv_bytes_per_token
        assert serve(world, 1, NUM_NEW) == expected
        assert attn_dp_size == 1 or world.num_idle


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_a_prompt_that_is_alone_is_computed_by_all_groups_together(ranks, checkpoints, num_draft_tokens):
    """Its chunks split, behind a cached prefix too; its KV is where it would be, or decoding would go astray. [R1]"""
    folder = checkpoints[0][0]
    vocab_size = ModelConfig.load(folder).vocab_size
    prompts = [[i * i % (vocab_size - 1) + 1 for i in range(100)]]
    prompts += [prompts[0][:30] + [5] * 70, prompts[0][30:] + prompts[0][:30]]

    def one_by_one(world: ServedWorld) -> list[list[int]]:
        for handle, prompt in enumerate(prompts, 1):
            world.send(handle, prompt, NUM_NEW)
            while not world.is_idle():
                world.step()
        return list(world.received.values())

    expected = one_by_one(served(Alone(), config_of(folder)))
    for attn_dp_size, kv_dtype in ((2, "auto"), (ranks.size, "fp8")):
        if kv_dtype == "fp8":
            expected = one_by_one(served(Alone(), config_of(folder, kv_dtype=kv_dtype)))
        config = config_of(folder, ranks.size, attn_dp_size, ranks.size, kv_dtype, num_draft_tokens)
        world = served(ranks, config)
        assert one_by_one(world) == expected
        assert world.num_split >= 3 and world.sched.counters.cached_tokens


def test_a_layout_that_does_not_divide_the_model_is_refused(ranks, tmp_path):
    make_checkpoint(tmp_path, 1, n_routed_experts=6 if ranks.size == 4 else 5, num_experts_per_tok=2)
    with pytest.raises(StartError, match=rf"splits n_routed_experts over {ranks.size} ranks, which does not divide"):
        served(ranks, config_of(tmp_path, ranks.size, 1, ranks.size))
