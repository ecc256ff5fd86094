"""The nano folder: a whole checkpoint in the official form, as it was shipped or not at all."""

import json
import shutil

import pytest
import torch

from glm53d.errors import CheckpointError
from glm53d.model.config import ModelConfig
from glm53d.model.weights import Checkpoint, Fp8Weight
from glm53d.nano import weights
from glm53d.nano.weights import SUMS, nano_folder

MAX_BYTES = 6_000_000


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the package's folder, taken for it."""
    folder = tmp_path / "nano"
    shutil.copytree(weights.PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(weights, "PACKAGE", folder)
    return folder


def test_it_is_a_checkpoint_whose_config_and_tokenizer_agree():
    folder = nano_folder()
    config = ModelConfig.load(folder)
    checkpoint = Checkpoint(folder, config, torch.float32, torch.device("cpu"), with_mtp=True, keep_fp8=True)
    assert isinstance(checkpoint.read_weight("model.layers.0.mlp.gate_proj.weight"), Fp8Weight)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    assert [added[i] for i in config.eos_token_id] == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert max(added) < config.vocab_size
    generation = json.loads((folder / "generation_config.json").read_text())
    assert tuple(generation["eos_token_id"]) == config.eos_token_id


def test_it_is_small_and_its_list_has_every_file_that_is_served():
    named = {line.split("  ")[1] for line in (nano_folder() / SUMS).read_text().splitlines()}
    served = {path.name for path in nano_folder().iterdir() if path.suffix in (".json", ".safetensors")}
    assert named == served
    assert sum((nano_folder() / name).stat().st_size for name in named) < MAX_BYTES


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"])
def test_a_file_that_was_changed_or_lost_is_refused_by_name(copied, name):
    assert nano_folder() == copied
    with (copied / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(CheckpointError, match=f"{name} is not the file"):
        nano_folder()
    (copied / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: No such file"):
        nano_folder()
