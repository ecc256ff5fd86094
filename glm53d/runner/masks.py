"""Masks: which ids a grammar leaves to the rows of a step that it holds for. [R35]"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glm53d.ipc.batch import Batch
from glm53d.runner.rows import Rows


@dataclass(frozen=True, slots=True)
class Masks:
    """Of the logits that one rank samples from in a step."""

    rows: np.ndarray  # [n] int64, of the logits
    bits: np.ndarray  # [n, words] int32: bit i of word w says that id 32 w + i is legal

    @classmethod
    def of(cls, batch: Batch, rows: Rows) -> "Masks | None":
        """Those of this rank's own rows, of each row's first logits; None: there is none."""
        mine = rows.owned[batch.mask_row] if len(batch.mask_row) else np.empty(0, bool)
        if not mine.any():
            return None
        num_logits = np.where(rows.owned, rows.num_logits, 0)
        first = np.cumsum(num_logits) - num_logits
        return cls(first[batch.mask_row[mine]], batch.masks[mine])

    def apply(self, logits: Tensor) -> Tensor:
        """[n, vocab] logits without those of illegal ids. A form always holds: where a bias has ruled out every legal
        id, they are all alike.
        """
        row = torch.from_numpy(self.rows).to(logits.device)
        octets = torch.from_numpy(self.bits.view(np.uint8)).to(logits.device)  # a word's lowest bits come first
        place = torch.arange(8, dtype=torch.uint8, device=logits.device)
        legal = (octets[:, :, None] >> place & 1).flatten(1)[:, : logits.shape[1]].bool()
        masked = logits[row].masked_fill(~legal, -torch.inf)
        nothing_left = masked.isneginf().all(-1, keepdim=True)
        return logits.index_copy(0, row, masked.masked_fill(nothing_left & legal, 0.0))
