"""LiteLLM, through which many clients speak to servers like this one, as `hosted_vllm/`.

It is 380 MB with what it needs, so only `make litellm` installs it; elsewhere this is skipped.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers.daemon import ROOT, scripted
from tests.integration.conftest import AGENT_TURN

PYTHON = ROOT / "build" / "litellm" / "bin" / "python"
THOUGHT, SAID = AGENT_TURN.split("<tool_call>")[0].split("</think>")


@pytest.mark.skipif(not PYTHON.exists(), reason="LiteLLM is not installed: `make litellm` does that")
def test_a_tool_loop_is_understood_in_a_stream_and_without(tmp_path: Path):
    after = "There is one.</think>There is a.txt.<|user|>"
    with scripted(AGENT_TURN, after_tools=after, log=tmp_path / "log") as daemon:
        command = [str(PYTHON), str(ROOT / "tests" / "litellm" / "loop.py"), daemon.url, "glm-5.3-nano"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    for call, answer in json.loads(done.stdout.splitlines()[-1]).values():
        assert (call["text"], call["reasoning"], call["finish"]) == (SAID, THOUGHT, "tool_calls")
        assert [one["name"] for one in call["calls"]] == ["bash"]
        assert json.loads(call["calls"][0]["arguments"]) == {"command": "ls -la src"}
        assert (answer["text"], answer["reasoning"]) == ("There is a.txt.", "There is one.")
        assert (answer["calls"], answer["finish"]) == ([], "stop")
        assert answer["prompt_tokens"] > call["prompt_tokens"] and answer["cached_tokens"] > 0
