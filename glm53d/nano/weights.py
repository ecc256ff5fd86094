"""The nano model's checkpoint folder: package data plus weights drawn from a seed, made on first use. No torch.

The weights are untrained: the model has GLM-5.3's architecture and speaks no language.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from glm53d.errors import StartError
from glm53d.model.config import ModelConfig
from glm53d.model.tensors import Shape, mtp_shapes, tensor_shapes

PACKAGE = Path(__file__).parent
DATA = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SEED = 53


def nano_folder() -> Path:
    """A folder like any checkpoint's: configs, tokenizer, model.safetensors. Raises StartError where none can be made.

    It lies in the user's cache, named by a hash of all that it is made from, and appears there whole or not at all:
    several starters at once each make one, the first rename wins, and all are equal.
    """
    parent = _cache() / "glm53d"
    folder = parent / f"nano-{_content_hash()}"
    if folder.is_dir():
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".nano-", dir=parent) as temp:
            made = Path(temp) / "made"
            _make(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another starter was first
                    raise
    except OSError as error:
        raise StartError(
            f"the nano model's weights cannot be kept in {parent} ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return folder


def _cache() -> Path:
    set_by_user = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(set_by_user):  # the variable's specification: a relative path is invalid and must be ignored
        return Path(set_by_user)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise StartError(
            "the nano model's weights have no place, as this user has no home: set XDG_CACHE_HOME to a folder"
        ) from None


def _content_hash() -> str:
    """Of the data and of this file, which is the recipe for the weights."""
    digest = hashlib.sha256()
    for path in (*(PACKAGE / name for name in DATA), Path(__file__)):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _make(folder: Path) -> None:
    folder.mkdir()
    for name in DATA:
        shutil.copyfile(PACKAGE / name, folder / name)
    rng = np.random.Generator(np.random.PCG64(SEED))
    config = ModelConfig.load(PACKAGE)
    shapes = tensor_shapes(config) | mtp_shapes(config)
    write_safetensors(folder / "model.safetensors", {name: _draw(rng, name, shape) for name, shape in shapes.items()})


def _draw(rng: np.random.Generator, name: str, shape: Shape) -> np.ndarray:
    """Weights under which activations keep their size through the layers."""
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("k_norm.bias"):
        return np.zeros(shape, np.float32)
    if name.endswith("e_score_correction_bias"):
        return rng.standard_normal(shape, np.float32) * 0.05
    scale = 1.0 if name == "model.embed_tokens.weight" else shape[-1] ** -0.5
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 arrays as a checkpoint has them: BF16, the router's bias F32.

    The format is 8 bytes of header length, a JSON header with each tensor's type, shape and offsets, then the data. It
    is written here because the safetensors package wants torch for BF16.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts, offset = [], 0
    for name, array in tensors.items():
        keep = name.endswith("e_score_correction_bias")
        data = array.tobytes() if keep else _bf16(array).tobytes()
        header[name] = {
            "dtype": "F32" if keep else "BF16",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # data starts aligned
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        file.writelines(parts)


def _bf16(array: np.ndarray) -> np.ndarray:
    """The upper halves of float32, rounded to nearest even."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
