"""A checkpoint folder -> tensors. What is wrong with it is known from the headers, before a byte of weights is read."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glm53d.errors import CheckpointError
from glm53d.model.config import ModelConfig
from glm53d.model.tensors import tensor_shapes

log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F32", "BF16", "F16"}
MAX_LISTED = 4  # names in a message; the count says how many there are


class Checkpoint:
    """The tensors of one folder, read by official name in any order. The files are memory-mapped until close().

    Opening raises CheckpointError naming the tensors that are missing, too many, of another shape or of a format that
    we cannot compute with. Layers behind the model's own (MTP) may be there and are left unread.
    """

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        if config.quantization_config is not None:
            method = config.quantization_config.quant_method
            raise CheckpointError(f"{folder}: the torch engine reads unquantised checkpoints, and this one is {method}")
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.bytes_read = 0  # in the form kept, of all tensors so far
        self._files = {name: _open(folder / name) for name in _file_names(folder)}
        self._file_of = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118
        self._check(config)

    def read(self, name: str) -> Tensor:
        """One tensor on the device, in the arithmetic's dtype."""
        return self._read(name, self.dtype)

    def read_float32(self, name: str) -> Tensor:
        """One tensor that must not be rounded: the router's bias is spread over a few BF16 steps only."""
        return self._read(name, torch.float32)

    def close(self) -> None:
        """Drop the maps. A tensor kept in its stored form on the CPU holds its own map on."""
        self._files.clear()
        self._file_of.clear()

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._file_of[name].get_tensor(name).to(device=self.device, dtype=dtype)
        self.bytes_read += tensor.nbytes
        return tensor

    def _check(self, config: ModelConfig) -> None:
        expected = tensor_shapes(config)
        mtp = {name for name in self._file_of.keys() - expected.keys() if _is_mtp(name, config)}
        self._refuse("missing", (name for name in expected if name not in self._file_of))
        self._refuse("not of this model", sorted(self._file_of.keys() - expected.keys() - mtp))
        self._refuse("of a wrong shape", _misshapen(self._file_of, expected))
        self._refuse("not floating point", _not_float(self._file_of, expected))
        if mtp:
            log.info("%s: %d tensors of the MTP layer are left unread", self.folder, len(mtp))

    def _refuse(self, what: str, names: Iterator[str] | list[str]) -> None:
        if wrong := list(names):
            more = f" and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
            raise CheckpointError(f"{self.folder}: tensors {what}: {', '.join(wrong[:MAX_LISTED])}{more}")


def _file_names(folder: Path) -> list[str]:
    """The files that hold the tensors: the index's shards, or the one file."""
    path = folder / INDEX
    if not path.exists():
        return [SINGLE]
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    names = sorted(set(index.weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{path}: {outside[0]!r} is not the name of a file beside it")
    return names


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _is_mtp(name: str, config: ModelConfig) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    first = config.num_hidden_layers
    return match is not None and first <= int(match[1]) < first + config.num_nextn_predict_layers


def _misshapen(files: dict[str, safe_open], expected: dict[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in expected.items():
        found = tuple(files[name].get_slice(name).get_shape())
        if found != shape:
            yield f"{name} is {list(found)} instead of {list(shape)}"


def _not_float(files: dict[str, safe_open], expected: dict[str, tuple[int, ...]]) -> Iterator[str]:
    for name in expected:
        dtype = files[name].get_slice(name).get_dtype()
        if dtype not in FLOATS:
            yield f"{name} is {dtype}"
