"""Samples -> padded batches of about equal size, the same for everybody who asks for batch i."""

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from bench.nano.data import MAX_LEN, SEED, Codec, Encoded, sample

POOL = 1024  # samples that are sorted by length and cut into batches: so little is padding


@dataclass(slots=True)
class Padded:
    """Rows of one length. Behind a row's end are zeros, that nothing before it sees and nobody predicts."""

    ids: Tensor  # [rows, tokens]
    own: Tensor  # [rows, tokens] bool: what the model is to write
    others: Tensor  # [rows, tokens] bool: what it reads
    samples: list[Encoded]


class Batches:
    """Batch i of a split, each of at most `tokens` padding included, or of one sample that is longer."""

    def __init__(self, codec: Codec, tokens: int, split: str = "train"):
        self.codec, self.tokens, self.split = codec, tokens, split
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
        drawn = [self.codec.encode(sample(i, split=self.split)) for i in range(number * POOL, (number + 1) * POOL)]
        drawn = sorted((each for each in drawn if len(each.ids) <= MAX_LEN), key=lambda each: len(each.ids))
        batches: list[list[Encoded]] = [[]]
        for each in drawn:
            if batches[-1] and (len(batches[-1]) + 1) * len(each.ids) > self.tokens:
                batches.append([])
            batches[-1].append(each)
        Random(f"{SEED} {self.split} order {number}").shuffle(batches)
        return [_padded(batch) for batch in batches]


def _padded(samples: list[Encoded]) -> Padded:
    length = max(len(each.ids) for each in samples)
    ids = np.zeros((len(samples), length), np.int64)
    own = np.zeros((len(samples), length), bool)
    others = np.zeros((len(samples), length), bool)
    for row, each in enumerate(samples):
        here = row, slice(len(each.ids))
        ids[here], own[here], others[here] = each.ids, each.own, ~each.own
    return Padded(torch.from_numpy(ids), torch.from_numpy(own), torch.from_numpy(others), samples)
