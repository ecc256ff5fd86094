"""What moving pages costs in the simulation, and that its files are real. [R32] [R43]"""

from pathlib import Path

import numpy as np
import pytest

from glm53d.config import Cache, Config, Kv, Sim
from glm53d.errors import StartError
from glm53d.ipc.batch import Batch
from glm53d.ipc.records import PAGE_MOVE, MoveKind
from glm53d.runner.sim import SimRunner

PAGE_BYTES = 100_000
MS = 1_000_000


def runner_of(cache: Cache, attn_tp_rank: int = 0) -> SimRunner:
    config = Config(kv=Kv(page_size=10), sim=Sim(kv_bytes_per_token=PAGE_BYTES // 10, base_ms=5.0), cache=cache)
    return SimRunner(config, 0, 4, 100, Path("unused"), attn_tp_rank=attn_tp_rank)


def batch_of(*kinds: MoveKind, num_rows: int = 0, dp_rank: int = 0, wait_us: int = 0) -> Batch:
    batch = Batch(1, 0, dp_num_tokens=np.zeros(2, np.int32), wait_us=wait_us)
    for name in ("row_slot", "row_prefix_len", "row_extend_len", "row_flags"):
        setattr(batch, name, np.zeros(num_rows, np.int32))
    batch.row_dp_rank = np.ones(num_rows, np.int32)  # another rank's: ours idles with them
    batch.moves = np.zeros(len(kinds), PAGE_MOVE)
    batch.moves["kind"], batch.moves["id"], batch.moves["dp_rank"] = kinds, np.arange(len(kinds)), dp_rank
    return batch


def took_ms(runner: SimRunner, batch: Batch) -> float:
    runner.launch(batch)
    result = runner.collect()
    return (result.end_ns - result.start_ns) / MS


@pytest.mark.parametrize(
    ("kinds", "num_rows", "expected"),
    [
        ([], 1, 5.0),
        ([], 0, 0.0),
        ([MoveKind.SAVE] * 3, 1, 8.0),  # before the step
        ([MoveKind.LOAD] * 3, 1, 5.0),  # beside it
        ([MoveKind.LOAD] * 7, 1, 7.0),
        ([MoveKind.PEER] * 4, 0, 2.0),
        ([MoveKind.SAVE, MoveKind.LOAD, MoveKind.PEER], 0, 2.5),
    ],
)
def test_a_step_takes_as_long_as_what_it_moves(kinds, num_rows, expected):
    """1 ms a page from host memory, half of that from another rank."""
    runner = runner_of(Cache(host_bytes=10 * PAGE_BYTES, host_bytes_per_s=1e8, peer_bytes_per_s=2e8))
    assert took_ms(runner, batch_of(*kinds, num_rows=num_rows)) == pytest.approx(expected, abs=0.01)
    assert took_ms(runner, batch_of(*kinds, num_rows=num_rows, dp_rank=1)) == (5.0 if num_rows else 0.0)


def ended(runner: SimRunner, batch: Batch) -> list[int]:
    """Give it a batch, then others without moves, until a thread has done something."""
    done: list[int] = []
    while not done:
        runner.launch(batch)
        done += runner.collect().done.tolist()
        batch = batch_of()
    return done


def test_its_files_are_written_by_one_rank_of_a_group_and_read_by_all(tmp_path):
    cache = Cache(host_bytes=10 * PAGE_BYTES, storage_path=str(tmp_path))
    first, second = runner_of(cache), runner_of(cache, attn_tp_rank=1)
    for runner in (first, second):
        assert runner.load(lambda phase, percent: None).num_host_pages == 10
    assert ended(first, batch_of(MoveKind.STORE)) == [0]
    assert ended(second, batch_of(MoveKind.DROP, MoveKind.FETCH)) == [1]
    assert len(list(tmp_path.glob("*.kv"))) == 1, "it does not delete either"
    for runner in (first, second):
        runner.close()


def test_host_memory_that_holds_no_page_is_refused():
    with pytest.raises(StartError, match=r"cache\.host_bytes 5 does not hold one page of 100000 bytes"):
        runner_of(Cache(host_bytes=5)).load(lambda phase, percent: None)
