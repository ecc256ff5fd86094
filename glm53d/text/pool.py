"""TextPool: threads that run jobs for an event loop, with a bounded queue. It knows nothing of what runs in them. [R18]

run()      puts a future and its call into `waiting`, then one permit into the queue of permits
a thread   takes a permit, then the oldest of `waiting`; there is none when that job was cancelled meanwhile
the loop   gets each result by one call_soon_threadsafe
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

from glm53d.errors import Overloaded

T = TypeVar("T")


class TextPool:
    """A fixed number of threads and a bounded queue before them. Used from one event loop."""

    def __init__(self, threads: int, max_queued: int):
        self._max_jobs = threads + max_queued
        self._lock = Lock()  # guards the next two
        self._waiting: OrderedDict[asyncio.Future, Callable[[], object]] = OrderedDict()
        self._num_running = 0
        self._permits: SimpleQueue[bool] = SimpleQueue()  # False ends a thread
        # Daemons: a process that dies without close() does not wait for a long job.
        self._threads = [Thread(target=self._work, name=f"text-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run."""
        with self._lock:
            return len(self._waiting) + self._num_running

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """fn(*args), run in a thread; what it raises is raised here.

        Raises Overloaded at once when every thread is busy and the queue is full. Cancelled before its turn, the job
        never runs and its place is free at once; cancelled later it runs to its end, unheard.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            if len(self._waiting) + self._num_running >= self._max_jobs:
                raise Overloaded("Too many prompts wait to be tokenized (text.max_queued); try again later.")
            self._waiting[future] = lambda: fn(*args)
        self._permits.put(True)
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                self._waiting.pop(future, None)
            raise

    def close(self) -> None:
        """Run what is waiting to its end, then stop the threads. Blocks; run() must not be called any more."""
        for _ in self._threads:
            self._permits.put(False)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while self._permits.get():
            with self._lock:
                if not self._waiting:
                    continue
                future, call = self._waiting.popitem(last=False)
                self._num_running += 1
            self._run_one(future, call)
            del future, call  # an idle thread keeps no prompt alive

    def _run_one(self, future: asyncio.Future, call: Callable[[], object]) -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # a panic in a native library is no Exception, and must not end the thread
            error = raised
        with self._lock:
            self._num_running -= 1
        future.get_loop().call_soon_threadsafe(_deliver, future, result, error)
        error = None  # its traceback holds this frame: a cycle, and in it the prompt


def _deliver(future: asyncio.Future, result: object, error: BaseException | None) -> None:
    if future.done():  # cancelled while the job ran
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
