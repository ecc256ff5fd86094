"""The body of /v1/messages: its schema, and the way from it to a Conversation and the tools it offers."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from glm53d.chat.call_grammar import Tool
from glm53d.chat.conversation import Conversation, Json
from glm53d.errors import InvalidRequest
from glm53d.server.common import (
    DOCUMENT,
    Choice,
    Offered,
    RequestFields,
    call,
    offer,
    to_effort,
    to_tool,
    without_references,
)
from glm53d.server.constrained import Form, TextFormat
from glm53d.server.sampling import Budget, Count, not_served


class TextBlock(msgspec.Struct, tag="text"):
    """Text."""

    text: str


class ImageBlock(msgspec.Struct, tag="image"):
    """An image; the template tells the model that it cannot see it."""


class DocumentBlock(msgspec.Struct, tag="document"):
    """A document. One of plain text is its text; any other the model is told that it cannot see."""

    source: dict[str, Json] | None = None


class ToolReferenceBlock(msgspec.Struct, tag="tool_reference"):
    """A tool that a search of the client's has found: the template shows it in the result."""

    tool_name: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Thinking of an earlier turn. Whatever signature it has is good: it is text like any other here."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Thinking that another server has encrypted: nothing of it can be shown to the model."""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call in the history."""

    id: str
    name: str
    input: dict[str, Json]


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """What a call gave. The model's format has no mark for is_error: the text has to say it."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None


Shown = TextBlock | ImageBlock | DocumentBlock
Block = Shown | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(msgspec.Struct):
    """A message. A system message stays where it stands: at the head it would change what every later turn reuses."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Thinking(msgspec.Struct):
    """There is no switch: the model always thinks, at the lowest effort when it should not."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Budget | None = None


class OutputConfig(msgspec.Struct):
    """How the answer should be."""

    effort: str | None = None
    format: TextFormat | None = None


class ToolChoice(msgspec.Struct):
    """Whether tools may be called, or one of them must be."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct):
    """Of the client's own; the user_id of an agent names its session."""

    user_id: str | None = None


class MessagesBody(RequestFields, kw_only=True):
    """The request. For count_tokens only what makes the prompt counts."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    max_tokens: Count | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=16)] | None = msgspec.field(
        default=None, name="stop_sequences"
    )
    tools: list[dict[str, Json]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: TextFormat | None = None  # the older place of output_config.format
    metadata: Metadata | None = None

    mcp_servers: Annotated[Json, not_served([])] = None
    container: Annotated[Json, not_served()] = None


def to_tools(req: MessagesBody) -> tuple[Offered, list[str]]:
    """The tools that the request offers, and the kinds of those that are left out, since they are no functions."""
    shown: list[dict[str, Json]] = []
    tools: list[Tool] = []
    others: list[str] = []
    # Who searches with a tool of the vendor's, which is not here, would never find what is deferred.
    may_defer = not any(str(tool.get("type")).startswith("tool_search_tool") for tool in req.tools or ())
    for i, tool in enumerate(req.tools or ()):
        if tool.get("type", "custom") not in (None, "custom"):
            others.append(str(tool["type"]))
            continue
        tools.append(to_tool(tool, f"tools[{i}]", parameters="input_schema"))
        said = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
        if may_defer:
            said["defer_loading"] = tool.get("defer_loading")
        function = {key: value for key, value in said.items() if value is not None}
        shown.append({"type": "function", "function": function})
    asked = req.tool_choice or ToolChoice("auto")
    if asked.type == "tool" and asked.name is None:
        raise InvalidRequest("`tool_choice.name` is required.", "tool_choice.name")
    choice = Choice(
        "tool_choice",
        is_off=asked.type == "none",
        must=asked.type in ("any", "tool"),
        name=asked.name if asked.type == "tool" else None,
    )
    return offer(shown, tools, choice, max_calls=1 if asked.disable_parallel_tool_use else None), others


def to_form(req: MessagesBody) -> Form:
    """What it says of the form of the answer's text. Raises InvalidRequest."""
    config = req.output_config or OutputConfig()
    if config.format is not None and req.output_format is not None:
        raise InvalidRequest("`output_format` is `output_config.format` under an older name.", "output_format")
    if config.format is not None:
        return Form(req, config.format, "output_config.format")
    return Form(req, req.output_format, "output_format")


def to_conversation(req: MessagesBody, tools: Offered) -> Conversation:
    """The prompt in the model's own terms. Raises InvalidRequest with the path of the wrong field."""
    thinking, config = req.thinking or Thinking("adaptive"), req.output_config or OutputConfig()
    effort = "low" if thinking.type == "disabled" else "max"
    if config.effort is not None:
        effort = to_effort(config.effort, "output_config.effort")
    head = [{"role": "system", "content": _content(req.system)}] if req.system else []
    rest = [out for i, message in enumerate(req.messages) for out in _to_messages(message, f"messages[{i}]")]
    messages = head + rest if tools.in_prompt else without_references(head + rest)
    return Conversation(messages=messages, tools=tools.in_prompt, reasoning_effort=effort)


def _to_messages(message: Message, at: str) -> list[dict[str, Json]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_to_turn(message.content, f"{at}.content")]
    return _to_results_and_text(message.role, message.content, f"{at}.content")


def _to_turn(blocks: list[Block], at: str) -> dict[str, Json]:
    """A turn of the model: its thinking, its text and its calls, each kind in one."""
    turn: dict[str, Json] = {"role": "assistant", "content": []}
    thoughts: list[str] = []
    for i, block in enumerate(blocks):
        match block:
            case TextBlock() | ImageBlock() | DocumentBlock():
                turn["content"].append(_part(block))
            case ThinkingBlock(text):
                thoughts.append(text)
            case ToolUseBlock(id, name, arguments):
                turn.setdefault("tool_calls", []).append(call(id, name, arguments, f"{at}[{i}].input"))
            case ToolResultBlock():
                raise InvalidRequest(
                    f"`{at}[{i}].type` cannot be tool_result in a turn of the assistant.", f"{at}[{i}]"
                )
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    return turn


def _to_results_and_text(role: str, blocks: list[Block], at: str) -> list[dict[str, Json]]:
    """What a client says: results of calls, each a message of its own, and what stands between them."""
    messages: list[dict[str, Json]] = []
    for i, block in enumerate(blocks):
        match block:
            case TextBlock() | ImageBlock() | DocumentBlock():
                if not messages or messages[-1]["role"] == "tool":
                    messages.append({"role": role, "content": []})
                messages[-1]["content"].append(_part(block))
            case ToolResultBlock(id, content):
                messages.append({"role": "tool", "tool_call_id": id, "content": _content(content)})
            case _:
                raise InvalidRequest(f"`{at}[{i}].type` can only be in a turn of the assistant.", f"{at}[{i}].type")
    return messages or [{"role": role, "content": []}]


def _content(content: str | Sequence[Shown | ToolReferenceBlock] | None) -> Json:
    return content if content is None or isinstance(content, str) else [_part(block) for block in content]


def _part(block: Shown | ToolReferenceBlock) -> dict[str, Json]:
    match block:
        case TextBlock(text) | DocumentBlock({"type": "text", "data": str(text)}):
            return {"type": "text", "text": text}
        case DocumentBlock():
            return DOCUMENT
        case ImageBlock():
            return {"type": "image"}
        case ToolReferenceBlock(name):
            return {"type": "tool_reference", "name": name}
