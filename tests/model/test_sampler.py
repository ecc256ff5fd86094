"""Sampling: the documented order of filters, exact shares, and numbers that depend on (seed, position) alone. [R51]"""

import numpy as np
import pytest
import torch

from glm53d.ipc.records import SLOT_INIT
from glm53d.runner.sampler import Sampler, uniform

VOCAB, TOKENS = 40, 37
EOS = (3, 36, 39)  # the last has no token in this vocabulary
CPU = torch.device("cpu")
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


def make_sampler(*params: dict) -> Sampler:
    """One slot per set of parameters."""
    sampler = Sampler(len(params), TOKENS, CPU, EOS)
    inits = np.zeros(len(params), SLOT_INIT)
    for slot, fields in enumerate(params):
        inits[slot]["slot"], inits[slot]["top_p"] = slot, 1.0
        for name, value in fields.items():
            inits[slot][name] = value
    sampler.init_slots(inits)
    return sampler


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1.5, (rows, VOCAB)).astype(np.float32))


def expected_shares(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """The documented order in plain numpy, one row, written without a look at the sampler."""
    p = np.exp(logits[:TOKENS].astype(np.float64) / temperature)
    p /= p.sum()
    order = sorted(range(TOKENS), key=lambda i: (-p[i], i))
    kept = order[: top_k or TOKENS]
    left, reached, nucleus = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        reached += p[i] / left
        if reached >= top_p:
            break
    final = [i for i in nucleus if p[i] >= min_p * p[order[0]]]
    shares = np.zeros(TOKENS)
    shares[final] = p[final] / p[final].sum()
    return shares


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_have_the_shares_of_the_documented_order(params, over):
    n = 40_000
    logits = make_logits(1)
    if over == "positions":
        sampler, slots, positions = make_sampler(params | {"seed": 7}), np.zeros(n, np.int64), np.arange(n)
    else:
        sampler = make_sampler(*(params | {"seed": seed} for seed in range(n)))
        slots, positions = np.arange(n), np.full(n, 11)
    ids = sampler.sample(logits.expand(n, -1), slots, positions).numpy()
    shares = expected_shares(logits[0].numpy(), **params)
    counts = np.bincount(ids, minlength=TOKENS)
    assert counts[shares == 0].sum() == 0
    common = shares * n >= 5
    chi_square = (((counts - shares * n) ** 2)[common] / (shares * n)[common]).sum()
    freedom = common.sum() - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # mean and deviation of chi-square: four of the latter away


def test_a_row_gets_the_same_id_alone_and_in_any_batch():
    rows = [params | {"seed": 100 + i} for i, params in enumerate(CASES * 4)] + [{"temperature": 0.0}] * 3
    sampler, logits = make_sampler(*rows), make_logits(len(rows))
    slots, positions = np.arange(len(rows)), np.arange(len(rows)) * 3
    alone = [
        int(sampler.sample(logits[i : i + 1], slots[i : i + 1], positions[i : i + 1])[0]) for i in range(len(rows))
    ]
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(rows))[: 5 + 4 * seed]
        together = sampler.sample(logits[order], slots[order], positions[order])
        assert together.tolist() == [alone[i] for i in order]


def test_seed_and_position_both_change_what_is_drawn():
    sampler = make_sampler(*({"temperature": 1.0, "seed": seed} for seed in (1, 2)))
    logits = make_logits(1).expand(64, -1)
    first = sampler.sample(logits, np.zeros(64, np.int64), np.arange(64))
    assert len(set(first.tolist())) > 5
    assert (first != sampler.sample(logits, np.ones(64, np.int64), np.arange(64))).float().mean() > 0.5
    assert (first == sampler.sample(logits, np.zeros(64, np.int64), np.arange(64))).all()


def test_ids_without_a_token_are_never_sampled_however_probable():
    logits = make_logits(200)
    logits[:, TOKENS:] = 50.0
    sampler = make_sampler({"temperature": 0.0}, *CASES)
    for slot in range(len(CASES) + 1):
        ids = sampler.sample(logits, np.full(200, slot), np.arange(200))
        assert ids.max() < TOKENS


def test_greedy_takes_the_largest_logit_and_of_equals_the_lowest_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 21]] = 1.0
    assert make_sampler({"temperature": 0.0}).sample(logits, np.array([0]), np.array([5])).tolist() == [9]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_narrowest_filter_leaves_the_best_and_of_equals_the_lowest_id(params):
    logits = torch.zeros(50, VOCAB)
    logits[:, [9, 21]] = 1.0
    ids = make_sampler(params | {"temperature": 1.0}).sample(logits, np.zeros(50, np.int64), np.arange(50))
    assert set(ids.tolist()) == ({9, 21} if "min_p" in params else {9})


def test_a_slot_forgets_the_request_before():
    sampler = make_sampler({"temperature": 5.0, "seed": 3})
    init = np.zeros(1, SLOT_INIT)
    init["top_p"] = 1.0
    sampler.init_slots(init)
    logits = make_logits(30)
    assert (
        sampler.sample(logits, np.zeros(30, np.int64), np.arange(30)).tolist() == logits[:, :TOKENS].argmax(1).tolist()
    )


def splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_random_numbers_are_the_hash_in_exact_integers():
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 123456789123456789]
    for seed in seeds:
        for position in (0, 1, 77, 1 << 20):
            mixed = splitmix64(splitmix64((seed + golden) & mask) ^ (position * golden & mask))
            as_int64 = torch.tensor([seed - (1 << 64) if seed >= 1 << 63 else seed])
            assert uniform(as_int64, torch.tensor([position])).item() == (mixed >> 11) * 2.0**-53


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}])
def test_no_end_of_turn_is_drawn_before_min_new_tokens_and_the_others_keep_their_draws(params):
    """The rows behind it, of the same slot, are as they are without."""
    logits = make_logits(1).repeat(60, 1)
    logits[:, 3] += 9.0  # all but sure
    positions = np.arange(10, 70)
    free, bound = (make_sampler(params | {"num_prompt_ids": 10, "min_new_tokens": n}) for n in (0, 40))
    slots = np.zeros(60, np.int64)
    drawn = bound.sample(logits, slots, positions).numpy()
    assert not np.isin(drawn[:40], EOS).any()
    assert (drawn[40:] == free.sample(logits, slots, positions).numpy()[40:]).all() and 3 in drawn[40:]
