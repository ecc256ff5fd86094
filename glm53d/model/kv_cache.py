"""The device side of the KV cache: paged rows of every layer, and each request slot's block table.

    latent[layer]   [num_pages * page_size, kv_lora_rank + rope]   one row per token: its latent, then the rotated key
    index_k[layer]  [num_pages * page_size, index_head_dim]        full layers only
    block_table     [max_slots, max_pages]                         page numbers; behind a request's end: stale

A token's row is its loc: page * page_size + position % page_size. Which pages are whose is the scheduler's business.
"""

import numpy as np
import torch
from torch import Tensor

from glm53d.model.config import ModelConfig


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
    ):
        def rows(width: int) -> Tensor:
            return torch.zeros(num_pages * page_size, width, dtype=dtype, device=device)

        self.page_size = page_size
        self.latent = [rows(config.latent_dim) for _ in config.indexer_types]
        self.index_k = [rows(config.index_head_dim) if kind == "full" else None for kind in config.indexer_types]
        max_pages = -(-max_context_len // page_size)
        self.block_table = torch.zeros(max_slots, max_pages, dtype=torch.int64, device=device)
        self._in_page = torch.arange(page_size, device=device)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """Of all layers together."""
        width = config.num_hidden_layers * config.latent_dim + config.num_full_layers * config.index_head_dim
        return width * dtype.itemsize

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
