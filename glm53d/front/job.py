"""Job and Finish: what a dialect asks of the engine, and what it gets. Between them a Stream, see engine.py."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from glm53d._native import TokenLogprob
from glm53d.chat.constraint import Grammar
from glm53d.chat.conversation import Conversation
from glm53d.chat.events import Piece
from glm53d.ipc.records import FinishReason

Pieces = list[Any]
"""What a dialect is given to make events of: list[Piece]; for a job with logprobs, list[Piece | TokenLogprob]."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Ranges were checked by the dialect that made it. [R14]"""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # id and what is added to its logit
    allowed_ids: tuple[int, ...] = ()  # no others are sampled; empty: all are allowed
    seed: int | None = None  # None: the engine chooses one [R51]
    max_new_tokens: int | None = None  # None: what the context leaves
    min_new_tokens: int = 0
    thinking_budget: int | None = None  # tokens of thinking at most; then </think> is forced [R46]
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    # Looked for in the text that the client gets, in a chat in its content only; the first found ends it. [R40]
    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False  # what matched stays in the text
    grammar: Grammar | None = None  # the form of the output; in a chat, of what is behind its thinking [R35]
    priority: int = 0
    top_logprobs: int | None = None  # likeliest ids to name beside each token, with their logprobs; None: no logprobs
    logprob_start: int | None = None  # the prompt's first token with logprobs; None: none of it has


class Frame(NamedTuple):
    """The bytes around a piece of text in a stream: prefix + JSON-escaped text + suffix is one whole SSE event.

    enter comes before the first event of the phase, leave behind its last. The phase that a turn begins in is entered
    with whatever comes first, any other by its first text; one that was not entered is not left.
    """

    prefix: bytes
    suffix: bytes
    enter: bytes = b""
    leave: bytes = b""


@dataclass(frozen=True, slots=True)
class OutSpec:
    """How a request's tokens leave. Set before the first one can come; the pump knows no dialect beyond these. [R41]

    Reasoning and content are framed natively. The first of python_ids ends them, and from it on a stream's output is
    handed over as pieces, for a parser in Python; all_python: from the beginning on, and nothing is framed. A job with
    logprobs is never framed: behind the text that a token's bytes complete comes the token, as a TokenLogprob. Without
    content and all_python nothing leaves before the end: texts and pieces are collected for a plain answer.
    """

    content: Frame | None = None
    reasoning: Frame | None = None  # None: reasoning is framed like content
    starts_in_reasoning: bool = False  # a chat turn; </think> ends it
    with_ids: bool = False  # `","output_ids":[1,2]` stands between text and suffix, which then starts behind a value
    skip_special_tokens: bool = True
    python_ids: tuple[int, ...] = ()  # not with_ids
    all_python: bool = False  # not with frames

    @property
    def is_streamed(self) -> bool:
        """Whether anything leaves before the end."""
        return self.content is not None or self.all_python


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a request goes, and with whom it shares pages."""

    dp_rank: int | None = None  # attention-DP rank; None: the scheduler chooses [R25]
    bootstrap_room: int | None = None  # of a gateway that chooses a rank by it; what scheduler.placement makes of it
    session: str = ""  # equal for all requests of one agent's session: a hint, never part of what is cached [R45]
    salt: bytes = b""  # only requests of the same one share pages [R19]

    def chain_seed(self, base: bytes) -> bytes:
        """What the chain of page hashes starts from, 16 bytes, given that of an unsalted request."""
        return blake2b(self.salt, key=base, digest_size=16).digest() if self.salt else base

    @property
    def session_hash(self) -> int:
        """64 bits for the record, 0: none."""
        if not self.session:
            return 0
        return int.from_bytes(blake2b(self.session.encode(errors="surrogateescape"), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Job:
    """One request of no dialect. Exactly one of conversation, text and ids is given."""

    rid: str
    received_ns: int  # CLOCK_MONOTONIC, last byte of the body read
    first_token_timeout_s: float | None = None  # from then on; what cannot keep it fails with DeadlineExceeded
    conversation: Conversation | None = None
    text: str | None = None  # raw prompt: flat encoding
    ids: np.ndarray | None = None  # int32
    sampling: SamplingParams = SamplingParams()
    out: OutSpec = OutSpec()
    routing: Routing = Routing()


STAGES = (
    ("parse", "parsed"), ("render", "rendered"), ("tokenize", "tokenized"), ("queue", "admitted"),
    ("prefill", "prefill_done"), ("first_token", "first_token"),
)  # fmt: skip
"""Parts of the time to the first token, in order, and the mark that each ends at."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Exact counts of one request. [R42]"""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    cached_device: int = 0
    cached_host: int = 0
    cached_storage: int = 0
    accepted_tokens: int = 0  # of completion_tokens, those that were drafts [R36]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request. A stream's texts and pieces are empty: they went out.

    A chat turn that stopped without ending its thinking was all answer: its text is content and it has no reasoning. A
    stream has by then sent it as reasoning; so here it is in `text`, for the dialect to repeat as content. [F-F1]
    """

    reason: FinishReason
    usage: Usage
    matched_id: int | None = None
    matched_stop: str | None = None
    text: str = ""
    reasoning: str = ""
    pieces: list[Piece] = field(default_factory=list)  # behind text
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output, if it was asked for them
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt, from where it was asked for
    output_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    marks: dict[str, int] = field(default_factory=dict)  # CLOCK_MONOTONIC ns by name [R23]
    thinking_forced: bool = False  # its budget ran out [R46]

    @property
    def matched(self) -> int | str | None:
        """What ended it, the stop string or the id; None when nothing of these did."""
        return self.matched_id if self.matched_stop is None else self.matched_stop

    @property
    def queue_time(self) -> float:
        """Seconds spent waiting, all stretches together. [R24]"""
        return self.marks.get("queue", 0) / 1e9

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the last body byte to the first token in main. [R24]"""
        first = self.marks.get("first_token")
        return None if first is None else (first - self.marks["received"]) / 1e9

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of each part of first_token_latency, which is their sum; none without a token. [R23]"""
        if (end := self.marks.get("first_token")) is None:
            return {}
        seconds, last = {}, self.marks["received"]
        for name, mark in STAGES:
            until = max(last, min(self.marks[mark], end))  # what a retracted request computed again came later
            seconds[name], last = (until - last) / 1e9, until
        return seconds

    @property
    def decode_throughput(self) -> float | None:
        """Tokens per second after the first; None below two tokens. [R24]"""
        tokens, first, last = self.usage.completion_tokens, self.marks.get("first_token"), self.marks.get("last_token")
        if tokens < 2 or first is None or last is None or last <= first:
            return None
        return (tokens - 1) / ((last - first) / 1e9)
