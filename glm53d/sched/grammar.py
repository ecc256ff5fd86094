"""Grammars of running requests: compiled once, followed token by token, none of it on the planning thread. [R35]

    open()     text ─► cached, or a job compiles it and the request waits in state GRAMMAR ─► compiled()
    advance()  an id came ─► the slot is held, a job takes the id and computes the next mask ─► advanced()

A job never delays a step: a row whose mask is not there sits out, the others go on. Under overlap it would sit out that
step anyway, for its value, so its mask is computed while the device runs.

All state is the planning thread's. A job gets what it needs, and leaves its result in a queue that is looked at when
the next step is planned.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from llguidance import LLExecutor

from glm53d.errors import InvalidRequest
from glm53d.grammar.compiler import Compiled, Compiler, Matcher

FAILED = "grammar_failed: The output cannot go on in the form that was asked for: "


class Pool(Protocol):
    """Where jobs run."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run it at some time, on another thread; or, in tests, whenever it suits."""
        ...


class Grammars:
    """Owned by one Scheduler."""

    def __init__(
        self, compiler: Compiler, compiling: Pool, masking: Pool, max_cached: int, executor: LLExecutor
    ):
        """Args:
        compiling: for jobs of up to seconds. masking: for jobs of microseconds to milliseconds.
        executor: threads of llguidance's own, for a job of several requests.
        max_cached: grammars that are kept, the one used longest ago goes first.
        """
        self._compiler = compiler
        self._compile_pool, self._mask_pool = compiling, masking
        self._max_cached = max_cached
        self._executor = executor
        self._cache: dict[bytes, Compiled] = {}  # least recently used first
        self._openings: dict[bytes, list[int]] = {}  # by text that is being compiled: handles of who waits for it
        self._compiled: deque[tuple[bytes, Compiled | str]] = deque()  # a job's results: the grammar, or why not
        self._touched: list[Compiled] = []  # with matchers that wait, and no job
        self._advanced: deque[tuple[Compiled, list[Matcher], np.ndarray]] = deque()  # a job's results: masks
        self.num_opening = 0  # requests that wait for their grammar
        self.num_jobs = 0  # given to the pools, whose results have not been taken

    def open(self, text: bytes, handle: int) -> Matcher | None:
        """A matcher at the beginning of the grammar; None: it will come with compiled()."""
        if (grammar := self._cache.pop(text, None)) is not None:
            self._cache[text] = grammar
            return grammar.matcher(handle)
        if text not in self._openings:
            self._openings[text] = []
            self.num_jobs += 1
            self._compile_pool.submit(lambda: self._compile(text))
        self._openings[text].append(handle)
        self.num_opening += 1
        return None

    def _compile(self, text: bytes) -> None:
        """In a job. Main has had the text compiled before: an error is one of the library's, or of ours."""
        try:
            self._compiled.append((text, self._compiler.compile(text.decode())))
        except InvalidRequest as error:
            self._compiled.append((text, error.message))
        except BaseException as error:  # the library's panics are no Exceptions
            self._compiled.append((text, f"{type(error).__name__}: {error}"))

    def compiled(self) -> list[tuple[int, Matcher | str]]:
        """Of requests whose grammar has come since the last call: the handle, and the matcher or why there is none."""
        opened: list[tuple[int, Matcher | str]] = []
        while self._compiled:
            text, result = self._compiled.popleft()
            self.num_jobs -= 1
            handles = self._openings.pop(text)
            self.num_opening -= len(handles)
            if isinstance(result, str):
                opened += [(handle, result) for handle in handles]
                continue
            self._cache[text] = result
            if len(self._cache) > self._max_cached:
                self._cache.pop(next(iter(self._cache)))
            opened += [(handle, result.matcher(handle)) for handle in handles]
        return opened

    def advance(self, matcher: Matcher, ids: list[int]) -> None:
        """The ids have come; the next mask is computed once flush() is called."""
        matcher.mask = None
        matcher.tokens += ids
        if not matcher.grammar.waiting and not matcher.grammar.is_busy:
            self._touched.append(matcher.grammar)
        matcher.grammar.waiting.append(matcher)

    def flush(self) -> None:
        """Give the pool what waits: one job for each grammar."""
        for grammar in self._touched:
            self._submit(grammar)
        self._touched.clear()

    def _submit(self, grammar: Compiled) -> None:
        matchers, grammar.waiting, grammar.is_busy = grammar.waiting, [], True
        self.num_jobs += 1
        self._mask_pool.submit(lambda: self._advance(grammar, matchers))

    def _advance(self, grammar: Compiled, matchers: list[Matcher]) -> None:
        """In a job."""
        try:
            masks = grammar.advance(matchers, self._executor)
        except BaseException as error:  # see above
            masks = np.empty((len(matchers), 0), np.int32)
            for matcher in matchers:
                matcher.error = f"{type(error).__name__}: {error}"
        self._advanced.append((grammar, matchers, masks))

    def advanced(self) -> list[Matcher]:
        """Matchers whose next mask, or error, has come since the last call."""
        done: list[Matcher] = []
        while self._advanced:
            grammar, matchers, masks = self._advanced.popleft()
            self.num_jobs -= 1
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.mask = mask
            done += matchers
            grammar.is_busy = False
            if any(matcher.error for matcher in matchers):  # what its machines share may have hit a limit for good
                self._cache = {text: other for text, other in self._cache.items() if other is not grammar}
            if grammar.waiting:
                self._submit(grammar)
        return done
