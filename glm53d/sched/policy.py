"""Order, budgets and whom to retract: pure functions, so that each rule can be read and tested alone."""

from collections.abc import Iterable

from glm53d.sched.req import Req


def queue_key(req: Req) -> tuple[int, int]:
    """Smaller goes first: higher priority, then arrival.

    A retracted request keeps its arrival number, so it is next. [R28]
    """
    return -int(req.head["priority"]), req.order


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold num_tokens."""
    return -(-num_tokens // page_size)


def usable_prefix(num_tokens: int, page_size: int) -> int:
    """Pages of a sequence that may come from the cache: one token is left to compute, its logits are the answer."""
    return (num_tokens - 1) // page_size


def victim(running: Iterable[tuple[Req, int]]) -> Req | None:
    """Whom to retract from (request, tokens put out): lowest priority, then least progressed, then youngest. [R30]

    None when there is only one: retracting it could not help anybody.
    """
    candidates = list(running)
    if len(candidates) < 2:
        return None
    return min(candidates, key=lambda pair: (int(pair[0].head["priority"]), pair[1], -pair[0].order))[0]
