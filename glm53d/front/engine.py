"""Engine: main's conductor, from a dialect's Job to the Stream it answers with. [R22]

    submit()   job -> text pool: render, encode, hash pages -> slot -> request ring ═══════════════════════════▶ rank 0
    on_wake()  output pump's events -> frames to the connection that wants them; the last one -> Finish  ◀══════ rank 0

Everything here runs on the event loop's thread, except prepare(), which is the text pool's but for a probe. Over 400
lines in one file for both ways, because they meet in the table: whatever ends a request, from above or below, ends it
by _end().
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from glm53d.chat.conversation import Conversation
from glm53d.config import Config
from glm53d.errors import ContextTooLong, EngineError, InvalidRequest, NotReady, Overloaded, PeerGone
from glm53d.front.control import Control
from glm53d.front.grammar import GrammarCheck
from glm53d.front.health import Health, State
from glm53d.front.job import Finish, Job, Pieces, SamplingParams, Usage
from glm53d.front.prompt import Prompt, TextHalf
from glm53d.front.pump import OutputPump
from glm53d.front.table import Entry, EntryState, Table
from glm53d.front.wire import PROBE_RID, generate_record, pack_abort, read_finish
from glm53d.ipc.channels import MainEnds
from glm53d.ipc.records import CONTROL_RESULT, FinishReason, RecordType
from glm53d.text.pool import TextPool
from glm53d.text.vocab import Vocab

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PROMPT_LOGPROBS = 1 << 18  # of one request, its tokens' and those named beside them: 15 MB of JSON, made in 0.3 s
RING_RETRY_S = 0.001
RING_WAIT_S = 20.0  # for room in the request ring, which the leader empties every step


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """From the ranks' *loaded* reports: what HTTP refuses and what the scheduler accepts are one ruler. [R3]"""

    max_req_input_len: int
    max_context_len: int


def check_logprobs(sampling: SamplingParams, num_prompt_ids: int) -> None:
    """Raise InvalidRequest where a prompt has no such token, or more logprobs than an answer should carry."""
    if sampling.top_logprobs is None or sampling.logprob_start is None:
        return
    if sampling.logprob_start >= num_prompt_ids:
        raise InvalidRequest(f"`logprob_start_len` is behind the {num_prompt_ids} prompt tokens.", "logprob_start_len")
    asked = (num_prompt_ids - sampling.logprob_start) * (1 + sampling.top_logprobs)
    if asked > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(f"The prompt would have {asked} logprobs; at most {MAX_PROMPT_LOGPROBS} fit an answer.")


class Stream:
    """One request in flight, as its dialect sees it."""

    def __init__(self, engine: "Engine", entry: Entry):
        self._engine = engine
        self._entry = entry
        self._write: Callable[[bytes], None] | None = None
        self._frame: Callable[[bytes, Pieces], bytes] | None = None
        self._early: tuple[bytes, Pieces] = b"", []  # from before start()
        self.collected: Pieces = []  # of a plain request

    @property
    def rid(self) -> str:
        return self._entry.job.rid

    @property
    def num_prompt_ids(self) -> int:
        return self._entry.num_prompt_ids

    @property
    def num_cut_ids(self) -> int:
        """Tokens that the prompt lost at its beginning, because it was too long."""
        return self._entry.num_cut_ids

    def start(self, write: Callable[[bytes], None], frame: Callable[[bytes, Pieces], bytes] | None = None) -> None:
        """From now on whole events, joined per wake, go to write.

        frame: makes the events of what came, frames and pieces behind them; needed for a request that may have pieces.
        Without it the frames are the events.
        """
        self._write, self._frame = write, frame
        early, self._early = self._early, (b"", [])
        self.push(*early)

    def set_slow(self, slow: bool) -> None:
        """While slow, frames are merged instead of written: the reader does not take them. [R41]"""
        if self._entry.state is EntryState.SENT:
            self._engine.pump.set_slow(self._entry.handle, slow)

    async def finished(self) -> Finish:
        """The end. Raises EngineError when the request failed."""
        return await asyncio.shield(self._entry.finish)

    def push(self, frames: bytes, pieces: Pieces) -> None:
        """Frames from the pump, and pieces behind them."""
        if self._write is None:
            self._early = self._early[0] + frames, self._early[1] + pieces
            return
        if self._frame is not None:
            frames = self._frame(frames, pieces)
        if frames:
            self._write(frames)


class Engine:
    """All requests in flight of one world."""

    def __init__(
        self, config: Config, vocab: Vocab, models: tuple[str, ...], defaults: dict[str, float], health: Health
    ):
        self.config = config
        self.vocab = vocab
        self.models = models
        self.defaults = defaults  # sampling defaults of the checkpoint
        self.table = Table(config.server.max_requests + 1)  # one is reserved for the health probe [R4]
        self.limits = EngineLimits(0, 0)
        self.is_open = False  # open() was called: the ranks have loaded
        self._health = health
        self._text_pool = TextPool(config.text.threads, config.text.max_queued)
        self._streams: dict[int, Stream] = {}
        self._num_taken = 0  # requests since the world began, but for those that ended before the leader could know
        self.control = Control(self._send_control, config.server.control_timeout_s)
        self._probe: asyncio.Task[None] | None = None  # of health_generate(), while one is on its way

    # ---- start and end -----------------------------------------------------------------------------------------------

    def open(
        self,
        ends: MainEnds,
        text: TextHalf,
        pump: OutputPump,
        limits: EngineLimits,
        topology: list[dict[str, str | int]],
        grammars: GrammarCheck,
    ) -> None:
        """The world is up: take its channels. Needs a running loop."""
        self._ends = ends
        self._text = text
        self.pump = pump
        self.limits = limits
        self._topology = topology
        self._grammars = grammars
        self.is_open = True
        pump.start(self.on_wake)

    def close(self) -> None:
        """After the ranks are gone."""
        self._text_pool.close()
        if self.is_open:
            self._grammars.close()
            self.pump.stop()

    def fail_all(self, error: EngineError) -> None:
        """Every request in flight ends with a clear error: the ranks are gone, or we are. [F-A6] [F-B3]"""
        for entry in self.table.entries():
            self._end(entry, error=error)
        self.control.fail_all(error)

    # ---- the way down ------------------------------------------------------------------------------------------------

    async def submit(self, job: Job) -> Stream:
        """One request alone; see submit_all()."""
        (stream,) = await self.submit_all([job])
        return stream

    async def submit_all(self, jobs: Sequence[Job], n: int = 1) -> list[Stream]:
        """Make the prompts, take a slot for each job, send. Raises before anything has been written, so one bad prompt
        refuses them all; cancelling leaves nothing. [R22]

        Of every n jobs, which are answers to one prompt, the prompt and the routing are the first one's. [R20]
        Raises NotReady, Overloaded, InvalidRequest, ContextTooLong.
        """
        if not self._health.accepts_work:
            raise NotReady(f"No work is accepted: the server is {self._health.state.value}.")
        if jobs[0].rid != PROBE_RID:
            self._raise_if_full(len(jobs))
        entries = [self.table.take(job) for job in jobs]
        self._num_taken += len(entries)
        try:
            streams, prompts = [], []
            for i in range(0, len(jobs), n):  # one after the other: a batch takes one thread of the pool, not all
                prompt, marks = await self._prepare(jobs[i])
                prompts.append(prompt)
                streams += [self._open_stream(entry, prompt, marks) for entry in entries[i : i + n]]
            for i, entry in enumerate(entries):
                group = entries[i - i % n].handle if n > 1 else 0
                await self._send_generate(entry, group, prompts[i // n])
        except BaseException:
            for entry in entries:
                if entry.state is not EntryState.DONE:
                    self._end(entry)
            raise
        return streams

    async def _prepare(self, job: Job) -> tuple[Prompt, dict[str, int]]:
        """The job's prompt, and when each part of making it was done. Its grammar is good."""
        parsed_ns = time.monotonic_ns()
        if (grammar := job.sampling.grammar) is not None:
            await self._grammars.check(grammar)
        longest = self.limits.max_req_input_len
        is_whole = job.sampling.logprob_start is not None  # a place in all of the prompt
        may_truncate = self.config.text.allow_auto_truncate and not is_whole
        if job.rid == PROBE_RID:  # one id: there is nothing to make, and nobody to wait for [R4]
            prompt = self._text.prepare(job, longest, may_truncate)
        else:
            prompt = await self._text_pool.run(self._text.prepare, job, longest, may_truncate)
        check_logprobs(job.sampling, len(prompt.ids))
        return prompt, {
            "received": job.received_ns,
            "parsed": parsed_ns,
            "rendered": prompt.rendered_ns or parsed_ns,
            "tokenized": time.monotonic_ns(),
        }

    def _open_stream(self, entry: Entry, prompt: Prompt, marks: dict[str, int]) -> Stream:
        if entry.is_over():
            return Stream(self, entry)
        entry.marks |= marks
        entry.num_prompt_ids, entry.num_cut_ids = len(prompt.ids), prompt.num_cut
        entry.last_prompt_id = int(prompt.ids[-1])
        stream = self._streams[entry.handle] = Stream(self, entry)
        out = entry.job.out
        self.pump.open(
            entry.handle, out.content, out.reasoning, out.starts_in_reasoning, out.with_ids,
            out.skip_special_tokens, out.python_ids, out.all_python, entry.job.sampling.top_logprobs is not None,
        )  # fmt: skip
        return stream

    def _raise_if_full(self, more: int) -> None:
        """What the leader has not shown on the board yet waits as well, beyond what it has places for. Of their tokens
        it alone knows which are cached.
        """
        waiting, limits = self._health.waiting(), self.config.scheduler
        if len(self.table) + more > (most := self.config.server.max_requests):
            raise Overloaded(f"{most} requests are in flight (server.max_requests); try again later.", waiting.drain_s)
        num_unseen = self._num_taken - waiting.num_received
        num_free = max(0, limits.max_running_requests - waiting.num_running)
        if waiting.num_requests + max(0, num_unseen - num_free) >= (most := limits.max_waiting_requests):
            raise Overloaded(
                f"{most} requests wait (scheduler.max_waiting_requests); try again later.", waiting.drain_s
            )
        if waiting.num_tokens >= (most := limits.max_waiting_tokens):
            raise Overloaded(f"{most} tokens wait (scheduler.max_waiting_tokens); try again later.", waiting.drain_s)

    async def _send_generate(self, entry: Entry, group: int, prompt: Prompt) -> None:
        if entry.is_over():  # perhaps while the ring had no room for the one before
            return
        job = entry.job
        record = generate_record(
            entry.handle, job, prompt, self.limits.max_context_len, self._text.chain_seed, self.config, group
        )
        if sum(map(len, record)) > self.config.world.ring_bytes // 4:
            raise ContextTooLong(f"{len(prompt.ids)} prompt tokens do not fit the request ring (world.ring_bytes).")
        deadline = time.monotonic() + RING_WAIT_S
        while not self._ends.requests.try_write(RecordType.GENERATE, record):
            if time.monotonic() > deadline:  # the leader has not read for that long
                raise Overloaded("The ranks take no more requests now; try again later.")
            await asyncio.sleep(RING_RETRY_S)
            if entry.is_over():
                return
        entry.become(EntryState.SENT)
        entry.marks["enqueued"] = time.monotonic_ns()
        log.debug("request sent: %d prompt tokens", len(prompt.ids), extra={"rid": job.rid, "handle": entry.handle})

    def abort(self, stream: Stream) -> None:
        """Stop a request at once, wherever it is; does nothing for one that is over. [R22]"""
        entry = stream._entry
        if entry.state is not EntryState.DONE:
            self._end(entry, error=EngineError("The request was aborted."))

    def abort_rid(self, rid: str | None) -> int:
        """Abort by outside id, or all (None): their clients get an end that says so. Returns how many."""
        entries = [e for e in self.table.entries() if rid is None or e.job.rid == rid]
        for entry in entries:
            if entry.state is EntryState.SENT:
                self._send_abort(entry)  # the leader answers with the last record, which ends it here too
            else:  # no error, which clients would answer with another try
                usage = Usage(entry.num_prompt_ids, completion_tokens=0, reasoning_tokens=0, cached_tokens=0)
                self._end(entry, finish=Finish(FinishReason.ABORT, usage, marks=entry.marks))
        return len(entries)

    def _send_abort(self, entry: Entry) -> None:
        self._send(RecordType.ABORT, [pack_abort(handle=entry.handle)])

    def _send_control(self, record: bytes) -> None:
        if not self.is_open:
            raise NotReady(f"The ranks cannot be asked: the server is {self.state}.")
        self._send(RecordType.CONTROL, [record])

    def _send(self, kind: RecordType, parts: list[bytes]) -> None:
        """A small record that must arrive: while the ring is full it is tried again."""
        try:
            if not self._ends.requests.try_write(kind, parts):
                asyncio.get_running_loop().call_later(RING_RETRY_S, self._send, kind, parts)
        except PeerGone:
            log.debug("record %s not sent: the leader is gone", kind.name)  # the supervisor tells everybody

    # ---- the way back ------------------------------------------------------------------------------------------------

    def on_wake(self) -> None:
        """The pump has events: frames to write, and ends."""
        for handle, frames, pieces, finish, text, reasoning, ids, reasoning_tokens, first_token_ns in self.pump.take():
            if not handle:  # a record that is no output: its type stands where the tokens' number does
                self._take_record(reasoning_tokens, finish or b"")
                continue
            stream = self._streams.get(handle)
            if stream is None:
                continue  # aborted here while it was on its way
            entry = stream._entry
            if entry.job.out.is_streamed:
                try:
                    stream.push(frames, pieces)
                except Exception as exc:  # in what a dialect makes of pieces: its request fails, the others go on
                    self._end(entry, error=exc)
                    continue
            else:
                stream.collected += pieces
            if finish is not None:
                self._finish(entry, finish, text, reasoning, stream.collected, ids, reasoning_tokens, first_token_ns)

        if self.pump.corrupt and self._health.accepts_work:
            reason = "what the leader wrote into the output ring cannot be read"
            log.error("no more output comes: %s", reason)
            self._health.become(State.UNHEALTHY, reason)
            self.fail_all(EngineError(f"The request cannot go on: {reason}."))

    def _take_record(self, kind: int, payload: bytes) -> None:
        if kind == RecordType.CONTROL_RESULT and len(payload) >= CONTROL_RESULT.itemsize:
            self.control.answered(payload)
        else:
            log.error("record of type %d and %d bytes in the output ring: it is none", kind, len(payload))  # [R10]

    def _finish(self, entry: Entry, record: bytes, *collected: Any) -> None:
        """The last record of a request, with what the pump has collected of it: see read_finish."""
        try:
            finish = read_finish(entry.job, entry.marks, record, *collected)
        except Exception as error:  # what the record says, or one that cannot be read: the others go on
            self._end(entry, error=error)
            return
        if entry.job.conversation is not None:
            self._text.encoder.remember(finish.output_ids, after=entry.last_prompt_id)  # for the next turn [R52]
        self._end(entry, finish=finish)

    def _end(self, entry: Entry, *, finish: Finish | None = None, error: Exception | None = None) -> None:
        """The one way out of the table, once for each request."""
        if finish is None and entry.state is EntryState.SENT and self._health.state is not State.UNHEALTHY:
            self._send_abort(entry)
        self._num_taken -= entry.state is EntryState.TEXT
        if self._streams.pop(entry.handle, None) is not None:
            self.pump.close(entry.handle)
        self.table.release(entry)
        if finish is not None:
            entry.finish.set_result(finish)
        else:
            entry.finish.set_exception(error or EngineError("The request was aborted."))
            entry.finish.exception()  # a dialect that has gone does not ask

    # ---- text alone --------------------------------------------------------------------------------------------------

    async def tokenize(self, prompt: Conversation | str) -> np.ndarray:
        """The ids that a request with this chat, or this raw text, has, also if they are more than fit.

        Raises InvalidRequest, Overloaded, and ContextTooLong for several times as many.
        """
        return await self._text_pool.run(self._text.encode, prompt, self.limits.max_req_input_len)

    async def in_text_pool(self, fn: Callable[..., T], *args: object) -> T:
        """fn(*args), off the event loop. Raises what it raises, and Overloaded."""
        return await self._text_pool.run(fn, *args)

    async def detokenize(self, ids: np.ndarray, *, skip_special: bool) -> str:
        """The text of ids. Raises Overloaded."""
        return await self._text_pool.run(self._text.decode, ids, skip_special)

    # ---- views -------------------------------------------------------------------------------------------------------

    async def health_generate(self) -> None:
        """Prove the whole round trip with one token, which takes no step while others run. [R4]

        Who asks while an answer is awaited hears of that one. Raises NotReady when none comes in time.
        """
        if self._probe is None:
            self._probe = asyncio.create_task(self._prove())
            self._probe.add_done_callback(self._proven)
        await asyncio.shield(self._probe)

    def _proven(self, probe: asyncio.Task[None]) -> None:
        self._probe = None
        if not probe.cancelled():
            probe.exception()  # whoever asked may have gone

    async def _prove(self) -> None:
        job = Job(
            PROBE_RID, time.monotonic_ns(), ids=np.zeros(1, np.int32), sampling=SamplingParams(0.0, max_new_tokens=1)
        )
        stream = await self.submit(job)
        try:
            await asyncio.wait_for(stream.finished(), self.config.server.health_timeout_s)
        except TimeoutError:
            raise NotReady(f"No token within {self.config.server.health_timeout_s:g} s.") from None
        finally:
            self.abort(stream)

    @property
    def state(self) -> str:
        return self._health.state.value

    def health(self) -> tuple[bool, dict[str, object]]:
        """Whether all ranks live and step. [R4]"""
        good, report = self._health.check(self.config.scheduler.watchdog_s)
        return good, report | {"paused": True} if self.control.is_paused else report

    def ready(self) -> tuple[bool, dict[str, object]]:
        """Whether work is accepted; phase and percent while loading."""
        return self._health.accepts_work, self._health.progress()

    def loads(self) -> list[dict[str, object]]:
        """Each attention-DP rank's row of the board."""
        return self._health.loads()

    def text_stats(self) -> dict[str, int]:
        """Counts of the cache of texts."""
        return self._text.encoder.stats() if self.is_open else {}

    def server_info(self) -> dict[str, object]:
        """What is in flight and held, for people and for tests of leaks."""
        info: dict[str, object] = {
            "state": self.state,
            "models": list(self.models),
            "requests_in_flight": len(self.table),
            "streams": len(self._streams),
            "text_jobs": self._text_pool.num_jobs,
            "tasks": len(asyncio.all_tasks()),
            "loads": self.loads(),
            "ranks": self._health.ranks(),
            "max_req_input_len": self.limits.max_req_input_len,
            "max_context_len": self.limits.max_context_len,
        }
        if self.is_open:
            info["output"] = self.pump.stats()
            info["text"] = self._text.describe()
            info["channels"] = self._topology
        return info
