"""Logits -> the next id of each row. [R51]

Order of application, as in docs/api.md:

    vocabulary    ids that no token has are cut off
    bias          logit_bias is added; with allowed_token_ids all others are out
    penalties     repetition, then frequency and presence, by what was said
    masks         of a grammar, what it does not allow is out; before min_new_tokens so are the ids that end a turn,
                  unless nothing else is left
    temperature   0 takes the largest logit that is left, of equals the lowest id; else they are divided by it
    filters       of the ids in falling order of probability (of equals, the lowest id first) stay the first top_k, of
                  those the fewest whose share of their sum reaches top_p, of those the ones with at least min_p times
                  the best one's probability
    draw          one of these by its share

A row's random number is a hash of (seed, position of the sampled token), and a row's arithmetic looks at no other row:
so a request with a seed gets the same tokens alone, in any batch, and after it was put back and resumed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from glm53d.ipc.batch import Batch
from glm53d.runner.masks import Masks
from glm53d.runner.tables import SamplingTables, in_parts

GREEDY, PLAIN, FILTERED = 0, 1, 2  # what a row needs: a maximum; a distribution; a sorted one, the only dear case


class Sampler:
    """Sampling parameters of every request slot, on the device, and what is done with them. Owned by one runner."""

    def __init__(self, max_slots: int, tables: SamplingTables, eos_ids: Sequence[int] = ()):
        """eos_ids: those that end a turn. What the tables have no column for has no token and is never sampled."""
        device = tables.device

        def per_slot(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_slots, dtype=dtype, device=device)

        self.tables = tables
        self.device = device
        self.kind = np.zeros(max_slots, np.int8)  # on the host, which decides what to launch
        self.min_position = np.zeros(max_slots, np.int64)  # where an end of turn may stand at the earliest
        self.eos_ids = torch.tensor([i for i in eos_ids if i < tables.vocab_size], dtype=torch.int64, device=device)
        self.seed, self.top_k = per_slot(torch.int64), per_slot(torch.int64)
        self.temperature, self.top_p, self.min_p = (per_slot(torch.float32) for _ in range(3))

    def init_slots(self, batch: Batch) -> None:
        """Take over the parameters of requests that begin."""
        self.tables.init_slots(batch)
        inits = batch.inits
        filtered = (inits["top_k"] > 0) | (inits["top_p"] < 1.0) | (inits["min_p"] > 0.0)
        slots = inits["slot"].astype(np.int64)
        self.kind[slots] = np.where(inits["temperature"] == 0.0, GREEDY, np.where(filtered, FILTERED, PLAIN))
        self.min_position[slots] = inits["num_prompt_ids"].astype(np.int64) + inits["min_new_tokens"]
        at = torch.from_numpy(slots).to(self.device)
        self.seed[at] = torch.from_numpy(inits["seed"].copy().view(np.int64)).to(self.device)
        self.top_k[at] = torch.from_numpy(inits["top_k"].astype(np.int64)).to(self.device)
        for mine, name in ((self.temperature, "temperature"), (self.top_p, "top_p"), (self.min_p, "min_p")):
            mine[at] = torch.from_numpy(inits[name].copy()).to(self.device)

    def sample(
        self,
        logits: Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        num_before: np.ndarray,
        masks: Masks | None = None,
    ) -> Tensor:
        """One id per row, int64 on the device. The logits stay as they are.

        Args:
            logits: [num_rows, vocab_size] float32.
            slots: [num_rows] the request slot of each row.
            positions: [num_rows] where the sampled token will stand: the number of tokens before it.
            num_before: [num_rows] how many of those are drafts of the slot.
            masks: of rows whose id a grammar narrows; None: of none.
        """
        logits = logits[:, : self.tables.vocab_size]
        logits = self.tables.add_bias(logits, slots)
        logits = self.tables.penalise(logits, slots, num_before)
        if masks is not None:
            logits = masks.apply(logits)
        logits = self._mask_early_ends(logits, slots, positions)
        return self._choose(logits, slots, positions)

    def _mask_early_ends(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        early = np.flatnonzero(positions < self.min_position[slots])
        if not len(early):
            return logits
        row = torch.from_numpy(early).to(self.device, non_blocking=True)
        own = logits[row]
        masked = own.index_fill(1, self.eos_ids, -torch.inf)
        nothing_left = masked.isneginf().all(-1, keepdim=True)
        return logits.index_copy(0, row, torch.where(nothing_left, own, masked))

    def _choose(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """What temperature 0 takes, and what the others draw."""
        ids = logits.argmax(-1)
        kinds = self.kind[slots]
        for kind, draw in ((PLAIN, self._plain), (FILTERED, self._filtered)):
            for rows in in_parts(np.flatnonzero(kinds == kind)):
                index = torch.from_numpy(np.stack([rows, slots[rows], positions[rows]]).astype(np.int64))
                row, slot, position = index.to(self.device, non_blocking=True)  # else it would wait for the step
                own = logits[row]
                # Less the best one, which becomes 0: so nothing overflows, however low the temperature.
                scaled = (own - own.gather(1, ids[row, None])) / self.temperature[slot, None]
                ids[row] = draw(scaled, slot, uniform(self.seed[slot], position))
        return ids

    def _plain(self, logits: Tensor, slot: Tensor, u: Tensor) -> Tensor:
        return _draw(torch.exp(logits), u)

    def _filtered(self, logits: Tensor, slot: Tensor, u: Tensor) -> Tensor:
        logits, ids = logits.sort(dim=-1, descending=True, stable=True)
        weights = torch.exp(logits)  # relative to the best, so min_p compares with it directly
        top_k, top_p, min_p = self.top_k[slot, None], self.top_p[slot, None], self.min_p[slot, None]
        rank = torch.arange(logits.shape[1], device=logits.device)
        weights = torch.where((rank < top_k) | (top_k == 0), weights, 0.0)
        before = weights.double().cumsum(-1) - weights
        total = before[:, -1:] + weights[:, -1:]
        weights = torch.where(((before < top_p * total) | (rank == 0)) & (weights >= min_p), weights, 0.0)
        return ids.gather(1, _draw(weights, u)[:, None])[:, 0]


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """The index i with prefix_sum(i) <= u * total < prefix_sum(i + 1), per row: never one of weight 0, as u < 1.

    Weights that are no numbers, as of logits that are not, give the last index: whatever it is, it is one of a token.
    """
    sums = weights.double().cumsum(-1)
    found = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True)[:, 0]
    return found.clamp(max=weights.shape[1] - 1)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Random numbers in [0, 1) with 53 bits, float64: a hash of (seed, position), equal on every device.

    Two rounds of the splitmix64 finaliser, each a bijection in which any input bit changes half of the output's bits:
    so neighbouring seeds and neighbouring positions are as good as far ones.
    """
    mixed = _mix(_mix(seed + GOLDEN) ^ (position * GOLDEN))
    return (mixed >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64: products wrap like unsigned ones; >> drags the sign along, so it is masked."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * MIX_1
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * MIX_2
    return x ^ (x >> 31 & (1 << 33) - 1)


# The constants of splitmix64, as int64.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
