"""Two variants of anything that prints bench rows, side by side: how many times better the second one is, row by row.

    python -m bench.compare --runs 5 "python -m bench.micro.render" "python -m bench.micro.render --template x.jinja"
    python -m bench.compare before.json after.json

Given commands, runs them in turn with --json added, the first one first in every other run; so a machine that slows
down slows both. Given files, compares what `--json` printed into them. Ratios are of the runs' own pairs: median, min
and max over the runs. Above 1 the second one is better, whichever direction is better for that row.
"""

import argparse
import json
import shlex
import statistics
import subprocess
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

from bench.measure import Row, number, render_columns

Rows = dict[str, Row]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the comparison: medians of both, and how many times better the second is, over the pairs."""

    what: str
    unit: str
    first: float
    second: float
    ratio: float  # the median
    min: float
    max: float


def load(text: str) -> Rows:
    """Rows by name, from what a bench printed with --json. Raises SystemExit when it is something else."""
    try:
        rows = [Row(**row) for row in json.loads(text)["rows"]]
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"not the JSON of a bench: {error}: {text[:200]!r}") from None
    return {row.what: row for row in rows}


def run(command: str) -> Rows:
    """The rows of one run. Raises SystemExit when the command fails."""
    done = subprocess.run([*shlex.split(command), "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command!r} ended with {done.returncode}")
    return load(done.stdout)


def run_both(first: str, second: str, runs: int) -> list[tuple[Rows, Rows]]:
    """Pairs of runs, interleaved, the order turned round each time."""
    pairs = []
    for i in range(runs):
        if i % 2:
            after = run(second)
            pairs.append((run(first), after))
        else:
            before = run(first)
            pairs.append((before, run(second)))
    return pairs


def compare(pairs: list[tuple[Rows, Rows]]) -> list[Entry]:
    """One entry per row that both have."""
    entries = []
    for what, row in pairs[0][0].items():
        found = [(a[what].value, b[what].value) for a, b in pairs if what in a and what in b]
        ratios = [(a / b if row.better == "less" else b / a) for a, b in found if a and b]
        if not ratios:
            continue
        first, second = statistics.median(a for a, _ in found), statistics.median(b for _, b in found)
        ratio = statistics.median(ratios)
        entries.append(Entry(what, row.unit, first, second, ratio, min(ratios), max(ratios)))
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", help="a command, or a file of JSON")
    parser.add_argument("second")
    parser.add_argument("--runs", type=int, default=5, help="of each command")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if Path(args.first).is_file() and Path(args.second).is_file():
        pairs = [(load(Path(args.first).read_text()), load(Path(args.second).read_text()))]
    else:
        pairs = run_both(args.first, args.second, args.runs)
    entries = compare(pairs)
    if not entries:
        raise SystemExit("the two have no row in common")
    if args.json:
        print(json.dumps({"runs": len(pairs), "rows": [asdict(entry) for entry in entries]}, ensure_ascii=False))
        return
    lines = [[cell if isinstance(cell, str) else number(cell) for cell in astuple(entry)] for entry in entries]
    print(render_columns([[one.name for one in fields(Entry)], *lines]))


if __name__ == "__main__":
    main()
