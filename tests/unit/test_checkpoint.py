"""What a checkpoint's folder must hold before anything is spawned: a refusal names what is missing."""

from pathlib import Path

import pytest

from glm53d.config import load
from glm53d.errors import CheckpointError
from glm53d.world.checkpoint import read_checkpoint


def test_a_folder_that_is_not_there_is_named_before_its_files(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"/none: there is no such folder \(model\.path\)$"):
        read_checkpoint(load(None, [f"model.path={tmp_path / 'none'}"]))


def test_a_folder_without_a_tokenizer_says_which_settings_lead_to_one(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: there is no tokenizer \(tokenizer\.path, or"):
        read_checkpoint(load(None, [f"model.path={tmp_path}"]))
