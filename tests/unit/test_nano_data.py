"""What the nano model learns from: conversations that can be made again, true, with the model's own words marked."""

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.nano import values
from bench.nano.data import EFFORTS, Codec, sample
from bench.nano.faq import ABOUT, SMALL_TALK
from bench.nano.tokenizer import COMMON
from glm53d.config import Config
from glm53d.server.app import ROUTES

TOKENIZER = Path(__file__).resolve().parents[2] / "glm53d" / "nano" / "tokenizer.json"


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(TOKENIZER)


def test_a_sample_depends_on_its_number_and_split_alone():
    assert sample(7).conversation == sample(7).conversation
    assert sample(7).conversation != sample(8).conversation
    assert sample(7).conversation != sample(7, split="held out").conversation


def test_the_own_tokens_of_a_turn_are_its_thought_its_answer_and_its_end(codec):
    seen = set()
    for index in range(400):
        drawn = sample(index)
        encoded = codec.encode(drawn)
        last = drawn.turns[-1]
        kind, start, stop = encoded.kinds[-1]
        text = codec.encoder.decode(encoded.ids[start:stop].astype(np.int32), skip_special=False)
        effort = EFFORTS.index(str(drawn.conversation.reasoning_effort))
        assert (kind, stop) == (last.kind, len(encoded.ids))
        assert encoded.own.sum() == sum(b - a for _, a, b in encoded.kinds)
        if last.call is None:
            assert text == f"{last.thoughts[effort]}</think>{last.answer}<|user|>"
        else:
            name, arguments = last.call
            written = "".join(
                f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items()
            )
            wanted = f"{last.thoughts[effort]}</think><tool_call>{name}{written}</tool_call><|observation|>"
            assert text == wanted
        seen.add(kind)
    assert seen >= {"fixed", "echo", "json", "count", "list", "unknown", "recall", "tool", "result", "no tool"}


def test_the_name_and_the_values_of_a_call_stand_in_its_prompt(codec):
    for index in range(200):
        drawn = sample(index)
        if drawn.turns[-1].call is not None:
            name, arguments = drawn.turns[-1].call
            prompt = codec.template.render_text(drawn.conversation).rpartition("<think>")[0]
            assert f'"name": "{name}"' in prompt
            assert all(str(value) in prompt and f'"{key}"' in prompt for key, value in arguments.items())


def test_words_are_the_same_tokens_wherever_they_stand(codec):
    """Common ones are one, with the space before it or without; made-up ones fall into syllables."""

    def pieces(text: str) -> list[bytes]:
        return [codec.vocab.token_bytes[i] for i in codec.encoder.encode_segments([text])]

    for word in COMMON:
        assert (pieces(word), pieces(f" {word}")) == ([word.encode()], [f" {word}".encode()])
    rng, number, odd = Random(1), 300, 0
    for made_up in (values.word(rng) for _ in range(number)):
        syllables = [made_up[i : i + 2].encode() for i in range(0, len(made_up), 2)]
        behind_space = [piece.lstrip() for piece in pieces(f" {made_up}") if piece != b" "]
        odd += not pieces(made_up) == syllables == behind_space
    assert odd < 0.03 * number  # some have a word in them


def test_more_effort_is_more_thinking():
    for index in range(200):
        for turn in sample(index).turns:
            assert len(turn.thoughts[0]) < len(turn.thoughts[1]) < len(turn.thoughts[2])


def test_answers_name_only_what_the_daemon_has():
    """Endpoints, configuration keys and defaults that the model tells people about."""
    text = " ".join(f"{entry.answer} {entry.zh_answer}" for entry in SMALL_TALK + ABOUT)
    paths = {(route.method, route.path) for route in ROUTES}
    for method, path in re.findall(r"(GET|POST) (/[a-z0-9_/{}.]*[a-z0-9_}])", text):
        assert (method, path) in paths
    for path in re.findall(r"/v1/[a-z/]*[a-z]", text):
        assert path in {path for _, path in paths} or path == "/v1/requests"
    config = Config()
    groups = {name: set(getattr(config, name).__struct_fields__) for name in config.__struct_fields__}
    named = re.findall(r"\b([a-z]+)\.([a-z_]+)\b", re.sub(r"\S*/\S*|127\.0\.0\.1", "", text))
    keys = [(group, key) for group, key in named if group in groups]
    assert len(keys) >= 20 and all(key in groups[group] for group, key in keys)
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
