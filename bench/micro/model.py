"""A step of the built-in model on one thread: tokens behind a context, native against torch; and prompts beyond what an
indexer chooses, read once against a list of rows for each query.

    python -m bench.micro.model
"""

from collections.abc import Callable

import torch

from bench.measure import Row, make_parser, report, timed_row
from glm53d.model import indexer
from glm53d.nano.weights import nano_folder
from tests.helpers.model import LoneModel

CONTEXT = 2048  # of the longest row
STEPS = ((1, 1, 200), (1, 3, 200), (8, 1, 200), (8, 3, 200), (1, 1, 600), (8, 1, 600))  # rows, tokens of each, context
PROMPTS = ((300, 0), (500, 0), (1000, 0), (30, 1970))  # tokens, context before them


def step_of(lone: LoneModel, rows: int, tokens: int, context: int) -> Callable[[], None]:
    """Plan a step, compute it, and the logits of each row's last token."""
    ids = torch.randint(0, lone.config.vocab_size, (rows * tokens,), generator=torch.Generator().manual_seed(1))

    def run() -> None:
        step = lone.step(list(ids.split(tokens)), [context] * rows, 1)
        states = lone.model.forward(step, lone.cache)[step.logits_idx]
        lone.model.logits(lone.model.norm(states), [rows])

    return run


def with_lists(call: Callable[[], None]) -> Callable[[], None]:
    """The same, with a list of rows for each query however many are chosen."""

    def run() -> None:
        kept, indexer.READ_ONCE = indexer.READ_ONCE, 0
        call()
        indexer.READ_ONCE = kept

    return run


def measure(rounds: int) -> list[Row]:
    """A row for each kind of step."""
    native, plain, fp8 = (
        LoneModel(nano_folder(), CONTEXT, page_size=64, native=native, fp8=fp8)
        for native, fp8 in ((True, False), (False, False), (False, True))
    )
    table = []
    for rows, tokens, context in STEPS:
        each = f"{rows} {'row' if rows == 1 else 'rows'} of {tokens}, context {context}"
        against = "torch", step_of(plain, rows, tokens, context)
        table.append(timed_row(each, step_of(native, rows, tokens, context), rounds=rounds, against=against))
    for what, world in (("", native), (", FP8 rows", fp8)):
        for tokens, context in PROMPTS:
            once = step_of(world, 1, tokens, context)
            named = f"prompt of {tokens} behind {context}{what}"
            table.append(timed_row(named, once, rounds=rounds, against=("lists", with_lists(once))))
    return table


def main() -> None:
    args = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    report("model", measure(args.rounds), args.json)


if __name__ == "__main__":
    main()
