"""Forms that outputs are held to: JSON schemas and sets of tools, as clients have them. [R35]"""

import random
from typing import Any

Json = Any

SCHEMA_WORDS = [
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "minProperties",
    "maxProperties", "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "multipleOf", "anyOf", "oneOf", "allOf",
    "not", "if", "$ref", "$defs", "definitions", "title", "default",
]  # fmt: skip


def obj(required: str = "", **properties: Json) -> dict[str, Json]:
    """An object's schema; required: names, separated by blanks."""
    return {"type": "object", "properties": properties, "required": required.split()}


def closed(required: str = "", **properties: Json) -> dict[str, Json]:
    return obj(required, **properties) | {"additionalProperties": False}


def ref(name: str) -> dict[str, Json]:
    return {"$ref": f"#/$defs/{name}"}


def arr(items: Json, **more: Json) -> dict[str, Json]:
    return {"type": "array", "items": items, **more}


def any_of(*branches: Json) -> dict[str, Json]:
    return {"anyOf": list(branches)}


STR: Json = {"type": "string"}
SHORT: Json = {"type": "string", "maxLength": 12}
INT: Json = {"type": "integer"}
NUM: Json = {"type": "number"}
BOOL: Json = {"type": "boolean"}
NULL: Json = {"type": "null"}
SMALL: Json = {"type": "integer", "minimum": 0, "maximum": 99}
RGB: Json = {"enum": ["red", "green", "blue"]}

SCHEMAS: dict[str, Json] = {
    # Values by themselves.
    "integer": INT,
    "integer with bounds": {"type": "integer", "minimum": -3, "maximum": 1200},
    "integer above": {"type": "integer", "exclusiveMinimum": 9},
    "integer of steps": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "number": NUM,
    "number with bounds": {"type": "number", "minimum": -0.5, "exclusiveMaximum": 2},
    "number of no width": {"type": "number", "minimum": 3, "maximum": 3},
    "boolean": BOOL,
    "null": NULL,
    "string": STR,
    "string with lengths": {"type": "string", "minLength": 3, "maxLength": 8},
    "string of a pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "string with a pattern in it": {"type": "string", "pattern": "b[cd]", "maxLength": 40},
    "string beyond ASCII": {"type": "string", "pattern": "^[äöü日本語]{1,4}$"},
    "string of classes": {"type": "string", "pattern": "^\\d\\w[\\d.]\\s\\S$"},
    "formats of time": closed(
        "date time moment span",
        date={"type": "string", "format": "date"},
        time={"type": "string", "format": "time"},
        moment={"type": "string", "format": "date-time"},
        span={"type": "string", "format": "duration"},
    ),
    "formats of the net": closed(
        "v4 v6 host mail",
        v4={"type": "string", "format": "ipv4"},
        v6={"type": "string", "format": "ipv6"},
        host={"type": "string", "format": "hostname"},
        mail={"type": "string", "format": "email"},
    ),
    "uuid": {"type": "string", "format": "uuid"},
    "uri": {"type": "string", "format": "uri"},
    "a format that is an annotation": {"type": "string", "format": "password", "maxLength": 9},
    "enum": RGB,
    "enum of kinds": {"enum": ["a", 1, 1.5, None, True, [1, {"b": []}], {"c": "d"}]},
    "enum of odd texts": {"enum": ['say "hi"', "back\\slash", "line\nbreak", "日本語", "😀", "", "</tool_call>"]},
    "const": {"const": {"version": 2, "tags": ["x", None]}},
    "types": {"type": ["integer", "null", "boolean"]},
    # Objects.
    "person": closed("name age", name=SHORT, age=SMALL, email={"type": "string", "format": "email"}),
    "optional only": closed(a=INT, b=BOOL, c=NULL),
    "nested": closed("a", a=closed("b", b=closed("c", c=closed("d", d=arr(closed("e", e=BOOL), maxItems=3))))),
    "open": obj("id", id=INT),
    "map": {"type": "object", "additionalProperties": SMALL},
    "map of maps": {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": BOOL}},
    "named patterns": {
        "type": "object", "patternProperties": {"^n_": INT, "^s_": SHORT}, "additionalProperties": False,
    },
    "at least one": {"type": "object", "additionalProperties": BOOL, "minProperties": 1},
    "empty": {"type": "object", "additionalProperties": False},
    "required but not described": {"type": "object", "required": ["x", "y"], "additionalProperties": BOOL},
    "unicode keys": closed("名前 größe", 名前=SHORT, größe=NUM, **{"emoji 😀": BOOL}),
    "odd keys": {
        "type": "object",
        "properties": dict.fromkeys(['with "quotes"', "back\\slash", "new\nline", "", "$ref", "a.b/c~d"], INT),
        "required": ['with "quotes"', "back\\slash", "new\nline", "", "$ref", "a.b/c~d"],
        "additionalProperties": False,
    },
    "annotated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/annotated.json",
        "title": "Annotated",
        "description": "What clients add, and JSON Schema lets them.",
        "type": "object",
        "properties": {"a": {"type": "integer", "title": "A", "default": 3, "examples": [1], "deprecated": True}},
        "required": ["a"],
        "additionalProperties": False,
        "x-order": ["a"],
    },
    # Arrays.
    "list": arr(SMALL),
    "list of bounded length": arr(BOOL, minItems=2, maxItems=4),
    "tuple": {"type": "array", "prefixItems": [SHORT, INT, BOOL], "items": False, "minItems": 3},
    "tuple and more": {"type": "array", "prefixItems": [RGB], "items": SMALL, "minItems": 2, "maxItems": 6},
    "matrix": arr(arr({"type": "integer", "minimum": 0, "maximum": 9}, minItems=2, maxItems=2), minItems=2, maxItems=2),
    "list of unions": arr(any_of(INT, SHORT, NULL), maxItems=5),
    # Unions.
    "nullable": closed("a", a=any_of(SHORT, NULL)),
    "either": any_of(closed("cat", cat=SHORT), closed("dog", dog=INT)),
    "one of types": {"oneOf": [INT, SHORT, arr(INT, maxItems=2)]},
    "one of tagged": {
        "oneOf": [ref("circle"), ref("box")],
        "discriminator": {"propertyName": "kind", "mapping": {"circle": "#/$defs/circle", "box": "#/$defs/box"}},
        "$defs": {
            "circle": closed("kind r", kind={"const": "circle"}, r=NUM),
            "box": closed("kind w h", kind={"const": "box"}, w=NUM, h=NUM),
        },
    },
    "nested tags": {
        "oneOf": [
            closed("t v", t={"const": "leaf"}, v=SMALL),
            closed("t of", t={"const": "node"}, of={"oneOf": [closed("t", t={"const": c}) for c in "abc"]}),
        ]
    },
    "union in a union": any_of(any_of(INT, BOOL), any_of(NULL, arr(any_of(INT, NULL), maxItems=2))),
    "all of": {"allOf": [obj("a", a=SMALL), obj("b", b=BOOL)], "type": "object", "maxProperties": 2},
    "all of a reference and more": {
        "allOf": [ref("base"), obj("extra", extra=BOOL)],
        "$defs": {"base": obj("id", id=SMALL)},
    },
    "bounds on both sides of a reference": {
        "$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": {"type": "integer", "minimum": 1}},
    },
    # References and recursion.
    "definitions": {
        "type": "object", "properties": {"a": {"$ref": "#/definitions/x"}, "b": {"$ref": "#/definitions/x"}},
        "required": ["a", "b"], "additionalProperties": False, "definitions": {"x": RGB},
    },
    "reference into properties": closed("a b", a=closed("x", x=SMALL), b={"$ref": "#/properties/a"}),
    "reference with escapes": {
        "type": "array", "items": {"$ref": "#/$defs/a~1b~0c"}, "maxItems": 3, "$defs": {"a/b~c": BOOL},
    },
    "linked list": {
        "$ref": "#/$defs/node",
        "$defs": {"node": closed("value next", value=SMALL, next=any_of(ref("node"), NULL))},
    },
    "tree from its root": closed("v", v=SMALL, children=arr({"$ref": "#"}, maxItems=2)),
    "mutual recursion": {
        "$ref": "#/$defs/even",
        "$defs": {"even": closed(odd=ref("odd")), "odd": closed("even", even=any_of(NULL, ref("even")))},
    },
    "any JSON": {
        "$ref": "#/$defs/json",
        "$defs": {
            "json": any_of(
                NULL, BOOL, SMALL, SHORT, arr(ref("json"), maxItems=2),
                {"type": "object", "additionalProperties": ref("json")},
            )
        },
    },
    "expression": {
        "$ref": "#/$defs/e",
        "$defs": {
            "e": {
                "oneOf": [
                    closed("op left right", op={"enum": ["+", "*"]}, left=ref("e"), right=ref("e")),
                    closed("op of", op={"const": "-"}, of=ref("e")),
                    SMALL,
                ]
            }
        },
    },
    # As applications have them.
    "anything": {},
    "sentiment": closed(
        "sentiment confidence",
        sentiment={"type": "string", "enum": ["positive", "negative", "neutral"]},
        confidence={"type": "number", "minimum": 0, "maximum": 1},
    ),
    "invoice": closed(
        "number lines total currency",
        number={"type": "string", "pattern": "^INV-\\d{6}$"},
        lines=arr(closed("text quantity price", text=SHORT, quantity=SMALL, price=NUM), minItems=1, maxItems=4),
        total=NUM,
        currency={"enum": ["EUR", "USD", "JPY"]},
        paid=any_of({"type": "string", "format": "date"}, NULL),
    ),
    "steps of an agent": closed(
        "thought actions",
        thought=SHORT,
        actions=arr(
            {
                "oneOf": [
                    closed("type path", type={"const": "read"}, path=SHORT),
                    closed("type path text", type={"const": "write"}, path=SHORT, text=SHORT),
                    closed("type", type={"const": "done"}),
                ]
            },
            minItems=1,
            maxItems=3,
        ),
    ),
    "geojson": closed(
        "type geometry properties",
        type={"const": "Feature"},
        geometry={
            "oneOf": [
                closed("type coordinates", type={"const": "Point"}, coordinates=arr(NUM, minItems=2, maxItems=2)),
                closed(
                    "type coordinates",
                    type={"const": "LineString"},
                    coordinates=arr(arr(NUM, minItems=2, maxItems=2), minItems=2, maxItems=3),
                ),
            ]
        },
        properties=any_of({"type": "object", "additionalProperties": SHORT}, NULL),
    ),
    "what pydantic says of models": {
        "$defs": {
            "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"},
            "Part": {
                "properties": {
                    "id": {"format": "uuid", "title": "Id", "type": "string"},
                    "color": {"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"},
                    "sizes": {
                        "maxItems": 2, "minItems": 2, "prefixItems": [{"type": "integer"}, {"type": "number"}],
                        "title": "Sizes", "type": "array",
                    },
                },
                "required": ["id", "sizes"],
                "title": "Part",
                "type": "object",
            },
        },
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 10},
            "parts": {"items": {"$ref": "#/$defs/Part"}, "title": "Parts", "type": "array", "maxItems": 2},
            "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}], "default": None, "title": "Note"},
        },
        "required": ["name", "parts"],
        "title": "Machine",
        "type": "object",
        "additionalProperties": False,
    },
}  # fmt: skip


def tool(name: str, parameters: Json = None, **more: Json) -> dict[str, Json]:
    """A tool as a chat has it."""
    shown = {"parameters": parameters} if parameters is not None else {}
    return {"type": "function", "function": {"name": name, **shown, **more}}


CITY = closed("city", city=SHORT, days={"type": "integer", "minimum": 1, "maximum": 14}, units={"enum": ["c", "f"]})
PATH = {"type": "string", "pattern": "^(/[a-z0-9_]{1,8}){1,3}$"}

TOOL_SETS: dict[str, list[dict[str, Json]]] = {
    "no parameters": [tool("ping")],
    "empty parameters": [tool("ping", {}), tool("pong", {"type": "object", "properties": {}})],
    "one string": [tool("say", closed("text", text=STR))],
    "weather": [tool("get_weather", CITY), tool("get_time", closed("zone", zone={"enum": ["UTC", "CET"]}))],
    "names within names": [tool("get", closed("a", a=INT)), tool("get_all"), tool("get_all_of", closed("b", b=BOOL))],
    "odd names": [tool("mcp__server-1.tool:x/y", closed("a", a=BOOL)), tool("查询", closed("城市", 城市=SHORT))],
    "kinds": [
        tool(
            "kinds",
            closed(
                "s i n b z o a", s=SHORT, i=INT, n=NUM, b=BOOL, z=NULL,
                o=closed("k", k=SHORT), a=arr(SHORT, maxItems=2),
            ),
        )
    ],
    "optional only": [tool("list", closed(path=PATH, depth=SMALL, hidden=BOOL))],
    "strings of forms": [
        tool(
            "book",
            closed(
                "code day at mail id",
                code={"type": "string", "pattern": "^[A-Z]{3}[0-9]{2}$"},
                day={"type": "string", "format": "date"},
                at={"type": "string", "format": "date-time"},
                mail={"type": "string", "format": "email"},
                id={"type": "string", "format": "uuid"},
                short={"type": "string", "minLength": 2, "maxLength": 4},
            ),
        )
    ],
    "strings of the net": [
        tool(
            "connect",
            closed(
                "v4 v6 host uri",
                v4={"type": "string", "format": "ipv4"},
                v6={"type": "string", "format": "ipv6"},
                host={"type": "string", "format": "hostname"},
                uri={"type": "string", "format": "uri"},
                span={"type": "string", "format": "duration"},
                time={"type": "string", "format": "time"},
            ),
        )
    ],
    "enums": [
        tool(
            "set",
            closed(
                "color level mixed",
                color=RGB, level={"enum": [1, 2, 3]}, mixed={"enum": ["auto", "5", 5, None, True]},
            ),
        )
    ],
    "consts": [tool("act", closed("verb n", verb={"const": "stop now"}, n={"const": 7}, deep={"const": {"a": [1]}}))],
    "strings or something else": [
        tool(
            "find",
            closed(
                "q limit where",
                q={"type": ["string", "null"], "maxLength": 12},
                limit=any_of(SMALL, {"enum": ["all"]}),
                where=any_of(SHORT, arr(SMALL, maxItems=2), closed("k", k=BOOL)),
                flag=any_of(BOOL, SHORT),
            ),
        )
    ],
    "anything": [tool("store", closed("key value", key=SHORT, value={}, more=True))],
    "free arguments": [
        tool("env", {"type": "object", "additionalProperties": SHORT}),
        tool("counts", {"type": "object", "properties": {"total": INT}, "additionalProperties": SMALL}),
    ],
    "references": [
        tool(
            "draw",
            closed("shape", shape=ref("shape"), color=ref("color"))
            | {
                "$defs": {
                    "color": RGB,
                    "shape": {"oneOf": [
                        closed("t r", t={"const": "circle"}, r=SMALL), closed("t w", t={"const": "square"}, w=SMALL),
                    ]},
                }
            },
        )
    ],
    "recursion": [
        tool(
            "filter",
            closed("where", where=ref("expr"))
            | {"$defs": {"expr": any_of(closed("eq", eq=SMALL), closed("not", **{"not": ref("expr")}))}},
        )
    ],
    "all from a reference": [
        tool("start", {"$ref": "#/$defs/args", "$defs": {"args": closed("n", n=SMALL, label=SHORT)}})
    ],
    "typeless": [
        tool(
            "limit",
            closed("max name", max={"maximum": 10}, name={"maxLength": 6}, both={"minLength": 1, "minimum": 0}),
        )
    ],
    "an editor's": [
        tool("read", closed("path", path=PATH, offset=SMALL, limit=SMALL)),
        tool("write", closed("path content", path=PATH, content=STR)),
        tool(
            "edit",
            closed(
                "path edits", path=PATH,
                edits=arr(closed("old new", old=SHORT, new=SHORT, all=BOOL), minItems=1, maxItems=2),
            ),
        ),
        tool("shell", closed("command", command=STR, timeout={"type": "integer", "minimum": 1, "maximum": 600})),
    ],
    "many": [tool(f"tool_{i}", closed("a", a=SMALL, **{f"b{i}": SHORT})) for i in range(40)],
}  # fmt: skip


def random_schema(rng: random.Random, depth: int = 3, refs: tuple[str, ...] = ()) -> dict[str, Json]:
    """A schema of the keywords that are served; refs: names in $defs. Nothing may satisfy it."""
    kinds = ["integer", "number", "string", "enum", "const", *(["$ref"] if refs else [])]
    kinds += ["array", "object", "object", "anyOf", "oneOf", "allOf"] if depth else []
    match rng.choice(kinds):
        case "integer":
            bound, step = rng.randint(-50, 50), rng.choice([{}, {}, {"multipleOf": rng.choice([2, 3, 10])}])
            return rng.choice([INT, {"type": "integer", "minimum": bound, "exclusiveMaximum": bound + 200, **step}])
        case "number":
            return rng.choice([NUM, {"type": "number", "exclusiveMinimum": -1.5, "maximum": rng.choice([0, 10.5])}])
        case "string":
            more = {"format": rng.choice(["date", "uuid", "ipv4", "email", "binary"])}
            if rng.random() < 0.7:
                more = {"minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 8)}
                more |= rng.choice([{}, {"pattern": rng.choice(["^a", "b$", "\\d", "^x*$", "^(a|b)+$"])}])
            return {"type": "string", **more}
        case "enum":
            values = ["a", "b c", 1, 2.5, None, True, "true", "7", [1], {"x": 1}, "", "</think>"]
            more = rng.choice([{}, {}, {"type": rng.choice(["string", "integer", ["string", "null"]])}])
            return {"enum": rng.sample(values, rng.randint(1, 4)), **more}
        case "const":
            return {"const": rng.choice(["q", 3, None, [1, "z"], False, "null"])}
        case "$ref":
            return ref(rng.choice(refs))
        case "array":
            first = rng.choice([{}, {"prefixItems": [random_schema(rng, depth - 1, refs)]}])
            items = random_schema(rng, depth - 1, refs)
            return arr(items, minItems=rng.randint(0, 2), maxItems=rng.randint(2, 3), **first)
        case "object":
            names = rng.sample(["a", "b", "c", "long name", "ü", "$ref"], rng.randint(0, 4))
            others = rng.choice([{}, {"additionalProperties": rng.choice([False, random_schema(rng, 0, refs)])}])
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1, refs) for name in names},
                "required": [name for name in names if rng.random() < 0.5],
            } | others
        case word:
            branches = [random_schema(rng, depth - 1, refs) for _ in range(rng.randint(1, 2 + (word != "allOf")))]
            more = rng.choice([{}, {}, {"type": rng.choice(["string", "integer", ["object", "null"]])}])
            return {word: branches, **more}
