"""A real daemon in a process of its own, on a free port, and what tests ask of it."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
START_S = 120


PORTS = range(10_000, 30_000)  # below those that connections get by themselves: nobody takes one before it is used


def free_port(number: int = 1) -> int:
    """The first of so many ports in a row that nobody listens on now."""
    while True:
        first = random.choice(PORTS)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


class Daemon:
    """Starts `glm53d.py` with the given overrides and waits until it is ready.

    before: what a shell does first, in the process that main will be. program: which the ranks run as well, but for
    what is under its guard.
    """

    def __init__(
        self, *overrides: str, config: str | None = None, log: Path, wait: bool = True, before: str = "",
        program: Path = ROOT / "glm53d.py",
    ):  # fmt: skip
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        args = ["--config", str(ROOT / "conf" / config)] if config else []
        for override in (f"server.port={self.port}", *overrides):
            args += ["--set", override]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                ["sh", "-c", before + ' exec "$@"', "sh", sys.executable, str(program), *args],
                stderr=out,
                stdout=out,
                cwd=ROOT,
                start_new_session=True,
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until /ready says 200."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.log.read_text()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.02)
        raise AssertionError(f"not ready after {START_S} s:\n{self.log.read_text()}")

    def pids(self) -> list[int]:
        """Every process of the daemon: its session's members."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if os.getsid(int(entry)) == self.process.pid:
                        found.append(int(entry))
        return found

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Signal main and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)

    def kill_all(self) -> None:
        """Whatever is left of it."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


@contextlib.contextmanager
def running(*overrides: str, config: str | None = None, log: Path) -> Iterator[Daemon]:
    """A ready daemon; gone at the end, whatever happened."""
    daemon = Daemon(*overrides, config=config, log=log)
    try:
        yield daemon
    finally:
        daemon.kill_all()


@contextlib.contextmanager
def scripted(text: str, *, after_tools: str = "", log: Path) -> Iterator[Daemon]:
    """A ready daemon whose simulated engine gives this answer to all, and that one to a tool's result, at once."""
    fast = ("sim.base_ms=0.2", "sim.per_prefill_token_us=1", "scheduler.debug_checks=true", "kv.page_size=16")
    script = {"text": text, "after_tools": after_tools}
    texts = [f"sim.{name}={json.dumps(value, ensure_ascii=False)}" for name, value in script.items()]
    with running(*fast, *texts, config="sim.toml", log=log) as daemon:
        yield daemon


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """The decoded events of an SSE answer; [DONE] as the string."""
    found: list[Any] = []
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


def memory(pid: int) -> int:
    """Bytes that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("VmRSS:", "VmSwap:")))


async def idle_info(session: aiohttp.ClientSession, url: str, deadline_s: float = 20) -> dict[str, Any]:
    """/server_info once nothing is in flight any more; the last one seen when that does not come."""
    end = time.monotonic() + deadline_s
    while True:
        async with session.get(url + "/server_info") as answer:
            info = await answer.json()
        busy = sum(load["num_running"] + load["num_waiting"] for load in info["loads"])
        is_idle = info["requests_in_flight"] == busy == 0
        if is_idle or time.monotonic() > end:
            return info
        await asyncio.sleep(0.05)
