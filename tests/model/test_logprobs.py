"""Logprobs are the log-softmax of a full forward pass: of prompt and output, drafted, sharded, sliced, in any batch."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from glm53d.config import Config, Kv, Model, Parallel, Scheduler, Speculation
from glm53d.model.config import ModelConfig
from glm53d.runner import logprobs
from tests.model.synthetic import make_checkpoint
from tests.model.tiny import tiny_model
from tests.model.world import Alone, Ranks, ServedWorld

NORM_EPS = 1e-6  # transformers' own, of q_a_layernorm and kv_a_layernorm
ASKS = [(3, 0), (0, -1), (20, 7), (5, 0), (-1, -1), (2, 1)]  # (top_logprobs, logprob_start) of each request


def config_of(folder: Path, eps: float = 0.0, num_drafts: int = 0, **parallel: int) -> Config:
    return Config(
        model=Model(path=str(folder), max_context_len=128, q_kv_norm_eps=eps),
        kv=Kv(page_size=4, num_pages=64),
        parallel=Parallel(**parallel),
        scheduler=Scheduler(max_running_requests=6, max_step_tokens=32),
        speculation=Speculation(num_draft_tokens=num_drafts),
    )


def answers(world: ServedWorld, seed: int) -> dict[int, tuple[list, list]]:
    """Requests of which some share a prefix; sampled in ways that logprobs know nothing of."""
    rng = random.Random(seed)
    first = [rng.randrange(3, world.vocab) for _ in range(40)]
    for handle, (top, start) in enumerate(ASKS, 1):
        prompt = first[:20] + [rng.randrange(3, world.vocab) for _ in range(10)] if handle % 2 else first[: 30 + handle]
        world.send(
            handle, prompt, 10, seed=handle, temperature=0.8, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.1,
            top_logprobs=top, logprob_start=start, stream_interval=handle,
        )  # fmt: skip
        world.step()
    while not world.is_idle():
        world.step()
    return {handle: world.logprobs[handle] for handle in world.asked}


def check(world: ServedWorld, expected_of: dict[int, np.ndarray], tolerance: float) -> None:
    """expected_of: [num_tokens, vocab] of each handle, log-softmax behind each token."""
    for handle, (top, start) in enumerate(ASKS, 1):
        prompt, said = world.prompts[handle], world.received[handle]
        of_prompt, of_output = world.logprobs[handle]
        if top < 0:
            assert not of_prompt and not of_output
            continue
        assert [row[0][0] for row in of_prompt] == (prompt[start:] if start >= 0 else [])
        assert [row[0][0] for row in of_output] == said and len(said) > 0
        if start == 0:
            assert np.isnan(of_prompt.pop(0)[0][1])
        expected = expected_of[handle]
        first = len(prompt) - len(of_prompt)
        for position, row in enumerate([*of_prompt, *of_output], first):
            values = expected[position - 1]
            best = np.sort(values)[::-1][:top]
            assert [value for _, value in row] == pytest.approx([values[i] for i, _ in row], abs=tolerance)
            assert [value for _, value in row[1:]] == pytest.approx(best, abs=tolerance)
            assert len(row) == 1 + top


@pytest.mark.parametrize("seed", range(4))
def test_they_are_those_of_transformers(seed, tmp_path, monkeypatch):
    if seed % 2:  # a prompt in several slices
        monkeypatch.setattr(logprobs, "MAX_ELEMENTS", 1000)
    model = tiny_model(seed, tmp_path)
    world = ServedWorld(Alone(), config_of(tmp_path, NORM_EPS), model.config.vocab_size)
    answers(world, seed)
    expected = {}
    with torch.inference_mode():
        for handle in world.asked:
            ids = torch.tensor([world.prompts[handle] + world.received[handle]])
            expected[handle] = model(ids).logits[0].log_softmax(-1).numpy()
    check(world, expected, 1e-4)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("official")
    make_checkpoint(folder, 0)
    return folder, ModelConfig.load(folder).vocab_size


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("attn_dp_size", [1, 2])
def test_a_sharded_vocabulary_and_drafts_give_those_of_one_rank(ranks, official, attn_dp_size, num_drafts):
    """Each accepted draft has its own, from the logits that accepted it."""
    folder, vocab = official
    alone = ServedWorld(Alone(), config_of(folder), vocab)
    expected = answers(alone, 1)
    config = config_of(folder, num_drafts=num_drafts, tp_size=2, attn_dp_size=attn_dp_size, ep_size=2)
    world = ServedWorld(ranks, config, vocab)
    assert answers(world, 1).keys() == expected.keys()
    for handle, parts in expected.items():
        assert world.received[handle] == alone.received[handle]
        for mine, theirs in zip(world.logprobs[handle], parts, strict=True):
            assert [[id_ for id_, _ in row[:1]] for row in mine] == [[id_ for id_, _ in row[:1]] for row in theirs]
            assert np.allclose(values(mine), values(theirs), atol=1e-4, equal_nan=True)


def values(rows: list) -> np.ndarray:
    return np.array([[value for _, value in row] for row in rows])


def test_ids_without_a_token_are_never_named(official):
    folder, vocab = official
    world = ServedWorld(Alone(), config_of(folder), vocab // 2)
    for top in (0, 20):
        world.send(1 + top, [5, 6, 7], 8, top_logprobs=top, logprob_start=0)
    while not world.is_idle():
        world.step()
    rows = [row for handle in (1, 21) for part in world.logprobs[handle] for row in part]
    assert max(id_ for row in rows for id_, _ in row) < vocab // 2
    assert all(sum(np.exp(value) for _, value in row[1:]) < 0.999 for row in world.logprobs[21][1]), "of all the logits"
