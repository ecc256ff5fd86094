"""The conversations on which a checkpoint's chat template must equal ours before ours is used. [R16]

Between them they go through the branches of GLM-5.3's templates; tests/unit/test_jinja.py changes those templates in
many places and asks that each change shows.
"""

from typing import Any

from glm53d.chat.conversation import Conversation, Json

Message = dict[str, Json]


def _user(content: Json) -> Message:
    return {"role": "user", "content": content}


def _system(content: Json) -> Message:
    return {"role": "system", "content": content}


def _said(content: Json, *calls: Message, **fields: Json) -> Message:
    message = {"role": "assistant", "content": content, **fields}
    return message | {"tool_calls": list(calls)} if calls else message


def _call(id: str | None, name: str, **arguments: Json) -> Message:
    call: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if id is None else {"id": id, **call}


def _result(id: str | None, content: Json) -> Message:
    return {"role": "tool", "content": content} | ({} if id is None else {"tool_call_id": id})


def _text(text: str) -> Message:
    return {"type": "text", "text": text}


def _tool(name: str, **fields: Json) -> Message:
    return {"type": "function", "function": {"name": name, "description": f"Does {name} & <more>.", **fields}}


def _conv(*messages: Message, **options: Any) -> Conversation:
    return Conversation(list(messages), **options)


_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": 'Stadt, 城市, "quoted"'}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
_WEATHER = _tool("get_weather", parameters=_PARAMETERS)
_TOOLS = [_WEATHER, _tool("now", strict=True, parameters={}), {"name": "bare", "description": "without a wrapper"}]
_DEFERRED = [_WEATHER, _tool("hidden", defer_loading=True, parameters={}), _tool("shown", defer_loading=False)]
_HI = _user("Hi")
_TWO = (_call("a", "get_weather", city="Rom", days=3), _call("b", "now"))
_REFERENCES = [{"type": "tool_reference", "name": "hidden"}, {"type": "tool_reference", "name": "get_weather"}]
_MEDIA = [{"type": kind} for kind in ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")]
_EARLIER = (_user("One"), _said("Two", reasoning_content="I\n think "), _user("Three"))
_PARTS = [_text("a "), "b", _text(" c"), {"type": "file"}, {"type": "text", "text": 7}]
_ODD_VALUES: dict[str, Json] = {
    "s": " a\n<b>",
    "n": None,
    "t": True,
    "f": 1.5,
    "i": -3,
    "l": [1, "é"],
    "o": {"k": {}},
    "e": "",
}

CORPUS: tuple[Conversation, ...] = (
    _conv(_HI),
    _conv(_HI, add_generation_prompt=False),
    _conv(),
    _conv(_HI, reasoning_effort="low"),
    _conv(_HI, reasoning_effort="high"),
    _conv(_HI, reasoning_effort="max"),
    _conv(_HI, reasoning_effort="medium"),
    _conv(_system("Be brief.\n"), _user("  Grüße, 世界! 👩\u200d💻 \n")),
    _conv(_HI, _system("In the middle."), _user("And on."), _system("")),
    _conv(_HI, {"role": "developer", "content": "a role without a rule"}, {"role": "function", "content": "x"}),
    _conv(_user(None), _user(""), _user([]), _user(12), _user(_PARTS)),
    _conv(_user([_text("See: "), *_MEDIA, _text(" done")]), _system(_MEDIA[:1])),
    _conv(*_EARLIER),
    _conv(*_EARLIER, clear_thinking=True),
    _conv(_user("Q"), _said("A", reasoning_content="R"), clear_thinking=True),
    _conv(_user("Q"), _said("  A \n", reasoning_content=""), _user("Q2"), _said("\n\n", reasoning_content="R2")),
    _conv(_user("Q"), _said("<think>one</think> two"), _user("Q2"), _said("x<think>y<think>z</think>a</think>b ")),
    _conv(_user("Q"), _said("<think>one</think> two"), _user("Q2"), clear_thinking=True),
    _conv(_user("Q"), _said("no opening</think> two", reasoning_content="field"), _said("plain", reasoning_content=5)),
    _conv(_user("Q"), _said("only <think> here"), _said(None), _said([_text("a"), "b"])),
    _conv(_said("first of all"), _user("Q"), _said("")),
    _conv(_HI, tools=_TOOLS),
    _conv(_HI, tools=_DEFERRED),
    _conv(_HI, tools=[_tool("only", defer_loading=True)]),
    _conv(_HI, tools=[]),
    _conv(_system("S"), _HI, tools=[_WEATHER], reasoning_effort="high", add_generation_prompt=False),
    _conv(_HI, tools=[_tool("f", parameters=_ODD_VALUES, extra=None)]),
    _conv(_HI, _said(None, _call("a", "f", **_ODD_VALUES))),
    _conv(_HI, _said("Let me see. ", _call(None, "now"), reasoning_content="R"), tools=_TOOLS),
    _conv(_HI, _said("", {"name": "bare", "arguments": {"x": 1}, "id": "q"}), _result("q", "ok"), tools=_TOOLS),
    _conv(_HI, _said("", *_TWO), _result("a", "sun"), _result("b", "12:00"), tools=_TOOLS),
    _conv(_HI, _said("", *_TWO), _result("b", "12:00"), _result("a", "sun"), tools=_TOOLS),
    _conv(_HI, _said("", *_TWO), _result("b", "only one"), _user("go on")),
    _conv(_HI, _said("", *_TWO), _result("b", "1"), _result("a", "2"), _result("b", "twice")),
    _conv(_HI, _said("", *_TWO), _result("b", "1"), _result("c", "unknown")),
    _conv(_HI, _said("", *_TWO), _result("b", "1"), _result(None, "no id")),
    _conv(_HI, _said("", *_TWO[::-1], _call(None, "now")), _result("a", "1"), _result("b", "a call has no id")),
    _conv(_HI | {"tool_calls": list(_TWO)}, _result("b", "1"), _result("a", "the calls are a user's")),
    _conv(_HI, _said("", _TWO[0], _TWO[0], _TWO[1]), _result("b", "1"), _result("a", "two calls of one id")),
    _conv(_HI, _said("", *_TWO), {"role": "tool", "content": "by id", "id": "b"}, _result("a", "2")),
    _conv(_HI, _said("", *_TWO), _result("b", [_text("parts"), "!", *_MEDIA[:1]]), _result("a", None)),
    _conv(_HI, _said("", *_TWO), _result("a", "1"), _said("between"), _result("b", "2"), _result("a", "3")),
    _conv(_result("a", "a result first"), _result("b", ""), _HI),
    _conv(_HI, _said("", *_TWO), _result(None, [{"id": "b", "output": "B"}, {"id": "a", "output": [_text("A")]}])),
    _conv(
        _HI,
        _said("", *_TWO),
        _result(None, [{"id": "b", "output": "B"}, {"id": "a", "output": "A"}, {"id": "b", "output": "2"}]),
    ),
    _conv(_HI, _said("", *_TWO), _result(None, [{"output": "no id"}, {"id": "a", "output": None}])),
    _conv(_HI, _said("", *_TWO), _result(None, [{"id": "z", "output": "unknown"}, {"id": "a", "output": _MEDIA}])),
    _conv(_HI, _said("", *_TWO), _result("a", _REFERENCES), _result("b", "x"), tools=_DEFERRED),
    _conv(_HI, _said("", *_TWO), _result("a", _REFERENCES), tools=[*_DEFERRED, _tool("hidden", n=2)]),
    _conv(_HI, _said("", *_TWO), _result("x", _REFERENCES), tools=_DEFERRED),
    _conv(_HI, _said("", *_TWO), _result(None, [{"id": "b", "output": _REFERENCES}]), tools=_DEFERRED),
    _conv(_HI, _said("", *_TWO), _result(None, [{"output": _REFERENCES[:1]}, {"output": "x"}]), tools=_DEFERRED),
)
