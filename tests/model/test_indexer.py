"""Which tokens are chosen: by score, then by lowest position, whatever the kernel does with ties."""

import pytest
import torch

from glm53d.model import indexer
from glm53d.model.indexer import largest, ranked, top_positions
from glm53d.model.step import Causal, Gathered
from tests.helpers.model import LoneModel
from tests.model.synthetic import make_checkpoint

INF = float("inf")


@pytest.mark.parametrize("k", [1, 7, 64, 100])
def test_the_choice_is_that_of_a_stable_sort(k):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(-3, 4, (50, 64), generator=generator).float() * 0.25  # 7 values: nearly all are ties
    expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert top_positions(scores, k).tolist() == expected.tolist()
    ranks = ranked(scores)
    is_chosen = ranks >= largest(ranks, min(k, 64))
    assert [row.nonzero().flatten().tolist() for row in is_chosen] == expected.sort(1).values.tolist()


@pytest.mark.parametrize(("prefix", "tokens"), [(0, 100), (7, 60), (60, 20)])
def test_a_prompt_attends_to_the_same_rows_by_lists_and_with_others_hidden(tmp_path, monkeypatch, prefix, tokens):
    make_checkpoint(tmp_path, 0)
    lone = LoneModel(tmp_path, 128)
    chosen, topk = lone.layers[0].attention.indexer, lone.config.index_topk
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, lone.config.vocab_size, (prefix + tokens,), generator=generator)
    if prefix:
        lone.run([ids[:prefix]], [0])
    lone.run([ids[prefix:]], [prefix])
    step = lone.step([ids[prefix:]], [prefix])
    assert chosen is not None and prefix + tokens > topk
    q, w = (torch.randn(tokens, n, generator=generator) for n in (chosen.heads * chosen.head_dim, chosen.heads))
    angles, keys = lone.model.rope.angles(step.positions), lone.cache.index_k[0]
    [once] = chosen.choose(step.groups, q, w, angles, keys)
    monkeypatch.setattr(indexer, "READ_ONCE", 0)
    [lists] = chosen.choose(step.groups, q, w, angles, keys)
    assert isinstance(once, Causal) and isinstance(lists, Gathered)
    for query in range(tokens):
        assert set(lists.locs[query][lists.hidden[query, 0] == 0].tolist()) == set(
            once.locs[~once.hidden[query]].tolist()
        )


def test_minus_zero_is_a_tie_with_zero():
    assert top_positions(torch.tensor([[-0.0, 0.0, -0.0, -1.0]]), 3).tolist() == [[0, 1, 2]]


def test_hidden_positions_are_never_chosen():
    scores = torch.tensor([[-INF, -1e30, -INF, 5.0], [-INF, -INF, -INF, -INF]])
    assert top_positions(scores, 3).tolist() == [[3, 1, -1], [-1, -1, -1]]
