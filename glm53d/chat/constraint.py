"""What output must look like, as one grammar in llguidance's Lark dialect: response formats, and calls of tools. [R35]

    response_format, json_schema, regex, ebnf ... ──> content rule ─┐
    tools, tool_choice, strict ── call_grammar.py ──> call rules ───┴──> compose() ──> Grammar

A turn that must call has calls alone; one that may call has either content in its form or calls. What is here is text
and checks that need no engine: the engine compiles the text before the request is taken, and what it refuses is a 400
with the path in Grammar.param.
"""

import re
from dataclasses import dataclass

import msgspec

from glm53d.chat.conversation import Json
from glm53d.chat.gbnf import to_lark
from glm53d.chat.schema import Budget, Document
from glm53d.errors import InvalidRequest

MAX_SOURCE_BYTES = 16 * 1024
"""Of a regex or a grammar of a client's own. To look through so much takes 10 ms."""
MAX_GRAMMAR_BYTES = 512 * 1024

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)

# Where JSON may have white space: what a model prints, and no more. Without an end a model can get lost in it.
_WHITE_SPACE = r" |\n {0,40}|\n\t{0,10}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A form that the output has, always. It was made by us or checked: text is a grammar of llguidance's Lark dialect.

    Special tokens stand in it as ids, <[154829]>, so what it allows as text can never spell one.
    """

    text: str
    after_thinking: bool  # holds from the token behind </think> on; else from the first token on
    param: str = ""  # path of the request's field that asks for it: what an error names


@dataclass(frozen=True, slots=True)
class Content:
    """The form of an answer's text."""

    rules: str  # its first rule is `content`
    param: str


@dataclass(frozen=True, slots=True)
class Calls:
    """The form of an answer's calls."""

    rules: str  # its first rule is `call`
    param: str
    must: bool  # at least one, and no text
    max_calls: int | None


def json_schema(schema: Json, at: str) -> Content:
    """JSON that a schema describes; `at` is its path. Raises InvalidRequest."""
    return Content(f"content: {json_value(Document(schema, at, Budget(at)).closed(schema, at))}\n", at)


def json_object(at: str) -> Content:
    """Any JSON object."""
    return Content(f"content: {json_value({'type': 'object'})}\n", at)


def regex(pattern: str, at: str) -> Content:
    """Text that a regular expression matches as a whole."""
    _check_size(pattern, at)
    return Content(f"content: {regex_terminal(pattern)}\n", at)


def choice(texts: list[str], at: str) -> Content:
    """One of several texts."""
    alternatives = " | ".join(map(literal, texts))
    _check_size(alternatives, at)
    return Content(f"content: {alternatives}\n", at)


def grammar(source: str, at: str) -> Content:
    """Text of a grammar: GBNF, whose first rule is root, or Lark, whose first is start. Raises InvalidRequest."""
    _check_size(source, at)
    # A client's Lark is nested: none of its names is one of ours. Lines in what the engine says of it are its own.
    return Content(to_lark(source, at) if _GBNF_RULE.search(source) else f"content: %lark {{{source}\n}}\n", at)


def compose(content: Content | None, calls: Calls | None, *, after_thinking: bool) -> Grammar | None:
    """One grammar of what a request asks for. Raises InvalidRequest where its parts exclude each other."""
    if calls is None:
        return None if content is None else _grammar(content.rules + "start: content\n", after_thinking, content.param)
    if content is None:
        return _grammar(_start_of(calls) + calls.rules, after_thinking, calls.param)
    if calls.must:
        raise InvalidRequest(
            f"`{content.param}` cannot go with `{calls.param}`: the answer cannot be both.", content.param
        )
    calls_rule = "call" if calls.max_calls == 1 else "call+"
    return _grammar(f"{content.rules}start: content | {calls_rule}\n{calls.rules}", after_thinking, content.param)


def json_value(closed: Json) -> str:
    """The rule for JSON of a schema from Document.closed()."""
    options = {"whitespace_pattern": _WHITE_SPACE}
    schema = closed if isinstance(closed, dict) else {"allOf": [closed]}
    return f"%json {msgspec.json.encode({'x-guidance': options, **schema}).decode()}"


def literal(text: str) -> str:
    """The terminal for a text itself."""
    return msgspec.json.encode(text).decode()


def regex_terminal(pattern: str, *, is_search: bool = False) -> str:
    """The terminal for what a regular expression matches: as a whole, or anywhere in the text as JSON Schema says.

    The engine's expressions have no anchors: they match wholes, so ^ at the begin and $ at the end say nothing new.
    """
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    before, behind = ("" if begins else "(?s:.*)", "" if ends else "(?s:.*)") if is_search else ("", "")
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", inner, flags=re.DOTALL)
    text = f"{before}(?:{escaped}){behind}"
    return "/" + text.replace("\r", r"\r").replace("\n", r"\n") + "/"


def _start_of(calls: Calls) -> str:
    """The first rule of a turn with calls and free text. Text that spells the tag would be a call that is none."""
    if calls.must:
        return "start: call\n" if calls.max_calls == 1 else "start: call+\n"
    prose = "PROSE: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/\n"
    return ("start: PROSE call?\n" if calls.max_calls == 1 else "start: PROSE (call PROSE)*\n") + prose


def _grammar(text: str, after_thinking: bool, param: str) -> Grammar:
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"`{param}`: the grammar of it is over the limit of {MAX_GRAMMAR_BYTES} bytes.", param)
    return Grammar(text, after_thinking, param)


def _check_size(source: str, at: str) -> None:
    if not source:
        raise InvalidRequest(f"`{at}` is empty.", at)
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"`{at}` is over the limit of {MAX_SOURCE_BYTES} bytes.", at)
