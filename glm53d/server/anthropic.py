"""/v1/messages and /v1/messages/count_tokens: Anthropic's API. Its schema is in anthropic_body.py.

A stream, in order: message_start with the prompt's length, then blocks of one kind each (thinking, text, tool_use),
numbered by appearance, every one closed before the next opens; message_delta with stop_reason and usage; message_stop.
Thinking and the text behind it are framed natively, what follows them here. The cached part of the prompt is known
only at the end: until then all of it is input_tokens.

A turn that ends by itself and never closed its thinking was all answer: the plain answer has it as text; a stream has
by then sent it as thinking, and repeats it in a block of text.
"""

from collections.abc import Iterable

import msgspec
from aiohttp import web

from glm53d.chat.conversation import Json
from glm53d.chat.events import (
    Call,
    Event,
    Piece,
    Text,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    parts,
)
from glm53d.chat.tools import ToolParser
from glm53d.errors import ContextTooLong, EngineError, InvalidRequest, RequestError
from glm53d.front.job import Finish, Frame, Job, OutSpec, Usage
from glm53d.server import body, exchange
from glm53d.server.anthropic_body import MessagesBody, to_conversation, to_form, to_tools
from glm53d.server.common import extras, forced
from glm53d.server.constrained import constrain
from glm53d.server.routing import routing
from glm53d.server.sampling import to_sampling

SIGNATURE = "glm53d"
"""Of every thinking block: clients want one, and send it back. Nothing is signed, nothing checks it."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorInfo(msgspec.Struct):
    """What went wrong, in Anthropic's words; `param` and `code` are ours."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None


class MessagesError(msgspec.Struct, tag_field="type", tag="error"):
    """The body of an error, and the data of a stream's error event."""

    error: ErrorInfo

    @classmethod
    def of(cls, exc: RequestError | EngineError) -> "MessagesError":
        kind = _KINDS.get(exc.status, "invalid_request_error" if exc.status < 500 else "api_error")
        # By these words an agent knows that it has to compact.
        message = f"prompt is too long: {exc.message}" if isinstance(exc, ContextTooLong) else exc.message
        return cls(ErrorInfo(kind, message, getattr(exc, "param", None), exc.code))


def _event(kind: str, **fields: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), body.encode({"type": kind, **fields}))


def _start(index: int, block: dict[str, Json]) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _delta(index: int, kind: str, name: str, text: str) -> bytes:
    return _event("content_block_delta", index=index, delta={"type": kind, name: text})


def _stop(index: int) -> bytes:
    return _event("content_block_stop", index=index)


def text_frame(index: int) -> Frame:
    prefix, suffix = _delta(index, "text_delta", "text", "|").split(b"|")
    return Frame(prefix, suffix, enter=_start(index, {"type": "text", "text": ""}), leave=_stop(index))


def thinking_frame() -> Frame:
    prefix, suffix = _delta(0, "thinking_delta", "thinking", "|").split(b"|")
    block = {"type": "thinking", "thinking": "", "signature": ""}
    leave = _delta(0, "signature_delta", "signature", SIGNATURE) + _stop(0)
    return Frame(prefix, suffix, enter=_start(0, block), leave=leave)


_WIRE = exchange.Wire(
    failed=lambda exc: b"event: error\ndata: %b\n\n" % body.encode(MessagesError.of(exc)), keep_alive=_event("ping")
)
_THINKING, _TEXT_BEHIND_IT, _TEXT_ALONE = thinking_frame(), text_frame(1), text_frame(0)
_DECODER = msgspec.json.Decoder(MessagesBody)


async def messages(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/messages."""
    req, received_ns = await exchange.receive(request, _DECODER)
    service = request.app[exchange.SERVICE]
    engine = service.engine
    rid = exchange.choose_rid(request, req.rid)
    model = exchange.choose_model(engine, req.model)
    sampling = to_sampling(
        req,
        max_tokens=req.max_tokens,
        priority=req.priority,
        defaults=engine.defaults,
        vocab_size=engine.vocab.size,
        thinking_budget=req.thinking.budget_tokens if req.thinking and req.thinking.type == "enabled" else None,
        stop_name="stop_sequences",
    )
    tools, others = to_tools(req)
    conversation = to_conversation(req, tools)
    has_parsers = service.config.template.parsers != "none"
    sampling = await constrain(sampling, to_form(req), tools, engine, in_chat=has_parsers)
    if req.messages[-1].role == "assistant":
        path = f"messages[{len(req.messages) - 1}].role"
        raise InvalidRequest(f"`{path}`: to go on with a given beginning of an answer is not supported.", path)
    exchange.log_ignored_tools(rid, others)
    parser = tools.parser(engine.vocab.added, has_parsers=has_parsers)
    job = Job(
        rid=rid,
        received_ns=received_ns,
        first_token_timeout_s=req.first_token_timeout,
        conversation=conversation,
        sampling=sampling,
        routing=routing(request, req, session=req.metadata.user_id or "" if req.metadata else ""),
        out=OutSpec(
            content=(_TEXT_BEHIND_IT if has_parsers else _TEXT_ALONE) if req.stream else None,
            reasoning=_THINKING if req.stream and has_parsers else None,
            starts_in_reasoning=has_parsers,
            skip_special_tokens=req.skip_special_tokens is not False,
            python_ids=(engine.vocab.added["<tool_call>"],) if parser.parses_calls else (),
        ),
    )
    message = {"id": f"msg_{rid}", "type": "message", "role": "assistant", "model": model}
    if req.stream:
        blocks = Blocks(parser)

        def first_event(num_prompt_ids: int) -> bytes:
            begun: dict[str, Json] = {"content": [], "stop_reason": None, "stop_sequence": None}
            begun["usage"] = _usage(Usage(num_prompt_ids, 0, 0, 0))
            return _event("message_start", message=message | begun)

        def last_events(finish: Finish) -> bytes:
            exchange.count_dropped_calls(request, job, parser.unknown)
            end = blocks.finish(finish.text)
            more = {"usage": _usage(finish.usage)} | extras(job, finish) | forced(finish)
            return end + _event("message_delta", delta=_stopped(finish, parser), **more) + _event("message_stop")

        return await exchange.streamed(
            request, job, first=first_event, last=last_events, frame=blocks.frame, wire=_WIRE
        )
    finish = await exchange.plain(request, job)
    content = content_of(finish, parser)
    exchange.count_dropped_calls(request, job, parser.unknown)
    said = {"content": content} | _stopped(finish, parser) | {"usage": _usage(finish.usage)}
    return body.json_response(body.encode(message | said | extras(job, finish) | forced(finish)))


async def count_tokens(request: web.Request) -> web.Response:
    """Handle POST /v1/messages/count_tokens: the prompt's length, without asking the model. [F-H10]"""
    req, _ = await exchange.receive(request, _DECODER)
    engine = request.app[exchange.SERVICE].engine
    exchange.choose_model(engine, req.model)
    tools, _ = to_tools(req)
    ids = await engine.tokenize(to_conversation(req, tools))
    return body.json_response(body.encode({"input_tokens": len(ids)}))


class Blocks:
    """The blocks of a stream. Those that were framed natively are counted; from there on they are made here."""

    def __init__(self, parser: ToolParser):
        self._parser = parser
        self._num_begun = 0
        self._open: str | None = None  # the kind of the block that is, of those made here

    def frame(self, frames: bytes, pieces: list[Piece]) -> bytes:
        """The events of what a wake brought."""
        self._num_begun += frames.count(b"event: content_block_start\n")
        return frames + b"".join(self._events(self._parser.feed(pieces))) if pieces else frames

    def finish(self, text: str) -> bytes:
        """The events that end the last block; text is what is only now known to be one."""
        events = self._parser.finish()
        if text:
            events.append(Text(text))
        return b"".join(self._events(events)) + self._close()

    def _events(self, events: Iterable[Event]) -> Iterable[bytes]:
        for event in events:
            match event:
                case Text(text):
                    if self._open != "text":
                        yield self._close() + self._begin({"type": "text", "text": ""})
                    yield _delta(self._num_begun - 1, "text_delta", "text", text)
                case ToolCallStart(_, id, name):
                    yield self._close() + self._begin({"type": "tool_use", "id": id, "name": name, "input": {}})
                case ToolCallArguments(_, text):
                    yield _delta(self._num_begun - 1, "input_json_delta", "partial_json", text)
                case ToolCallEnd():
                    yield self._close()

    def _begin(self, block: dict[str, Json]) -> bytes:
        self._num_begun += 1
        self._open = block["type"]
        return _start(self._num_begun - 1, block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _stop(self._num_begun - 1)


def content_of(finish: Finish, parser: ToolParser) -> list[dict[str, Json]]:
    """The blocks of a plain answer."""
    blocks: list[dict[str, Json]] = []
    if finish.reasoning:
        blocks.append({"type": "thinking", "thinking": finish.reasoning, "signature": SIGNATURE})
    for part in parts([*parser.feed([finish.text, *finish.pieces]), *parser.finish()]):
        match part:
            case Text(text):
                blocks.append({"type": "text", "text": text})
            case Call(id, name, arguments):
                blocks.append({"type": "tool_use", "id": id, "name": name, "input": msgspec.Raw(arguments.encode())})
    return blocks


def _stopped(finish: Finish, parser: ToolParser) -> dict[str, Json]:
    """How it ended; `abort` for one that was ended through /abort_request."""
    reason = finish.reason.name.lower()
    if reason == "stop":
        ended = "end_turn" if finish.matched_stop is None else "stop_sequence"
        reason = "tool_use" if parser.num_calls else ended
    elif reason == "length":
        reason = "max_tokens"  # also inside a call [F-E14]
    return {"stop_reason": reason, "stop_sequence": finish.matched_stop}


def _usage(usage: Usage) -> dict[str, Json]:
    """Exact at the end; cached tokens are no input_tokens. [R42] [F-H8]"""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
