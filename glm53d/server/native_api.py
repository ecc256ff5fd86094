"""/generate: text or ids in, text and ids out; the native API, with SGLang's field names.

An event of a stream has all that was said so far, and the last one is the plain answer; then comes [DONE]. With
`incremental_streaming_output` events are deltas: each has only its new `text` and `output_ids`, and in `meta_info` the
logprobs of these, if they are asked for; the last has the rest of `meta_info` and no text.

A batch, that is several prompts or n of one, is answered by a list: answer j to prompt i stands at i * n + j, and a
stream's events say as their `index` which one they belong to.
"""

from collections.abc import Sized
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from glm53d._native import TokenLogprob
from glm53d.chat.conversation import Json
from glm53d.errors import InvalidRequest
from glm53d.front.engine import Engine
from glm53d.front.job import Finish, Frame, Job, OutSpec, Pieces, SamplingParams
from glm53d.server import body, exchange
from glm53d.server.common import cached_by_tier
from glm53d.server.constrained import Form, constrain
from glm53d.server.logprobs import Native, TokenNames, Tokens, TopLogprobs, in_parts, needs
from glm53d.server.native_stream import FRAME, SoFar
from glm53d.server.openai_common import sampling_of
from glm53d.server.openai_completions import to_ids
from glm53d.server.routing import DpRank, Room, routing
from glm53d.server.sampling import (
    CountOrNone,
    Int32,
    SamplingFields,
    Seed,
    Timeout,
    TokenId,
    not_served,
    refuse_not_served,
    to_sampling,
)

T = TypeVar("T")

PromptStart = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""The prompt's first token with logprobs, -1: none of it has."""


class NativeSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of a request. Unknown ones are refused, as in SGLang."""

    sampling_seed: Seed | None = None  # SGLang's name; counts before `seed`
    n: Annotated[int, Meta(ge=1, le=16)] | None = None  # [R20]
    max_new_tokens: CountOrNone | None = None
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """The request. Unknown fields are ignored, null is absent. Several prompts may have as many parameters and rids."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    incremental_streaming_output: bool | None = None  # a server's option in SGLang
    rid: str | list[str] | None = None
    priority: Int32 | None = None
    data_parallel_rank: DpRank | None = None  # two names of one choice
    routed_dp_rank: DpRank | None = None
    bootstrap_room: Room | None = None
    first_token_timeout: Timeout | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    prompt_cache_key: str | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: PromptStart | list[PromptStart] | None = None
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    return_text_in_logprobs: bool | None = None

    token_ids_logprob: Annotated[Json, not_served()] = None
    return_hidden_states: Annotated[Json, not_served(False)] = None
    input_embeds: Annotated[Json, not_served()] = None
    image_data: Annotated[Json, not_served()] = None
    video_data: Annotated[Json, not_served()] = None
    audio_data: Annotated[Json, not_served()] = None
    lora_path: Annotated[Json, not_served()] = None
    lora_id: Annotated[Json, not_served()] = None
    return_routed_experts: Annotated[Json, not_served(False)] = None
    return_prompt_token_ids: Annotated[Json, not_served(False)] = None
    session_params: Annotated[Json, not_served()] = None
    custom_logit_processor: Annotated[Json, not_served()] = None
    bootstrap_host: Annotated[Json, not_served()] = None
    bootstrap_port: Annotated[Json, not_served()] = None


_DECODER = msgspec.json.Decoder(GenerateBody)


async def generate(request: web.Request) -> web.StreamResponse:
    """Handle POST /generate."""
    req, received_ns = await exchange.receive(request, _DECODER)
    engine = request.app[exchange.SERVICE].engine
    rid = exchange.choose_rid(request, None if isinstance(req.rid, list) else req.rid)
    refuse_not_served(req)
    prompts, is_batch = _prompts(req)
    params = _of_each(req.sampling_params or NativeSampling(), prompts, is_batch, "sampling_params")
    rids = _of_each(req.rid or rid, prompts, is_batch, "rid")
    asked = _logprobs_of_each(req, prompts, is_batch)
    n = params[0][1].n or 1
    exchange.check_number(engine, len(prompts) * n, "text" if req.input_ids is None else "input_ids")
    is_list, where = is_batch or n > 1, routing(request, req)
    answers: list[_Answer] = []
    for (at, prompt), (params_at, fields), (rid_at, rid), (top, start) in zip(
        prompts, params, rids, asked, strict=True
    ):
        exchange.check_rid(rid, rid_at)
        if (fields.n or 1) != n:
            raise InvalidRequest(f"`{params_at}.n` must be the same for all prompts.", f"{params_at}.n")
        if not prompt:
            raise InvalidRequest(f"`{at}` is empty.", at)
        base = Job(
            rid=rid,
            received_ns=received_ns,
            first_token_timeout_s=req.first_token_timeout,
            text=prompt if isinstance(prompt, str) else None,
            ids=None if isinstance(prompt, str) else to_ids(prompt, engine.vocab.size, at),
            sampling=replace(await _sampling(fields, params_at, req, engine), top_logprobs=top, logprob_start=start),
            routing=where,
        )
        for j in range(n):
            answers.append(_Answer(req, base, fields, j, len(answers) if is_list else None, engine))
    if req.stream:
        return await exchange.streamed_all(request, [answer.streamed() for answer in answers], n)
    finishes = await exchange.plain_all(request, [answer.job for answer in answers], n)
    said = [await answer.plain(finish) for answer, finish in zip(answers, finishes, strict=True)]
    return body.json_response(body.encode(said if is_list else said[0]))


class _Answer:
    """One answer, the j-th to its prompt; index: its place in a list, None: it stands alone."""

    def __init__(
        self, req: GenerateBody, base: Job, params: NativeSampling, j: int, index: int | None, engine: Engine
    ):
        self._head: dict[str, Json] = {} if index is None else {"index": index}
        self._tokens = Tokens()
        self._so_far = None if req.incremental_streaming_output else SoFar()
        self._logprobs: Native | None = None
        if base.sampling.top_logprobs is not None:
            names = TokenNames(engine, skip_special=params.skip_special_tokens is not False)
            with_top, with_text = base.sampling.top_logprobs > 0, bool(req.return_text_in_logprobs)
            self._logprobs = Native(names, with_top=with_top, with_text=with_text)
        is_framed = bool(req.stream) and self._logprobs is None
        frame = FRAME
        if self._so_far is None:
            frame = Frame(b"data: {" + (b"" if index is None else b'"index":%d,' % index) + b'"text":"', b"}\n\n")
        self.job = replace(
            base,
            sampling=sampling_of(base.sampling, j),
            out=OutSpec(
                content=frame if is_framed else None,
                with_ids=self._logprobs is None,
                all_python=bool(req.stream) and not is_framed,
                skip_special_tokens=params.skip_special_tokens is not False,
            ),
        )

    def streamed(self) -> exchange.Answer:
        """It as a part of a stream."""
        if self._so_far is not None:
            return exchange.Answer(self.job, self._last, self._repeat, self._so_far.begin)
        return exchange.Answer(self.job, self._last, None if self._logprobs is None else self._frame)

    def _frame(self, _: bytes, pieces: Pieces) -> bytes:
        """An event with the tokens that came, and their logprobs."""
        assert self._logprobs is not None
        text, tokens = _text_and_tokens(self._tokens, pieces, self._logprobs.names)
        if not tokens:
            return b""
        ids = [token.id for token in tokens if not token.is_prompt]
        meta = {"id": self.job.rid} | self._logprobs.of(tokens)
        return self._event({"text": text, "output_ids": ids, "meta_info": meta})

    def _repeat(self, frames: bytes, pieces: Pieces) -> bytes:
        """An event with all that was said so far, when it is time for one."""
        assert self._so_far is not None
        if self._logprobs is None:
            self._so_far.add_frames(frames)
        else:
            text, tokens = _text_and_tokens(self._tokens, pieces, self._logprobs.names)
            ids = [token.id for token in tokens if not token.is_prompt]
            self._so_far.add(text, ids, self._logprobs.of(tokens))
        return self._event(self._so_far.told(self.job.rid)) if self._so_far.is_due else b""

    def _last(self, finish: Finish) -> bytes:
        meta = _meta_info(self.job, finish)
        if self._so_far is not None:
            return self._event(self._so_far.whole(meta))
        return self._event({"text": "", "output_ids": [], "meta_info": meta})

    def _event(self, said: dict[str, Json]) -> bytes:
        return b"data: " + body.encode(self._head | said) + b"\n\n"

    async def plain(self, finish: Finish) -> dict[str, Json]:
        """All of it at once."""
        meta = _meta_info(self.job, finish)
        if self._logprobs is not None:
            meta |= await in_parts(self._logprobs.of, [*finish.prompt_logprobs, *finish.logprobs])
        return {"text": finish.text, "output_ids": finish.output_ids.tolist(), "meta_info": meta}


def _text_and_tokens(tokens: Tokens, pieces: Pieces, names: TokenNames) -> tuple[str, list[TokenLogprob]]:
    """What pieces say, and by which tokens."""
    found = tokens.feed(pieces)
    text = "".join(piece if isinstance(piece, str) else names.text(piece) for said, _ in found for piece in said)
    return text, [token for _, by in found for token in by]


def _prompts(req: GenerateBody) -> tuple[list[tuple[str, Any]], bool]:
    """The prompts, each text or a list of ids, with their paths; and whether there is a list of them."""
    if (req.text is None) == (req.input_ids is None):
        raise InvalidRequest("Exactly one of `text` and `input_ids` is required.", "text")
    at, given = ("text", req.text) if req.input_ids is None else ("input_ids", req.input_ids)
    if not given:
        raise InvalidRequest(f"`{at}` is empty.", at)
    if isinstance(given, list) and len(set(map(type, given))) > 1:
        raise InvalidRequest(f"`{at}` has both ids and lists of ids.", at)
    if isinstance(given, str) or isinstance(given[0], int):
        return [(at, given)], False
    return [(f"{at}[{i}]", one) for i, one in enumerate(given)], True


def _of_each(value: T | list[T], prompts: Sized, is_batch: bool, at: str) -> list[tuple[str, T]]:
    """The value for each prompt, with its path: one for all, or one of a list."""
    if not isinstance(value, list):
        return [(at, value)] * len(prompts)
    if not is_batch or len(value) != len(prompts):
        raise InvalidRequest(f"`{at}` must be one, or as many as there are prompts.", at)
    return [(f"{at}[{i}]", one) for i, one in enumerate(value)]


async def _sampling(params: NativeSampling, at: str, req: GenerateBody, engine: Engine) -> SamplingParams:
    if params.sampling_seed is not None:
        params = msgspec.structs.replace(params, seed=params.sampling_seed)
    sampling = to_sampling(
        params,
        max_tokens=params.max_new_tokens,
        min_tokens=("min_new_tokens", params.min_new_tokens),
        priority=req.priority,
        defaults=engine.defaults,
        vocab_size=engine.vocab.size,
        at=at,
    )
    return await constrain(sampling, Form(params, at=at), None, engine, in_chat=False)


def _logprobs_of_each(req: GenerateBody, prompts: Sized, is_batch: bool) -> list[tuple[int | None, int | None]]:
    """`top_logprobs` and `logprob_start` of SamplingParams, for each prompt."""
    switches = _of_each(req.return_logprob or False, prompts, is_batch, "return_logprob")
    start = -1 if req.logprob_start_len is None else req.logprob_start_len
    starts = _of_each(start, prompts, is_batch, "logprob_start_len")
    tops = _of_each(req.top_logprobs_num or 0, prompts, is_batch, "top_logprobs_num")
    is_asked = any(is_on for _, is_on in switches)
    needs("return_logprob", is_asked, "logprob_start_len", any(start >= 0 for _, start in starts))
    needs("return_logprob", is_asked, "top_logprobs_num", any(top for _, top in tops))
    needs("return_logprob", is_asked, "return_text_in_logprobs", bool(req.return_text_in_logprobs))
    return [
        (top, None if start < 0 else start) if is_on else (None, None)
        for (_, is_on), (_, start), (_, top) in zip(switches, starts, tops, strict=True)
    ]


def _meta_info(job: Job, finish: Finish) -> dict[str, Json]:
    """`meta_info`, of the plain answer and of the last event of a stream. Latencies are in seconds. [R24]"""
    usage = finish.usage
    return {
        "id": job.rid,
        "finish_reason": _finish_reason(finish),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "cached_tokens_details": cached_by_tier(usage),
        "e2e_latency": exchange.seconds_since(job.received_ns),
        "queue_time": finish.queue_time,
        "first_token_latency": finish.first_token_latency,
        "decode_throughput": finish.decode_throughput,
    }


def _finish_reason(finish: Finish) -> dict[str, Json]:
    kind = finish.reason.name.lower()
    if kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if kind == "length":
        return {"type": "length", "length": finish.usage.completion_tokens}
    return {"type": kind, "message": "The request was aborted."}
