"""One grammar of what a request asks for: expressions, grammars, choices, and what cannot go together. [R35]"""

import pytest

from glm53d.chat import constraint
from glm53d.chat.constraint import Calls, Content, compose
from glm53d.errors import InvalidRequest
from tests.helpers.draws import Drawer


@pytest.fixture(scope="module")
def drawer() -> Drawer:
    return Drawer()


def accepts(drawer: Drawer, content: Content, text: str) -> bool:
    grammar = compose(content, None, after_thinking=False)
    assert grammar is not None
    return drawer.accepts(grammar, text)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a+", "aa", "aab"),
        ("^a|b$", "a", "ab"),
        ("a/b\\/c", "a/b/c", "abc"),
        ("[/\"']", '"', "\\"),
        ("a\nb", "a\nb", "a b"),
        ("//x", "//x", "/"),
        ("a\\$", "a$", "a"),
        ("a\\\\$", "a\\", "a$"),
        ("\\d{2}", "42", "4"),
        ("日本|größe", "größe", "groesse"),
        ("(?i:yes|no)", "YES", "maybe"),
        ("a.c", "abc", "a\nc"),
    ],
)
def test_a_regex_matches_the_answer_as_a_whole(drawer, pattern, good, bad):
    content = constraint.regex(pattern, "regex")
    assert accepts(drawer, content, good)
    assert not accepts(drawer, content, bad)


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= "Hello" | greeting\ngreeting ::= "Hi" " "+ [A-Z][a-z]*', "Hi  Bob", "Hi"),
        ('root ::= "(" root ")" | "x"', "((x))", "((x)"),
        ('# numbers\nroot ::= item{2,3} # or three\n  | "-"\nitem ::= [0-9] | "\\x41"', "1A2", "1"),
        ('root ::= [^"\\\\\\]a-c] [a\\-z-] [-\\u00e9&&[] .', "d--\n", "a--\n"),
        ('root ::= "" | a-b_1\na-b_1 ::= "say \\"hi\\"\\n/" end\nend ::=', 'say "hi"\n/', "say"),
        ('start: "a" b+\nb: /[0-9]/', "a12", "a"),
        ('start: item ("," item)*\nitem: %json {"type": "integer"}', "1,-2", "1,"),
        ('start: content content "}"\ncontent: "::= " // }', "::= ::= }", "::= "),
    ],
)
def test_a_grammar_is_gbnf_or_lark(drawer, source, good, bad):
    content = constraint.grammar(source, "ebnf")
    assert accepts(drawer, content, good)
    assert not accepts(drawer, content, bad)


def test_a_choice_is_one_of_its_texts(drawer):
    content = constraint.choice(['say "a"', "b\\n", "日"], "guided_choice")
    assert [accepts(drawer, content, text) for text in ('say "a"', "b\\n", "日", "b")] == [True, True, True, False]


def test_json_object_is_any_object_and_nothing_else(drawer):
    content = constraint.json_object("response_format")
    assert accepts(drawer, content, '{"a": [1, {"b": null}],\n  "c": "d"}')
    assert accepts(drawer, content, "{}")
    for text in ("[]", "1", '"a"', "", "{} ", " {}", '{"a" 1}'):
        assert not accepts(drawer, content, text)


def test_white_space_of_json_has_an_end(drawer):
    content = constraint.json_object("response_format")
    assert accepts(drawer, content, '{\n\t\t"a":\n' + " " * 40 + "1}")
    for blank in ("  ", "\n" + " " * 41, "\n\n", "\t", "\r\n"):
        assert not accepts(drawer, content, '{"a":' + blank + "1}")


@pytest.mark.parametrize(
    "source", ["", "x" * (constraint.MAX_SOURCE_BYTES + 1), "é" * (constraint.MAX_SOURCE_BYTES // 2 + 1)]
)
def test_sources_are_bounded(source):
    for make in (constraint.regex, constraint.grammar):
        with pytest.raises(InvalidRequest) as raised:
            make(source, "x")
        assert raised.value.param == "x"


@pytest.mark.parametrize(
    "source",
    [
        "root ::= a b",
        "a ::= b ::=",
        "root ::= [\\d]",
        "root ::= 'a'",
        'x "a"\nroot ::= "b"',
        'root ::= "\\uD800"',
        "r ::= x",
        'root ::= "a"\nroot ::= "b"',
        'root ::= "a',
    ],
)
def test_what_is_no_gbnf_is_refused(source):
    with pytest.raises(InvalidRequest) as raised:
        constraint.grammar(source, "ebnf")
    assert raised.value.param == "ebnf"


CALLS = Calls('call: <[3]> "f" <[4]>\n', "tool_choice", must=False, max_calls=None)


def test_parts_that_exclude_each_other_are_refused():
    must = Calls(CALLS.rules, "tool_choice", must=True, max_calls=None)
    with pytest.raises(InvalidRequest) as raised:
        compose(constraint.json_object("response_format"), must, after_thinking=True)
    assert raised.value.param == "response_format"
    assert "`tool_choice`" in raised.value.message


@pytest.mark.parametrize("source", ['root ::= "a"', 'start: call\ncall: "a"'])
def test_a_grammar_of_the_text_leaves_calls_possible(drawer, source):
    begin, end = drawer.vocab.added["<tool_call>"], drawer.vocab.added["</tool_call>"]
    calls = Calls(f'call: <[{begin}]> "f" <[{end}]>\n', "tools", must=False, max_calls=None)
    grammar = compose(constraint.grammar(source, "ebnf"), calls, after_thinking=True)
    assert grammar is not None
    assert drawer.accepts(grammar, "a")
    assert drawer.accepts(grammar, begin, "f", end)
    assert not drawer.accepts(grammar, "a", begin, "f", end)


@pytest.mark.parametrize(("source", "line"), [("start: 'a'", "1("), ('start: "a"\n)', "2(1)")])
def test_what_is_wrong_in_a_grammar_is_named_by_its_own_line(drawer, source, line):
    grammar = compose(constraint.grammar(source, "ebnf"), None, after_thinking=False)
    with pytest.raises(InvalidRequest) as raised:
        drawer.compiler.compile(grammar.text)
    assert line in raised.value.message


def test_nothing_asked_for_is_no_grammar():
    assert compose(None, None, after_thinking=True) is None


def test_the_grammar_says_where_it_begins_and_who_asked_for_it():
    grammar = compose(constraint.json_object("response_format"), CALLS, after_thinking=True)
    assert (grammar.after_thinking, grammar.param) == (True, "response_format")
    grammar = compose(None, CALLS, after_thinking=False)
    assert (grammar.after_thinking, grammar.param) == (False, "tool_choice")


def test_the_text_of_a_grammar_is_bounded():
    huge = Calls(CALLS.rules * (constraint.MAX_GRAMMAR_BYTES // len(CALLS.rules) + 1), "tools", must=True, max_calls=1)
    with pytest.raises(InvalidRequest) as raised:
        compose(None, huge, after_thinking=True)
    assert raised.value.param == "tools"
