"""/v1/responses: OpenAI's Responses API, of which nothing is stored. Its schema is in responses_body.py.

A stream, in order: created, in_progress; of each output item (reasoning, message, function_call) output_item.added,
its parts and deltas, output_item.done; then completed, incomplete or failed, with the whole response. Every event is
numbered, so all output comes as pieces and every event is made here. A plain answer is the last event's response.

A call that was cut off has no output_item.done and is not in the response: clients execute what is done. A turn that
ends by itself and never closed its thinking was all answer: a stream has by then sent it as reasoning, and repeats it
as a message.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
from aiohttp import web

from glm53d.chat.arguments import last_of_each_key
from glm53d.chat.conversation import Conversation, Json
from glm53d.chat.events import Event, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart
from glm53d.chat.reasoning import ReasoningParser
from glm53d.errors import EngineError, RequestError
from glm53d.front.job import Finish, Job, OutSpec, Pieces, SamplingParams, Usage
from glm53d.server import body, exchange
from glm53d.server.common import Offered, cached_object, extras, forced
from glm53d.server.constrained import Form, constrain
from glm53d.server.logprobs import MessageTokens, TokenNames, Tokens, in_parts
from glm53d.server.responses_body import ResponsesBody, to_conversation, to_logprobs, to_tools
from glm53d.server.routing import routing
from glm53d.server.sampling import to_sampling

_DECODER = msgspec.json.Decoder(ResponsesBody)
NO_LOGPROBS: Mapping[str, Json] = {"content": []}


async def responses(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/responses."""
    req, received_ns = await exchange.receive(request, _DECODER)
    service = request.app[exchange.SERVICE]
    engine = service.engine
    rid = exchange.choose_rid(request, req.rid)
    model = exchange.choose_model(engine, req.model)
    sampling = to_sampling(
        req,
        max_tokens=req.max_output_tokens,
        priority=req.priority,
        defaults=engine.defaults,
        vocab_size=engine.vocab.size,
    )
    sampling = replace(sampling, top_logprobs=to_logprobs(req))
    tools, others = to_tools(req)
    conversation = to_conversation(req, tools)
    exchange.log_ignored_tools(rid, others)
    has_parsers = service.config.template.parsers != "none"
    form = Form(req, req.text.format if req.text is not None else None, "text.format")
    sampling = await constrain(sampling, form, tools, engine, in_chat=has_parsers)
    answer = tools.parser(engine.vocab.added, has_parsers=has_parsers)
    job = Job(
        rid=rid,
        received_ns=received_ns,
        first_token_timeout_s=req.first_token_timeout,
        conversation=conversation,
        sampling=sampling,
        routing=routing(request, req),
        out=OutSpec(
            all_python=bool(req.stream),
            starts_in_reasoning=has_parsers,
            skip_special_tokens=req.skip_special_tokens is not False,
            python_ids=(engine.vocab.added["<tool_call>"],) if answer.parses_calls else (),
        ),
    )
    names = TokenNames(engine, skip_special=job.out.skip_special_tokens)
    of_message = MessageTokens(engine.vocab.added, starts_in_reasoning=has_parsers)
    output = Output(_asked(req, rid, model, sampling, conversation, tools))
    if req.stream:
        turn = ReasoningParser(engine.vocab.added, answer) if has_parsers else answer

        tokens = Tokens()

        def frame(_: bytes, pieces: Pieces) -> bytes:
            if sampling.top_logprobs is None:
                return output.feed(turn.feed(pieces))
            found = tokens.feed(pieces)
            return b"".join(output.feed(turn.feed(said), names.content(of_message.take(by))) for said, by in found)

        def last_events(finish: Finish) -> bytes:
            exchange.count_dropped_calls(request, job, answer.unknown)
            again = [Text(finish.text)] if finish.text else []
            return output.feed([*turn.finish(), *again]) + output.finish(job, finish)

        return await exchange.streamed(
            request,
            job,
            first=lambda _: output.begin(),
            last=last_events,
            frame=frame,
            wire=exchange.Wire(failed=output.fail),
        )
    finish = await exchange.plain(request, job)
    thoughts: list[Event] = [Reasoning(finish.reasoning)] if finish.reasoning else []
    said = [*thoughts, *answer.feed([finish.text, *finish.pieces]), *answer.finish()]
    output.feed(said, await in_parts(names.content, of_message.take(finish.logprobs)))
    exchange.count_dropped_calls(request, job, answer.unknown)
    output.finish(job, finish)
    return body.json_response(body.encode(output.response))


async def cancel(request: web.Request) -> web.Response:
    """Handle POST /v1/responses/{id}/cancel: end one that is running, by its id or its rid. [R48]"""
    id = request.match_info["id"]
    exchange.abort_by_id(request.app[exchange.SERVICE].engine, id)
    return body.json_response(body.encode({"id": id, "object": "response", "status": "cancelled", "output": []}))


def _asked(
    req: ResponsesBody, rid: str, model: str, sampling: SamplingParams, conversation: Conversation, tools: Offered
) -> dict[str, Json]:
    """The response before anything was said: what was asked, and what is served of it."""
    return {
        "id": f"resp_{rid}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": req.instructions,
        "max_output_tokens": req.max_output_tokens,
        "metadata": req.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": req.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": req.prompt_cache_key,
        "reasoning": {"effort": conversation.reasoning_effort, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": req.text.format if req.text and req.text.format else {"type": "text"}},
        "tool_choice": req.tool_choice or "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in tools.in_prompt or ()],
        "top_logprobs": req.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


class Output:
    """The response of one request, and the events by which a stream tells of it. Owned by the handler."""

    def __init__(self, response: dict[str, Json]):
        self.response = response
        self._rid = response["id"].removeprefix("resp_")
        self._num_events = 0
        self._item: dict[str, Json] | None = None  # the one that is open
        self._texts: list[str] = []  # of its text or arguments
        self._logprobs: list[Json] = []  # of its text
        self._waiting: list[Json] = []  # logprobs whose text has not come

    def begin(self) -> bytes:
        """The events before anything was said."""
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def feed(self, events: Iterable[Event], logprobs: Mapping[str, Json] = NO_LOGPROBS) -> bytes:
        """More of what the model says; logprobs: of the message's tokens whose text is whole with it."""
        self._waiting += logprobs["content"]
        return b"".join(map(self._take, events))

    def finish(self, job: Job, finish: Finish) -> bytes:
        """The end: from here on the response is whole."""
        reason = finish.reason.name.lower()
        status, details = {
            "stop": ("completed", None),
            "length": ("incomplete", {"reason": "max_output_tokens"}),
            "abort": ("cancelled", {"reason": "cancelled"}),
        }[reason]
        events = self._close("completed" if status == "completed" else "incomplete")
        self.response |= {"status": status, "incomplete_details": details, "usage": _usage(finish.usage)}
        self.response |= extras(job, finish) | forced(finish)
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return events + self._event(kind, response=self.response)

    def fail(self, exc: RequestError | EngineError) -> bytes:
        """The end of one that we could not serve. [F-G3]"""
        events = self._close("incomplete")
        self.response |= {"status": "failed", "error": {"code": exc.code, "message": exc.message}}
        return events + self._event("response.failed", response=self.response)

    def _take(self, event: Event) -> bytes:
        match event:
            case Reasoning("") | Text(""):
                return b""
            case Reasoning(text):
                events = self._open_text("reasoning", "rs", summary=[], content=[], encrypted_content=None)
                return events + self._text_delta("response.reasoning_text.delta", text)
            case Text(text):
                events = self._open_text("message", "msg", role="assistant", content=[])
                return events + self._text_delta("response.output_text.delta", text, logprobs=self._take_logprobs())
            case ToolCallStart(_, call_id, name):
                return self._close("completed") + self._open(
                    "function_call", "fc", call_id=call_id, name=name, arguments=""
                )
            case ToolCallArguments(_, text):
                self._texts.append(text)
                return self._of_item("response.function_call_arguments.delta", delta=text)
            case ToolCallEnd(_, has_repeated_key):
                return self._end_call(has_repeated_key)

    def _open_text(self, kind: str, prefix: str, **fields: Json) -> bytes:
        """Makes sure that the open item is of this kind."""
        if self._item is not None and self._item["type"] == kind:
            return b""
        events = self._close("completed") + self._open(kind, prefix, **fields)
        return events + self._of_item("response.content_part.added", content_index=0, part=_part(kind, "", []))

    def _take_logprobs(self) -> list[Json]:
        logprobs, self._waiting = self._waiting, []
        self._logprobs += logprobs
        return logprobs

    def _text_delta(self, event: str, text: str, **fields: Json) -> bytes:
        self._texts.append(text)
        return self._of_item(event, content_index=0, delta=text, **fields)

    def _open(self, kind: str, prefix: str, **fields: Json) -> bytes:
        index = len(self.response["output"])
        self._item = {"type": kind, "id": f"{prefix}_{self._rid}_{index}", "status": "in_progress", **fields}
        self._texts.clear()
        return self._event("response.output_item.added", output_index=index, item=self._item)

    def _close(self, status: str) -> bytes:
        """The item that is open is done. One that is still a call was cut off: it goes without a word. [F-E14]"""
        item = self._item
        if item is None or item["type"] == "function_call":
            self._item = None
            return b""
        text, kind = "".join(self._texts), item["type"]
        if kind == "message":
            self._take_logprobs()  # of what ended it, and has no text
        part = _part(kind, text, self._logprobs)
        self._logprobs = []
        if kind == "reasoning":
            events = self._of_item("response.reasoning_text.done", content_index=0, text=text)
        else:
            events = self._of_item("response.output_text.done", content_index=0, text=text, logprobs=part["logprobs"])
        events += self._of_item("response.content_part.done", content_index=0, part=part)
        return events + self._done(status, content=[part])

    def _end_call(self, has_repeated_key: bool) -> bytes:
        joined = "".join(self._texts)
        arguments = last_of_each_key(joined) if has_repeated_key else joined
        return self._of_item("response.function_call_arguments.done", arguments=arguments) + self._done(
            "completed", arguments=arguments
        )

    def _done(self, status: str, **fields: Json) -> bytes:
        assert self._item is not None
        item = self._item | {"status": status, **fields}
        events = self._event("response.output_item.done", output_index=len(self.response["output"]), item=item)
        self.response["output"].append(item)
        self._item = None
        return events

    def _of_item(self, kind: str, **fields: Json) -> bytes:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self.response["output"]), **fields)

    def _event(self, kind: str, **fields: Json) -> bytes:
        data = body.encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _part(kind: str, text: str, logprobs: list[Json]) -> dict[str, Json]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, Json]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached_object(usage) | {"cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
