"""The agents that people use, each through a whole tool loop against a daemon: ask, call, run, result, answer.

Run by `make agents`, which installs them, in a network namespace that has nothing but its loopback; not in CI. What the
daemon answers is scripted: a call that writes a file, then, to its result, a sentence. Prints one line per check, and
all that an agent has said if it failed; exits 1 then.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.daemon import Daemon, running

MODEL = "glm-5.3-nano"
PROMPT = "Write a file."
ANSWER = "The file is there now."
MARK = "made-by-the-agent"
DEADLINE_S = 120


@dataclass(frozen=True)
class Agent:
    """How one is run, and what the model must say to have its tool write a file."""

    command: tuple[str, ...]  # from the folder of its programs
    tool: str
    arguments: dict[str, str]
    environment: dict[str, str]  # {url} is the daemon's
    files: dict[str, str]  # of its home, likewise


CODEX = f"""\
model = "{MODEL}"
model_provider = "glm53d"
[model_providers.glm53d]
name = "glm53d"
base_url = "{{url}}/v1"
wire_api = "responses"
"""
OPENCODE = {
    "model": f"glm53d/{MODEL}",
    "provider": {
        "glm53d": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {MODEL: {}},
        }
    },
}
AGENTS = {
    "codex": Agent(
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        "exec_command",
        {"cmd": f"touch {MARK}"},
        {"CODEX_HOME": "{home}"},
        {"config.toml": CODEX},
    ),
    "claude": Agent(
        ("claude", "--print", "--model", MODEL, "--allowedTools", "Bash", "--", PROMPT),
        "Bash",
        {"command": f"touch {MARK}"},
        {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "none"},
        {},
    ),
    "opencode": Agent(
        ("opencode", "run", PROMPT),
        "bash",
        {"command": f"touch {MARK}", "description": "Writes the file."},
        {"OPENCODE_CONFIG": "{home}/opencode.json"},
        {"opencode.json": json.dumps(OPENCODE)},
    ),
}


def script(agent: Agent) -> str:
    """A turn that calls the agent's tool."""
    arguments = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in agent.arguments.items()
    )
    return f"A file is wanted.</think>I write it.<tool_call>{agent.tool}{arguments}</tool_call><|observation|>"


def check(name: str, programs: Path, folder: Path) -> Iterator[tuple[str, bool]]:
    """What was seen of an agent, and whether it was right."""
    agent, home, work = AGENTS[name], folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    answer = f"It is there.</think>{ANSWER}<|user|>"
    texts = (f"sim.text={json.dumps(script(agent))}", f"sim.after_tools={json.dumps(answer)}")
    with running("sim.base_ms=1", "kv.page_size=16", *texts, config="sim.toml", log=folder / "daemon.log") as daemon:
        places = {"{url}": daemon.url, "{home}": str(home)}

        def filled(text: str) -> str:
            for place, value in places.items():
                text = text.replace(place, value)
            return text

        for file, content in agent.files.items():
            (home / file).write_text(filled(content))
        environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
        environment |= {key: filled(value) for key, value in agent.environment.items()}
        program, *arguments = agent.command
        try:
            done = subprocess.run(
                [str(programs / program), *arguments], cwd=work, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, check=False,
            )  # fmt: skip
            said, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as late:
            said, code = (late.stdout or b"").decode(errors="replace"), None
        yield f"ends well: exit code {code}", code == 0
        yield "its tool has run", (work / MARK).exists()
        yield "it has told the answer to the tool's result", ANSWER in said
        yield from counted(daemon)
        if code != 0 or ANSWER not in said:
            print(said)


def counted(daemon: Daemon) -> Iterator[tuple[str, bool]]:
    """What the daemon's own counters say of the loop."""
    with urllib.request.urlopen(daemon.url + "/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    requests = [line for line in lines if line.startswith("glm53d_requests_total")]
    told = [line.partition("{")[2].replace("}", "") for line in requests if "/v1/" in line]
    yield f"nothing was refused: {'; '.join(told)}", bool(told) and all('status="200"' in line for line in told)
    with urllib.request.urlopen(daemon.url + "/server_info", timeout=10) as reply:
        loads: list[dict[str, Any]] = json.load(reply)["loads"]
    cached, computed = loads[0]["cached_tokens"], loads[0]["prefill_tokens"]
    yield f"the second turn found the first one cached: {cached} tokens cached, {computed} computed", cached > 500


def main() -> int:
    """For each agent in the folder of programs given."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)  # a new namespace has it down
    failed = False
    for name in sys.argv[2:] or AGENTS:
        with tempfile.TemporaryDirectory() as folder:
            for what, good in check(name, Path(sys.argv[1]).absolute(), Path(folder)):
                print(f"{name:9} {'ok' if good else 'FAILED':7} {what}", flush=True)
                failed |= not good
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
