"""Tokens become text as a whole and one by one, by field group C. [R39]"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from glm53d._native import ByteVocab, Decoder
from glm53d.text.decode import decode
from glm53d.text.vocab import Vocab

NANO = Path(__file__).resolve().parents[2] / "glm53d" / "nano" / "tokenizer.json"
TEXTS = ["삼겹살", "A 世界 a", "👩‍💻🚀", "naïve café\n\ttab", "한국어와 English, 混ぜて"]


@pytest.fixture(scope="module")
def nano() -> tuple[Tokenizer, ByteVocab]:
    vocab = Vocab.load(NANO)
    return Tokenizer.from_file(str(NANO)), ByteVocab(vocab.token_bytes, vocab.special)


def one_by_one(vocab: ByteVocab, ids: list[int]) -> list[str]:
    """What each token adds to a stream, and what its end does."""
    decoder = Decoder(vocab, True)
    return [decoder.feed(np.array([i], np.int32)).decode() for i in ids] + [decoder.finish().decode()]


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_join_to_the_whole_text_without_a_replacement_character(nano, text):
    """[F-C1] syllables and emoji that span tokens, one token per step."""
    tokenizer, vocab = nano
    ids = tokenizer.encode(text).ids
    assert "".join(one_by_one(vocab, ids)) == text == tokenizer.decode(ids)
    assert any(len(piece) == 0 for piece in one_by_one(vocab, ids)[:-1]) or text.isascii() or len(ids) < len(text)


@given(st.lists(st.integers(0, 2035), max_size=40), st.booleans())
def test_any_ids_decode_as_the_tokenizers_library_decodes_them(nano, ids, skip):
    """Also ids that no text encodes to: broken characters, control tokens anywhere."""
    tokenizer, vocab = nano
    assert decode(vocab, np.array(ids, np.int32), skip_special=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_no_character_is_sent_twice_when_the_text_behind_it_changes():
    """[F-C2] a whole character, then one that is broken off, then others: the sent offset never moves back."""
    tokens = ["A 世".encode(), b"\xe4\xb8", b"a", b"ab"]
    pieces = one_by_one(ByteVocab(tokens, [False] * 4), [0, 1, 2, 3])
    assert pieces == ["A 世", "", "\ufffda", "ab", ""]
    assert "".join(pieces) == b"".join(tokens).decode(errors="replace")


def test_a_character_that_the_end_cuts_off_is_one_replacement_character():
    assert one_by_one(ByteVocab([b"x", "世".encode()[:2]], [False] * 2), [0, 1]) == ["x", "", "\ufffd"]


@pytest.mark.parametrize("beyond", [-1, 2, 154_879, 2**31 - 1])
def test_an_id_beyond_the_vocabulary_is_nothing_and_counted(beyond):
    """[F-C3]"""
    vocab = ByteVocab([b"a", b"b"], [False] * 2)
    decoder = Decoder(vocab, True)
    assert decoder.feed(np.array([0, beyond, 1], np.int32)) + decoder.finish() == b"ab"
    assert decoder.unknown_ids == 1


def test_the_state_of_one_stream_is_its_own_however_many_there_are():
    """[F-C4] a thousand streams, each in the middle of a character, then each goes on."""
    vocab = ByteVocab(["世".encode()[:2], "世".encode()[2:]], [False] * 2)
    decoders = [Decoder(vocab, True) for _ in range(1000)]
    assert all(decoder.feed(np.array([0], np.int32)) == b"" for decoder in decoders)
    assert all(decoder.feed(np.array([1], np.int32)).decode() == "世" for decoder in decoders)


def test_special_tokens_show_only_when_asked_for(nano):
    tokenizer, vocab = nano
    ids = np.array(tokenizer.encode("a</think>b<|user|>").ids, np.int32)
    assert decode(vocab, ids, skip_special=True) == "a</think>b"
    assert decode(vocab, ids, skip_special=False) == "a</think>b<|user|>"
