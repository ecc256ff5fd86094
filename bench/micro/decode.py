"""Ids to text: the native decoder against `tokenizers` DecodeStream, 64 streams that each get one token a step.

    python -m bench.micro.decode [--tokenizer tokenizer.json]

CPU µs per token. "by call" crosses into native code for every token, as DecodeStream does; "whole" decodes each
stream's ids in one call, which is close to what the output pump pays inside its thread.
"""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from bench.corpus import NANO_TOKENIZER, Corpus
from bench.measure import Row, make_parser, report, timed_row
from glm53d._native import ByteVocab, Decoder
from glm53d.text.vocab import Vocab

STREAMS, TOKENS = 64, 64
AIM_US = 0.15  # per token, batch 64


def measure(path: Path, rounds: int) -> list[Row]:
    """Decoding by call and whole, against the same alternative."""
    vocab, reference, corpus = Vocab.load(path), Tokenizer.from_file(str(path)), Corpus()
    native = ByteVocab(vocab.token_bytes, vocab.special)
    ids = [reference.encode(corpus.take(4 * TOKENS)).ids[:TOKENS] for _ in range(STREAMS)]
    whole = [np.array(one, np.int32) for one in ids]
    # Steps outside, streams inside: the order in which a server meets them.
    single = [[np.array([one[step]], np.int32) for one in ids] for step in range(TOKENS)]

    def by_call() -> list[bytes]:
        decoders = [Decoder(native, True) for _ in range(STREAMS)]
        texts = [b""] * STREAMS
        for step in single:
            for i, decoder in enumerate(decoders):
                texts[i] += decoder.feed(step[i])
        return texts

    def in_one() -> list[bytes]:
        return [Decoder(native, True).feed(one) for one in whole]

    def stream() -> list[str]:
        decoders = [DecodeStream(skip_special_tokens=True) for _ in range(STREAMS)]
        texts = [""] * STREAMS
        for step in range(TOKENS):
            for i, decoder in enumerate(decoders):
                texts[i] += decoder.step(reference, ids[i][step]) or ""
        return texts

    if by_call() != in_one() or [text.decode() for text in in_one()] != stream():
        raise SystemExit("the decoders disagree")
    per, against = STREAMS * TOKENS, ("tokenizers DecodeStream", stream)
    return [
        timed_row("decode a token, by call", by_call, rounds=rounds, per=per, against=against),
        timed_row("decode a token, whole", in_one, rounds=rounds, per=per, against=against, aim=AIM_US),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokenizer", type=Path, default=NANO_TOKENIZER, help="a byte-level BPE tokenizer.json")
    args = parser.parse_args()
    report("decode", measure(args.tokenizer, args.rounds), args.json)


if __name__ == "__main__":
    main()
