"""A training checkpoint -> a folder in the official FP8 format, ready to be served.

    python -m bench.nano.export WORK_FOLDER OUT_FOLDER [--plain] [--mean OTHER_CHECKPOINT SHARE]

Linears are e4m3 in blocks of 128 x 128 with their factors beside them, all else is BF16, the router's bias F32. --plain
writes everything as F32: what FP8 is compared with. --mean takes the mean with an earlier checkpoint of the run, of
which it has that share: it is better than either. SHA256SUMS covers what the folder's other files hold.
"""

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm53d.model.config import ModelConfig
from glm53d.model.fp8 import E4M3, E4M3_MAX

BLOCK = 128
SMALLEST = 2.0**-126
PLAIN = ("norm", "embed_tokens", "lm_head", "weights_proj", "eh_proj", "mlp.gate.")  # linears and vectors kept in BF16
HERE = Path(__file__).parent
SUMS = "SHA256SUMS"


def official(state: dict[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The training module's tensors by their official names."""
    mtp = f"layers.{config.num_hidden_layers}."
    for name, tensor in state.items():
        if name.startswith("tool_heads"):  # for training alone
            continue
        name = name.replace("mtp.shared_head_norm", "mtp.shared_head.norm").replace("mtp.", mtp)
        if name.endswith("mlp.experts_gate_up"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                yield f"model.{name.removesuffix('_gate_up')}.{expert}.gate_proj.weight", gate
                yield f"model.{name.removesuffix('_gate_up')}.{expert}.up_proj.weight", up
        elif name.endswith("mlp.experts_down"):
            for expert, down in enumerate(tensor):
                yield f"model.{name.removesuffix('_down')}.{expert}.down_proj.weight", down
        elif name.endswith("mlp.gate"):
            yield f"model.{name}.weight", tensor
        elif name.endswith("mlp.bias"):
            yield f"model.{name.removesuffix('bias')}gate.e_score_correction_bias", tensor
        else:
            yield name if name.startswith("lm_head") else f"model.{name}", tensor


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> e4m3 of that shape, and the factor of each block."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [block rows, 128, block columns, 128]
    scale = (blocks.abs().amax((1, 3)) / E4M3_MAX).clamp_min(SMALLEST)
    values = (blocks / scale[:, None, :, None]).to(E4M3).flatten(2, 3).flatten(0, 1)
    return values[:rows, :columns].contiguous(), scale


def stored(tensors: dict[str, Tensor], *, plain: bool) -> dict[str, Tensor]:
    """As the files have them."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if plain or name.endswith("e_score_correction_bias"):
            out[name] = tensor.float().contiguous()
        elif any(part in name for part in PLAIN):
            out[name] = tensor.bfloat16().contiguous()
        else:
            out[name], out[name + "_scale_inv"] = quantised(tensor)
    return out


def write(state: dict[str, Tensor], tokenizer: Path, out: Path, *, plain: bool = False) -> None:
    """The whole folder: two weight files as large checkpoints have many, index, configs, tokenizer, sums."""
    out.mkdir(parents=True, exist_ok=True)
    fields = json.loads((HERE / "config.json").read_text())
    if not plain:
        fields["quantization_config"] = {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
        }  # fmt: skip
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    config = ModelConfig.load(out)
    tensors = stored(dict(official(state, config)), plain=plain)
    middle = f"model.layers.{config.num_hidden_layers // 2}."
    names = sorted(tensors, key=lambda name: (not name.startswith("model.layers."), name))
    first = [name for name in names if name < middle and name.startswith("model.layers.")]
    shards = [first, [name for name in names if name not in first]]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensors[name] for name in shard}, out / file, {"format": "pt"})
        (out / file).chmod(0o644)  # it is written for its owner alone, and an installed package is for all
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    shutil.copy(HERE / "generation_config.json", out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out)
    files = sorted(path for path in out.iterdir() if path.suffix in (".json", ".safetensors"))
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (out / SUMS).write_text("".join(sums))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--mean", nargs=2, metavar=("OTHER", "SHARE"))
    args = parser.parse_args()
    state = torch.load(args.work / "train.pt")["model"]
    if args.mean:
        other, share = torch.load(args.mean[0])["model"], float(args.mean[1])
        state = {name: torch.lerp(tensor, other[name], share) for name, tensor in state.items()}
    write(state, args.work / "tokenizer", args.out, plain=args.plain)


if __name__ == "__main__":
    main()
