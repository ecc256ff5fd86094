"""A layer's native form on a CPU against its form in torch: states, cached rows, and what its indexer chooses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from glm53d import _native
from glm53d.model import cpu_layer
from glm53d.model.config import ModelConfig
from glm53d.model.cpu_layer import MAX_TOKENS
from glm53d.model.step import choice_of
from tests.helpers.model import SLOTS, LoneModel
from tests.model.synthetic import make_checkpoint

CONTEXT = 192


@pytest.mark.parametrize("seed", range(4))
def test_both_forms_of_a_layer_give_the_same(tmp_path: Path, seed: int):
    """Before and beyond what indexers choose, rows of unequal length, one token of each or several."""
    make_checkpoint(tmp_path, seed, rms_norm_eps=1e-2)  # large enough to be seen in each norm
    config = ModelConfig.load(tmp_path)
    native, plain = LoneModel(tmp_path, CONTEXT), LoneModel(tmp_path, CONTEXT, native=False)
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
    # A chain's step, which takes a choice as it is and caches no key.
    ids, found = draw([1] * 3), []
    for side in (native, plain):
        step = side.step(ids, prefix)
        step.groups, step.keeps_choice = [choice_of(step.groups, [0, 1, 2], 2)], True
        states = torch.linspace(-1, 1, 3 * config.hidden_size).view(3, -1)
        found.append(side.mtp.forward(step, states, side.cache)[0])
    assert torch.allclose(*found, atol=1e-4) and torch.allclose(native.rows(), plain.rows(), atol=1e-4)


@pytest.mark.parametrize("context", [5, 60])  # below what indexers choose, and beyond
def test_a_rows_numbers_do_not_depend_on_a_longer_row_beside_it(tmp_path: Path, context: int):
    make_checkpoint(tmp_path, 0)
    lone = LoneModel(tmp_path, CONTEXT)
    assert 5 < lone.config.index_topk < 60
    generator = torch.Generator().manual_seed(1)
    own, other = (torch.randint(0, lone.config.vocab_size, (n,), generator=generator) for n in (context, 100))
    lone.run([own, other], [0, 0])
    ids = [own[:1], other[:1]]
    alone, beside = (lone.model.forward(lone.step(ids[:rows], [context, 100]), lone.cache) for rows in (1, 2))
    assert alone[0].equal(beside[0])


def test_other_steps_and_other_layers_stay_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_checkpoint(tmp_path, 0)
    one, long = torch.zeros(1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    fp8, bfloat16 = (
        LoneModel(tmp_path, CONTEXT, fp8=True),
        LoneModel(tmp_path, CONTEXT, dtype=torch.bfloat16),
    )
    assert not any(layer.on_cpu.takes(fp8.step([one], [4]), fp8.cache) for layer in fp8.layers)  # type: ignore[union-attr]
    assert all(layer.on_cpu is None for layer in bfloat16.layers)
    monkeypatch.setattr(cpu_layer, "MAX_BYTES", 1000)
    assert all(layer.on_cpu is None for layer in LoneModel(tmp_path, CONTEXT).layers)
    monkeypatch.undo()
    side = LoneModel(tmp_path, CONTEXT)
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
        "down": [matrix], "floor": 0.1, "q_floor": 0.1, "kv_floor": 0.1, "index_eps": 1e-6, "scaling": 1.0,
    }  # fmt: skip
    assert _native.CpuLayer(**whole).all_queries == 8
    short, wide = np.zeros(3, np.float32), np.zeros((4, 9), np.float32)
    for name, wrong in {
        "mlp_norm": short, "q_norm": short, "from_x": wide, "from_q": wide, "kv_b": matrix, "out": wide,
        "gate_up": [], "down": [wide], "router": matrix, "index_dim": 4, "index_heads": 1, "rope": 3, "chosen": 1,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=r"is not \[|differ|need|has heads"):
            _native.CpuLayer(**(whole | {name: wrong}))
    # A copy of another type would be gone before it is looked at.
    for name, wrong in {"mlp_norm": vector.astype(np.float64), "out": matrix.astype(np.float16)}.items():
        with pytest.raises(TypeError):
            _native.CpuLayer(**(whole | {name: wrong}))
    with pytest.raises(TypeError):
        _native.CpuLayer(**(whole | {"down": [matrix.astype(np.float64)]}))
