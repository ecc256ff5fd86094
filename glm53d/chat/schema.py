"""JSON Schema as the grammar engine takes it: checked, self-contained, and without what constrains nothing. [R35]

A schema that is served is enforced to the letter. What the engine cannot enforce is refused by its path, before any
token: an answer that only nearly has its form helps nobody. Annotations, and keywords that no draft knows, go.

    closed(schema)   the schema, with each distinct $ref as #/$defs/N and what it stands for in $defs, cleaned the same
                     way; so a part of a document, such as one parameter of a tool, is a document of its own

Schemas come from clients: the work is bounded by MAX_BYTES, MAX_NODES and MAX_DEPTH, and nothing follows a reference
twice.

Over 400 lines, because each keyword is decided once, in one walk, and what is checked of the result (oneOf's branches,
that there is a finite value) reads it as that walk leaves it and counts against the same budget.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from glm53d.chat.conversation import Json
from glm53d.errors import InvalidRequest

MAX_BYTES = 512 * 1024
"""Of one request's schemas as JSON."""
MAX_NODES = 4_000
"""Schemas and enum values of one request. So many take some 10 ms to check. What costs less counts as a part of one."""
MAX_DEPTH = 64
MAX_ROUNDS = 16  # of the search for references that have a value: one suffices unless cycles are nested

_LEAP_YEAR = r"([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_MONTH_DAY = r"((0[13578]|1[02])-31|(0[13-9]|1[0-2])-(29|30)|(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"([1-9][0-9]{{3}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_N = "[0-9]{1,6}"
_CLOCK = rf"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"({_H}:){{7}}{_H}", f"({_H}:){{1,7}}:", f":((:{_H}){{1,7}}|:)"]
    + [f"({_H}:){{1,{7 - n}}}(:{_H}){{1,{n}}}" for n in range(1, 7)]
)
_URI_CHARS = r"([A-Za-z0-9\-._~:/?@!$&'()*+,;=]|%[0-9a-fA-F]{2})"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P({_N}W|({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)({_CLOCK})?|{_CLOCK})",
    "email": rf"[A-Za-z0-9_+\-]{{1,32}}(\.[A-Za-z0-9_+\-]{{1,32}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,4}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,5}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": _IPV6,
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.\-]*:{_URI_CHARS}+(#{_URI_CHARS}*)?",
}
"""Formats that are enforced, as expressions; the others are annotations, as JSON Schema says of all. Each allows what
is valid by its standard and, of that, what is in use: no leap second, no year before 1000."""

# The engine's own have all of Unicode's digits and letters.
_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_CLASS = re.compile(r"\\.", re.DOTALL)

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_MAPS = frozenset(("properties", "patternProperties"))
_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_SCHEMAS = frozenset(("items", "additionalProperties"))
# Each constrains, unless it has one of these values, and none can be enforced token by token with what we have.
_UNSUPPORTED: dict[str, tuple[Json, ...]] = {
    "not": (),
    "if": (),
    "contains": (),
    "minContains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "additionalItems": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}


class Budget:
    """How much of schemas a request may bring, in all its documents together. Owned by who checks that request."""

    def __init__(self, at: str):
        """at: the path that is named when there is too much."""
        self._bytes_left = MAX_BYTES
        self._left: float = MAX_NODES
        self._at = at

    def take_bytes(self, num: int) -> None:
        """Raise InvalidRequest when there is not so much left, of bytes."""
        self._bytes_left -= num
        if self._bytes_left < 0:
            raise InvalidRequest(f"`{self._at}`: schemas are too large; the limit is {MAX_BYTES} bytes.", self._at)

    def take(self, num: float = 1) -> None:
        """Likewise, of parts."""
        self._left -= num
        if self._left < 0:
            raise InvalidRequest(f"`{self._at}`: schemas are too large; the limit is {MAX_NODES} parts.", self._at)


class Document:
    """One JSON Schema document of a request."""

    def __init__(self, root: Json, at: str, budget: Budget):
        """at: the path of root in the request. Raises InvalidRequest."""
        budget.take_bytes(len(msgspec.json.encode(root)))
        self._root = root
        self._at = at
        self._budget = budget

    def closed(self, schema: Json, at: str) -> Json:
        """A schema of this document, `at` a path of the request, on its own. Raises InvalidRequest."""
        refs: dict[str, str] = {}  # as the document has them -> as the result does
        one_ofs: list[tuple[list[Json], str]] = []
        out = self._clean(schema, at, refs, one_ofs)
        defs: dict[str, Json] = {}
        while len(defs) < len(refs):  # what they stand for may have more
            ref = next(itertools.islice(refs, len(defs), None))
            defs[name_of(refs[ref])] = self._clean(*self.target(ref, at), refs, one_ofs)
        exclusion = _Exclusion(defs, self._budget)
        for branches, path in one_ofs:
            _check_one_of(branches, path, exclusion)
        if not _has_value(out, defs):
            raise InvalidRequest(f"`{at}`: no finite value satisfies this schema.", at)
        return with_defs(out, defs)

    def target(self, ref: Json, at: str) -> tuple[Json, str]:
        """What a reference in the schema `at` stands for, and its path. Raises InvalidRequest."""
        node, path = self._root, self._at
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise InvalidRequest(f"`{at}.$ref` must be a reference into the same schema.", f"{at}.$ref")
        for part in filter(None, ref[1:].split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node, path = node[key], f"{path}.{key}"
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node, path = node[int(key)], f"{path}[{int(key)}]"
            else:
                raise InvalidRequest(f"`{at}.$ref` points nowhere.", f"{at}.$ref")
        return node, path

    def _clean(
        self, schema: Json, at: str, refs: dict[str, str], one_ofs: list[tuple[list[Json], str]], depth: int = 0
    ) -> Json:
        """The schema without what constrains nothing. A oneOf becomes an anyOf, and it is in one_ofs to be checked."""
        self._budget.take()
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"`{self._at}` is nested too deeply; the limit is {MAX_DEPTH} levels.", self._at)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidRequest(f"`{at}` must be a schema: an object, or true or false.", at)
        out: dict[str, Json] = {}
        for key, value in schema.items():
            path = f"{at}.{key}"
            if key in _MAPS:
                if not isinstance(value, dict):
                    raise InvalidRequest(f"`{path}` must be an object.", path)
                out[key] = {
                    _ascii(name) if key == "patternProperties" else name: self._clean(
                        sub, f"{path}.{name}", refs, one_ofs, depth + 1
                    )
                    for name, sub in value.items()
                }
            elif key in _LISTS:
                if not isinstance(value, list) or not value:
                    raise InvalidRequest(f"`{path}` must be a list that is not empty.", path)
                branches = [self._clean(sub, f"{path}[{i}]", refs, one_ofs, depth + 1) for i, sub in enumerate(value)]
                _add_branches(out, key, branches)
                if key == "oneOf":
                    one_ofs.append((branches, path))
            elif key in _SCHEMAS:
                out[key] = self._clean(value, path, refs, one_ofs, depth + 1)
            elif key == "$ref":
                self.target(value, at)
                out[key] = refs.setdefault(value, f"#/$defs/{len(refs)}")
            elif key in _UNSUPPORTED:
                if value not in _UNSUPPORTED[key]:
                    raise InvalidRequest(f"`{path}`: the keyword `{key}` cannot be enforced.", path)
            elif key == "format":
                if isinstance(value, str) and value in FORMATS:
                    _add_pattern(out, f"^({FORMATS[value]})$")
            elif key == "pattern":
                if not isinstance(value, str):
                    raise InvalidRequest(f"`{path}` must be a string.", path)
                _add_pattern(out, _ascii(value))
            elif _is_kept(key, value, path):
                out[key] = list(dict.fromkeys(value)) if key == "required" else value
                if isinstance(value, list) and key != "const":
                    self._budget.take(len(value) if key == "enum" else len(value) / 8)
        _check_properties(out, at)
        return out


def with_defs(schema: Json, defs: Mapping[str, Json]) -> Json:
    """A part of a closed schema on its own: with what its references stand for, and theirs."""
    found: dict[str, Json] = {}
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            ref = node.get("$ref")
            if isinstance(ref, str) and (name := name_of(ref)) in defs and name not in found:
                found[name] = defs[name]
                left.append(defs[name])
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)
    return schema | {"$defs": found} if found else schema


def followed(schema: Json, defs: Mapping[str, Json]) -> Json:
    """What a schema that is a reference and nothing else leads to. One that has no end stays what it is."""
    for _ in defs:
        if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
            break
        schema = defs[name_of(schema["$ref"])]
    return schema


def name_of(ref: str) -> str:
    """That of the definition which a reference of a closed schema stands for."""
    return ref.rpartition("/")[2]


def types_of(schema: Mapping[str, Json]) -> frozenset[str]:
    """The types that a schema's own keywords leave."""
    if "const" in schema:
        return frozenset((type_of(schema["const"]),))
    if "enum" in schema:
        return frozenset(map(type_of, schema["enum"]))
    return types_said(schema)


def types_said(schema: Mapping[str, Json]) -> frozenset[str]:
    """Those of its `type`; where it has none, all."""
    said = schema.get("type", TYPES)
    return frozenset([said] if isinstance(said, str) else said)


def type_of(value: Json) -> str:
    """A value's, by its name in JSON Schema."""
    kinds = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _is_kept(key: str, value: Json, path: str) -> bool:
    """Whether a keyword whose value is no schema constrains. Raises InvalidRequest for a value it cannot have."""
    if key in _COUNTS:
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
    elif key in _NUMBERS:
        good = isinstance(value, int | float) and not isinstance(value, bool) and (key != "multipleOf" or value > 0)
    elif key == "type":
        kinds = [value] if isinstance(value, str) else value
        good = isinstance(kinds, list) and bool(kinds) and all(kind in TYPES for kind in kinds)
    elif key == "required":
        good = isinstance(value, list) and all(isinstance(name, str) for name in value)
    elif key == "enum":
        good = isinstance(value, list) and bool(value)
    else:
        return key == "const"
    if not good:
        raise InvalidRequest(f"`{path}` has a value that {key} cannot have.", path)
    return True


def _ascii(pattern: str) -> str:
    """A pattern in which classes of characters are those of ECMAScript, by which JSON Schema goes."""
    return _CLASS.sub(lambda found: _ASCII.get(found[0], found[0]), pattern)


def _add_branches(out: dict[str, Json], key: str, branches: list[Json]) -> None:
    key = "anyOf" if key == "oneOf" else key
    if key == "anyOf" and key in out:  # a oneOf beside an anyOf
        out.setdefault("allOf", []).append({key: branches})
    elif key == "allOf":
        out.setdefault(key, []).extend(branches)
    else:
        out[key] = branches


def _add_pattern(out: dict[str, Json], pattern: str) -> None:
    if "pattern" in out:  # a format beside a pattern
        out.setdefault("allOf", []).append({"pattern": pattern})
    else:
        out["pattern"] = pattern


def _check_properties(schema: dict[str, Json], at: str) -> None:
    """How many properties there are can be enforced only where each has a name: others may come twice."""
    least = schema.get("minProperties", 0)
    if least > max(1, len(set(schema.get("required", ())))):
        raise InvalidRequest(
            f"`{at}.minProperties`: more than 1 cannot be enforced beyond what is required.", f"{at}.minProperties"
        )
    if least > 1:
        del schema["minProperties"]


def _check_one_of(branches: list[Json], path: str, exclusion: "_Exclusion") -> None:
    """oneOf is anyOf where no value satisfies two branches; where that is not plain it cannot be enforced."""
    if not all(exclusion.is_plain(a, b) for a, b in itertools.combinations(branches, 2)):
        raise InvalidRequest(
            f"`{path}`: its branches must exclude each other by their type, or by a required property with another "
            "const or enum in each; anyOf has no such need.",
            path,
        )


@dataclass(frozen=True, slots=True)
class _Facts:
    """By what a schema may exclude another."""

    types: frozenset[str]  # an integer is a number
    values: frozenset[Any] | None  # of its const or enum, as something that can be compared; None: it has neither
    required: dict[str, Json]  # the schemas of properties that all of its values have: those that may tell most first


_SAYS = ("const", "enum")


class _Exclusion:
    """Which schemas of a closed document exclude each other. Each is looked through once, each comparison counts."""

    def __init__(self, defs: Mapping[str, Json], budget: Budget):
        self._defs = defs
        self._budget = budget
        self._facts: dict[int, _Facts] = {}  # by the id() of a schema, which its document keeps

    def is_plain(self, a: Json, b: Json, depth: int = 0) -> bool:
        """Whether it is plain that no value satisfies both."""
        of_a, of_b = self._facts_of(a), self._facts_of(b)
        self._budget.take(1 / 8)
        if not of_a.types & of_b.types:
            return True
        if of_a.values is not None and of_b.values is not None:
            self._budget.take(min(len(of_a.values), len(of_b.values)) / 64)
            return of_a.values.isdisjoint(of_b.values)
        if depth == 2:
            return False
        few, more = of_a.required, of_b.required
        if len(few) > len(more):
            few, more = more, few
        self._budget.take(len(few) / 64)
        return any(self.is_plain(schema, more[name], depth + 1) for name, schema in few.items() if name in more)

    def _facts_of(self, schema: Json) -> _Facts:
        if (facts := self._facts.get(id(schema))) is None:
            end = followed(schema, self._defs)
            if end is not schema:
                self._budget.take(len(self._defs) / 64)
            facts = self._facts.get(id(end)) or _facts(end)
            self._facts[id(schema)] = self._facts[id(end)] = facts
        return facts


def _facts(schema: Json) -> _Facts:
    if not isinstance(schema, dict):
        return _Facts(frozenset(TYPES if schema else ()), None, {})
    types = frozenset("number" if kind == "integer" else kind for kind in types_of(schema))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    comparable = None
    if values is not None:
        comparable = frozenset(
            value if isinstance(value, int | float) and not isinstance(value, bool) else msgspec.json.encode(value)
            for value in values
        )
    properties = schema.get("properties", {}) if types == {"object"} else {}
    names = [name for name in schema.get("required", ()) if name in properties]
    names.sort(key=lambda name: not isinstance(properties[name], dict) or properties[name].keys().isdisjoint(_SAYS))
    return _Facts(types, comparable, {name: properties[name] for name in names})


def _has_value(schema: Json, defs: Mapping[str, Json]) -> bool:
    """Whether a finite value can satisfy a closed schema, as far as its recursion goes."""
    finite: set[str] = set()
    for _ in range(MAX_ROUNDS):
        before = len(finite)
        # What was found last comes first: a reference is found before those in what it stands for.
        finite.update(name for name in reversed(list(defs)) if name not in finite and _is_finite(defs[name], finite))
        if len(finite) == before:
            break
    return _is_finite(schema, finite)


def _is_finite(schema: Json, finite: set[str]) -> bool:
    """Whether a schema has a finite value, given the definitions that are known to have one."""
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema and name_of(schema["$ref"]) not in finite:
        return False
    if not all(_is_finite(sub, finite) for sub in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_is_finite(sub, finite) for sub in schema["anyOf"]):
        return False
    types = types_of(schema)
    if types == {"object"}:
        properties = schema.get("properties", {})
        return all(_is_finite(properties.get(name, True), finite) for name in schema.get("required", ()))
    if types == {"array"} and (least := schema.get("minItems", 0)):
        first = schema.get("prefixItems", [])[:least]
        rest = [schema.get("items", True)] if least > len(first) else []
        return all(_is_finite(sub, finite) for sub in [*first, *rest])
    return True
