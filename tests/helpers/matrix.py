"""The parity matrix of tests/model/test_parallel.py, printed behind all tests."""

import pytest


class Matrix:
    """Of each layout and feature, whether each seed's tokens were those of one rank. Reports come from all workers."""

    def __init__(self) -> None:
        self.seeds: dict[tuple[str, str], list[bool]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, place in report.user_properties:
            if name == "matrix" and report.when == "call":
                layout, feature = place
                self.seeds.setdefault((layout, feature), []).append(report.passed)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Layouts down, features across; in each place how many seeds agreed, of how many."""
        if not self.seeds:
            return
        layouts, features = sorted({layout for layout, _ in self.seeds}), sorted({name for _, name in self.seeds})
        terminalreporter.section("tokens equal to those of one rank: seeds of each layout and feature")
        terminalreporter.write_line(" " * 22 + "".join(f"{name:>15}" for name in features))
        for layout in layouts:
            found = [self.seeds.get((layout, name), []) for name in features]
            cells = "".join(f"{f'{sum(seeds)}/{len(seeds)}' if seeds else '·':>15}" for seeds in found)
            terminalreporter.write_line(f"{layout:<22}{cells}")
