"""Which tensors a checkpoint must have, by official name, with their shapes. The loader checks against it."""

from collections.abc import Iterator

from glm53d.model.config import ModelConfig

Shape = tuple[int, ...]


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the main model, linears as [out, in]; without quantisation scales."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        full, sparse = config.indexer_types[layer] == "full", config.mlp_layer_types[layer] == "sparse"
        shapes.update((prefix + name, shape) for name, shape in _layer(config, full=full, sparse=sparse))
    shapes["model.norm.weight"] = (config.hidden_size,)
    shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def mtp_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the MTP layers, which stand behind the others; embedding and head are the main model's."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {}
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        prefix = f"model.layers.{layer}."
        shapes.update({prefix + name: (hidden,) for name in ("enorm.weight", "hnorm.weight")})
        shapes[prefix + "eh_proj.weight"] = (hidden, 2 * hidden)
        shapes.update((prefix + name, shape) for name, shape in _layer(config, full=True, sparse=True))
        shapes[prefix + "shared_head.norm.weight"] = (hidden,)
    return shapes


def scale_shape(shape: Shape, block: tuple[int, int]) -> Shape:
    """Of a quantised linear's block scales; blocks at the edges may be partial."""
    return (-(-shape[0] // block[0]), -(-shape[1] // block[1]))


def _layer(config: ModelConfig, *, full: bool, sparse: bool) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield from (("self_attn." + name, shape) for name, shape in _attention(config))
    if full:
        yield from (("self_attn.indexer." + name, shape) for name, shape in _indexer(config))
    yield "post_attention_layernorm.weight", (hidden,)
    if not sparse:
        yield from _mlp("mlp.", hidden, config.intermediate_size)
        return
    yield "mlp.gate.weight", (config.n_routed_experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        yield from _mlp(f"mlp.experts.{expert}.", hidden, config.moe_intermediate_size)
    yield from _mlp("mlp.shared_experts.", hidden, config.moe_intermediate_size * config.n_shared_experts)


def _attention(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    yield "q_a_proj.weight", (config.q_lora_rank, hidden)
    yield "q_a_layernorm.weight", (config.q_lora_rank,)
    yield "q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (config.latent_dim, hidden)
    yield "kv_a_layernorm.weight", (config.kv_lora_rank,)
    yield "kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
    yield "o_proj.weight", (hidden, heads * config.v_head_dim)


def _indexer(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield "wq_b.weight", (config.index_n_heads * config.index_head_dim, config.q_lora_rank)
    yield "wk.weight", (config.index_head_dim, config.hidden_size)
    yield "k_norm.weight", (config.index_head_dim,)
    yield "k_norm.bias", (config.index_head_dim,)
    yield "weights_proj.weight", (config.index_n_heads, config.hidden_size)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)
