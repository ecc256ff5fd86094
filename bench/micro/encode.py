"""Text to ids: glm53d's encoder against the `tokenizers` library's batch call, on text neither has seen.

    python -m bench.micro.encode [--tokenizer tokenizer.json]

µs per text of about 1K, 10K and 100K tokens, wall time: both may use several threads. The built-in tokenizer has 2,000
base entries, so its tokens are short; give a large tokenizer.json for numbers that can be compared with published ones.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from bench.corpus import NANO_TOKENIZER, Corpus
from bench.measure import Row, make_parser, report, timed_row
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab

SIZES = (1_000, 10_000, 100_000)


def measure(path: Path, threads: int, rounds: int) -> list[Row]:
    """One row per size."""
    encoder = Encoder(path, Vocab.load(path), threads)
    reference = Tokenizer.from_file(str(path))
    corpus = Corpus()
    sample = corpus.take(100_000)
    chars_per_token = len(sample) / len(encoder.encode_text(sample))
    rows = []
    for size in SIZES:
        # Several texts in turn, so that no cache of whole words answers for the text as a whole.
        texts = [corpus.take(round(size * chars_per_token)) for _ in range(8)]
        if encoder.encode_text(texts[0]).tolist() != reference.encode(texts[0], add_special_tokens=False).ids:
            raise SystemExit(f"{encoder.backend} and tokenizers disagree on a text of {size} tokens")
        rows.append(
            timed_row(
                f"encode {size:,} tokens ({encoder.backend})",
                in_turn(encoder.encode_text, texts),
                rounds=rounds,
                against=(
                    "tokenizers encode_batch_fast",
                    in_turn(lambda text: reference.encode_batch_fast([text], add_special_tokens=False)[0].ids, texts),
                ),
                clock=time.perf_counter_ns,
            )
        )
    return rows


def in_turn(call: Callable[[str], object], texts: list[str]) -> Callable[[], object]:
    """A call without arguments that gives `call` the next text each time."""
    endless = itertools.cycle(texts)
    return lambda: call(next(endless))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokenizer", type=Path, default=NANO_TOKENIZER, help="a byte-level BPE tokenizer.json")
    parser.add_argument("--threads", type=int, default=2, help="threads for one long text")
    args = parser.parse_args()
    report("encode", measure(args.tokenizer, args.threads, args.rounds), args.json)


if __name__ == "__main__":
    main()
