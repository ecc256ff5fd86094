"""Whatever is drawn from what a form allows has the form: it parses, and its schema's judge finds it valid. [R35]"""

import math
import random
import re
import zlib
from collections import defaultdict

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53d.chat import constraint
from glm53d.chat.call_grammar import Tool, calls
from glm53d.chat.constraint import Grammar, compose
from glm53d.chat.events import collect
from glm53d.chat.tools import ToolParser, functions_of
from glm53d.errors import InvalidRequest
from tests.helpers.draws import Draw, Drawer, json_of
from tests.helpers.forms import SCHEMA_WORDS, SCHEMAS, TOOL_SETS, closed, random_schema

DRAWS = 6  # of each form
MAX_TOKENS = 400

_ended: dict[str, list[bool]] = {"schemas": [], "tools": []}


@pytest.fixture(scope="module")
def drawer() -> Drawer:
    return Drawer()


def judge(schema) -> jsonschema.Draft202012Validator:
    formats = jsonschema.FormatChecker(("ipv4", "ipv6", "date", "email", "uuid"))
    return jsonschema.Draft202012Validator(schema, format_checker=formats)


def draws(drawer: Drawer, name: str, grammar: Grammar) -> list[Draw]:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return [drawer.draw(grammar, rng, MAX_TOKENS) for _ in range(DRAWS)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_drawn_from_a_schema_is_valid(drawer, name):
    schema = SCHEMAS[name]
    grammar = compose(constraint.json_schema(schema, "schema"), None, after_thinking=True)
    for draw in draws(drawer, name, grammar):
        _ended["schemas"].append(draw.has_ended)
        if draw.has_ended:
            text = drawer.text(draw.ids)
            assert not [*judge(schema).iter_errors(json_of(text))], text
            assert drawer.vocab.num_base > max(draw.ids), "no token of control is in a text"


def tools_of(name: str) -> list[Tool]:
    return [
        Tool(tool["function"]["name"], tool["function"].get("parameters"), f"tools[{i}].function.parameters")
        for i, tool in enumerate(TOOL_SETS[name])
    ]


def is_beyond_double(value: object) -> bool:
    """The text of a number that no double holds, which is sent as that text: see chat/arguments.py."""
    return (
        isinstance(value, str)
        and re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", value) is not None
        and math.isinf(float(value))
    )


@pytest.mark.parametrize("name", TOOL_SETS)
def test_calls_drawn_from_tools_are_parsed_and_valid(drawer, name):
    added, functions = drawer.vocab.added, functions_of(TOOL_SETS[name])
    form = calls(tools_of(name), added, param="tool_choice", must=True, max_calls=None)
    for draw in draws(drawer, name, compose(None, form, after_thinking=True)):
        _ended["tools"].append(draw.has_ended)
        parser = ToolParser(added, functions)
        answer = collect([*parser.feed(drawer.pieces(draw.ids)), *parser.finish()])
        assert (answer.content, parser.unknown) == ("", [])
        assert answer.calls or not draw.has_ended
        for call in answer.calls:
            arguments = json_of(call.arguments)
            errors = judge(functions[call.name] or {}).iter_errors(arguments)
            assert not [error for error in errors if not is_beyond_double(error.instance)], call


@pytest.mark.parametrize("seed", range(120))
def test_any_schema_is_kept_to_or_refused(drawer, seed):
    """As the form of a text, and of arguments. Refused is what cannot be enforced, or what nothing satisfies."""
    rng = random.Random(seed)
    refs = rng.choice([(), ("d0", "d1")])
    defs = {"$defs": {name: random_schema(rng, 2, refs) for name in refs}} if refs else {}
    schema, parameters = random_schema(rng, 3, refs) | defs, closed("x", x=random_schema(rng, 3, refs)) | defs
    added, tools = drawer.vocab.added, [Tool("f", parameters, "parameters")]
    for make in (
        lambda: compose(constraint.json_schema(schema, "schema"), None, after_thinking=True),
        lambda: compose(None, calls(tools, added, param="tools", must=True, max_calls=1), after_thinking=True),
    ):
        try:
            grammar = make()
            drawer.compiler.compile(grammar.text)
        except InvalidRequest as refused:
            assert any(word in refused.message for word in ("exclude each other", "satisf", "empty", "no integer")), (
                refused
            )
            continue
        draw = drawer.draw(grammar, np.random.default_rng(seed), 200)
        if not draw.has_ended or HUGE.search(drawer.text(draw.ids)):
            continue  # a number beyond all is text as an argument, for there is no Infinity
        parser = ToolParser(added, {"f": parameters})
        answer = collect([*parser.feed(drawer.pieces(draw.ids)), *parser.finish()])
        if answer.calls:
            assert judge(parameters).is_valid(json_of(answer.calls[0].arguments)), (parameters, answer.calls)
        else:
            assert judge(schema).is_valid(json_of(answer.content)), (schema, answer.content)


HUGE = re.compile(r"[0-9][eE]\+?[0-9]{3}")
WORDS = [*SCHEMA_WORDS, "a", "$defs"]
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["#", "string", "#/$defs/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@given(JUNK)
def test_what_is_no_schema_is_refused_and_never_an_accident(junk):
    """A client's schema may be anything that JSON can say."""
    for make in (
        lambda: constraint.json_schema(junk, "schema"),
        lambda: calls([Tool("f", junk, "x")], defaultdict(int), param="tools", must=True, max_calls=None),
    ):
        try:
            made = make()
        except InvalidRequest as refused:
            assert refused.param and refused.message
        else:
            assert made.rules


@pytest.mark.parametrize("kind", _ended)
def test_nine_of_ten_end_by_themselves(kind):
    """Of all that the tests before have drawn, with weight on what is short and what ends something."""
    if len(_ended[kind]) < 100:
        pytest.skip("the tests before did not draw")
    assert np.mean(_ended[kind]) >= 0.9
