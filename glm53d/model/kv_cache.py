"""The device side of the KV cache: paged rows of every layer, and each request slot's block table.

    latent[layer]   one row per token: its latent of kv_lora_rank, then the rotated key
    index_k[layer]  one row of index_head_dim per token, full layers only; an MTP layer, behind the others, is full
    block_table     [max_slots, max_pages]       page numbers; behind a request's end: stale

A token's row is its loc: page * page_size + position % page_size. Which pages are whose is the scheduler's business.
"""

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

    def __init__(self, num_slots: int, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        self.latent_dim, self.dtype = config.kv_lora_rank, dtype
        width = latent_row_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
        self.data = torch.zeros(num_slots, width, dtype=torch.uint8, device=device)

    def write(self, locs: Tensor, rows: Tensor) -> None:
        self.data.index_copy_(0, locs, pack_latent(rows, self.latent_dim))

    def read(self, locs: Tensor) -> Tensor:
        return unpack_latent(self.data[locs], self.latent_dim).to(self.dtype)


class Fp8IndexPages:
    """Pages of index keys: [num_pages, page_size * (width + 4)] uint8, in each all values, then all factors."""

    def __init__(self, num_pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device):
        self.page_size, self.width, self.dtype = page_size, width, dtype
        self.data = torch.zeros(num_pages, page_size * (width + 4), dtype=torch.uint8, device=device)
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


class KvCache:
    """Owned by one runner. Rows are zero at first, so nothing ever read from it is not a number by accident."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        max_slots: int,
        max_context_len: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool = False,
        num_mtp: int = 0,
    ):
        def plain(width: int) -> Rows:
            return PlainRows(torch.zeros(num_pages * page_size, width, dtype=dtype, device=device))

        def latent() -> Rows:
            if fp8:
                return Fp8LatentRows(num_pages * page_size, config, dtype, device)
            return plain(config.latent_dim)

        def index_k() -> Rows:
            if fp8:
                return Fp8IndexPages(num_pages, page_size, config.index_head_dim, dtype, device)
            return plain(config.index_head_dim)

        self.page_size, self.dtype = page_size, dtype
        kinds = [*config.indexer_types, *["full"] * num_mtp]
        self.latent = [latent() for _ in kinds]
        self.index_k = [index_k() if kind == "full" else None for kind in kinds]
        max_pages = -(-max_context_len // page_size)
        self.block_table = torch.zeros(max_slots, max_pages, dtype=torch.int64, device=device)
        self._in_page = torch.arange(page_size, device=device)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, *, fp8: bool = False, num_mtp: int = 0) -> int:
        """Of all layers together."""
        latent, index = config.latent_dim * dtype.itemsize, config.index_head_dim * dtype.itemsize
        if fp8:
            latent, index = latent_row_bytes(config.kv_lora_rank, config.qk_rope_head_dim), config.index_head_dim + 4
        return (config.num_hidden_layers + num_mtp) * latent + (config.num_full_layers + num_mtp) * index

    def append_pages(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> None:
        """block_table[slots[i], starts[i] : starts[i] + counts[i]] = the next counts[i] of pages, for each run i."""
        before = np.repeat(np.cumsum(counts) - counts, counts)
        columns = np.repeat(starts, counts) + np.arange(len(pages)) - before
        index = torch.from_numpy(np.stack([np.repeat(slots, counts), columns, pages]).astype(np.int64))
        slot, column, page = index.to(self.block_table.device)
        self.block_table[slot, column] = page

    def locs(self, slots: Tensor, length: int) -> Tensor:
        """Rows of the first `length` tokens of each slot [num_slots, length]; behind a request's end, anybody's."""
        pages = self.block_table[slots, : -(-length // self.page_size)]
        return (pages[..., None] * self.page_size + self._in_page).flatten(-2)[..., :length]

    def locs_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The row of one position of each slot."""
        page = self.block_table[slots, positions // self.page_size]
        return page * self.page_size + positions % self.page_size
