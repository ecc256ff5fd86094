"""A scheduler of a few lines for tests: it builds Batches by hand and keeps the logits that a TorchRunner saw."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from glm53d.ipc.batch import Batch
from glm53d.ipc.records import ROW_FEED, ROW_SAMPLE, SLOT_INIT
from glm53d.runner.torch_runner import TorchRunner


@dataclass(slots=True, eq=False)
class Request:
    """tokens: prompt, then what was sampled; of these the first `computed` have KV, in pages in this order."""

    slot: int
    tokens: list[int]
    prompt_len: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    num_pages_sent: int = 0
    begun: bool = False
    logits: list[Tensor] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    """Runs requests on one runner. Pages are handed out in random order."""

    def __init__(self, runner: TorchRunner, rng: random.Random):
        self.runner = runner
        self.loaded = runner.load(lambda phase, percent: None)
        self.rng = rng
        self.free = list(range(self.loaded.num_pages))
        rng.shuffle(self.free)
        self.step = 0
        self.num_slots = 0
        logits = runner.model.logits

        def keep(*args: Any) -> Tensor:
            self.last_logits = logits(*args)
            return self.last_logits

        runner.model.logits = keep  # type: ignore[method-assign]

    def request(self, prompt: list[int], shared: "Request | None" = None, **sampling: Any) -> Request:
        """A new request; `shared` lends the full pages of the common prefix, whose KV it has already."""
        request = Request(self.num_slots, list(prompt), len(prompt), sampling=sampling)
        self.num_slots += 1
        if shared is not None:
            size = self.loaded.page_size
            same = 0
            while same < min(len(prompt) - 1, shared.computed) and prompt[same] == shared.tokens[same]:
                same += 1
            request.pages = shared.pages[: same // size]
            request.computed = same // size * size
        return request

    def run(self, rows: list[tuple[Request, int]]) -> None:
        """One step: each request computes so many tokens; one that reaches its last token samples the next."""
        self.step += 1
        batch = Batch(self.step, 1)
        input_ids: list[int] = []
        flags, inits, runs, pages = [], [], [], []
        for request, count in rows:
            end = request.computed + count
            fresh = count == 1 and end == len(request.tokens) and request.outputs
            flags.append((ROW_SAMPLE if end == len(request.tokens) else 0) | (ROW_FEED if fresh else 0))
            input_ids += [-1] if fresh else request.tokens[request.computed : end]
            while len(request.pages) * self.loaded.page_size < end:
                request.pages.append(self.free.pop())
            if new := request.pages[request.num_pages_sent :]:
                runs.append((request.slot, request.num_pages_sent, len(new)))
                pages += new
                request.num_pages_sent = len(request.pages)
            if not request.begun:
                request.begun = True
                init = np.zeros((), SLOT_INIT)
                init["slot"], init["top_p"] = request.slot, 1.0
                for name, value in request.sampling.items():
                    init[name] = value
                inits.append(init)
        batch.row_slot = np.array([request.slot for request, _ in rows], np.int32)
        batch.row_dp_rank = np.zeros(len(rows), np.int32)
        batch.row_prefix_len = np.array([request.computed for request, _ in rows], np.int32)
        batch.row_extend_len = np.array([count for _, count in rows], np.int32)
        batch.row_flags = np.array(flags, np.int32)
        batch.input_ids = np.array(input_ids, np.int32)
        batch.inits = np.array(inits, SLOT_INIT)
        batch.run_slot, batch.run_start, batch.run_count = np.array(runs, np.int32).reshape(-1, 3).T
        batch.pages = np.array(pages, np.int32)
        batch.dp_num_tokens = np.array([len(input_ids)], np.int32)

        self.runner.launch(Batch.decode(batch.encode()))
        result = self.runner.collect()
        assert result.step == self.step
        seen = iter(self.last_logits)
        for (request, count), row_flags, num, ids in zip(rows, flags, result.counts, result.ids, strict=True):
            request.computed += count
            assert num == (row_flags & ROW_SAMPLE)
            if num:
                request.tokens.append(int(ids[0]))
                request.logits.append(next(seen).clone())

    def run_until(self, requests: list[Request], num_outputs: int, max_chunk: int) -> None:
        """Random steps, decode rows and prefill chunks in any order and mixture, until all have so many outputs."""
        while waiting := [request for request in requests if len(request.outputs) < num_outputs]:
            chosen = [request for request in waiting if self.rng.random() < 0.8] or waiting
            self.rng.shuffle(chosen)
            left = [len(request.tokens) - request.computed for request in chosen]
            self.run(
                [(request, self.rng.randint(1, min(n, max_chunk))) for request, n in zip(chosen, left, strict=True)]
            )
