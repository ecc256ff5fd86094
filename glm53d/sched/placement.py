"""Which attention-DP rank a request goes to: a pure function of queues and cached pages. [R25]"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One attention-DP rank at the moment of admission, in tokens."""

    queued_prefill: int  # admitted there and not yet computed
    running: int  # KV of running requests
    cached: int  # of this request's prompt


def least_cost(num_tokens: int, loads: Sequence[RankLoad], order: Sequence[int]) -> list[int]:
    """Ranks, best first: predicted tokens until the first token, then decode load, then `order`.

    A cached prefix counts as the tokens it saves, so affinity never pins everything to one hot rank. `order` breaks
    ties (the caller rotates it), so equal ranks fill evenly.
    """
    rank_of = {rank: i for i, rank in enumerate(order)}

    def cost(rank: int) -> tuple[int, int, int]:
        load = loads[rank]
        return load.queued_prefill + num_tokens - load.cached, load.running, rank_of[rank]

    return sorted(range(len(loads)), key=cost)
