"""Configuration: what is taken, what is refused, and with which words. The command line on top of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from glm53d.__main__ import main
from glm53d.config import FOREIGN, Config, load, reference_toml
from glm53d.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(None, list(overrides))
    return refused.value.message


def file_refusal(folder: Path, text: str) -> str:
    path = folder / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(str(path), [])
    assert refused.value.message.startswith(str(path))
    return refused.value.message.removeprefix(f"{path}: ")


def test_without_a_file_the_defaults_are_those_of_nano_cpu():
    assert load(None, []) == Config() == load(str(CONF / "nano-cpu.toml"), [])


def test_the_committed_reference_is_what_the_code_says_and_changes_nothing():
    assert (CONF / "reference.toml").read_text() == reference_toml()
    assert load(str(CONF / "reference.toml"), []) == Config()


@pytest.mark.parametrize("name", sorted(path.name for path in CONF.glob("*.toml")))
def test_every_file_in_conf_is_right(name: str):
    load(str(CONF / name), [])


def test_set_wins_over_the_file_and_the_last_one_wins(tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_text("[server]\nport = 1\nhost = 'a'\n")
    config = load(str(path), ["server.port=2", "server.port = 3"])
    assert (config.server.port, config.server.host) == (3, "a")


@pytest.mark.parametrize(
    ("text", "name"),
    [("GLM-5.3", "GLM-5.3"), ('"a b"', "a b"), ("a = b", "a = b"), ("5", "5"), ("true", "true"), ("", ""), ('""', "")],
)
def test_a_text_field_takes_toml_or_the_bare_text(text: str, name: str):
    assert load(None, [f"model.name={text}"]).model.name == name


def test_set_takes_toml_of_every_kind():
    config = load(
        None,
        ['model.aliases=["a", "b"]', "world.pin_cpus=[3]", "scheduler.debug_checks=true", "sim.base_ms=2", "kv.page_size=1_6"],
    )
    assert config.model.aliases == ("a", "b") and config.world.pin_cpus == (3,)
    assert config.scheduler.debug_checks is True and config.sim.base_ms == 2.0 and config.kv.page_size == 16


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("server.port=70000", "--set server.port is 70000; it must be an integer from 0 to 65535"),
        ("server.port=true", "--set server.port is true; it must be an integer from 0 to 65535"),
        ("server.port=http", '--set server.port is "http"; it must be an integer from 0 to 65535'),
        ("server.port=1\nx=2", '--set server.port is "1\\nx=2"; it must be an integer from 0 to 65535'),
        ("kv.dtype=int8", '--set kv.dtype is "int8"; it must be one of "auto", "fp8"'),
        ("server.keepalive_s=0", "--set server.keepalive_s is 0; it must be a number above 0"),
        ("server.keepalive_s=nan", "--set server.keepalive_s is NaN; it must be a number above 0"),
        ("sim.base_ms=inf", "--set sim.base_ms is Infinity; it must be a number, at least 0"),
        ("scheduler.debug_checks=1", "--set scheduler.debug_checks is 1; it must be true or false"),
        ("model.aliases=a", '--set model.aliases is "a"; it must be a list of texts'),
        ("world.pin_cpus=[0.5]", "--set world.pin_cpus is [0.5]; it must be a list of integers"),
        ("server.prot=1", "--set server.prot: unknown key; did you mean server.port?"),
        ("servre.port=1", "--set servre: unknown section; did you mean server?"),
        ("port=1", "--set port: unknown key; did you mean server.port?"),
        ("text.max_context_len=1", "--set text.max_context_len: unknown key; did you mean model.max_context_len or sim.max_context_len?"),
        ("model.xyzzy=1", "--set model.xyzzy: unknown key"),
        ("tensor-parallel-size=8", "--set tensor-parallel-size: unknown key; glm53d calls it parallel.tp_size"),
        ("server", "--set server: write it as section.key=value"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_refused_in_words(override: str, told: str):
    assert refusal(override) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[server]\nport = 'a'", 'server.port is "a"; it must be an integer from 0 to 65535'),
        ("[server]\nprot = 1", "server.prot: unknown key; did you mean server.port?"),
        ("[servre]", "servre: unknown section; did you mean server?"),
        ("port = 1", "port: unknown key; did you mean server.port?"),
        ("max_model_len = 1", "max_model_len: unknown key; glm53d calls it model.max_context_len"),
        ("[server]\nport = 1979-05-27", 'server.port is "1979-05-27"; it must be an integer from 0 to 65535'),
        ("[server\n", "Expected ']' at the end of a table declaration (at line 1, column 8)"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, text: str, told: str):
    assert file_refusal(tmp_path, text) == told


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"b\.toml: No such file"):
        load(str(tmp_path / "b.toml"), [])
    (tmp_path / "c.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"c\.toml: .*utf-8"):
        load(str(tmp_path / "c.toml"), [])


def test_a_file_that_is_nested_too_deep_is_refused_as_any_other(tmp_path):
    """SIGHUP reads it in a daemon that should go on."""
    (tmp_path / "c.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"c\.toml: .*nested too deep"):
        load(str(tmp_path / "c.toml"), [])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["parallel.tp_size=4", "parallel.attn_dp_size=3"], "parallel.attn_dp_size 3 does not divide tp_size 4"),
        (["parallel.tp_size=4", "parallel.ep_size=3"], "parallel.ep_size 3 does not divide tp_size 4"),
        (["world.ring_bytes=100_000"], "world.ring_bytes 100000 is no power of two"),
        (["world.pin_cpus=[0, 1]"], "world.pin_cpus names 2 CPUs for 1 ranks"),
        (["world.pin_cpus=[-1]"], "world.pin_cpus has a negative number"),
        (["model.path="], "model.path is empty"),
        (
            ['template.strip_lines=["x-a:", ""]'],
            "template.strip_lines has an empty string, with which every line begins",
        ),
        (
            ["scheduler.max_step_tokens=64"],
            "scheduler.max_running_requests 256 do not fit a step of max_step_tokens 64 on 1 attention-DP ranks, one token each",
        ),
    ],
)
def test_what_no_field_sees_alone_is_refused(overrides: list[str], told: str):
    assert refusal(*overrides) == told


def test_every_translated_key_leads_to_a_field_that_is_there_and_is_in_the_docs():
    rows = [line for line in (CONF.parent / "docs" / "configure.md").read_text().splitlines() if line.startswith("| `")]
    for theirs, ours in FOREIGN.items():
        section, key = ours.split(".")
        assert hasattr(getattr(Config(), section), key), ours
        assert any(f"`{theirs}`" in row and row.endswith(f"| `{ours}` |") for row in rows), theirs


def test_a_refused_start_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]):
    assert main(["--port", "70000"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "glm53d: --set server.port is 70000; it must be an integer from 0 to 65535\n"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--tp", "8"], "--tp: unknown option; glm53d calls it parallel.tp_size"),
        (["--max-model-len=8", "--check"], "--max-model-len: unknown option; glm53d calls it model.max_context_len"),
        (["topology", "--max-waiting-request", "8"], "--max-waiting-request: unknown option; did you mean scheduler.max_waiting_requests?"),
        (["--model-path", "/a", "topology"], "--model-path: unknown option; glm53d calls it model.path"),
        (["--xyzzy"], "--xyzzy: unknown option"),
    ],
)
def test_an_option_that_was_carried_over_is_refused_with_our_name(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"glm53d: {told}; --set SECTION.KEY=VALUE sets any field\n"


def test_a_word_that_is_no_command_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["frobnicate"])
    assert "there is no command 'frobnicate'" in capsys.readouterr().err


def test_print_reference_prints_the_reference(capsys: pytest.CaptureFixture[str]):
    assert main(["--print-reference"]) == 0
    assert capsys.readouterr().out == reference_toml()


def test_check_loads_neither_torch_nor_a_gpu_library():
    code = (
        "import sys; from glm53d.__main__ import main;"
        f"code = main(['--config', {str(CONF / 'h200x8.toml')!r}, '--check']);"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'cupy', 'aiohttp')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONF.parent)
    assert done.returncode == 0 and "weights a rank" in done.stdout, done.stderr
