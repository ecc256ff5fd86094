"""The checkpoint's config.json: only the fields we use, by their official names. No torch here: main plans with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from glm53d.config import Config
from glm53d.errors import CheckpointError, StartError

Size = Annotated[int, Meta(ge=1)]
Scale = Annotated[float, Meta(gt=0)]

IMPLIED = {
    "model_type": "glm_moe_dsa",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "index_topk_pattern": None,
}
"""Switches that our arithmetic has built in. A checkpoint may leave one out; with another value it is not our model."""

EVEN = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "index_n_heads", "index_head_dim")
"""Rope turns pairs in place, in views of fused projections: every part before and around a rope part is whole pairs."""


class QuantizationConfig(msgspec.Struct, frozen=True):
    """How the linears' weights are stored; each one's block scales stand beside it as `<name>_scale_inv`."""

    quant_method: Literal["fp8"]
    weight_block_size: tuple[Size, Size]
    fmt: Literal["e4m3"] = "e4m3"
    modules_to_not_convert: tuple[str, ...] = ()  # whose tensors must not be quantised; names one by another name


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a GLM-5.3-shaped model. Lists per layer are complete: what config.json implies is filled in."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_nextn_predict_layers: Annotated[int, Meta(ge=0)] = 0  # MTP layers, stored behind the others
    max_position_embeddings: Size
    rms_norm_eps: Scale
    rope_theta: Scale

    num_attention_heads: Size
    q_lora_rank: Size
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size

    indexer_types: tuple[Literal["full", "shared"], ...]  # full: chooses tokens; shared: as the last full layer
    index_n_heads: Size
    index_head_dim: Size
    index_topk: Size
    index_share_for_mtp_iteration: bool = False  # a chain's later drafts use the first one's choice

    mlp_layer_types: tuple[Literal["dense", "sparse"], ...]
    intermediate_size: Size
    moe_intermediate_size: Size
    n_routed_experts: Size
    n_shared_experts: Size
    num_experts_per_tok: Size
    routed_scaling_factor: Scale

    eos_token_id: tuple[int, ...] = ()
    quantization_config: QuantizationConfig | None = None

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        """Read folder/config.json. Raises CheckpointError naming the file and the field."""
        path = Path(folder) / "config.json"
        try:
            fields = msgspec.json.decode(path.read_bytes(), type=dict)
            config = msgspec.convert(_completed(fields), cls)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        if problem := config._problem():
            raise CheckpointError(f"{path}: {problem}")
        return config

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head before absorption; its inverse root scales the scores in either form."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached KV row: the latent, then the rotated key all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_full_layers(self) -> int:
        """Layers with an indexer, which alone cache index keys; MTP layers are not counted."""
        return self.indexer_types.count("full")

    def _problem(self) -> str | None:
        layers = self.num_hidden_layers
        checks = {
            f"indexer_types does not have {layers} entries, one per layer": len(self.indexer_types) == layers,
            f"mlp_layer_types does not have {layers} entries, one per layer": len(self.mlp_layer_types) == layers,
            "indexer_types must start with a full layer": self.indexer_types[:1] != ("shared",),
            f"{', '.join(EVEN)} must be even": all(getattr(self, name) % 2 == 0 for name in EVEN),
            "index_head_dim is below qk_rope_head_dim": self.index_head_dim >= self.qk_rope_head_dim,
            "num_experts_per_tok is above n_routed_experts": self.num_experts_per_tok <= self.n_routed_experts,
            "eos_token_id has an id outside the vocabulary": all(0 <= i < self.vocab_size for i in self.eos_token_id),
        }
        return next((text for text, holds in checks.items() if not holds), None)


def _completed(fields: Mapping[str, object]) -> dict[str, object]:
    """config.json in the one form that ModelConfig has. Raises ValueError, naming the field."""
    for name, value in IMPLIED.items():
        if name in fields and fields[name] != value:
            raise ValueError(f"{name} is {fields[name]!r}, and only {value!r} is supported")
    out = dict(fields)
    rope = fields.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", "default") != "default" or fields.get("rope_scaling"):
        raise ValueError("rope_parameters: only rope_type 'default' is supported")
    if "rope_theta" in rope:
        out["rope_theta"] = rope["rope_theta"]
    eos = fields.get("eos_token_id")
    out["eos_token_id"] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    layers = fields.get("num_hidden_layers")
    if isinstance(layers, int):
        if fields.get("indexer_types") is None:
            freq, offset = fields.get("index_topk_freq", 1), fields.get("index_skip_topk_offset", 2)
            if not isinstance(freq, int) or not isinstance(offset, int) or freq < 1:
                raise ValueError("index_topk_freq and index_skip_topk_offset must be integers, the first at least 1")
            out["indexer_types"] = _indexer_types(layers, freq, offset)
        if fields.get("mlp_layer_types") is None:
            dense = fields.get("first_k_dense_replace")
            if not isinstance(dense, int):
                raise ValueError("neither mlp_layer_types nor first_k_dense_replace is given")
            out["mlp_layer_types"] = _mlp_layer_types(layers, dense)
    return out


def _indexer_types(layers: int, freq: int, offset: int) -> list[str]:
    return ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers)]


def _mlp_layer_types(layers: int, dense: int) -> list[str]:
    return ["dense" if i < dense else "sparse" for i in range(layers)]


GLM_5_3 = ModelConfig(
    vocab_size=154880,
    hidden_size=6144,
    num_hidden_layers=78,
    num_nextn_predict_layers=1,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-5,
    rope_theta=8e6,
    num_attention_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    indexer_types=tuple(_indexer_types(78, freq=4, offset=3)),  # type: ignore[arg-type]
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    mlp_layer_types=tuple(_mlp_layer_types(78, dense=3)),  # type: ignore[arg-type]
    intermediate_size=12288,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    routed_scaling_factor=2.5,
    eos_token_id=(154820, 154827, 154829),
    quantization_config=QuantizationConfig(quant_method="fp8", weight_block_size=(128, 128)),
)
"""The official FP8 checkpoint, for planning without one."""


def refuse_unfit(config: Config, model: ModelConfig) -> None:
    """Raise StartError for what the configuration asks for and this checkpoint does not have."""
    if config.model.max_context_len > model.max_position_embeddings:
        raise StartError(
            f"model.max_context_len is {config.model.max_context_len}, above the checkpoint's "
            f"{model.max_position_embeddings}"
        )
    num_drafts, num_layers = config.speculation.num_draft_tokens, model.num_nextn_predict_layers
    if num_drafts and num_layers != 1:
        raise StartError(
            f"speculation.num_draft_tokens is {num_drafts}, and the checkpoint has {num_layers} MTP layers instead of "
            "one: set it to 0"
        )
    if config.model.fp8_inputs and model.quantization_config is None:
        raise StartError("model.fp8_inputs is set, and the checkpoint has no FP8 weights")
