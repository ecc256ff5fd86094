"""The one interface between planning and computing: a Runner takes a Batch and gives a StepResult. [R43]"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from glm53d.errors import StartError
from glm53d.ipc.batch import Batch, StepResult

Progress = Callable[[str, int], None]
"""progress(phase, percent), the phase of LOAD_PHASES: shown by /ready and in the log while a rank loads."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank found out while loading; goes into its *loaded* report. [R3]"""

    num_pages: int  # of this rank's KV pool
    page_size: int  # tokens per page
    max_context_len: int  # prompt + output, of the model
    kv_bytes_per_token: int
    weight_bytes: int
    num_host_pages: int = 0  # of this rank's host pool [R32]
    page_file_bytes: int = 0  # of a page in a file, without the file's head


def host_pages(host_bytes: int, page_bytes: int) -> int:
    """Pages of a host pool. Raises StartError when not one fits."""
    if host_bytes and host_bytes < page_bytes:
        raise StartError(f"cache.host_bytes {host_bytes} does not hold one page of {page_bytes} bytes")
    return host_bytes // page_bytes


def available_bytes() -> int:
    """Of the machine's memory, what can be had without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(available.split()[1]) * 1024


class Runner(Protocol):
    """One rank's engine. Used by one thread only; a step is launched, then collected, in order."""

    def load(self, progress: Progress) -> Loaded:
        """Make ready to run. Raises CheckpointError or StartError, naming what is wrong."""
        ...

    def launch(self, batch: Batch) -> None:
        """Start a step; the batch's arrays may be reused once this returns."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step not yet collected; waits for it."""
        ...

    def close(self) -> None:
        """Give back memory and handles."""
        ...
