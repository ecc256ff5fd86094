"""What all benches share: timing in interleaved rounds, one kind of result row, one table and one JSON form.

A row stands alone: what was measured, its unit, the value, the same of a named alternative in the same run, and the
number to reach. Absolute values belong to the machine; ratios within one run can be compared: compare.py does.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Clock = Callable[[], int]
"""Nanoseconds: time.thread_time_ns for work of this thread alone, time.perf_counter_ns where others take part."""

ROUNDS = 9
ROUND_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call, over all rounds."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Row:
    """One number. `low` and `high` are its extremes over the rounds, where there were rounds."""

    what: str
    unit: str
    value: float
    low: float | None = None
    high: float | None = None
    against: str = ""  # a named alternative, measured in the same run
    against_value: float | None = None
    aim: float | None = None
    better: Literal["less", "more"] = "less"

    @property
    def ratio(self) -> float | None:
        """How many times better than the alternative."""
        if not self.against_value or not self.value:
            return None
        ratio = self.against_value / self.value
        return ratio if self.better == "less" else 1 / ratio

    @property
    def reached(self) -> bool | None:
        """Whether the aim is met; None where there is none."""
        if self.aim is None:
            return None
        return self.value <= self.aim if self.better == "less" else self.value >= self.aim


def time_calls(calls: Mapping[str, Callable[[], object]], rounds: int, clock: Clock) -> dict[str, Timing]:
    """µs per call of each. Rounds alternate between them, so what disturbs the machine disturbs all alike."""
    counts = {}
    for name, call in calls.items():
        call()  # the first one may build what the others reuse
        start = clock()
        call()
        counts[name] = max(1, ROUND_NS // max(1, clock() - start))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            for _ in range(counts[name]):
                call()
            found[name].append((clock() - start) / counts[name] / 1e3)
    return {name: Timing(statistics.median(us), min(us), max(us)) for name, us in found.items()}


def timed_row(
    what: str,
    ours: Callable[[], object],
    *,
    rounds: int,
    per: int = 1,
    against: tuple[str, Callable[[], object]] | None = None,
    aim: float | None = None,
    clock: Clock = time.thread_time_ns,
) -> Row:
    """Time ours, and the alternative between its rounds. `per`: how many units one call does, of either."""
    calls = {"ours": ours} if against is None else {"ours": ours, "theirs": against[1]}
    timings = time_calls(calls, rounds, clock)
    mine = timings["ours"]
    row = Row(what, "µs", mine.median / per, mine.min / per, mine.max / per, aim=aim)
    if against is None:
        return row
    return Row(what, "µs", row.value, row.low, row.high, against[0], timings["theirs"].median / per, aim)


def make_parser(doc: str | None, *, rounds: bool = True) -> argparse.ArgumentParser:
    """The options every bench has; the module's docstring is its help. rounds: whether it works in rounds."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    if rounds:
        parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds per number; the median counts")
    return parser


def report(title: str, rows: list[Row], as_json: bool) -> None:
    """Print the rows: for people, or for compare.py."""
    if as_json:
        print(json.dumps({"title": title, "rows": [asdict(row) for row in rows]}, ensure_ascii=False))
    else:
        print(render_table(title, rows), flush=True)


def render_table(title: str, rows: list[Row]) -> str:
    """Rows as text, columns only where some row has them."""
    table = [["what", "value", "unit", "min", "max", "against", "there", "ratio", "aim", ""]]
    for row in rows:
        mark = {None: "", True: "reached", False: "missed"}[row.reached]
        aim = "" if row.aim is None else f"{'≤' if row.better == 'less' else '≥'} {number(row.aim)}"
        ratio = "" if row.ratio is None else f"{row.ratio:.1f}x"
        cells = [row.what, number(row.value), row.unit, number(row.low), number(row.high), row.against]
        table.append([*cells, number(row.against_value), ratio, aim, mark])
    return f"== {title}\n{render_columns(table)}\n"


def render_columns(table: list[list[str]]) -> str:
    """Lines of equal columns, the first line their names; a column that is empty but for its name is left out."""
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*map(_aligned, columns), strict=True))


def _aligned(column: tuple[str, ...]) -> list[str]:
    width = max(map(len, column))
    return [cell.rjust(width) if column[0] in NUMERIC else cell.ljust(width) for cell in column]


NUMERIC = ("value", "min", "max", "there", "ratio", "aim", "first", "second")


def number(value: float | None) -> str:
    """Three significant digits, or all of those before the point."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all are not above. values is not empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
