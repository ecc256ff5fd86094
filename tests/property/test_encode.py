"""Encoder against the tokenizers library on random texts, and against recorded ids of the real tokenizer. [R17] [R18]

The second needs a stand-in for the official tokenizer, made by a script in a folder `shared/glm53` beside the checkout
from a vocabulary in the package splintr-rs; skipped without them.
"""

import importlib.util
import json
import re
import subprocess
import sys
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from glm53d.text import cuts
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab

ROOT = Path(__file__).parents[2]
NANO = Path(str(files("glm53d.nano") / "tokenizer.json"))
STANDIN_MAKER = ROOT / "../shared/glm53/make_tokenizer_standin.py"
GOLDENS = ROOT / "tests/data/tokenizer_goldens.jsonl"


class Pair:
    """An Encoder and the library it must equal, of one file."""

    def __init__(self, path: Path):
        self.vocab = Vocab.load(path)
        self.encoder = Encoder(path, self.vocab, max_threads=2, cache_tokens=4096)  # entries come and go
        self.reference = Tokenizer.from_file(str(path))

    def flat(self, text: str) -> list[int]:
        return self.reference.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def nano():
    return Pair(NANO)


@pytest.fixture(scope="session")
def standin(tmp_path_factory):
    if not STANDIN_MAKER.exists():
        pytest.skip(f"no {STANDIN_MAKER.name} in shared/glm53 beside the checkout")
    if importlib.util.find_spec("splintr") is None:
        pytest.skip("the package splintr-rs is not installed")
    folder = tmp_path_factory.mktemp("standin")
    subprocess.run([sys.executable, STANDIN_MAKER, folder], check=True, capture_output=True)
    return Pair(folder / "tokenizer.json")


ADDED = list(Vocab.load(NANO).added)
# Runs of what the pre-tokenizer tells apart, so that borders between its kinds are common.
PIECES = st.one_of(
    st.text(max_size=8),
    st.text(" \t\r\n\u3000\u00a0", max_size=6),
    st.text("0123456789٣½", max_size=7),
    st.text("abzÄé世界의e\u0301", max_size=7),
    st.text("!?.,_-{}[]()<>|/'\"", max_size=5),
    st.sampled_from(["'s", "'LL", " the", "def ", "\r\n\r\n", "😀", "👩\u200d💻", "\x00", "<|", "|>", "</"]),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)
SEGMENTS = st.lists(TEXTS | st.sampled_from(ADDED).map(lambda spelling: (spelling,)), max_size=10)


def check_segments(pair: Pair, pieces: list) -> None:
    """Texts and (control token,)s: joined between control tokens, as the template gives them."""
    joined: list[str | int] = []
    for piece in pieces:
        if isinstance(piece, tuple):
            joined.append(pair.vocab.added[piece[0]])
        elif joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    texts = [segment for segment in joined if isinstance(segment, str)]
    ids = pair.encoder.encode_segments(joined)
    spelled = "".join(piece[0] if isinstance(piece, tuple) else piece for piece in pieces)
    if not any(spelling in text for text in texts for spelling in ADDED):
        assert ids.tolist() == pair.flat(spelled)
    assert b"".join(pair.vocab.token_bytes[i] for i in ids) == spelled.encode()
    added = set(pair.vocab.added.values())
    assert [i for i in ids if i in added] == [segment for segment in joined if isinstance(segment, int)]


@settings(max_examples=400, deadline=None)
@given(SEGMENTS)
def test_segments_have_the_ids_of_the_whole_text_and_only_their_own_control_ids(nano, pieces):
    check_segments(nano, pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES | st.sampled_from(ADDED), max_size=12).map("".join))
def test_a_raw_prompt_has_the_ids_of_flat_encoding(nano, text):
    assert nano.encoder.encode_text(text).tolist() == nano.flat(text)


@settings(max_examples=400, deadline=None)
@given(SEGMENTS)
def test_segments_have_the_ids_of_the_whole_text_with_a_vocabulary_of_full_size(standin, pieces):
    check_segments(standin, pieces)


def test_recorded_ids_of_the_real_tokenizer_come_out(standin):
    """49 recorded texts; three use ids that the stand-in does not have."""
    goldens = [json.loads(line) for line in GOLDENS.open(encoding="utf-8")]
    equal = [
        golden["name"] for golden in goldens if standin.encoder.encode_text(golden["text"]).tolist() == golden["ids"]
    ]
    assert equal == [golden["name"] for golden in goldens if golden["standin_equal"]]
    assert len(equal) == 46


def joined(pair: Pair, pieces: list[str]) -> list[int]:
    """Ids of the pieces, each encoded alone."""
    return [i for piece in pieces for i in pair.flat(piece)]


def check_borders(pair: Pair, text: str) -> None:
    """Cut at any one border, and at all of them, the text has the ids of the whole."""
    whole = pair.flat(text)
    borders = [found.start() for found in cuts.BORDER.finditer(text)]
    for border in borders:
        assert pair.flat(text[:border]) + pair.flat(text[border:]) == whole, border
    ends = [0, *borders, len(text)]
    assert joined(pair, [text[start:end] for start, end in pairwise(ends)]) == whole


def check_slices(pair: Pair, text: str, max_bytes: int) -> None:
    """A text in slices has the ids of the whole, in the encoder too, whose slices are 64 KiB."""
    pieces = list(cuts.slices(text, max_bytes))
    assert "".join(pieces) == text and all(pieces)
    assert joined(pair, pieces) == pair.flat(text)


# No added token among them: cuts are made in texts that are known to hold none.
RUNS = st.lists(PIECES.filter(lambda piece: piece not in ("<|", "|>", "</")), max_size=20).map("".join)


@settings(max_examples=400, deadline=None)
@given(RUNS)
def test_a_text_may_be_cut_at_every_border(nano, text):
    """[R18] Unicode, code, runs of white space, CJK, emoji."""
    check_borders(nano, text)


@settings(max_examples=300, deadline=None)
@given(RUNS, st.integers(8, 40))
def test_slices_have_the_ids_of_the_whole(nano, text, max_bytes):
    check_slices(nano, text, max_bytes)


@settings(max_examples=300, deadline=None)
@given(RUNS)
def test_a_text_may_be_cut_at_every_border_with_a_vocabulary_of_full_size(standin, text):
    check_borders(standin, text)


def test_golden_texts_may_be_cut_at_every_border(nano, standin):
    for golden in map(json.loads, GOLDENS.open(encoding="utf-8")):
        for pair in (nano, standin):
            text = re.sub("|".join(map(re.escape, ADDED)), "", golden["text"])
            check_borders(pair, text)
            check_slices(pair, text * 40, 256)


@pytest.mark.parametrize(
    "unit",
    [
        "def f(x):\n    return x  # 12345\n\n\n",
        "今天天气很好,我们去公园散步吧。",
        "안녕하세요 세계 ",
        "👩\u200d💻 ok ",
        "a" * 70_000,
        " " * 900 + "x",
        "e\u0301",
    ],
)
def test_long_texts_have_the_ids_of_the_whole(nano, unit):
    """[R18] Also those that have no border to cut at."""
    text = unit * max(1, 150_000 // len(unit.encode()))
    assert nano.encoder.encode_segments([text]).tolist() == nano.flat(text)
    longest = max(len(piece.encode()) for piece in cuts.slices(text))
    assert longest <= cuts.MAX_SLICE_BYTES or not cuts.BORDER.search(text[cuts.MAX_SLICE_BYTES :])
