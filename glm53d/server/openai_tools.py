"""Tools in a chat: what the request says of them, and the model's calls as deltas of a stream or parts of a message.

The legacy `functions` and `function_call` are tools under older names: one call at most, answered as `function_call`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from glm53d.chat.call_grammar import Tool
from glm53d.chat.conversation import Json
from glm53d.chat.events import Answer, Event, Reasoning, Text, ToolCallArguments, ToolCallStart
from glm53d.chat.tools import ToolParser
from glm53d.errors import InvalidRequest
from glm53d.server import body
from glm53d.server.common import Choice, Offered, offer, to_choice, to_tool
from glm53d.server.openai_common import OpenAiFields


class ToolFields(OpenAiFields, kw_only=True):
    """The fields of a chat that are about tools. A tool stays as it came: the prompt shows its fields."""

    tools: list[dict[str, Json]] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Json]] | None = None
    function_call: str | dict[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat says of tools."""

    offered: Offered
    is_legacy: bool  # under their older names
    ignored: list[str] = field(default_factory=list)  # kinds of those that are no functions

    def finish_reason(self, parser: ToolParser) -> str:
        """The reason of a turn that the model itself has ended."""
        if parser.num_calls == 0:
            return "stop"
        return "function_call" if self.is_legacy else "tool_calls"

    def deltas(self, events: Iterable[Event]) -> Iterable[dict[str, Json]]:
        """The deltas of a stream, one for each event that shows."""
        for event in events:
            match event:
                case Reasoning(text):
                    yield {"reasoning_content": text}
                case Text(text):
                    yield {"content": text}
                case ToolCallStart(index, id, name):
                    function = {"name": name, "arguments": ""}
                    yield self._call_delta({"index": index, "id": id, "type": "function", "function": function})
                case ToolCallArguments(index, text):
                    yield self._call_delta({"index": index, "function": {"arguments": text}})

    def message_fields(self, answer: Answer) -> dict[str, Json]:
        """What a plain answer's message says of calls; nothing when there is none."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
        if not calls:
            return {}
        return {"function_call": calls[0]["function"]} if self.is_legacy else {"tool_calls": calls}

    def _call_delta(self, call: dict[str, Json]) -> dict[str, Json]:
        return {"function_call": call["function"]} if self.is_legacy else {"tool_calls": [call]}


def to_tools(fields: ToolFields) -> Tools:
    """What a request says of tools, checked. Raises InvalidRequest with the path of the wrong field."""
    is_legacy = bool(fields.functions)
    if is_legacy and fields.tools:
        raise InvalidRequest("`functions` are `tools` under an older name; only one of them may be given.", "functions")
    given = fields.tools or [{"type": "function", "function": function} for function in fields.functions or ()]
    shown: list[dict[str, Json]] = []
    tools: list[Tool] = []
    ignored: list[str] = []
    for i, tool in enumerate(given):
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise InvalidRequest(f"`tools[{i}].type` must be a string.", f"tools[{i}].type")
        if kind != "function":
            ignored.append(kind)
            continue
        shown.append(tool)
        at = f"functions[{i}]" if is_legacy else f"tools[{i}].function"
        if not isinstance(function := tool.get("function"), dict):
            raise InvalidRequest(f"`{at}` must be an object.", at)
        tools.append(to_tool(function, at))
        others = {name: value for name, value in tool.items() if name != "function"}
        body.check_size(others, f"tools[{i}]")  # a template of one's own is shown these, too
    max_calls = 1 if is_legacy or fields.parallel_tool_calls is False else None
    return Tools(offer(shown, tools, _to_choice(fields), max_calls), is_legacy, ignored)


def _to_choice(fields: ToolFields) -> Choice:
    """Of the two names the one that says more counts."""
    called = fields.function_call
    if isinstance(called, dict):
        called = {"type": "function", **called}
    choices = [to_choice(fields.tool_choice, "tool_choice"), to_choice(called, "function_call")]
    return next((choice for choice in choices if choice.is_off or choice.must), choices[0])
