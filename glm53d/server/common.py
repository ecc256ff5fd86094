"""What the dialects share: fields of their bodies, levels of effort, the tools that a request offers, extra answers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from glm53d.chat.call_grammar import Tool
from glm53d.chat.conversation import Json
from glm53d.chat.template import REMINDER
from glm53d.chat.tools import ToolParser, functions_of
from glm53d.errors import InvalidRequest
from glm53d.front.job import Finish, Job, Usage
from glm53d.server import body
from glm53d.server.routing import DpRank, Room
from glm53d.server.sampling import Int32, SamplingFields, Timeout, not_served

MAX_NAME_CHARS = 128

EFFORTS = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""What clients ask for -> the levels that the model has. [F-F3]"""

DOCUMENT: dict[str, Json] = {"type": "text", "text": REMINDER.format(media="document")}
"""What the prompt has in place of a document: the template has no part of that kind, so it is told in a text."""

_ARGUMENTS = msgspec.json.Decoder(dict[str, Any])


class RequestFields(SamplingFields, kw_only=True):
    """The fields of every dialect but /generate. Unknown fields are ignored, null is absent."""

    model: str | None = None
    rid: str | None = None
    stream: bool | None = None
    priority: Int32 | None = None
    data_parallel_rank: DpRank | None = None  # two names of one choice
    routed_dp_rank: DpRank | None = None
    bootstrap_room: Room | None = None
    first_token_timeout: Timeout | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    prompt_cache_key: str | None = None

    bootstrap_host: Annotated[Json, not_served()] = None
    bootstrap_port: Annotated[Json, not_served()] = None
    lora_path: Annotated[Json, not_served()] = None
    custom_logit_processor: Annotated[Json, not_served()] = None
    return_routed_experts: Annotated[Json, not_served(False)] = None
    session_params: Annotated[Json, not_served()] = None


def to_effort(level: str, param: str) -> str:
    """The model's level: low, high or max. Raises InvalidRequest."""
    if level not in EFFORTS:
        raise InvalidRequest(f"`{param}` must be one of {', '.join(EFFORTS)}.", param)
    return EFFORTS[level]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request says of whether the model calls its tools, under the name `param`."""

    param: str
    is_off: bool = False
    must: bool = False
    name: str | None = None  # of the one tool that must be called


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools that a request offers to the model."""

    in_prompt: list[dict[str, Json]] | None
    functions: Mapping[str, Json] | None
    """Parameters by name. None: there is no such thing as a call [F-E9]; empty: every call is dropped [F-E8]."""
    max_calls: int | None
    tools: tuple[Tool, ...] = ()
    """As a grammar of their calls would have them; those that may be called, when one must be."""
    choice: Choice = Choice("tool_choice")

    @property
    def has_form(self) -> bool:
        """Whether its calls are held to a grammar: one must be made, or a tool is strict."""
        return self.choice.must or not all(tool.is_free for tool in self.tools)

    def parser(self, added: Mapping[str, int], *, has_parsers: bool) -> ToolParser:
        """A parser for one turn; added: the ids of the vocabulary's added tokens. Without parsers all is text."""
        if not has_parsers:
            return ToolParser(added, None, spells_all=True)
        return ToolParser(added, self.functions, self.max_calls)


def offer(shown: list[dict[str, Json]], tools: list[Tool], choice: Choice, max_calls: int | None) -> Offered:
    """What a request offers with these tools, which were checked; `shown` is how the prompt has them.

    Raises InvalidRequest for a choice that they cannot satisfy.
    """
    if choice.must and not any(choice.name in (None, tool.name) for tool in tools):
        named = "" if choice.name is None else f" of the name {choice.name!r}"
        raise InvalidRequest(f"`{choice.param}`: the request has no tool{named}.", choice.param)
    if not tools:
        return Offered(None, None, None)
    if choice.is_off:
        return Offered(None, {}, max_calls, tuple(tools), choice)
    if choice.must:
        tools = [replace(tool, is_free=False) for tool in tools if choice.name in (None, tool.name)]
    # All are shown, whichever may be called: the prompt, and so its cached pages, are those of the other turns.
    return Offered(shown, functions_of(shown), 1 if choice.name is not None else max_calls, tuple(tools), choice)


def cached_object(usage: Usage) -> dict[str, Json]:
    """How much of a prompt was cached; by tier only where a slower one gave some of it. [R27]"""
    cached: dict[str, Json] = {"cached_tokens": usage.cached_tokens}
    if usage.cached_host or usage.cached_storage:
        cached["cached_tokens_details"] = cached_by_tier(usage)
    return cached


def cached_by_tier(usage: Usage) -> dict[str, Json]:
    """SGLang's `cached_tokens_details`."""
    tiers: dict[str, Json] = {"device": usage.cached_device, "host": usage.cached_host, "storage": usage.cached_storage}
    return tiers | ({"storage_backend": "file"} if usage.cached_storage else {})


def to_choice(choice: str | dict[str, Json] | None, param: str) -> Choice:
    """OpenAI's tool_choice, in its dialects' forms. Raises InvalidRequest."""
    match choice:
        case None | "auto":
            return Choice(param)
        case "none":
            return Choice(param, is_off=True)
        case "required":
            return Choice(param, must=True)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return Choice(param, must=True, name=name)
    raise InvalidRequest(f"`{param}` must be auto, none, required, or name a function.", param)


def to_tool(function: dict[str, Json], at: str, parameters: str = "parameters") -> Tool:
    """A function of a request as a tool; `parameters` is the name of its schema. Raises InvalidRequest."""
    name = function.get("name")
    # What the model writes as a name is stripped: any other name could not be called.
    if not isinstance(name, str) or not name or name != name.strip() or len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(
            f"`{at}.name` must be a string of 1 to {MAX_NAME_CHARS} characters without white space around it.",
            f"{at}.name",
        )
    if not isinstance(function.get(parameters), dict | None):
        raise InvalidRequest(f"`{at}.{parameters}` must be an object.", f"{at}.{parameters}")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"`{at}.strict` must be a boolean.", f"{at}.strict")
    body.check_size(function, at)
    return Tool(name, function.get(parameters), f"{at}.{parameters}", is_free=not strict)


def call(id: str | None, name: str, arguments: str | dict[str, Json] | None, path: str) -> dict[str, Json]:
    """A call in the history, as a Conversation has it; arguments are JSON text or the object, and stand at `path`."""
    if isinstance(arguments, str):
        arguments = body.decode(_ARGUMENTS, arguments, path) if arguments.strip() else {}
    body.check_size(arguments, path)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def without_references(messages: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """The history as a request without tools can have it: what a tool search once found is not there to be shown."""
    for message in messages:
        if message["role"] == "tool" and isinstance(message["content"], list):
            message["content"] = [part for part in message["content"] if part["type"] != "tool_reference"]
    return messages


def extras(job: Job, finish: Finish) -> dict[str, Json]:
    """What the APIs have no place for: times in seconds [R24], and in a chat the effort that was asked of the model."""
    timings = {
        "queue_time": finish.queue_time,
        "first_token_latency": finish.first_token_latency,
        "decode_throughput": finish.decode_throughput,
    }
    effort = {"reasoning_effort": job.conversation.reasoning_effort} if job.conversation is not None else {}
    return effort | {"timings": timings}


def forced(finish: Finish) -> dict[str, Json]:
    """Whether the thinking budget of this answer ran out; nothing when it did not. [R46]"""
    return {"thinking_forced": True} if finish.thinking_forced else {}
