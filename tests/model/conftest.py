"""Worlds of 2 and 4 ranks, started once for all tests that want them; and the parity matrix's summary."""

from collections.abc import Iterator

import pytest

from tests.model.world import Ranks

MATRIX = pytest.StashKey[dict[tuple[str, str], list[bool]]]()
"""(layout, feature) -> whether each seed's tokens were those of one rank."""


@pytest.fixture(scope="session", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Each load() makes them a new world of this size. Loading torch is most of what starting them costs."""
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MATRIX] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Layouts down, features across; in each place how many seeds agreed, of how many."""
    matrix = config.stash[MATRIX]
    if not matrix:
        return
    layouts, features = sorted({layout for layout, _ in matrix}), list(dict.fromkeys(name for _, name in matrix))
    terminalreporter.section("tokens equal to those of one rank: seeds of each layout and feature")
    terminalreporter.write_line(" " * 22 + "".join(f"{name:>15}" for name in features))
    for layout in layouts:
        found = [matrix.get((layout, name), []) for name in features]
        cells = "".join(f"{f'{sum(seeds)}/{len(seeds)}' if seeds else '·':>15}" for seeds in found)
        terminalreporter.write_line(f"{layout:<22}{cells}")
