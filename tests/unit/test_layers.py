"""Who may import whom: one row a folder, held against every import in it, also those inside functions."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVERYWHERE = ("errors", "version")


@dataclass(frozen=True)
class Layer:
    """What of ours a folder may import besides itself, and what it never may of the world."""

    may: tuple[str, ...]
    never: tuple[str, ...] = ()


LAYERS = {
    "world": Layer(may=("",)),
    "server": Layer(may=("config", "obs", "chat", "front", "_native"), never=("torch",)),
    "chat": Layer(may=("config", "text.spellings"), never=("asyncio", "torch")),
    "text": Layer(may=("config", "_native"), never=("torch",)),
    "front": Layer(may=("config", "obs", "ipc", "chat", "text", "grammar", "_native"), never=("aiohttp", "torch")),
    "ipc": Layer(may=("_native",), never=("asyncio", "aiohttp", "torch")),
    "grammar": Layer(may=(), never=("asyncio", "aiohttp", "torch")),
    "kv": Layer(may=("_native",), never=("torch",)),
    "sched": Layer(
        may=("config", "kv", "grammar", "_native", "ipc.batch", "ipc.records"),
        never=("torch", "asyncio", "threading", "multiprocessing", "time", "datetime"),  # integers in, Batch out
    ),
    "worker": Layer(may=("config", "obs", "ipc", "kv", "sched", "runner", "grammar", "_native"), never=("aiohttp",)),
    "runner": Layer(
        may=("config", "obs", "ipc.batch", "ipc.records", "ipc.mailbox", "model", "nano"), never=("aiohttp",)
    ),
    "model": Layer(may=("config", "_native"), never=("aiohttp",)),
    "obs": Layer(may=("config",), never=("aiohttp", "torch")),
    "nano": Layer(may=("model",), never=("aiohttp",)),
}
TOP = {
    "errors.py": Layer(may=()),
    "version.py": Layer(may=()),
    "config.py": Layer(may=()),
    "__main__.py": Layer(may=("config", "obs", "world"), never=("torch", "aiohttp")),
}


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file; `from a import b` gives a.b, which may be a module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def within(name: str, package: str) -> bool:
    return not package or name == package or name.startswith(f"{package}.")


def breaches(path: Path, home: str, layer: Layer) -> list[str]:
    told = []
    for line, name in imports(path):
        if within(name, "glm53d"):
            ours = name.removeprefix("glm53d").removeprefix(".")
            bad = not any(within(ours, package) for package in (*layer.may, *EVERYWHERE, *([home] if home else ())))
        else:
            bad = any(within(name, package) for package in layer.never)
        if bad:
            told.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return told


def test_every_folder_has_a_row():
    folders = {path.parent.name for path in (ROOT / "glm53d").glob("*/__init__.py")}
    assert folders == set(LAYERS)
    assert {path.name for path in (ROOT / "glm53d").glob("*.py")} - {"__init__.py"} == set(TOP)


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_only_what_its_row_says(folder: str):
    files = sorted((ROOT / "glm53d" / folder).rglob("*.py"))
    assert [line for path in files for line in breaches(path, folder, LAYERS[folder])] == []


@pytest.mark.parametrize("file", TOP)
def test_a_file_at_the_top_imports_only_what_its_row_says(file: str):
    assert breaches(ROOT / "glm53d" / file, "", TOP[file]) == []


def test_each_init_file_is_empty():
    assert [path for path in (ROOT / "glm53d").rglob("__init__.py") if path.read_text()] == []


def test_an_import_inside_a_function_is_a_breach_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text(
        "def f():\n    import torch.nn\n    from glm53d import front\n    from glm53d.errors import StartError\n"
    )
    layer = Layer(may=("config",), never=("torch",))
    assert breaches(path, "chat", layer) == ["a.py:2 imports torch.nn", "a.py:3 imports glm53d.front"]


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("glm53d.__main__", ["torch", "aiohttp", "numpy"]),
        ("glm53d.server.app", ["torch"]),
        ("glm53d.front.engine", ["torch", "aiohttp"]),
        ("glm53d.world.supervisor", ["torch"]),
        ("glm53d.worker.main", ["aiohttp"]),
    ],
)
def test_importing_a_module_leaves_out_what_its_process_has_no_use_for(module: str, unwanted: list[str]):
    """A fresh interpreter each: what another test has loaded is not seen."""
    code = f"import sys, {module}; print([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
