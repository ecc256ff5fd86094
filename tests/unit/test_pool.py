"""TextPool. [R18]"""

import asyncio
import threading

import pytest

from glm53d.errors import Overloaded
from glm53d.text.pool import TextPool


class Gate:
    """A job that says when it has begun and ends when it is let."""

    def __init__(self):
        self.begun, self._open = threading.Event(), threading.Event()

    def job(self):
        self.begun.set()
        assert self._open.wait(60)
        return "done"

    def open(self):
        self._open.set()

    async def wait_until_begun(self):
        assert await asyncio.to_thread(self.begun.wait, 60)


@pytest.fixture
def pool():
    pool = TextPool(threads=1, max_queued=2)
    yield pool
    pool.close()


@pytest.fixture
async def busy(pool):
    """The one thread holds this gate's job."""
    gate = Gate()
    task = asyncio.create_task(pool.run(gate.job))
    await gate.wait_until_begun()
    yield gate
    gate.open()
    assert await task == "done"


async def test_a_job_gives_its_result_and_raises_what_it_raised(pool):
    assert await pool.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 7, 0)


async def test_a_job_runs_in_a_thread_of_the_pool_and_jobs_of_many_threads_run_at_once():
    pool, barrier = TextPool(threads=3, max_queued=0), threading.Barrier(4, timeout=60)
    jobs = [asyncio.create_task(pool.run(barrier.wait)) for _ in range(3)]
    await asyncio.to_thread(barrier.wait)  # passes only when all three jobs wait there with it
    await asyncio.gather(*jobs)
    assert (await pool.run(threading.current_thread)).name.startswith("text-")
    pool.close()


async def test_a_full_queue_refuses_at_once_and_takes_jobs_again_later(pool, busy):
    waiting = [asyncio.create_task(pool.run(int, text)) for text in ("1", "2")]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await pool.run(int, "3")
    busy.open()
    assert await asyncio.gather(*waiting) == [1, 2]
    assert await pool.run(int, "3") == 3


async def test_free_threads_take_jobs_though_nothing_may_wait():
    pool = TextPool(threads=2, max_queued=0)
    assert await asyncio.gather(pool.run(int, "1"), pool.run(int, "2")) == [1, 2]
    pool.close()


async def test_a_job_cancelled_before_its_turn_never_runs_and_frees_its_place(pool, busy):
    ran = []
    waiting = [asyncio.create_task(pool.run(ran.append, i)) for i in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert pool.num_jobs == 2
    third = asyncio.create_task(pool.run(ran.append, 2))
    busy.open()
    await asyncio.gather(waiting[1], third)
    assert ran == [1, 2]
    assert pool.num_jobs == 0


async def test_a_job_cancelled_while_it_runs_ends_unheard(pool):
    gate = Gate()
    task = asyncio.create_task(pool.run(gate.job))
    await gate.wait_until_begun()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    assert await pool.run(int, "1") == 1


class Panic(BaseException):
    """As native libraries raise for their own bugs."""


async def test_a_thread_survives_what_is_no_exception(pool):
    def job():
        raise Panic

    with pytest.raises(Panic):
        await pool.run(job)
    assert await pool.run(int, "6") == 6


async def test_jobs_begin_in_the_order_they_came(pool, busy):
    order = []
    waiting = [asyncio.create_task(pool.run(order.append, i)) for i in range(2)]
    await asyncio.sleep(0)
    busy.open()
    await asyncio.gather(*waiting)
    assert order == [0, 1]


async def test_close_waits_for_jobs_that_wait_and_leaves_no_thread():
    before = threading.active_count()
    pool, done = TextPool(threads=2, max_queued=100), []
    jobs = [asyncio.create_task(pool.run(done.append, i)) for i in range(50)]
    await asyncio.sleep(0)
    pool.close()
    assert sorted(done) == list(range(50))
    assert threading.active_count() == before
    await asyncio.gather(*jobs)
