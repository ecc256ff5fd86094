"""FakeEngine: an in-memory engine that answers from a script. For tests of the HTTP side alone.

It frames pieces in plain Python as front/engine.py has them framed natively, and counts what the server asks of it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import numpy as np

from glm53d._native import TokenLogprob
from glm53d.chat.conversation import Conversation
from glm53d.chat.events import Piece
from glm53d.config import Config
from glm53d.errors import Glm53dError, NotReady
from glm53d.front.job import Finish, Frame, Job, Usage
from glm53d.ipc.records import FinishReason

THINK_END = 7
ADDED = {"</think>": THINK_END, "<think>": 6} | {
    tag: 100 + i
    for i, tag in enumerate(["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])
}
VOCAB_SIZE = 1000
TOKENS = {11: "Let ", 12: "me ", 13: "think.", 21: 'Hello "you"\n', 22: "世界"}
TOKENS |= {id_: tag for tag, id_ in ADDED.items()}
PROMPT_IDS = [31, 32, 33, 34, 35]  # of every prompt, as far as its logprobs tell
END_OF_TURN = 3  # a special token


def logprob_of(id_: int, top: int, *, is_prompt: bool = False) -> TokenLogprob:
    """What every job with logprobs gets of this token."""
    if id_ == PROMPT_IDS[0]:
        return TokenLogprob(id_, None, [], is_prompt)
    return TokenLogprob(id_, -id_ / 8, [(id_ + i, -id_ / 8 - i) for i in range(top)], is_prompt)


@dataclass
class Script:
    """What the next requests get: (phase, text, ids) pieces, then an end. Of the phase python it may be a tag's id."""

    pieces: list[tuple[str, str | int, list[int]]] = field(
        default_factory=lambda: [
            ("reasoning", "Let me ", [11, 12]),
            ("reasoning", "think.", [13, THINK_END]),
            ("content", 'Hello "you"\n', [21]),
            ("content", "世界", [22]),
        ]
    )
    reason: FinishReason = FinishReason.STOP
    matched_stop: str | None = None  # else an id ended it
    refuse: Glm53dError | None = None  # raised by submit_all()
    thinking_forced: tuple[int, ...] = ()  # the jobs, by their place among all, whose budget runs out
    fail: Glm53dError | Exception | None = None  # raised by finished(), after the pieces
    hold_submit: bool = False  # submit_all() never returns
    hold: bool = False  # after the pieces, wait for release or abort


class FakeStream:
    """One request in flight."""

    def __init__(self, engine: "FakeEngine", job: Job):
        self.rid = job.rid
        self.job = job
        self.num_prompt_ids = 5
        self.num_cut_ids = 0
        self.slow: list[bool] = []
        self.write: Callable[[bytes], None] | None = None
        self.release = asyncio.Event()
        self.aborted = False
        self._engine = engine
        self._entered: str | None = None  # the phase that is open, of those that are framed
        self._make = lambda frames, pieces: frames

    def start(self, write: Callable[[bytes], None], frame: Callable[[bytes, list[Piece]], bytes] | None = None) -> None:
        self.write = write
        self._make = frame or self._make
        if self.job.sampling.top_logprobs is not None:
            tokens = self._prompt_logprobs()
            for part in filter(None, (tokens[:2], tokens[2:])):  # a long prompt's come with each step
                self._send(b"", part)
        for phase, text, ids in self._engine.script.pieces:
            if self.job.sampling.top_logprobs is not None:
                said = [i for i in ids if i != THINK_END] if isinstance(text, str) else [text]
                ends = [THINK_END, *self._logprobs([THINK_END])] if THINK_END in ids else []
                self._send(b"", [*([text] if text else []), *self._logprobs(said), *ends])
            elif self.job.out.all_python:
                self._send(b"", [text, *([THINK_END] if THINK_END in ids else [])])
            elif phase == "python":
                self._send(self._enter(None), [text])
            else:
                self._send(self._enter(phase) + self.frame(phase, text, ids), [])

    def _logprobs(self, ids: list[int]) -> list[TokenLogprob]:
        return [logprob_of(i, self.job.sampling.top_logprobs or 0) for i in ids]

    def _prompt_logprobs(self) -> list[TokenLogprob]:
        top, start = self.job.sampling.top_logprobs, self.job.sampling.logprob_start
        return [] if top is None or start is None else [logprob_of(i, top, is_prompt=True) for i in PROMPT_IDS[start:]]

    def _send(self, frames: bytes, pieces: list[Piece]) -> None:
        assert self.write is not None
        if events := self._make(frames, pieces):
            self.write(events)

    def _enter(self, phase: str | None) -> bytes:
        """What stands between the frames of two phases; None: no more frames."""
        out, events = self.job.out, b""
        first = "reasoning" if out.starts_in_reasoning else "content"
        for to in (first, phase) if self._entered is None else (phase,):
            if to != self._entered:
                events += self._frame_of(self._entered).leave + self._frame_of(to).enter
                self._entered = to or "none"
        return events

    def _frame_of(self, phase: str | None) -> Frame:
        out = self.job.out
        frames = {"reasoning": out.reasoning or out.content, "content": out.content}
        return frames.get(phase or "none") or Frame(b"", b"")

    def frame(self, phase: str, text: str, ids: list[int]) -> bytes:
        out, frame = self.job.out, self._frame_of(phase)
        middle = msgspec.json.encode(text)[1:-1]
        if out.with_ids:
            middle += b'","output_ids":' + msgspec.json.encode(ids)
        return frame.prefix + middle + frame.suffix

    def set_slow(self, slow: bool) -> None:
        self.slow.append(slow)

    async def finished(self) -> Finish:
        script = self._engine.script
        if script.hold and not self.aborted:
            await self.release.wait()
        if script.fail is not None:
            raise script.fail
        self._engine.live.remove(self)
        if self.job.out.content is not None:
            self._send(self._enter(None), [])
        ids = [i for _, _, piece in script.pieces for i in piece]
        plain = not self.job.out.is_streamed
        first = self.job.received_ns + 10**6
        apart = self.job.out.starts_in_reasoning

        reason = FinishReason.ABORT if self.aborted else script.reason

        def text(*phases: str) -> str:
            return "".join(t for p, t, _ in script.pieces if p in phases)

        content, reasoning = text("content") if apart else text("reasoning", "content"), text("reasoning")
        num_reasoning = sum(len(i) for p, _, i in script.pieces if p == "reasoning")
        ends_thinking = THINK_END in ids or any(p == "python" for p, *_ in script.pieces)
        if is_all_answer := apart and reason is FinishReason.STOP and not ends_thinking:
            content, reasoning, num_reasoning = reasoning, "", 0

        return Finish(
            reason=reason,
            usage=Usage(5, len(ids), num_reasoning, sum(self._engine.cached), *self._engine.cached),
            matched_id=3 if script.reason is FinishReason.STOP and script.matched_stop is None else None,
            matched_stop=script.matched_stop,
            text=content if plain or is_all_answer else "",
            reasoning=reasoning if plain and apart else "",
            pieces=[t for p, t, _ in script.pieces if p == "python"] if plain else [],
            logprobs=self._logprobs(ids) if plain and self.job.sampling.top_logprobs is not None else [],
            prompt_logprobs=self._prompt_logprobs() if plain else [],
            output_ids=np.array(ids, np.int32),
            thinking_forced=any(self.job is self._engine.jobs[i] for i in script.thinking_forced),
            marks={
                "received": first - 10**6, "parsed": first - 9 * 10**5, "rendered": first - 8 * 10**5,
                "tokenized": first - 5 * 10**5, "admitted": first - 4 * 10**5, "prefill_done": first - 10**5,
                "first_token": first, "last_token": first + 10**7, "queue": 10**5,
            },
        )


class FakeEngine:
    """The engine's contract with the server, scripted."""

    def __init__(self, config: Config):
        self.config = config
        self.script = Script()
        token_bytes = [TOKENS.get(i, f"<{i}>").encode() for i in range(VOCAB_SIZE)]
        special = [i == END_OF_TURN for i in range(VOCAB_SIZE)]
        self.vocab = SimpleNamespace(size=VOCAB_SIZE, added=ADDED, token_bytes=token_bytes, special=special)
        self.limits = SimpleNamespace(max_req_input_len=99, max_context_len=100)
        self.defaults = {"temperature": 1.0, "top_p": 0.95}
        self.models = ("nano", "alias")
        self.state = "up"
        self.live: list[FakeStream] = []
        self.jobs: list[Job] = []
        self.tokenized: list[Conversation | str] = []
        self.control = self  # its calls stand below, what came is in calls
        self.cached = (2, 0, 0)  # tokens of each prompt, by tier
        self.calls: list[str] = []
        self.submits_cancelled = 0
        self.num_text_jobs = 0

    async def submit_all(self, jobs: list[Job], n: int) -> list[FakeStream]:
        assert len(jobs) % n == 0
        if self.script.refuse is not None:
            raise self.script.refuse
        if self.script.hold_submit:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.submits_cancelled += 1
                raise
        self.jobs += jobs
        streams = [FakeStream(self, job) for job in jobs]
        self.live += streams
        return streams

    def abort(self, stream: FakeStream) -> None:
        if stream in self.live:
            self.live.remove(stream)
            stream.aborted = True

    def abort_rid(self, rid: str | None) -> int:
        chosen = [s for s in self.live if rid is None or s.rid == rid]
        for stream in chosen:
            stream.aborted = True
            stream.release.set()
        return len(chosen)

    async def tokenize(self, prompt: Conversation | str) -> np.ndarray:
        self.tokenized.append(prompt)
        return np.zeros(5, np.int32)

    async def in_text_pool(self, fn, *args):
        self.num_text_jobs += 1
        return await asyncio.get_running_loop().run_in_executor(None, fn, *args)

    async def detokenize(self, ids: np.ndarray, *, skip_special: bool) -> str:
        return f"{len(ids)} ids"

    async def flush_cache(self) -> int:
        return self._called("flush_cache", 3)

    async def pause(self, *, retract: bool) -> int:
        return self._called(f"pause retract={retract}", len(self.live))

    async def resume(self) -> int:
        return self._called("resume", len(self.live))

    async def set_log_level(self, number: int) -> None:
        self._called(f"set_log_level {number}", 0)

    def _called(self, call: str, answer: int) -> int:
        if self.state != "up":
            raise NotReady("The ranks are loading.")
        self.calls.append(call)
        return answer

    async def health_generate(self) -> None:
        if self.state != "up":
            raise NotReady("The ranks are loading.")

    def health(self) -> tuple[bool, dict]:
        return self.state == "up", {"state": self.state}

    def ready(self) -> tuple[bool, dict]:
        return self.state == "up", {"state": self.state}

    def server_info(self) -> dict:
        return {"state": self.state, "models": list(self.models)}

    def text_stats(self) -> dict[str, int]:
        return {"hits": 3, "tokens": 40}

    def loads(self) -> list[dict]:
        """Two attention-DP ranks, as rows of the board."""
        row = {
            "num_waiting": 0, "num_waiting_tokens": 0, "pages_total": 100, "pages_locked": 2, "pages_owned": 3,
            "steps": 12, "prefill_tokens": 60, "cached_tokens": 20, "cached_host_tokens": 4, "cached_storage_tokens": 6,
            "host_pages_used": 7, "host_pages_total": 9, "file_pages_used": 8,
        }  # fmt: skip
        return [{"dp_rank": rank, "num_running": len(self.live) if rank == 0 else 0} | row for rank in range(2)]
