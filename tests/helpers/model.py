"""A model of one rank with a cache of its own, computed step by step: no runner, no scheduler, no sampler."""

from pathlib import Path

import numpy as np
import torch

from glm53d.model.config import ModelConfig
from glm53d.model.glm import Glm
from glm53d.model.groups import RankGroups
from glm53d.model.kv_cache import KvCache, KvShape
from glm53d.model.layout import Layout
from glm53d.model.mtp import Mtp
from glm53d.model.step import Step, plan_step
from glm53d.model.weights import Checkpoint

SLOTS = 8


class LoneModel:
    """A checkpoint on the CPU, its MTP layer with it, and a full set of pages for each of SLOTS requests."""

    def __init__(
        self,
        folder: Path,
        context: int,
        *,
        page_size: int = 8,
        native: bool = True,
        fp8: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        """context: tokens of the longest request. native: layers may compute small steps in native code."""
        self.config = config = ModelConfig.load(folder)
        ranks, eps = RankGroups(Layout()), config.rms_norm_eps
        checkpoint = Checkpoint(folder, config, dtype, torch.device("cpu"), with_mtp=True)
        self.model = Glm(config, checkpoint, ranks, eps, lambda done: None)
        self.mtp = Mtp(config, checkpoint, ranks, self.model, eps)
        self.layers = [*self.model.layers, self.mtp.layer]
        if not native:
            for layer in self.layers:
                layer.on_cpu = None
        pages = -(-context // page_size)
        shape = KvShape(config, page_size, dtype, fp8=fp8, num_mtp=1)
        memory = torch.zeros(shape.memory_bytes(SLOTS * pages), dtype=torch.uint8)
        self.cache = KvCache(shape, memory, num_pages=SLOTS * pages, max_slots=SLOTS, max_context_len=pages * page_size)
        mixed = torch.randperm(SLOTS * pages, generator=torch.Generator().manual_seed(1)).numpy()
        self.cache.append_pages(np.arange(SLOTS), np.zeros(SLOTS, int), np.full(SLOTS, pages), mixed)

    def step(self, ids: list[torch.Tensor], prefix: list[int], num_logits: int | None = None) -> Step:
        """ids[i] behind prefix[i] tokens of slot i. Logits are wanted of each row's last num_logits tokens, or all."""
        counts = np.array([len(row) for row in ids])
        wanted = counts if num_logits is None else np.full(len(ids), num_logits)
        return plan_step(
            self.cache, torch.cat(ids), [int(counts.sum())], [int(wanted.sum())], np.arange(len(ids)),
            np.array(prefix[: len(ids)]), counts, wanted,
        )  # fmt: skip

    def run(self, ids: list[torch.Tensor], prefix: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """States behind the model's layers, and behind the MTP layer."""
        step = self.step(ids, prefix)
        states = self.model.forward(step, self.cache)
        return states, self.mtp.forward(step, states, self.cache)[0]

    def rows(self) -> torch.Tensor:
        """All that is cached."""
        return torch.cat([pages.flatten().view(torch.float32) for pages in self.cache.pages])
