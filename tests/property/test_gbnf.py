"""GBNF of a client: anything is read or refused, and what is read means what it says. [R35]"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53d.chat import constraint
from glm53d.chat.constraint import compose
from glm53d.chat.gbnf import to_lark
from glm53d.errors import InvalidRequest
from tests.helpers.draws import Drawer

SOURCES = st.lists(st.sampled_from([*'a"[](){}|*+?=#-^0,.\\\n é', "::=", "root ::= ", '"a" ', "[a-z]", "\\x41", "\\n"]))
TEXTS = st.text(st.sampled_from('ab"\\é/日-]['), max_size=6)


@pytest.fixture(scope="module")
def drawer() -> Drawer:
    return Drawer()


@given(SOURCES.map("".join))
def test_any_source_is_read_or_refused(source):
    try:
        assert to_lark(source, "ebnf").startswith("content: rule_")
    except InvalidRequest as refused:
        assert refused.param == "ebnf"


def escaped(text: str) -> str:
    """As GBNF spells it, some characters by their numbers."""
    return "".join(f"\\u{ord(char):04x}" if ord(char) % 2 else re.sub(r'(["\\\]\[-])', r"\\\1", char) for char in text)


@given(TEXTS, TEXTS.filter(bool))
def test_texts_and_sets_mean_their_characters(drawer, text, chars):
    source = f'root ::= "{escaped(text)}" [{escaped(chars)}]'
    grammar = compose(constraint.grammar(source, "ebnf"), None, after_thinking=False)
    for char in 'ab"\\é/日-][':
        assert drawer.accepts(grammar, text + char) is (char in chars)
