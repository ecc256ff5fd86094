"""Ids -> text. The native decoder streams; here are whole sequences. [R39]"""

import numpy as np

from glm53d._native import ByteVocab, Decoder


def decode(vocab: ByteVocab, ids: np.ndarray, *, skip_special: bool) -> str:
    """The text of a whole sequence, int32. Equals what a stream of the same ids shows in all."""
    decoder = Decoder(vocab, skip_special)
    return (decoder.feed(ids) + decoder.finish()).decode()
