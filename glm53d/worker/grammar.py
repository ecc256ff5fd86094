"""Where grammar jobs run: threads beside the planning one. What they do is glm53d/sched/grammar.py's. [R35]"""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait


class ThreadPool:
    """Threads and the jobs they were given. Used by one thread, whose wait for a job's end is wait()."""

    def __init__(self, threads: int, name: str):
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: list[Future[None]] = []

    @property
    def is_busy(self) -> bool:
        """A job has not ended. One that has is forgotten here: job by job, nobody else asks for its end."""
        self._running = [job for job in self._running if not job.done()]
        return bool(self._running)

    def submit(self, job: Callable[[], None]) -> None:
        self._running.append(self._threads.submit(job))

    def wait_all(self, timeout_s: float) -> None:
        """Until every job has ended, at most so long."""
        if self.is_busy:
            wait(self._running, timeout_s)

    def wait_any(self, others: "ThreadPool", timeout_s: float) -> None:
        """Until a job of these or the others' has ended, at most so long."""
        wait([*self._running, *others._running], timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Jobs that have begun are not waited for: the process ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
