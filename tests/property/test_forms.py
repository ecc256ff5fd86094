"""Whatever is drawn from what a form allows has the form: it parses, and its schema's judge finds it valid. [R35]"""

import zlib

import jsonschema
import numpy as np
import pytest

from glm53d.chat import constraint
from glm53d.chat.call_grammar import Tool, calls
from glm53d.chat.constraint import Grammar, compose
from glm53d.chat.events import collect
from glm53d.chat.tools import ToolParser, functions_of
from tests.helpers.draws import Draw, Drawer, json_of
from tests.helpers.forms import SCHEMAS, TOOL_SETS

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
            assert not [*judge(functions[call.name] or {}).iter_errors(arguments)], call


@pytest.mark.parametrize("kind", _ended)
def test_nine_of_ten_end_by_themselves(kind):
    """Of all that the tests before have drawn, with weight on what is short and what ends something."""
    if len(_ended[kind]) < 100:
        pytest.skip("the tests before did not draw")
    assert np.mean(_ended[kind]) >= 0.9
