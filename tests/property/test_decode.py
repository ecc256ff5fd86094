"""The native decoder equals Python's own, however tokens and calls cut the bytes. [R39]"""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from glm53d._native import ByteVocab, Decoder
from glm53d.text.decode import decode

# Leads, continuations and what is near their bounds, so that random sequences are often nearly right.
edges = st.sampled_from([0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED,
                         0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF])  # fmt: skip
nearly_utf8 = st.one_of(
    st.binary(max_size=6), st.lists(edges, max_size=6).map(bytes), st.text(max_size=3).map(lambda s: s.encode())
)


def decode_plain(tokens, special, ids, *, skip_special):
    """decode() as its definition: the bytes of all ids joined, then decoded at once."""
    known = [i for i in ids if 0 <= i < len(tokens) and not (skip_special and special[i])]
    return b"".join(tokens[i] for i in known).decode("utf-8", errors="replace")


@st.composite
def vocab_and_ids(draw):
    tokens = draw(st.lists(nearly_utf8, min_size=1, max_size=12))
    special = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    ids = draw(st.lists(st.integers(-1, len(tokens)), max_size=40))
    return tokens, special, ids


@given(vocab_and_ids(), st.booleans(), st.lists(st.integers(0, 40), max_size=8))
@example(([b"\xf0\x9f", b"\x98", b"\x80"], [False] * 3, [0, 1, 2]), False, [1, 2])
@example(([b"\xed\xa0\x80"], [False], [0]), False, [])
def test_any_split_decodes_as_the_whole_does(case, skip_special, cuts):
    tokens, special, ids = case
    expected = decode_plain(tokens, special, ids, skip_special=skip_special)
    vocab = ByteVocab(tokens, special)
    array = np.array(ids, np.int32)
    assert decode(vocab, array, skip_special=skip_special) == expected

    decoder = Decoder(vocab, skip_special)
    pieces = [decoder.feed(piece) for piece in np.split(array, sorted(cuts))] + [decoder.finish()]
    assert "".join(piece.decode() for piece in pieces) == expected  # .decode(): every piece is valid by itself
    assert decoder.unknown_ids == sum(not 0 <= i < len(tokens) for i in ids)


@given(st.text(max_size=20))
def test_a_character_shows_as_soon_as_its_last_byte_is_there(text):
    vocab = ByteVocab([bytes([b]) for b in range(256)], [False] * 256)
    decoder, shown = Decoder(vocab, False), b""
    for char in text:
        for byte in char.encode():
            shown += decoder.feed(np.array([byte], np.int32))
        assert shown.decode().endswith(char)
    assert shown.decode() == text


def test_a_vocabulary_gives_its_tokens_back_and_refuses_other_ids():
    vocab = ByteVocab([b"a", b"", b"\xff"], [False, True, False])
    assert [vocab[i] for i in range(len(vocab))] == [b"a", b"", b"\xff"]
    with pytest.raises(IndexError, match="id 3"):
        vocab[3]
    with pytest.raises(ValueError, match="length"):
        ByteVocab([b"a"], [])
