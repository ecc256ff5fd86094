"""The parity matrix: every layout of 2 and 4 ranks gives the tokens of one rank, whatever else is asked of it. [R1]

Layouts split heads, experts, widths and vocabulary; features are what a step can carry. The short form takes each
layout once without anything else, and each feature in one; GLM53D_LONG=1 all layouts with all features and seeds. What
ran, and how it went, is printed at the end: see tests/helpers/matrix.py.
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from glm53d.config import Cache, Config, Kv, Model, Parallel, Scheduler, Speculation
from glm53d.errors import StartError
from glm53d.model.config import ModelConfig
from glm53d.nano.weights import nano_folder
from glm53d.world.plan import memory_plan
from tests.model.synthetic import make_checkpoint
from tests.model.world import Alone, Ranks, ServedWorld, serve

NUM_NEW = 4
LONG = os.environ.get("GLM53D_LONG") == "1"
SEEDS = range(2)


def config_of(
    folder: Path,
    tp_size: int = 1,
    attn_dp_size: int = 1,
    ep_size: int = 1,
    kv_dtype: Literal["auto", "fp8"] = "auto",
    num_draft_tokens: int = 0,
    *,
    fp8_inputs: bool = False,
    cache: Cache | None = None,
) -> Config:
    return Config(
        model=Model(path=str(folder), max_context_len=128, fp8_inputs=fp8_inputs),
        kv=Kv(page_size=4, num_pages=64, dtype=kv_dtype),
        cache=cache or Cache(),
        parallel=Parallel(tp_size=tp_size, attn_dp_size=attn_dp_size, ep_size=ep_size),
        scheduler=Scheduler(max_running_requests=6, max_step_tokens=24),
        speculation=Speculation(num_draft_tokens=num_draft_tokens),
    )


def served(ranks: Ranks | Alone, config: Config, *, graphs: bool = False) -> ServedWorld:
    return ServedWorld(ranks, config, ModelConfig.load(Path(config.model.path)).vocab_size, graphs=graphs)


def mixed(world: ServedWorld, seed: int, sampling: dict[str, float]) -> list[list[int]]:
    """Prompts beside decoding, prefix hits, and groups that idle."""
    answers = serve(world, seed, NUM_NEW, **sampling)
    assert world.num_mixed and world.sched.counters.cached_tokens
    assert world.limits.attn_dp_size == 1 or world.num_idle
    return answers


def prompts_of(world: ServedWorld) -> list[list[int]]:
    first = [i * i % (world.vocab - 1) + 1 for i in range(100)]
    return [first, first[:30] + [5] * 70, first[30:] + first[:30]]


def alone(world: ServedWorld, seed: int, sampling: dict[str, float]) -> list[list[int]]:
    """One prompt after the other, so that all groups compute each together, behind a cached prefix too."""
    for handle, prompt in enumerate(prompts_of(world), 1):
        world.send(handle, prompt, NUM_NEW, seed=seed, **sampling)
        while not world.is_idle():
            world.step()
    assert world.sched.counters.cached_tokens
    assert world.limits.attn_dp_size == 1 or world.num_split >= 3
    return list(world.received.values())


def copied(world: ServedWorld, seed: int, sampling: dict[str, float]) -> list[list[int]]:
    """A prefix computed by one group and asked of the next, which copies its pages; two requests at once."""
    groups, (first, second, _) = world.limits.attn_dp_size, prompts_of(world)
    for handle, (prompt, group) in enumerate(((first, 0), (second, 0), (first, 1), (first[:70] + [9] * 20, 2)), 1):
        world.send(handle, prompt, NUM_NEW, seed=seed, dp_rank=group % groups, **sampling)
        while handle != 3 and not world.is_idle():
            world.step()
    assert groups == 1 or world.sched.tiers.counters.copied >= 24
    return list(world.received.values())


@dataclass(frozen=True)
class Feature:
    """What is asked of a layout; one rank without drafts, padding and copies says what comes out."""

    sampling: dict[str, float] = field(default_factory=dict)
    requests: Callable[[ServedWorld, int, dict[str, float]], list[list[int]]] = mixed
    kv_dtype: Literal["auto", "fp8"] = "auto"
    num_draft_tokens: int = 0
    graphs: bool = False
    fp8_inputs: bool = False  # equal only where ranks have whole groups of channels
    nano: bool = False
    cache: Cache | None = None

    def fits(self, size: int, attn_dp_size: int, ep_size: int) -> bool:
        """Whether it is anything in this layout."""
        if self.requests is not mixed and attn_dp_size == 1:
            return False
        if self.fp8_inputs and (attn_dp_size, ep_size) != (size, size):
            return False
        return not self.nano or nano_divides(size, attn_dp_size, ep_size)

    def config(self, folder: Path, size: int, attn_dp_size: int, ep_size: int) -> Config:
        """Of a world of this feature."""
        return config_of(
            nano_folder() if self.nano else folder, size, attn_dp_size, ep_size, self.kv_dtype, self.num_draft_tokens,
            fp8_inputs=self.fp8_inputs, cache=self.cache,
        )  # fmt: skip

    def expected(self, folder: Path, seed: int) -> list[list[int]]:
        """From one rank."""
        config = config_of(nano_folder() if self.nano else folder, kv_dtype=self.kv_dtype, fp8_inputs=self.fp8_inputs)
        return self.requests(served(Alone(), config), seed, self.sampling)


FEATURES = {
    "greedy": Feature(),
    "seeded": Feature(sampling={"temperature": 0.9, "top_p": 0.9, "top_k": 20}),
    "penalised": Feature(sampling={"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}),
    "fp8 rows": Feature(kv_dtype="fp8"),
    "fp8 inputs": Feature(fp8_inputs=True),
    "drafts": Feature(num_draft_tokens=3),
    "padded": Feature(graphs=True),
    "padded drafts": Feature(graphs=True, num_draft_tokens=2, sampling={"temperature": 0.9}),
    "split prompts": Feature(requests=alone),
    "split, drafts": Feature(requests=alone, num_draft_tokens=2),
    "copied pages": Feature(requests=copied, cache=Cache(peer_bytes_per_s=1e15, step_bytes=1 << 12)),
    "nano": Feature(nano=True),
    "nano, drafts": Feature(nano=True, num_draft_tokens=2, sampling={"temperature": 0.9}),
}


def nano_divides(size: int, attn_dp_size: int, ep_size: int) -> bool:
    try:
        memory_plan(ModelConfig.load(nano_folder()), config_of(Path(), size, attn_dp_size, ep_size), 1 << 30, mtp=False)
    except StartError:
        return False
    return True


def layouts(size: int) -> list[tuple[int, int, int]]:
    """(ranks, attn_dp_size, ep_size)."""
    sizes = [n for n in (1, 2, 4) if n <= size]
    return [(size, *split) for split in itertools.product(sizes, sizes)]


def cases() -> list[tuple[int, int, int, str, int]]:
    """(ranks, attn_dp_size, ep_size, feature, seed), each size's together."""
    found = []
    for size in (2, 4):
        for i, (name, feature) in enumerate(FEATURES.items()):
            fitting = [layout for layout in layouts(size) if feature.fits(*layout)]
            if LONG:
                found += [(*layout, name, seed) for layout in fitting for seed in SEEDS]
            elif name == "greedy":
                found += [(*layout, name, j % len(SEEDS)) for j, layout in enumerate(fitting[:: size // 2])]
            elif size == (2, 4)[i % 2]:
                found.append((*fitting[i % len(fitting)], name, i % len(SEEDS)))
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """By seed."""
    folders = [tmp_path_factory.mktemp("official") / str(seed) for seed in SEEDS]
    for seed, folder in enumerate(folders):
        make_checkpoint(folder, seed)
    return folders


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, int], list[list[int]]]:
    """Of one rank, by feature and seed, as far as they were wanted."""
    return {}


@pytest.mark.parametrize(
    ("ranks", "attn_dp_size", "ep_size", "name", "seed"),
    cases(),
    indirect=["ranks"],
    ids=lambda value: str(value).replace(" ", "_"),
)
def test_a_layout_gives_the_tokens_of_one_rank(
    ranks, attn_dp_size, ep_size, name, seed, checkpoints, answers, record_property
):
    record_property("matrix", (f"{ranks.size} ranks, dp {attn_dp_size}, ep {ep_size}", name))
    feature, folder = FEATURES[name], checkpoints[seed]
    if (name, seed) not in answers:
        answers[name, seed] = feature.expected(folder, seed)
    config = feature.config(folder, ranks.size, attn_dp_size, ep_size)
    world = served(ranks, config, graphs=feature.graphs)
    assert feature.requests(world, seed, feature.sampling) == answers[name, seed]
    plan = memory_plan(
        ModelConfig.load(Path(config.model.path)), config, 1 << 30, mtp=config.speculation.num_draft_tokens > 0
    )
    assert world.loaded.weight_bytes == plan.weight_bytes  # so no rank has read more than its share
    assert world.loaded.kv_bytes_per_token == plan.kv_bytes_per_token


def test_a_layout_that_does_not_divide_the_model_is_refused(ranks, tmp_path):
    make_checkpoint(tmp_path, 1, n_routed_experts=6 if ranks.size == 4 else 5, num_experts_per_tok=2)
    with pytest.raises(StartError, match=rf"splits n_routed_experts over {ranks.size} ranks, which does not divide"):
        served(ranks, config_of(tmp_path, ranks.size, 1, ranks.size))
