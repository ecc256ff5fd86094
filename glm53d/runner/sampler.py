"""Logits -> the next id of each row. [R51]

Order of application: ids that no token has are cut off, and before min_new_tokens those that end a turn. Temperature 0
takes the largest logit. Else logits are divided by temperature; of the ids in falling order of probability (of equals,
the lowest id first) stay the first top_k, of those the fewest whose share of their sum reaches top_p, of those the ones
with at least min_p times the best one's probability; and one of these is drawn by its share.

A row's random number is a hash of (seed, position of the sampled token), and a row's arithmetic looks at no other row:
so a request with a seed gets the same tokens alone, in any batch, and after it was put back and resumed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NEVER = torch.tensor(-torch.inf)
GREEDY, PLAIN, FILTERED = 0, 1, 2  # what a row needs: a maximum; a distribution; a sorted one, the only dear case


class Sampler:
    """Sampling parameters of every request slot, on the device, and what is done with them. Owned by one runner."""

    def __init__(self, max_slots: int, tokenizer_size: int, device: torch.device, eos_ids: Sequence[int] = ()):
        """tokenizer_size: ids from here on have no token and are never sampled. eos_ids: those that end a turn."""

        def per_slot(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_slots, dtype=dtype, device=device)

        self.tokenizer_size = tokenizer_size
        self.device = device
        self.kind = np.zeros(max_slots, np.int8)  # on the host, which decides what to launch
        self.min_position = np.zeros(max_slots, np.int64)  # where an end of turn may stand at the earliest
        self.eos_ids = torch.tensor([i for i in eos_ids if i < tokenizer_size], dtype=torch.int64, device=device)
        self.seed, self.top_k = per_slot(torch.int64), per_slot(torch.int64)
        self.temperature, self.top_p, self.min_p = (per_slot(torch.float32) for _ in range(3))

    def init_slots(self, inits: np.ndarray) -> None:
        """Take over the parameters of requests that begin: SLOT_INIT records."""
        filtered = (inits["top_k"] > 0) | (inits["top_p"] < 1.0) | (inits["min_p"] > 0.0)
        slots = inits["slot"].astype(np.int64)
        self.kind[slots] = np.where(inits["temperature"] == 0.0, GREEDY, np.where(filtered, FILTERED, PLAIN))
        self.min_position[slots] = inits["num_prompt_ids"].astype(np.int64) + inits["min_new_tokens"]
        at = torch.from_numpy(slots).to(self.device)
        self.seed[at] = torch.from_numpy(inits["seed"].copy().view(np.int64)).to(self.device)
        self.top_k[at] = torch.from_numpy(inits["top_k"].astype(np.int64)).to(self.device)
        for mine, name in ((self.temperature, "temperature"), (self.top_p, "top_p"), (self.min_p, "min_p")):
            mine[at] = torch.from_numpy(inits[name].copy()).to(self.device)

    def sample(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """One id per row, int64 on the device.

        Args:
            logits: [num_rows, vocab_size] float32.
            slots: [num_rows] the request slot of each row.
            positions: [num_rows] where the sampled token will stand: the number of tokens before it.
        """
        logits = logits[:, : self.tokenizer_size]
        early = np.flatnonzero(positions < self.min_position[slots])
        if len(early):
            logits = logits.index_put((torch.from_numpy(early).to(self.device)[:, None], self.eos_ids), NEVER)
        ids = logits.argmax(-1)
        kinds = self.kind[slots]
        for kind, draw in ((PLAIN, self._plain), (FILTERED, self._filtered)):
            rows = np.flatnonzero(kinds == kind)
            if len(rows):
                index = torch.from_numpy(np.stack([rows, slots[rows], positions[rows]]).astype(np.int64))
                row, slot, position = index.to(self.device)
                scaled = logits[row] / self.temperature[slot, None]
                ids[row] = draw(scaled, slot, uniform(self.seed[slot], position))
        return ids

    def _plain(self, logits: Tensor, slot: Tensor, u: Tensor) -> Tensor:
        best = logits.max(-1, keepdim=True).values
        return _draw(torch.exp(logits - best), u)

    def _filtered(self, logits: Tensor, slot: Tensor, u: Tensor) -> Tensor:
        logits, ids = logits.sort(dim=-1, descending=True, stable=True)
        weights = torch.exp(logits - logits[:, :1])  # relative to the best, so min_p compares with it directly
        top_k, top_p, min_p = self.top_k[slot, None], self.top_p[slot, None], self.min_p[slot, None]
        rank = torch.arange(logits.shape[1], device=logits.device)
        weights = torch.where((rank < top_k) | (top_k == 0), weights, 0.0)
        before = weights.double().cumsum(-1) - weights
        total = before[:, -1:] + weights[:, -1:]
        weights = torch.where(((before < top_p * total) | (rank == 0)) & (weights >= min_p), weights, 0.0)
        return ids.gather(1, _draw(weights, u)[:, None])[:, 0]


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """The index i with prefix_sum(i) <= u * total < prefix_sum(i + 1), per row: never one of weight 0, as u < 1."""
    sums = weights.double().cumsum(-1)
    return torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True)[:, 0]


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
