"""Logprobs of requests that ask for them: which of a prompt's tokens a step is asked for, what came, what is unsent.

    Batch.targets ─► ranks ─► StepResult.logprobs ─► Unsent, on the Req ─► throttle, beside the ids

A prompt's token needs the token before it computed by this very request: so what is asked for limits the prefix that
may come from the cache. Requests that do not ask pay a look at an empty list.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from glm53d.ipc.batch import Batch, StepResult
from glm53d.ipc.records import LOGPROB

MAX_TOP = 20
"""Likeliest ids beside a token: what the dialects allow, and what rings are made for."""

MAX_STEP_TARGETS = 1024
"""Prompt tokens with logprobs in a step, of all requests: bounds a result. With more unsent a prompt stands still."""

MAX_RECORD_TOKENS = 128
"""Tokens with logprobs in an output record: whatever has piled up, no record is too large for the smallest ring."""


@dataclass(slots=True, eq=False)
class Unsent:
    """One request's logprobs that have not left. Owned by its Req, so that they outlive a retraction."""

    width: int  # of a token's row: itself and the likeliest ids
    next_target: int  # the prompt's next token whose logprob is to come
    num_prompt_ids: int
    prompt: list[np.ndarray] = field(default_factory=list)  # [n, width] LOGPROB each, in order
    output: list[np.ndarray] = field(default_factory=list)  # as many rows as the request has unsent ids

    @classmethod
    def of(cls, prompt: np.ndarray, top: int, start: int) -> "Unsent | None":
        """For a request with `top` of the likeliest ids, -1: none wanted; start: the prompt's first token, -1: none."""
        if top < 0:
            return None
        unsent = cls(1 + top, max(1, start) if start >= 0 else len(prompt), len(prompt))
        if start == 0:  # before the first token stands nothing that could give it
            unsent.prompt.append(_row(int(prompt[0]), np.nan, unsent.width))
        return unsent

    @property
    def wants_prompt(self) -> bool:
        """Logprobs of the prompt are to come."""
        return self.next_target < self.num_prompt_ids

    @property
    def num_prompt(self) -> int:
        return sum(map(len, self.prompt))

    def targets(self, tokens: np.ndarray, start: int, count: int) -> np.ndarray:
        """Of the request's tokens [start, start + count) that a step computes, the next one each, -1: not asked for."""
        found = np.full(count, -1, np.int32)
        first, end = max(start + 1, self.next_target), min(start + count + 1, self.num_prompt_ids)
        if first < end:
            found[first - 1 - start : end - 1 - start] = tokens[first:end]
        return found

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """All that is unsent, [n, width] LOGPROB each: of the prompt, of the output. From now on it is sent."""
        empty = np.empty((0, self.width), LOGPROB)
        prompt, output = np.concatenate([empty, *self.prompt]), np.concatenate([empty, *self.output])
        self.prompt.clear()
        self.output.clear()
        return prompt, output


def take_prompts(batch: Batch, result: StepResult, asking: Mapping[int, Unsent | None]) -> dict[int, np.ndarray]:
    """Keep what a result has of prompts; by slot, what it has of the output. Who has ended meanwhile is not asking."""
    if result.logprobs is None:
        return {}
    rows, first = np.unique(result.logprobs.rows, return_index=True)
    blocks = np.split(result.logprobs.pairs, first[1:])
    outputs = {}
    for row, slot, block in zip(rows.tolist(), batch.row_slot[rows].tolist(), blocks, strict=True):
        if (unsent := asking.get(slot)) is None:
            continue
        num_targets = len(block) - int(result.counts[row])
        unsent.next_target += num_targets
        if num_targets:
            unsent.prompt.append(block[:num_targets, : unsent.width].copy())
        outputs[slot] = block[num_targets:, : unsent.width]
    return outputs


def keep_output(unsent: Unsent, block: np.ndarray, said: np.ndarray) -> None:
    """Keep what ranks made of what was said.

    What was put there by force is not what they sampled: it was no choice, so its logprob is 0, and it has no others.
    """
    kept = np.repeat(_row(-1, 0.0, unsent.width), len(said), axis=0)
    known = min(len(block), len(said))
    kept[:known] = block[:known]
    for i in np.flatnonzero(kept["id"][:, 0] != said).tolist():
        kept[i] = _row(int(said[i]), 0.0, unsent.width)
    unsent.output.append(kept)


def _row(id: int, logprob: float, width: int) -> np.ndarray:
    """A token's [1, width], without others."""
    row = np.zeros((1, width), LOGPROB)
    row["id"], row["id"][0, 0], row["logprob"][0, 0] = -1, id, logprob
    return row
