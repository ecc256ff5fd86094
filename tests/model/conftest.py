"""Worlds of 2 and 4 ranks, started once for all tests that want them."""

from collections.abc import Iterator

import pytest

from tests.model.world import Ranks


@pytest.fixture(scope="session", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Each load() makes them a new world of this size. Loading torch is most of what starting them costs."""
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()
