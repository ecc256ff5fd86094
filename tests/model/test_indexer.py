"""Which tokens are chosen: by score, then by lowest position, whatever the kernel does with ties."""

import pytest
import torch

from glm53d.model.indexer import top_positions

INF = float("inf")


@pytest.mark.parametrize("k", [1, 7, 64, 100])
def test_the_choice_is_that_of_a_stable_sort(k):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(-3, 4, (50, 64), generator=generator).float() * 0.25  # 7 values: nearly all are ties
    expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert top_positions(scores, k).tolist() == expected.tolist()


def test_minus_zero_is_a_tie_with_zero():
    assert top_positions(torch.tensor([[-0.0, 0.0, -0.0, -1.0]]), 3).tolist() == [[0, 1, 2]]


def test_hidden_positions_are_never_chosen():
    scores = torch.tensor([[-INF, -1e30, -INF, 5.0], [-INF, -INF, -INF, -INF]])
    assert top_positions(scores, 3).tolist() == [[3, 1, -1], [-1, -1, -1]]
