"""TorchRunner: what it reports and refuses, and that a request's answer depends on its own rows alone."""

import random

import numpy as np
import pytest
import torch

from glm53d.config import Config, Engine, Kv, Model
from glm53d.errors import StartError
from glm53d.ipc.batch import Batch
from glm53d.ipc.records import ROW_FEED, ROW_SAMPLE, SLOT_INIT
from glm53d.runner.torch_runner import AUTO_CONTEXTS, TorchRunner
from tests.model.drive import Driver

PROMPT = list(range(5, 45))
TOKENIZER_SIZE = 2036


def make_driver(seed: int = 0, **sections) -> Driver:
    config = Config(**({"kv": Kv(page_size=16, num_pages=256)} | sections))
    return Driver(TorchRunner(config, 0, 16, TOKENIZER_SIZE), random.Random(seed))


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def prefill(slot: int, step: int, prompt: list[int], page: int) -> Batch:
    init = np.zeros(1, SLOT_INIT)
    init["slot"], init["top_p"] = slot, 1.0
    return Batch(
        step, 1, array(slot), array(0), array(0), array(len(prompt)), array(ROW_SAMPLE), array(*prompt), init,
        array(slot), array(0), array(1), array(page), array(len(prompt)),
    )  # fmt: skip


def decode(slot: int, step: int, prefix_len: int) -> Batch:
    return Batch(
        step, 1, array(slot), array(0), array(prefix_len), array(1), array(ROW_SAMPLE | ROW_FEED), array(-1),
        dp_num_tokens=array(1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"kv": Kv(memory_bytes=1000)}, "1000 bytes for KV do not hold one page"),
        ({"kv": Kv(num_pages=1 << 34)}, "lower kv.num_pages or kv.memory_bytes"),
        ({"model": Model(max_context_len=1 << 20)}, "model.max_context_len is 1048576, above the checkpoint's 16384"),
    ],
)
def test_what_it_cannot_do_is_refused_at_start_with_the_field(sections, message):
    with pytest.raises(StartError) as raised:
        make_driver(**sections)
    assert message in raised.value.message


def test_a_runner_that_did_not_load_can_be_closed():
    """As a rank does whose checkpoint is refused: its last words are the refusal, not a second error."""
    runner = TorchRunner(Config(model=Model(max_context_len=1 << 20)), 0, 4, TOKENIZER_SIZE)
    with pytest.raises(StartError):
        runner.load(lambda phase, percent: None)
    runner.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_that_is_not_there_is_refused():
    with pytest.raises(StartError, match=r"engine\.device"):
        make_driver(engine=Engine(device="cuda"))


def test_the_report_says_what_was_configured_or_found():
    per_token = 4 * (6 * (64 + 16) + 2 * 32)  # nano: latents of all layers, index keys of the two full ones
    loaded = make_driver(kv=Kv(page_size=32, memory_bytes=per_token * 32 * 10 + 1)).loaded
    assert (loaded.kv_bytes_per_token, loaded.num_pages, loaded.page_size) == (per_token, 10, 32)
    assert loaded.max_context_len == 16384
    assert loaded.weight_bytes == 4 * sum(tensor_elements())
    loaded = make_driver(kv=Kv(page_size=64), model=Model(max_context_len=1024)).loaded
    assert 0 < loaded.num_pages <= AUTO_CONTEXTS * 1024 // 64
    assert loaded.max_context_len == 1024


def tensor_elements():
    from glm53d.model.config import ModelConfig
    from glm53d.model.tensors import tensor_shapes
    from glm53d.nano.weights import PACKAGE

    return (int(np.prod(shape)) for shape in tensor_shapes(ModelConfig.load(PACKAGE)).values())


def test_steps_launched_ahead_are_collected_in_order_and_feed_their_ids_on():
    driver = make_driver()
    alone = driver.request(PROMPT[:8])
    driver.run_until([alone], 3, max_chunk=8)
    runner = driver.runner
    first = prefill(9, 1, PROMPT[:8], driver.free.pop())
    runner.launch(first)
    for values in (first.input_ids, first.row_slot, first.row_flags, first.pages):
        values[:] = 1  # the batch's arrays are the scheduler's again
    runner.launch(decode(9, 2, 8))
    runner.launch(decode(9, 3, 9))
    results = [runner.collect() for _ in range(3)]
    assert [result.step for result in results] == [1, 2, 3]
    assert [int(result.ids[0, 0]) for result in results] == alone.outputs
    assert all(result.start_ns <= result.end_ns for result in results)


def test_a_step_without_rows_samples_nothing_but_takes_over_parameters():
    driver = make_driver()
    idle = Batch(1, 1, dp_num_tokens=array(0))
    idle.inits = np.zeros(1, SLOT_INIT)
    idle.inits["slot"], idle.inits["temperature"], idle.inits["top_p"] = 3, 0.5, 1.0
    driver.runner.launch(idle)
    assert driver.runner.collect().ids.shape == (0, 1)
    assert driver.runner.sampler.temperature[3] == 0.5


def test_a_request_reads_no_row_but_its_own():
    prompts = [list(range(start, start + length)) for start, length in ((3, 300), (40, 30), (9, 400), (77, 1))]

    def answers(driver: Driver) -> list[list[int]]:
        requests = [driver.request(prompt) for prompt in prompts]
        driver.run_until(requests, 6, max_chunk=150)
        assert all(torch.isfinite(row).all() for request in requests for row in request.logits)
        return [request.outputs for request in requests]

    poisoned = make_driver(1)
    for pool in [*poisoned.runner.cache.latent, *poisoned.runner.cache.index_k]:
        if pool is not None:
            pool.data.fill_(float("nan"))
    poisoned.runner.cache.block_table.random_(0, 256)  # as stale as it can be
    assert answers(poisoned) == answers(make_driver(2))


def test_fp8_rows_take_the_bytes_they_say_and_stay_near_exact_ones():
    """Context far above index_topk: rows are read by both forms of attention, and keys by the indexer."""
    exact, packed = make_driver(4), make_driver(4, kv=Kv(page_size=16, num_pages=256, dtype="fp8"))
    for driver in (exact, packed):
        request = driver.request(list(range(1, 500)))
        driver.run_until([request], 1, max_chunk=100)
        driver.last = request.logits[0]
    cache = packed.runner.cache
    rows = [*cache.latent, *(pages for pages in cache.index_k if pages is not None)]
    assert packed.loaded.kv_bytes_per_token == 6 * (64 + 4 + 2 * 16) + 2 * (32 + 4)
    assert sum(row.data.nbytes for row in rows) == 256 * 16 * packed.loaded.kv_bytes_per_token
    assert 1e-4 < (exact.last - packed.last).norm() / exact.last.norm() < 0.25  # random weights choose by a hair


def test_a_seeded_request_gets_the_same_tokens_alone_and_among_others():
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
    driver = make_driver()
    alone = driver.request(PROMPT, **sampling)
    driver.run_until([alone], 24, max_chunk=100)
    again = driver.request(PROMPT, **sampling)
    others = [driver.request(PROMPT[i:], temperature=1.0, seed=i) for i in range(5)]
    driver.run_until([again, *others], 24, max_chunk=11)
    assert again.outputs[:24] == alone.outputs[:24]
    assert others[0].outputs[:24] != alone.outputs[:24]
    assert max(max(request.outputs) for request in [again, *others]) < TOKENIZER_SIZE


def test_bfloat16_runs_and_stays_near_float32():
    exact, rounded = make_driver(3), make_driver(3, model=Model(dtype="bfloat16"))
    logits = []
    for driver in (exact, rounded):
        request = driver.request(PROMPT)
        driver.run([(request, len(PROMPT))])
        logits.append(request.logits[0])
    assert rounded.loaded.kv_bytes_per_token * 2 == exact.loaded.kv_bytes_per_token
    # Random weights route and choose by a hair, so bf16 may take other experts: near, not equal.
    assert (logits[0] - logits[1]).norm() / logits[0].norm() < 0.25
