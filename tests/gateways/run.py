"""Two daemons behind each real gateway: routing, DP-aware mode, drain, a worker killed in the middle of a stream.

Run by `make gateways`, which installs the gateways; not in CI. Prints one line per check; exits 1 if one failed.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from tests.helpers.daemon import Daemon, free_port

KEY = "gateway-key"
WORKER = (
    "sim.base_ms=2", "parallel.tp_size=2", "parallel.attn_dp_size=2", f'server.api_keys=["{KEY}"]',
    "model.owned_by=sglang",
)  # fmt: skip
CHAT = {"model": "glm-5.3-nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ENDLESS = CHAT | {"stream": True, "ignore_eos": True, "max_tokens": 100_000}
COMMANDS = {
    "sglang-router": ("python", "-m", "sglang_router.launch_router", "--policy", "round_robin"),
    "smg": ("smg", "launch", "--policy", "power_of_two"),
}


@contextlib.contextmanager
def gateway(folder: Path, name: str, workers: list[Daemon], log: Path) -> Iterator[str]:
    """A gateway of that name before the workers, in DP-aware mode; its URL."""
    program, *arguments = COMMANDS[name]
    port = free_port()
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--dp-aware"]
    arguments += ["--api-key", KEY, "--worker-urls", *(worker.url for worker in workers)]
    with log.open("wb") as out:
        process = subprocess.Popen([str(folder / program), *arguments], stdout=out, stderr=out)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


async def chat(http: aiohttp.ClientSession, url: str) -> int:
    """The status of a small chat; 0 when there is nobody."""
    try:
        async with http.post(url + "/v1/chat/completions", json=CHAT) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0


async def fate(stream: aiohttp.ClientResponse) -> str:
    """What becomes of a stream that has no end of its own, as far as can be seen."""
    end, seen = time.monotonic() + 5, b""
    try:
        while time.monotonic() < end:
            line = await asyncio.wait_for(stream.content.readline(), 5)
            if not line:
                return "told of an error" if b'"error"' in seen else "ended as if it were whole"
            seen = seen[-1000:] + line
    except aiohttp.ClientError:
        return "cut"
    return "going on"


async def finished(http: aiohttp.ClientSession, worker: Daemon) -> list[int]:
    """Prompt tokens that each attention-DP rank of a worker has computed or found."""
    async with http.get(worker.url + "/get_loads") as answer:
        return [load["prefill_tokens"] + load["cached_tokens"] for load in await answer.json()]


async def check(name: str, folder: Path, logs: Path) -> list[tuple[str, bool]]:
    """What was seen, and whether it was right."""
    workers = [Daemon(*WORKER, config="sim.toml", log=logs / f"{name}-{i}") for i in range(2)]
    seen = []
    try:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}, timeout=timeout) as http:
            with gateway(folder, name, workers, logs / name) as url:
                deadline = time.monotonic() + 60
                while await chat(http, url) != 200 and time.monotonic() < deadline:
                    await asyncio.sleep(0.5)
                statuses = [await chat(http, url) for _ in range(24)]
                seen.append(("24 chats are answered", set(statuses) == {200}))
                ranks = [await finished(http, worker) for worker in workers]
                seen.append((f"every rank of both workers has worked: {ranks}", all(map(all, ranks))))

                streams = [await http.post(url + "/v1/chat/completions", json=ENDLESS) for _ in range(8)]
                for stream in streams:
                    await stream.content.readline()
                workers[0].process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.5)
                seen.append(("while one drains, new chats are answered", {await chat(http, url)} == {200}))
                lines = [await asyncio.wait_for(stream.content.readline(), 10) for stream in streams]
                seen.append(("and its streams go on", all(lines)))
                workers[0].kill_all()
                statuses = [await chat(http, url) for _ in range(8)]
                seen.append(("when it is killed, chats are answered by the other", set(statuses) == {200}))
                fates = Counter(await asyncio.gather(*(fate(stream) for stream in streams)))
                good = 0 < fates["going on"] < len(streams) and not fates["ended as if it were whole"]
                seen.append((f"and of the streams its own alone have ended: {dict(fates)}", good))
                for stream in streams:
                    stream.close()
    finally:
        for worker in workers:
            worker.kill_all()
    return seen


def main() -> int:
    """For each gateway in the folder given."""
    folder, failed = Path(sys.argv[1]), False
    with tempfile.TemporaryDirectory() as logs:
        for name in COMMANDS:
            for what, good in asyncio.run(check(name, folder, Path(logs))):
                print(f"{name:14} {'ok' if good else 'FAILED':7} {what}", flush=True)
                failed |= not good
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
