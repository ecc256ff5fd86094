"""Layouts and the memory plan, against the published numbers of the official checkpoint."""

from pathlib import Path

import pytest

from glm53d.config import KEPT_BYTES, KEPT_SHARE, Config, load
from glm53d.errors import CheckpointError, StartError
from glm53d.model.config import GLM_5_3
from glm53d.world.plan import CONTEXTS, H200_BYTES, check_report, kv_bytes_per_token, layout, memory_plan, weight_bytes

H200X8 = str(Path(__file__).parents[2] / "conf" / "h200x8.toml")
TP8 = ["parallel.attn_dp_size=1"]
ALONE = [*TP8, "parallel.tp_size=1", "parallel.ep_size=1"]


def h200x8(*overrides: str) -> Config:
    return load(H200X8, list(overrides))


def test_every_rank_has_its_place():
    """[R1]"""
    config = load(None, ["parallel.tp_size=8", "parallel.attn_dp_size=4", "parallel.ep_size=2"])
    places = layout(config)
    assert [p.rank for p in places] == list(range(8))
    assert [p.attn_dp_rank for p in places] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [p.attn_tp_rank for p in places] == [0, 1] * 4
    assert [p.ep_rank for p in places] == [0] * 4 + [1] * 4


def test_all_weights_together_are_the_published_total_to_the_byte():
    assert weight_bytes(GLM_5_3, h200x8(*ALONE), mtp=True, as_stored=True) == 755_617_140_416


def test_replicated_attention_takes_the_published_109_gb_a_rank_and_1_2_for_kv_b():
    """Published with kv_b in FP8, and what it takes more in BF16; the router in float32 instead is 0.24."""
    stored = weight_bytes(GLM_5_3, h200x8(), mtp=True, as_stored=True)
    assert stored == pytest.approx(109.1e9, rel=0.005)
    assert weight_bytes(GLM_5_3, h200x8(), mtp=True) - stored == pytest.approx(1.2e9 + 0.24e9, rel=0.03)
    room = H200_BYTES * (1 - KEPT_SHARE) - KEPT_BYTES
    assert (room - stored) / 54_728 == pytest.approx(514_000, rel=0.015)


def test_tensor_parallel_weights_are_within_reach_of_what_was_measured():
    """94.46 GiB a rank were measured on another engine, with its working copies; what the tensors take is the floor."""
    measured = 94.46 * (1 << 30)
    assert 0.93 * measured < weight_bytes(GLM_5_3, h200x8(*TP8), mtp=True) < measured


@pytest.mark.parametrize(("mtp", "expected"), [(False, 53_940), (True, 54_728)])
def test_kv_bytes_per_token_are_the_published_ones(mtp: bool, expected: int):
    assert kv_bytes_per_token(GLM_5_3, h200x8(), mtp=mtp) == expected


def test_rows_in_bfloat16_are_1152_bytes_a_layer_and_256_a_full_one():
    assert kv_bytes_per_token(GLM_5_3, h200x8("kv.dtype=auto"), mtp=False) == 78 * 1152 + 21 * 256


def test_a_pool_of_the_big_machine_holds_half_a_million_tokens():
    plan = memory_plan(GLM_5_3, h200x8(), H200_BYTES, mtp=False)
    assert plan.max_context_len == plan.pool_tokens == pytest.approx(513_000, rel=0.02)
    assert [plan.num_requests(size) for size in (1 << 20, 200_000, 1 << 15)] == [0, 16, 120]


@pytest.mark.parametrize(
    ("pools", "weights", "tokens", "fits"),
    [
        (1, 96_478_567_360, 744_640, [0, 3, 22]),
        (2, 98_537_878_208, 1_414_016, [0, 6, 42]),
        (4, 102_656_499_904, 2_526_976, [0, 12, 76]),
        (8, 110_893_743_296, 3_849_728, [0, 16, 112]),
    ],
)
def test_the_plan_of_every_layout_is_exact(pools, weights, tokens, fits):
    """To the byte and the page: a change here is a change of the format or of what the engine keeps."""
    config = h200x8(f"parallel.attn_dp_size={pools}", "speculation.num_draft_tokens=3")
    plan = memory_plan(GLM_5_3, config, H200_BYTES, mtp=True)
    assert (plan.weight_bytes, plan.pool_tokens * plan.num_pools) == (weights, tokens)
    assert [plan.num_requests(size) for size in CONTEXTS.values()] == fits
    assert plan.max_context_len == tokens // pools - 6  # what drafts write behind a request's end


def test_the_report_says_which_layout_would_hold_more():
    lines = check_report(h200x8(*TP8)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("KV pools"))
    rows = [line.split() for line in lines[start + 1 : start + 5]]
    assert [row[0] for row in rows] == ["1", "2", "4", "8"] and rows[0][1] == "*"
    assert [row[-3:] for row in rows] == [["0", "3", "23"], ["0", "6", "44"], ["0", "12", "80"], ["0", "16", "120"]]
    assert lines[-1].endswith("of 1M none holds any, of 200K 16 with 8 pools, of 32K 120 with 8 pools.")
    assert "no other layout" not in lines[-1]


def test_a_layout_that_cannot_be_is_named_in_the_table_with_why():
    report = check_report(load(None, ["parallel.tp_size=8", "parallel.attn_dp_size=8", "parallel.ep_size=8"]))
    assert "splits num_attention_heads over 8 ranks, which does not divide" in report


def test_a_request_takes_whole_pages():
    plan = memory_plan(GLM_5_3, h200x8("kv.num_pages=10"), H200_BYTES, mtp=False)
    assert [plan.num_requests(length) for length in (1, 64, 65, 128, 640, 641)] == [80, 80, 40, 40, 8, 0]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (ALONE, "weights take 747.0 GB of a rank's 150.8 GB"),
        (["kv.num_pages=100000"], "no room for KV"),
        (["model.max_context_len=1048577"], "above the checkpoint's 1048576"),
        (["kv.memory_bytes=99_000_000_000"], "no room for KV"),
        (["kv.memory_bytes=1000"], r"kv\.memory_bytes 1000 does not hold one page"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], told: str):
    with pytest.raises(StartError, match=told):
        memory_plan(GLM_5_3, h200x8(*overrides), H200_BYTES, mtp=False)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (h200x8("scheduler.max_running_requests=512"), r"a step of 512 requests takes up to .*world\.ring_bytes"),
        (h200x8("world.ring_bytes=1_048_576"), r"cannot take the output of a request"),
        (h200x8("cache.host_bytes=1000"), r"cache\.host_bytes 1000 does not hold one page"),
        (load(None, ["speculation.num_draft_tokens=1", "engine.kind=sim", "world.ring_bytes=65536"]), "ring_bytes"),
    ],
)
def test_what_ranks_would_refuse_when_they_have_loaded_the_report_refuses(config: Config, told: str):
    with pytest.raises(StartError, match=told):
        check_report(config)


def test_a_layout_that_does_not_divide_the_model_is_refused():
    sizes = ["parallel.tp_size=24", "parallel.attn_dp_size=1", "parallel.ep_size=24"]
    with pytest.raises(StartError, match="splits num_attention_heads over 24 ranks"):
        weight_bytes(GLM_5_3, h200x8(*sizes), mtp=False)


def test_the_report_says_that_it_planned_without_a_checkpoint():
    report = check_report(h200x8())
    assert "no config.json there" in report and "assumed, an H200" in report
    assert "53,940" in report and "54,728" in report and "requests of 1M at once" in report


def test_the_report_shown_in_the_docs_is_the_one_printed():
    assert check_report(h200x8()) in (Path(H200X8).parents[1] / "docs" / "configure.md").read_text()


def test_the_report_of_the_built_in_model_needs_no_folder():
    assert "nano (built in)" in check_report(Config())


def test_the_report_of_the_simulation_is_of_what_its_configuration_says():
    sim = ["engine.kind=sim", "sim.kv_bytes_per_token=1234", "model.max_context_len=1000"]
    report = check_report(load(None, sim))
    assert "simulated" in report and "1,234" in report and "1,000" in report


def test_a_folder_without_a_checkpoint_is_refused():
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_report(load(None, ["model.path=/nowhere"]))
