"""Start, signals, death: what is left afterwards. [R3] [R4] [R5], field group B."""

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import pytest

from glm53d.world.supervisor import EXIT_GRACE_S
from tests.helpers.daemon import ROOT, Daemon, events, running

CHAT = {"model": "glm-5.3", "messages": [{"role": "user", "content": "hi"}]}
ENDLESS = CHAT | {"stream": True, "ignore_eos": True, "max_tokens": 100_000}
NANO = Path(__file__).resolve().parents[2] / "glm53d" / "nano"
SLOW = ("sim.base_ms=5",)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def abandoned_memory() -> set[str]:
    """Names in /dev/shm that no process of the machine has mapped: other tests, which may run beside, map theirs.

    Looked at twice, as one of those may just be making or removing a name.
    """

    def look() -> set[str]:
        names, mapped = set(os.listdir("/dev/shm")), set[str]()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                mapped |= set(re.findall(r" /dev/shm/(\S+)", maps.read_text(errors="replace")))
        return names - mapped

    first = look()
    time.sleep(0.05)
    return first & look()


def assert_gone(daemon: Daemon) -> None:
    """No process, port free."""
    end = time.monotonic() + 10
    while daemon.pids() and time.monotonic() < end:
        time.sleep(0.02)
    assert daemon.pids() == []
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", daemon.port))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes_with_exit_code_0_and_leaves_nothing(number, log):
    """[F-B6]"""
    before = abandoned_memory()
    daemon = Daemon(config="sim.toml", log=log)
    assert len(daemon.pids()) >= 2
    assert daemon.stop(number) == 0
    assert_gone(daemon)
    assert abandoned_memory() <= before
    assert "Traceback" not in log.read_text()


def test_a_signal_to_the_whole_process_group_is_as_good(log):
    daemon = Daemon(config="sim.toml", log=log)
    os.killpg(daemon.process.pid, signal.SIGTERM)
    assert daemon.process.wait(60) == 0
    assert_gone(daemon)


def test_a_signal_while_the_ranks_are_starting_ends_the_daemon_too(log):
    daemon = Daemon(config="sim.toml", log=log, wait=False)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", daemon.port)) == 0:
                break
        time.sleep(0.01)
    assert daemon.stop() == 0
    assert_gone(daemon)


async def test_ranks_that_are_loading_are_not_waited_for(log):
    daemon = Daemon(log=log, wait=False)
    try:
        async with aiohttp.ClientSession() as http:
            while (await progress(http, daemon)).get("phase") != "imports":  # a rank is there, and nowhere near its end
                await asyncio.sleep(0.01)
        begun = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - begun < EXIT_GRACE_S
    finally:
        daemon.kill_all()


async def progress(http: aiohttp.ClientSession, daemon: Daemon) -> dict:
    """What /ready says; nothing while the port is closed."""
    try:
        async with http.get(daemon.url + "/ready") as answer:
            return await answer.json()
    except aiohttp.ClientConnectorError:
        return {}


async def test_a_low_default_of_file_descriptors_does_not_bound_the_connections(log):
    """A shell's default is far below what the system allows."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        daemon = Daemon(config="sim.toml", log=log, wait=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        daemon.wait_ready()
        clients = [await asyncio.open_connection("127.0.0.1", daemon.port) for _ in range(300)]
        for reader, writer in clients:
            writer.write(b"GET /live HTTP/1.1\r\nHost: t\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        for _, writer in clients:
            writer.close()
    finally:
        daemon.kill_all()


def test_ranks_die_with_a_main_process_that_is_killed(log):
    """[F-B7]"""
    before = abandoned_memory()
    daemon = Daemon("parallel.tp_size=2", "parallel.attn_dp_size=2", config="sim.toml", log=log)
    os.kill(daemon.process.pid, signal.SIGKILL)
    daemon.process.wait(10)
    assert_gone(daemon)
    assert abandoned_memory() <= before


def test_daemons_killed_with_all_their_ranks_leave_nothing_in_the_way_of_the_next(log):
    """[F-B5] Shared memory has no name that could stay behind."""
    before = abandoned_memory()
    for _ in range(2):
        daemon = Daemon(config="sim.toml", log=log)
        os.killpg(daemon.process.pid, signal.SIGKILL)
        daemon.process.wait(60)
        assert_gone(daemon)
    assert abandoned_memory() <= before
    daemon = Daemon(config="sim.toml", log=log)
    assert daemon.stop() == 0


def test_a_child_of_main_that_is_no_rank_lives_on(log):
    """[F-B8]"""
    daemon = Daemon(config="sim.toml", log=log, before="sleep 600 >/dev/null 2>&1 &")
    (stranger,) = [pid for pid in daemon.pids() if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
    try:
        assert daemon.stop() == 0
        assert daemon.pids() == [stranger]
    finally:
        os.kill(stranger, signal.SIGKILL)


async def test_a_running_stream_is_finished_before_a_drained_daemon_ends(log):
    with running(*SLOW, config="sim.toml", log=log) as daemon:
        async with (
            aiohttp.ClientSession() as http,
            http.post(daemon.url + "/v1/chat/completions", json=ENDLESS | {"max_tokens": 150}) as answer,
        ):
            await answer.content.readline()
            daemon.process.send_signal(signal.SIGTERM)
            daemon.process.send_signal(signal.SIGHUP)  # is nothing to end for
            await asyncio.sleep(0.1)
            async with http.get(daemon.url + "/health") as health:
                assert health.status == 503
            async with http.post(daemon.url + "/v1/chat/completions", json=CHAT) as refused:
                assert refused.status == 503 and "Retry-After" in refused.headers
            got = await events(answer)
            assert got[-1] == "[DONE]" and got[-2]["choices"][0]["finish_reason"] == "length"
        assert daemon.process.wait(30) == 0


async def test_a_stream_that_does_not_finish_in_time_gets_an_error_event_and_an_end(log):
    """[F-A6] and who streams not, 503."""
    with running(*SLOW, "server.drain_timeout_s=0.3", config="sim.toml", log=log) as daemon:
        async with (
            aiohttp.ClientSession() as http,
            http.post(daemon.url + "/v1/chat/completions", json=ENDLESS) as answer,
        ):
            await answer.content.readline()
            plain = asyncio.create_task(
                http.post(daemon.url + "/v1/chat/completions", json=ENDLESS | {"stream": False}).__aenter__()
            )
            await asyncio.sleep(0.1)
            daemon.process.send_signal(signal.SIGTERM)
            got = await events(answer)
            assert got[-1] == "[DONE]" and "error" in got[-2]
            refused = await plain
            assert refused.status == 503 and "Retry-After" in refused.headers
            assert "shutting down" in (await refused.json())["error"]["message"]
        assert daemon.process.wait(30) == 0


async def test_an_answer_is_written_to_its_end_before_a_drained_daemon_ends(log):
    """Its generation is over, if it had one, but its client reads slowly."""
    with running("sim.max_context_len=1_000_000", "sim.num_pages=20_000", config="sim.toml", log=log) as daemon:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            slow.connect(("127.0.0.1", daemon.port))
            slow.settimeout(60)
            body = json.dumps({"prompt": " a" * 2_000_000}).encode()
            slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            got = slow.recv(1 << 16)
            daemon.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(2)
            while piece := slow.recv(1 << 16):
                got += piece
        head, _, answer = got.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(answer)}".encode() in head and len(json.loads(answer)["tokens"]) == 2_000_000
        assert daemon.process.wait(30) == 0


async def test_a_body_that_is_half_sent_when_a_drain_begins_is_refused_and_not_cut_off(log):
    with running(config="sim.toml", log=log) as daemon:
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        body = json.dumps(CHAT).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body[:10])
        await asyncio.sleep(0.2)
        daemon.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(1)
        writer.write(body[10:])
        assert await reader.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        assert b'"type"' in await reader.read()
        writer.close()
        assert daemon.process.wait(30) == 0


async def test_a_second_signal_ends_a_drain(log):
    with running(*SLOW, config="sim.toml", log=log) as daemon:
        async with (
            aiohttp.ClientSession() as http,
            http.post(daemon.url + "/v1/chat/completions", json=ENDLESS) as answer,
        ):
            await answer.content.readline()
            daemon.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            daemon.process.send_signal(signal.SIGTERM)
            got = await asyncio.wait_for(events(answer), 10)
            assert got[-1] == "[DONE]" and "error" in got[-2]
        assert daemon.process.wait(30) == 0


async def test_a_rank_that_dies_in_a_drain_is_a_failure_and_said_to_be_one(log):
    with running(*SLOW, config="sim.toml", log=log) as daemon:
        async with (
            aiohttp.ClientSession() as http,
            http.get(daemon.url + "/server_info") as info,
            http.post(daemon.url + "/v1/chat/completions", json=ENDLESS) as answer,
        ):
            await answer.content.readline()
            daemon.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            os.kill((await info.json())["ranks"][0]["pid"], signal.SIGKILL)
            got = await asyncio.wait_for(events(answer), 10)
            assert got[-1] == "[DONE]" and "rank 0" in got[-2]["error"]["message"]
        assert daemon.process.wait(30) == 1


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_ends_the_daemon_with_a_clear_error_for_everybody(rank, log):
    """[F-B2] [F-B3] [F-G3]"""
    with running("parallel.tp_size=2", "parallel.attn_dp_size=2", *SLOW, config="sim.toml", log=log) as daemon:
        async with aiohttp.ClientSession() as http:
            async with http.get(daemon.url + "/server_info") as answer:
                pid = (await answer.json())["ranks"][rank]["pid"]
            async with http.post(daemon.url + "/v1/chat/completions", json=ENDLESS) as stream:
                await stream.content.readline()
                plain = asyncio.create_task(
                    http.post(daemon.url + "/v1/chat/completions", json=ENDLESS | {"stream": False}).__aenter__()
                )
                await asyncio.sleep(0.2)
                os.kill(pid, signal.SIGKILL)
                got = await asyncio.wait_for(events(stream), 10)
                assert got[-1] == "[DONE]" and f"rank {rank}" in got[-2]["error"]["message"]
                with contextlib.suppress(aiohttp.ClientConnectionError):  # the port is closed by now
                    async with http.get(daemon.url + "/health") as health:
                        assert health.status == 503
                answer = await asyncio.wait_for(plain, 10)
                assert answer.status == 500 and f"rank {rank}" in (await answer.json())["error"]["message"]
        assert daemon.process.wait(30) == 1
        assert_gone(daemon)
    assert "SIGKILL" in log.read_text()


async def test_a_long_step_is_no_illness(log):
    """[F-B1]"""
    with running("sim.base_ms=1500", config="sim.toml", log=log) as daemon:
        async with aiohttp.ClientSession() as http:
            body = {"prompt": "a", "max_tokens": 1}
            asked = asyncio.create_task(http.post(daemon.url + "/v1/completions", json=body))
            statuses = []
            while not asked.done():
                async with http.get(daemon.url + "/health") as health:
                    statuses.append(health.status)
                await asyncio.sleep(0.05)
            assert (await asked).status == 200
        assert len(statuses) > 5 and set(statuses) == {200}


async def test_a_rank_that_is_killed_while_nothing_runs_ends_the_daemon_as_well(log):
    """[F-B3]"""
    with running(config="sim.toml", log=log) as daemon:
        async with aiohttp.ClientSession() as http, http.get(daemon.url + "/server_info") as answer:
            os.kill((await answer.json())["ranks"][0]["pid"], signal.SIGKILL)
        assert daemon.process.wait(30) == 1
        assert_gone(daemon)
    assert "SIGKILL" in log.read_text()


BROKEN = """
import sys
import threading
sys.path.insert(0, {root!r})
from glm53d.runner import sim

class Broken(sim.SimRunner):
    def {broken}(self, *args):
        if {broken!r} == "launch" and args[0].num_rows:
            raise RuntimeError("the device is lost")
        if {broken!r} == "collect":
            threading.Event().wait()
        return super().{broken}(*args)

    def close(self):
        threading.Event().wait()

sim.SimRunner = Broken
if __name__ == "__main__":
    from glm53d.__main__ import main
    sys.exit(main())
"""


@pytest.mark.parametrize(
    ("broken", "why", "shown"),
    [
        ("launch", "rank 0 has ended: RuntimeError: the device is lost", "Traceback"),
        ("collect", "a step has been running for", "in collect"),
    ],
)
async def test_a_rank_that_fails_or_hangs_ends_the_daemon_though_it_cannot_be_closed(broken, why, shown, log, tmp_path):
    """[F-B2] Whatever waits for its device or for other ranks may wait for ever."""
    program = tmp_path / "broken.py"
    program.write_text(BROKEN.format(root=str(ROOT), broken=broken))
    daemon = Daemon("scheduler.watchdog_s=1", *SLOW, config="sim.toml", log=log, program=program)
    try:
        async with aiohttp.ClientSession() as http:
            async with http.post(daemon.url + "/v1/chat/completions", json=ENDLESS) as stream:
                got = await asyncio.wait_for(events(stream), 20)
            assert got[-1] == "[DONE]" and why in got[-2]["error"]["message"]
        assert daemon.process.wait(30) == 1
        assert_gone(daemon)
    finally:
        daemon.kill_all()
    assert shown in log.read_text()


@pytest.mark.parametrize(
    ("override", "config", "why"),
    [
        ("kv.memory_bytes=1000", "nano-cpu.toml", "1000 bytes for KV do not hold one page"),
        # A long output behind a main that does not read would be a record that never fits.
        ("world.ring_bytes=65536", "sim.toml", "world.ring_bytes 65536 cannot take the output of a request of 262144"),
    ],
)
def test_a_rank_that_cannot_load_ends_the_daemon_before_it_is_ready_with_one_line_that_says_why(
    override, config, why, log
):
    """[R3] The rank's row says FAILED while its process still ends: main must not take that for loaded."""
    daemon = Daemon(override, config=config, log=log, wait=False)
    try:
        assert daemon.process.wait(120) == 1
    finally:
        daemon.kill_all()
    said = log.read_text()
    assert f"rank 0 has ended: StartError: {why}" in said
    assert "ready:" not in said and "Traceback" not in said


def test_the_log_says_where_a_free_port_was_taken(log):
    daemon = Daemon("server.port=0", config="sim.toml", log=log, wait=False)
    try:
        end = time.monotonic() + 30
        while not (told := re.search(r"listening at (http://127\.0\.0\.1:[1-9]\d*)\n", log.read_text())):
            assert time.monotonic() < end
            time.sleep(0.02)
        with urllib.request.urlopen(told[1] + "/live", timeout=30) as live:
            assert live.status == 200
    finally:
        daemon.kill_all()


async def test_the_port_answers_before_the_ranks_have_loaded(log):
    """[F-B4] live 200, ready 503 with a phase, work refused with Retry-After."""
    daemon = Daemon(log=log, wait=False)
    try:
        async with aiohttp.ClientSession() as http:
            end = time.monotonic() + 30
            while True:
                try:
                    async with http.get(daemon.url + "/ready") as ready:
                        body = await ready.json()
                    break
                except aiohttp.ClientConnectorError:
                    assert time.monotonic() < end
                    await asyncio.sleep(0.01)
            assert ready.status == 503 and "phase" in str(body)
            async with http.get(daemon.url + "/live") as live:
                assert live.status == 200
            async with http.get(daemon.url + "/health") as health:
                assert health.status == 503
            async with http.post(daemon.url + "/v1/chat/completions", json=CHAT) as refused:
                assert refused.status == 503 and "Retry-After" in refused.headers
    finally:
        daemon.kill_all()


@pytest.mark.parametrize(
    ("overrides", "code", "why"),
    [
        (["world.pin_cpus=[9999]"], 2, "world.pin_cpus names CPU 9999; this process may use"),
        (["kv_events.endpoint=tcp://192.0.2.1:5557"], 1, "rank 0 has ended: StartError: kv_events: cannot bind"),
        pytest.param(
            ["engine.device=cuda", "parallel.tp_size=2"], 2, "several ranks on GPUs need cupy",
            marks=pytest.mark.skipif(find_spec("cupy") is not None, reason="cupy is there"),
        ),
    ],
)  # fmt: skip
def test_what_this_machine_does_not_have_is_said_in_one_line_and_the_daemon_never_ready(overrides, code, why, log):
    daemon = Daemon(*overrides, config="sim.toml", log=log, wait=False)
    try:
        assert daemon.process.wait(120) == code
    finally:
        daemon.kill_all()
    said = log.read_text()
    assert why in said and "ready:" not in said and "Traceback" not in said


def test_a_tokenizer_that_cannot_be_loaded_ends_the_start_at_once_as_wrong_files_do(log, tmp_path):
    """It is read while the ranks load, which may take minutes: nobody waits for them."""
    folder = tmp_path / "model"
    shutil.copytree(NANO, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["merges"].append(["no such", "entries"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    daemon = Daemon(f"model.path={json.dumps(str(folder))}", config="nano-cpu.toml", log=log, wait=False)
    try:
        assert daemon.process.wait(120) == 2
    finally:
        daemon.kill_all()
    assert_gone(daemon)
    said = log.read_text()
    assert "tokenizer.json is refused by the tokenizers library" in said
    assert "ready:" not in said and "Traceback" not in said


def test_a_port_that_is_taken_refuses_the_start_with_one_line(log):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon = Daemon(f"server.port={taken.getsockname()[1]}", config="sim.toml", log=log, wait=False)
        assert daemon.process.wait(60) == 2
    assert "server.port" in log.read_text() and "Traceback" not in log.read_text()
    assert_gone(daemon)


def test_main_loads_no_torch_before_it_spawns():
    """LAYOUT: the one place is the supervisor's thread."""
    import subprocess
    import sys

    code = "import sys, glm53d.world.supervisor, glm53d.server.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
