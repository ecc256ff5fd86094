"""The model's prompt format: a Conversation becomes segments, text and control ids apart. [R16] [R17]

    [gMASK]<sop><|system|>Reasoning Effort: Max           low, high, else max
    <|system|># Tools ... <tools> ... </tools> ...        only with tools; its example call has control tokens too
    <|system|>text    <|user|>text
    <|assistant|><think>reasoning</think>text             then <tool_call>name ... </tool_call> for each call
    <|observation|><tool_response>text</tool_response>    one <|observation|> per run of tool messages
    <|assistant|><think>                                  the generation prompt

The rendered text equals what the official Jinja templates give, byte for byte, for odd input too; what makes those fail
is an InvalidRequest here. A control token is an id only where the template itself writes one: spelled by a client it
stays text. "Official" marks what looks strange here and is so there.
"""

import json
import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Literal, TypeGuard

from glm53d.chat.conversation import Conversation, Json
from glm53d.errors import CheckpointError, InvalidRequest

Segment = str | int
"""Text, or the id of a control token."""

Variant = Literal["glm-5.3", "glm-5.3-flash"]

CONTROL = (
    "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> </tool_call> "
    "<tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>"
)
MEDIA_CONTROL = (
    "<|begin_of_image|> <|image|> <|end_of_image|> <|begin_of_video|> <|video|> <|end_of_video|> <|begin_of_audio|> "
    "<|end_of_audio|>"
)

MEDIA_PARTS = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
REMINDER = (
    "<reminder>You are unable to process this {media} because you don't have multi-modal input ability. "
    "Try different methods.</reminder>"
)
FLASH_MEDIA = {
    "image": "<|begin_of_image|><|image|><|end_of_image|>",
    "video": "<|begin_of_video|><|video|><|end_of_video|>",
    "audio": "<|begin_of_audio|><|end_of_audio|>",
}

TOOLS_HEAD = """<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
TOOLS_TAIL = """</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>\
<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"""

MAX_DESCRIBED_CHARS = 1 << 25
"""All tool references of a conversation spelled out: a few bytes can name megabytes, again and again."""

_NO_NAME = object()
_encode_json = json.JSONEncoder(ensure_ascii=False).encode  # ", " and ": ", key order kept, nothing escaped for HTML


class Template:
    """Renders conversations. Keeps no state between calls: any number of threads may use one."""

    def __init__(self, control_ids: Mapping[str, int], variant: Variant = "glm-5.3"):
        """`control_ids`: id of each control token by its spelling; others in it are ignored.

        Raises CheckpointError when one that the variant writes is missing.
        """
        self._flash = variant == "glm-5.3-flash"
        spellings = CONTROL.split() + (MEDIA_CONTROL.split() if self._flash else [])
        if missing := [spelling for spelling in spellings if spelling not in control_ids]:
            raise CheckpointError(f"the tokenizer lacks control tokens that the {variant} template writes: {missing}")
        self._id = {spelling: control_ids[spelling] for spelling in spellings}
        self._spelling = {id_: spelling for spelling, id_ in self._id.items()}
        self._border = re.compile("(" + "|".join(map(re.escape, spellings)) + ")")
        self._tools_head, self._tools_tail = self._own_text(TOOLS_HEAD), self._own_text(TOOLS_TAIL)
        self._media = {
            part: self._own_text(FLASH_MEDIA[media] if self._flash else REMINDER.format(media=media))
            for part, media in MEDIA_PARTS.items()
        }

    def render(self, conv: Conversation) -> list[Segment]:
        """The prompt as segments: never two texts in a row, never an empty one.

        So encoding text by text and putting the ids between gives the ids of encoding the whole. Raises InvalidRequest
        with the path of the field that cannot be rendered. Time is linear in the conversation.
        """
        return _join_texts(self._pieces(conv))

    def render_text(self, conv: Conversation) -> str:
        """The same prompt with its control tokens spelled out, as the official template gives it."""
        return "".join(piece if isinstance(piece, str) else self._spelling[piece] for piece in self._pieces(conv))

    def _own_text(self, text: str) -> list[Segment]:
        """Text of the template itself, in which a spelled control token is meant."""
        return [self._id.get(part, part) for part in self._border.split(text) if part]

    def _pieces(self, conv: Conversation) -> list[Segment]:
        ids, messages = self._id, conv.messages
        for i, message in enumerate(messages):
            if not isinstance(message, dict):
                raise InvalidRequest("A message must be an object.", f"messages[{i}]")
        effort = conv.reasoning_effort if conv.reasoning_effort in ("low", "high") else "max"
        pieces: list[Segment] = [ids["[gMASK]"], ids["<sop>"], ids["<|system|>"]]
        pieces.append(f"Reasoning Effort: {effort.capitalize()}")
        tools = _Tools(conv.tools)
        if tools:
            pieces += self._tools_head
            pieces.append(tools.listing)
            pieces += self._tools_tail

        last_user = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        run_end = 0  # of the last run of tool messages
        for i, message in enumerate(messages):
            role = message.get("role")
            if role == "user" or role == "system":
                pieces.append(ids[f"<|{role}|>"])
                pieces += self._visible(message.get("content"), f"messages[{i}].content")
            elif role == "assistant":
                pieces.append(ids["<|assistant|>"])
                keep_thinking = not conv.clear_thinking or i > last_user
                pieces += self._assistant_turn(message, conv, keep_thinking, f"messages[{i}]")
                pieces += self._tool_calls(message.get("tool_calls"), f"messages[{i}].tool_calls")
            elif role == "tool" and i >= run_end:
                rest = range(i, len(messages))
                run_end = next((k for k in rest if messages[k].get("role") != "tool"), len(messages))
                pieces.append(ids["<|observation|>"])
                pieces += self._tool_results(messages, i, run_end, tools)
        if conv.add_generation_prompt:
            pieces += (ids["<|assistant|>"], ids["<think>"])
        return pieces

    def _visible(self, content: Json, param: str) -> list[Segment]:
        """What a content shows: its text, a stand-in per media part, nothing for parts of other types."""
        if isinstance(content, str):
            return [content]
        if content is None:
            return []
        if not isinstance(content, list):
            return [_spelled(content, param)]
        pieces: list[Segment] = []
        for part in content:
            if isinstance(part, str):
                pieces.append(part)
            elif isinstance(part, dict):
                kind = part.get("type")
                if kind == "text":
                    pieces.append(_spelled(part.get("text", ""), param))
                elif isinstance(kind, str):
                    pieces += self._media.get(kind, ())
        return pieces

    def _assistant_turn(
        self, message: dict[str, Json], conv: Conversation, keep_thinking: bool, param: str
    ) -> list[Segment]:
        """<think>reasoning</think>text of an earlier turn. Reasoning has its own field or stands inside the content."""
        content = _join_texts(self._visible(message.get("content"), f"{param}.content"))
        reasoning: list[Segment] | None
        if isinstance(message.get("reasoning_content"), str):
            reasoning = [message["reasoning_content"]]
        else:
            reasoning, content = _split_thinking(content)
            if reasoning is None and keep_thinking and "reasoning_content" in conv.template_kwargs:
                # A variable of this name, given to the whole template, stands in for turns without one: official.
                given = conv.template_kwargs["reasoning_content"]
                reasoning = [_string(given, "chat_template_kwargs.reasoning_content")]
        shown = reasoning if keep_thinking and reasoning is not None else []
        return [self._id["<think>"], *shown, self._id["</think>"], *_strip(content)]

    def _tool_calls(self, calls: Json, param: str) -> list[Segment]:
        if not calls:
            return []
        if not isinstance(calls, list):
            raise InvalidRequest("Tool calls must be an array.", param)
        ids = self._id
        pieces: list[Segment] = []
        for i, call in enumerate(calls):
            path = f"{param}[{i}]"
            if isinstance(call, dict) and call.get("function"):
                call, path = call["function"], f"{path}.function"
            if not isinstance(call, dict):
                raise InvalidRequest("A tool call must be an object.", path)
            # The flash template alone takes any name, or none.
            name = _spelled(call.get("name", ""), path) if self._flash else _string(call.get("name"), f"{path}.name")
            arguments = call.get("arguments")
            if not isinstance(arguments, dict):
                raise InvalidRequest("The arguments of a tool call must be an object.", f"{path}.arguments")
            pieces += (ids["<tool_call>"], name)
            for key, value in arguments.items():
                text = value if isinstance(value, str) else _json(value, f"{path}.arguments")
                pieces += (ids["<arg_key>"], key, ids["</arg_key>"], ids["<arg_value>"], text, ids["</arg_value>"])
            pieces.append(ids["</tool_call>"])
        return pieces

    def _tool_results(self, messages: list[dict[str, Json]], start: int, end: int, tools: "_Tools") -> list[Segment]:
        """The run of tool messages [start, end), in the order of the calls they answer if that is beyond doubt.

        It is when every call and every result has an id, no id is used twice, and every result's names a call of the
        assistant turn right before.
        """
        run = [(messages[k], f"messages[{k}].content") for k in range(start, end)]
        results = [self._results_of(message, tools, param) for message, param in run]
        previous = messages[start - 1] if start else {}
        calls = previous.get("tool_calls") if previous.get("role") == "assistant" else None
        if calls:
            shown_of = {id_: shown for own in results for id_, shown in own}
            order = [_id_of(call, f"messages[{start - 1}].tool_calls") for call in calls]
            called = set(order)
            unique = len(shown_of) == sum(map(len, results)) and len(called) == len(order)
            if unique and "" not in called and shown_of.keys() <= called:
                return [piece for id_ in order for piece in shown_of.get(id_, ())]
        pieces: list[Segment] = []
        for (message, param), own in zip(run, results, strict=True):
            content = message.get("content")
            # What is both counts as references here, but as outputs when results are reordered: official.
            if _is_references(content) and _is_outputs(content):
                pieces += self._tool_result(content, tools, param)
            else:
                pieces += (piece for _, shown in own for piece in shown)
        return pieces

    def _results_of(self, message: dict[str, Json], tools: "_Tools", param: str) -> list[tuple[str, list[Segment]]]:
        """The results in one tool message, with their ids: one, or as many as its content has {"id", "output"}."""
        content = message.get("content")
        if content and not isinstance(content, (str, list)):
            raise InvalidRequest("The content of a tool message must be text or an array of parts.", param)
        if _is_outputs(content):
            entries = [entry if isinstance(entry, dict) else {} for entry in content]
            return [(_id_of(entry, param), self._tool_result(entry.get("output"), tools, param)) for entry in entries]
        return [(_id_of(message, param), self._tool_result(content, tools, param))]

    def _tool_result(self, content: Json, tools: "_Tools", param: str) -> list[Segment]:
        shown = [tools.described(content, param)] if _is_references(content) else self._visible(content, param)
        return [self._id["<tool_response>"], *shown, self._id["</tool_response>"]]


class _Tools:
    """The tools of one conversation, as the prompt lists them. False when there is none."""

    def __init__(self, tools: Json):
        if tools and not isinstance(tools, list):
            raise InvalidRequest("Tools must be an array.", "tools")
        self._lines: dict[Hashable, list[str]] = {}  # by name, deferred ones too
        self._described_chars = 0
        shown = []
        for i, tool in enumerate(tools or ()):
            param = f"tools[{i}]"
            if isinstance(tool, dict) and "function" in tool:
                tool, param = tool["function"], f"{param}.function"
            if not isinstance(tool, dict):
                raise InvalidRequest("A tool must be an object.", param)
            # Keys are written as they are, values as JSON: official.
            line = ", ".join(
                f'"{key}": {_json(value, param)}'
                for key, value in tool.items()
                if key not in ("defer_loading", "strict")
            )
            line = f"{{{line}}}\n"
            if not tool.get("defer_loading"):
                shown.append(line)
            self._lines.setdefault(_name_of(tool), []).append(line)
        self.listing = "".join(shown)  # one line per tool that is not deferred

    def __bool__(self) -> bool:
        return bool(self._lines)

    def described(self, references: list[Json], param: str) -> str:
        """The tools that a tool search found, as its result shows them; what names no tool shows nothing."""
        if not self:
            raise InvalidRequest("A tool reference needs tools in the request.", param)
        shown = ["<tools>\n"]
        for reference in references:
            lines = self._lines.get(_name_of(reference), ())
            self._described_chars += sum(map(len, lines))
            if self._described_chars > MAX_DESCRIBED_CHARS:
                raise InvalidRequest("The tool references grow far beyond any prompt when they are spelled out.", param)
            shown += lines
        return "".join([*shown, "</tools>"])


def _join_texts(pieces: Iterable[Segment]) -> list[Segment]:
    """The pieces with neighbouring texts joined and empty ones gone."""
    segments: list[Segment] = []
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        if texts:
            if text := "".join(texts):
                segments.append(text)
            texts.clear()
        segments.append(piece)
    if text := "".join(texts):
        segments.append(text)
    return segments


def _split_thinking(content: list[Segment]) -> tuple[list[Segment] | None, list[Segment]]:
    """Reasoning written inside an assistant's content apart from the rest; None when no </think> is spelled there.

    Reasoning is what stands before the first </think>, from the last <think> before it; content what follows the last
    </think>. Media ids inside (flash) cannot be part of either spelling.
    """
    ends = [i for i, piece in enumerate(content) if isinstance(piece, str) and "</think>" in piece]
    if not ends:
        return None, content
    first, last = str(content[ends[0]]), str(content[ends[-1]])
    reasoning: list[Segment] = [*content[: ends[0]], first.split("</think>", 1)[0]]
    starts = [i for i, piece in enumerate(reasoning) if isinstance(piece, str) and "<think>" in piece]
    if starts:
        reasoning = [str(reasoning[starts[-1]]).rsplit("<think>", 1)[1], *reasoning[starts[-1] + 1 :]]
    return reasoning, [last.rsplit("</think>", 1)[1], *content[ends[-1] + 1 :]]


def _strip(segments: list[Segment]) -> list[Segment]:
    """Without white space at both ends, as str.strip sees it."""
    segments = list(segments)
    if segments and isinstance(segments[0], str):
        segments[0] = segments[0].lstrip()
    if segments and isinstance(segments[-1], str):
        segments[-1] = segments[-1].rstrip()
    return segments


def _is_references(content: Json) -> TypeGuard[list[Json]]:
    """Whether a tool search wrote it: its first item decides."""
    first = content[0] if content and isinstance(content, list) else None
    return isinstance(first, dict) and first.get("type") == "tool_reference"


def _is_outputs(content: Json) -> TypeGuard[list[Json]]:
    """Whether it is several results, {"id", "output"} each: its first item decides."""
    first = content[0] if content and isinstance(content, list) else None
    return isinstance(first, dict) and "output" in first


def _name_of(item: Json) -> Hashable:
    """A key for the name of a tool or of a reference to one; those without a name are alike: official."""
    name = item.get("name", _NO_NAME) if isinstance(item, dict) else _NO_NAME
    return name if isinstance(name, Hashable) else repr(name)


def _id_of(item: Json, param: str) -> str:
    """The id by which calls and results find each other; "" is none."""
    if not isinstance(item, dict):
        return ""
    return _spelled(item.get("tool_call_id") or item.get("id") or "", param)


def _string(value: Json, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest("This must be a string.", param)
    return value


def _spelled(value: Json, param: str) -> str:
    """A value as Jinja prints it: text as it is, all else as Python spells it."""
    if isinstance(value, str):
        return value
    try:
        return str(value)
    except (RecursionError, ValueError):  # ValueError: an integer of thousands of digits
        raise InvalidRequest("The value is nested too deeply or is too large a number.", param) from None


def _json(value: Json, param: str) -> str:
    try:
        return _encode_json(value)
    except (RecursionError, ValueError):
        raise InvalidRequest("The value is nested too deeply or is too large a number.", param) from None


def refuse_media(conv: Conversation) -> None:
    """Raise InvalidRequest for a media part: the flash template has tokens for what an engine of text cannot see."""
    for i, message in enumerate(conv.messages):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and (media := MEDIA_PARTS.get(str(part.get("type")))):
                where = f"messages[{i}].content[{j}]"
                raise InvalidRequest(f"`{where}`: no {media} is taken, the model is served for text alone.", where)
