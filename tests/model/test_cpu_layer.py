"""A layer's native form on a CPU against its form in torch: states, cached rows, and what its indexer chooses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from glm53d import _native
from glm53d.model.config import ModelConfig
from glm53d.model.cpu_layer import MAX_TOKENS
from glm53d.model.glm import Glm
from glm53d.model.groups import RankGroups
from glm53d.model.kv_cache import KvCache, KvShape
from glm53d.model.layout import Layout
from glm53d.model.mtp import Mtp
from glm53d.model.step import Step, plan_step
from glm53d.model.weights import Checkpoint
from tests.model.synthetic import make_checkpoint

SLOTS, PAGES, PAGE_SIZE = 8, 24, 8
CPU = torch.device("cpu")


class Side:
    """A model with its own cache; natively or in torch."""

    def __init__(self, folder: Path, *, native: bool, fp8: bool = False, dtype: torch.dtype = torch.float32):
        config = ModelConfig.load(folder)
        ranks, eps = RankGroups(Layout()), config.rms_norm_eps
        checkpoint = Checkpoint(folder, config, dtype, CPU, with_mtp=True)
        self.model = Glm(config, checkpoint, ranks, eps, lambda done: None)
        self.mtp = Mtp(config, checkpoint, ranks, self.model, eps)
        self.layers = [*self.model.layers, self.mtp.layer]
        if not native:
            for layer in self.layers:
                layer.on_cpu = None
        shape = KvShape(config, PAGE_SIZE, dtype, fp8=fp8, num_mtp=1)
        self.cache = KvCache(
            shape, torch.zeros(shape.memory_bytes(SLOTS * PAGES), dtype=torch.uint8), num_pages=SLOTS * PAGES,
            max_slots=SLOTS, max_context_len=PAGES * PAGE_SIZE,
        )  # fmt: skip
        pages = torch.randperm(SLOTS * PAGES, generator=torch.Generator().manual_seed(1)).numpy()
        self.cache.append_pages(np.arange(SLOTS), np.zeros(SLOTS, int), np.full(SLOTS, PAGES), pages)

    def step(self, ids: list[torch.Tensor], prefix: list[int]) -> Step:
        """ids[i] behind prefix[i] tokens of slot i."""
        counts = np.array([len(row) for row in ids])
        total = [int(counts.sum())]
        return plan_step(
            self.cache, torch.cat(ids), total, total, np.arange(len(ids)), np.array(prefix[: len(ids)]), counts, counts
        )

    def run(self, ids: list[torch.Tensor], prefix: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """States behind the model's layers, and behind the MTP layer."""
        step = self.step(ids, prefix)
        states = self.model.forward(step, self.cache)
        return states, self.mtp.forward(step, states, self.cache)[0]

    def rows(self) -> torch.Tensor:
        """All that is cached."""
        return torch.cat([pages.flatten().view(torch.float32) for pages in self.cache.pages])


@pytest.mark.parametrize("seed", range(4))
def test_both_forms_of_a_layer_give_the_same(tmp_path: Path, seed: int):
    """Before and beyond what indexers choose, rows of unequal length, one token of each or several."""
    make_checkpoint(tmp_path, seed)
    config = ModelConfig.load(tmp_path)
    native, plain = Side(tmp_path, native=True), Side(tmp_path, native=False)
    assert all(layer.on_cpu is not None for layer in native.layers)
    generator = torch.Generator().manual_seed(seed)
    prefix = [config.index_topk // 2, 2 * config.index_topk, 3, 40, 9, 17, 1, 30]

    def draw(lengths: list[int]) -> list[torch.Tensor]:
        return [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in lengths]

    prompts = draw(prefix)
    for side in (native, plain):
        side.run(prompts, [0] * SLOTS)
    for rows, number in ((1, 1), (8, 1), (3, 2), (8, 3), (5, 5), (8, 4)):
        ids = draw([number] * rows)
        step = native.step(ids, prefix)
        assert all(layer.on_cpu.takes(step, native.cache) for layer in native.layers)  # type: ignore[union-attr]
        for found, wanted in zip(native.run(ids, prefix), plain.run(ids, prefix), strict=True):
            assert torch.allclose(found, wanted, atol=1e-4)
        assert torch.allclose(native.rows(), plain.rows(), atol=1e-4)
        prefix[:rows] = [length + number for length in prefix[:rows]]


def test_other_steps_and_other_layers_stay_in_torch(tmp_path: Path):
    make_checkpoint(tmp_path, 0)
    one, long = torch.zeros(1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    fp8, bfloat16 = Side(tmp_path, native=True, fp8=True), Side(tmp_path, native=True, dtype=torch.bfloat16)
    assert not any(layer.on_cpu.takes(fp8.step([one], [4]), fp8.cache) for layer in fp8.layers)  # type: ignore[union-attr]
    assert all(layer.on_cpu is None for layer in bfloat16.layers)
    side = Side(tmp_path, native=True)
    too_many = [one.expand(MAX_TOKENS // SLOTS + 1)] * SLOTS
    for step in (side.step([long], [0]), side.step(too_many, [4] * SLOTS)):
        assert not any(layer.on_cpu.takes(step, side.cache) for layer in side.layers)  # type: ignore[union-attr]


def test_a_layer_refuses_weights_of_another_size():
    vector, matrix = np.zeros(4, np.float32), np.zeros((4, 4), np.float32)
    sizes = dict.fromkeys(("hidden", "q_rank", "kv_rank", "rope", "nope", "value", "width"), 4) | {"heads": 1}
    weights = dict.fromkeys(("attention_norm", "mlp_norm", "q_norm", "kv_norm"), vector)
    whole = sizes | weights | {
        "index_heads": 0, "index_dim": 0, "chosen": 0, "index_norm": None, "index_norm_bias": None, "router": None,
        "router_bias": None, "from_x": np.zeros((4, 12), np.float32), "from_q": np.zeros((4, 8), np.float32),
        "kv_b": np.zeros((8, 4), np.float32), "out": matrix, "gate_up": [np.zeros((4, 8), np.float32)],
        "down": [matrix], "floor": 0.1, "q_kv_floor": 0.1, "index_eps": 1e-6, "scaling": 1.0,
    }  # fmt: skip
    assert _native.CpuLayer(**whole).all_queries == 8
    short, wide = np.zeros(3, np.float32), np.zeros((4, 9), np.float32)
    for name, wrong in {
        "mlp_norm": short, "q_norm": short, "from_x": wide, "from_q": wide, "kv_b": matrix, "out": wide,
        "gate_up": [], "down": [wide], "router": matrix, "index_dim": 4, "chosen": 1,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=r"is not \[|differ|need"):
            _native.CpuLayer(**(whole | {name: wrong}))
    # A copy of another type would be gone before it is looked at.
    for name, wrong in {"mlp_norm": vector.astype(np.float64), "out": matrix.astype(np.float16)}.items():
        with pytest.raises(TypeError):
            _native.CpuLayer(**(whole | {name: wrong}))
    with pytest.raises(TypeError):
        _native.CpuLayer(**(whole | {"down": [matrix.astype(np.float64)]}))
