"""KV rows in FP8: the exact bytes, against packers written with struct and a table; errors as published. [issue 7]"""

import math
import random
import struct

import pytest
import torch

from glm53d.config import Config, Kv, Model
from glm53d.errors import StartError
from glm53d.model.config import GLM_5_3
from glm53d.model.fp8 import (
    E4M3,
    dequantise,
    latent_row_bytes,
    pack_latent,
    quantise,
    unpack_latent,
)
from glm53d.model.indexer import top_positions
from glm53d.model.kv_cache import Fp8IndexPages, KvShape
from glm53d.model.layers import Linear
from glm53d.model.weights import Fp8Weight, RoundedInput
from glm53d.runner.torch_runner import TorchRunner
from tests.model.drive import Driver
from tests.model.synthetic import make_checkpoint


def e4m3_value(code: int) -> float:
    """One sign bit, four of exponent with bias 7, three of mantissa; no infinity, and 0x7F is not a number."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if code & 128 else value


CODES = {code: e4m3_value(code) for code in range(256) if code & 127 != 127}


def e4m3_code(value: float) -> int:
    """The nearest, of two the even one; zero keeps its sign."""
    sign = 128 if math.copysign(1.0, value) < 0 else 0
    return min((c for c in CODES if c & 128 == sign), key=lambda c: (abs(CODES[c] - value), c & 1))


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def values(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[-1])


def test_torch_rounds_to_e4m3_as_the_format_says():
    numbers = torch.cat([torch.tensor(list(CODES.values())), values(200).clamp(-448, 448)])
    assert numbers.to(E4M3).view(torch.uint8).tolist() == [e4m3_code(float(x)) for x in numbers]


def test_a_latent_row_is_656_bytes_in_the_published_order():
    """512 e4m3, then 4 float32 factors, then 64 bf16 of the rotated key."""
    row = values(3, 576)
    packed = pack_latent(row, 512)
    assert packed.shape == (3, 656) == (3, latent_row_bytes(512, 64))
    for floats, data in zip(row.tolist(), packed.numpy(), strict=True):
        scales = [float32(float32(max(map(abs, floats[g : g + 128]))) / 448) for g in range(0, 512, 128)]
        codes = [e4m3_code(float32(x / scales[i // 128])) for i, x in enumerate(floats[:512])]
        rope = torch.tensor(floats[512:]).bfloat16().view(torch.int16).tolist()
        assert data.tobytes() == bytes(codes) + struct.pack("<4f64h", *scales, *rope)


def test_what_is_packed_comes_back_rounded_and_no_more_the_second_time():
    row = values(5, 576)
    once = unpack_latent(pack_latent(row, 512), 512)
    assert torch.equal(once[:, 512:], row[:, 512:].bfloat16().float())
    assert torch.equal(once[:, :512].sign() * row[:, :512].sign() < 0, torch.zeros(5, 512, dtype=torch.bool))
    assert (unpack_latent(pack_latent(once, 512), 512) - once).abs().max() <= once.abs().max() * 2e-7


def test_an_index_page_has_its_values_first_and_a_power_of_two_for_each_key_behind():
    pages = Fp8IndexPages(torch.zeros(3, 64 * 132, dtype=torch.uint8), 64, torch.float32)
    keys, locs = values(4, 128), torch.tensor([64, 65, 127, 5])
    pages.write(locs, keys)
    assert pages.data.shape == (3, 64 * 132)
    for key, loc in zip(keys.tolist(), locs.tolist(), strict=True):
        scale = 2.0 ** math.ceil(math.log2(max(map(abs, key)) / 448))
        page, at = pages.data[loc // 64].numpy().tobytes(), loc % 64
        assert page[at * 128 :][:128] == bytes(e4m3_code(x / scale) for x in key)
        assert page[64 * 128 + at * 4 :][:4] == struct.pack("<f", scale)
    assert torch.equal(pages.read(locs[None])[0], dequantise(*quantise(keys, 128, power_of_two=True), 128))
    assert not pages.read(torch.tensor([0, 190])).any()


def test_powers_of_two_are_rounded_up_only_when_they_are_none():
    exact = torch.tensor([[448.0], [449.0], [447.0], [224.0], [0.0]])
    assert quantise(exact, 1, power_of_two=True)[1][:, 0].tolist() == [1.0, 2.0, 1.0, 0.5, 2.0**-126]


def test_groups_of_zeros_and_a_last_partial_group_are_exact():
    x = torch.zeros(2, 200)
    x[1, 150] = -3.5
    back = dequantise(*quantise(x, 128), 128)
    assert torch.equal(back, x)


def test_bytes_per_token_are_the_published_ones():
    """With FP8 rows, of the main model and with its MTP layer."""
    assert KvShape(GLM_5_3, 64, torch.bfloat16, fp8=True).bytes_per_token == 53_940
    assert KvShape(GLM_5_3, 64, torch.bfloat16, fp8=True, num_mtp=1).bytes_per_token == 54_728


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def quantised_weight(w: torch.Tensor) -> Fp8Weight:
    """In blocks of 128 x 128, one float32 factor each, as checkpoints store linears."""
    blocks = w.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).to(E4M3).reshape(w.shape)
    row, column = (torch.arange(size) // 128 for size in w.shape)
    return Fp8Weight(values, scale, row[:, None], column, torch.float32)


@pytest.mark.parametrize(
    ("what", "measured"), [("weights", 0.026), ("inputs", 0.026), ("both", 0.037), ("bfloat16", 0.003)]
)
def test_a_linear_loses_what_was_measured(generator, what, measured):
    """A product's relative error, measured elsewhere for Gaussian values; asserted below 1.3 times that."""
    x, w = torch.randn(64, 2048, generator=generator), torch.randn(512, 2048, generator=generator)
    exact = x @ w.T
    if what == "bfloat16":
        found = Linear(w.bfloat16())(x.bfloat16()).float()
    else:
        weight = quantised_weight(w) if what != "inputs" else w
        found = Linear(weight if what == "weights" else RoundedInput(weight, 128))(x)
    assert 0.5 * measured < relative(found, exact) < 1.3 * measured


def test_a_linear_with_rounded_inputs_is_the_block_product_of_fp8_kernels():
    """Per token and 128 channels: sum(x8 * w8) * x_scale * w_scale, added up over blocks. The last one is partial."""
    x, w = values(3, 300), values(256, 384)[:, :300]
    padded = quantised_weight(torch.nn.functional.pad(w, (0, 84)))
    weight = Fp8Weight(padded.values[:, :300], padded.scale, padded.row_block, padded.column_block[:300], torch.float32)
    found = Linear(RoundedInput(weight, 128))(x)
    for t in range(3):
        for row in (0, 127, 128, 255):
            total = 0.0
            for block in range(3):
                at = slice(128 * block, min(128 * (block + 1), 300))
                channels = x[t, at].tolist()
                x_scale = float32(float32(max(map(abs, channels))) / 448)
                products = [
                    CODES[e4m3_code(float32(value / x_scale))] * CODES[code]
                    for value, code in zip(channels, weight.values[row, at].view(torch.uint8).tolist(), strict=True)
                ]
                total += math.fsum(products) * x_scale * float(weight.scale[row // 128, block])
            assert abs(float(found[t, row]) - total) <= 1e-5 * float(x[t].abs().max()) * float(w[row].abs().max()) * 30


def test_only_quantised_linears_round_what_they_read_and_the_others_see_it_whole():
    """One product for neighbours that read the same; rows come out in the order of the weights."""
    x, first, plain, last = values(4, 128), values(8, 128), values(5, 128), values(3, 128)
    linear = Linear(RoundedInput(first, 128), RoundedInput(first, 128), plain, RoundedInput(last, 128))
    assert [group for group, _ in linear.stretches] == [128, 0, 128]
    rounded = dequantise(*quantise(x, 128), 128)
    expected = torch.cat([rounded @ first.T, rounded @ first.T, x @ plain.T, rounded @ last.T], -1)
    assert torch.allclose(linear(x), expected, rtol=1e-5)


def test_rounded_inputs_change_logits_a_little_and_need_a_quantised_checkpoint(tmp_path):
    make_checkpoint(tmp_path / "fp8", 1)
    make_checkpoint(tmp_path / "plain", 1, quantization_config=None)
    logits = []
    for rounded in (False, True):
        driver = driver_of(tmp_path / "fp8", rounded)
        request = driver.request(list(range(1, 40)))
        driver.run([(request, 39)])
        logits.append(request.logits[0])
    assert 1e-3 < relative(logits[1], logits[0]) < 0.5  # random weights route and choose by a hair
    with pytest.raises(StartError, match=r"model\.fp8_inputs is set, and the checkpoint has no FP8 weights"):
        driver_of(tmp_path / "plain", True)


def driver_of(folder, rounded: bool) -> Driver:
    config = Config(model=Model(path=str(folder), fp8_inputs=rounded), kv=Kv(page_size=16, num_pages=16))
    return Driver(TorchRunner(config, 0, 4, 1 << 20), random.Random(0))


def test_attention_over_fp8_rows_loses_what_was_measured(generator):
    """2.8% measured elsewhere, over 2048 chosen rows."""
    rows, q = torch.randn(2048, 576, generator=generator), torch.randn(64, 576, generator=generator)

    def attend(rows: torch.Tensor) -> torch.Tensor:
        return (q @ rows.T / 16).softmax(-1) @ rows[:, :512]

    assert 0.005 < relative(attend(unpack_latent(pack_latent(rows, 512), 512)), attend(rows)) < 1.3 * 0.028


def test_quantised_keys_choose_nearly_the_same_tokens(generator):
    """97% of 2048 out of 20,000 measured elsewhere, with queries quantised too."""
    keys = torch.randn(20_000, 128, generator=generator)
    q, w = torch.randn(32, 128, generator=generator), torch.rand(32, generator=generator)

    def chosen(q: torch.Tensor, keys: torch.Tensor) -> set[int]:
        scores = w @ (q @ keys.T).relu()
        return set(top_positions(scores[None], 2048)[0].tolist())

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return dequantise(*quantise(x, 128, power_of_two=True), 128)

    assert 0.95 < len(chosen(q, keys) & chosen(rounded(q), rounded(keys))) / 2048 < 1.0
