"""/v1/completions: text or ids in, text out; no template, no reasoning apart.

A request may have several prompts, with n answers to each: the choice at index i * n + j is answer j to prompt i.
With `echo` its text begins with the prompt; with `logprobs` too, so do the lists of `logprobs`.
A stream, in order: chunks with `text` (an echo with logprobs in parts, as these come), one with `finish_reason`, one
with `usage` if asked for, [DONE].
"""

import time
from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Meta

from glm53d._native import TokenLogprob
from glm53d.chat.conversation import Json
from glm53d.errors import InvalidRequest
from glm53d.front.engine import Engine
from glm53d.front.job import Finish, Job, OutSpec, Pieces, SamplingParams
from glm53d.server import body, exchange
from glm53d.server.constrained import Form, ResponseFormat, constrain
from glm53d.server.logprobs import Legacy, TokenNames, Tokens, TopLogprobs, in_parts
from glm53d.server.openai_common import (
    Chunks,
    OpenAiFields,
    finish_fields,
    openai_sampling,
    plain_answer,
    sampling_of,
)
from glm53d.server.routing import routing
from glm53d.server.sampling import CountOrNone, TokenId, not_served

_PROMPT_SCHEMA = msgspec.json.schema(str | list[str | TokenId | list[TokenId]])


class CompletionBody(OpenAiFields, kw_only=True):
    """The request. `prompt` stays raw at first: text, ids, or a list of such."""

    prompt: Annotated[msgspec.Raw, Meta(extra_json_schema=_PROMPT_SCHEMA)]
    response_format: ResponseFormat | None = None
    max_tokens: CountOrNone | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | bool | None = None  # false: none

    suffix: Annotated[Json, not_served("")] = None
    best_of: Annotated[Json, not_served(1)] = None


_DECODER = msgspec.json.Decoder(CompletionBody)
_TEXT = msgspec.json.Decoder(str)
_IDS = msgspec.json.Decoder(list[TokenId])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


async def completions(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/completions."""
    req, received_ns = await exchange.receive(request, _DECODER)
    engine = request.app[exchange.SERVICE].engine
    rid = exchange.choose_rid(request, req.rid)
    model = exchange.choose_model(engine, req.model)
    sampling = openai_sampling(req, req.max_tokens, engine)
    form = Form(req, req.response_format, "response_format")
    sampling = await constrain(sampling, form, None, engine, in_chat=False)
    sampling = _with_logprobs(sampling, req)
    prompts, n = _prompts(req.prompt), req.n or 1
    exchange.check_number(engine, len(prompts) * n, "prompt")
    id, created = f"cmpl-{rid}", int(time.time())
    base = Job(
        rid=rid,
        received_ns=received_ns,
        first_token_timeout_s=req.first_token_timeout,
        sampling=sampling,
        routing=routing(request, req),
    )
    choices: list[_Choice] = []
    for i, (at, raw) in enumerate(prompts):
        text, ids = _prompt(raw, at, engine)
        job = replace(base, text=text, ids=ids)
        echo = _echo(job, engine) if req.echo else ""
        for j in range(n):
            chunks = Chunks(id, "text_completion", created, model, req.with_usage, i * n + j)
            choices.append(_Choice(req, job, chunks, j, echo, engine))
    if req.stream:
        return await exchange.streamed_all(
            request,
            [choice.streamed() for choice in choices],
            n,
            end=lambda finishes: choices[0].chunks.usage(finishes, n),
        )
    finishes = await exchange.plain_all(request, [choice.job for choice in choices], n)
    head = {"id": id, "object": "text_completion", "created": created, "model": model}
    answers = [await choice.plain(finish) for choice, finish in zip(choices, finishes, strict=True)]
    return plain_answer(head, answers, base, finishes, n)


class _Choice:
    """One answer, the j-th to its prompt: what runs, its chunks in a stream, its part of a plain answer."""

    def __init__(self, req: CompletionBody, base: Job, chunks: Chunks, j: int, echo: str, engine: Engine):
        self.chunks = chunks
        self._echo = echo
        self._num_echoed = 0  # characters of it that have left, in a stream with logprobs
        self._logprobs: Legacy | None = None
        self._tokens = Tokens()
        if base.sampling.top_logprobs is not None:
            self._logprobs = Legacy(TokenNames(engine, skip_special=req.skip_special_tokens is not False))
        is_framed = bool(req.stream) and self._logprobs is None
        self.job = replace(
            base,
            sampling=sampling_of(base.sampling, j),
            out=OutSpec(
                content=chunks.frame(b'"text":"', b'","logprobs":null,"finish_reason":null') if is_framed else None,
                all_python=bool(req.stream) and not is_framed,
                skip_special_tokens=req.skip_special_tokens is not False,
            ),
        )

    def streamed(self) -> exchange.Answer:
        """It as a part of a stream."""
        return exchange.Answer(self.job, self._last, None if self._logprobs is None else self._frame, self._first)

    def _first(self, _: int) -> bytes:
        """The echo, if it needs no logprobs."""
        return self._chunk(self._echo, None) if self._echo and self._logprobs is None else b""

    def _frame(self, _: bytes, pieces: Pieces) -> bytes:
        """Chunks with logprobs: the echo in parts, as its tokens come, then what is said."""
        assert self._logprobs is not None
        texts: list[str] = []
        prompt: list[TokenLogprob] = []
        tokens: list[TokenLogprob] = []
        for said, by in self._tokens.feed(pieces):
            texts += [piece if isinstance(piece, str) else self._logprobs.names.text(piece) for piece in said]
            prompt += [token for token in by if token.is_prompt]
            tokens += [token for token in by if not token.is_prompt]
        events = b""
        if prompt:
            asked = self._logprobs.of(prompt)
            events += self._chunk(self._echoed(self._logprobs.num_chars), asked)
        if tokens:
            events += self._chunk(self._echoed(None) + "".join(texts), self._logprobs.of(tokens))
        return events

    def _echoed(self, end: int | None) -> str:
        """The next part of the echo, up to there or all of it."""
        part = self._echo[self._num_echoed : end]
        self._num_echoed += len(part)
        return part

    def _chunk(self, text: str, logprobs: Json) -> bytes:
        fields = {"text": text, "logprobs": logprobs, "finish_reason": None}
        return self.chunks.choice(body.encode(fields)[1:-1])

    def _last(self, finish: Finish) -> bytes:
        rest = self._echoed(None) if self._logprobs is not None else ""  # none was said
        echo = self._chunk(rest, None) if rest else b""
        return echo + self.chunks.finish(b'"text":"","logprobs":null', self.job, finish)

    async def plain(self, finish: Finish) -> dict[str, Json]:
        """It as one of the `choices`."""
        tokens, text = [*finish.prompt_logprobs, *finish.logprobs], self._echo + finish.text
        logprobs = None if self._logprobs is None else await in_parts(self._logprobs.of, tokens)
        return {"index": self.chunks.index, "text": text, "logprobs": logprobs, **finish_fields(finish)}


def _with_logprobs(sampling: SamplingParams, req: CompletionBody) -> SamplingParams:
    """Those that were asked for, with `echo` of the prompt too."""
    if req.logprobs is True:
        raise InvalidRequest("`logprobs` is a number: of the likeliest tokens beside each.", "logprobs")
    if req.logprobs is None or req.logprobs is False:
        return sampling
    return replace(sampling, top_logprobs=req.logprobs, logprob_start=0 if req.echo else None)


def _echo(job: Job, engine: Engine) -> str:
    """The prompt as it came."""
    if job.text is not None:
        return job.text
    assert job.ids is not None
    return b"".join(engine.vocab.token_bytes[id] for id in job.ids.tolist()).decode(errors="replace")


def to_ids(ids: list[int], vocab_size: int, at: str) -> np.ndarray:
    """Prompt ids as int32. Raises InvalidRequest for none at all and for the first that is not in the vocabulary."""
    if not ids:
        raise InvalidRequest(f"`{at}` is empty.", at)
    array = np.array(ids, np.int32)
    beyond = array >= vocab_size
    if beyond.any():
        path = f"{at}[{int(beyond.argmax())}]"
        raise InvalidRequest(f"`{path}` is not in the vocabulary of {vocab_size} tokens.", path)
    return array


def _prompts(raw: msgspec.Raw) -> list[tuple[str, bytes]]:
    """The prompts, each with its path, still raw."""
    data = bytes(raw)
    if data.startswith(b"[") and data[1:].lstrip().startswith((b"[", b'"')):
        prompts = body.decode(_LIST, data, "prompt")
        return [(f"prompt[{i}]", bytes(one)) for i, one in enumerate(prompts)]
    return [("prompt", data)]


def _prompt(data: bytes, at: str, engine: Engine) -> tuple[str | None, np.ndarray | None]:
    """A prompt as text or as ids."""
    if data.startswith(b"["):
        return None, to_ids(body.decode(_IDS, data, at), engine.vocab.size, at)
    text = body.decode(_TEXT, data, at)
    if not text:
        raise InvalidRequest(f"`{at}` is empty.", at)
    return text, None
