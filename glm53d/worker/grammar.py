"""Where grammar jobs run: threads beside the planning one. What they do is glm53d/sched/grammar.py's. [R35]"""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait


class ThreadPool:
    """Threads and the jobs they were given. Used by one thread, which may wait for a job's end, but not for long."""

    def __init__(self, threads: int, name: str):
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._jobs: list[Future[None]] = []
        self._new: list[Future[None]] = []  # of these, since the last wait for such

    def submit(self, job: Callable[[], None]) -> None:
        self._forget()
        self._new.append(self._threads.submit(job))
        self._jobs.append(self._new[-1])

    def wait_new(self, timeout_s: float) -> None:
        """Until the jobs since the last such wait have ended, at most so long: who is late is not waited for again."""
        if self._new:
            wait(self._new, timeout_s)
            self._new = []

    def wait_any(self, others: "ThreadPool", timeout_s: float) -> None:
        """Until a job of these or the others' has ended since it was last looked at, at most so long."""
        if jobs := self._jobs + others._jobs:
            wait(jobs, timeout_s, FIRST_COMPLETED)
            self._forget()
            others._forget()

    def _forget(self) -> None:
        """Jobs that have ended: a later wait is for others."""
        self._jobs = [job for job in self._jobs if not job.done()]
        self._new = [job for job in self._new if not job.done()]

    def close(self) -> None:
        """Jobs that have begun are not waited for: the process ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
