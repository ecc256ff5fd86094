"""The folder of page files: whose it is, its key, and what makes its pages useless. [R19] [R32]"""

import os

import pytest

from glm53d.config import Config, Engine, Kv, Model, Speculation
from glm53d.errors import StartError
from glm53d.world.checkpoint import read_checkpoint
from glm53d.world.storage import Storage


def test_the_key_stays_with_the_folder_and_is_the_owners_alone(tmp_path):
    first = Storage(str(tmp_path / "kv"))
    first.close()
    again = Storage(str(tmp_path / "kv"))
    assert again.hash_key == first.hash_key and len(again.hash_key) == 16
    assert (tmp_path / "kv" / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert Storage("").hash_key != Storage("").hash_key, "without a folder it is new at every start"


def test_a_key_that_is_cut_is_replaced(tmp_path):
    (tmp_path / "key").write_bytes(b"short")
    storage = Storage(str(tmp_path))
    assert len(storage.hash_key) == 16 and (tmp_path / "key").read_bytes() == storage.hash_key


def test_a_folder_is_one_daemons_at_a_time(tmp_path):
    storage = Storage(str(tmp_path))
    with pytest.raises(StartError, match="in use by another daemon"):
        Storage(str(tmp_path))
    storage.close()
    Storage(str(tmp_path)).close()


def test_a_path_that_is_no_folder_is_refused_with_the_reason(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartError, match=r"cache\.storage_path .*/file cannot be used: File exists"):
        Storage(str(tmp_path / "file"))


def test_pages_are_of_one_checkpoint_and_one_form(tmp_path):
    """What would make another page of the same tokens begins another chain of hashes."""
    source = read_checkpoint(Config()).tokenizer.parent
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    model = Model(path=str(tmp_path))
    configs = [
        Config(model=model),
        Config(model=Model(path=str(tmp_path), dtype="bfloat16")),
        Config(model=Model(path=str(tmp_path), q_kv_norm_eps=1e-6)),
        Config(model=Model(path=str(tmp_path), fp8_inputs=True)),
        Config(model=model, kv=Kv(dtype="fp8")),
        Config(model=model, kv=Kv(page_size=16)),
        Config(model=model, engine=Engine(kind="sim")),
        Config(model=model, speculation=Speculation(num_draft_tokens=1)),
    ]
    seeds = [read_checkpoint(config).chain_seed for config in configs]
    assert read_checkpoint(Config(model=model)).chain_seed == seeds[0]
    os.utime(weights, ns=(1, 1))
    seeds.append(read_checkpoint(Config(model=model)).chain_seed)
    weights.write_bytes(b"others, and longer")
    seeds.append(read_checkpoint(Config(model=model)).chain_seed)
    assert len(set(seeds)) == len(seeds)
