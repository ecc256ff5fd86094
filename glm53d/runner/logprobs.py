"""Logprobs: what the model itself made of a token, beside the likeliest ids; for rows that ask. [R38]

They are the log-softmax of the model's logits over its whole vocabulary, in float32, before temperature and all else
that sampling does with them. Named beside a token are only ids that the tokenizer has.

A step's sampled rows have their logits anyway. Of a prompt's tokens they are made here, from the states behind the last
layer: so many at a time on all ranks together that a slice stays small whatever the prompt's length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from glm53d.ipc.batch import Batch, Logprobs
from glm53d.ipc.records import LOGPROB
from glm53d.model.glm import Glm
from glm53d.model.step import MAX_ELEMENTS, parts
from glm53d.runner.rows import Rows, within


@dataclass(slots=True, eq=False)
class Asked:
    """Logprobs of some of a step's tokens, still on the device."""

    rows: np.ndarray  # [n] of the batch, ascending
    place: np.ndarray  # [n] among what its row has sampled; 0 for a prompt's token
    ids: Tensor  # [n, width] int64: the token, then the likeliest
    logprobs: Tensor  # [n, width] float32

    @classmethod
    def of(cls, rows: np.ndarray, place: np.ndarray, logits: Tensor, ids: Tensor, top: int, num_ids: int) -> "Asked":
        """Args: logits: [n > 0, vocab_size] float32. ids: [n] int64. top: how many of the first num_ids to name."""
        found = [_pairs(logits[part], ids[part], top, num_ids) for part in parts(len(ids), logits.shape[1])]
        return cls(rows, place, torch.cat([pair[0] for pair in found]), torch.cat([pair[1] for pair in found]))


def _pairs(logits: Tensor, ids: Tensor, top: int, num_ids: int) -> tuple[Tensor, Tensor]:
    total = logits.logsumexp(-1, keepdim=True)
    best = logits[:, :num_ids].topk(top, -1)
    ids = torch.cat([ids[:, None], best.indices], 1)
    values = torch.cat([logits.gather(1, ids[:, :1]), best.values], 1)
    return ids, values - total


def of_prompts(model: Glm, batch: Batch, rows: Rows, hidden: Tensor, num_ids: int, *, is_normed: bool) -> list[Asked]:
    """Those of the prompts' targets that this rank owns. A collective: every rank calls it, if any row has targets.

    Args:
        hidden: [num_tokens, hidden] of this rank's tokens, behind the last layer or, is_normed, the last norm.
    """
    wanted, top = batch.targets >= 0, int(batch.top_logprobs.max())
    bounds = np.cumsum([0, *rows.dp_num_tokens])
    of_group = [np.flatnonzero(wanted[start:stop]) for start, stop in pairwise(bounds)]
    layout = model.ranks.layout
    mine = of_group[layout.attn_dp_rank]
    first, row_of = int(bounds[layout.attn_dp_rank]), np.repeat(np.arange(batch.num_rows), batch.row_extend_len)
    found = []
    for counts, part in _slices([len(tokens) for tokens in of_group], model.vocab_size, layout.attn_dp_rank):
        tokens = mine[part]
        at = torch.from_numpy(tokens).to(hidden.device)
        states = hidden[at] if is_normed else model.norm(hidden[at])
        logits = model.logits(states, counts)
        if not layout.owns_rows or not len(tokens):
            continue
        targets = torch.from_numpy(batch.targets[first + tokens].astype(np.int64)).to(hidden.device)
        found.append(Asked.of(row_of[first + tokens], np.zeros_like(tokens), logits, targets, top, num_ids))
    return found


def of_samples(batch: Batch, rows: Rows, logits: Tensor, ids: Tensor, num_ids: int) -> list[Asked]:
    """Those of what this rank has sampled; logits [n, vocab_size] and ids [n] of its rows, token by token."""
    num_logits = rows.num_logits[rows.owned]
    row = np.repeat(np.flatnonzero(rows.owned), num_logits)
    asking = np.flatnonzero(batch.top_logprobs[row] >= 0)
    if not len(asking):
        return []
    at, top = torch.from_numpy(asking).to(logits.device), int(batch.top_logprobs.max())
    return [Asked.of(row[asking], within(num_logits)[asking], logits[at], ids[at], top, num_ids)]


def _slices(counts: list[int], vocab_size: int, rank: int) -> Iterator[tuple[list[int], slice]]:
    """The groups' tokens in slices of equal bounds: how many each group has in it, and which are those of `rank`."""
    size = max(1, MAX_ELEMENTS // (vocab_size * len(counts)))
    for start in range(0, max(counts), size):
        in_slice = [min(max(count - start, 0), size) for count in counts]
        yield in_slice, slice(start, start + in_slice[rank])


def collect(asked: list[Asked], top_logprobs: np.ndarray, counts: np.ndarray) -> Logprobs | None:
    """One result of all; what a row has sampled behind its counts[row] is left out. Waits for the device."""
    if not asked:
        return None
    rows = np.concatenate([part.rows for part in asked])
    place = np.concatenate([part.place for part in asked])
    pairs = np.empty((len(rows), asked[0].ids.shape[1]), LOGPROB)
    pairs["id"] = torch.cat([part.ids for part in asked]).cpu().numpy()
    pairs["logprob"] = torch.cat([part.logprobs for part in asked]).cpu().numpy()
    pairs["id"][np.arange(pairs.shape[1]) > top_logprobs[rows, None]] = -1
    kept = np.flatnonzero(place < np.maximum(counts[rows], 1))
    kept = kept[np.argsort(rows[kept], kind="stable")]  # prompts' come first, and first in their rows
    return Logprobs(rows[kept].astype(np.int32), pairs[kept])
