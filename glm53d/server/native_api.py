"""/generate: text or ids in, text and ids out; the native API, with SGLang's field names.

Events of a stream are deltas: each has only its new `text` and `output_ids`. The last one has `meta_info` and no text,
then comes [DONE]. A plain answer has all three at once.
"""

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from glm53d.chat.conversation import Json
from glm53d.errors import InvalidRequest
from glm53d.front.job import Finish, Frame, Job, OutSpec
from glm53d.server import body, exchange
from glm53d.server.openai_completions import to_ids
from glm53d.server.routing import DpRank, routing
from glm53d.server.sampling import Count, Int32, SamplingFields, TokenId, not_served, refuse_not_served, to_sampling


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of a request."""

    max_new_tokens: Count | None = None
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """The request. Unknown fields are ignored, null is absent."""

    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    priority: Int32 | None = None
    data_parallel_rank: DpRank | None = None  # two names of one choice
    routed_dp_rank: DpRank | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    prompt_cache_key: str | None = None

    return_logprob: Annotated[Json, not_served(False)] = None
    logprob_start_len: Annotated[Json, not_served(-1)] = None
    top_logprobs_num: Annotated[Json, not_served(0)] = None
    token_ids_logprob: Annotated[Json, not_served()] = None
    return_hidden_states: Annotated[Json, not_served(False)] = None
    input_embeds: Annotated[Json, not_served()] = None
    image_data: Annotated[Json, not_served()] = None
    video_data: Annotated[Json, not_served()] = None
    audio_data: Annotated[Json, not_served()] = None
    lora_path: Annotated[Json, not_served()] = None
    session_params: Annotated[Json, not_served()] = None
    custom_logit_processor: Annotated[Json, not_served()] = None
    bootstrap_host: Annotated[Json, not_served()] = None
    bootstrap_port: Annotated[Json, not_served()] = None
    bootstrap_room: Annotated[Json, not_served()] = None


_DECODER = msgspec.json.Decoder(GenerateBody)
# The engine puts `","output_ids":[...]` between a frame's text and its suffix.
_FRAME = Frame(b'data: {"text":"', b"}\n\n")


async def generate(request: web.Request) -> web.StreamResponse:
    """Handle POST /generate."""
    req, received_ns = await exchange.receive(request, _DECODER)
    engine = request.app[exchange.SERVICE].engine
    rid = exchange.choose_rid(request, req.rid)
    refuse_not_served(req)
    params = req.sampling_params or NativeSampling()
    sampling = to_sampling(
        params,
        max_tokens=params.max_new_tokens,
        min_tokens=("min_new_tokens", params.min_new_tokens),
        priority=req.priority,
        defaults=engine.defaults,
        vocab_size=engine.vocab.size,
        at="sampling_params",
    )
    if (req.text is None) == (req.input_ids is None):
        raise InvalidRequest("Exactly one of `text` and `input_ids` is required.", "text")
    if req.text == "":
        raise InvalidRequest("`text` is empty.", "text")
    job = Job(
        rid=rid,
        received_ns=received_ns,
        text=req.text,
        ids=None if req.input_ids is None else to_ids(req.input_ids, engine.vocab.size, "input_ids"),
        sampling=sampling,
        routing=routing(request, req),
        out=OutSpec(
            content=_FRAME if req.stream else None,
            with_ids=True,
            skip_special_tokens=params.skip_special_tokens is not False,
        ),
    )
    if req.stream:
        return await exchange.streamed(
            request, job, last=lambda finish: b"data: " + body.encode(_answer("", [], job, finish)) + b"\n\n"
        )
    finish = await exchange.plain(request, job)
    return body.json_response(body.encode(_answer(finish.text, finish.output_ids.tolist(), job, finish)))


def _answer(text: str, output_ids: list[int], job: Job, finish: Finish) -> dict[str, Json]:
    """The plain answer, and the last event of a stream. Latencies are in seconds. [R24]"""
    usage = finish.usage
    meta = {
        "id": job.rid,
        "finish_reason": _finish_reason(finish),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "e2e_latency": exchange.seconds_since(job.received_ns),
        "queue_time": finish.queue_time,
        "first_token_latency": finish.first_token_latency,
        "decode_throughput": finish.decode_throughput,
    }
    return {"text": text, "output_ids": output_ids, "meta_info": meta}


def _finish_reason(finish: Finish) -> dict[str, Json]:
    kind = finish.reason.name.lower()
    if kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if kind == "length":
        return {"type": "length", "length": finish.usage.completion_tokens}
    return {"type": kind, "message": "The request was aborted."}
