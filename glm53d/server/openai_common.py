"""What OpenAI's chat and text completions share: the fields of their bodies, and the bytes of their answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from glm53d.chat.conversation import Json
from glm53d.front.engine import Engine
from glm53d.front.job import Finish, Frame, Job, SamplingParams, Usage
from glm53d.server.body import encode, json_response
from glm53d.server.common import RequestFields, cached_object, extras, forced
from glm53d.server.sampling import Count, not_served, refuse_not_served, to_sampling


class StreamOptions(msgspec.Struct):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[Json, not_served(False)] = None


class OpenAiFields(RequestFields, kw_only=True):
    """The fields that chat and text completions have in common."""

    n: Annotated[int, Meta(ge=1, le=16)] | None = None  # [R20]
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None

    prompt_logprobs: Annotated[Json, not_served(0)] = None
    return_hidden_states: Annotated[Json, not_served(False)] = None
    return_token_ids: Annotated[Json, not_served(False)] = None
    return_cached_tokens_details: Annotated[Json, not_served(False)] = None
    truncate_prompt_tokens: Annotated[Json, not_served()] = None
    prompt_embeds: Annotated[Json, not_served()] = None

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def openai_sampling(
    fields: OpenAiFields, max_tokens: int | None, engine: Engine, thinking_budget: int | None = None
) -> SamplingParams:
    """The request's SamplingParams. Raises InvalidRequest, also for all that is not served."""
    if fields.stream_options is not None:
        refuse_not_served(fields.stream_options, "stream_options")
    return to_sampling(
        fields,
        max_tokens=max_tokens,
        min_tokens=("min_tokens", fields.min_tokens),
        priority=fields.priority,
        thinking_budget=thinking_budget,
        defaults=engine.defaults,
        vocab_size=engine.vocab.size,
    )


def usage_object(usage: Usage) -> dict[str, Json]:
    """The `usage` of an answer. [R42]"""
    completion: dict[str, Json] = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.accepted_tokens:
        completion["accepted_prediction_tokens"] = usage.accepted_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens_details": completion,
        "prompt_tokens_details": cached_object(usage),
    }


def finish_fields(finish: Finish, stopped: str = "stop") -> dict[str, Json]:
    """What a choice says of its end: `length`, `abort` for one that was ended through /abort_request, else `stopped`.

    OpenAI has no `matched_stop`: the stop string or the id that did it, else null; nor has it what forced() tells.
    """
    reason = finish.reason.name.lower()
    return {"finish_reason": stopped if reason == "stop" else reason, "matched_stop": finish.matched} | forced(finish)


def sampling_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """That of one of several answers to a request: no two draw the same random numbers. [R51]"""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) % 2**64)


def total_usage(finishes: Sequence[Finish], n: int) -> Usage:
    """Of all answers to a request, n to each prompt: a prompt counts once, as the first one found it. [R20]"""
    usages = [finish.usage for finish in finishes]
    if len(usages) == 1:
        return usages[0]

    def total(name: str, of: Sequence[Usage]) -> int:
        return sum(getattr(usage, name) for usage in of)

    of_prompts = ("prompt_tokens", "cached_tokens", "cached_device", "cached_host", "cached_storage")
    of_answers = ("completion_tokens", "reasoning_tokens", "accepted_tokens")
    return Usage(
        **{name: total(name, usages[::n]) for name in of_prompts}, **{name: total(name, usages) for name in of_answers}
    )


def plain_answer(
    head: dict[str, Json], choices: list[dict[str, Json]], job: Job, finishes: Sequence[Finish], n: int
) -> web.Response:
    """The response with all answers to a request: head, choices, usage, and what OpenAI has no place for."""
    answer = head | {"choices": choices, "usage": usage_object(total_usage(finishes, n))}
    return json_response(encode(answer | extras(job, finishes[0])))


class Chunks:
    """The events of one answer's stream: the same bytes around ever new pieces. Made once per answer."""

    def __init__(self, id: str, kind: str, created: int, model: str, with_usage: bool, index: int):
        common = {"id": id, "object": kind, "created": created, "model": model}
        self._start = b"data: " + encode(common)[:-1]
        self._head = self._start + b',"choices":[{"index":%d,' % index
        self._end = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._tail = b"}]" + self._end
        self._with_usage = with_usage
        self.index = index

    def choice(self, fields: bytes) -> bytes:
        """A whole chunk, given the JSON of its choice's fields without braces."""
        return self._head + fields + self._tail

    def frame(self, before: bytes, after: bytes) -> Frame:
        """Chunks that differ in one string: the choice's JSON before and after its escaped text."""
        return Frame(self._head + before, after + self._tail)

    def delta(self, delta: Json, logprobs: Json = None) -> bytes:
        """A chunk of a chat that is going on; logprobs: if it was asked for them."""
        asked = b',"logprobs":' + encode(logprobs) if logprobs is not None else b""
        return self.choice(b'"delta":' + encode(delta) + asked + b',"finish_reason":null')

    def finish(self, fields: bytes, job: Job, finish: Finish, stopped: str = "stop") -> bytes:
        """The chunk that says how it ended: fields as in choice(), the others as in finish_fields() and extras()."""
        end, more = encode(finish_fields(finish, stopped)), encode(extras(job, finish))
        return self._head + fields + b"," + end[1:-1] + b"}]," + more[1:-1] + self._end

    def usage(self, finishes: Sequence[Finish], n: int) -> bytes:
        """The last chunk, of all answers together, n to each prompt, if the client asked for it."""
        if not self._with_usage:
            return b""
        return self._start + b',"choices":[],"usage":' + encode(usage_object(total_usage(finishes, n))) + b"}\n\n"
