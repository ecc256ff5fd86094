"""Tiny checkpoints in the exact official format: config.json, FP8 blocks with partial edges, MTP layer, index, shards.

python -m tests.model.synthetic FOLDER [SEED]
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm53d.model.config import ModelConfig
from glm53d.model.tensors import mtp_shapes, scale_shape, tensor_shapes

LINEARS = ("_proj.weight", "wq_b.weight", "wk.weight", "kv_a_proj_with_mqa.weight")
FP8_MAX = 448.0


def official_config(seed: int, block: int = 16, **changes: Any) -> dict[str, Any]:
    """config.json of a model whose heads, widths and experts four ranks can split; hardly a size is whole blocks."""
    rng = random.Random(seed)
    layers = rng.randint(3, 4)
    fields: dict[str, Any] = {
        "model_type": "glm_moe_dsa",
        "vocab_size": rng.choice([97, 131]),
        "hidden_size": rng.choice([48, 72]),
        "intermediate_size": rng.choice([56, 96]),
        "moe_intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": rng.choice([2, 3]),
        "kv_lora_rank": rng.choice([16, 32]),
        "q_lora_rank": rng.choice([24, 40]),
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": rng.choice([12, 24]),
        "v_head_dim": rng.choice([16, 20]),
        "index_n_heads": 16,
        "index_head_dim": rng.choice([16, 32]),
        "index_share_for_mtp_iteration": True,
        "index_topk": rng.choice([8, 16, 24]),
        "indexer_types": ["full", "shared", *(rng.choice(["full", "shared"]) for _ in range(layers - 2))],
        "mlp_layer_types": ["dense", *["sparse"] * (layers - 1)],
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "eos_token_id": [0],
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [block, block],
        },
    } | changes
    plain = ["lm_head", "model.embed_tokens", "model.norm"]
    for layer in range(layers + 1):  # the indexer's head weights go there by a name that no tensor has
        plain += [f"model.layers.{layer}.{name}" for name in ("mlp.gate", "self_attn.indexers_proj", "eh_proj")]
    if fields["quantization_config"]:
        fields["quantization_config"]["modules_to_not_convert"] = plain
    return fields


def make_checkpoint(
    folder: Path, seed: int, shards: int = 3, *, predictable: bool = False, **changes: Any
) -> dict[str, Tensor]:
    """Write one with random weights; returns every tensor as stored. Without quantization_config all is BF16.

    predictable: a token alone nearly decides the next, for the model and for its MTP layer: most drafts are right.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(official_config(seed, **changes)))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
    config = ModelConfig.load(folder)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    drawn = {
        name: _draw(name, shape, generator) for name, shape in (tensor_shapes(config) | mtp_shapes(config)).items()
    }
    if predictable:
        _make_predictable(drawn, config)
    for name, values in drawn.items():
        tensors.update(_stored(name, values, config))
    write_shards(folder, tensors, shards)
    return tensors


def write_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """The files and their index, neighbours in different files."""
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Weights under which activations keep their size, and the router and every norm say something."""
    if "norm" in name and len(shape) == 1:
        return torch.rand(shape, generator=generator) * 0.6 + 0.7
    if name.endswith("e_score_correction_bias"):
        return torch.randn(shape, generator=generator) * 0.05
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def _make_predictable(drawn: dict[str, Tensor], config: ModelConfig) -> None:
    """Layers say little, the head finds the token before its own, the MTP layer looks at the next token's embedding."""
    for name, values in drawn.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values *= 0.05
    drawn["lm_head.weight"] = drawn["model.embed_tokens.weight"].roll(1, 0)
    join = drawn[f"model.layers.{config.num_hidden_layers}.eh_proj.weight"].zero_()
    join[:, : config.hidden_size] = torch.eye(config.hidden_size)


def _stored(name: str, values: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    if name.endswith("e_score_correction_bias"):
        return {name: values}
    plain = not name.endswith(LINEARS) or "weights_proj" in name or "eh_proj" in name
    if plain or config.quantization_config is None:
        return {name: values.bfloat16()}
    block = config.quantization_config.weight_block_size
    scale = torch.empty(scale_shape(tuple(values.shape), block))
    stored = torch.empty_like(values, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = values[at].abs().max() / FP8_MAX
            stored[at] = (values[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return {name: stored, name + "_scale_inv": scale}


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
