"""Exchange: one request's way through the engine, streamed or plain; the part that all dialects share. [R22]

receive() gives the typed body, plain() runs a job to its Finish, streamed() sends its frames as they come. A client
that leaves cancels the handler, whatever it waits for: so both abort in `finally`, and nothing else here does.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from glm53d.config import Config
from glm53d.errors import (
    EngineError,
    Glm53dError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    NotReady,
    Overloaded,
    RequestError,
)
from glm53d.front.engine import Engine, Stream
from glm53d.front.job import Finish, Job, Pieces
from glm53d.front.wire import PROBE_RID
from glm53d.obs.metrics import Metrics
from glm53d.server import body
from glm53d.server.auth import Keys
from glm53d.server.sse import EventStream

log = logging.getLogger(__name__)

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""An answer's id is one of these and the request's rid."""

MAX_TOLD_NAMES, MAX_TOLD_CHARS = 5, 40  # of others' words in a log line

_RID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class Service:
    """What handlers need, kept in the application under SERVICE."""

    engine: Engine
    config: Config
    metrics: Metrics
    keys: Keys  # others after a SIGHUP
    num_open: int = 0  # requests that are being read, worked on or answered
    bytes_read: int = 0  # of the bodies that are being read, at most


@dataclass(frozen=True, slots=True)
class Wire:
    """What a dialect's streams have beside what is said."""

    failed: Callable[[RequestError | EngineError], bytes]  # the last events of one that has failed
    done: bytes = b""  # behind the last event of any
    keep_alive: bytes = b": keep-alive\n\n"  # [R47]


OPENAI_WIRE = Wire(failed=lambda exc: b"data: %b\n\n" % body.encode(body.ErrorBody.of(exc)), done=b"data: [DONE]\n\n")

BODIES_AT_ONCE = 16
"""As many of the largest size are read at once, or as much in smaller ones."""

SERVICE = web.AppKey("service", Service)
RID = web.RequestKey("rid", str)
NUM_CUT = web.RequestKey("num_cut", int)
"""Tokens that the prompt lost at its beginning: any answer says so in a header. [R20]"""


async def receive(request: web.Request, decoder: msgspec.json.Decoder[body.T]) -> tuple[body.T, int]:
    """The typed body and when its last byte was read. Raises NotReady, Overloaded, then what is wrong with the body."""
    service, largest = request.app[SERVICE], request.client_max_size
    length = largest if request.content_length is None else min(request.content_length, largest)
    if service.bytes_read + length > BODIES_AT_ONCE * largest:
        raise Overloaded("Too many large bodies are being read at once; try again later.")
    service.bytes_read += length
    try:
        raw, received_ns = await body.read(request, service.config.server.body_timeout_s)
    finally:
        service.bytes_read -= length
    is_ready, _ = service.engine.ready()
    if not is_ready:  # limits, vocabulary and defaults are known only from then on
        raise NotReady(f"No work is accepted: the server is {service.engine.state}.")
    return body.decode(decoder, raw), received_ns


def begin_rid(request: web.Request) -> None:
    """Give the request an outside id before anything can go wrong: a good X-Request-Id, or a fresh one. [R12]"""
    header = request.headers.get("X-Request-Id", "")
    request[RID] = header if _RID.fullmatch(header) else secrets.token_hex(16)


def choose_rid(request: web.Request, given: str | None) -> str:
    """The request's outside id: from the body, the X-Request-Id header, or a fresh one. [R12]"""
    if given is not None:
        check_rid(given, "rid")
        request[RID] = given
    elif "X-Request-Id" in request.headers:
        check_rid(request.headers["X-Request-Id"], "X-Request-Id")
    return request[RID]


def check_rid(rid: str, where: str) -> None:
    """Raise InvalidRequest for what cannot be an outside id."""
    if not _RID.fullmatch(rid) or rid == PROBE_RID:
        raise InvalidRequest(f"`{where}` must be 1 to 128 visible ASCII characters, and not {PROBE_RID}.", where)


def rid_of(id: str) -> str | None:
    """The rid in the id of an answer; None when it is none of ours."""
    return next((id.removeprefix(prefix) for prefix in ANSWER_PREFIXES if id.startswith(prefix)), None)


def choose_model(engine: Engine, name: str | None) -> str:
    """The name that the answer carries: the client's, if it is one of ours. Raises ModelNotFound."""
    if name is None or name == "unknown":  # what a gateway makes of none
        return engine.models[0]
    if name not in engine.models:
        raise ModelNotFound(f"The model `{name}` is not served here; `{engine.models[0]}` is.", "model")
    return name


def check_number(engine: Engine, answers: int, param: str) -> None:
    """Raise InvalidRequest for a request of more answers than can ever be in flight, before anything is made of it."""
    if answers > (most := engine.config.server.max_requests):
        raise InvalidRequest(f"`{param}` asks for {answers} answers; the limit is {most} (server.max_requests).", param)


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the answers to a request: what runs, and what its dialect makes of it in a stream."""

    job: Job
    last: Callable[[Finish], bytes]  # the events at its end
    frame: Callable[[bytes, Pieces], bytes] | None = None  # those of a wake's frames and pieces, where it has any
    first: Callable[[int], bytes] = lambda num_prompt_ids: b""  # those before all others


async def plain(request: web.Request, job: Job) -> Finish:
    """Run a job to its end. Raises RequestError before the engine has it, EngineError after."""
    (finish,) = await plain_all(request, [job], 1)
    return finish


async def plain_all(request: web.Request, jobs: Sequence[Job], n: int) -> list[Finish]:
    """Run all answers to one request to their ends, n of them to each prompt. [R20]"""
    engine = request.app[SERVICE].engine
    streams = await engine.submit_all(jobs, n)
    request[NUM_CUT] = sum(stream.num_cut_ids for stream in streams[::n])
    try:
        if len(streams) > 1:  # tasks cost something; of several the first that fails decides
            finishes = await asyncio.gather(*(stream.finished() for stream in streams))
        else:
            finishes = [await streams[0].finished()]
    finally:
        for stream in streams:
            engine.abort(stream)  # nothing to do for one that has finished
    _count(request, jobs[0], finishes, n)
    return finishes


async def streamed(
    request: web.Request,
    job: Job,
    *,
    last: Callable[[Finish], bytes],
    first: Callable[[int], bytes] = lambda num_prompt_ids: b"",
    frame: Callable[[bytes, Pieces], bytes] | None = None,
    wire: Wire = OPENAI_WIRE,
) -> web.StreamResponse:
    """Run a job, its frames going out as they come, between the events of first(num_prompt_ids) and last(finish).

    frame() makes the events of a wake's frames and pieces, where the job asks for pieces.
    Raises RequestError and NotReady while there is still a status to choose. Later errors are the dialect's last event.
    """
    return await streamed_all(request, [Answer(job, last, frame, first)], 1, wire=wire)


async def streamed_all(
    request: web.Request,
    answers: Sequence[Answer],
    n: int,
    *,
    end: Callable[[list[Finish]], bytes] = lambda finishes: b"",
    wire: Wire = OPENAI_WIRE,
) -> web.StreamResponse:
    """As streamed(), with all answers to one request, n to each prompt: each one's last events as it ends, then end().
    [R20]
    """
    service = request.app[SERVICE]
    job = answers[0].job
    streams = await service.engine.submit_all([answer.job for answer in answers], n)
    request[NUM_CUT] = sum(stream.num_cut_ids for stream in streams[::n])
    events = EventStream(request, streams, service.config.server.keepalive_s, wire.keep_alive)
    try:
        firsts = [answer.first(stream.num_prompt_ids) for stream, answer in zip(streams, answers, strict=True)]
        await events.open(b"".join(firsts))
        try:
            runs = [_run(stream, answer, events) for stream, answer in zip(streams, answers, strict=True)]
            finishes = await asyncio.gather(*runs) if len(runs) > 1 else [await runs[0]]  # tasks cost something
            last = end(finishes)
            _count(request, job, finishes, n)
        except Exception as exc:
            last = wire.failed(visible(exc, job.rid))
            service.metrics.stream_error(endpoint(request))
        return await events.close(last + wire.done)
    finally:
        events.cut()
        for stream in streams:
            service.engine.abort(stream)


async def _run(stream: Stream, answer: Answer, events: EventStream) -> Finish:
    stream.start(events.write, answer.frame)
    finish = await stream.finished()
    if last := answer.last(finish):
        events.write(last)
    return finish


def count_dropped_calls(request: web.Request, job: Job, names: list[str]) -> None:
    """The model has called what the request does not have; the client never sees it, so it is seen here."""
    if names:
        request.app[SERVICE].metrics.dropped_calls(endpoint(request), len(names))
        log.info("%d calls of unknown tools dropped: %s", len(names), _told(names), extra={"rid": job.rid})


def log_ignored_tools(rid: str, kinds: list[str]) -> None:
    """Agents offer tools that their vendor's server would run; here the model does not hear of them. [F-H4]"""
    if kinds:
        log.info("%d tools of other kinds ignored: %s", len(kinds), _told(kinds), extra={"rid": rid})


def _told(words: list[str]) -> str:
    return ", ".join(repr(word[:MAX_TOLD_CHARS]) for word in words[:MAX_TOLD_NAMES])


def abort_by_id(engine: Engine, id: str) -> int:
    """End what is in flight under this rid, or will have this id in its answer; how many. Raises NotFound. [R48]"""
    aborted = engine.abort_rid(id)
    if not aborted and (rid := rid_of(id)) is not None:
        aborted = engine.abort_rid(rid)
    if not aborted:
        raise NotFound(f"No request `{id}` is in flight.", "id")
    return aborted


def visible(exc: Exception, rid: str | None) -> RequestError | EngineError:
    """The error a client may see. Our failures are logged; what nobody raised on purpose is shown as a plain 500."""
    if isinstance(exc, RequestError | NotReady):  # the latter may come by the thousand while the ranks load
        return exc
    if isinstance(exc, EngineError):
        log.warning("request failed: %s: %s", exc.code, exc.message, extra={"rid": rid})
        return exc
    log.error("unexpected error", exc_info=exc, extra={"rid": rid})
    hidden = EngineError("An internal error; see the log.")
    hidden.code = Glm53dError.code
    return hidden


def endpoint(request: web.Request) -> str:
    """The route's pattern, a label of bounded variety; "unknown" where none matched."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def _count(request: web.Request, job: Job, finishes: list[Finish], n: int) -> None:
    """A request has ended well; each of its prompts counts once. [R20]"""
    for i, finish in enumerate(finishes):
        usage, is_first = finish.usage, i % n == 0
        request.app[SERVICE].metrics.finished(
            endpoint(request),
            finish.reason.name.lower(),
            tokens={
                "prompt": usage.prompt_tokens if is_first else 0,
                "cached": usage.cached_tokens if is_first else 0,
                "completion": usage.completion_tokens,
                "reasoning": usage.reasoning_tokens,
            },
            ttft_s=finish.first_token_latency,
            stages_s=finish.stages,
            queue_s=finish.queue_time,
            e2e_s=seconds_since(job.received_ns),
        )


def seconds_since(ns: int) -> float:
    """Seconds since a CLOCK_MONOTONIC mark."""
    return (time.monotonic_ns() - ns) / 1e9
