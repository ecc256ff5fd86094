"""Our model gives what transformers' GlmMoeDsaForCausalLM gives, however a request is cut, placed and batched. [R43]"""

import random
from pathlib import Path

import pytest
import torch

from glm53d.config import Config, Kv, Model
from glm53d.model import step
from glm53d.runner.torch_runner import TorchRunner
from tests.model.drive import Driver, Request
from tests.model.tiny import tiny_model

NUM_OUTPUTS = 32
TRANSFORMERS_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever config.json says


def make_driver(folder: Path, rng: random.Random) -> Driver:
    config = Config(
        model=Model(path=str(folder), q_kv_norm_eps=TRANSFORMERS_NORM_EPS, max_context_len=512),
        kv=Kv(page_size=rng.choice([1, 4, 16]), num_pages=512),
    )
    return Driver(TorchRunner(config, 0, 8, 1 << 20), rng)


def assert_parity(model, request: Request) -> None:
    """Teacher-forced: one full forward over prompt and outputs gives every step's logits at once."""
    with torch.inference_mode():
        expected = model(torch.tensor([request.tokens[:-1]])).logits[0, request.prompt_len - 1 :]
    logits = torch.stack(request.logits)
    assert (logits - expected).abs().max() < 1e-4
    assert request.outputs == expected.argmax(-1).tolist()


@pytest.mark.parametrize("seed", range(24))
def test_any_chunking_pages_prefix_hit_and_batch_give_the_logits_of_transformers(seed, tmp_path, monkeypatch):
    rng = random.Random(seed)
    model = tiny_model(seed, tmp_path)
    if seed % 2:  # loops over parts of queries, which tiny inputs would never need
        monkeypatch.setattr(step, "MAX_ELEMENTS", 1 << 11)
    monkeypatch.setattr(step, "MAX_GATHERED_LEN", rng.choice([1, 8]))
    driver = make_driver(tmp_path, rng)

    def text(length: int) -> list[int]:
        return [rng.randrange(model.config.vocab_size) for _ in range(length)]

    prompt = text(rng.randint(50, 70))
    requests = [driver.request(prompt), driver.request(text(rng.randint(12, 40)))]
    driver.run_until(requests, num_outputs=4, max_chunk=rng.choice([5, 100]))
    follower = driver.request(prompt[:48] + text(9), shared=requests[0])
    assert follower.computed == 48
    requests.append(follower)
    driver.run_until(requests, NUM_OUTPUTS, max_chunk=rng.choice([3, 20, 100]))
    for request in requests:
        assert len(request.tokens) > model.config.index_topk
        assert_parity(model, request)
