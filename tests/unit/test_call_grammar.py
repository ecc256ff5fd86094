"""Calls that a grammar allows: the tags by their ids alone, the tools of the request, their arguments. [R35]"""

import pytest

from glm53d.chat import constraint
from glm53d.chat.call_grammar import TAGS, Tool, calls
from glm53d.chat.constraint import Grammar, compose
from glm53d.errors import InvalidRequest
from tests.helpers.draws import Drawer
from tests.helpers.forms import INT, RGB, STR, any_of, closed, ref

AT = "tools[0].function.parameters"


@pytest.fixture(scope="module")
def drawer() -> Drawer:
    return Drawer()


def grammar_of(drawer: Drawer, *tools: Tool, must: bool = True, max_calls: int | None = None, content=None) -> Grammar:
    form = calls(tools, drawer.vocab.added, param="tool_choice", must=must, max_calls=max_calls)
    grammar = compose(content, form, after_thinking=True)
    assert grammar is not None
    return grammar


def call(drawer: Drawer, name: str, *arguments: tuple[str, str]) -> list[str | int]:
    """A call as it is said."""
    added = drawer.vocab.added
    said: list[str | int] = [added["<tool_call>"], name]
    for key, value in arguments:
        said += [added["<arg_key>"], key, added["</arg_key>"], added["<arg_value>"], value, added["</arg_value>"]]
    return [*said, added["</tool_call>"]]


SAY = Tool("say", closed("text", text=STR, n=INT), AT)
PING = Tool("ping", None, AT)


@pytest.mark.parametrize("tag", TAGS)
def test_the_spelled_form_of_a_tag_is_masked_in_a_text(drawer, tag):
    added = drawer.vocab.added
    head = [added["<tool_call>"], "say", added["<arg_key>"], "text", added["</arg_key>"], added["<arg_value>"]]
    grammar = grammar_of(drawer, SAY)
    assert drawer.matcher(grammar, *head, "a " + tag[:-1]) is not None
    assert drawer.matcher(grammar, *head, "a " + tag) is None
    assert drawer.accepts(grammar, *call(drawer, "say", ("text", "a " + tag[:-1] + " >")))


KEY = ["<tool_call>", "say", "<arg_key>", "text"]


@pytest.mark.parametrize(
    ("before", "tag"),
    [
        ([], "<tool_call>"),
        (["<tool_call>", "say"], "<arg_key>"),
        (["<tool_call>", "ping"], "</tool_call>"),
        (KEY, "</arg_key>"),
        ([*KEY, "</arg_key>"], "<arg_value>"),
        ([*KEY, "</arg_key>", "<arg_value>", "x"], "</arg_value>"),
    ],
)
def test_a_tag_is_its_id_and_nothing_else(drawer, before, tag):
    """Where a tag comes next its spelled form is masked; [F-E15] no layer reads the call as text."""
    added = drawer.vocab.added
    head = [added.get(part, part) for part in before]
    grammar = grammar_of(drawer, SAY, Tool("say_no_more", closed(a=INT), AT), PING)
    machine = drawer.matcher(grammar, *head)
    assert added[tag] in drawer.allowed(machine)
    assert drawer.matcher(grammar, *head, tag) is None


def test_a_turn_that_must_call_may_end_after_each_whole_call(drawer):
    """xgrammar's fault: calls were repeated until max_tokens. And a call that was forced came unconstrained."""
    grammar, added = grammar_of(drawer, SAY, PING), drawer.vocab.added
    assert set(drawer.allowed(drawer.matcher(grammar))) == {added["<tool_call>"]}
    after = drawer.matcher(grammar, *call(drawer, "ping"))
    assert set(drawer.allowed(after)) == {added["<tool_call>"], *drawer.ends}
    assert drawer.accepts(grammar, *call(drawer, "ping"), *call(drawer, "say", ("text", "")))
    assert not drawer.accepts(grammar, *call(drawer, "other"))
    assert not drawer.accepts(grammar)


def test_behind_the_only_call_nothing_but_the_end_is_legal(drawer):
    grammar = grammar_of(drawer, PING, max_calls=1)
    assert set(drawer.allowed(drawer.matcher(grammar, *call(drawer, "ping")))) == set(drawer.ends)


def test_arguments_come_in_any_order_each_once_and_the_required_ones_all(drawer):
    grammar = grammar_of(drawer, Tool("f", closed("a b", a=INT, b=STR, c=RGB), AT))
    a, b, c = ("a", "1"), ("b", "x"), ("c", "red")
    for arguments in ([a, b], [b, a], [c, b, a], [b, c, a]):
        assert drawer.accepts(grammar, *call(drawer, "f", *arguments)), arguments
    for arguments in ([], [a], [b, c], [a, b, a], [a, b, ("d", "1")], [("a", "x"), b], [a, b, ("c", "pink")]):
        assert not drawer.accepts(grammar, *call(drawer, "f", *arguments)), arguments


def test_a_text_is_what_the_model_writes_and_not_json(drawer):
    grammar = grammar_of(drawer, SAY)
    for text in ("", '"quoted"', "a\nb\\n", "{", "12", "日本語", "<b>a</b>", "true"):
        assert drawer.accepts(grammar, *call(drawer, "say", ("text", text))), text


@pytest.mark.parametrize(
    ("text", "is_legal"),
    [
        ("5", True), ("99", False), ("x5", True), ("null", True), ("NULL", False), ("nul", True), ("true ", False),
        (" x", False), ("_1", False), ("٣", False), ('"a"', False), ("[1]", False), ("-a", False), ("a-1", True),
    ],
)  # fmt: skip
def test_a_string_among_other_types_cannot_be_taken_for_one(drawer, text, is_legal):
    """chat/arguments.py reads 99 as a number, which this schema does not have."""
    schema = closed("a", a=any_of({"type": "integer", "maximum": 9}, STR, {"type": "null"}))
    assert drawer.accepts(grammar_of(drawer, Tool("f", schema, AT)), *call(drawer, "f", ("a", text))) is is_legal


def test_a_strict_tool_is_held_to_its_schema_in_a_turn_that_may_say_something(drawer):
    free = Tool("free", closed("a", a=INT), AT, is_free=True)
    grammar = grammar_of(drawer, SAY, free, must=False)
    good, bad = call(drawer, "say", ("text", "x")), call(drawer, "say", ("n", "x"))
    assert drawer.accepts(grammar) and drawer.accepts(grammar, "I say </arg_key>\n")
    assert drawer.accepts(grammar, "First ", *good, " then ", *good, "\n")
    assert drawer.accepts(grammar, *call(drawer, "free", ("b", "?"), ("b", "")))
    assert not drawer.accepts(grammar, *bad)
    assert drawer.matcher(grammar, "So: <tool_call>") is None, "a call that is spelled out would go unread"


def test_references_that_lead_to_one_another_without_end_are_refused(drawer):
    defs = {f"d{i}": ref(f"d{i + 1}") for i in range(1100)} | {"d1100": STR}
    chain = closed("a", a=ref("d0")) | {"$defs": defs}
    with pytest.raises(InvalidRequest, match=r"properties\.a`: one reference leads to another too many times"):
        grammar_of(drawer, Tool("chain", chain, AT))


def test_one_call_at_most_in_a_turn_that_may_say_something(drawer):
    grammar = grammar_of(drawer, SAY, must=False, max_calls=1)
    said = ["So: ", *call(drawer, "say", ("text", "x"))]
    assert drawer.accepts(grammar, *said)
    assert set(drawer.allowed(drawer.matcher(grammar, *said))) == set(drawer.ends)


def test_a_turn_has_content_in_its_form_or_calls(drawer):
    content = constraint.json_schema(closed("a", a=INT), "response_format.json_schema.schema")
    grammar = grammar_of(drawer, Tool("free", None, AT, is_free=True), must=False, content=content)
    assert drawer.accepts(grammar, '{"a": 1}')
    assert drawer.accepts(grammar, *call(drawer, "free"), *call(drawer, "free", ("x", "y")))
    assert not drawer.accepts(grammar, '{"a": 1}', *call(drawer, "free"))
    assert not drawer.accepts(grammar, "Sure.")


def test_arguments_that_are_not_listed_come_where_the_schema_says_what_they_are(drawer):
    others = {"type": "object", "properties": {"a": STR}, "additionalProperties": INT}
    grammar = grammar_of(drawer, Tool("f", others, AT), Tool("g", {"type": "object", "properties": {}}, AT))
    assert drawer.accepts(grammar, *call(drawer, "f", ("a", "x"), ("other", "1")))
    assert not drawer.accepts(grammar, *call(drawer, "f", ("a", "x"), ("other", "x")))
    assert not drawer.accepts(grammar, *call(drawer, "f", ("a", "x"), ("a", "1")))
    assert not drawer.accepts(grammar, *call(drawer, "g", ("a", "1")))


def test_an_enum_counts_for_each_argument_that_refers_to_it(drawer):
    enums = {"$defs": {"e": {"enum": [f"v{i}" for i in range(1000)]}}}
    few, many = (closed(**{f"a{i}": any_of(ref("e"), ref("e")) for i in range(num)}) | enums for num in (2, 20))
    grammar_of(drawer, Tool("f", few, AT))
    with pytest.raises(InvalidRequest, match="schemas are too large"):
        grammar_of(drawer, Tool("f", many, AT))
