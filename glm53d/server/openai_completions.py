"""/v1/completions: text or ids in, text out; no template, no reasoning apart.

A request may have several prompts, with n answers to each: the choice at index i * n + j is answer j to prompt i.
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
from glm53d.server.constrained import ResponseFormat, constrain, to_content
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
    """The request. `prompt` stays raw at first: text, ids, or a list of such."""

    prompt: msgspec.Raw
    response_format: ResponseFormat | None = None

    echo: Annotated[Json, not_served(False)] = None
    suffix: Annotated[Json, not_served("")] = None
    best_of: Annotated[Json, not_served(1)] = None
    logprobs: Annotated[Json, not_served(False)] = None


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
    content = to_content(req, req.response_format, "response_format")
    sampling = constrain(sampling, content, None, engine, in_chat=False)
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
        for j in range(n):
            chunks = Chunks(id, "text_completion", created, model, req.with_usage, i * n + j)
            choices.append(_Choice(req, replace(base, text=text, ids=ids), chunks, j))
    if req.stream:
        return await exchange.streamed_all(
            request,
            [exchange.Answer(choice.job, choice.last) for choice in choices],
            n,
            end=lambda finishes: choices[0].chunks.usage(finishes, n),
        )
    finishes = await exchange.plain_all(request, [choice.job for choice in choices], n)
    head = {"id": id, "object": "text_completion", "created": created, "model": model}
    answers = [choice.plain(finish) for choice, finish in zip(choices, finishes, strict=True)]
    return plain_answer(head, answers, base, finishes, n)


class _Choice:
    """One answer, the j-th to its prompt: what runs, its last chunk in a stream, its part of a plain answer."""

    def __init__(self, req: CompletionBody, base: Job, chunks: Chunks, j: int):
        self.chunks = chunks
        self.job = replace(
            base,
            sampling=sampling_of(base.sampling, j),
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
