"""A node without processes whose requests may have grammars, and whose grammar jobs run when a test says so."""

from collections.abc import Callable
from typing import Any

from llguidance import LLExecutor

from glm53d.grammar.compiler import Compiler
from glm53d.ipc.records import FinishReason
from glm53d.sched.grammar import Grammars
from tests.helpers.sched_world import SchedWorld

END = 21  # of thinking
TOKENS = [b"", *(bytes([ord("a") + i]) for i in range(20)), b"</think>"]  # id 0 ends a turn, 1 is "a", 2 is "b" ...
EXECUTOR = LLExecutor(1)


class Jobs:
    """A pool whose jobs wait until they are run, or run at once."""

    def __init__(self, *, at_once: bool = True):
        self.at_once = at_once
        self.waiting: list[Callable[[], None]] = []
        self.num_submitted = 0

    def submit(self, job: Callable[[], None]) -> None:
        self.num_submitted += 1
        self.waiting.append(job)
        if self.at_once:
            self.run()

    def run(self) -> None:
        """All that wait."""
        while self.waiting:
            self.waiting.pop(0)()


class GrammarWorld(SchedWorld):
    """compiling and masking hold the jobs; max_cached is of compiled grammars."""

    def __init__(self, seed: int = 0, *, max_cached: int = 8, **options: Any):
        self.compiling, self.masking = Jobs(), Jobs()
        compiler = Compiler(TOKENS, END, [0])
        grammars = Grammars(compiler, self.compiling, self.masking, max_cached, EXECUTOR)
        super().__init__(seed, tokens=TOKENS, grammars=grammars, **{"num_pages": 100, "eos_chance": 0} | options)

    def sample(self) -> int:
        """Thinking is ended soon."""
        return END if self.rng.random() < 0.1 else super().sample()

    def text(self, handle: int) -> str:
        """What a client gets of a request; where its turn ended there is a full stop."""
        return b"".join(TOKENS[token] or b"." for token in self.received[handle]).decode()

    def run(self, most_steps: int = 500) -> None:
        """Until nothing is left of any request."""
        for _ in range(most_steps):
            if not self.sched.reqs and not self.launched:
                break
            self.step()
        self.step()
        assert self.is_idle() and self.sched.slots.num_with_grammar == 0 and not self.sched.slots.held.any()
        assert set(self.ended) == set(self.prompts)

    def failed(self, handle: int) -> bool:
        return self.ended[handle] is FinishReason.ERROR
