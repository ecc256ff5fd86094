"""Biases and penalties of requests that are served: each token against plain numpy, in any company. [R36] [R51]"""

from pathlib import Path

import numpy as np
import pytest

from glm53d.config import Config, Kv, Model, Scheduler, Speculation
from glm53d.model.config import ModelConfig
from tests.model.synthetic import make_checkpoint
from tests.model.world import Alone, ServedWorld, serve

NUM_NEW = 16
PENALTIES = [
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.8},
    {"presence_penalty": 1.0, "frequency_penalty": -0.3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
]
SEEDED = {"temperature": 0.9, "top_p": 0.95}


def served(folder: Path, num_pages: int = 128, max_in_flight: int = 1, **scheduler: int) -> ServedWorld:
    config = Config(
        model=Model(path=str(folder), max_context_len=128, q_kv_norm_eps=1e-6),
        kv=Kv(page_size=2, num_pages=num_pages),
        scheduler=Scheduler(**({"max_running_requests": 4, "max_step_tokens": 24} | scheduler)),
        speculation=Speculation(num_draft_tokens=0),
    )
    return ServedWorld(Alone(), config, ModelConfig.load(folder).vocab_size, max_in_flight=max_in_flight)


def penalised(
    logits: np.ndarray, prompt: list[int], output: list[int], repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0, presence_penalty: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """As OpenAI, Hugging Face and SGLang define it, one id after the other."""
    out = logits.astype(np.float64)
    for id in {*prompt, *output}:
        out[id] = out[id] / repetition_penalty if out[id] > 0 else out[id] * repetition_penalty
    for id in set(output):
        out[id] -= frequency_penalty * output.count(id) + presence_penalty
    return out


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_every_token_is_the_best_by_its_own_prompt_and_output(penalties, tmp_path):
    """Chunked prompts, prefix hits, requests that come and go, and a pool so small that some are retracted."""
    make_checkpoint(tmp_path, 1)
    world = served(tmp_path, num_pages=50)
    sampler, num_checked = world.ranks.runner.sampler, 0
    sample = sampler.sample

    def checked(logits, slots, *rest):
        nonlocal num_checked
        ids = sample(logits, slots, *rest)
        for row, slot, id in zip(logits.numpy(), slots.tolist(), ids.tolist(), strict=True):
            req = world.sched.slots.reqs[slot]
            known = [*req.tokens.tolist(), *world.sched.log.get(slot).tolist()]
            expected = penalised(row, known[: req.num_prompt_ids], known[req.num_prompt_ids :], **penalties)
            assert expected[id] >= expected.max() - 1e-5
            num_checked += expected.argmax() != row.argmax()
        return ids

    sampler.sample = checked
    serve(world, 1, NUM_NEW, **penalties)
    assert num_checked > 10, "penalties that change next to nothing prove nothing"
    assert world.sched.counters.retracted and world.sched.counters.cached_tokens


@pytest.mark.parametrize("sampling", [PENALTIES[3], PENALTIES[3] | SEEDED], ids=["greedy", "seeded"])
def test_answers_are_the_same_alone_in_company_and_after_retractions(sampling, tmp_path):
    make_checkpoint(tmp_path, 2)
    together = served(tmp_path)
    expected = serve(together, 2, NUM_NEW, **sampling)
    crowded = served(tmp_path, num_pages=46)
    assert serve(crowded, 2, NUM_NEW, **sampling) == expected and crowded.sched.counters.retracted
    queued = served(tmp_path, max_biased_requests=1)
    assert serve(queued, 2, NUM_NEW, **sampling) == expected
    overlapped = served(tmp_path, num_pages=46, max_in_flight=2)
    assert serve(overlapped, 2, NUM_NEW, **sampling) == expected
    alone = served(tmp_path)
    for handle, prompt in together.prompts.items():
        alone.send(handle, prompt, NUM_NEW + 2 * handle, seed=handle, **sampling)
        while not alone.is_idle():
            alone.step()
        alone.sched.flush_cache()
        assert alone.received[handle] == expected[handle - 1]


@pytest.mark.parametrize(("budget", "max_in_flight"), [(0, 1), (1, 1), (5, 1), (0, 2), (5, 2)])
def test_what_was_sampled_and_replaced_by_a_forced_end_of_thinking_is_not_penalised(budget, max_in_flight, tmp_path):
    """Against an answer whose prompt has what came before, as repetition counts both alike."""
    make_checkpoint(tmp_path, 3, eos_token_id=[])
    world, prompt = served(tmp_path, max_in_flight=max_in_flight), list(range(1, 30))
    for handle in range(1, 5):
        world.send(handle, prompt[handle:], 20, thinking_budget=budget, repetition_penalty=1.5)
    while not world.is_idle():
        world.step()
    assert world.sched.counters.thinking_forced
    for handle in range(1, 5):
        answer = world.received[handle]
        assert answer[budget] == world.vocab - 1
        world.send(handle + 10, prompt[handle:] + answer[: budget + 1], 20 - budget - 1, repetition_penalty=1.5)
    while not world.is_idle():
        world.step()
    assert [world.received[10 + i][: 19 - budget] for i in range(1, 5)] == [
        world.received[i][budget + 1 :] for i in range(1, 5)
    ]


def test_biases_decide_and_requests_without_them_go_on_as_they_were(tmp_path):
    make_checkpoint(tmp_path, 4, eos_token_id=[])
    plain = served(tmp_path)
    expected = serve(plain, 4, NUM_NEW)
    world = served(tmp_path)
    for handle, bias in ((90, {7: 100.0}), (91, {8: 1e4}), (92, {9: 0.0, 11: 0.5})):
        flags = 128 if handle == 92 else 0
        world.send(handle, [1, 2, 3], 40, bias=bias, flags=flags, temperature=1.0, seed=handle)
    assert serve(world, 4, NUM_NEW) == expected
    assert set(world.received[90]) == {7} and set(world.received[91]) == {8}
    assert set(world.received[92]) == {9, 11}
