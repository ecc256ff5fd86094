"""Makes tokenizer.json and tokenizer_config.json for training: GLM-5.3's tokenizer, shrunk to 2,000 base entries.

    python -m bench.nano.tokenizer OUT_DIR

Everything but the size is the official file's: byte-level BPE with ignore_merges, the same pre-tokenizer and decoder,
no normaliser, no post-processor, and the 36 added tokens in the official order with the official flags, right above the
base vocabulary. It learns from conversations that the model learns from, and a little from other languages.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.nano.data import sample
from glm53d.chat.template import Template
from glm53d.nano.train_tokenizer import (
    NUM_BASE,
    PLAIN,
    SENTENCES,
    SPECIAL,
    tokenizer_config,
    train,
    with_added_tokens,
)

NUM_SAMPLES = 12_000
SENTENCE_WEIGHT = 8  # enough that other languages' characters are not always bytes


def training_texts() -> Iterator[str]:
    """The whole training text, in a fixed order: what stands between control tokens, as the encoder sees it."""
    template = Template({token: i for i, token in enumerate(SPECIAL.split() + PLAIN.split())})
    for index in range(NUM_SAMPLES):
        segments = template.render(sample(index, split="tokenizer").conversation)
        yield from (segment for segment in segments if isinstance(segment, str))
    yield from [SENTENCES] * SENTENCE_WEIGHT


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = with_added_tokens(train(training_texts()))
    assert len(tokenizer["model"]["vocab"]) == NUM_BASE
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n", "utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
