"""Whatever is made of /openapi.json, by its schemas and against them, gets no answer that is a fault of ours. [R15]"""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from glm53d.server.app import ROUTES
from tests.helpers.daemon import Daemon, running

TIMEOUT_S = 120  # a guard against one that hangs
# In all some 20 s, or two minutes of an idle machine.
CASES = 80 if os.environ.get("GLM53D_LONG") == "1" else 10
# Cases are told apart by what is sent; most are refused, at once.
FUZZ = settings(
    max_examples=CASES, phases=[Phase.explicit, Phase.generate], deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One whose answers end soon, whatever is asked of it."""
    log = tmp_path_factory.mktemp("openapi") / "log"
    fast = ("sim.base_ms=0.1", "sim.per_prefill_token_us=1", "sim.max_context_len=2048", "scheduler.debug_checks=true")
    with running(*fast, config="sim.toml", log=log) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def schema(daemon: Daemon) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(daemon.url + "/openapi.json")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_no_request_that_the_schema_suggests_is_a_failure_of_ours(route, schema, daemon):
    operation = schema[route.path][route.method]
    for mode in schemathesis.GenerationMode:
        if mode is schemathesis.GenerationMode.NEGATIVE and route.body is None:
            continue  # nothing about it can be wrong

        @FUZZ
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            response = case.call(base_url=daemon.url, timeout=TIMEOUT_S)
            if route.path == "/pause_generation":
                urllib.request.urlopen(daemon.url + "/continue_generation", data=b"", timeout=TIMEOUT_S).close()
            failed = response.status_code >= 500 or 'data: {"error"' in response.text
            if failed and "deadline_exceeded" in response.text:  # what a `first_token_timeout` asked for
                return
            assert not failed, (case.as_curl_command(), response.text)

        send()


def test_nothing_is_left_in_flight(daemon):
    """After all of the above."""
    with urllib.request.urlopen(daemon.url + "/server_info", timeout=TIMEOUT_S) as answer:
        info = json.load(answer)
    assert info["requests_in_flight"] == 0 and info["state"] == "up"
    assert "ERROR" not in Path(daemon.log).read_text()
