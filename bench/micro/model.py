"""A step of the built-in model on one thread: tokens behind a context, native against torch; and prompts beyond what an
indexer chooses, read once against a list of rows for each query.

    python -m bench.micro.model
"""

from collections.abc import Callable

import numpy as np
import torch

from bench.measure import Row, make_parser, report, timed_row
from glm53d.model import indexer
from glm53d.model.config import ModelConfig
from glm53d.model.glm import Glm
from glm53d.model.groups import RankGroups
from glm53d.model.kv_cache import KvCache, KvShape
from glm53d.model.layout import Layout
from glm53d.model.step import plan_step
from glm53d.model.weights import Checkpoint
from glm53d.nano.weights import nano_folder

SLOTS, PAGES, PAGE_SIZE = 8, 32, 64
STEPS = ((1, 1, 200), (1, 3, 200), (8, 1, 200), (8, 3, 200), (1, 1, 600), (8, 1, 600))  # rows, tokens of each, context
PROMPTS = ((300, 0), (500, 0), (1000, 0), (30, 1970))  # tokens, context before them


class World:
    """The model, native or in torch, with room for some requests."""

    def __init__(self, *, native: bool, fp8: bool = False):
        folder = nano_folder()
        config = ModelConfig.load(folder)
        cpu = torch.device("cpu")
        checkpoint = Checkpoint(folder, config, torch.float32, cpu)
        self.model = Glm(config, checkpoint, RankGroups(Layout()), config.rms_norm_eps, lambda done: None)
        if not native:
            for layer in self.model.layers:
                layer.on_cpu = None
        shape = KvShape(config, PAGE_SIZE, torch.float32, fp8=fp8)
        memory = torch.zeros(shape.memory_bytes(SLOTS * PAGES), dtype=torch.uint8)
        self.cache = KvCache(
            shape, memory, num_pages=SLOTS * PAGES, max_slots=SLOTS, max_context_len=PAGES * PAGE_SIZE
        )
        every = np.arange(SLOTS)
        self.cache.append_pages(every, 0 * every, 0 * every + PAGES, np.arange(SLOTS * PAGES))
        self.ids = torch.randint(0, config.vocab_size, (4096,), generator=torch.Generator().manual_seed(1))

    def step(self, rows: int, tokens: int, context: int) -> Callable[[], None]:
        """Plan it, compute it, and the logits of each row's last token."""
        total, every = [rows * tokens], np.arange(rows)
        count, one = 0 * every + tokens, 0 * every + 1

        def run() -> None:
            ids = self.ids[: rows * tokens]
            step = plan_step(self.cache, ids, total, [rows], every, 0 * every + context, count, one)
            states = self.model.forward(step, self.cache)[step.logits_idx]
            self.model.logits(self.model.norm(states), [rows])

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
    native, plain, fp8 = World(native=True), World(native=False), World(native=False, fp8=True)
    table = []
    for rows, tokens, context in STEPS:
        each = f"{rows} {'row' if rows == 1 else 'rows'} of {tokens}, context {context}"
        against = "torch", plain.step(rows, tokens, context)
        table.append(timed_row(each, native.step(rows, tokens, context), rounds=rounds, against=against))
    for what, world in (("", native), (", FP8 rows", fp8)):
        for tokens, context in PROMPTS:
            once = world.step(1, tokens, context)
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
