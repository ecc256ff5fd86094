"""/tokenize and /detokenize: how much they take and give. What they refuse: tests/unit/test_server_refusals.py."""

import numpy as np
import pytest

from glm53d.server.text_api import PART


@pytest.mark.parametrize("count", [0, 1, PART, 2 * PART + 1])
async def test_tokenize_gives_every_id(client, monkeypatch, count):
    async def tokenize(_):
        return np.arange(count, dtype=np.int32)

    monkeypatch.setattr(client.engine, "tokenize", tokenize)
    assert (await client.post("/tokenize", {"prompt": "a"})).json == {
        "tokens": list(range(count)), "count": count, "max_model_len": 100,
    }  # fmt: skip


async def test_detokenize_takes_as_many_ids_as_the_context_has(client):
    assert (await client.post("/detokenize", {"tokens": [1] * 100})).json["text"] == "100 ids"
    answer = await client.post("/detokenize", {"tokens": [1] * 101})
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "tokens")
    assert answer.error["message"] == "`tokens` has 101 ids; at most 100 fit the context."
