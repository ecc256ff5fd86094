"""Order, budgets and whom to retract: pure functions, so that each rule can be read and tested alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from glm53d.sched.req import Req

SPLIT_LEAST = 16
"""Tokens of a prompt for each rank, below which ranks do not share it: every layer's KV has to go around then."""


@dataclass(slots=True, eq=False)
class Budget:
    """What one attention-DP rank may still compute of prompts in a step, beside its decoding rows. [R29]

    ns bounds the gap in running streams, inf while there are none; per_token and per_area say what prompts cost of it.
    area, new tokens times their context, bounds work arrays: the indexer scores each token against all before. [F-I5]
    """

    tokens: int
    area: int
    ns: float = math.inf
    per_token: float = 0.0
    per_area: float = 0.0
    least: int = 0  # tokens of the first chunk, whatever ns says: no stream's comfort stops prompts for ever
    is_spent: bool = False  # the last chunk had to be cut, so nothing more begins

    def chunk(self, prefix_len: int, left: int) -> int:
        """Tokens of a prompt to compute now: `left` are missing behind prefix_len. Takes them from the budget."""
        if self.is_spent:
            return 0
        in_time = left
        if self.ns < math.inf:
            in_time = _most_within(self.per_area / 2, self.per_token + self.per_area * prefix_len, self.ns, left)
        num_tokens = min(left, self.tokens, max(in_time, self.least), _most_within(1, prefix_len, self.area, left))
        self.is_spent = num_tokens < left
        self.least = 0
        self.tokens -= num_tokens
        self.area -= num_tokens * (prefix_len + num_tokens)
        self.ns -= self.per_token * num_tokens + self.per_area * num_tokens * (prefix_len + num_tokens / 2)
        return num_tokens


def _most_within(square: float, linear: float, budget: float, most: int) -> int:
    """The largest whole n <= most with square * n * n + linear * n <= budget, at least 0."""
    if budget <= 0:
        return 0
    if square * most * most + linear * most <= budget:
        return most
    return int(2 * budget / (linear + math.sqrt(linear * linear + 4 * square * budget)))


def queue_key(req: Req, ageing_ns: int) -> tuple[int, int]:
    """Smaller goes first: arrival, each level of priority being a head start of ageing_ns. [R28]

    All requests age alike, so the order of two never changes and this is computed once. A request is overtaken only by
    such as come within the head starts between them, so no class starves another. Who is retracted keeps its arrival.
    """
    return req.head["arrival_ns"] - req.level * ageing_ns, req.order


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold num_tokens."""
    return -(-num_tokens // page_size)


def usable_prefix(req: Req, page_size: int) -> int:
    """Pages of a request's sequence that may come from the cache.

    One token is left to compute, since its logits are the answer; and all that give the prompt's logprobs.
    """
    if req.logprobs is not None and req.logprobs.wants_prompt:
        return (req.logprobs.next_target - 1) // page_size
    return (len(req.tokens) - 1) // page_size


def saved_share(move_ns: int, compute_ns: int) -> float:
    """What of computing a page it saves to move it here instead, 0 to 1; all, while no computing has been measured."""
    return max(0.0, 1.0 - move_ns / compute_ns) if compute_ns else 1.0


def victim(running: Iterable[tuple[Req, int]]) -> Req | None:
    """Whom to retract from (request, tokens put out): lowest level, then least progressed, then youngest. [R30]

    None when there is only one: retracting it could not help anybody.
    """
    candidates = list(running)
    if len(candidates) < 2:
        return None
    return min(candidates, key=lambda pair: (pair[0].level, pair[1], -pair[0].order))[0]
