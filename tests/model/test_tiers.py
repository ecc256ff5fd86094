"""Pages that left their pool and came back give the tokens that they would have given there. [R32] [R51]"""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from glm53d._native import page_hashes
from glm53d.config import Cache, Config, Kv, Model, Parallel, Scheduler, Speculation
from glm53d.model.config import ModelConfig
from tests.helpers.sched_world import KEY
from tests.model.synthetic import make_checkpoint
from tests.model.world import Alone, Ranks, ServedWorld

PAGE, NUM_NEW = 4, 6
SEEDED = {"temperature": 0.9, "top_p": 0.9}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiers")
    make_checkpoint(folder, 3)
    return folder


def config_of(
    folder: Path,
    *,
    cache: Cache,
    tp_size: int = 1,
    attn_dp_size: int = 1,
    num_pages: int = 20,
    kv_dtype: Literal["auto", "fp8"] = "auto",
    num_draft_tokens: int = 0,
) -> Config:
    return Config(
        model=Model(path=str(folder), max_context_len=72),
        kv=Kv(page_size=PAGE, num_pages=num_pages, dtype=kv_dtype),
        cache=cache,
        parallel=Parallel(tp_size=tp_size, attn_dp_size=attn_dp_size),
        scheduler=Scheduler(max_running_requests=4, max_step_tokens=24),
        speculation=Speculation(num_draft_tokens=num_draft_tokens),
    )


def served(ranks: Ranks | Alone, config: Config) -> ServedWorld:
    return ServedWorld(ranks, config, ModelConfig.load(Path(config.model.path)).vocab_size)


def prompts_of(world: ServedWorld) -> list[list[int]]:
    """Three that do not fit into a pool together, and the first again, with another end."""
    prompts = [[(i * i + 7 * j) % (world.vocab - 1) + 1 for i in range(50)] for j in range(3)]
    return [*prompts, [*prompts[0][:46], 5, 6, 7]]


def one_by_one(world: ServedWorld, prompts: list[list[int]], **fields: float) -> list[list[int]]:
    """Their answers; no prompt is computed while another runs."""
    first = max(world.prompts, default=0) + 1
    for handle, prompt in enumerate(prompts, first):
        world.send(handle, prompt, NUM_NEW, seed=handle - first + 1, **fields)
        while not world.is_idle():
            world.step()
    return [world.received[handle] for handle in range(first, first + len(prompts))]


def cached(world: ServedWorld, handle: int) -> tuple[int, int, int]:
    """Tokens by tier: device, host, storage."""
    head = world.last_heads[handle]
    return int(head["cached_device"]), int(head["cached_host"]), int(head["cached_storage"])


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("kv_dtype", "num_drafts"), [("auto", 0), ("fp8", 0), ("auto", 2)])
def test_a_prefix_that_comes_back_from_host_memory_gives_the_same_tokens(checkpoint, kv_dtype, num_drafts, sampling):
    kind = {"kv_dtype": kv_dtype, "num_draft_tokens": num_drafts}
    with_all = served(Alone(), config_of(checkpoint, cache=Cache(), num_pages=200, **kind))
    expected = one_by_one(with_all, prompts_of(with_all), **sampling)
    world = served(Alone(), config_of(checkpoint, cache=Cache(host_bytes=1 << 22, step_bytes=1), **kind))
    assert one_by_one(world, prompts_of(world), **sampling) == expected
    assert sum(cached(world, 4)) == cached(with_all, 4)[0] == 44 and cached(world, 4)[1] >= 24
    assert world.sched.tiers.counters.loaded == cached(world, 4)[1] // PAGE


def test_ranks_of_a_group_each_have_a_host_pool_and_one_set_of_files(ranks, checkpoint, tmp_path):
    """Of four ranks, two attention-DP ranks of two each; of two, one. Then the same after a restart."""
    alone = served(Alone(), config_of(checkpoint, cache=Cache(), num_pages=200))
    prompts = prompts_of(alone)
    expected = one_by_one(alone, prompts)
    cache = Cache(host_bytes=1 << 22, storage_path=str(tmp_path))
    config = config_of(checkpoint, cache=cache, tp_size=ranks.size, attn_dp_size=ranks.size // 2)
    world = served(ranks, config)
    assert one_by_one(world, prompts, dp_rank=ranks.size // 2 - 1) == expected
    assert cached(world, 4)[1] >= 24
    wait_for_files(world)
    world = served(ranks, config)
    assert one_by_one(world, prompts[:1], dp_rank=0) == expected[:1]
    assert cached(world, 1)[2] == PAGE * world.sched.tiers.counters.fetched >= 24


def test_a_prefix_is_copied_from_another_ranks_pool(ranks, checkpoint):
    """[R25] Its prompts are computed on one rank, then asked of the others, each of which finds all that is there."""
    alone = served(Alone(), config_of(checkpoint, cache=Cache(), num_pages=200))
    prompts = prompts_of(alone)
    expected = one_by_one(alone, prompts)
    cache = Cache(peer_bytes_per_s=1e15, step_bytes=1)
    config = config_of(checkpoint, cache=cache, tp_size=ranks.size, attn_dp_size=ranks.size, num_pages=60)
    world = served(ranks, config)
    assert one_by_one(world, prompts[:3], dp_rank=0) == expected[:3]
    for rank in range(1, ranks.size):
        assert one_by_one(world, prompts[3:], dp_rank=rank) == expected[3:]
        assert cached(world, max(world.prompts)) == (44 if rank == 1 else 48, 0, 0)
    assert world.sched.tiers.counters.copied == 11 + 12 * (ranks.size - 2)


def stored_world(checkpoint: Path, folder: Path) -> ServedWorld:
    return served(Alone(), config_of(checkpoint, cache=Cache(host_bytes=1 << 22, storage_path=str(folder))))


def wait_for_files(world: ServedWorld) -> None:
    """Threads have written what they were given: a restart does not wait for that."""
    handle, tiers = max(world.prompts), world.sched.tiers.counters
    while tiers.stored < tiers.saved:
        handle += 1
        world.send(handle, [1], 1)
        while not world.is_idle():
            world.step()


def pages_of(folder: Path, world: ServedWorld, handle: int) -> list[Path]:
    """The files of a request's prompt, in order of its pages; those that there are."""
    hashes = page_hashes(np.array(world.prompts[handle], np.int32), PAGE, KEY, bytes(16))
    paths = [folder / f"{int(hi):016x}{int(lo):016x}.kv" for lo, hi in hashes]
    return [path for path in paths if path.exists()]


def test_a_restart_finds_pages_in_files(checkpoint, tmp_path):
    """[R32] also where an answer was drawn from a seed."""
    first = stored_world(checkpoint, tmp_path)
    prompts = prompts_of(first)
    expected = one_by_one(first, prompts, **SEEDED)
    wait_for_files(first)
    first.ranks.runner.close()
    again = stored_world(checkpoint, tmp_path)
    assert one_by_one(again, prompts[:1], **SEEDED) == expected[:1]
    device, host, storage = cached(again, 1)
    assert (device, host) == (0, 0) and storage == PAGE * again.sched.tiers.counters.fetched >= 24
    again.ranks.runner.close()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-9] + bytes(9), lambda data: b""])
def test_a_file_that_is_damaged_or_cut_is_a_miss(checkpoint, tmp_path, damage):
    """Its page and those behind it are computed, and the answer is the same."""
    first = stored_world(checkpoint, tmp_path)
    prompts = prompts_of(first)
    expected = one_by_one(first, prompts)
    wait_for_files(first)
    first.ranks.runner.close()
    files = pages_of(tmp_path, first, 1)
    again = stored_world(checkpoint, tmp_path)  # it knows the file before that is damaged
    files[3].write_bytes(damage(files[3].read_bytes()))
    assert one_by_one(again, prompts[:1]) == expected[:1]
    assert cached(again, 1) == (0, 0, 3 * PAGE)
    counters = again.sched.tiers.counters
    assert (counters.fetched, counters.failed) == (len(files) - 1, 1)
    again.ranks.runner.close()
