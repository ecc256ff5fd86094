"""/v1/chat/completions: schema, body -> Conversation, frames and events of a stream, Finish -> answer.

A stream, in order: a chunk with the role, chunks with `reasoning_content`, chunks with `content` and `tool_calls`, one
with `finish_reason`, one with `usage` if asked for, [DONE]. A turn that ends by itself and never closed its thinking
was all answer: the plain answer has it as `content`; a stream has by then sent it as `reasoning_content`, and repeats
it as `content` in the last chunk before the finish.
"""

import time
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

import msgspec
from aiohttp import web

from glm53d.chat.conversation import Conversation, Json
from glm53d.chat.events import Event, Piece, collect
from glm53d.chat.reasoning import ReasoningParser
from glm53d.errors import InvalidRequest
from glm53d.front.job import Finish, Job, OutSpec
from glm53d.server import body, exchange
from glm53d.server.common import DOCUMENT, call, to_effort, without_references
from glm53d.server.constrained import Form, ResponseFormat, constrain
from glm53d.server.logprobs import TokenDeltas, TokenNames, TopLogprobs, in_parts, needs
from glm53d.server.openai_common import (
    Chunks,
    finish_fields,
    openai_sampling,
    plain_answer,
    sampling_of,
)
from glm53d.server.openai_tools import ToolFields, Tools, to_tools
from glm53d.server.routing import routing
from glm53d.server.sampling import Budget, Count, not_served

T = TypeVar("T")

_ROLES = {"developer": "system", "function": "tool"}  # the others are the model's own
# What the template has words for: text, and media that it tells the model it cannot see.
_MEDIA = frozenset(("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio"))


class FunctionCall(msgspec.Struct):
    """A call in the history; `arguments` is JSON text, or by some clients the object itself."""

    name: str
    arguments: str | dict[str, Json] | None = None


class ToolCall(msgspec.Struct):
    """One entry of an assistant message's tool_calls."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class Message(msgspec.Struct):
    """A message as clients send it. Fields that its role does not have are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Json]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # the legacy form of one call


class Thinking(msgspec.Struct):
    """Options of thinking. There is no switch: the model always thinks, at the lowest effort when it should not."""

    type: str | None = None  # "disabled" is no; what else clients send is yes
    clear_thinking: bool | None = None
    budget_tokens: Budget | None = None


class Reasoning(msgspec.Struct):
    """The nested spelling of reasoning_effort."""

    effort: str | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None


class ChatBody(ToolFields, kw_only=True):
    """The request."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | bool | None = None
    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    thinking_budget: Budget | None = None  # these two, and those in thinking and reasoning, are names of one thing
    thinking_token_budget: Budget | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    echo: Annotated[Json, not_served(False)] = None
    input_ids: Annotated[Json, not_served()] = None
    modalities: Annotated[Json, not_served(["text"])] = None
    audio: Annotated[Json, not_served()] = None
    prediction: Annotated[Json, not_served()] = None
    web_search_options: Annotated[Json, not_served()] = None
    chat_template: Annotated[Json, not_served()] = None
    add_generation_prompt: Annotated[Json, not_served(True)] = None
    continue_final_message: Annotated[Json, not_served(False)] = None
    separate_reasoning: Annotated[Json, not_served(True)] = None
    stream_reasoning: Annotated[Json, not_served(True)] = None
    include_reasoning: Annotated[Json, not_served(True)] = None


_DECODER = msgspec.json.Decoder(ChatBody)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/chat/completions."""
    req, received_ns = await exchange.receive(request, _DECODER)
    engine = request.app[exchange.SERVICE].engine
    rid = exchange.choose_rid(request, req.rid)
    model = exchange.choose_model(engine, req.model)
    max_tokens = req.max_tokens if req.max_completion_tokens is None else req.max_completion_tokens
    sampling = openai_sampling(req, max_tokens, engine, _thinking_budget(req))
    needs("logprobs", bool(req.logprobs), "top_logprobs", bool(req.top_logprobs))
    if req.logprobs:
        sampling = replace(sampling, top_logprobs=req.top_logprobs or 0)
    tools = to_tools(req)
    exchange.log_ignored_tools(rid, tools.ignored)
    has_parsers = request.app[exchange.SERVICE].config.template.parsers != "none"
    form = Form(req, req.response_format, "response_format")
    sampling = await constrain(sampling, form, tools.offered, engine, in_chat=has_parsers)
    base = Job(
        rid=rid,
        received_ns=received_ns,
        first_token_timeout_s=req.first_token_timeout,
        conversation=to_conversation(req, tools),
        sampling=sampling,
        routing=routing(request, req),
    )
    n = req.n or 1
    exchange.check_number(engine, n, "n")
    id, created = f"chatcmpl-{rid}", int(time.time())
    choices = [
        _Choice(request, req, base, tools, Chunks(id, "chat.completion.chunk", created, model, req.with_usage, index))
        for index in range(n)
    ]
    if req.stream:
        return await exchange.streamed_all(
            request,
            [choice.streamed() for choice in choices],
            n,
            end=lambda finishes: choices[0].chunks.usage(finishes, n),
        )
    finishes = await exchange.plain_all(request, [choice.job for choice in choices], n)
    head = {"id": id, "object": "chat.completion", "created": created, "model": model}
    answers = [await choice.plain(finish) for choice, finish in zip(choices, finishes, strict=True)]
    return plain_answer(head, answers, base, finishes, n)


class _Choice:
    """One answer of a chat: what runs, its chunks in a stream, its part of a plain answer."""

    def __init__(self, request: web.Request, req: ChatBody, base: Job, tools: Tools, chunks: Chunks):
        service = request.app[exchange.SERVICE]
        added, has_parsers = service.engine.vocab.added, service.config.template.parsers != "none"
        self._request = request
        self._tools = tools
        self._parser = tools.offered.parser(added, has_parsers=has_parsers)
        self.chunks = chunks
        self._logprobs: TokenDeltas | None = None
        if base.sampling.top_logprobs is not None:
            turn = ReasoningParser(added, self._parser) if has_parsers else self._parser
            names = TokenNames(service.engine, skip_special=req.skip_special_tokens is not False)
            self._logprobs = TokenDeltas(names, turn, tools.deltas)
        is_framed = bool(req.stream) and self._logprobs is None
        behind = b'"},"finish_reason":null'
        self.job = replace(
            base,
            sampling=sampling_of(base.sampling, chunks.index),
            out=OutSpec(
                content=chunks.frame(b'"delta":{"content":"', behind) if is_framed else None,
                reasoning=chunks.frame(b'"delta":{"reasoning_content":"', behind) if is_framed else None,
                all_python=bool(req.stream) and not is_framed,
                starts_in_reasoning=has_parsers,
                skip_special_tokens=req.skip_special_tokens is not False,
                python_ids=(added["<tool_call>"],) if self._parser.parses_calls else (),
            ),
        )

    def streamed(self) -> exchange.Answer:
        """It as a part of a stream."""
        if (logprobs := self._logprobs) is not None:
            return exchange.Answer(
                self.job, self._last, lambda _, pieces: self._asked(logprobs.feed(pieces)), self._first
            )
        return exchange.Answer(self.job, self._last, self._frame if self._parser.parses_calls else None, self._first)

    def _first(self, _: int) -> bytes:
        return self.chunks.delta({"role": "assistant", "content": ""})

    def _frame(self, frames: bytes, pieces: list[Piece]) -> bytes:
        return frames + self._chunks_of(self._parser.feed(pieces)) if pieces else frames

    def _last(self, finish: Finish) -> bytes:
        end = b'"delta":{}'
        if self._logprobs is not None:
            rest = self._asked(self._logprobs.finish())
            end += b',"logprobs":' + body.encode(self._logprobs.rest())
        else:
            rest = self._chunks_of(self._parser.finish())
        exchange.count_dropped_calls(self._request, self.job, self._parser.unknown)
        if finish.text:
            rest += self.chunks.delta({"content": finish.text})
        return rest + self.chunks.finish(end, self.job, finish, self._tools.finish_reason(self._parser))

    def _chunks_of(self, events: list[Event]) -> bytes:
        return b"".join(map(self.chunks.delta, self._tools.deltas(events)))

    def _asked(self, deltas: list[tuple[dict[str, Json], dict[str, Json]]]) -> bytes:
        return b"".join(self.chunks.delta(delta, logprobs) for delta, logprobs in deltas)

    async def plain(self, finish: Finish) -> dict[str, Json]:
        """It as one of the `choices`."""
        turn = collect([*self._parser.feed([finish.text, *finish.pieces]), *self._parser.finish()])
        exchange.count_dropped_calls(self._request, self.job, self._parser.unknown)
        end = finish_fields(finish, self._tools.finish_reason(self._parser))
        # "" is an empty answer; where calls take its place, or it was cut off before it, there is none.
        content = turn.content if turn.content or end["finish_reason"] == "stop" else None
        message = {"role": "assistant", "content": content, "reasoning_content": finish.reasoning or None}
        if self._logprobs is not None:
            end["logprobs"] = await in_parts(self._logprobs.names.content, finish.logprobs)
        return {"index": self.chunks.index, "message": message | self._tools.message_fields(turn), **end}


def to_conversation(req: ChatBody, tools: Tools) -> Conversation:
    """The prompt in the model's own terms. Raises InvalidRequest with the path of the wrong field."""
    thinking = req.thinking if isinstance(req.thinking, Thinking) else Thinking()
    # The template knows clear_thinking and the effort; one of a user's own may know more.
    options = req.chat_template_kwargs or {}
    body.check_size(options, "chat_template_kwargs")
    clear = (req.clear_thinking, thinking.clear_thinking, _option(options, "clear_thinking", bool))
    messages = [_to_message(message, f"messages[{i}]") for i, message in enumerate(req.messages)]
    return Conversation(
        messages=messages if tools.offered.in_prompt else without_references(messages),
        tools=tools.offered.in_prompt,
        reasoning_effort=_effort(req, options),
        clear_thinking=next((choice for choice in clear if choice is not None), False),
        template_kwargs=options,
    )


def _option(options: dict[str, Json], name: str, kind: type[T]) -> T | None:
    value = options.get(name)
    if value is not None and not isinstance(value, kind):
        path = f"chat_template_kwargs.{name}"
        raise InvalidRequest(f"`{path}` must be of type {kind.__name__}.", path)
    return value


def _thinking_budget(req: ChatBody) -> int | None:
    """Tokens of thinking at most, by any of its names; of several the least. [R46]"""
    budgets = [req.thinking_budget, req.thinking_token_budget, req.reasoning.max_tokens if req.reasoning else None]
    if isinstance(req.thinking, Thinking) and req.thinking.type != "disabled":
        budgets.append(req.thinking.budget_tokens)
    return min((budget for budget in budgets if budget is not None), default=None)


def _effort(req: ChatBody, options: dict[str, Json]) -> str:
    """The model's level: low, high or max; low for one that should not think, and says no level. [F-F2] [F-F3]"""
    spellings = (
        ("reasoning_effort", req.reasoning_effort),
        ("reasoning.effort", req.reasoning.effort if req.reasoning else None),
        ("chat_template_kwargs.reasoning_effort", _option(options, "reasoning_effort", str)),
    )
    for param, level in spellings:
        if level is not None:
            return to_effort(level, param)
    switches = (
        req.thinking if isinstance(req.thinking, bool) else None,
        req.thinking.type != "disabled" if isinstance(req.thinking, Thinking) else None,
        req.enable_thinking,
        req.reasoning.enabled if req.reasoning else None,
        _option(options, "enable_thinking", bool),
        _option(options, "thinking", bool),
    )
    return "low" if False in switches else "max"


def _to_message(message: Message, at: str) -> dict[str, Json]:
    role = _ROLES.get(message.role, message.role)
    if message.content is None and role in ("system", "user"):
        raise InvalidRequest(f"`{at}.content` is required.", f"{at}.content")
    content: Json = message.content
    if isinstance(content, list):
        content = [_to_part(part, role, f"{at}.content[{i}]") for i, part in enumerate(content)]
    out: dict[str, Json] = {"role": role, "content": content}
    if role == "assistant":
        thoughts = (message.reasoning_content, message.thinking, message.reasoning)
        if (reasoning := next((text for text in thoughts if text is not None), None)) is not None:
            out["reasoning_content"] = reasoning
        if message.tool_calls:
            out["tool_calls"] = [
                call(said.id, said.function.name, said.function.arguments, f"{at}.tool_calls[{i}].function.arguments")
                for i, said in enumerate(message.tool_calls)
            ]
        elif message.function_call is not None:
            function = message.function_call
            out["tool_calls"] = [call(None, function.name, function.arguments, f"{at}.function_call.arguments")]
    if role == "tool" and message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    return out


def _to_part(part: dict[str, Json], role: str, at: str) -> dict[str, Json]:
    kind = part.get("type")
    if kind == "text" or (kind == "refusal" and role == "assistant"):
        return {"type": "text", "text": _string(part, kind, at)}
    if kind == "tool_reference" and role == "tool":
        return {"type": kind, "name": _string(part, "name", at)}
    if kind == "file":
        return DOCUMENT
    if isinstance(kind, str) and kind in _MEDIA:
        return {"type": kind}  # the data itself would only be carried along
    raise InvalidRequest(f"`{at}.type` must be text or a kind of media.", f"{at}.type")


def _string(part: dict[str, Json], name: str, at: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"`{at}.{name}` must be a string.", f"{at}.{name}")
    return value
