"""Rows: what a rank must know of a Batch's rows, as host arrays: whose they are, and which tokens give logits."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from glm53d.ipc.batch import Batch
from glm53d.ipc.records import ROW_FEED, ROW_SAMPLE
from glm53d.model.layout import Layout
from glm53d.model.step import last_tokens


@dataclass(slots=True, eq=False)
class Rows:
    """Copies: the batch's own arrays may be overwritten once the step is launched. [num_rows], all attention-DP groups.

    A fed row begins with the slot's last sampled id; its drafts stand behind it, and each of its tokens gives logits.
    Another row that samples gives them of its last token alone. Of a masked row nothing counts behind the first sample.
    """

    slot: np.ndarray
    prefix_len: np.ndarray
    extend_len: np.ndarray
    fed: np.ndarray  # bool
    sampled: np.ndarray  # bool
    masked: np.ndarray  # bool
    own: slice  # this rank's group's
    owned: np.ndarray  # bool: sampled rows that are this very rank's to sample and report
    num_logits: np.ndarray  # of each row's last tokens
    dp_num_tokens: list[int]
    dp_num_logits: list[int]
    dp_num_sampled: list[int]

    @classmethod
    def of(cls, batch: Batch, layout: Layout) -> "Rows":
        fed = (batch.row_flags & ROW_FEED) != 0
        sampled = (batch.row_flags & ROW_SAMPLE) != 0
        num_logits = sampled * np.where(fed, batch.row_extend_len, 1)
        starts = np.searchsorted(batch.row_dp_rank, np.arange(layout.attn_dp_size + 1)).tolist()  # ordered by group
        own = slice(starts[layout.attn_dp_rank], starts[layout.attn_dp_rank + 1])
        owned, masked = np.zeros_like(sampled), np.zeros_like(sampled)
        masked[batch.mask_row] = True
        if layout.owns_rows:
            owned[own] = sampled[own]
        return cls(
            batch.row_slot.astype(np.int64), batch.row_prefix_len.copy(), batch.row_extend_len.copy(), fed, sampled,
            masked, own, owned, num_logits, batch.dp_num_tokens.tolist(),
            [int(num_logits[a:b].sum()) for a, b in pairwise(starts)],
            [int(sampled[a:b].sum()) for a, b in pairwise(starts)],
        )  # fmt: skip

    @property
    def seq_len(self) -> np.ndarray:
        return self.prefix_len + self.extend_len

    @property
    def ends(self) -> np.ndarray:
        """Behind each row's last token, among the tokens of all groups."""
        return np.cumsum(self.extend_len)

    def sampled_positions(self, of: np.ndarray) -> np.ndarray:
        """Where the samples of these rows will stand: one behind each token that gives logits."""
        return last_tokens(self.seq_len[of], self.num_logits[of]) + 1


def within(counts: np.ndarray) -> np.ndarray:
    """0 .. counts[0] - 1, then 0 .. counts[1] - 1, and so on."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
