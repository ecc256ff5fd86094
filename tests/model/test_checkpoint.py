"""A checkpoint that is not one we can serve is refused by name, nearly always before its weights are read."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from glm53d.errors import CheckpointError
from glm53d.model.config import GLM_5_3, ModelConfig
from glm53d.model.layers import Linear, Mlp
from glm53d.model.weights import Checkpoint
from tests.model.synthetic import make_checkpoint, write_shards
from tests.model.tiny import tiny_model

FP8 = torch.float8_e4m3fn
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
    else:
        write_shards(folder, tensors, shards)


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
    tensors[NAME] = tensors[NAME].to(FP8)
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


def test_a_file_that_is_cut_short_is_named(folder, tensors):
    write(folder, tensors, 3)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=path.name):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named_by_the_rank_whose_share_it_is_in(folder, tensors, value):
    tensors[NAME][3, 1] = value
    write(folder, tensors)
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.read(NAME, rows=slice(4, 20)), tensors[NAME][4:20])
    with pytest.raises(CheckpointError, match=f"{NAME} has values that are not finite"):
        checkpoint.read(NAME, rows=slice(0, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index, name: index.pop(name), "in a file but not so in the index"),
        (lambda index, name: index.update(more=index[name]), "not in the file that the index names: more"),
        (lambda index, name: index.update({name: "model-00003-of-00003.safetensors"}), f"index names: {NAME}"),
        (lambda index, name: index.update({name: "gone.safetensors"}), r"gone\.safetensors"),
    ],
)
def test_an_index_that_is_not_true_is_refused(folder, tensors, change, message):
    write(folder, {NAME: tensors.pop(NAME)} | tensors, 3)  # in the first file
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"], NAME)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    folder = tmp_path_factory.mktemp("official")
    return folder, make_checkpoint(folder, 0)


def test_blocks_are_dequantised_and_other_tensors_left_alone(official):
    folder, tensors = official
    checkpoint = Checkpoint(folder, ModelConfig.load(folder), torch.float32, torch.device("cpu"), with_mtp=True)
    names = [name for name in tensors if not name.endswith("_scale_inv")]
    assert len(tensors) - len(names) > 100
    for name in names:
        assert torch.equal(checkpoint.read(name), dequantised(tensors, name))


@settings(max_examples=50)
@given(data=st.data())
def test_any_part_of_a_quantised_tensor_is_that_part_of_the_whole(official, data):
    folder, tensors = official
    checkpoint = open_checkpoint(folder)
    name = data.draw(st.sampled_from(["mlp.down_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"]))
    name = f"model.layers.0.{name}.weight"
    whole = dequantised(tensors, name)
    (top, bottom), (left, right) = (
        sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in whole.shape
    )
    part = checkpoint.read(name, slice(top, bottom), slice(left, right))
    assert torch.equal(part, whole[top:bottom, left:right])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_kept_as_stored_give_the_very_results_of_dequantised_ones(official, dtype):
    """Parts that begin and end inside of blocks, several of them in one product, quantised or not."""
    folder, _ = official
    config, device = ModelConfig.load(folder), torch.device("cpu")
    kept, plain = (Checkpoint(folder, config, dtype, device, keep_fp8=keep) for keep in (True, False))
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    prefix, rows = "model.layers.0.self_attn.", slice(3, 21)
    names = ["q_a_proj", "kv_a_proj_with_mqa", "indexer.weights_proj"]
    results = [Linear(*(c.read_weight(f"{prefix}{name}.weight", rows) for name in names))(x) for c in (kept, plain)]
    assert torch.equal(*results)
    part = slice(8, 40)
    results = [Mlp(c, "model.layers.0.mlp.", part)(x) for c in (kept, plain)]
    assert torch.equal(*results)
    assert kept.bytes_read < plain.bytes_read


def test_a_kept_weight_that_is_not_finite_is_named(official, tmp_path):
    folder, tensors = official
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    scale = tensors[QUANTISED + "_scale_inv"].clone()
    scale[0, 0] = float("inf")
    write_shards(tmp_path, tensors | {QUANTISED + "_scale_inv": scale}, 2)
    config = ModelConfig.load(tmp_path)
    checkpoint = Checkpoint(tmp_path, config, torch.float32, torch.device("cpu"), keep_fp8=True)
    with pytest.raises(CheckpointError, match=f"{QUANTISED} has values that are not finite"):
        checkpoint.read_weight(QUANTISED)


def dequantised(tensors, name) -> torch.Tensor:
    """Block by block, 16 x 16."""
    values = tensors[name].float()
    if (scale := tensors.get(name + "_scale_inv")) is not None:
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                values[16 * i : 16 * i + 16, 16 * j : 16 * j + 16] *= scale[i, j]
    return values


QUANTISED = "model.layers.1.mlp.experts.2.up_proj.weight"
MTP = "model.layers.4.eh_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(QUANTISED + "_scale_inv"), f"missing: {QUANTISED}_scale_inv"),
        (lambda t: t.update({QUANTISED + "_scale_inv": torch.ones(1, 1)}), r"_scale_inv is \[1, 1\] instead of"),
        (lambda t: t.update({QUANTISED + "_scale_inv": t[QUANTISED + "_scale_inv"].half()}), f"not F32: {QUANTISED}"),
        (lambda t: t.update({QUANTISED: t[QUANTISED].float()}), f"not of this model: {QUANTISED}_scale_inv"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(FP8)}), "missing: lm_head"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(FP8)}), "model.norm.weight is F8"),
        (lambda t: t.pop(MTP), f"missing: {MTP}"),
        (lambda t: t.update({MTP: t[MTP][:, :-1].contiguous()}), f"of a wrong shape: {MTP}"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_official_checkpoint_is_named(official, tmp_path, change, message):
    folder, tensors = official
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    spoiled = dict(tensors)
    change(spoiled)
    write_shards(tmp_path, spoiled, 2)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path, ModelConfig.load(tmp_path), torch.float32, torch.device("cpu"), with_mtp=True)


def test_a_tensor_that_config_says_is_not_quantised_must_not_be(official, tmp_path):
    folder, tensors = official
    name, block = "lm_head.weight", 16
    fields = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields))
    rows, columns = tensors[name].shape
    scale = torch.ones(-(-rows // block), -(-columns // block))
    spoiled = tensors | {name: tensors[name].to(FP8), name + "_scale_inv": scale}
    write_shards(tmp_path, spoiled, 2)
    with pytest.raises(CheckpointError, match=f"in FP8, which config.json lists as not converted: {name}"):
        open_checkpoint(tmp_path)
    fields["quantization_config"]["modules_to_not_convert"].remove("lm_head")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert open_checkpoint(tmp_path).read(name).shape == (rows, columns)


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
        ({"quantization_config": {"quant_method": "awq", "weight_block_size": [128, 128]}}, "quant_method"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
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
