"""Compiler: the text of a grammar becomes a machine that says which ids may come next. [R35]

    text ──compile()──> Compiled ──matcher()──> Matcher, one per request: a mask, a token, the next mask ...

It runs in two places: in a process that may be killed, where main has each text tried before it takes a request
(front/checker.py), and in rank 0, where the requests run (sched/grammar.py). Limits are the same in both.

The engine is llguidance. It gets our own vocabulary: base tokens as bytes, every added token as a control token, which
no text of a grammar can spell and only its id, <[123]>, allows. It never turns forced text into tokens itself
(no_forcing): which of the legal cuts into tokens comes is the model's choice, as in text that no grammar asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from glm53d.errors import InvalidRequest

MAX_BYTES = 1 << 20
"""Of a text. A schema of a client's own is bounded before, far below."""

# Behind the text, so that line numbers in messages are the text's own.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_MAX_LEXER_STATES = 50_000  # one or two kB each, kept as long as the grammar is
# Four for each property that an object may lack. The library's 2,000 ended answers of wide objects in their middle;
# with 800 such properties a mask takes 8 ms, with 1,800 it takes 30, which is its own request's wait alone.
_MAX_ROW_ITEMS = 20_000
_SLICE = 64  # tokens taken at once of those that a resumed request has said: the GIL is held meanwhile


class _Vocabulary:
    """What LLTokenizer wants to know of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes], num_base: int, eos_id: int):
        self.tokens = token_bytes
        self.special_token_ids = range(num_base, len(token_bytes))
        self.eos_token_id = eos_id

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("with no_forcing nothing is tokenized")


@dataclass(slots=True, eq=False)
class Matcher:
    """One request's place in its grammar. Owned by whoever plans; a job has it between advance() and its result."""

    grammar: "Compiled"
    handle: int  # of the request
    machine: LLMatcher
    # [ceil(vocab / 32)] int32: bit i of word w says that id 32 w + i may come next. None: a job is computing it.
    mask: np.ndarray | None
    tokens: list[int] = field(default_factory=list)  # that came since, for the job
    error: str = ""  # a sentence: the grammar cannot go on


class Compiled:
    """A grammar that can be followed, by as many requests as like.

    Their machines share what has been found out about the grammar, behind a lock that a machine holds while it
    computes. So they advance together, in one job at a time: two jobs of one grammar would only wait for each other,
    and one that waits while it holds the GIL would stop the whole process.
    """

    def __init__(self, machine: LLMatcher, first_mask: np.ndarray):
        self.first_mask = first_mask
        self.waiting: list[Matcher] = []  # for their next mask
        self.is_busy = False  # a job is at it
        self._machine = machine

    def matcher(self, handle: int) -> Matcher:
        """At the beginning."""
        return Matcher(self, handle, self._machine.deep_copy(), self.first_mask)

    def advance(self, matchers: list[Matcher], executor: LLExecutor) -> np.ndarray:
        """Take each one's tokens and compute its next mask; for a thread beside the planning one, without the GIL.

        executor: threads for several at once; one alone is this thread's.

        Returns:
            [n, words] int32. Where a grammar cannot go on, error is set and the mask means nothing.
        """
        if single := [(m.machine, m.tokens[0]) for m in matchers if len(m.tokens) == 1]:
            executor.consume_token_par(single)
        for m in matchers:
            for at in range(0, len(m.tokens) if len(m.tokens) > 1 else 0, _SLICE):
                m.machine.consume_tokens(m.tokens[at : at + _SLICE])
            m.tokens = []
        masks = np.empty((len(matchers), len(self.first_mask)), np.int32)
        executor.unsafe_compute_mask_ptr(
            [(m.machine, i) for i, m in enumerate(matchers)], masks.ctypes.data, masks.strides[0], len(matchers)
        )
        for m in matchers:
            if m.machine.is_error():
                m.error = _sentence(m.machine.get_error())
        return masks


class Compiler:
    """Compiles grammars over one vocabulary; any thread may. Makes its tables once: 0.6 s for 155,000 tokens."""

    def __init__(self, token_bytes: Sequence[bytes], num_base: int, eos_ids: Sequence[int]):
        """Args:
        token_bytes: of each id; b"" is no token and never legal.
        num_base: ids from here on are control tokens.
        eos_ids: legal where a grammar may end, and alone where it must.
        """
        ends = [i for i in eos_ids if i < len(token_bytes)]
        vocabulary = _Vocabulary(token_bytes, num_base, ends[0])
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=len(token_bytes), eos_token=ends)  # type: ignore[arg-type]
        self._limits = LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, max_items_in_row=_MAX_ROW_ITEMS, verbose_errors=False
        )

    def compile(self, text: str) -> Compiled:
        """Compile a grammar and compute its first mask. The GIL is free meanwhile.

        Raises InvalidRequest, with llguidance's reason: wrong syntax, what it does not support, too large, no text at
        all is legal. It takes as long as it takes, and what it recurses over is the client's: see front/checker.py.
        """
        if len(text) > MAX_BYTES:
            raise InvalidRequest(f"The grammar has {len(text)} bytes; at most {MAX_BYTES} are compiled.")
        machine = LLMatcher(self._tokenizer, text + _OPTIONS, log_level=0, limits=self._limits)
        mask = np.frombuffer(machine.compute_bitmask(), np.int32)
        if machine.is_error():
            raise InvalidRequest(f"The grammar cannot be used: {_sentence(machine.get_error())}.")
        return Compiled(machine, mask)


def _sentence(error: str) -> str:
    """llguidance's error without the listing of the grammar that follows it."""
    first, _, rest = error.replace("<non-verbose/>", "").strip().partition("\n")
    first = {"NoExtensionBias": "nothing is legal"}.get(first.strip(), first.strip().rstrip("."))
    if first.endswith(":"):  # a regex is drawn below, with a mark where it is wrong; then comes why
        why = [line for line in rest.splitlines() if line.startswith("error: ")]
        first += " ".join(line.removeprefix("error:") for line in why[:1])
    return first if len(first) <= 300 else first[:300] + "…"
