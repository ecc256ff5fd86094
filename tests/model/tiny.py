"""Random tiny checkpoints of the model's architecture, written by transformers: the independent implementation."""

import random
from pathlib import Path

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM


def tiny_config(rng: random.Random) -> GlmMoeDsaConfig:
    """Every dimension drawn. 16 index heads and more: with few, whole scores are 0 and the choice among ties shows."""
    layers = rng.randint(2, 5)
    heads = rng.choice([2, 3, 4])
    return GlmMoeDsaConfig(
        vocab_size=rng.choice([97, 300]),
        hidden_size=rng.choice([48, 64, 72]),
        intermediate_size=rng.choice([56, 96]),
        moe_intermediate_size=rng.choice([24, 32]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_routed_experts=rng.choice([4, 8]),
        n_shared_experts=rng.choice([1, 2]),
        num_experts_per_tok=rng.choice([2, 3]),
        kv_lora_rank=rng.choice([16, 32]),
        q_lora_rank=rng.choice([24, 32]),
        qk_rope_head_dim=rng.choice([8, 16]),
        qk_nope_head_dim=rng.choice([12, 24]),
        v_head_dim=rng.choice([16, 24]),
        index_n_heads=rng.choice([16, 32]),
        index_head_dim=rng.choice([16, 32]),
        index_topk=rng.choice([4, 8, 16, 24, 40]),
        first_k_dense_replace=rng.randint(0, 2),
        indexer_types=["full"] + [rng.choice(["full", "shared"]) for _ in range(layers - 1)],
        eos_token_id=[1, 2],
        pad_token_id=None,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    )


def tiny_model(seed: int, folder: Path) -> GlmMoeDsaForCausalLM:
    """A model with random weights, its router's bias included; also saved to folder."""
    torch.manual_seed(seed)
    model = GlmMoeDsaForCausalLM(tiny_config(random.Random(seed))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.uniform_(0.7, 1.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.05)
    model.save_pretrained(folder)
    return model
