"""A chat template in Jinja: the checkpoint's own, compared with ours at start, or a user's. [R16] [R17]

    choose()   the checkpoint's equals ours on every conversation of the corpus  -> ours, of the variant that equals it
               it does not, or template.path names another                       -> that one, in a sandbox

What clients write stays text: spellings of control tokens in their strings are replaced by sentinels before rendering,
and put back when the rendered text has been taken apart at the control tokens that the template itself wrote.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from glm53d.chat.conversation import Conversation, Json
from glm53d.chat.corpus import CORPUS
from glm53d.chat.template import Segment, Template, Variant
from glm53d.errors import CheckpointError, ConfigError, InvalidRequest
from glm53d.text.spellings import Spellings

log = logging.getLogger(__name__)

MAX_RENDER_S = 10.0
MAX_RENDERED_CHARS = 1 << 28

_MARK = "\U0010fffd"  # of private use; a client's own is treated as one more spelling
_FIRST = 0x100000  # _MARK, chr(_FIRST + number of the spelling), _MARK
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Choice:
    """The template that prompts are made with."""

    template: "Template | JinjaTemplate"
    literal: bool  # spelled control tokens become control tokens
    kind: str  # "glm-5.3", "glm-5.3-flash" or "jinja"


def choose(control_ids: Mapping[str, int], shipped: str | None, own: str | None, *, literal: bool) -> Choice:
    """The template to use, given the sources of the checkpoint's and of a user's own.

    Args:
        control_ids: id of each added token by its spelling.
        literal: whether spelled control tokens are meant, as other engines take them; also so where sentinels fail.
    Raises:
        ConfigError, CheckpointError: a template is none, or renders nothing.
    """
    if own is not None:
        return _sandboxed(_parse(own, control_ids, ConfigError, "template.path"), literal)
    if shipped is None:
        return Choice(Template(control_ids), literal, "glm-5.3")
    theirs = _parse(shipped, control_ids, CheckpointError, "the checkpoint's chat template")
    furthest: tuple[int, str, str] | None = None
    for variant in get_args(Variant):
        try:
            ours = Template(control_ids, variant)
        except CheckpointError:  # the tokenizer lacks media tokens: the variant is not this checkpoint's
            continue
        difference = first_difference(ours, theirs)
        if difference is None:
            return Choice(ours, literal, variant)
        if furthest is None or difference[0] > furthest[0]:
            furthest = difference
    if furthest is not None:
        number, text, their_text = furthest
        log.warning(
            "the checkpoint's chat template is used, in a sandbox; ours differs from it on conversation %d, %s\n"
            "ours:   %r\ntheirs: %r", number, json.dumps(CORPUS[number].messages, ensure_ascii=False), text, their_text,
        )  # fmt: skip
    return _sandboxed(theirs, literal)


def first_difference(ours: Template, theirs: "JinjaTemplate") -> tuple[int, str, str] | None:
    """Number of the first conversation of the corpus that is rendered differently, and both texts."""
    for number, conv in enumerate(CORPUS):
        text, their_text = _text_or_error(ours, conv), _text_or_error(theirs, conv)
        if text != their_text:
            return number, text, their_text
    return None


def _text_or_error(template: "Template | JinjaTemplate", conv: Conversation) -> str:
    try:
        return template.render_text(conv)
    except InvalidRequest as error:
        return f"refused: {error.message}"


def _parse(
    source: str, control_ids: Mapping[str, int], error: Callable[[str], Exception], what: str
) -> "JinjaTemplate":
    try:
        template = JinjaTemplate(source, control_ids)
        template.render_text(Conversation([{"role": "user", "content": "Hi"}]))
    except jinja2.TemplateSyntaxError as fault:
        raise error(f"{what}: line {fault.lineno}: {fault.message}") from None
    except InvalidRequest as fault:
        raise error(f"{what} cannot render one message of a user: {fault.message}") from None
    return template


def _sandboxed(template: "JinjaTemplate", literal: bool) -> Choice:
    if not literal and not template.keeps_sentinels():
        log.warning("the chat template takes texts apart: control tokens that clients spell become control tokens")
        literal = True
    return Choice(template, literal, "jinja")


class JinjaTemplate:
    """Renders conversations with a template in Jinja, with the variables and filters that chat templates expect.

    Any number of threads may use one. Whatever makes the template fail is an InvalidRequest.
    """

    def __init__(self, source: str, control_ids: Mapping[str, int]):
        """Raises jinja2.TemplateSyntaxError."""
        self._env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self._template = self._env.from_string(source)
        self._ids = dict(control_ids)
        self._spelled = [*control_ids, _MARK]
        self._border = Spellings(control_ids)
        self._hidden = Spellings(self._spelled)
        # Templates take reasoning out of an assistant's content by these two, and are to see them in it.
        self._hidden_in_thought = Spellings([s for s in self._spelled if s not in ("<think>", "</think>")])

    def render(self, conv: Conversation) -> list[Segment]:
        """The prompt as segments; only what the template itself writes becomes a control token. As Template.render."""
        parts = self._border.split(self._render(self._with_sentinels(conv)))
        return [self._ids[part] if part in self._ids else self._restored(part) for part in parts if part]

    def render_text(self, conv: Conversation) -> str:
        """The prompt as one text, control tokens and what spells them alike."""
        return self._render(conv)

    def keeps_sentinels(self) -> bool:
        """Whether render() is render_text() taken apart: a template that changes texts may break sentinels."""
        spelled = "".join(self._spelled)
        said: dict[str, Json] = {"role": "assistant", "content": "", "reasoning_content": spelled}
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"k": spelled}}}
        probes = (
            Conversation([{"role": "user", "content": spelled}]),
            Conversation([{"role": "system", "content": spelled}, {"role": "user", "content": [_part(spelled)]}]),
            Conversation(
                [{"role": "user", "content": "q"}], tools=[{"type": "function", "function": {"name": spelled}}]
            ),
            Conversation(
                [
                    {"role": "user", "content": "q"},
                    said | {"tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "a", "content": spelled},
                ]
            ),
        )
        spelling_of = {id_: spelling for spelling, id_ in self._ids.items()}
        for probe in probes:
            try:
                text = self.render_text(probe)
            except InvalidRequest:
                continue  # the template has no such messages
            try:
                segments = self.render(probe)
            except InvalidRequest:
                return False
            if "".join(s if isinstance(s, str) else spelling_of[s] for s in segments) != text:
                return False
        return True

    def _render(self, conv: Conversation) -> str:
        variables: dict[str, Any] = dict(conv.template_kwargs)
        if conv.reasoning_effort is not None:
            variables["reasoning_effort"] = conv.reasoning_effort
        variables |= {
            "messages": [_with_text(message) for message in conv.messages],
            "tools": conv.tools or None,
            "add_generation_prompt": conv.add_generation_prompt,
            "clear_thinking": conv.clear_thinking,
        }
        try:
            with self._env.limited():
                return "".join(_bounded(self._template.generate(variables)))
        except _FAILURES as error:
            raise InvalidRequest(f"The chat template fails on these messages: {error}", "messages") from None

    def _with_sentinels(self, conv: Conversation) -> Conversation:
        return replace(
            conv,
            messages=[self._hide(m, in_answer=_may_hold_thinking(m)) for m in map(_with_text, conv.messages)],
            tools=self._hide(conv.tools),
            template_kwargs=self._hide(conv.template_kwargs),
        )

    def _hide(self, value: Json, *, in_answer: bool = False) -> Json:
        """The value with sentinels in all its strings, keys of objects too."""
        if isinstance(value, str):
            thought, end, rest = value.rpartition("</think>") if in_answer else ("", "", value)
            return self._hide_in(self._hidden_in_thought, thought) + end + self._hide_in(self._hidden, rest)
        if isinstance(value, list):
            return [self._hide(item, in_answer=in_answer) for item in value]
        if isinstance(value, dict):
            # Of an answer only the content is looked through for reasoning.
            return {
                self._hide(k): self._hide(v, in_answer=in_answer and k in ("content", "text")) for k, v in value.items()
            }
        return value

    def _hide_in(self, spellings: Spellings, text: str) -> str:
        return "".join(
            f"{_MARK}{chr(_FIRST + self._spelled.index(part))}{_MARK}" if i % 2 else part
            for i, part in enumerate(spellings.split(text))
        )

    def _restored(self, text: str) -> str:
        parts = text.split(_MARK)  # plain text and what stands for a spelling, in turn
        try:
            parts[1::2] = [self._spelled[ord(part) - _FIRST] for part in parts[1::2]]
        except (TypeError, IndexError):
            raise _broken() from None
        if len(parts) % 2 == 0:
            raise _broken()
        return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the helpers of chat templates, and a limit of time, looked at whenever a value is."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._now = threading.local()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = time.strftime

    def limited(self) -> "_Limit":
        return _Limit(self._now)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._look()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._look()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return super().call(*args, **kwargs)

    def _look(self) -> None:
        if time.monotonic() > getattr(self._now, "deadline", float("inf")):
            raise InvalidRequest("The chat template takes too long with these messages.", "messages")


class _Limit:
    """MAX_RENDER_S for what this thread renders inside the `with`."""

    def __init__(self, now: threading.local):
        self._now = now

    def __enter__(self) -> None:
        self._now.deadline = time.monotonic() + MAX_RENDER_S

    def __exit__(self, *_: object) -> None:
        del self._now.deadline


def _bounded(chunks: Iterable[str]) -> Iterator[str]:
    left = MAX_RENDERED_CHARS
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise InvalidRequest("The chat template makes too long a text of these messages.", "messages")
        yield chunk


def _tojson(value: Json, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # not Jinja's own, which escapes HTML


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _part(text: str) -> dict[str, Json]:
    return {"type": "text", "text": text}


def _with_text(message: dict[str, Json]) -> dict[str, Json]:
    """A message whose content is nothing but parts of text, with that text: many templates know no parts."""
    content = message.get("content")
    if not isinstance(content, list) or not content:
        return message
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return message | {"content": "".join(texts)} if len(texts) == len(content) else message


def _may_hold_thinking(message: dict[str, Json]) -> bool:
    """Whether a template may look for thinking in the content: of an answer that has none beside it."""
    return message.get("role") == "assistant" and not isinstance(message.get("reasoning_content"), str)


def _broken() -> InvalidRequest:
    return InvalidRequest("The chat template breaks the spelling of a control token.", "messages")
