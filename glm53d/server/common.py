"""What the dialects share: fields of their bodies, levels of effort, the tools that a request offers, extra answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from glm53d.chat.conversation import Json
from glm53d.chat.tools import ToolParser, functions_of
from glm53d.errors import InvalidRequest
from glm53d.front.job import Finish, Job
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
    session_params: Annotated[Json, not_served()] = None


def to_effort(level: str, param: str) -> str:
    """The model's level: low, high or max. Raises InvalidRequest."""
    if level not in EFFORTS:
        raise InvalidRequest(f"`{param}` must be one of {', '.join(EFFORTS)}.", param)
    return EFFORTS[level]


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools that a request offers to the model."""

    in_prompt: list[dict[str, Json]] | None
    functions: Mapping[str, Json] | None
    """Parameters by name. None: there is no such thing as a call [F-E9]; empty: every call is dropped [F-E8]."""
    max_calls: int | None

    def parser(self, added: Mapping[str, int]) -> ToolParser:
        """A parser for one turn; added: the ids of the vocabulary's added tokens."""
        return ToolParser(added, self.functions, self.max_calls)


def offer(tools: list[dict[str, Json]], *, is_off: bool, max_calls: int | None) -> Offered:
    """What a request offers with these, which were checked; is_off: the model is not to call them."""
    if not tools:
        return Offered(None, None, None)
    if is_off:
        return Offered(None, {}, max_calls)
    return Offered(tools, functions_of(tools), max_calls)


def is_off(choice: str | dict[str, Json] | None, param: str) -> bool:
    """Whether a tool_choice wants no calls. Raises InvalidRequest for one that would force them."""
    if choice not in (None, "auto", "none"):
        raise InvalidRequest(f"`{param}` other than none and auto is not supported.", param)
    return choice == "none"


def check_function(function: dict[str, Json], at: str, parameters: str = "parameters") -> None:
    """Raise InvalidRequest unless it is a function that the model can call; `parameters` is the name of its schema."""
    name = function.get("name")
    # What the model writes as a name is stripped: any other name could not be called.
    if not isinstance(name, str) or not name or name != name.strip() or len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(
            f"`{at}.name` must be a string of 1 to {MAX_NAME_CHARS} characters without white space around it.",
            f"{at}.name",
        )
    if not isinstance(function.get(parameters), dict | None):
        raise InvalidRequest(f"`{at}.{parameters}` must be an object.", f"{at}.{parameters}")
    if function.get("strict") not in (None, False):
        raise InvalidRequest(f"`{at}.strict` is not supported.", f"{at}.strict")
    body.check_depth(function, at)


def call(id: str | None, name: str, arguments: str | dict[str, Json] | None, path: str) -> dict[str, Json]:
    """A call in the history, as a Conversation has it; arguments are JSON text or the object, and stand at `path`."""
    if isinstance(arguments, str):
        arguments = body.decode(_ARGUMENTS, arguments, path) if arguments.strip() else {}
    body.check_depth(arguments, path)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def extras(job: Job, finish: Finish) -> dict[str, Json]:
    """What the APIs have no place for: times in seconds [R24], and in a chat the effort that was asked of the model.

    Where the thinking budget ran out, also that. [R46]
    """
    timings = {
        "queue_time": finish.queue_time,
        "first_token_latency": finish.first_token_latency,
        "decode_throughput": finish.decode_throughput,
    }
    effort = {"reasoning_effort": job.conversation.reasoning_effort} if job.conversation is not None else {}
    forced = {"thinking_forced": True} if finish.thinking_forced else {}
    return effort | forced | {"timings": timings}
