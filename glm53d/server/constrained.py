"""Constrained: what a request of any dialect says of its output's form -> the grammar in its SamplingParams. [R35]

A form of the text has one source: a response format, or one of the names that SGLang and vLLM have for a schema, an
expression or a grammar. Tools are another: a choice that forces a call, or strict ones, give calls their form. A chat
may have both where it need not call. What cannot be is refused by its path, before anything is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from glm53d.chat import call_grammar, constraint
from glm53d.chat.constraint import Content
from glm53d.chat.conversation import Json
from glm53d.errors import InvalidRequest
from glm53d.front.engine import Engine
from glm53d.front.job import SamplingParams
from glm53d.server import body
from glm53d.server.body import join
from glm53d.server.common import Offered
from glm53d.server.sampling import SamplingFields, refuse_not_served

_SCHEMA_TEXT = msgspec.json.Decoder(dict[str, Json])


class JsonSchema(msgspec.Struct):
    """A schema with a name. It is enforced, strict or not, and the prompt does not mention it."""

    schema: dict[str, Json]
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The form of an answer's text, in chats and completions."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def content(self, at: str) -> Content | None:
        """The form; None: any. Raises InvalidRequest."""
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidRequest(f"`{at}.json_schema` is required.", f"{at}.json_schema")
        schema = self.json_schema.schema if self.json_schema is not None else None
        return _content(self.type, schema, at, f"{at}.json_schema.schema")


class TextFormat(msgspec.Struct, omit_defaults=True):
    """The form of an answer's text, in responses and messages."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Json] | None = None
    name: str | None = None
    strict: bool | None = None

    def content(self, at: str) -> Content | None:
        """As ResponseFormat's."""
        if self.type == "json_schema" and self.schema is None:
            raise InvalidRequest(f"`{at}.schema` is required.", f"{at}.schema")
        return _content(self.type, self.schema, at, f"{at}.schema")


_NAMES = (
    "json_schema", "regex", "ebnf", "structured_outputs", "guided_json", "guided_regex", "guided_grammar",
    "guided_choice",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """What a request says of the form of its text, by whatever name."""

    fields: SamplingFields
    response: ResponseFormat | TextFormat | None = None  # the dialect's own field
    response_at: str = ""
    at: str = ""  # where `fields` stand

    @property
    def is_asked(self) -> bool:
        """Whether it says anything."""
        return self.response is not None or any(getattr(self.fields, name) is not None for name in _NAMES)

    def content(self) -> Content | None:
        """The form; None: any. Raises InvalidRequest."""
        found = list(_sources(self.fields, self.at))
        if self.response is not None and (content := self.response.content(self.response_at)) is not None:
            found.append(content)
        if len(found) > 1:
            first, second = found[0].param, found[1].param
            raise InvalidRequest(f"`{second}`: `{first}` says already what the answer looks like.", second)
        return found[0] if found else None


async def constrain(
    sampling: SamplingParams, form: Form, offered: Offered | None, engine: Engine, *, in_chat: bool
) -> SamplingParams:
    """The parameters of a request whose text and calls have these forms. Raises InvalidRequest, Overloaded.

    What a client may have made large or hostile is looked through in the text pool, where it holds up nobody.

    Args:
        offered: the tools of a chat.
        in_chat: the output is a turn as the model's template has it: it begins with thinking, which has any form.
    """
    has_tools = offered is not None and bool(offered.tools)
    if not form.is_asked and not has_tools:
        return sampling
    strict = has_tools and in_chat and engine.config.grammar.auto_calls
    if not form.is_asked and not strict and offered is not None and not offered.has_form:
        return _constrain(sampling, form, offered, engine, in_chat)
    return await engine.in_text_pool(_constrain, sampling, form, offered, engine, in_chat)


def _constrain(
    sampling: SamplingParams, form: Form, offered: Offered | None, engine: Engine, in_chat: bool
) -> SamplingParams:
    """At most one call costs no grammar: its end ends the turn. Nor does none: the tag is never sampled."""
    content = form.content()
    calls = None
    if offered is not None and offered.tools:
        choice = offered.choice
        if in_chat and engine.config.grammar.auto_calls:
            offered = replace(offered, tools=tuple(replace(tool, is_free=False) for tool in offered.tools))
        if not in_chat:
            if offered.has_form:
                raise InvalidRequest(f"`{choice.param}`: this template's answers are not parsed.", choice.param)
        elif choice.is_off:
            never = (engine.vocab.added["<tool_call>"], float("-inf"))
            sampling = replace(sampling, logit_bias=(*sampling.logit_bias, never))
        else:
            if offered.max_calls == 1:
                sampling = replace(sampling, stop_ids=(*sampling.stop_ids, engine.vocab.added["</tool_call>"]))
            if offered.has_form or content is not None:
                calls = call_grammar.calls(
                    offered.tools, engine.vocab.added,
                    param=choice.param if choice.must else "tools", must=choice.must, max_calls=offered.max_calls,
                )  # fmt: skip
    grammar = constraint.compose(content, calls, after_thinking=in_chat)
    return sampling if grammar is None else replace(sampling, grammar=grammar)


def _sources(fields: SamplingFields, at: str) -> Iterator[Content]:
    """The form by each name that asks for one, beside the dialect's own."""
    for name in ("json_schema", "guided_json"):
        if (schema := getattr(fields, name)) is not None:
            yield _json_schema(schema, join(at, name))
    for name in ("regex", "guided_regex"):
        if (pattern := getattr(fields, name)) is not None:
            yield constraint.regex(pattern, join(at, name))
    for name in ("ebnf", "guided_grammar"):
        if (source := getattr(fields, name)) is not None:
            yield constraint.grammar(source, join(at, name))
    if fields.guided_choice is not None:
        yield constraint.choice(fields.guided_choice, join(at, "guided_choice"))
    if (outputs := fields.structured_outputs) is not None:
        at = join(at, "structured_outputs")
        refuse_not_served(outputs, at)
        if outputs.json is not None:
            yield _json_schema(outputs.json, join(at, "json"))
        if outputs.json_object:
            yield constraint.json_object(join(at, "json_object"))
        if outputs.regex is not None:
            yield constraint.regex(outputs.regex, join(at, "regex"))
        if outputs.grammar is not None:
            yield constraint.grammar(outputs.grammar, join(at, "grammar"))
        if outputs.choice is not None:
            yield constraint.choice(outputs.choice, join(at, "choice"))


def _content(kind: str, schema: dict[str, Json] | None, at: str, schema_at: str) -> Content | None:
    if kind == "text":
        return None
    return constraint.json_object(at) if kind == "json_object" else _json_schema(schema or {}, schema_at)


def _json_schema(schema: dict[str, Json] | str, at: str) -> Content:
    """The form of JSON that a schema describes, which may be JSON text itself."""
    if isinstance(schema, str):
        schema = body.decode(_SCHEMA_TEXT, schema, at)
    body.check_size(schema, at)
    return constraint.json_schema(schema, at)
