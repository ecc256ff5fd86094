"""Contexts around and far beyond what the indexer chooses, positions up to a million, and memory that stays bounded."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding

from glm53d.config import Config, Kv, Model
from glm53d.model import step
from glm53d.model.config import ModelConfig
from glm53d.model.layers import Rope
from glm53d.model.step import Gathered, Step, plan_step
from glm53d.runner import torch_runner
from glm53d.runner.torch_runner import TorchRunner
from tests.model.drive import Driver
from tests.model.test_parity import TRANSFORMERS_NORM_EPS, assert_parity
from tests.model.tiny import tiny_model


def make_driver(folder, context: int) -> Driver:
    config = Config(
        model=Model(path=str(folder), q_kv_norm_eps=TRANSFORMERS_NORM_EPS, max_context_len=context),
        kv=Kv(page_size=16, num_pages=context // 16),
    )
    return Driver(TorchRunner(config, 0, 8, 1 << 20), random.Random(0))


@pytest.mark.parametrize("seed", range(3))
def test_sparse_choice_is_that_of_transformers_around_and_far_beyond_topk(seed, tmp_path):
    model = tiny_model(seed, tmp_path)
    topk, rng = model.config.index_topk, random.Random(seed)
    driver = make_driver(tmp_path, 2048)
    lengths = [topk - 1, topk, topk + 1, 2 * topk - 1, 2 * topk, 2 * topk + 1, 5 * topk, 1500]
    requests = [driver.request([rng.randrange(model.config.vocab_size) for _ in range(n)]) for n in lengths]
    driver.run_until(requests, 3, max_chunk=400)
    for request in requests:
        assert_parity(model, request)


def test_angles_of_a_million_positions_are_those_of_transformers_without_a_table(tmp_path):
    model = tiny_model(0, tmp_path)
    rope = Rope(ModelConfig.load(tmp_path), torch.device("cpu"))
    assert rope.inv_freq.numel() == model.config.qk_rope_head_dim // 2
    positions = torch.tensor([0, 1, 2047, 2048, 131_071, (1 << 20) - 1])
    cos, sin = GlmMoeDsaRotaryEmbedding(model.config)(torch.zeros(1, 1), positions[None])
    angles, half = rope.angles(positions)[:, 0], rope.inv_freq.numel()
    assert (angles.real - cos[0, :, :half]).abs().max() < 1e-6
    assert (angles.imag - sin[0, :, :half]).abs().max() < 1e-6


class Largest(TorchDispatchMode):
    """The most elements that any operation's result has."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out._base is None:
            self.num_elements = max(self.num_elements, out.numel())
        return out


def test_temporary_arrays_do_not_grow_with_the_context(tmp_path, monkeypatch):
    """A chunk of 100 tokens behind 100 and behind 1,800: without cutting, index scores alone are 16 x 100 x context."""
    monkeypatch.setattr(step, "MAX_ELEMENTS", 1 << 16)
    model = tiny_model(4, tmp_path)
    driver = make_driver(tmp_path, 2048)
    request = driver.request([random.Random(1).randrange(model.config.vocab_size) for _ in range(1950)])
    largest = {}
    while request.computed < 1900:
        with Largest() as found:
            driver.run([(request, 100)])
        largest[request.computed] = found.num_elements
    assert model.config.index_n_heads * 100 * 1900 > 10 * largest[200]
    assert max(largest.values()) == largest[200], largest


def test_what_decoding_rows_look_at_is_gathered_in_bounded_parts_beside_a_long_one_too(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "MAX_ELEMENTS", most := 1 << 12)
    plans: list[Step] = []

    def planned(*args) -> Step:
        plans.append(plan_step(*args))
        return plans[-1]

    monkeypatch.setattr(torch_runner, "plan_step", planned)
    model, rng = tiny_model(0, tmp_path), random.Random(0)
    driver = make_driver(tmp_path, 2048)
    requests = [driver.request([rng.randrange(97) for _ in range(n)]) for n in (20, 30, 40, 1500, 20, 20)]
    driver.run_until(requests, 3, max_chunk=400)
    for request in requests:
        assert_parity(model, request)
    gathered = [group for plan in plans for group in plan.groups if isinstance(group, Gathered)]
    assert max(group.locs.numel() for group in gathered) <= most < 6 * 1500
