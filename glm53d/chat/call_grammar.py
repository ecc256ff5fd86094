"""Calls of tools as rules of a grammar: the model's own markup, with arguments that their schemas describe. [R35]

    call    <tool_call> name *( <arg_key> key </arg_key> <arg_value> value </arg_value> ) </tool_call>
    name    of one of the tools; then its arguments in any order, each once at most, the required ones all of them
    value   of a parameter that is a string: the text itself; of any other: JSON of its schema

The tags are token ids. Text cannot spell one, neither in a value nor elsewhere: whoever reads the call as text would
find its end too early. What is allowed here is what chat/tools.py reads back as a valid call: where a parameter may be
a string or something else, only text is allowed as a string that cannot be taken for the other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from glm53d.chat.arguments import STRING, ArgumentKinds, Kinds, encode, to_json
from glm53d.chat.constraint import Calls, json_value, literal, regex_terminal
from glm53d.chat.conversation import Json
from glm53d.chat.schema import (
    TYPES,
    Budget,
    Document,
    followed,
    name_of,
    type_of,
    types_of,
    types_said,
    with_defs,
)
from glm53d.errors import InvalidRequest

MAX_ARGUMENTS = 64
"""Of one tool: the engine keeps which of them have been given in so many bits."""

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

# Terminals that all calls share. UNTYPED is text that chat/arguments.py cannot take for a number, a list, an object,
# true, false or null; KEY is a name of an argument that the schema does not list.
_TERMINALS = rf"""
TEXT: /(?s:.*)/ & ~/(?s:.*)({"|".join(tag.replace("/", chr(92) + "/") for tag in TAGS)})(?s:.*)/
UNTYPED: TEXT & /([^\x00-\x1F\s\d+\-_{{\["](?s:.*))?/ & ~/(?i:true|false|null)\s*/
KEY: /[\p{{L}}_][\p{{L}}\p{{N}}_.\-]{{0,63}}/
"""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called."""

    name: str
    parameters: Json
    at: str  # the path of its parameters in the request
    is_free: bool = False  # any arguments, of any form


def calls(tools: Iterable[Tool], added: Mapping[str, int], *, param: str, must: bool, max_calls: int | None) -> Calls:
    """The rules of a call of one of the tools; added: the ids of the vocabulary's added tokens by spelling.

    Raises InvalidRequest with the path of what cannot be enforced.
    """
    rules = _Rules(added, Budget(param))
    names = [rules.add(i, tool) for i, tool in enumerate(tools)]
    head = f"call: {rules.tag('<tool_call>')} ({' | '.join(names)}) {rules.tag('</tool_call>')}\n"
    return Calls(head + "".join(rules.lines) + _TERMINALS, param, must, max_calls)


class _Rules:
    """The rules of one request's tools, while they are made."""

    def __init__(self, added: Mapping[str, int], budget: Budget):
        self.lines: list[str] = []
        self._added = added
        self._budget = budget

    def tag(self, spelling: str) -> str:
        """The terminal for a tag: its id and nothing else."""
        return f"<[{self._added[spelling]}]>"

    def add(self, index: int, tool: Tool) -> str:
        """Add the rules of a tool; the name of the one that stands for all of it behind <tool_call>."""
        name, args = f"tool_{index}", f"args_{index}"
        if tool.is_free:
            self.lines.append(f"{name}: {literal(tool.name)} ({self._pair('TEXT', 'TEXT')})*\n")
            return name
        parameters = _parameters(tool, self._budget)
        ways = []
        for bit, (key, schema) in enumerate(parameters.listed.items()):
            value = self._value(f"value_{index}_{bit}", parameters, key, schema)
            ways.append(f"{self._pair(literal(key), value)} {args}::set_bit({bit}) %if bit_clear({bit})")
        if parameters.others is not False:
            value = self._value(f"value_{index}", parameters, None, parameters.others)
            # A key that is listed has a rule of its own.
            other = "".join(["KEY", *(f" & ~{literal(key)}" for key in parameters.listed)])
            self.lines.append(f"KEY_{index}: {other}\n")
            ways.append(f"{self._pair(f'KEY_{index}', value)} {args}::_")
        if not ways:
            self.lines.append(f"{name}: {literal(tool.name)}\n")
            return name
        end = f'"" %if is_ones([0:{parameters.num_required}])' if parameters.num_required else '""'
        self.lines.append(f"{name}: {literal(tool.name)} {args}::0x0\n{args}::_: {' | '.join([end, *ways])}\n")
        return name

    def _pair(self, key: str, value: str) -> str:
        key_tags, value_tags = self._tags("arg_key"), self._tags("arg_value")
        return f"{key_tags[0]} {key} {key_tags[1]} {value_tags[0]} {value} {value_tags[1]}"

    def _tags(self, name: str) -> tuple[str, str]:
        return self.tag(f"<{name}>"), self.tag(f"</{name}>")

    def _value(self, name: str, parameters: "_Parameters", key: str | None, schema: Json) -> str:
        """Add the rule for an argument's value: text, JSON, or either."""
        if schema in (True, {}):
            return "TEXT"
        at = f"{parameters.at}.properties.{key}" if key else f"{parameters.at}.additionalProperties"
        kinds, ways = parameters.kinds.of(key or ""), []
        reader = _Reader(parameters.defs, kinds, self._budget)
        try:
            text = reader.text(schema)
            others = schema if kinds and "string" not in kinds else reader.without_strings(schema)
        except RecursionError:
            raise InvalidRequest(f"`{at}`: one reference leads to another too many times.", at) from None
        if text is not None:
            self.lines.append(f"{name.upper()}: {text}\n")
            ways.append(name.upper())
        if kinds != STRING and others is not None:
            self.lines.append(f"{name}_json: {json_value(with_defs(others, parameters.defs))}\n")
            ways.append(f"{name}_json")
        if not ways:
            raise InvalidRequest(f"`{at}`: no argument can satisfy this schema.", at)
        self.lines.append(f"{name}: {' | '.join(ways)}\n")
        return name


@dataclass(frozen=True, slots=True)
class _Parameters:
    """A tool's parameters, each with a schema of its own."""

    at: str
    listed: dict[str, Json]  # required ones first
    num_required: int
    others: Json  # schema of arguments that are not listed; False: there are none
    kinds: ArgumentKinds
    defs: Mapping[str, Json]


def _parameters(tool: Tool, budget: Budget) -> _Parameters:
    at, kinds = tool.at, ArgumentKinds(tool.parameters)
    if tool.parameters is None:
        return _Parameters(at, {}, 0, False, kinds, {})
    closed = Document(tool.parameters, at, budget).closed(tool.parameters, at)
    if not isinstance(closed, dict):
        raise InvalidRequest(f"`{at}` must be an object.", at)
    defs = closed.get("$defs", {})
    whole = followed({key: value for key, value in closed.items() if key != "$defs"}, defs)
    if not isinstance(whole, dict) or "object" not in types_said(whole):
        raise InvalidRequest(f"`{at}` must describe an object.", at)
    for key in _OF_ALL:
        if key in whole:
            path = f"{at}.{key}"
            raise InvalidRequest(f"`{path}`: `{key}` cannot be enforced for all of a tool's parameters.", path)
    properties, others = whole.get("properties", {}), whole.get("additionalProperties", True)
    required = dict.fromkeys(whole.get("required", ()))
    listed = {key: properties.get(key, others) for key in required} | properties
    listed = {key: schema for key, schema in listed.items() if schema is not False or key in required}
    for key in listed:
        if not key or key != key.strip():
            raise InvalidRequest(f"`{at}`: the name of an argument has white space around it.", at)
    if len(listed) > MAX_ARGUMENTS:
        raise InvalidRequest(f"`{at}` has more than {MAX_ARGUMENTS} arguments.", at)
    return _Parameters(at, listed, len(required), whole.get("additionalProperties", False), kinds, defs)


class _Reader:
    """Splits the schema of one argument into the text that is a string of it, and all else."""

    def __init__(self, defs: Mapping[str, Json], kinds: Kinds, budget: Budget):
        """kinds: the types among which chat/arguments.py chooses when it reads the argument."""
        self._defs = defs
        self._kinds = kinds
        self._budget = budget

    def text(self, schema: Json) -> str | None:
        """The terminal for the text of its strings; None: it has none."""
        if (found := self._strings(schema, ())) is None:
            return None
        expression, is_list = found
        any_text = "TEXT" if self._kinds == STRING else "UNTYPED"
        if expression == "TEXT":
            return any_text
        return expression if is_list else f"{any_text} & ({expression})"

    def without_strings(self, schema: Json, seen: tuple[str, ...] = ()) -> Json | None:
        """The schema of all of its values that are no strings; None: there are none."""
        self._count(schema)
        if not isinstance(schema, dict):
            return {"type": _NO_STRING} if schema else None
        out = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "anyOf")}
        if "const" in schema or "enum" in schema:
            allowed = types_said(schema) - {"string"}
            values = schema.get("enum", [schema.get("const")])
            values = [value for value in values if allowed & {type_of(value), _WIDER.get(type_of(value))}]
            if not values:
                return None
            out = {key: value for key, value in out.items() if key not in ("const", "type")} | {"enum": values}
        elif not (kinds := [kind for kind in _NO_STRING if kind in types_of(schema)]):
            return None
        else:
            out["type"] = kinds
        every = [self.without_strings(sub, seen) for sub in schema.get("allOf", ())]
        if "$ref" in schema:
            name = name_of(schema["$ref"])
            every.append(None if name in seen else self.without_strings(self._defs[name], (*seen, name)))
        if "anyOf" in schema:
            some = [self.without_strings(sub, seen) for sub in schema["anyOf"]]
            some = [sub for sub in some if sub is not None]
            every.append({"anyOf": some} if some else None)
        if None in every:
            return None
        return out | {"allOf": every} if every else out

    def _strings(self, schema: Json, seen: tuple[str, ...]) -> tuple[str, bool] | None:
        """A terminal for the strings of a schema, and whether it is a list of whole texts, which need no more care."""
        self._count(schema)
        if not isinstance(schema, dict):
            return ("TEXT", False) if schema else None
        if "string" not in types_of(schema) or "string" not in types_said(schema):
            return None
        every: list[tuple[str, bool] | None] = []
        if "const" in schema or "enum" in schema:
            texts = list(filter(self._is_itself, schema.get("enum", [schema.get("const")])))
            every.append((" | ".join(map(literal, texts)), True) if texts else None)
        if "minLength" in schema or "maxLength" in schema:
            every.append((f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/", False))
        if "pattern" in schema:
            every.append((regex_terminal(schema["pattern"], is_search=True), False))
        every += [self._strings(sub, seen) for sub in schema.get("allOf", ())]
        if "$ref" in schema:
            name = name_of(schema["$ref"])
            every.append(None if name in seen else self._strings(self._defs[name], (*seen, name)))
        if "anyOf" in schema:
            some = [found for sub in schema["anyOf"] if (found := self._strings(sub, seen)) is not None]
            are_lists = all(is_list for _, is_list in some)
            every.append((" | ".join(expression for expression, _ in some), are_lists) if some else None)
        parts = [part for part in every if part is not None]
        if len(parts) < len(every):
            return None
        if len(parts) == 1:
            return parts[0]
        return " & ".join(f"({expression})" for expression, _ in parts) or "TEXT", any(is_list for _, is_list in parts)

    def _count(self, schema: Json) -> None:
        """A schema counts, and its values, each time: references to it are followed each time."""
        num_values = len(schema.get("enum", ())) if isinstance(schema, dict) else 0
        self._budget.take(1 + num_values / 4)

    def _is_itself(self, value: Json) -> bool:
        """Whether a string of an enum, as text, is read back as that string, and spells no tag."""
        is_text = isinstance(value, str) and not any(tag in value for tag in TAGS)
        return is_text and to_json(value, self._kinds) == encode(value)


_OF_ALL = ("$ref", "allOf", "anyOf", "const", "enum", "maxProperties", "minProperties", "patternProperties")
_WIDER = {"integer": "number"}
_NO_STRING = [kind for kind in TYPES if kind != "string"]
