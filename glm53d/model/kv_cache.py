"""The device side of the KV cache: paged rows of every layer, and each request slot's block table.

    latent[layer]   one row per token: its latent of kv_lora_rank, then the rotated key
    index_k[layer]  one row of index_head_dim per token, full layers only; an MTP layer, behind the others, is full
    block_table     [max_slots, max_pages]       page numbers; behind a request's end: stale

A token's row is its loc: page * page_size + position % page_size. Which pages are whose is the scheduler's business.

All pools lie in one piece of memory, all latents first. So ranks with equal pools find each other's pages at the same
offsets, and a page can be moved whole without knowing what is in it: page p of a pool is row p of pages().
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.config import ModelConfig
from glm53d.model.fp8 import E4M3, dequantise, latent_row_bytes, pack_latent, quantise, unpack_latent


class Rows(Protocol):
    """One layer's rows, in whatever form they are stored."""

    data: Tensor
    dtype: torch.dtype  # of what read gives

    def write(self, locs: Tensor, rows: Tensor) -> None:
        """Store rows [n, width] at locs [n]."""
        ...

    def read(self, locs: Tensor) -> Tensor:
        """[*locs.shape, width] in the arithmetic's dtype."""
        ...


class PlainRows:
    """Rows in the arithmetic's dtype: [num_slots, width]."""

    def __init__(self, data: Tensor):
        self.data, self.dtype = data, data.dtype

    def write(self, locs: Tensor, rows: Tensor) -> None:
        self.data.index_copy_(0, locs, rows)

    def read(self, locs: Tensor) -> Tensor:
        return F.embedding(locs, self.data)


class Fp8LatentRows:
    """Packed latent rows: [num_slots, 656] uint8 with GLM-5.3's sizes."""

    def __init__(self, data: Tensor, latent_dim: int, dtype: torch.dtype):
        self.data, self.latent_dim, self.dtype = data, latent_dim, dtype

    def write(self, locs: Tensor, rows: Tensor) -> None:
        self.data.index_copy_(0, locs, pack_latent(rows, self.latent_dim))

    def read(self, locs: Tensor) -> Tensor:
        return unpack_latent(self.data[locs], self.latent_dim).to(self.dtype)


class Fp8IndexPages:
    """Pages of index keys: [num_pages, page_size * (width + 4)] uint8, in each all values, then all factors."""

    def __init__(self, data: Tensor, page_size: int, dtype: torch.dtype):
        width = data.shape[1] // page_size - 4
        self.data, self.page_size, self.width, self.dtype = data, page_size, width, dtype
        values, scales = self.data.split([page_size * width, page_size * 4], 1)
        self._values, self._scales = values.unflatten(1, (page_size, width)), scales.unflatten(1, (page_size, 4))

    def write(self, locs: Tensor, rows: Tensor) -> None:
        values, scale = quantise(rows, self.width, power_of_two=True)
        page, at = locs // self.page_size, locs % self.page_size
        self._values[page, at] = values.view(torch.uint8)
        self._scales[page, at] = scale.view(torch.uint8)

    def read(self, locs: Tensor) -> Tensor:
        page, at = locs // self.page_size, locs % self.page_size
        scale = self._scales[page, at].view(torch.float32)
        return dequantise(self._values[page, at].view(E4M3), scale, self.width).to(self.dtype)


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a token leaves in the cache, and how much of it there is."""

    model: ModelConfig
    page_size: int
    dtype: torch.dtype  # of the arithmetic, and of rows that are not FP8
    fp8: bool = False
    num_mtp: int = 0

    @property
    def page_bytes(self) -> list[int]:
        """Of one page in each pool: the latents of every layer, then the index keys of every full one."""
        model = self.model
        latent, index = model.latent_dim * self.dtype.itemsize, model.index_head_dim * self.dtype.itemsize
        if self.fp8:
            latent, index = latent_row_bytes(model.kv_lora_rank, model.qk_rope_head_dim), model.index_head_dim + 4
        layers, full = model.num_hidden_layers + self.num_mtp, model.num_full_layers + self.num_mtp
        return [self.page_size * latent] * layers + [self.page_size * index] * full

    @property
    def bytes_per_token(self) -> int:
        """Of all layers together."""
        return sum(self.page_bytes) // self.page_size

    def memory_bytes(self, num_pages: int) -> int:
        """Of all pools together, each one aligned."""
        return sum(_aligned(num_pages * size) for size in self.page_bytes)

    def pages(self, memory: Tensor, num_pages: int) -> list[Tensor]:
        """The pools in a piece of memory_bytes, uint8: each [num_pages, bytes of a page]."""
        found, start = [], 0
        for size in self.page_bytes:
            found.append(memory[start : start + num_pages * size].view(num_pages, size))
            start += _aligned(num_pages * size)
        return found


class KvCache:
    """Owned by one runner. Rows are zero at first, so nothing ever read from it is not a number by accident."""

    def __init__(self, shape: KvShape, memory: Tensor, *, num_pages: int, max_slots: int, max_context_len: int):
        """memory: shape.memory_bytes(num_pages) of uint8, on the device, all zero."""
        model, page_size, device = shape.model, shape.page_size, memory.device
        self.shape, self.num_pages, self.page_size, self.dtype = shape, num_pages, page_size, shape.dtype
        self.pages = shape.pages(memory, num_pages)
        kinds = [*model.indexer_types, *["full"] * shape.num_mtp]
        self.latent: list[Rows] = [self._latent(pages) for pages in self.pages[: len(kinds)]]
        index_pages = iter(self.pages[len(kinds) :])
        self.index_k = [self._index_k(next(index_pages)) if kind == "full" else None for kind in kinds]
        max_pages = -(-max_context_len // page_size)
        self.block_table = torch.zeros(max_slots, max_pages, dtype=torch.int64, device=device)
        self._in_page = torch.arange(page_size, device=device)

    def _latent(self, pages: Tensor) -> Rows:
        if not self.shape.fp8:
            return self._plain(pages)
        rows = pages.view(self.num_pages * self.page_size, -1)
        return Fp8LatentRows(rows, self.shape.model.kv_lora_rank, self.dtype)

    def _index_k(self, pages: Tensor) -> Rows:
        return Fp8IndexPages(pages, self.page_size, self.dtype) if self.shape.fp8 else self._plain(pages)

    def _plain(self, pages: Tensor) -> Rows:
        return PlainRows(pages.view(self.num_pages * self.page_size, -1).view(self.dtype))

    def copy_pages(self, theirs: list[Tensor], source: Tensor, target: Tensor) -> None:
        """Page target[i] of ours becomes page source[i] of pools like ours, in every layer."""
        for mine, other in zip(self.pages, theirs, strict=True):
            mine.index_copy_(0, target, other.index_select(0, source))

    def append_pages(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> None:
        """block_table[slots[i], starts[i] : starts[i] + counts[i]] = the next counts[i] of pages, for each run i."""
        before = np.repeat(np.cumsum(counts) - counts, counts)
        columns = np.repeat(starts, counts) + np.arange(len(pages)) - before
        index = torch.from_numpy(np.stack([np.repeat(slots, counts), columns, pages]).astype(np.int64))
        slot, column, page = index.to(self.block_table.device, non_blocking=True)
        self.block_table[slot, column] = page

    def locs(self, slots: Tensor, length: int) -> Tensor:
        """Rows of the first `length` tokens of each slot [num_slots, length]; behind a request's end, anybody's."""
        pages = self.block_table[slots, : -(-length // self.page_size)]
        return (pages[..., None] * self.page_size + self._in_page).flatten(-2)[..., :length]

    def locs_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The row of one position of each slot."""
        page = self.block_table[slots, positions // self.page_size]
        return page * self.page_size + positions % self.page_size


ALIGNMENT = 256


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
