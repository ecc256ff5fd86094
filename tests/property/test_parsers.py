"""However a turn is cut, a stream adds up to the plain answer, and nothing the model writes is an error. [R41]

Turns are random words over what matters: tags in any order, names, keys and values of each kind, and white space.
"""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from glm53d.chat.events import Piece, ToolCallArguments, collect
from glm53d.chat.tools import BLANK
from tests.helpers.turns import ADDED, TAGS, events_of, joined, pieces_of, single_tokens

TYPES = ["string", "integer", "number", "boolean", "null", "object", "array"]
KEYS = [*TYPES, "either", "undeclared"]
PROPERTIES = {t: {"type": t} for t in TYPES} | {"either": {"type": ["null", "string"]}}
TOOLS = [{"name": name, "parameters": {"properties": PROPERTIES}} for name in ("f", "fg")]
VALUES = ["", "x", " 5", "1.50", "True", "null", '{"a": [1, "é"]}', "[1,", '"q"', "1e999", "\\\n\t\x01", "<", "𝄞"]
words = st.sampled_from([*TAGS, *VALUES, *KEYS, "f", "fg", "g", "\n", " "])
pairs = st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES) | st.text(max_size=8))
calls = st.tuples(st.sampled_from(["f", "fg", "g"]), st.lists(pairs, max_size=3)).map(
    lambda call: f"<tool_call>{call[0]}{''.join(map(pair_of, call[1]))}</tool_call>"
)
turns = st.lists(words | calls | st.just("</think>"), max_size=14).map("".join)
cuts = st.lists(st.integers(1, 4), max_size=40)


def pair_of(pair: tuple[str, str]) -> str:
    return f"<arg_key>{pair[0]}</arg_key><arg_value>{pair[1]}</arg_value>"


def steps_of(pieces: list[Piece], sizes: list[int]) -> list[list[Piece]]:
    """The turn by steps of so many characters and tags, the last as long as it takes."""
    tokens, steps = single_tokens(pieces), []
    for size in sizes:
        steps.append(tokens[:size])
        tokens = tokens[size:]
    return [*steps, tokens]


@settings(max_examples=500, deadline=None)
@given(turns, cuts, st.sampled_from([TOOLS, []]))
def test_every_cut_gives_the_plain_answer(turn, sizes, tools):
    """F-E2, F-E10: texts and arguments to the letter; but a plain answer has a repeated key once."""
    pieces = pieces_of(turn)
    plain, num_calls = events_of([pieces], tools)
    answer = collect(plain)
    events, num_streamed = events_of(steps_of(pieces, sizes), tools)
    assert num_streamed == num_calls == len(answer.calls)
    reasoning, content, calls = joined(events)
    assert (reasoning, content, calls) == joined(plain)
    assert (reasoning, content) == (answer.reasoning, answer.content)
    complete = [(name, text) for name, text, is_complete in calls if is_complete]
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == [(n, json.loads(text)) for n, text in complete]
    assert all(isinstance(json.loads(text), dict) for _, text in complete)
    assert all(event.text for event in events if isinstance(event, ToolCallArguments))


@settings(max_examples=300, deadline=None)
@given(turns, cuts)
def test_without_tools_all_text_comes_through(turn, sizes):
    """F-E9: but for the tags of thinking, every character of it."""
    pieces = pieces_of(turn)
    reasoning, content, calls = joined(events_of(steps_of(pieces, sizes), [])[0])
    before, _, behind = turn.partition("</think>")
    assert (reasoning, content, calls) == (before.replace("<think>", ""), behind.replace("</think>", ""), [])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["a", " ", "\n"]) | calls, max_size=8).map("".join), cuts)
def test_a_turn_of_calls_has_content_exactly_if_it_says_something(turn, sizes):
    events, num_calls = events_of(steps_of(pieces_of("</think>" + turn), sizes), TOOLS)
    content = collect(events).content
    assert bool(content.strip(BLANK)) == ("a" in "".join(p for p in outside(turn)))
    if num_calls:
        assert content == "" or content.strip(BLANK)


def outside(turn: str) -> list[str]:
    """What stands between calls."""
    texts, is_inside = [], False
    for piece in pieces_of(turn):
        if piece in (ADDED["<tool_call>"], ADDED["</tool_call>"]):
            is_inside = piece == ADDED["<tool_call>"]
        elif isinstance(piece, str) and not is_inside:
            texts.append(piece)
    return texts


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), cuts)
def test_a_string_argument_is_sent_character_by_character(text, sizes):
    """F-E17: with every step all of it that has come is sent."""
    opening, sent = pieces_of("</think><tool_call>f<arg_key>string</arg_key><arg_value>"), ""
    steps = [opening, *steps_of([text] if text else [], sizes)]
    come = ""
    for i in range(1, len(steps)):
        come += "".join(map(str, steps[i]))
        events, _ = events_of(steps[: i + 1], TOOLS)
        sent = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
        assert json.loads(sent + '"}') == {"string": come}
