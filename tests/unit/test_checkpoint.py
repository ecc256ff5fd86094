"""What a checkpoint's folder must hold before anything is spawned: a refusal names what is missing."""

from pathlib import Path

import pytest

from glm53d.config import load
from glm53d.errors import CheckpointError, ConfigError
from glm53d.world.checkpoint import read_checkpoint

NANO = Path(__file__).parents[2] / "glm53d" / "nano"


def test_a_folder_that_is_not_there_is_named_before_its_files(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"/none: there is no such folder \(model\.path\)$"):
        read_checkpoint(load(None, [f"model.path={tmp_path / 'none'}"]))


def test_a_folder_without_a_tokenizer_says_which_settings_lead_to_one(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: there is no tokenizer \(tokenizer\.path, or"):
        read_checkpoint(load(None, [f"model.path={tmp_path}"]))


def test_a_template_that_is_not_there_is_named_once(tmp_path: Path):
    path = tmp_path / "own.jinja"
    with pytest.raises(ConfigError) as refused:
        read_checkpoint(load(None, [f"template.path={path}", "template.parsers=glm"]))
    assert refused.value.message == f"{path}: No such file or directory"


def test_a_folder_without_generation_config_names_that_file(tmp_path: Path):
    with pytest.raises(CheckpointError) as refused:
        read_checkpoint(load(None, [f"model.path={tmp_path}", f"tokenizer.path={NANO}"]))
    assert refused.value.message == f"{tmp_path / 'generation_config.json'}: No such file or directory"
