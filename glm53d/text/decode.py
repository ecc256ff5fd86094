"""Ids -> text.

The native decoder streams; here are whole sequences, and a plain twin that tests compare it with. [R39]
"""

from collections.abc import Iterable, Sequence

import numpy as np

from glm53d._native import ByteVocab, Decoder


def decode(vocab: ByteVocab, ids: np.ndarray, *, skip_special: bool) -> str:
    """The text of a whole sequence, int32. Equals what a stream of the same ids shows in all."""
    decoder = Decoder(vocab, skip_special)
    return (decoder.feed(ids) + decoder.finish()).decode()


def decode_plain(tokens: Sequence[bytes], special: Sequence[bool], ids: Iterable[int], *, skip_special: bool) -> str:
    """decode() as its definition: the bytes of all ids joined, then decoded at once."""
    known = [i for i in ids if 0 <= i < len(tokens) and not (skip_special and special[i])]
    return b"".join(tokens[i] for i in known).decode("utf-8", errors="replace")
