"""Sampling: the documented order of filters, exact shares, and numbers that depend on (seed, position) alone. [R51]"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from glm53d.ipc.batch import Batch
from glm53d.ipc.records import SLOT_INIT, TABLE_INIT
from glm53d.runner.sampler import Sampler, uniform
from glm53d.runner.tables import SamplingTables

VOCAB, TOKENS = 40, 37
EOS = (3, 36, 39)  # the last has no token in this vocabulary
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]
PROMPT, OUTPUT = [1, 2, 3, 4, 5, 30, 2], [4, 4, 6, 7, 4, 8]
BIAS = {9: 2.5, 10: -1.5, 4: 1.0, 20: -100.0}
TABLED = [
    {"temperature": 1.0, "bias": BIAS},
    {"temperature": 0.0, "bias": {11: 50.0}},
    {"temperature": 1.0, "frequency_penalty": 0.7},
    {"temperature": 1.0, "frequency_penalty": -1.3},
    {"temperature": 1.0, "presence_penalty": 1.5},
    {"temperature": 1.0, "presence_penalty": -0.5},
    {"temperature": 1.0, "repetition_penalty": 1.6},
    {"temperature": 1.0, "repetition_penalty": 0.5},
    {"temperature": 0.7, "allowed": [2, 4, 9, 21, 36]},
    {"temperature": 1.0, "allowed": [2, 4, 9, 21], "bias": BIAS, "presence_penalty": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "bias": BIAS, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.3,
     "top_k": 20, "top_p": 0.95, "min_p": 0.02},
]  # fmt: skip


def make_batch(slots: Sequence[int], params: Sequence[dict], output: Sequence[int] = OUTPUT) -> Batch:
    """A batch in which requests take these slots, having put out so much; each one's table row is that of its slot."""
    batch = Batch(1, 1, inits=np.zeros(len(params), SLOT_INIT))
    tables, bias, said = [], [], []
    times = {id: 2 * output.count(id) for id in {*PROMPT, *output}}
    for init, slot, fields in zip(batch.inits, slots, params, strict=True):
        init["slot"], init["top_p"] = slot, 1.0
        table = np.zeros((), TABLE_INIT)
        table["slot"] = table["row"] = slot
        table["repetition_penalty"], table["base_bias"] = 1.0, -np.inf if "allowed" in fields else 0.0
        for name, value in fields.items():
            if name in SLOT_INIT.names:
                init[name] = value
            elif name in TABLE_INIT.names:
                table[name] = value
        given = fields.get("bias", {})
        bias += [(slot, id, given.get(id, 0.0)) for id in fields.get("allowed", given)]
        repeats = table["repetition_penalty"] != 1.0
        said += [(slot, id, count + (repeats and id in PROMPT)) for id, count in times.items() if count or repeats]
        if fields.keys() - set(SLOT_INIT.names):
            tables.append(table)
    batch.tables = np.array(tables, TABLE_INIT)
    batch.bias_row, batch.bias_id = np.array([entry[:2] for entry in bias], np.int32).reshape(-1, 2).T
    batch.bias = np.array([entry[2] for entry in bias], np.float32)
    batch.said_row, batch.said_id, batch.said = np.array(said, np.int32).reshape(-1, 3).T
    return batch


def make_sampler(*params: dict, num_drafts: int = 0, output: Sequence[int] = OUTPUT) -> Sampler:
    """One slot per set of parameters."""
    drafts = torch.zeros(len(params), num_drafts, dtype=torch.int64)
    sampler = Sampler(len(params), SamplingTables(len(params), TOKENS, 0, drafts), EOS)
    sampler.init_slots(make_batch(range(len(params)), params, output))
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """As in a step without drafts."""
    return sampler.sample(logits, slots, positions, np.zeros(len(slots), np.int64))


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1.5, (rows, VOCAB)).astype(np.float32))


def expected_logits(
    logits: np.ndarray,
    output: Sequence[int],
    bias: dict[int, float] | None = None,
    allowed: Sequence[int] | None = None,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    **_: float,
) -> np.ndarray:
    """Bias, then penalties, as OpenAI, Hugging Face and SGLang define them; one row and one id after the other."""
    out = logits[:TOKENS].astype(np.float64)
    for i in range(TOKENS):
        out[i] += (bias or {}).get(i, 0.0)
        if allowed is not None and i not in allowed:
            out[i] = -np.inf
        if i in PROMPT or i in output:
            out[i] = out[i] / repetition_penalty if out[i] > 0 else out[i] * repetition_penalty
        out[i] -= frequency_penalty * output.count(i) + presence_penalty * (i in output)
    return out


def expected_shares(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, **fields
) -> np.ndarray:
    """The documented order in plain numpy, one row, written without a look at the sampler."""
    logits = expected_logits(logits, OUTPUT, **fields)
    if temperature == 0:
        return (np.arange(TOKENS) == logits.argmax()).astype(float)
    p = np.exp(logits / temperature)
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


@pytest.mark.parametrize(
    ("params", "over"),
    [*((params, "positions") for params in CASES + TABLED), *((params, "seeds") for params in [*CASES, TABLED[-1]])],
    ids=str,
)
def test_draws_have_the_shares_of_the_documented_order(params, over):
    n = 40_000
    logits = make_logits(1)
    if over == "positions":
        sampler, slots, positions = make_sampler(params | {"seed": 7}), np.zeros(n, np.int64), np.arange(n)
    else:
        sampler = make_sampler(*(params | {"seed": seed} for seed in range(n)))
        slots, positions = np.arange(n), np.full(n, 11)
    ids = sample(sampler, logits.expand(n, -1), slots, positions).numpy()
    shares = expected_shares(logits[0].numpy(), **params)
    counts = np.bincount(ids, minlength=TOKENS)
    assert counts[shares == 0].sum() == 0
    common = shares * n >= 5
    chi_square = (((counts - shares * n) ** 2)[common] / (shares * n)[common]).sum()
    freedom = common.sum() - 1
    assert chi_square <= freedom + 4 * (2 * freedom) ** 0.5  # mean and deviation of chi-square: four of the latter away


def test_a_row_gets_the_same_id_alone_and_in_any_batch():
    rows = [params | {"seed": 100 + i} for i, params in enumerate((CASES + TABLED) * 3)] + [{"temperature": 0.0}] * 3
    sampler, logits = make_sampler(*rows), make_logits(len(rows))
    slots, positions = np.arange(len(rows)), np.arange(len(rows)) * 3
    alone = [
        int(sample(sampler, logits[i : i + 1], slots[i : i + 1], positions[i : i + 1])[0]) for i in range(len(rows))
    ]
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(rows))[: 5 + 4 * seed]
        together = sample(sampler, logits[order], slots[order], positions[order])
        assert together.tolist() == [alone[i] for i in order]


def test_seed_and_position_both_change_what_is_drawn():
    sampler = make_sampler(*({"temperature": 1.0, "seed": seed} for seed in (1, 2)))
    logits = make_logits(1).expand(64, -1)
    first = sample(sampler, logits, np.zeros(64, np.int64), np.arange(64))
    assert len(set(first.tolist())) > 5
    assert (first != sample(sampler, logits, np.ones(64, np.int64), np.arange(64))).float().mean() > 0.5
    assert (first == sample(sampler, logits, np.zeros(64, np.int64), np.arange(64))).all()


def test_ids_without_a_token_are_never_sampled_however_probable():
    logits = make_logits(200)
    logits[:, TOKENS:] = 50.0
    sampler = make_sampler({"temperature": 0.0}, *CASES, *TABLED)
    for slot in range(len(CASES + TABLED) + 1):
        ids = sample(sampler, logits, np.full(200, slot), np.arange(200))
        assert ids.max() < TOKENS


def test_greedy_takes_the_largest_logit_and_of_equals_the_lowest_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 21]] = 1.0
    assert sample(make_sampler({"temperature": 0.0}), logits, np.array([0]), np.array([5])).tolist() == [9]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_narrowest_filter_leaves_the_best_and_of_equals_the_lowest_id(params):
    logits = torch.zeros(50, VOCAB)
    logits[:, [9, 21]] = 1.0
    ids = sample(make_sampler(params | {"temperature": 1.0}), logits, np.zeros(50, np.int64), np.arange(50))
    assert set(ids.tolist()) == ({9, 21} if "min_p" in params else {9})


def test_a_slot_forgets_the_request_before():
    sampler = make_sampler({"temperature": 5.0, "seed": 3, "bias": {1: 9.0}, "presence_penalty": 2.0})
    sampler.init_slots(make_batch([0], [{}]))
    logits = make_logits(30)
    assert (
        sample(sampler, logits, np.zeros(30, np.int64), np.arange(30)).tolist() == logits[:, :TOKENS].argmax(1).tolist()
    )


@pytest.mark.parametrize("params", TABLED, ids=str)
def test_what_is_sampled_counts_from_the_next_token_on(params):
    """Greedily, so that one wrong count is seen at once; three slots in a changing order, each with its own past."""
    params = params | {"temperature": 0.0}
    sampler, outputs = make_sampler(*[params] * 3), [list(OUTPUT) for _ in range(3)]
    rng = np.random.default_rng(5)
    for step in range(60):
        slots = rng.permutation(3)[: 1 + step % 3]
        logits = make_logits(len(slots), step)
        ids = sample(sampler, logits, slots, np.full(len(slots), step))
        for row, slot, id in zip(logits.numpy(), slots, ids.tolist(), strict=True):
            expected = expected_logits(row, outputs[slot], **params)
            assert expected[id] >= expected.max() - 1e-5
            outputs[slot].append(id)
        sampler.tables.count(slots, ids[:, None], torch.zeros(len(slots), dtype=torch.int64))


def test_drafts_before_a_position_count_there_and_those_accepted_for_good():
    """A step's three positions are as if each draft had been sampled in a step of its own."""
    penalties = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.4}
    params = {"temperature": 1.0, "seed": 9} | penalties
    logits, drafts = make_logits(3, 3), [12, 12]
    verified = make_sampler(params, num_drafts=2)
    verified.tables.drafts[0] = torch.tensor(drafts)
    slots, places = np.zeros(3, np.int64), np.arange(3)
    together = verified.sample(logits, slots, 20 + places, places)
    for i in range(3):
        alone = make_sampler(params, output=[*OUTPUT, *drafts[:i]])
        assert together[i] == sample(alone, logits[i : i + 1], slots[:1], np.array([20 + i]))[0]
    for num_accepted in range(3):
        sampler = make_sampler(params)
        samples = torch.tensor([[12, 12, 5]])
        sampler.tables.count(slots[:1], samples, torch.tensor([num_accepted]))
        alone = make_sampler(params, output=[*OUTPUT, *samples[0, : num_accepted + 1].tolist()])
        assert (sampler.tables.said == alone.tables.said).all()


def test_rows_without_a_field_keep_their_draws_and_logits_stay_as_they_were():
    params = [{"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 1, "bias": {5: 30.0}}]
    sampler, logits = make_sampler(*params), make_logits(1).repeat(80, 1)
    before, slots = logits.clone(), np.arange(80) % 2
    ids = sample(sampler, logits, slots, np.arange(80) // 2)
    alone = sample(make_sampler(params[0]), logits[:40], np.zeros(40, np.int64), np.arange(40))
    assert ids[::2].tolist() == alone.tolist() and set(ids[1::2].tolist()) == {5}
    assert (logits == before).all()


def test_a_rank_fills_its_own_rows_alone_and_ids_without_a_logit_are_nothing():
    tables = SamplingTables(2, TOKENS, 1, torch.zeros(4, 0, dtype=torch.int64))
    tables.init_slots(make_batch(range(4), [{"bias": {3: slot, TOKENS: 1.0}} for slot in range(4)]))
    assert tables.bias[:, 3].tolist() == [2.0, 3.0] and tables.bias.sum() == 5.0
    assert tables.is_biased.tolist() == [False, False, True, True]


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-20, 1e-5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}])
def test_a_temperature_however_low_is_as_good_as_greedy(temperature, filters):
    """Logits divided by it would be infinite, and infinity less infinity draws an id that no token has."""
    logits = make_logits(50)
    sampler = make_sampler(filters | {"temperature": temperature})
    ids = sample(sampler, logits, np.zeros(50, np.int64), np.arange(50))
    assert ids.tolist() == logits[:, :TOKENS].argmax(1).tolist()


@pytest.mark.parametrize("logit", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_logits_that_are_no_numbers_give_an_id_that_has_a_token(logit, params):
    """F-C3: no rank dies of it."""
    logits = torch.full((40, VOCAB), logit)
    ids = sample(make_sampler(params), logits, np.zeros(40, np.int64), np.arange(40))
    assert ((ids >= 0) & (ids < TOKENS)).all()


def test_an_end_of_turn_comes_early_where_nothing_else_is_allowed():
    sampler = make_sampler({"temperature": 1.0, "allowed": [3, 36], "num_prompt_ids": 10, "min_new_tokens": 5})
    ids = sample(sampler, make_logits(40), np.zeros(40, np.int64), np.full(40, 10))
    assert set(ids.tolist()) == {3, 36}


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
    drawn = sample(bound, logits, slots, positions).numpy()
    assert not np.isin(drawn[:40], EOS).any()
    assert (drawn[40:] == sample(free, logits, slots, positions).numpy()[40:]).all() and 3 in drawn[40:]
