"""/v1/completions: text or ids in, text out; no template, no reasoning apart. One prompt per request.

A stream, in order: chunks with `text`, one with `finish_reason`, one with `usage` if asked for, [DONE].
"""

import time
from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np
from aiohttp import web

from glm53d.chat.conversation import Json
from glm53d.errors import InvalidRequest
from glm53d.front.engine import Engine
from glm53d.front.job import Finish, Job, OutSpec
from glm53d.server import body, exchange
from glm53d.server.openai_common import (
    Chunks,
    OpenAiFields,
    finish_fields,
    openai_sampling,
    plain_answer,
    sampling_of,
)
from glm53d.server.routing import routing
from glm53d.server.sampling import TokenId, not_served


class CompletionBody(OpenAiFields, kw_only=True):
    """The request. `prompt` stays raw at first: text, ids, or a list that holds one of them."""

    prompt: msgspec.Raw

    echo: Annotated[Json, not_served(False)] = None
    suffix: Annotated[Json, not_served("")] = None
    best_of: Annotated[Json, not_served(1)] = None
    logprobs: Annotated[Json, not_served(False)] = None
    response_format: Annotated[Json, not_served({"type": "text"})] = None


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
    text, ids = _prompt(req.prompt, engine)
    id, created = f"cmpl-{rid}", int(time.time())
    base = Job(rid=rid, received_ns=received_ns, text=text, ids=ids, sampling=sampling, routing=routing(request, req))
    choices = [
        _Choice(req, base, Chunks(id, "text_completion", created, model, req.with_usage, index))
        for index in range(req.n or 1)
    ]
    if req.stream:
        return await exchange.streamed_all(
            request,
            [exchange.Answer(choice.job, choice.last) for choice in choices],
            first=lambda _: b"",
            end=choices[0].chunks.usage,
        )
    finishes = await exchange.plain_all(request, [choice.job for choice in choices])
    head = {"id": id, "object": "text_completion", "created": created, "model": model}
    answers = [choice.plain(finish) for choice, finish in zip(choices, finishes, strict=True)]
    return plain_answer(head, answers, base, finishes)


class _Choice:
    """One answer: what runs, its last chunk in a stream, its part of a plain answer."""

    def __init__(self, req: CompletionBody, base: Job, chunks: Chunks):
        self.chunks = chunks
        self.job = replace(
            base,
            sampling=sampling_of(base.sampling, chunks.index),
            out=OutSpec(
                content=chunks.frame(b'"text":"', b'","logprobs":null,"finish_reason":null') if req.stream else None,
                skip_special_tokens=req.skip_special_tokens is not False,
            ),
        )

    def last(self, finish: Finish) -> bytes:
        """The chunk that says how it ended."""
        return self.chunks.finish(b'"text":"","logprobs":null', self.job, finish)

    def plain(self, finish: Finish) -> dict[str, Json]:
        """It as one of the `choices`."""
        return {"index": self.chunks.index, "text": finish.text, "logprobs": None, **finish_fields(finish)}


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


def _prompt(raw: msgspec.Raw, engine: Engine) -> tuple[str | None, np.ndarray | None]:
    """The prompt as text or as ids."""
    at, data = "prompt", bytes(raw)
    if data.startswith(b"["):
        inner = data[1:].lstrip()
        if inner.startswith((b"[", b'"')):
            prompts = body.decode(_LIST, data, at)
            if len(prompts) > 1:
                raise InvalidRequest("`prompt` with several prompts is not supported.", at)
            at, data = "prompt[0]", bytes(prompts[0])
    if data.startswith(b"["):
        return None, to_ids(body.decode(_IDS, data, at), engine.vocab.size, at)
    text = body.decode(_TEXT, data, at)
    if not text:
        raise InvalidRequest(f"`{at}` is empty.", at)
    return text, None
