"""A checkpoint folder -> tensors. What is wrong with its form is known from headers, before a byte of weights is read.

Weights are stored as floats, or as FP8 in blocks: a linear's values are e4m3, and beside it stands, as
`<name>_scale_inv`, one float32 factor for each block. Whether one is quantised is told by what is stored, not by
config.json, which calls some tensors by names that they do not have.

On a GPU quantised linears stay as they are stored, or they would not fit; elsewhere they are dequantised once.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from glm53d.errors import CheckpointError
from glm53d.model.config import ModelConfig
from glm53d.model.tensors import Shape, mtp_shapes, scale_shape, tensor_shapes

log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SCALE = "_scale_inv"
FP8, FLOATS = "F8_E4M3", {"F32", "BF16", "F16"}
MAX_LISTED = 4  # names in a message; the count says how many there are
ALL = slice(None)


@dataclass(slots=True, eq=False)
class Fp8Weight:
    """A part of a quantised linear, as stored. The part may begin and end inside of blocks."""

    values: Tensor  # e4m3 [rows, columns]
    scale: Tensor  # float32, of the blocks that the part touches
    row_block: Tensor  # [rows, 1] int64, where in scale; shared by all parts that are cut alike, as is column_block
    column_block: Tensor  # [columns]
    dtype: torch.dtype

    def dense(self) -> Tensor:
        """[rows, columns] in the arithmetic's dtype."""
        return (self.values.float() * self.scale[self.row_block, self.column_block]).to(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedInput:
    """A quantised linear whose input is rounded to FP8 too, each token in groups of channels, as FP8 kernels do it."""

    weight: Tensor | Fp8Weight
    group: int  # channels


Weight = Tensor | Fp8Weight | RoundedInput
"""Of a linear, [out, in] or a part of it."""


class Checkpoint:
    """The tensors of one folder, read by official name in any order, whole or in part. Memory-mapped until close().

    Opening raises CheckpointError naming the tensors that are missing, too many, of another shape or of a format that
    we cannot compute with, a file that is cut short, and an index that does not say what the files hold.

    Args:
        with_mtp: the MTP layers must be complete too. Without it they may be there and are left unread.
        keep_fp8: read_weight gives quantised linears as they are stored.
        fp8_inputs: and says of them that their inputs are rounded.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        with_mtp: bool = False,
        keep_fp8: bool = False,
        fp8_inputs: bool = False,
    ):
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.keep_fp8, self.fp8_inputs = keep_fp8, fp8_inputs
        self._cuts: dict[tuple[int, int, int], tuple[slice, Tensor]] = {}
        self.bytes_read = 0  # in the form kept, of all tensors so far
        quantization = config.quantization_config
        self._block = quantization.weight_block_size if quantization is not None else None
        self._file_of = self._open_all()
        self._check(config, with_mtp)

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """One tensor, or a part of it, on the device, in the arithmetic's dtype. Raises CheckpointError if not finite.

        Only the part is read from disk: a rank touches no more than its own share.
        """
        return self._read(name, rows, columns, self.dtype)

    def read_float32(self, name: str) -> Tensor:
        """One tensor that must not be rounded: the router's bias is spread over a few BF16 steps only."""
        return self._read(name, ALL, ALL, torch.float32)

    def read_weight(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Weight:
        """A linear's weight [out, in], or a part of it, in the form it is kept in. Raises CheckpointError likewise."""
        is_quantised = self._file_of[name].get_slice(name).get_dtype() == FP8
        kept = self._read_fp8(name, rows, columns) if is_quantised and self.keep_fp8 else self.read(name, rows, columns)
        if is_quantised and self.fp8_inputs:
            assert self._block is not None
            return RoundedInput(kept, self._block[1])
        return kept

    def _read_fp8(self, name: str, rows: slice, columns: slice) -> Fp8Weight:
        weight = self._fp8(name, rows, columns)
        if not torch.isfinite(weight.dense()).all():
            raise CheckpointError(f"{self.folder}: {name} has values that are not finite")
        self.bytes_read += weight.values.nbytes + weight.scale.nbytes
        return weight

    def close(self) -> None:
        """Drop the maps. A tensor kept in its stored form on the CPU holds its own map on."""
        self._file_of.clear()

    def _read(self, name: str, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        stored = self._file_of[name].get_slice(name)
        if stored.get_dtype() == FP8:
            tensor = self._fp8(name, rows, columns).dense()
        else:
            part = stored[rows, columns] if len(stored.get_shape()) == 2 else stored[rows]
            tensor = part.to(device=self.device, dtype=dtype)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self.folder}: {name} has values that are not finite")
        self.bytes_read += tensor.nbytes
        return tensor

    def _fp8(self, name: str, rows: slice, columns: slice) -> Fp8Weight:
        assert self._block is not None
        stored = self._file_of[name].get_slice(name)
        cuts = [
            self._cut(*part.indices(size)[:2], block)
            for part, size, block in zip((rows, columns), stored.get_shape(), self._block, strict=True)
        ]
        (row_blocks, row), (column_blocks, column) = cuts
        scale = self._file_of[name + SCALE].get_slice(name + SCALE)[row_blocks, column_blocks].to(self.device)
        values = stored[rows, columns].to(self.device)
        return Fp8Weight(values, scale, row[:, None], column, self.dtype)

    def _cut(self, start: int, stop: int, block: int) -> tuple[slice, Tensor]:
        """The blocks that a stretch of a dimension touches; of each of its elements, its block's place among them."""
        key = start, stop, block
        if key not in self._cuts:
            first = start // block
            at = torch.arange(start, stop, device=self.device) // block - first
            self._cuts[key] = slice(first, -(-stop // block)), at
        return self._cuts[key]

    def _open_all(self) -> dict[str, safe_open]:
        """The file of each tensor: of the one file, or as the index says."""
        path = self.folder / INDEX
        if not path.exists():
            file = _open(self.folder / SINGLE)
            return dict.fromkeys(file.keys(), file)
        try:
            index = msgspec.json.decode(path.read_bytes(), type=_Index)
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        names = sorted(set(index.weight_map.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(f"{path}: {outside[0]!r} is not the name of a file beside it")
        files = {name: _open(self.folder / name) for name in names}
        found = {name: set(file.keys()) for name, file in files.items()}
        weight_map = index.weight_map
        self._refuse("not in the file that the index names", (n for n, f in weight_map.items() if n not in found[f]))
        self._refuse("in a file but not so in the index",
                     (n for f, inside in found.items() for n in sorted(inside) if weight_map.get(n) != f))  # fmt: skip
        return {name: files[file] for name, file in weight_map.items()}

    def _check(self, config: ModelConfig, with_mtp: bool) -> None:
        expected = tensor_shapes(config) | (mtp_shapes(config) if with_mtp else {})
        left = {name for name in self._file_of if not with_mtp and _is_mtp(name, config)}
        self._refuse("missing", (name for name in expected if name not in self._file_of))
        dtypes = {name: self._file_of[name].get_slice(name).get_dtype() for name in expected}
        quantised = [name for name in expected if dtypes[name] == FP8]
        if quantised and self._block is None:
            self._refuse("in FP8, for which config.json has no quantization_config", quantised)
        block = self._block or (1, 1)
        scales = {name + SCALE: scale_shape(expected[name], block) for name in quantised if len(expected[name]) == 2}
        self._refuse("not floating point", (f"{n} is {dtype}" for n, dtype in dtypes.items() if dtype not in
                                            FLOATS and n + SCALE not in scales))  # fmt: skip
        self._refuse("missing", (name for name in scales if name not in self._file_of))
        self._refuse("not of this model", sorted(self._file_of.keys() - expected.keys() - scales.keys() - left))
        self._refuse("of a wrong shape", self._misshapen(expected | scales))
        self._refuse("not F32", (n for n in scales if self._file_of[n].get_slice(n).get_dtype() != "F32"))
        if config.quantization_config is not None:
            plain = set(config.quantization_config.modules_to_not_convert)
            wrong = (name for name in quantised if name.removesuffix(".weight") in plain)
            self._refuse("in FP8, which config.json lists as not converted", wrong)
        if left:
            log.info("%s: %d tensors of the MTP layer are left unread", self.folder, len(left))

    def _misshapen(self, expected: dict[str, Shape]) -> Iterator[str]:
        for name, shape in expected.items():
            found = tuple(self._file_of[name].get_slice(name).get_shape())
            if found != shape:
                yield f"{name} is {list(found)} instead of {list(shape)}"

    def _refuse(self, what: str, names: Iterable[str]) -> None:
        if wrong := list(names):
            more = f" and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
            raise CheckpointError(f"{self.folder}: tensors {what}: {', '.join(wrong[:MAX_LISTED])}{more}")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _open(path: Path) -> safe_open:
    """Its header is checked against its size, so a file that is cut short is refused here."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _is_mtp(name: str, config: ModelConfig) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    first = config.num_hidden_layers
    return match is not None and first <= int(match[1]) < first + config.num_nextn_predict_layers
