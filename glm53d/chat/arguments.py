"""Arguments of a tool call: the raw text that the model writes, as the JSON that its tool's schema asks for.

In the model's format a string stands as it is and everything else as JSON, so only the schema tells "12" from 12.
Schemas come from clients and may be anything; what makes no sense in one counts as absent.
"""

import json
import re
from collections.abc import Mapping
from typing import NoReturn

from glm53d.chat.conversation import Json

Kinds = frozenset[str]
"""The JSON types that a schema allows, by their names in JSON Schema; empty: it does not say."""

STRING: Kinds = frozenset(("string",))
"""Text that is sent as it is, and so can be sent before its end has come."""

encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
"""JSON text as it is sent: ", " and ": " between, nothing escaped but what JSON demands."""

LOOSE_INTEGER = re.compile("[+-]?[0-9]{1,1000}")
"""What an argument that must be an integer means by it, though JSON has no such signs and zeros."""

_KIND = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class ArgumentKinds:
    """What the schema of one tool's parameters says of each argument."""

    def __init__(self, parameters: Json):
        self._root = parameters
        self._known: dict[str, Kinds] = {}

    def of(self, key: str) -> Kinds:
        """The types that the argument may have. Looked up once per key, in time linear in its schema."""
        if key not in self._known:
            whole = _resolved(self._root, self._root)
            properties, others = whole.get("properties"), whole.get("additionalProperties")
            schema = properties.get(key, others) if isinstance(properties, dict) else others
            self._known[key] = _kinds(schema, self._root)
        return self._known[key]


def to_json(text: str, kinds: Kinds) -> str:
    """The JSON text of an argument: the first type that fits, with string last. Never NaN or Infinity.

    What fits none of its types is JSON if it is valid and no string, else a string.
    """
    if kinds == STRING:
        return encode(text)
    bare = text.strip().lower()
    if "null" in kinds and bare == "null":
        return bare
    kind, sent = _parsed(text)
    if kind == "integer" and kind in kinds:
        return sent
    if "integer" in kinds and "string" not in kinds and LOOSE_INTEGER.fullmatch(text.strip()):
        return str(int(text))
    if "number" in kinds and kind in ("integer", "number"):
        return sent
    if "boolean" in kinds and bare in ("true", "false"):
        return bare
    if kind in ("object", "array") and kind in kinds:
        return sent
    return encode(text) if "string" in kinds or kind == "string" else sent


def last_of_each_key(arguments: str) -> str:
    """The text of a JSON object in which keys may be repeated, without the ones that do not count."""
    return _parsed(arguments)[1]


def _parsed(text: str) -> tuple[str, str]:
    """The type of a JSON text and how it is sent; what is not valid JSON is sent as the string it is."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        sent = encode(value)  # a number too large for a double has become infinite: refused
        sent.encode()  # half a surrogate pair, which JSON can spell, is no text
    except (ValueError, RecursionError):
        return "string", encode(text)
    return _KIND[type(value)], sent


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _kinds(schema: Json, root: Json) -> Kinds:
    """All types that a schema names, also through its branches and references. Each reference is followed once."""
    found: set[str] = set()
    seen: set[str] = set()
    left = [schema]
    while left:
        schema = left.pop()
        if not isinstance(schema, dict):
            continue
        ref = schema.get("$ref")
        if isinstance(ref, str):
            if ref not in seen:
                seen.add(ref)
                left.append(_target(ref, root))
            continue
        declared = schema.get("type")
        found.update(kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str))
        values = schema.get("enum")
        found.update(_KIND[type(value)] for value in (values if isinstance(values, list) else []))
        if "const" in schema:
            found.add(_KIND[type(schema["const"])])
        for word in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(word)
            left.extend(branches if isinstance(branches, list) else [])
    return frozenset(found)


def _resolved(schema: Json, root: Json) -> Mapping[str, Json]:
    """The schema that a chain of references leads to; empty for one that leads nowhere."""
    seen: set[str] = set()
    while isinstance(schema, dict) and isinstance(ref := schema.get("$ref"), str) and ref not in seen:
        seen.add(ref)
        schema = _target(ref, root)
    return schema if isinstance(schema, dict) else {}


def _target(ref: str, root: Json) -> Json:
    """What a reference into the same schema, as #/$defs/x, stands for; None when there is no such thing."""
    if not ref.startswith("#"):
        return None
    node = root
    for part in ref[1:].split("/"):
        if part:
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node
