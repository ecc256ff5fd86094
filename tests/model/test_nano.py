"""The nano folder: a whole checkpoint, made once per user and content, whoever else starts at the same time."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from glm53d.errors import StartError
from glm53d.model.config import ModelConfig
from glm53d.model.weights import Checkpoint
from glm53d.nano.weights import nano_folder, write_safetensors


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_a_checkpoint_whose_config_and_tokenizer_agree(cache):
    folder = nano_folder()
    assert folder.is_relative_to(cache)
    config = ModelConfig.load(folder)
    Checkpoint(folder, config, torch.float32, torch.device("cpu"), with_mtp=True)  # raises if a tensor is amiss
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    assert [added[i] for i in config.eos_token_id] == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert max(added) < config.vocab_size
    generation = json.loads((folder / "generation_config.json").read_text())
    assert tuple(generation["eos_token_id"]) == config.eos_token_id


def test_it_is_made_once(cache):
    weights = nano_folder() / "model.safetensors"
    before = weights.stat()
    assert nano_folder() == weights.parent
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in weights.parent.parent.iterdir()] == [weights.parent.name]  # nothing half-made is left


def test_starters_at_once_agree(cache):
    code = "from glm53d.nano.weights import nano_folder; print(nano_folder())"
    starters = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    folders = {starter.communicate()[0].strip() for starter in starters}
    assert {starter.returncode for starter in starters} == {0}
    assert folders == {str(nano_folder())}
    assert len(list((cache / "glm53d").iterdir())) == 1


def test_a_cache_that_cannot_be_written_names_the_variable_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartError, match="set XDG_CACHE_HOME"):
        nano_folder()


def test_a_user_without_a_home_is_told_the_variable_to_set(monkeypatch):
    def no_home() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    with pytest.raises(StartError, match="set XDG_CACHE_HOME"):
        nano_folder()


def test_arrays_are_written_as_torch_would_round_them(tmp_path):
    values = np.random.default_rng(0).standard_normal((33, 7), np.float32)
    write_safetensors(tmp_path / "t.safetensors", {"w": values, "e_score_correction_bias": values[0]})
    read = load_file(tmp_path / "t.safetensors")
    assert torch.equal(read["w"], torch.from_numpy(values).bfloat16())
    assert torch.equal(read["e_score_correction_bias"], torch.from_numpy(values[0]))
