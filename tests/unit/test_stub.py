"""The committed stub of the native module."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_committed_stub_is_what_the_module_says(tmp_path: Path):
    """On a failure: make stub."""
    fresh = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "glm53d._native", "-o", str(fresh)]
    subprocess.run(command, check=True, cwd=ROOT)
    assert (ROOT / "glm53d" / "_native.pyi").read_text() == fresh.read_text()
