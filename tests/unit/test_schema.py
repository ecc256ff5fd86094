"""Schemas of clients, made ready for the grammar engine, or refused by the path of what cannot be enforced. [R35]"""

import pytest

from glm53d.chat.schema import FORMATS, MAX_BYTES, MAX_NODES, Budget, Document
from glm53d.errors import InvalidRequest
from tests.helpers.forms import BOOL, INT, NULL, SCHEMAS, STR, any_of, arr, closed, obj, ref

AT = "response_format.json_schema.schema"


def made_of(schema):
    return Document(schema, AT, Budget(AT)).closed(schema, AT)


def refused(schema) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        made_of(schema)
    assert f"`{raised.value.param}" in raised.value.message
    return raised.value


def test_what_constrains_nothing_goes():
    annotated = SCHEMAS["annotated"]
    assert made_of(annotated) == closed("a", a=INT)
    assert made_of({"type": "integer", "format": "int64", "x-guidance": {"lenient": True}, "then": {}}) == INT
    assert made_of({"uniqueItems": False, "dependencies": {}, "propertyNames": True}) == {}


def test_each_reference_is_a_definition_of_the_result_and_nothing_else_is():
    schema = closed("a b", a=ref("x"), b=ref("x")) | {"$defs": {"x": arr(ref("y")), "y": INT, "unused": {"not": {}}}}
    assert made_of(schema) == closed("a b", a=ref("0"), b=ref("0")) | {"$defs": {"0": arr(ref("1")), "1": INT}}


@pytest.mark.parametrize(
    "pointer", ["#/properties/a/items/1", "#/$defs/none", "#/properties/b", "#a", "other.json", "", 5]
)
def test_a_reference_that_leads_nowhere_is_refused(pointer):
    assert refused(obj(a=arr(INT), c={"$ref": pointer})).param == f"{AT}.properties.c.$ref"


def test_a_reference_leads_through_lists_and_escapes():
    schema = {"anyOf": [{"$ref": "#/prefixItems/1"}, {"$ref": "#/$defs/a~1b~0c"}]}
    schema |= {"prefixItems": [INT, BOOL], "$defs": {"a/b~c": NULL}}
    assert made_of(schema)["$defs"] == {"0": BOOL, "1": NULL}


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"not": INT}, ".not"),
        (obj(a=arr(INT, uniqueItems=True)), ".properties.a.uniqueItems"),
        (any_of(INT, {"if": {}, "then": {}}), ".anyOf[1].if"),
        ({"prefixItems": [{"contains": INT}]}, ".prefixItems[0].contains"),
        ({"additionalProperties": {"propertyNames": STR}}, ".additionalProperties.propertyNames"),
        ({"patternProperties": {"^a": {"dependentRequired": {"a": ["b"]}}}}, ".patternProperties.^a.dependentRequired"),
        ({"unevaluatedProperties": False}, ".unevaluatedProperties"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$dynamicRef": "#x"}}}}, ".$defs.a.items.$dynamicRef"),
        ({"minProperties": 2}, ".minProperties"),  # names that are not listed may come twice
        ({"items": [INT]}, ".items"),
        ({"properties": []}, ".properties"),
        ({"anyOf": []}, ".anyOf"),
        ({"enum": []}, ".enum"),
        ({"enum": "a"}, ".enum"),
        ({"type": "text"}, ".type"),
        ({"type": ["integer", 5]}, ".type"),
        ({"type": {"a": 1}}, ".type"),
        ({"required": ["a", 1]}, ".required"),
        ({"minLength": -1}, ".minLength"),
        ({"maxItems": 1.5}, ".maxItems"),
        ({"minItems": True}, ".minItems"),
        ({"minimum": "1"}, ".minimum"),
        ({"exclusiveMaximum": True}, ".exclusiveMaximum"),  # as draft 4 had it
        ({"multipleOf": 0}, ".multipleOf"),
        ({"pattern": 5}, ".pattern"),
        (obj(a=5), ".properties.a"),
        (5, ""),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_enforced_is_refused_by_its_path(schema, where):
    assert refused(schema).param == AT + where


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{}, {}]},
        {"oneOf": [INT, {"type": "number"}]},
        {"oneOf": [closed(t={"const": 1}), closed(t={"const": 2})]},  # {} satisfies both
        {"oneOf": [closed("t", t={"enum": [1, 2]}), closed("t", t={"enum": [2, 3]})]},
        {"oneOf": [closed("t", t={"const": 1}), closed("t", t={"const": 1.0})]},
        {"oneOf": [ref("a"), ref("a")], "$defs": {"a": INT}},
        {"oneOf": [ref("a"), INT], "$defs": {"a": {"$ref": "#/$defs/a", "type": "integer"}}},
    ],
)
def test_one_of_branches_that_may_both_hold_is_refused(schema):
    assert refused(schema).param == f"{AT}.oneOf"


@pytest.mark.parametrize(
    "branches",
    [
        [INT, STR, {"type": ["null", "boolean"]}],
        [{"const": 1}, {"enum": [True, "1", 2]}],
        [closed("t", t={"const": "a"}), closed("t", t={"const": "b"}), {"type": "array"}],
        [ref("a"), ref("b")],
        [False, {}],
    ],
)
def test_one_of_branches_that_exclude_each_other_is_any_of(branches):
    defs = {
        "a": closed("k", k=closed("t", t=ref("x"))),
        "b": closed("k", k=closed("t", t={"const": 2})),
        "x": {"const": 1},
    }
    made = made_of({"oneOf": branches, "$defs": defs})
    assert len(made["anyOf"]) == len(branches) and "oneOf" not in made


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        closed("x", x={"$ref": "#"}),
        arr({"$ref": "#"}, minItems=1),
        {"type": "array", "prefixItems": [INT, {"$ref": "#"}], "minItems": 2},
        {"$ref": "#/$defs/a", "$defs": {"a": closed("b", b=ref("b")), "b": closed("a", a=ref("a"))}},
        {"allOf": [INT, {"$ref": "#"}]},
        any_of({"$ref": "#"}, closed("x", x={"$ref": "#"})),
        False,
    ],
    ids=str,
)
def test_a_schema_that_nothing_finite_satisfies_is_refused(schema):
    assert refused(schema).param == AT


@pytest.mark.parametrize(
    "schema",
    [
        closed(x={"$ref": "#"}),
        arr({"$ref": "#"}),
        closed("x", x=any_of({"$ref": "#"}, NULL)),
        {"type": "array", "prefixItems": [INT, {"$ref": "#"}], "minItems": 1},
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": closed("b", b=ref(f"a{i + 1}")) for i in range(200)} | {"a200": NULL},
        },
    ],
    ids=lambda schema: str(schema)[:50],
)
def test_recursion_with_an_end_is_served(schema):
    made_of(schema)


def test_size_and_depth_are_bounded():
    """F-G11, F-G13: nested oneOf of 10 levels are 6,000 schemas."""
    deep = INT
    for _ in range(70):
        deep = arr(deep)
    assert "64 levels" in refused(deep).message
    wide = INT
    for _ in range(10):
        wide = {"oneOf": [closed("t v", t={"const": str(i)}, v=wide) for i in range(2)]}
    assert str(MAX_NODES) in refused(wide).message
    assert str(MAX_NODES) in refused({"enum": list(range(MAX_NODES))}).message
    assert str(MAX_NODES) in refused({"oneOf": [{"const": i} for i in range(1000)]}).message
    assert str(MAX_NODES) in refused({"required": ["a"] * 8 * MAX_NODES}).message
    assert str(MAX_NODES) in refused({"type": ["null"] * 8 * MAX_NODES}).message


def test_bytes_are_bounded_before_anything_is_looked_at():
    assert str(MAX_BYTES) in refused({"not": "x" * MAX_BYTES}).message
    budget = Budget(AT)
    Document("x" * (MAX_BYTES // 2), AT, budget)
    with pytest.raises(InvalidRequest, match="bytes"):
        Document("x" * (MAX_BYTES // 2), AT, budget)


def many(num: int, **properties):
    """Branches that only the last of their properties tells apart, and that through a reference."""
    defs = {f"t{i}": {"const": i} for i in range(num)}
    names = [*properties, "t"]
    return {"oneOf": [obj(**properties, t=ref(f"t{i}")) | {"required": names} for i in range(num)], "$defs": defs}


def test_comparisons_of_branches_are_bounded_and_count_whatever_is_shared():
    """Each of 435 pairs would compare what 20 references lead to, which are the same 600 properties."""
    wide = {f"p{i}": {} for i in range(600)}
    shared = many(30, **{f"k{i}": ref("wide") for i in range(20)})
    shared["$defs"]["wide"] = obj(**wide) | {"required": list(wide)}
    assert str(MAX_NODES) in refused(shared).message
    shared = many(60, k=ref("a"))
    shared["oneOf"][::2] = [
        branch | {"properties": branch["properties"] | {"k": ref("b")}} for branch in shared["oneOf"][::2]
    ]
    shared["$defs"] |= {"a": {"enum": list(range(1000))}, "b": {"enum": list(range(1000, 2000))}}
    assert str(MAX_NODES) in refused(shared).message
    made_of(many(60, k=INT))


def test_a_chain_of_references_is_not_followed_for_free():
    """1,200 references to the begin of one with 2,000 links."""
    chain = {f"c{i}": ref(f"c{i + 1}") for i in range(2000)} | {"c2000": INT}
    schema = many(30, **{f"k{i}": ref("c0") for i in range(40)})
    schema["$defs"] |= chain
    assert str(MAX_NODES) in refused(schema).message


def test_a_property_that_is_told_apart_by_its_values_is_compared_first():
    strings = {f"k{i}": STR for i in range(6)}
    made_of({"oneOf": [obj(**strings, t={"const": i}) | {"required": [*strings, "t"]} for i in range(100)]})


def test_a_name_that_is_required_often_is_required_once():
    assert made_of({"required": ["a", "b", "a"] * 1000})["required"] == ["a", "b"]


def test_the_budget_is_of_all_documents_together():
    budget, schema = Budget("tools"), {"enum": list(range(MAX_NODES // 2 - 10))}
    Document(schema, "tools[0]", budget).closed(schema, "tools[0]")
    Document(schema, "tools[1]", budget).closed(schema, "tools[1]")
    with pytest.raises(InvalidRequest) as raised:
        Document(schema, "tools[2]", budget).closed(schema, "tools[2]")
    assert raised.value.param == "tools"


def test_formats_are_patterns_and_classes_are_ascii():
    both = {"type": "string", "format": "date", "pattern": r"\d\\d[\W]"}
    made = {"type": "string", "pattern": f"^({FORMATS['date']})$", "allOf": [{"pattern": r"[0-9]\\d[[^0-9A-Za-z_]]"}]}
    assert made_of(both) == made
    assert made_of({"patternProperties": {r"^\w": INT}}) == {"patternProperties": {"^[0-9A-Za-z_]": INT}}
