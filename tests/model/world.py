"""A world of ranks for tests: TorchRunners in processes of their own, driven by the real scheduler in this one."""

import random
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from glm53d.config import Config
from glm53d.errors import Glm53dError
from glm53d.ipc import mailbox
from glm53d.ipc.batch import Batch, Mode, StepResult
from glm53d.ipc.mailbox import MailboxEnds
from glm53d.ipc.records import ROW_FEED, ROW_SAMPLE
from glm53d.ipc.segment import Segment
from glm53d.runner.base import Loaded
from glm53d.runner.graphs import Eager
from glm53d.runner.torch_runner import TorchRunner
from glm53d.sched.grammar import Grammars
from glm53d.worker.leader import merge
from glm53d.worker.main import stored_pages
from glm53d.worker.room import tier_limits
from tests.helpers.sched_world import SchedWorld

TIMEOUT_S = 120
WORLD = 7


class Ranks:
    """Processes started once; each load() makes them a new world of the same size, another checkpoint and layout."""

    def __init__(self, size: int):
        self.size = size
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def load(self, config: Config, max_slots: int, tokenizer_size: int, *, graphs: bool = False) -> list[Loaded]:
        """Raises what a rank raises. graphs: decoding steps are padded and replayed, as on a GPU."""
        signals, memories = mailbox.create(WORLD, self.size)
        segments = [signals, *memories]
        with tempfile.TemporaryDirectory() as folder:
            for pipe, process in zip(self._pipes, self._processes, strict=True):
                pipe.send(("load", config, max_slots, tokenizer_size, Path(folder), len(segments), graphs))
                for segment in segments:
                    reduction.send_handle(pipe, segment.fd, process.pid)
            return self._answers()

    def step(self, batch: Batch) -> list[StepResult]:
        """Each rank's result."""
        return [StepResult.decode(data) for data in self._ask("step", batch.encode())]

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(the rank's runner, *args) in each rank; a function of a module, as it goes by name."""
        return self._ask("call", function, args)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(("stop",))
        for process in self._processes:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0

    def _ask(self, *message: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(message)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(TIMEOUT_S), "a rank does not answer"
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


def _rank_main(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    runner: TorchRunner | None = None
    while (message := pipe.recv())[0] != "stop":
        try:
            if message[0] == "load":
                if runner is not None:
                    runner.close()
                _, config, max_slots, tokenizer_size, rendezvous, num_segments, graphs = message
                signals, *memories = (Segment.attach(reduction.recv_handle(pipe)) for _ in range(num_segments))
                ends = MailboxEnds.open(signals, memories, WORLD, rank)
                runner = TorchRunner(config, rank, max_slots, tokenizer_size, rendezvous, mailbox_ends=ends)
                runner.graph_backend = Eager() if graphs else None
                pipe.send(runner.load(lambda phase, percent: None))
            elif message[0] == "call":
                pipe.send(message[1](runner, *message[2]))
            else:
                assert runner is not None
                runner.launch(Batch.decode(message[1]))
                pipe.send(runner.collect().encode(0))
        except Glm53dError as error:
            pipe.send(error)
    if runner is not None:
        runner.close()


class Alone:
    """The same interface over one rank in this process."""

    size = 1

    def load(self, config: Config, max_slots: int, tokenizer_size: int, *, graphs: bool = False) -> list[Loaded]:
        self.runner = TorchRunner(config, 0, max_slots, tokenizer_size)
        self.runner.graph_backend = Eager() if graphs else None
        return [self.runner.load(lambda phase, percent: None)]

    def step(self, batch: Batch) -> list[StepResult]:
        self.runner.launch(batch)
        return [self.runner.collect()]


class ServedWorld(SchedWorld):
    """The real scheduler over real ranks. What it has seen of batches is counted, so that a test can ask for it."""

    def __init__(
        self, ranks: Ranks | Alone, config: Config, vocab: int, *, graphs: bool = False,
        grammars: Grammars | None = None, max_in_flight: int = 1,
    ):  # fmt: skip
        max_running = config.scheduler.max_running_requests
        self.ranks = ranks
        self.loaded = ranks.load(config, max_running, vocab, graphs=graphs)[0]
        super().__init__(
            vocab=vocab,
            attn_dp_size=config.parallel.attn_dp_size,
            num_pages=self.loaded.num_pages,
            page_size=self.loaded.page_size,
            max_context_len=self.loaded.max_context_len,
            max_running=max_running,
            max_step_tokens=config.scheduler.max_step_tokens,
            max_biased=config.scheduler.max_biased_requests,
            max_in_flight=max_in_flight,
            num_draft_tokens=config.speculation.num_draft_tokens,
            grammars=grammars,
            tiers=tier_limits(config, self.loaded),
            stored=stored_pages(config, self.loaded),
        )
        self.num_idle = self.num_mixed = self.num_split = 0

    def compute(self, batch: Batch) -> StepResult:
        """What a leader does, and a look at who answered: each row exactly once, by its group's first rank."""
        self.num_split += int(batch.mode is Mode.CP)
        self.num_idle += int((batch.dp_num_tokens == 0).any())
        self.num_mixed += int(0 < np.count_nonzero(batch.row_flags & ROW_FEED) < batch.num_rows)
        results = self.ranks.step(batch)
        group = self.ranks.size // self.limits.attn_dp_size
        for rank, result in enumerate(results):
            sampled = (batch.row_flags & ROW_SAMPLE) * (batch.row_dp_rank * group == rank)
            assert np.minimum(result.counts, 1).tolist() == sampled.tolist()
        result = results[0]
        for other in results[1:]:
            result = merge(result, other)
        return result


def serve(world: SchedWorld, seed: int, num_new: int, **sampling: float) -> list[list[int]]:
    """Requests that arrive while others run, two of them behind a prefix that is cached by then; their answers."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(1, world.vocab) for _ in range(length)]

    prompts = [text(rng.randint(30, 60)), text(rng.randint(2, 30)), text(rng.randint(10, 50))]
    prompts += [prompts[0][:24] + text(7), text(5), prompts[2][:9] + text(20)]
    for handle, prompt in enumerate(prompts, 1):
        world.send(handle, prompt, num_new + 2 * handle, seed=handle, **sampling)
        for _ in range(3):
            world.step()
    while not world.is_idle():
        world.step()
    return [world.received[handle] for handle in range(1, len(prompts) + 1)]
