"""Samples -> padded batches of about equal size, the same for everybody who asks for batch i."""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from bench.nano.data import MAX_LEN, NAME_IDS, NONE, SEED, Codec, Encoded, sample

POOL = 1024  # samples that are sorted by length and cut into batches: so little is padding


@dataclass(slots=True)
class Padded:
    """Rows of one length. Behind a row's end are zeros, that nothing before it sees and nobody predicts."""

    ids: Tensor  # [rows, tokens]
    own: Tensor  # [rows, tokens] bool: what the model is to write
    others: Tensor  # [rows, tokens] bool: what it reads
    tools: Tensor  # [rows, tokens, NAME_IDS]: the first ids of the name of the tool that is described there, or NONE
    called: Tensor  # [rows, tokens, NAME_IDS]: of the tool whose name has been written, so that it is called
    chosen: Tensor  # [rows, tokens, NAME_IDS]: of the tool that is to be called
    copied: Tensor  # [rows, tokens]: where the next token is copied from, or NONE
    described: Tensor  # [rows, tokens]: where what is wanted is described, 0 if nowhere, or NONE
    samples: list[Encoded]


class Batches:
    """Batch i of a split, each of at most `tokens` padding included, or of one sample that is longer."""

    def __init__(
        self,
        codec: Codec,
        tokens: int,
        split: str = "train",
        max_len: int = MAX_LEN,
        drills: float = 0.0,
        together: int = 1,
    ):
        """max_len: of a sample; longer ones are left out. drills: a share of samples that a drill replaces.
        together: so many batches that begin at a multiple of it are of about equal length, for ranks that wait for
        each other.
        """
        self.codec, self.tokens, self.split, self.max_len = codec, tokens, split, max_len
        self.drills, self.together = drills, together
        self._pool, self._number, self._first = list[Padded](), -1, 0

    def __getitem__(self, index: int) -> Padded:
        """In any order, but pools are made from the first on: cheap only if asked for in rising order."""
        if index < self._first:
            self._pool, self._number, self._first = [], -1, 0
        while index >= self._first + len(self._pool):
            self._first += len(self._pool)
            self._number += 1
            self._pool = self._made(self._number)
        return self._pool[index - self._first]

    def _made(self, number: int) -> list[Padded]:
        drawn = [self._sample(i) for i in range(number * POOL, (number + 1) * POOL)]
        drawn = sorted((each for each in drawn if len(each.ids) <= self.max_len), key=lambda each: len(each.ids))
        batches: list[list[Encoded]] = [[]]
        for each in drawn:
            if batches[-1] and (len(batches[-1]) + 1) * len(each.ids) > self.tokens:
                batches.append([])
            batches[-1].append(each)
        starts = list(range(0, len(batches) // self.together * self.together, self.together))
        Random(f"{SEED} {self.split} order {number}").shuffle(starts)
        return [_padded(batch) for start in starts for batch in batches[start : start + self.together]]

    def _sample(self, index: int) -> Encoded:
        rng = Random(f"{SEED} {self.split} drill {index}")
        if rng.random() < self.drills:
            return self.codec.drill(rng)
        return self.codec.encode(sample(index, split=self.split))


def _padded(samples: list[Encoded]) -> Padded:
    rows, length = len(samples), max(len(each.ids) for each in samples)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    own, others = torch.zeros(rows, length, dtype=torch.bool), torch.zeros(rows, length, dtype=torch.bool)
    tools, called, chosen = (torch.full((rows, length, NAME_IDS), NONE) for _ in range(3))
    copied, described = (torch.full((rows, length), NONE) for _ in range(2))
    for row, each in enumerate(samples):
        here = row, slice(len(each.ids))
        ids[here], own[here], others[here] = map(torch.from_numpy, (each.ids, each.own, ~each.own))
        tools[here], called[here], chosen[here] = map(torch.from_numpy, (each.tools, each.called, each.chosen))
        copied[here], described[here] = map(torch.from_numpy, (each.copied, each.described))
    return Padded(ids, own, others, tools, called, chosen, copied, described, samples)
