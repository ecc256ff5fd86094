"""A greedy answer through HTTP is what transformers' generate gives on the same checkpoint, token for token. [R43]"""

import asyncio
import json
import random
from pathlib import Path

import torch

from tests.helpers.daemon import ROOT, running
from tests.model.tiny import tiny_model

EOS = 2000  # of the nano tokenizer, and beyond the tiny model's vocabulary: nothing ends early
NUM_NEW = 40


def generate(model, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
    return ids[0, len(prompt) :].tolist()


async def test_greedy_answers_through_http_are_those_of_transformers(tmp_path: Path, http):
    model = tiny_model(3, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    rng = random.Random(3)
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(n)] for n in (1, 7, 60, 150)]
    prompts.append(prompts[3][:130] + prompts[1])  # a prefix that is cached by then
    overrides = (
        f"model.path={json.dumps(str(tmp_path))}", f"tokenizer.path={json.dumps(str(ROOT / 'glm53d/nano'))}",
        "model.q_kv_norm_eps=1e-6", "kv.page_size=8", "kv.num_pages=256",
        "scheduler.max_step_tokens=64", "scheduler.max_running_requests=4",
    )  # fmt: skip

    async def answer(prompt: list[int]) -> list[int]:
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW}}
        async with http.post(daemon.url + "/generate", json=body) as response:
            assert response.status == 200, await response.text()
            return (await response.json())["output_ids"]

    with running(*overrides, log=tmp_path / "log") as daemon:
        expected = [generate(model, prompt) for prompt in prompts]
        assert list(await asyncio.gather(*map(answer, prompts[:4]))) == expected[:4]
        assert await answer(prompts[4]) == expected[4]
