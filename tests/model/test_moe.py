"""Two forms of the experts, one product of all or one for each, give what a token alone gets."""

import torch

from glm53d.model.config import ModelConfig
from glm53d.model.groups import RankGroups
from glm53d.model.layout import Layout
from glm53d.model.moe import STACKED_TOKENS, Moe
from glm53d.model.weights import Checkpoint
from glm53d.nano.weights import nano_folder


@torch.inference_mode()
def test_few_tokens_and_many_get_the_same_of_their_experts():
    folder = nano_folder()
    config = ModelConfig.load(folder)
    checkpoint = Checkpoint(folder, config, torch.float32, torch.device("cpu"))
    moe = Moe(config, checkpoint, "model.layers.1.mlp.", RankGroups(Layout()))
    assert moe.stack is not None
    x = torch.randn(2 * STACKED_TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1))
    together = moe(x, [len(x)], is_static=False)
    alone = torch.cat([moe(row[None], [1], is_static=False) for row in x])
    few = torch.cat([moe(part, [len(part)], is_static=False) for part in x.split(STACKED_TOKENS)])
    assert torch.allclose(together, alone, atol=1e-5) and torch.allclose(few, alone, atol=1e-5)
