"""SIGHUP: what a running daemon takes of a configuration that has changed, and what it says of the rest."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.daemon import ROOT, Daemon, running

DEADLINE_S = 60


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with a file of keys."""
    (tmp_path / "keys").write_text("one\n")
    path = tmp_path / "config.toml"
    path.write_text((ROOT / "conf" / "sim.toml").read_text() + f'[server]\napi_keys_file = "{tmp_path}/keys"\n')
    return path


@pytest.fixture
def daemon(config: Path, tmp_path: Path) -> Iterator[Daemon]:
    with running(config=str(config), log=tmp_path / "log") as daemon:
        yield daemon


def hang_up(daemon: Daemon) -> str:
    """Signal it; what it says of that."""
    before = len(daemon.log.read_text())
    os.kill(daemon.process.pid, signal.SIGHUP)
    end = time.monotonic() + DEADLINE_S
    while "SIGHUP" not in (said := daemon.log.read_text()[before:]):
        assert time.monotonic() < end, said
        time.sleep(0.02)
    return said


def test_nothing_waits_for_ranks_that_are_told_of_a_log_level(config, tmp_path):
    """Neither the news that one has died, nor a signal to end."""
    with running("sim.base_ms=8000", config=str(config), log=tmp_path / "log") as daemon:
        request = urllib.request.Request(daemon.url + "/server_info", headers={"x-api-key": "one"})
        with urllib.request.urlopen(request) as answer:
            rank = json.load(answer)["ranks"][0]["pid"]
        answers = []
        body = {"prompt": "a", "max_tokens": 5}
        asks = threading.Thread(target=lambda: answers.append(status(daemon, "/v1/completions", "one", body)))
        asks.start()
        time.sleep(0.5)  # a step of eight seconds has begun
        os.kill(daemon.process.pid, signal.SIGHUP)
        time.sleep(0.2)
        os.kill(rank, signal.SIGKILL)
        asks.join(5)
        assert answers == [500]
        assert daemon.process.wait(5) == 1


def status(daemon: Daemon, path: str, key: str, body: dict | None = None) -> int:
    request = urllib.request.Request(daemon.url + path, headers={"x-api-key": key})
    try:
        with urllib.request.urlopen(request, None if body is None else json.dumps(body).encode(), timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_keys_are_read_again_from_the_same_file(daemon, tmp_path):
    assert status(daemon, "/v1/models", "one") == 200
    (tmp_path / "keys").write_text("two\n")
    assert status(daemon, "/v1/models", "two") == 401
    hang_up(daemon)
    assert status(daemon, "/v1/models", "two") == 200
    assert status(daemon, "/v1/models", "one") == 401
    assert daemon.stop() == 0


def test_what_is_wrong_is_told_and_nothing_holds(daemon, config, tmp_path):
    good = config.read_text()
    for text, keys, told in (
        (good + "api_kezs = 1\n", "two\n", "api_kezs"),
        (good, "\n", "holds no key"),
        (good + 'tls_cert = "missing.pem"\n', "two\n", "tls_cert"),
    ):
        config.write_text(text)
        (tmp_path / "keys").write_text(keys)
        said = hang_up(daemon)
        assert "nothing is changed" in said and told in said
        assert status(daemon, "/v1/models", "one") == 200


def test_limits_and_the_log_level_hold_and_of_the_rest_the_log_says_that_it_does_not(daemon, config):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    config.write_text(
        config.read_text().replace('kind = "sim"', 'kind = "sim"\n[log]\nlevel = "debug"')
        + "max_requests = 7\n[kv]\npage_size = 32\n[scheduler]\nmax_waiting_requests = 5\n"
    )
    said = hang_up(daemon)
    assert "log.level holds" in said and "scheduler.max_waiting_requests holds" in said
    while "restart" not in said:
        said = daemon.log.read_text()
    assert "not taken before a restart: server.max_requests, kv.page_size" in said
    assert status(daemon, "/v1/chat/completions", "one", chat) == 200
    assert "DEBUG   main" in daemon.log.read_text()
