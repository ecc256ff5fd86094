"""Grammars over a vocabulary: which ids are legal next. [R35]"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLExecutor

import glm53d.nano
from glm53d.errors import InvalidRequest
from glm53d.grammar.compiler import MAX_BYTES, Compiled, Compiler, Matcher
from glm53d.text.vocab import Vocab

VOCAB = Vocab.load(Path(glm53d.nano.__file__).with_name("tokenizer.json"))
TAGS = ["</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|user|>"]
ENDS = [VOCAB.added[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
COMPILER = Compiler(VOCAB.token_bytes, VOCAB.num_base, ENDS)
EXECUTOR = LLExecutor(1)


class Follower:
    """A matcher and what is legal next; say() is what a job does."""

    def __init__(self, grammar: str | Compiled):
        compiled = COMPILER.compile(grammar) if isinstance(grammar, str) else grammar
        self.matcher: Matcher = compiled.matcher(1)
        assert self.matcher.mask is not None
        self.mask = self.matcher.mask

    @property
    def legal(self) -> list[int]:
        bits = np.unpackbits(self.mask.view(np.uint8), bitorder="little")
        assert not bits[VOCAB.size :].any()
        return np.flatnonzero(bits).tolist()

    @property
    def texts(self) -> set[bytes]:
        return {VOCAB.token_bytes[i] for i in self.legal}

    def say(self, *ids: int) -> "Follower":
        self.matcher.tokens += ids
        (self.mask,) = self.matcher.grammar.advance([self.matcher], EXECUTOR)
        return self

    def spell(self, text: str) -> "Follower":
        """Byte by byte, with base tokens."""
        for byte in text.encode():
            self.say(VOCAB.token_bytes.index(bytes([byte])))
        return self


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_is_legal_by_its_id_only_and_never_where_text_spells_it(tag):
    """Both ways: where the grammar wants the tag its spelling is not legal, and where it wants text the id is not."""
    wants_tag = Follower(f'start: "x" <[{VOCAB.added[tag]}]> "y"').spell("x")
    assert wants_tag.legal == [VOCAB.added[tag]]
    wants_text = Follower(f"start: {json.dumps(tag)} /.*/")
    assert wants_text.legal and max(wants_text.legal) < VOCAB.num_base
    for at in range(len(tag)):
        assert VOCAB.added[tag] not in Follower(f"start: {json.dumps(tag)}").spell(tag[:at]).legal


def test_any_text_is_any_base_token_and_no_control_token():
    free = Follower("start: /(.|\\n)*/")
    assert set(free.legal) - set(ENDS) <= set(range(VOCAB.num_base))
    assert {b" ", b"\n", b"</", b"a"} <= free.texts


def test_forced_text_may_be_cut_into_tokens_in_any_way():
    words = Follower('start: "the"').texts
    assert words == {token for token in VOCAB.token_bytes if token and b"the".startswith(token)} and len(words) > 1


def test_where_a_grammar_may_end_the_ends_of_turn_are_legal_and_where_it_must_nothing_else_is():
    follower = Follower('start: "a" "b"?')
    assert not set(follower.legal) & set(ENDS)
    assert set(follower.spell("a").legal) == {*ENDS, VOCAB.token_bytes.index(b"b")}
    assert sorted(follower.spell("b").legal) == sorted(ENDS)
    assert sorted(follower.say(ENDS[0]).legal) == sorted(ENDS) and not follower.matcher.error


def test_ids_without_a_token_are_never_legal():
    compiler = Compiler([b"a", b"", b"b", b"", b"<end>"], 4, [4])
    mask = compiler.compile("start: /(.|\\n)+/").first_mask
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("start: nothing", "unknown name"),
        ("start: /[a-/", "unclosed character class"),
        ('start: %json {"$ref": "#"}', "nothing is legal"),
        ('start: %json {"type": "string", "format": "no-such"}', "format"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        ('start: "' + "a" * MAX_BYTES + '"', "bytes; at most"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_reason(text, why):
    """F-G12: and it is one sentence, without the grammar."""
    with pytest.raises(InvalidRequest, match=why) as raised:
        COMPILER.compile(text)
    assert "\n" not in raised.value.message and len(raised.value.message) < 400


def test_an_illegal_id_is_an_error_of_its_request_and_of_no_other():
    compiled = COMPILER.compile('start: "a" /b*/')
    wrong, right = Follower(compiled), Follower(compiled)
    wrong.matcher.tokens, right.matcher.tokens = [VOCAB.added["<think>"]], [VOCAB.token_bytes.index(b"a")]
    masks = compiled.advance([wrong.matcher, right.matcher], EXECUTOR)
    assert wrong.matcher.error and not right.matcher.error
    right.mask = masks[1]
    assert b"b" in right.texts and set(ENDS) <= set(right.legal)


def test_an_object_that_may_lack_very_many_properties_can_be_followed():
    """A limit of the library's ended such an answer behind its first brace."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(900)}}
    follower = Follower(f"start: %json {json.dumps(wide)}").spell('{"p7":1,"p88":-2')
    assert not follower.matcher.error and {b",", b"}"} <= follower.texts


def test_several_ids_at_once_are_taken_in_order():
    once, bytewise = Follower('start: %json {"type": "object"}'), Follower('start: %json {"type": "object"}')
    text = '{"key": [1, 2, {"deep": null}], "more'
    once.say(*[VOCAB.token_bytes.index(bytes([byte])) for byte in text.encode()])
    assert once.legal == bytewise.spell(text).legal and not once.matcher.error


def test_matchers_of_one_grammar_do_not_see_each_other():
    compiled = COMPILER.compile('start: "ab" | "cd"')
    first, second = Follower(compiled).spell("a"), Follower(compiled)
    assert first.texts == {b"b"} and {b"a", b"c"} <= second.texts
    assert second.spell("c").texts == {b"d"} and first.texts == {b"b"}


@pytest.mark.parametrize("seed", range(10))
def test_whatever_legal_ids_are_drawn_the_end_is_valid_json(seed):
    rng = random.Random(seed)
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "n": {"enum": [1, 22, 333]},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "n", "ok"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    follower, said = (
        Follower(f"start: %json {json.dumps(schema)}"),
        b"",
    )
    while (chosen := rng.choice(follower.legal)) not in ENDS:
        said += VOCAB.token_bytes[chosen]
        follower.say(chosen)
    value = json.loads(said)
    assert value.keys() == {"name", "n", "ok"} and value["n"] in (1, 22, 333) and len(value["name"]) <= 8
