"""CPU time of a server's processes, and of everybody else on the machine, from the kernel's own account."""

import os
import time
from pathlib import Path

from bench.measure import Row


class CpuMeter:
    """CPU time of processes since the meter was made, by the names they are given; all their living threads."""

    def __init__(self, pids: dict[str, int]):
        self._pids = pids
        self._start = self._read()
        self._start_all = self._read_all()

    def _read(self) -> dict[str, int]:
        return {name: sum(map(_thread_ns, Path(f"/proc/{pid}/task").iterdir())) for name, pid in self._pids.items()}

    def spent_us(self) -> dict[str, float]:
        """µs by name, and their sum as "all"."""
        now = self._read()
        spent = {name: (now[name] - start) / 1e3 for name, start in self._start.items()}
        return spent | {"all": sum(spent.values())}

    def disturbance(self) -> float:
        """How many CPUs, on average, worked for others: neither for these processes nor for this one."""
        start_ns, busy, own = self._start_all
        now_ns, now_busy, now_own = self._read_all()
        others_s = (now_busy - busy) / os.sysconf("SC_CLK_TCK") - (now_own - own) / 1e9 - self.spent_us()["all"] / 1e6
        return max(0.0, others_s / ((now_ns - start_ns) / 1e9))

    @staticmethod
    def _read_all() -> tuple[int, int, int]:
        """Now in ns, the machine's busy time in ticks, this process's in ns."""
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
        return time.monotonic_ns(), user + nice + system + irq + softirq + steal, time.process_time_ns()


def _thread_ns(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[0])
    except OSError:  # it has just ended; its time is lost, which is why only long-lived threads are measured well
        return 0


def cpu_rows(name: str, spent_us: dict[str, float], per: int, unit: str) -> list[Row]:
    """A row per process: µs per token or per request."""
    return [Row(f"{name}: CPU per {unit}, {process}", "µs", us / per) for process, us in spent_us.items()]
