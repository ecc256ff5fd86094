"""The raw text of an argument as the JSON that its schema asks for, whatever the schema looks like."""

import json
import time

import pytest

from glm53d.chat.arguments import STRING, ArgumentKinds, last_of_each_key, to_json

DEEP = "[" * 100_000 + "]" * 100_000


def kinds(schema, **root) -> set[str]:
    return set(ArgumentKinds({"properties": {"k": schema}} | root).of("k"))


@pytest.mark.parametrize(
    ("schema", "text", "sent"),
    [
        ({"type": "string"}, '{"a": 1}', '"{\\"a\\": 1}"'),  # F-E4
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, "\n\t\x01\x7f\\\u2028é", '"\\n\\t\\u0001\x7f\\\\\u2028é"'),
        ({"type": "integer"}, " 5\n", "5"),  # F-E5
        ({"type": "integer"}, "+5", "5"),
        ({"type": "integer"}, "-007", "-7"),
        ({"type": "integer"}, "1_000", '"1_000"'),
        ({"type": "integer"}, "٣", '"٣"'),
        ({"type": ["integer", "string"]}, "-7", "-7"),
        ({"type": ["integer", "string"]}, "007", '"007"'),
        ({"type": ["integer", "string"]}, "+5", '"+5"'),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, '"5"', '"\\"5\\""'),
        ({"type": "integer"}, "9" * 5000, json.dumps("9" * 5000)),
        ({"type": "number"}, "1.0", "1.0"),
        ({"type": "number"}, "-0", "0"),
        ({"type": "number"}, "1e999", '"1e999"'),  # no Infinity
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "-Infinity", '"-Infinity"'),
        ({"type": "boolean"}, " TRUE", "true"),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "Null", "null"),
        ({"type": "object"}, '{"k":1,"k":2}', '{"k": 2}'),
        ({"type": "object"}, '{"k": NaN}', '"{\\"k\\": NaN}"'),
        ({"type": "object"}, '{"k": "\\ud800"}', '"{\\"k\\": \\"\\\\ud800\\"}"'),  # half a surrogate pair
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "array"}, DEEP, json.dumps(DEEP)),
        ({"type": ["string", "null"]}, "null", "null"),  # F-E3
        ({"type": ["string", "null"]}, "None", '"None"'),
        ({"type": ["string", "object"]}, '{"a":1}', '{"a": 1}'),
        ({"anyOf": [{"type": "boolean"}, {"type": "integer"}]}, "1", "1"),
        ({"type": ["integer", "number"]}, "1.5", "1.5"),
        ({"enum": ["a", 1, None, True]}, "true", "true"),
        ({"enum": ["a", 1, None, True]}, "b", '"b"'),
        ({"const": 1.5}, "1.5", "1.5"),
        ({"type": "made up"}, "5", "5"),
        ({"type": "made up"}, "five", '"five"'),
        ({}, "123", "123"),  # F-E2
        ({}, '"x"', '"\\"x\\""'),
        ({}, "", '""'),
        (None, "[1,2]", "[1, 2]"),
        (True, "x", '"x"'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_schema_decides(schema, text, sent):
    assert to_json(text, ArgumentKinds({"properties": {"k": schema}}).of("k")) == sent
    json.loads(sent, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$ref": "#/$defs/s"}, {"string"}),
        ({"$ref": "#/$defs/a~1b~0c"}, {"integer"}),
        ({"anyOf": [{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/s"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"allOf": [{"type": "array"}]}, 5, None]}, {"array"}),
        ({"$ref": "#/$defs/self"}, set()),
        ({"$ref": "#/$defs/none"}, set()),
        ({"$ref": "#/$defs/s/type/x"}, set()),
        ({"$ref": "https://example.org/s"}, set()),
        ({"$ref": 5, "type": "string"}, {"string"}),
        ({"type": [5, "string"], "enum": 5, "anyOf": {}}, {"string"}),
    ],
)
def test_references_and_nonsense_in_schemas(schema, expected):
    defs = {"s": {"type": "string"}, "a/b~c": {"type": "integer"}, "self": {"anyOf": [{"$ref": "#/$defs/self"}]}}
    assert kinds(schema, **{"$defs": defs}) == expected


@pytest.mark.parametrize("parameters", [None, {}, [], {"properties": []}, {"$ref": "#"}, {"$ref": "#/$defs/x"}])
def test_without_properties_nothing_is_known(parameters):
    assert ArgumentKinds(parameters).of("k") == frozenset()


def test_parameters_themselves_may_be_a_reference():
    parameters = {"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"k": {"type": "string"}}}}}
    assert ArgumentKinds(parameters).of("k") == STRING


def test_references_that_fan_out_cost_linear_time():
    """Each names the next one twice: 2 ** 1000 paths, if each were walked."""
    defs = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(1000)} | {"1000": {"type": "string"}}
    start = time.monotonic()
    assert kinds({"$ref": "#/$defs/0"}, **{"$defs": defs}) == {"string"}
    assert time.monotonic() - start < 5


def test_the_last_of_each_key_counts_in_the_first_ones_place():
    assert last_of_each_key('{"a": 1.0, "b": "é", "a": [2]}') == '{"a": [2], "b": "é"}'
