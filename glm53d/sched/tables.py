"""What the rows of the ranks' sampling tables begin with: biases and penalties of requests that have any. [R36]"""

from collections.abc import Sequence

import numpy as np

from glm53d.ipc.batch import Batch
from glm53d.ipc.records import ONLY_BIASED, TABLE_INIT
from glm53d.sched.req import Req

MAX_BIASES = 1025
"""Of a request: 1,024 that it may name, and the tag of calls where there are to be none."""


def entries_of(req: Req, num_tokens: int, vocab_size: int) -> int:
    """How many biases and ids said its row begins with at most, with so many tokens of prompt and output."""
    return len(req.logit_bias) + (min(num_tokens, vocab_size) if req.is_penalised else 0)


def add_tables(batch: Batch, sequences: Sequence[tuple[Req, np.ndarray]], vocab_size: int) -> None:
    """Put into a batch all that ranks must know of these requests' rows, given each one's prompt and output so far.

    A prompt is said by its distinct ids, and only for a repetition penalty: the others look at outputs alone.
    """
    batch.tables = np.zeros(len(sequences), TABLE_INIT)
    rows, biases, said = [], [], []
    for table, (req, tokens) in zip(batch.tables, sequences, strict=True):
        table["slot"], table["row"] = req.slot, req.table_row
        table["base_bias"] = -np.inf if req.head["flags"] & ONLY_BIASED else 0.0
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
            table[name] = req.head[name]
        rows.append(np.full(len(req.logit_bias), req.table_row, np.int32))
        biases.append(req.logit_bias)
        if req.is_penalised:
            counts = 2 * np.bincount(tokens[req.num_prompt_ids :], minlength=vocab_size)
            if req.head["repetition_penalty"] != 1.0:
                in_prompt = np.zeros(vocab_size, bool)
                in_prompt[tokens[: req.num_prompt_ids]] = True
                counts += in_prompt
            ids = np.flatnonzero(counts)
            said.append(np.stack([np.full(len(ids), req.table_row), ids, counts[ids]]).astype(np.int32))
    if not biases:
        return
    entries = np.concatenate(biases)
    batch.bias_row, batch.bias_id, batch.bias = np.concatenate(rows), entries["id"].copy(), entries["bias"].copy()
    if said:
        batch.said_row, batch.said_id, batch.said = np.concatenate(said, axis=1)
