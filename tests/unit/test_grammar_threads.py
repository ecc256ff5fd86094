"""The threads that grammar jobs run in: who waits for them does so no longer than it must."""

import threading
from collections.abc import Iterator

import pytest

from glm53d.worker.grammar import ThreadPool

LONG_S = 60.0  # never waited out: only a wait that does not end when it should would show it


@pytest.fixture
def pools() -> Iterator[tuple[ThreadPool, ThreadPool]]:
    pools = ThreadPool(1, "a"), ThreadPool(1, "b")
    yield pools
    for pool in pools:
        pool.close()


def test_a_wait_ends_with_the_jobs(pools):
    done: list[int] = []
    for i in range(3):
        pools[0].submit(lambda i=i: done.append(i))
    pools[0].wait_new(LONG_S)
    assert done == [0, 1, 2]


def test_a_job_that_is_late_is_waited_for_once(pools):
    stuck = threading.Event()
    pools[0].submit(lambda: stuck.wait(LONG_S) and None)
    pools[0].wait_new(0.01)
    pools[0].wait_new(LONG_S)
    assert not stuck.is_set()
    stuck.set()


def test_a_wait_for_any_ends_with_the_first_of_either_pool(pools):
    stuck, done = threading.Event(), threading.Event()
    pools[0].submit(lambda: stuck.wait(LONG_S) and None)
    pools[1].submit(done.set)
    pools[0].wait_any(pools[1], LONG_S)
    assert done.is_set() and not stuck.is_set()
    stuck.set()


def test_a_job_that_has_ended_is_not_waited_for_again(pools):
    """Else whoever waits for another one would spin."""
    stuck = threading.Event()
    pools[1].submit(lambda: None)
    pools[1].wait_any(pools[0], LONG_S)
    pools[0].submit(lambda: stuck.wait(LONG_S) and None)
    begun = threading.Timer(0.05, stuck.set)
    begun.start()
    pools[0].wait_any(pools[1], LONG_S)
    assert stuck.is_set()


def test_nobody_waits_where_no_job_runs(pools):
    pools[0].wait_new(LONG_S)
    pools[0].wait_any(pools[1], LONG_S)
