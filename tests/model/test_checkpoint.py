"""A checkpoint that is not one we can serve is refused by name, before its weights are read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm53d.errors import CheckpointError
from glm53d.model.config import GLM_5_3, ModelConfig
from glm53d.model.weights import Checkpoint
from tests.model.tiny import tiny_model

ONE_LAYER = {"num_hidden_layers": 1, "mlp_layer_types": ["dense"]}
NAME = "model.layers.1.self_attn.q_b_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tiny_model(3, folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy with the tensors as a dict, to be spoiled and written."""
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    return tmp_path


@pytest.fixture
def tensors(saved):
    return load_file(saved / "model.safetensors")


def open_checkpoint(folder) -> Checkpoint:
    return Checkpoint(folder, ModelConfig.load(folder), torch.float32, torch.device("cpu"))


def write(folder, tensors, shards: int = 1) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_read_as_it_was_written_however_it_is_sharded(folder, tensors, shards):
    write(folder, tensors, shards)
    checkpoint = open_checkpoint(folder)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert checkpoint.bytes_read == sum(tensor.nbytes for tensor in tensors.values())


def test_a_missing_tensor_is_named(folder, tensors):
    del tensors[NAME]
    write(folder, tensors)
    with pytest.raises(CheckpointError, match=f"missing: {NAME}"):
        open_checkpoint(folder)


def test_a_tensor_too_many_is_named(folder, tensors):
    tensors["model.layers.0.self_attn.q_b_proj.bias"] = torch.zeros(3)
    write(folder, tensors)
    with pytest.raises(CheckpointError, match=r"not of this model: model\.layers\.0\.self_attn\.q_b_proj\.bias"):
        open_checkpoint(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder, tensors):
    rows, columns = tensors[NAME].shape
    tensors[NAME] = torch.zeros(rows, columns + 1)
    write(folder, tensors)
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder)
    assert f"{NAME} is [{rows}, {columns + 1}] instead of [{rows}, {columns}]" in raised.value.message


def test_fp8_without_a_quantization_config_is_refused(folder, tensors):
    tensors[NAME] = tensors[NAME].to(torch.float8_e4m3fn)
    write(folder, tensors)
    with pytest.raises(CheckpointError, match=f"in FP8, for which config.json has no quantization_config: {NAME}"):
        open_checkpoint(folder)


def test_the_mtp_layer_may_be_there_only_if_the_config_has_one(folder, tensors, caplog):
    fields = json.loads((folder / "config.json").read_text())
    tensors[f"model.layers.{fields['num_hidden_layers']}.eh_proj.weight"] = torch.zeros(2, 4)
    write(folder, tensors)
    with pytest.raises(CheckpointError, match="eh_proj"):
        open_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    with caplog.at_level("INFO"):
        open_checkpoint(folder)
    assert "1 tensors of the MTP layer are left unread" in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"\x10\0\0\0\0\0\0\0{broken", b"\xff" * 64])
def test_a_file_that_is_none_is_named(folder, content):
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)


def test_an_index_must_not_lead_out_of_the_folder(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "../x.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"'\.\./x\.safetensors'"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and only False is supported"),
        ({"model_type": "llama"}, "model_type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"indexer_types": ["full"] * 99}, "indexer_types does not have"),
        ({"mlp_layer_types": ["dense"] * 99}, "mlp_layer_types does not have"),
        (ONE_LAYER | {"indexer_types": ["shared"]}, "indexer_types must start with a full layer"),
        (ONE_LAYER | {"indexer_types": ["odd"]}, "indexer_types"),
        ({"kv_lora_rank": 15}, "must be even"),
        ({"eos_token_id": [1, 1 << 30]}, "eos_token_id"),
        ({"num_experts_per_tok": 100}, "num_experts_per_tok"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_config_names_the_file_and_the_field(folder, change, message):
    fields = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in fields.items() if value is not None})
    )
    with pytest.raises(CheckpointError) as raised:
        ModelConfig.load(folder)
    assert "config.json" in raised.value.message and message in raised.value.message


def test_what_a_config_only_implies_is_filled_in(folder):
    fields = json.loads((folder / "config.json").read_text())
    for name in ("indexer_types", "mlp_layer_types", "rope_parameters"):
        del fields[name]
    fields |= {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3, "first_k_dense_replace": 3}
    (folder / "config.json").write_text(json.dumps(fields | {"rope_theta": 8000000, "eos_token_id": 7}))
    config = ModelConfig.load(folder)
    full = [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 75, 4)]
    assert config.indexer_types == GLM_5_3.indexer_types
    assert config.mlp_layer_types == GLM_5_3.mlp_layer_types
    assert (config.rope_theta, config.eos_token_id) == (8e6, (7,))
