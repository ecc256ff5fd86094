"""The scheduler alone: one step with so many decoding requests, planned, applied and turned into output records.

    python -m bench.micro.next_batch [--rows 1,64,256,512]

CPU µs per step on the leader's thread, by number of rows, in three parts and in all; without model, rings and board.
Each round takes the mean over steps enough that every request gets its next page a few times.
"""

import time

import numpy as np

from bench.measure import Row, make_parser, percentile, report
from glm53d._native import ByteVocab
from glm53d.ipc.batch import StepResult
from glm53d.sched import results
from glm53d.sched.limits import Limits
from glm53d.sched.scheduler import Scheduler
from tests.helpers.sched_world import generate_record

PAGE, PROMPT, STEPS = 64, 100, 256
PARTS = ("plan", "apply", "outputs")


class World:
    """A scheduler with `rows` requests that decode for ever, and the results a runner would give."""

    def __init__(self, rows: int, steps: int):
        tokens = PROMPT + steps + 2 * PAGE
        pages = rows * (tokens // PAGE + 2)
        self.sched = Scheduler(
            Limits(
                attn_dp_size=1,
                num_pages=pages,
                page_size=PAGE,
                max_context_len=tokens,
                max_running=rows,
                max_step_tokens=2048,
                max_step_area=1 << 30,
                eos_ids=(0,),
                vocab_size=150_000,
                think_end=149_999,
                call_begin=-1,
                calls_ends=(0,),
            ),
            ByteVocab([b"text"] * 150_000, [False] * 150_000),
        )
        rng = np.random.default_rng(rows)
        for handle in range(1, rows + 1):
            prompt = rng.integers(1, 150_000, PROMPT).tolist()
            self.sched.receive(generate_record(handle, prompt, tokens, page_size=PAGE), 0)
        self.ids = rng.integers(1, 150_000, (rows, 1), dtype=np.int32)
        self.spent = dict.fromkeys(PARTS, 0)
        while len(self.sched.decoding_slots()) < rows:
            self.step()

    def step(self) -> None:
        """One turn of the leader's loop, timed in its parts."""
        sched, start = self.sched, time.thread_time_ns()
        batch = sched.next_batch(start)
        planned = time.thread_time_ns()
        assert batch is not None
        sampled = (batch.row_flags & 1).astype(np.int32)
        result = StepResult(batch.step, sampled, self.ids[: batch.num_rows])
        given = time.thread_time_ns()
        results.apply(sched, batch, result, given)
        applied = time.thread_time_ns()
        due, _, _ = sched.throttle.due(sched.decoding_slots())
        sched.throttle.mark_sent(due)
        sent = time.thread_time_ns()
        for part, spent in zip(PARTS, (planned - start, applied - given, sent - applied), strict=True):
            self.spent[part] += spent


def measure(rows_list: list[int], rounds: int) -> list[Row]:
    """Three parts and their sum, for each number of rows."""
    table = []
    for rows in rows_list:
        world = World(rows, STEPS * rounds)
        found: dict[str, list[float]] = {part: [] for part in (*PARTS, "in all")}
        for _ in range(rounds):
            world.spent = dict.fromkeys(PARTS, 0)
            for _ in range(STEPS):
                world.step()
            for part, spent in world.spent.items():
                found[part].append(spent / STEPS / 1e3)
            found["in all"].append(sum(world.spent.values()) / STEPS / 1e3)
        for part, us in found.items():
            table.append(Row(f"step of {rows} rows: {part}", "µs", percentile(us, 0.5), min(us), max(us)))
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", default="1,64,256,512", help="decoding requests, separated by commas")
    args = parser.parse_args()
    report("scheduler step", measure([int(rows) for rows in args.rows.split(",")], args.rounds), args.json)


if __name__ == "__main__":
    main()
