"""The memory plan against what the engine really takes."""

import pytest
import torch

from glm53d.config import load
from glm53d.model.config import ModelConfig
from glm53d.model.glm import Glm
from glm53d.model.groups import RankGroups
from glm53d.model.layout import Layout
from glm53d.model.mtp import Mtp
from glm53d.model.weights import Checkpoint
from glm53d.nano.weights import nano_folder
from glm53d.runner.torch_runner import TorchRunner
from glm53d.world.plan import memory_plan, weight_bytes
from tests.model.synthetic import make_checkpoint


def test_the_plan_of_the_built_in_model_is_what_the_engine_reports():
    """[R3] To the byte and the page: pages follow from the same rule, and memory enough for eight full contexts."""
    config = load(None, ["model.max_context_len=1000"])
    runner = TorchRunner(config, rank=0, max_slots=2, tokenizer_size=2036)
    loaded = runner.load(lambda phase, percent: None)
    runner.close()
    plan = memory_plan(ModelConfig.load(nano_folder()), config, 1 << 30, mtp=False)
    assert (plan.weight_bytes, plan.kv_bytes_per_token) == (loaded.weight_bytes, loaded.kv_bytes_per_token)
    assert (plan.num_pages, plan.page_size, plan.max_context_len) == (loaded.num_pages, loaded.page_size, 1000)


@pytest.mark.parametrize(("attn_dp_size", "ep_size"), [(1, 1), (1, 4), (2, 2), (4, 1), (4, 4)])
def test_what_a_rank_keeps_on_a_gpu_is_what_the_plan_says_to_the_byte(tmp_path, attn_dp_size, ep_size):
    """Quantised linears as stored, kv_b_proj dense, the router float32. On the CPU, where FP8 can be held as well."""
    sizes = {"hidden_size": 64, "vocab_size": 128, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 24}
    sizes |= {"v_head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64, "index_head_dim": 16}
    make_checkpoint(tmp_path, 1, **sizes)
    model = ModelConfig.load(tmp_path)
    layout = ["parallel.tp_size=4", f"parallel.attn_dp_size={attn_dp_size}", f"parallel.ep_size={ep_size}"]
    config = load(None, [*layout, "engine.device=cuda", "model.dtype=bfloat16"])
    for rank in range(4):
        ranks = RankGroups(Layout(rank, 4, attn_dp_size, ep_size))
        checkpoint = Checkpoint(tmp_path, model, torch.bfloat16, torch.device("cpu"), with_mtp=True, keep_fp8=True)
        glm = Glm(model, checkpoint, ranks, 1e-5, lambda done: None)
        without = checkpoint.bytes_read
        Mtp(model, checkpoint, ranks, glm, 1e-5)
        assert without == weight_bytes(model, config, mtp=False)
        assert checkpoint.bytes_read == weight_bytes(model, config, mtp=True)
