"""The pictures of docs/scheduler.md, from the real scheduler under a virtual clock.

    pip install matplotlib
    python -m bench.plots [--folder docs/img]

gaps.svg       between two tokens of four streams while a prompt of 20,000 tokens arrives, with and without a target
placement.svg  what each policy makes of the same agents (bench/placement.py)
retention.svg  agents beside other traffic that fills the pools, with and without keeping the prefixes of sessions
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.placement import Node, Outcome
from glm53d.ipc.batch import Batch
from glm53d.ipc.records import ROW_FEED
from glm53d.sched.placement import POLICIES
from tests.helpers.sched_world import SchedWorld, prompt_area

MS = 1_000_000
TARGET_MS = 15
# Ten agents beside documents that everybody reads once: more than the pools hold.
CROWDED: dict[str, Any] = {"sessions": 10, "turns": 24, "num_pages": 5000, "documents_per_s": 8}


def step_ns(batch: Batch) -> int:
    """5 ms, 0.2 ms per row, 20 us per prompt token, and 1 ms per million of new tokens times context."""
    fed = (batch.row_flags & ROW_FEED) != 0
    prompt_tokens = int(batch.row_extend_len[~fed].sum())
    return int(5 * MS + 0.2 * MS * np.count_nonzero(fed) + 20_000 * prompt_tokens + prompt_area(batch).sum())


def gaps_ms(target_ms: float, prompt_len: int) -> tuple[list[float], list[float]]:
    """When tokens of four streams came, and how long after those before, in ms. The prompt arrives at 0.5 s."""
    world = SchedWorld(
        1, eos_chance=0, num_pages=8000, page_size=16, max_context_len=80_000, max_running=16, max_step_tokens=4096,
        target_itl_ns=int(target_ms * MS), step_ns=step_ns,
    )  # fmt: skip
    for handle in range(1, 5):
        world.send(handle, [handle], 10_000)
    at, gaps = [], []
    arrived = not prompt_len
    while world.now < 6000 * MS:
        if not arrived and world.now > 500 * MS:
            world.send(9, [1 + i % 40 for i in range(prompt_len)], 1)
            arrived = True
        before = world.now
        world.step()
        if world.now - before > MS:  # else nothing ran
            at.append(world.now / MS)
            gaps.append((world.now - before) / MS)
    return at, gaps


def plot_gaps(axes: Axes) -> None:
    """Three runs over the same axis."""
    for label, target_ms, prompt_len in (
        ("no prompt arrives", 0, 0),
        ("no target", 0, 20_000),
        (f"target_itl_ms = {TARGET_MS}", TARGET_MS, 20_000),
    ):
        axes.plot(*gaps_ms(target_ms, prompt_len), label=label, linewidth=1, drawstyle="steps-pre")
    axes.set_xlabel("time, ms")
    axes.set_ylabel("time between two tokens, ms")
    axes.set_yscale("log")
    axes.legend()


def plot_bars(axes: Axes, outcomes: list[tuple[str, Outcome]]) -> None:
    """Mean time to the first token as bars, with p99 and the cached share in words."""
    names = [f"{label}\n{outcome.cached:.0%} cached" for label, outcome in outcomes]
    means = [outcome.mean_ttft_ms for _, outcome in outcomes]
    bars = axes.barh(names, means)
    axes.bar_label(bars, [f" {o.mean_ttft_ms:,.0f} (p99 {o.p99_ttft_ms:,.0f})" for _, o in outcomes])
    axes.margins(x=0.35)
    axes.invert_yaxis()
    axes.set_xlabel("mean time to first token, ms")


@contextmanager
def picture(path: Path, height: float) -> Iterator[Axes]:
    """Axes to draw on; behind the block the picture is a file."""
    figure = Figure(figsize=(7, height), layout="constrained")
    yield figure.subplots()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("docs/img"))
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=43)
    args = parser.parse_args()
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text: small, and searchable
    mpl.rcParams["svg.hashsalt"] = "glm53d"  # the same picture gives the same file
    agents = (args.sessions, args.turns)
    with picture(args.folder / "gaps.svg", 3) as axes:
        plot_gaps(axes)
    with picture(args.folder / "placement.svg", 2.8) as axes:
        plot_bars(axes, [(name, Node(name, *agents).run()) for name in POLICIES])
    with picture(args.folder / "retention.svg", 1.8) as axes:
        plot_bars(
            axes,
            [
                (label, Node("least_cost", **CROWDED, ttl_s=ttl_s).run())
                for label, ttl_s in (("prefixes of sessions kept", 300), ("not kept", 0))
            ],
        )


if __name__ == "__main__":
    main()
