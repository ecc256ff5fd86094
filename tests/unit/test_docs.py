"""The documentation points at what is there."""

import configparser
import re
from pathlib import Path

import pytest

from glm53d.config import Config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Of its headlines, as Markdown on the web makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_to_a_file_and_a_headline(page: Path):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_the_architecture_names_every_file():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = {path.name for path in (ROOT / "glm53d").glob("*/*.py")} - {"__init__.py"}
    assert {name for name in files if name not in text} == set(), "name each where its neighbours are"


def test_the_systemd_unit_lets_drain_and_does_not_restart_what_is_refused():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's names have capitals
    unit.read(ROOT / "conf" / "glm53d.service")
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > Config().server.drain_timeout_s
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert service["KillMode"] == "mixed"
