"""Linear layers over every weight format, against scalar formulas."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.kernels.common.norm_rope import rms_norm
from deepseek_attn.kernels.common.quant import InputFormat, encode_e8m0, quantize_fp4, quantize_fp8_block
from deepseek_attn.kernels.linear.formats import quantized_input
from deepseek_attn.layers.experts import ExpertLinear
from deepseek_attn.layers.linear import GroupedLinear, Linear, join_weights, multi_linear
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm, SlotKind, checkpoint_slots
from tests.support.tiers import tiered
from tests.support.typed import required

FP4_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def numerics(name):
    return get_numerics(name)


def fp8_weight(out_features, in_features):
    """(stored values, float32 block scales, values in float64 by the definition of the format)."""
    weight, scale = quantize_fp8_block(torch.randn(out_features, in_features))
    values = weight.to(torch.float64)
    for i in range(out_features):
        for block in range(scale.shape[1]):
            values[i, 128 * block : 128 * block + 128] *= scale[i // 128, block].item()
    return weight, scale, values


def fp4_weight(out_features, in_features):
    """(packed bytes, e8m0 bytes, values in float64 by the definition of the format)."""
    packed, scale = quantize_fp4(torch.randn(out_features, in_features))
    byte = encode_e8m0(scale)
    values = []
    for codes, exponents in zip(packed.tolist(), byte.tolist(), strict=True):
        for j in range(in_features):
            nibble = codes[j // 2] >> 4 * (j % 2) & 15
            sign = -1 if nibble & 8 else 1
            values.append(sign * FP4_VALUES[nibble & 7] * 2.0 ** (exponents[j // 32] - 127))
    return packed, byte, torch.tensor(values, dtype=torch.float64).view(out_features, in_features)


WEIGHTS = {"fp8": fp8_weight, "fp4": fp4_weight}


def scalar_fp8(value):
    """e4m3, round to nearest even, saturating; Python floats only."""
    value = max(-448.0, min(448.0, value))
    if value == 0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, -6)
    step = 2.0 ** (exponent - 3)
    return round(value / step) * step


def scalar_rounded_row(row):
    """What an FP8 linear of DeepSeek's sees of one token: per 128 channels, a power-of-two scale and e4m3 values."""
    out = []
    for start in range(0, len(row), 128):
        group = row[start : start + 128]
        amax = np.float32(max(max(abs(v) for v in group), np.float32(1e-4)))
        mantissa, exponent = math.frexp(np.float32(amax * np.float32(1 / 448)))
        scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
        out += [scalar_fp8(v / scale) * scale for v in group]
    return out


def awkward_inputs(tokens, width, dtype=torch.float32):
    """Ordinary rows, a zero row, tiny values and a row at a power of two times 448."""
    x = torch.randn(tokens, width)
    x[1] = 0
    x[2] *= 1e-7
    x[3, 5], x[3, 130] = 448.0 * 4, -448.0 / 8
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_inputs_are_rounded_as_the_scalar_formula_says(dtype):
    x = awkward_inputs(6, 256, dtype)
    expected = torch.tensor([scalar_rounded_row(row) for row in x.tolist()], dtype=torch.float64)
    assert torch.equal(quantized_input(x, InputFormat(fp8=True)).double(), expected)
    assert torch.equal(quantized_input(x, InputFormat()), x.float())


# formats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["exact", "official", "serving"])
def test_plain_weight(name, dtype, device):
    """No scale, no rounding of inputs, whatever the numerics."""
    layer = Linear(100, 37, numerics(name), dtype, device)
    weight = torch.randn(37, 100).bfloat16()
    layer.load(weight, None)
    assert layer.weight.dtype == dtype
    assert layer.scale is None
    x = torch.randn(5, 100, dtype=dtype, device=device)
    expected = x.cpu().double() @ weight.double().T
    tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 0.08}
    torch.testing.assert_close(layer(x).cpu().double(), expected, **tolerance)
    assert layer(x).dtype == dtype


@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize(
    ("out_features", "in_features"), tiered([(200, 320), (128, 128), (1, 32), (129, 160)], [(1, 32), (129, 160)])
)
def test_exact_dequantises_at_load(fmt, out_features, in_features, device):
    layer = Linear(in_features, out_features, numerics("exact"), torch.float32, device)
    weight, scale, values = WEIGHTS[fmt](out_features, in_features)
    layer.load(weight, scale)
    assert layer.scale is None
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight.cpu().double(), values)
    x = torch.randn(3, in_features, device=device)
    torch.testing.assert_close(layer(x).cpu().double(), x.cpu().double() @ values.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "e8m0_bytes"])
def test_scales_mean_the_same_in_every_dtype(scale_dtype):
    weight, scale, values = fp8_weight(130, 200)
    scale = {"float32": scale, "bfloat16": scale.bfloat16(), "e8m0_bytes": encode_e8m0(scale)}[scale_dtype]
    layer = Linear(200, 130, numerics("exact"), torch.float32)
    layer.load(weight, scale)
    assert torch.equal(layer.weight.double(), values)


@pytest.mark.parametrize("dtype", tiered([torch.float32, torch.bfloat16], [torch.bfloat16]), ids=str)
@pytest.mark.parametrize(
    ("fmt", "name"), tiered(product(WEIGHTS, ["official", "serving"]), [("fp8", "official"), ("fp4", "serving")])
)
def test_quantised_weights_stay_as_stored_and_inputs_are_rounded(fmt, name, dtype, device):
    layer = Linear(256, 200, numerics(name), dtype, device)
    weight, scale, values = WEIGHTS[fmt](200, 256)
    layer.load(weight, scale)
    assert layer.weight.dtype == weight.dtype
    assert torch.equal(layer.weight.cpu().view(torch.uint8), weight.view(torch.uint8))
    x = awkward_inputs(6, 256, dtype)
    seen = torch.tensor([scalar_rounded_row(row) for row in x.tolist()], dtype=torch.float64)
    expected = seen @ values.T
    out = layer(x.to(device)).cpu()
    assert out.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    else:  # float32 sums, one rounding
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-3)
    assert (expected - x.double() @ values.T).abs().max() > 0.05, "the rounding of the inputs must show"


def test_inputs_are_not_rounded_where_that_is_switched_off():
    layer = Linear(256, 128, numerics("official"), torch.float32, fp8_input=False)
    weight, scale, values = fp8_weight(128, 256)
    layer.load(weight, scale)
    x = torch.randn(4, 256)
    torch.testing.assert_close(layer(x).double(), x.double() @ values.T, rtol=1e-5, atol=1e-4)


def test_float32_output_of_a_bfloat16_layer():
    layer = Linear(96, 40, numerics("exact"), torch.bfloat16, out_float32=True)
    weight = torch.randn(40, 96).bfloat16()
    layer.load(weight)
    x = torch.randn(7, 96).bfloat16()
    out = layer(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_fp8_inputs_need_whole_groups(fmt):
    layer = Linear(160, 128, numerics("official"), torch.float32)
    weight, scale, _ = WEIGHTS[fmt](128, 160)
    with pytest.raises(ValueError, match=r"160 input features.*multiple of 128.*numerics='exact'"):
        layer.load(weight, scale)
    assert layer.weight is None
    Linear(160, 128, numerics("official"), torch.float32, fp8_input=False).load(weight, scale)
    Linear(160, 128, numerics("exact"), torch.float32).load(weight, scale)
    Linear(160, 128, numerics("official"), torch.float32).load(torch.randn(128, 160))


def test_a_scale_grid_that_does_not_fit_is_refused():
    weight, scale, _ = fp8_weight(130, 200)
    with pytest.raises(ValueError, match=r"scale \[1, 2\] does not fit weight \[130, 200\]: expected \[2, 2\]"):
        Linear(200, 130, numerics("exact"), torch.float32).load(weight, scale[:1])


def test_zero_rows():
    for fmt in WEIGHTS:
        layer = Linear(128, 64, numerics("official"), torch.float32)
        layer.load(*WEIGHTS[fmt](64, 128)[:2])
        assert layer(torch.empty(0, 128)).shape == (0, 64)


# GroupedLinear


@pytest.mark.parametrize("stored", ["plain", "fp8"])
@pytest.mark.parametrize("name", ["exact", "official", "serving"])
def test_grouped_linear_maps_group_by_group(name, stored, device):
    """Head h of 6 belongs to group h // 2; the rows of the weight go group by group too."""
    groups, heads, dim, rank = 3, 2, 64, 40
    layer = GroupedLinear(groups, heads * dim, rank, numerics(name), torch.float32, device)
    if stored == "fp8":
        weight, scale, values = fp8_weight(groups * rank, heads * dim)
    else:
        weight, scale = torch.randn(groups * rank, heads * dim), None
        values = weight.double()
    layer.load(weight, scale)
    o = torch.randn(5, groups * heads, dim)
    out = layer(o.to(device).reshape(5, groups, -1)).cpu()
    assert out.shape == (5, groups, rank)
    rounded = name == "serving" and stored == "fp8"  # official runs wo_a with unrounded inputs
    for t in range(5):
        for g in range(groups):
            row = torch.cat([o[t, g * heads], o[t, g * heads + 1]])
            if rounded:
                row = torch.tensor(scalar_rounded_row(row.tolist()))
            expected = values[g * rank : (g + 1) * rank] @ row.double()
            torch.testing.assert_close(out[t, g].double(), expected, rtol=1e-5, atol=1e-4)


def test_grouped_linear_slot_is_the_whole_weight():
    layer = GroupedLinear(3, 128, 40, numerics("exact"), torch.float32)
    assert dict(layer.slots())["weight"].shape == (120, 128)


# ExpertLinear


@pytest.mark.parametrize(
    ("fmt", "name"),
    tiered(
        product(["plain", "fp8", "fp4"], ["exact", "official"]),
        [("plain", "exact"), ("fp8", "exact"), ("fp4", "official")],
    ),
)
def test_expert_stack(fmt, name, device):
    """Experts arrive in any order; each computes with its own weight."""
    layer = ExpertLinear(3, 128, 130, numerics(name), torch.float32, device)
    values = {}
    for index in (2, 0, 1):
        if fmt == "plain":
            weight, scale = torch.randn(130, 128), None
            values[index] = weight.double()
        else:
            weight, scale, values[index] = WEIGHTS[fmt](130, 128)
        slot = layer.expert_slot(index)
        assert (slot.shape, slot.quantizable) == ((130, 128), True)
        slot.load(weight, scale)
    x = torch.randn(4, 128)
    seen = x.double()
    if name == "official" and fmt != "plain":
        seen = torch.tensor([scalar_rounded_row(row) for row in x.tolist()], dtype=torch.float64)
    for index in range(3):
        out = layer(x.to(device), index).cpu()
        torch.testing.assert_close(out.double(), seen @ values[index].T, rtol=1e-5, atol=1e-4)


def test_exponents_of_experts_that_have_them():
    """Only FP4 with FP8 inputs has them, and no expert of a stack if one cannot."""
    weight, scale, _ = fp4_weight(128, 128)
    far = torch.where(torch.arange(4) == 1, 1, scale)
    for experts, name, kept in (([scale, scale], "official", True), ([scale, far], "official", False),
                                ([far, scale], "official", False), ([scale, scale], "exact", False)):  # fmt: skip
        layer = ExpertLinear(2, 128, 128, numerics(name), torch.float32)
        for index, of_expert in enumerate(experts):
            layer.expert_slot(index).load(weight, of_expert)
        assert (layer.exponent is not None) == kept
        if kept:
            assert torch.equal(required(layer.exponent), torch.stack([scale.amax(-1)] * 2))


def test_experts_of_two_formats_are_refused():
    layer = ExpertLinear(2, 128, 128, numerics("official"), torch.float32)
    layer.expert_slot(0).load(*fp8_weight(128, 128)[:2])
    with pytest.raises(ValueError, match=r"expert 1 has a torch\.uint8 weight, other experts .*torch\.float8_e4m3fn"):
        layer.expert_slot(1).load(*fp4_weight(128, 128)[:2])


def test_experts_with_fp8_inputs_need_whole_groups():
    layer = ExpertLinear(2, 96, 128, numerics("official"), torch.float32)
    with pytest.raises(ValueError, match="96 input features"):
        layer.expert_slot(0).load(*fp4_weight(128, 96)[:2])


# norms and slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rms_norm(dtype):
    norm = RMSNorm(48, 1e-3)
    weight = torch.randn(48).bfloat16()
    dict(norm.slots())["weight"].load(weight, None)
    x = (torch.randn(5, 2, 48) * torch.tensor([1e-3, 1, 100, 0, 1]).view(5, 1, 1)).to(dtype)
    out = norm(x)
    x64 = x.double()
    plain = x64 / (x64.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    tolerance: dict[str, Any] = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-6}
    )
    torch.testing.assert_close(out.double(), plain * weight.double(), **tolerance)
    torch.testing.assert_close(rms_norm(x, 1e-3).double(), plain, **tolerance)
    assert out.dtype == dtype
    assert norm.weight.dtype == torch.float32


def test_checkpoint_slots_have_published_names():
    class Part(CheckpointModule):
        def __init__(self):
            super().__init__()
            self.declare("ape", (4, 6), torch.float32)
            self.declare("table", (5,), torch.int64, kind=SlotKind.INT)
            self.wq_a = Linear(8, 3, numerics("exact"), torch.float32)
            self.norm = RMSNorm(3, 1e-6)

    part = Part()
    slots = checkpoint_slots(part)
    kinds = {name: (slot.shape, slot.kind, slot.quantizable) for name, slot in slots.items()}
    assert kinds == {
        "ape": ((4, 6), SlotKind.FLOAT, False),
        "table": ((5,), SlotKind.INT, False),
        "wq_a.weight": ((3, 8), SlotKind.LINEAR, True),
        "norm.weight": ((3,), SlotKind.FLOAT, False),
    }
    assert part.ape is None
    slots["ape"].load(torch.ones(4, 6).bfloat16(), None)
    slots["table"].load(torch.arange(5, dtype=torch.int32), None)
    assert (part.ape.dtype, part.table.dtype) == (torch.float32, torch.int64)
    assert not part.ape.requires_grad


def plain_layers(sizes, dtypes, in_features=40):
    layers = []
    for n, dtype in zip(sizes, dtypes, strict=True):
        layers.append(Linear(in_features, n, numerics("exact"), dtype, out_float32=n % 2 == 0))
        layers[-1].load(torch.randn(n, in_features))
    return layers


def test_joined_weights_lie_together_and_compute_the_same():
    layers = plain_layers((8, 3, 6), [torch.float32] * 3)
    x = torch.randn(5, 40)
    expected = multi_linear(x, layers)
    before = [layer.weight.clone() for layer in layers]
    join_weights(layers)
    for layer, weight, following in zip(layers, before, layers[1:] + [None], strict=True):
        assert torch.equal(layer.weight, weight)
        assert layer.weight.is_contiguous()
        if following is not None:
            assert layer.weight.data_ptr() + layer.weight.nbytes == following.weight.data_ptr()
    for mine, other in zip(multi_linear(x, layers), expected, strict=True):
        assert torch.equal(mine, other)


def test_weights_that_have_no_format_in_common_stay_where_they_are():
    quantized = Linear(128, 128, numerics("serving"), torch.bfloat16)
    quantized.load(*quantize_fp8_block(torch.randn(128, 128)))
    mixed = plain_layers((4, 6), (torch.float32, torch.bfloat16))
    for layers in ([quantized], mixed, [Linear(8, 8, numerics("exact"), torch.float32)]):
        before = [layer.weight for layer in layers]
        join_weights(layers)
        assert all(layer.weight is weight for layer, weight in zip(layers, before, strict=True))
