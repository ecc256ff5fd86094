"""The body of /v1/responses: its schema, and the way from it to a Conversation and the tools it offers.

The history is a list of items. What the model has said in one turn (reasoning, a message, calls) are several of them,
and one message of a Conversation.
"""

from typing import Annotated, Any, Literal

import msgspec

from glm53d.chat.call_grammar import Tool
from glm53d.chat.conversation import Conversation, Json
from glm53d.errors import InvalidRequest
from glm53d.server import body
from glm53d.server.common import DOCUMENT, Offered, RequestFields, call, offer, to_choice, to_effort, to_tool
from glm53d.server.constrained import TextFormat
from glm53d.server.logprobs import TopLogprobs, needs
from glm53d.server.sampling import Count, not_served


class InputText(msgspec.Struct, tag="input_text"):
    """Text of a client."""

    text: str


class OutputText(msgspec.Struct, tag="output_text"):
    """Text of the model."""

    text: str


class Refusal(msgspec.Struct, tag="refusal"):
    """Text of a model that would not."""

    refusal: str


class InputImage(msgspec.Struct, tag="input_image"):
    """An image; the template tells the model that it cannot see it."""


class InputFile(msgspec.Struct, tag="input_file"):
    """A document; the model is told that it cannot see it."""


Part = InputText | OutputText | Refusal | InputImage | InputFile


class MessageItem(msgspec.Struct):
    """A message; the only item that may leave its type out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class ReasoningText(msgspec.Struct):
    """A part of a reasoning item."""

    text: str


class ReasoningItem(msgspec.Struct):
    """Thinking of an earlier turn. A summary, or what another server has encrypted, is not what the model thought."""

    content: list[ReasoningText] | None = None


class FunctionCallItem(msgspec.Struct):
    """A call in the history."""

    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(msgspec.Struct):
    """What a call gave."""

    call_id: str
    output: str | list[Part]


_ITEMS: dict[str, type[MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
}


class ReasoningOptions(msgspec.Struct):
    """How hard to think. The model's thinking is given as it is, so a summary that is asked for adds nothing."""

    effort: str | None = None


class TextOptions(msgspec.Struct):
    """How the answer should be."""

    format: TextFormat | None = None


INCLUDE_LOGPROBS = "message.output_text.logprobs"
"""The one thing to include that we have."""


class ResponsesBody(RequestFields, kw_only=True):
    """The request."""

    input: str | list[dict[str, Json]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Json]] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: dict[str, Any] | None = None

    previous_response_id: Annotated[Json, not_served()] = None
    conversation: Annotated[Json, not_served()] = None
    background: Annotated[Json, not_served(False)] = None
    prompt: Annotated[Json, not_served()] = None
    truncation: Annotated[Json, not_served("disabled")] = None
    max_tool_calls: Annotated[Json, not_served()] = None


def to_logprobs(req: ResponsesBody) -> int | None:
    """How many of the likeliest ids go beside each token of a message; None: it has no logprobs."""
    is_asked = INCLUDE_LOGPROBS in (req.include or ())
    needs(f'"include": ["{INCLUDE_LOGPROBS}"]', is_asked, "top_logprobs", bool(req.top_logprobs))
    return (req.top_logprobs or 0) if is_asked else None


def to_tools(req: ResponsesBody) -> tuple[Offered, list[str]]:
    """The tools that the request offers, and the kinds of those that are left out, since they are no functions."""
    shown: list[dict[str, Json]] = []
    tools: list[Tool] = []
    others: list[str] = []
    for i, tool in enumerate(req.tools or ()):
        if tool.get("type") != "function":
            others.append(str(tool.get("type")))
            continue
        tools.append(to_tool(tool, f"tools[{i}]"))
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        shown.append({"type": "function", "function": function})
    max_calls = 1 if req.parallel_tool_calls is False else None
    return offer(shown, tools, to_choice(req.tool_choice, "tool_choice"), max_calls), others


def to_conversation(req: ResponsesBody, tools: Offered) -> Conversation:
    """The prompt in the model's own terms. Raises InvalidRequest with the path of the wrong field."""
    messages: list[dict[str, Json]] = []
    if req.instructions is not None:
        messages.append({"role": "system", "content": req.instructions})
    if isinstance(req.input, str):
        messages.append({"role": "user", "content": req.input})
    else:
        for i, item in enumerate(req.input):
            _add(messages, item, f"input[{i}]")
    if not messages:
        raise InvalidRequest("`input` is empty.", "input")
    level = req.reasoning.effort if req.reasoning is not None else None
    effort = "max" if level is None else to_effort(level, "reasoning.effort")
    return Conversation(messages=messages, tools=tools.in_prompt, reasoning_effort=effort)


def _add(messages: list[dict[str, Json]], item: dict[str, Json], at: str) -> None:
    """Add an item to the history: as a message, or to the turn of the model that it is part of."""
    kind = item.get("type") or "message"
    if kind == "item_reference":
        raise InvalidRequest("Nothing is stored to refer to: send items as they are (`store: false`).", f"{at}.type")
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise InvalidRequest(f"`{at}.type` must be one of {', '.join(_ITEMS)}.", f"{at}.type")
    match body.convert(_ITEMS[kind], item, at):
        case MessageItem("assistant", content):
            turn = _turn(messages)
            if "content" in turn and "tool_calls" not in turn:  # a turn says one thing, but for what follows its calls
                turn = _begin_turn(messages)
            parts = content if isinstance(content, list) else [OutputText(content)]
            turn.setdefault("content", []).extend(map(_part, parts))
        case MessageItem(role, content):
            messages.append({"role": "system" if role == "developer" else role, "content": _content(content)})
        case ReasoningItem(thoughts):
            _begin_turn(messages)["reasoning_content"] = "".join(part.text for part in thoughts or ())
        case FunctionCallItem(id, name, arguments):
            _turn(messages).setdefault("tool_calls", []).append(call(id, name, arguments, f"{at}.arguments"))
        case FunctionCallOutputItem(id, output):
            messages.append({"role": "tool", "tool_call_id": id, "content": _content(output)})


def _turn(messages: list[dict[str, Json]]) -> dict[str, Json]:
    """The turn of the model that the history ends in, or a new one."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else _begin_turn(messages)


def _begin_turn(messages: list[dict[str, Json]]) -> dict[str, Json]:
    messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: str | list[Part]) -> Json:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Part) -> dict[str, Json]:
    match part:
        case InputText(text) | OutputText(text) | Refusal(text):
            return {"type": "text", "text": text}
        case InputImage():
            return {"type": "image"}
        case InputFile():
            return DOCUMENT
