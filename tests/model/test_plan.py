"""The memory plan against what the engine really takes."""

from glm53d.config import load
from glm53d.model.config import ModelConfig
from glm53d.nano.weights import nano_folder
from glm53d.runner.torch_runner import TorchRunner
from glm53d.world.plan import memory_plan


def test_the_plan_of_the_built_in_model_is_what_the_engine_reports():
    """[R3] To the byte and the page: pages follow from the same rule, and memory enough for eight full contexts."""
    config = load(None, ["model.max_context_len=1000"])
    runner = TorchRunner(config, rank=0, max_slots=2, tokenizer_size=2036)
    loaded = runner.load(lambda phase, percent: None)
    runner.close()
    plan = memory_plan(ModelConfig.load(nano_folder()), config, 1 << 30, mtp=False)
    assert (plan.weight_bytes, plan.kv_bytes_per_token) == (loaded.weight_bytes, loaded.kv_bytes_per_token)
    assert (plan.num_pages, plan.page_size, plan.max_context_len) == (loaded.num_pages, loaded.page_size, 1000)
