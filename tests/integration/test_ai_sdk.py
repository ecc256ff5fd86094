"""The AI SDK, which checks each event of a stream by its schemas, through a tool loop in each dialect it speaks."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.daemon import ROOT, Daemon, scripted
from tests.integration.conftest import AGENT_TURN

FOLDER = ROOT / "build" / "ai_sdk"
LOOP = ROOT / "tests" / "ai_sdk" / "loop.mjs"
THOUGHT, SAID = AGENT_TURN.split("<tool_call>")[0].split("</think>")
RAW = AGENT_TURN.removesuffix("<|observation|>")  # of a completion, where tags are text

pytestmark = pytest.mark.skipif(
    not (FOLDER / ".installed").exists() or shutil.which("node") is None,
    reason="the AI SDK is not installed: `make ai-sdk` needs node, npm and its registry",
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Calls a tool, and answers its result."""
    log = tmp_path_factory.mktemp("ai_sdk") / "log"
    with scripted(AGENT_TURN, after_tools="There is one.</think>There is a.txt.<|user|>", log=log) as daemon:
        yield daemon


def understood(daemon: Daemon, provider: str) -> dict:
    """What loop.mjs prints."""
    copy = Path(shutil.copy(LOOP, FOLDER))  # node looks for packages beside the file
    command = ["node", str(copy), daemon.url, provider, "glm-5.3-nano"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("provider", "thoughts"),
    [
        ("openai-chat", (None, None)),  # its schema has no reasoning_content
        ("openai-responses", ("", "")),  # it shows summaries alone, and there are none
        ("openai-compatible", (THOUGHT, "There is one.")),
        ("anthropic", (THOUGHT, "There is one.")),
    ],
)
def test_a_tool_loop_is_understood_in_a_stream_and_without(daemon, provider, thoughts):
    got = understood(daemon, provider)
    assert got["errors"] == []
    command = {"command": "ls -la src"}
    assert got["results"] == [command, command]  # the tool has run once in the stream and once without
    for steps in (got["streamed"], got["plain"]):
        call, answer = steps
        assert (call["text"], call["finishReason"]) == (SAID, "tool-calls")
        assert call["calls"] == [{"toolName": "bash", "input": command}]
        assert (answer["text"], answer["calls"], answer["finishReason"]) == ("There is a.txt.", [], "stop")
        assert (call["reasoning"], answer["reasoning"]) == thoughts
        assert call["usage"]["outputTokenDetails"]["reasoningTokens"] > 5
        assert answer["usage"]["inputTokenDetails"]["cacheReadTokens"] > 0
        assert answer["usage"]["inputTokens"] > call["usage"]["inputTokens"]


def test_a_completion_is_understood_in_a_stream_and_without(daemon):
    got = understood(daemon, "openai-completion")
    assert got["errors"] == []
    assert [step["text"] for step in got["streamed"] + got["plain"]] == [RAW, RAW]
