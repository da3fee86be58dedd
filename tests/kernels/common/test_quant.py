"""Quantisers against scalar formulas written independently: struct for bits, fractions for exact arithmetic."""

import math
import random
import struct
from bisect import bisect_left
from fractions import Fraction

import pytest
import torch

from deepseek_attn.kernels.common import quant
from tests.support.rounded import fake_quant_fp4
from tests.support.tiers import tiered
from tests.support.typed import required

MAX_FLOAT = 3.4028234663852886e38


def bits_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def round_f32(x: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def exponent_above(v: Fraction) -> int:
    """Smallest e with 2**e >= v."""
    e = v.numerator.bit_length() - v.denominator.bit_length() - 1
    while Fraction(2) ** e < v:
        e += 1
    return e


def e4m3_value(code: int) -> Fraction:
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(1, 64)
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3_value(code) for code in range(127)]
E2M1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def nearest_even(table: list, x: Fraction) -> int:
    """Code of the nearest value, the even code at a tie, the last code above the range."""
    right = bisect_left(table, x)
    if right in (0, len(table)):
        return min(right, len(table) - 1)
    low, high = x - table[right - 1], table[right] - x
    if low == high:
        return right - 1 if right % 2 == 1 else right
    return right - 1 if low < high else right


def scalar_group(values: list[float], table: list, sign_bit: int, floor: float) -> tuple[list[int], int]:
    """Codes with sign and the exponent of the scale of one group."""
    amax = max(max(abs(v) for v in values), round_f32(floor))
    e = exponent_above(Fraction(amax) / table[-1])
    codes = []
    for v in values:
        sign = sign_bit if math.copysign(1, v) < 0 else 0
        codes.append(sign | nearest_even(table, abs(Fraction(v)) / Fraction(2) ** e))
    return codes, e


def scalar_fp8(values: list[float]) -> tuple[list[int], int]:
    return scalar_group(values, E4M3, 0x80, 1e-4)


def scalar_fp4(values: list[float]) -> tuple[list[int], int]:
    return scalar_group(values, E2M1, 8, 6 * 2.0**-126)


def edge_groups(size: int, top: float) -> dict[str, list[float]]:
    """Groups of `size` float32 values; `top` is the largest value of the format."""
    rng = random.Random(size)
    noise = [round_f32(rng.gauss(0, 1)) for _ in range(size)]
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1 + 1 / 16, 1 + 3 / 16, 2.0**-10, 3 * 2.0**-10, 432.0, 5 * 2.0**-10]
    near = [float_of(bits_of(t) + d) for t in ties for d in (-1, 1)]

    def filled(*head: float, scale: float = 1.0) -> list[float]:
        return [round_f32(v * scale) for v in [*head, *noise][:size]]

    groups = {
        "zeros": [0.0] * size,
        "negative zeros": [-0.0] * size,
        "below the floor": filled(9e-5, -3e-5, scale=1.0)[:2] + [round_f32(v * 1e-6) for v in noise[2:]],
        "exactly 1e-4": [round_f32(1e-4)] + [0.0] * (size - 1),
        "denormals": [float_of(i * 999_983 % 0x7FFFFF) for i in range(size)],
        "smallest denormal": [float_of(1), float_of(0x80000001)] + [0.0] * (size - 2),
        "max float": [MAX_FLOAT, -MAX_FLOAT] + [v * 1e37 for v in noise[2:]],
        "tiny beside large": filled(300.0, -1e-30, 1e-9, -1e-7, 0.0, -0.0),
        "ties": [v for t in ties if t <= top for v in (t, -t)][: size - 1] + [top],
        "beside ties": [v for v in near if v <= top][: size - 1] + [top],
    }
    for k in (-30, -16, -3, 0, 5, 100):
        for name, ulps in (("below", -1), ("at", 0), ("above", 1)):
            peak = float_of(bits_of(top * 2.0**k) + ulps)
            groups[f"{name} {top:g} * 2**{k}"] = [peak] + [round_f32(v * peak / 8) for v in noise[1:]]
    for k in range(-40, 40, 7):
        groups[f"noise * 2**{k}"] = [v * 2.0**k for v in noise]
    return {name: (g + noise)[:size] for name, g in groups.items()}


@pytest.mark.parametrize("group", [64, 128, 32, 20])
def test_fp8_bytes_and_scales_equal_the_scalar_formula(group):
    groups = edge_groups(group, 448.0)
    q, scale = quant.quantize_fp8(torch.tensor(list(groups.values())), group)
    assert q.dtype == torch.float8_e4m3fn
    assert scale.shape == (len(groups), 1)
    for row, (name, values) in enumerate(groups.items()):
        codes, e = scalar_fp8(values)
        assert scale[row, 0].item() == 2.0**e, name
        assert q[row].view(torch.uint8).tolist() == codes, name


def test_fp4_nibbles_and_scales_equal_the_scalar_formula():
    groups = edge_groups(32, 6.0)
    packed, scale = quant.quantize_fp4(torch.tensor(list(groups.values())))
    for row, (name, values) in enumerate(groups.items()):
        codes, e = scalar_fp4(values)
        expected = [lo | hi << 4 for lo, hi in zip(codes[0::2], codes[1::2], strict=True)]
        assert scale[row, 0].item() == 2.0**e, name
        assert packed[row].tolist() == expected, name


def test_fp4_thresholds_of_the_format():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    values = [v for t in ties for v in (float_of(bits_of(t) - 1), t, float_of(bits_of(t) + 1))]
    x = torch.tensor([*values, 6.0] + [0.0] * 10)
    got = fake_quant_fp4(x)[: len(values)].tolist()
    expected = [0, 0, 0.5, 0.5, 1, 1, 1, 1, 1.5, 1.5, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4, 6]
    assert got == expected


def test_several_groups_keep_their_own_scale():
    x = torch.tensor([[1.0] * 64 + [1000.0] * 64 + [0.0] * 64], dtype=torch.bfloat16)
    q, scale = quant.quantize_fp8(x, 64)
    assert scale.tolist() == [[2.0**-8, 4.0, 2.0**-22]]
    assert torch.equal(quant.dequantize_fp8(q, scale, 64)[:, :64], torch.ones(1, 64))
    packed, scale4 = quant.quantize_fp4(x)
    assert scale4.tolist() == [[0.25, 0.25, 256.0, 256.0, 2.0**-126, 2.0**-126]]
    assert quant.dequantize_fp4(packed, scale4).view(3, 64)[:, 0].tolist() == [1.0, 1024.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quant_is_quantise_then_dequantise_in_the_dtype(dtype):
    x = (torch.randn(3, 5, 192, generator=torch.Generator().manual_seed(1)) * 7).to(dtype)
    for name, fake, scalar, table, bit, group in (
        ("fp8", lambda x: quant.fake_quant_fp8(x, 64), scalar_fp8, E4M3, 0x80, 64),
        ("fp4", fake_quant_fp4, scalar_fp4, E2M1, 8, 32),
    ):
        expected = []
        for values in x.float().reshape(-1, group).tolist():
            codes, e = scalar(values)
            expected += [float(table[c & (bit - 1)] * Fraction(2) ** e) * (-1 if c & bit else 1) for c in codes]
        got = fake(x)
        assert got.dtype == dtype
        assert torch.equal(got, torch.tensor(expected).to(dtype).view_as(x)), name


def test_negative_zero_keeps_its_sign():
    x = torch.tensor([1.0, -1e-9, -0.0, 0.0] + [0.0] * 28)
    q, scale = quant.quantize_fp8(x, 32)
    assert q.view(torch.uint8)[1:4].tolist() == [0x80, 0x80, 0]
    packed, scale4 = quant.quantize_fp4(x)
    assert packed[:2].tolist() == [6 | 8 << 4, 8]
    for y in (quant.dequantize_fp8(q, scale, 32), quant.dequantize_fp4(packed, scale4)):
        assert y.signbit()[:4].tolist() == [False, True, True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
def test_a_group_with_a_non_finite_value_decodes_to_nan(bad):
    x = torch.ones(128)
    x[70] = bad
    for fake in (quant.fake_quant_fp8(x, 64), fake_quant_fp4(x)):
        assert torch.equal(fake[:64], torch.ones(64))
        assert fake[70].isnan()
    scale = quant.quantize_fp8(x, 64)[1]
    assert quant.encode_e8m0(scale).tolist() == [119, 255]


def test_fp8_raw_scales_and_floor():
    x = torch.tensor([[3.0] + [0.0] * 31, [1e-7] + [0.0] * 31])
    q, scale = quant.quantize_fp8(x, 32, pow2=False)
    assert scale[:, 0].tolist() == [round_f32(3.0 / 448), round_f32(round_f32(1e-4) / 448)]
    assert q[0, 0].float() == 448
    assert quant.quantize_fp8(x, 32, floor=1e-10)[1][1, 0] == 2.0**-32


def test_pow2ceil_on_bits():
    cases = {0.0: 2.0**-127, float_of(1): 2.0**-127, 2.0**-127: 2.0**-127, float_of(0x00400001): 2.0**-126}
    cases |= {2.0**-126: 2.0**-126, 1.0: 1.0, 0.75: 1.0, float_of(bits_of(1.0) + 1): 2.0, 3.0: 4.0, 2.0**127: 2.0**127}
    cases |= {MAX_FLOAT: math.inf, math.inf: math.inf}
    assert quant.pow2ceil(torch.tensor(list(cases))).tolist() == list(cases.values())
    assert quant.pow2ceil(torch.tensor([math.nan])).isnan().all()
    for v in (random.Random(0).uniform(1e-6, 1e6) for _ in range(200)):
        v = round_f32(v)
        assert quant.pow2ceil(torch.tensor(v)).item() == 2.0 ** exponent_above(Fraction(v))


def test_e8m0_bytes_are_exponents_in_every_form():
    byte = torch.arange(256, dtype=torch.uint8)
    scale = torch.tensor([2.0 ** (b - 127) for b in range(255)])
    assert torch.equal(quant.decode_e8m0(byte)[:255], scale)
    assert torch.equal(quant.decode_e8m0(byte.view(torch.float8_e8m0fnu))[:255], scale)
    assert torch.equal(quant.decode_e8m0(scale), scale)
    assert torch.equal(quant.decode_e8m0(scale[1:].bfloat16()), scale[1:])
    assert quant.decode_e8m0(byte)[255].isnan()
    assert quant.decode_e8m0(byte[120]) == 2.0**-7
    assert torch.equal(quant.encode_e8m0(scale), byte[:255])


def test_dequantise_accepts_every_form_of_scale():
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(2))
    for quantise, dequantise in (
        (lambda v: quant.quantize_fp8(v, 128), lambda q, s: quant.dequantize_fp8(q, s, 128)),
        (quant.quantize_fp4, quant.dequantize_fp4),
        (quant.quantize_fp8_block, quant.dequantize_fp8_block),
    ):
        q, scale = quantise(x)
        byte = quant.encode_e8m0(scale)
        expected = dequantise(q, scale)
        assert (expected - x).abs().max() < 0.5
        for form in (byte, byte.view(torch.float8_e8m0fnu), scale.bfloat16()):
            assert torch.equal(dequantise(q, form), expected)


GRIDS = [((128, 128),), ((130, 257),), ((1, 1),), ((127, 300),), ((0, 128),)]


@pytest.mark.parametrize("shape", tiered(GRIDS, GRIDS[1:3] + GRIDS[4:], quick_on_gpu=GRIDS), ids=str)
def test_fp8_blocks_on_ragged_grids(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * torch.linspace(1, 900, shape[1])
    q, scale = quant.quantize_fp8_block(w)
    assert q.shape == shape
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    back = quant.dequantize_fp8_block(q, scale)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            tile = (slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128))
            codes, e = scalar_fp8(w[tile].flatten().tolist())
            assert scale[r, c].item() == 2.0**e
            assert q[tile].reshape(-1).view(torch.uint8).tolist() == codes
            assert torch.equal(back[tile], q[tile].float() * 2.0**e)


def test_fp8_blocks_of_another_size_and_a_transposed_weight():
    w = torch.randn(96, 40, generator=torch.Generator().manual_seed(4)).T
    q, scale = quant.quantize_fp8_block(w, (20, 32))
    assert scale.shape == (2, 3)
    assert scalar_fp8(w[20:, 64:].flatten().tolist())[1] == math.log2(scale[1, 2])
    assert torch.equal(quant.dequantize_fp8_block(q, scale, (20, 32))[20:, 64:], q[20:, 64:].float() * scale[1, 2])


def test_merged_blocks_hold_the_same_values():
    """Ragged sizes; values that are subnormal under the larger scale are rounded, others stay."""
    w = torch.randn(300, 170) * torch.logspace(0, 1, 300)[:, None]
    q, scale = quant.quantize_fp8_block(w, (32, 32))
    merged, found = quant.merge_fp8_blocks(q, scale, 4, 32)
    assert found.shape == (3, 2)
    assert torch.equal(found[1, 1], scale[4:8, 4:6].amax())
    values, back = quant.dequantize_fp8_block(q, scale, (32, 32)), quant.dequantize_fp8_block(merged, found)
    step = found.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :170]
    assert ((values - back).abs() <= step * 2.0**-10).all()
    assert torch.equal(values[values.abs() >= step * 2.0**-6], back[values.abs() >= step * 2.0**-6])
    assert not torch.equal(values, back)


def test_fp4_packs_the_even_column_in_the_low_nibble():
    w = torch.zeros(2, 64)
    w[0, 0], w[0, 1], w[1, 62], w[1, 63] = 6.0, -0.5, -12.0, 2.0
    packed, scale = quant.quantize_fp4(w)
    assert packed.shape == (2, 32)
    assert scale.tolist() == [[1.0, 2.0**-126], [2.0**-126, 2.0]]
    assert packed[0, 0] == 7 | 9 << 4
    assert packed[1, 31] == 15 | 2 << 4
    assert torch.equal(quant.dequantize_fp4(packed.view(torch.int8), scale), w)


def test_fp4_decodes_all_bytes():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = quant.dequantize_fp4(packed, torch.full((16, 1), 4.0)).view(256, 2)
    for byte in range(256):
        for nibble, got in zip((byte & 15, byte >> 4), values[byte].tolist(), strict=True):
            assert got == math.copysign(float(E2M1[nibble & 7]) * 4, -1 if nibble & 8 else 1)


@pytest.mark.parametrize("n", [1, 2, 8, 64, 128])
def test_hadamard_is_the_sylvester_matrix(n):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    eye = quant.hadamard(torch.eye(n))
    assert torch.equal(eye, (matrix.float() * n**-0.5))
    x = torch.randn(3, 2, n, generator=torch.Generator().manual_seed(5))
    expected = x.double() @ matrix * n**-0.5
    assert (quant.hadamard(x).double() - expected).abs().max() < 1e-6
    assert torch.equal(quant.hadamard(x.bfloat16()), quant.hadamard(x.bfloat16().float()).bfloat16())
    assert (quant.hadamard(quant.hadamard(x)) - x).abs().max() < 1e-6


def test_zero_rows_and_strided_inputs():
    assert quant.fake_quant_fp8(torch.empty(0, 64), 64).shape == (0, 64)
    assert fake_quant_fp4(torch.empty(2, 0, 64)).shape == (2, 0, 64)
    assert quant.hadamard(torch.empty(0, 8)).shape == (0, 8)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(6)).T
    for f in (lambda v: quant.fake_quant_fp8(v, 64), fake_quant_fp4, quant.hadamard):
        assert torch.equal(f(x), f(x.contiguous()))


def test_errors_state_the_facts():
    x, q = torch.ones(2, 100), torch.zeros(2, 128, dtype=torch.float8_e4m3fn)
    cases = [
        (lambda: quant.quantize_fp8(x, 64), r"\[2, 100\].*64"),
        (lambda: quant.quantize_fp4(x), r"\[2, 100\].*32"),
        (lambda: quant.quantize_fp8(x.int(), 50), "torch.int32"),
        (lambda: quant.dequantize_fp8(q, torch.ones(2, 2), 128), r"\[2, 2\].*\[2, 128\].*\[2, 1\]"),
        (lambda: quant.dequantize_fp8(q.view(torch.uint8), torch.ones(2, 1), 128), "torch.uint8"),
        (lambda: quant.dequantize_fp4(q, torch.ones(2, 8)), "float8_e4m3fn"),
        (lambda: quant.dequantize_fp8_block(q, torch.ones(2, 1)), r"\[2, 1\].*\[1, 1\]"),
        (lambda: quant.dequantize_fp8_block(q.float(), torch.ones(1, 1)), "torch.float32"),
        (lambda: quant.quantize_fp8_block(torch.ones(3)), r"\[3\]"),
        (lambda: quant.hadamard(torch.ones(3, 12)), r"power-of-two.*\[3, 12\]"),
        (lambda: quant.decode_e8m0(torch.ones(3, dtype=torch.int32)), "torch.int32"),
        (lambda: quant.decode_e8m0(torch.ones(3, dtype=torch.int8)), "torch.int8"),
        (lambda: quant.encode_e8m0(torch.tensor([1.0, 3.0])), "got 3.0"),
        (lambda: quant.encode_e8m0(torch.zeros(1)), "got 0.0"),
        (lambda: quant.pow2ceil(torch.ones(1).double()), "torch.float64"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_row_exponents():
    """Scales of a row within 12 powers of two are kept; groups of zeros may have any; else there are none."""
    weight = torch.randint(256, (3, 5, 64), dtype=torch.uint8)
    scale = torch.randint(115, 127, (3, 5, 4), dtype=torch.uint8)
    scale[0, 0, :2] = torch.tensor([115, 126])
    exponent, kept = required(quant.row_exponents(weight, scale))
    assert torch.equal(exponent, scale.amax(-1))
    assert torch.equal(kept, scale)
    weight[0, 0, 16:32] = torch.tensor([0x80, 0x08] * 8)  # zeros of either sign
    for byte in (0, 254):
        scale[0, 0, 1] = byte
        _, kept = required(quant.row_exponents(weight, scale))
        assert torch.equal(quant.dequantize_fp4(weight[0], kept[0]), quant.dequantize_fp4(weight[0], scale[0]))
        assert int(kept[0, 0].amax()) - int(kept[0, 0].amin()) <= quant.ROW_SPAN
    for byte in (255, 114):
        bad = scale.clone()
        bad[0, 0, 1 if byte == 255 else 0] = byte
        bad[0, 0, 2] = 126
        assert quant.row_exponents(weight, bad) is None


def test_row_exponents_of_tiny_rows():
    weight, scale = torch.full((2, 16), 0x11, dtype=torch.uint8), torch.tensor([[3], [0]], dtype=torch.uint8)
    exponent, kept = required(quant.row_exponents(weight, scale))
    assert exponent.tolist() == [quant.ROW_SMALLEST] * 2  # a float32 that far below them would be subnormal
    assert torch.equal(kept, scale)
