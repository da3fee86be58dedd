"""The grouped output projection: the reference against scalar loops, the Triton kernels compiled and run on a GPU."""

import math
from typing import Any

import pytest
import torch

from deepseek_attn.kernels.common.quant import InputFormat, fake_quant_fp8, quantize_fp8_block
from deepseek_attn.kernels.linear import Segment, reference
from deepseek_attn.kernels.linear.formats import UNQUANTIZED

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.linear import launch as ops
from deepseek_attn.kernels.linear.launch import quantize_input
from deepseek_attn.kernels.linear.problem import LinearDecodeTiles, LinearHopperTiles, LinearTiles
from tests.kernels.compiled_launches import compiled_ops, on_gpus
from tests.kernels.linear.products import ROUNDED, forced
from tests.support.typed import required, untyped

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
# a rotated value at a tie may round the other way, and then to another FP8 value
LIMIT = {BF16: 2e-3, F16: 1e-3, F32: 1e-4}


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def expected_linear(o, weight, scale, groups, positions=None, cos_sin=None, read=UNQUANTIZED):
    return reference.grouped_linear(o, Segment(weight, scale, read), groups, positions, cos_sin)[0]


def grouped_linear(o, weight, scale, groups, positions=None, cos_sin=None, read=UNQUANTIZED):
    return ops.grouped_linear(o, Segment(weight, scale, read), groups, positions, cos_sin)[0]


def grouped_linear_quantized(o, weight, scale, groups, positions, cos_sin, read):
    return ops.grouped_linear(o, Segment(weight, scale, read), groups, positions, cos_sin)


def table(positions, rope_dim):
    angle = torch.rand(positions, rope_dim // 2) * 2 * math.pi
    return torch.cat([angle.cos(), angle.sin()], dim=1)


@pytest.mark.parametrize("fp8", [True, False], ids=["rounded", "unrounded"])
def test_reference(fp8):
    """Head by head, pair by pair."""
    M, H, d, groups, rank, rope_dim = 3, 4, 64, 2, 10, 16
    o, positions, cos_sin = torch.randn(M, H, d), torch.tensor([5, 0, 5]), table(9, rope_dim)
    weight, scale = quantize_fp8_block(torch.randn(groups * rank, H // groups * d))
    got = expected_linear(o, weight, scale, groups, positions, cos_sin, InputFormat(fp8))
    turned = o.double()
    for t in range(M):
        for h in range(H):
            for pair in range(rope_dim // 2):
                cos, sin = cos_sin[positions[t], pair], cos_sin[positions[t], rope_dim // 2 + pair]
                k = d - rope_dim + 2 * pair
                a, b = o[t, h, k].double(), o[t, h, k + 1].double()
                turned[t, h, k], turned[t, h, k + 1] = a * cos + b * sin, b * cos - a * sin
    x = turned.view(M, groups, -1)
    if fp8:
        x = fake_quant_fp8(x.float(), 128).double()
    dense = weight.double() * scale.double()[0, 0]
    for g in range(groups):
        expected = x[:, g] @ dense[g * rank : (g + 1) * rank].T
        torch.testing.assert_close(got[:, g * rank : (g + 1) * rank].double(), expected, rtol=1e-4, atol=2e-3)


META: dict[str, Any] = {"device": "meta"}


PROJECTIONS = [(M, inputs) for M in (20, 1, 300) for inputs in ("rounded", "unrounded")]


@pytest.mark.parametrize(("arch", "projection"), on_gpus(PROJECTIONS, [(20, "rounded")]), ids=str)
def test_compiles(arch, projection):
    M, fp8 = projection[0], projection[1] == "rounded"
    o, weight = torch.empty(M, 64, 512, dtype=BF16, **META), torch.empty(8192, 4096, dtype=torch.float8_e4m3fn, **META)
    scale, cos_sin = torch.empty(64, 32, **META), torch.empty(4096, 64, **META)
    positions = torch.empty(M, dtype=torch.int64, **META)
    found = compiled_ops(arch, lambda: grouped_linear(o, weight, scale, 8, positions, cos_sin, InputFormat(fp8)))
    assert sorted(map(len, found.values())) == [1, 1]
    assert "quantize_input_kernel" in found


def test_what_cannot_be_computed_is_refused():
    o, cos_sin = torch.randn(3, 4, 64), table(9, 16)
    weight, scale = quantize_fp8_block(torch.randn(20, 128))
    with pytest.raises(ValueError, match="multiple of 3 heads"):
        grouped_linear(o, weight, scale, 3)
    with pytest.raises(ValueError, match="give both, or neither"):
        grouped_linear(o, weight, scale, 2, torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"positions must be int32 or int64 \[3\]"):
        grouped_linear(o, weight, scale, 2, torch.zeros(2).long(), cos_sin)
    with pytest.raises(ValueError, match="cos_sin a contiguous float32 table"):
        grouped_linear(o, weight, scale, 2, torch.zeros(3).long(), cos_sin.double())
    with pytest.raises(ValueError, match=r"contiguous float8_e4m3fn \[N, 64\]"):
        grouped_linear(o, weight, scale, 4)
    with pytest.raises(ValueError, match="20 rows cannot be divided into 8 groups"):
        grouped_linear(torch.randn(3, 16, 64), weight, scale, 8)


# --- on a GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda ---


def problem(M, H, d, groups, rank, rope_dim, dtype=BF16, spare=3):
    """Heads within a larger tensor that is NaN elsewhere, as attention pads them."""
    whole = torch.full((M, H + spare, d), NAN, dtype=dtype)
    whole[:, :H] = torch.randn(M, H, d)
    weight, scale = quantize_fp8_block(torch.randn(groups * rank, H // groups * d))
    return whole[:, :H], weight, scale, groups, torch.randint(999, (M,)), table(999, rope_dim)


@pytest.mark.parametrize("M", [1, 8, 9, 33, 130])
@pytest.mark.parametrize(("H", "d", "groups", "rank"), [(64, 512, 8, 1024), (8, 64, 4, 40), (6, 32, 2, 130)], ids=str)
def test_plain_weights(gpu, M, H, d, groups, rank):
    """Of inputs that are not quantised: by cuBLAS, or a launch whose programs read the channels of one group."""
    o, _, _, _, positions, cos_sin = problem(M, H, d, groups, rank, 32)
    weight = (torch.randn(groups * rank, H // groups * d) / 8).to(BF16)
    expected = expected_linear(o, weight, None, groups, positions, cos_sin)
    assert relative(grouped_linear(o, weight, None, groups, positions, cos_sin), expected) <= LIMIT[BF16]


SHAPES = {
    "flash": (64, 512, 8, 1024, 64),
    "half of flash": (32, 512, 4, 1024, 64),
    "pro": (128, 512, 16, 1024, 64),
    "odd": (12, 128, 3, 200, 32),
    "small heads": (32, 64, 4, 72, 64),
    "one group": (8, 512, 1, 1024, 64),
}


@pytest.mark.parametrize("fp8", [True, False], ids=["rounded", "unrounded"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("M", [1, 3, 7, 33, 130, 1026])
def test_shapes(gpu, M, shape, fp8):
    arguments = problem(M, *SHAPES[shape])
    got, expected = grouped_linear(*arguments, InputFormat(fp8)), expected_linear(*arguments, InputFormat(fp8))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert relative(got, expected) <= LIMIT[BF16]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("fp8", [True, False], ids=["rounded", "unrounded"])
def test_dtypes(gpu, fp8, dtype):
    for M in (2, 40, 130):
        arguments = problem(M, 16, 128, 4, 128, 64, dtype)
        assert (
            relative(grouped_linear(*arguments, InputFormat(fp8)), expected_linear(*arguments, InputFormat(fp8)))
            <= LIMIT[dtype]
        )


@pytest.mark.parametrize("fp8", [True, False], ids=["rounded", "unrounded"])
@pytest.mark.parametrize("M", [1, 40, 130])
def test_blocks_of_32(gpu, M, fp8):
    for heads, rank in ((6, 72), (8, 128)):
        o, cos_sin, positions = torch.randn(M, heads, 64).bfloat16(), table(99, 32), torch.randint(99, (M,))
        rows = torch.randn(2 * rank, heads * 32) * torch.logspace(-1, 1, 2 * rank)[:, None]
        arguments = o, *quantize_fp8_block(rows, (32, 32)), 2, positions, cos_sin, InputFormat(fp8, group=32)
        assert relative(grouped_linear(*arguments), expected_linear(*arguments)) <= LIMIT[BF16]


@pytest.mark.parametrize("M", [2, 40, 130])
def test_without_rotation(gpu, M):
    o, weight, scale, groups, *_ = problem(M, 16, 128, 4, 128, 64)
    for fp8 in (True, False):
        got = grouped_linear(o, weight, scale, groups, read=InputFormat(fp8))
        assert relative(got, expected_linear(o, weight, scale, groups, read=InputFormat(fp8))) <= LIMIT[BF16]


@pytest.mark.parametrize(
    "config",
    [LinearTiles(8), LinearTiles(16, 128, 4), LinearTiles(64, 64, 3), LinearTiles(128, 128, warps=8)],
    ids=str,
)
def test_every_configuration(gpu, config):
    for M in (1, 20, 129):
        arguments = problem(M, 32, 128, 4, 136, 64)
        for fp8 in (True, False):
            with forced(config):
                got = grouped_linear(*arguments, InputFormat(fp8))
            assert relative(got, expected_linear(*arguments, InputFormat(fp8))) <= LIMIT[BF16]


@pytest.mark.parametrize("config", [
    LinearHopperTiles(128, 16, 128, 16, stages=3), LinearHopperTiles(64, 64, 64, 32, 2, stages=3),
    LinearHopperTiles(128, 128, 128, 64, 4, stages=4),
], ids=str)  # fmt: skip
def test_every_hopper_configuration(hopper, config):
    for M in (9, 20, 129):
        arguments = problem(M, 32, 128, 4, 256, 64)
        with forced(config):
            got = grouped_linear(*arguments, ROUNDED)
        assert relative(got, expected_linear(*arguments, ROUNDED)) <= LIMIT[BF16]


@pytest.mark.parametrize("config", [
    LinearDecodeTiles(64, 1, stages=3, stage_blocks=2), LinearDecodeTiles(128, 3, stages=4), LinearDecodeTiles(128, 1),
    LinearDecodeTiles(64, 2, stages=4, tokens=16), LinearDecodeTiles(128, 1, stages=3, tokens=16),
], ids=str)  # fmt: skip
def test_every_configuration_of_few_tokens(hopper, config):
    for M in (1, 5, config.tokens):
        arguments = problem(M, 32, 128, 4, 256, 64)
        with forced(config):
            got = grouped_linear(*arguments, ROUNDED)
        assert relative(got, expected_linear(*arguments, ROUNDED)) <= LIMIT[BF16]


@pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "raw"])
@pytest.mark.parametrize("M", [1, 4, 8, 9, 16])
def test_the_output_of_few_tokens_rounded_on_the_way(gpu, M, pow2):
    """V4-Pro's: bit by bit what rounding the output gives, NaN among it."""
    o, *rest = problem(M, 128, 512, 16, 1024, 64)
    o = o * torch.logspace(-6, 6, M, device=o.device)[:, None, None]
    o[M - 1, 3, 5] = NAN
    out, rounded = grouped_linear_quantized(o.to(BF16), *rest, read=InputFormat(True, pow2))
    if torch.cuda.get_device_capability() != (9, 0):
        assert rounded is None
        return
    q, scale, _ = quantize_input(out, pow2)
    assert torch.equal(required(rounded).scale.nan_to_num(7), scale.nan_to_num(7))
    finite = scale.isfinite().repeat_interleave(128, 1)
    assert torch.equal(required(rounded).values.view(torch.uint8)[finite], q.view(torch.uint8)[finite])
    assert scale[M - 1].isnan().any()


@pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "raw"])
@pytest.mark.parametrize("M", [9, 32, 33, 50, 64, 100, 128, 129, 200])
def test_the_output_rounded_on_the_way(gpu, M, pow2):
    """Bit by bit what rounding the output gives: zeros, values of all magnitudes, NaN and infinities."""
    o, weight, *rest = problem(M, 16, 128, 4, 256, 64)
    o *= torch.logspace(-6, 6, M, device=o.device)[:, None, None]
    o[1], o[2, 3, 5], o[3, 9, 7] = 0, NAN, float("inf")
    weight = weight.clone()
    weight[:128] = 0
    out, rounded = grouped_linear_quantized(o.to(BF16), weight, *rest, read=InputFormat(True, pow2))
    if torch.cuda.get_device_capability() != (9, 0) or M <= 32:
        assert rounded is None
        return
    assert torch.equal(
        out.nan_to_num(7), grouped_linear(o.to(BF16), weight, *rest, read=InputFormat(True, pow2)).nan_to_num(7)
    )
    q, scale, _ = quantize_input(out, pow2)
    assert torch.equal(required(rounded).scale.nan_to_num(7), scale.nan_to_num(7))
    finite = scale.isfinite().repeat_interleave(128, 1)
    assert torch.equal(required(rounded).values.view(torch.uint8)[finite], q.view(torch.uint8)[finite])
    assert scale[2].isnan().any()


def test_strides_and_zero_rows(gpu):
    o, *rest = problem(20, 16, 128, 4, 128, 64)
    turned = o.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(grouped_linear(turned, *rest, read=ROUNDED), grouped_linear(o, *rest, read=ROUNDED))
    weight, scale, groups, positions, cos_sin = rest
    assert grouped_linear(o[:0], weight, scale, groups, untyped(positions)[:0], cos_sin, ROUNDED).shape == (0, 512)


@pytest.mark.parametrize("M", [1, 20, 130])
def test_fifty_launches_are_bit_identical(gpu, M):
    arguments = problem(M, 64, 512, 8, 1024, 64)
    first = grouped_linear(*arguments, ROUNDED)
    for _ in range(50):
        assert torch.equal(grouped_linear(*arguments, ROUNDED), first)


@pytest.mark.parametrize("M", [1, 20, 130])
def test_replays_of_a_graph(gpu, M):
    o, *rest = problem(M, 64, 512, 8, 1024, 64)
    grouped_linear(o, *rest, read=ROUNDED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_linear(o, *rest, read=ROUNDED)
    for _ in range(3):
        o.copy_(torch.randn(o.shape))
        out.fill_(NAN)
        graph.replay()
        assert relative(out, expected_linear(o, *rest, read=ROUNDED)) <= LIMIT[BF16]


@pytest.mark.parametrize("M", [1, 3, 16, 17, 70, 300])
@pytest.mark.parametrize(("H", "groups", "rank"), [(16, 4, 256), (6, 3, 130)])
def test_heads_that_are_quantised_already(device, M, H, groups, rank):
    """The same bits as from the heads, quantised output included; in plain torch as close as a rounding of it."""
    from deepseek_attn.kernels.linear import grouped_linear as op, grouped_linear_of_quantized, quantize_input

    with device:
        o, positions, cos_sin = torch.randn(M, H, 512).to(BF16), torch.zeros(M, dtype=torch.int64), torch.ones(1, 64)
        cos_sin[:, 32:] = 0
        weight, scale = quantize_fp8_block(torch.randn(groups * rank, H // groups * 512))
        rows = quantize_input(o.flatten(1))
        rows = rows._replace(
            values=rows.values.view(torch.uint8).unflatten(1, (groups, -1)).transpose(0, 1).contiguous()
        )
        rows = rows._replace(values=rows.values.view(torch.float8_e4m3fn))
        expected, expected_fp8 = op(o, Segment(weight, scale, ROUNDED), groups, positions, cos_sin)
        got, got_fp8 = grouped_linear_of_quantized(rows, weight, scale, BF16)
    assert torch.equal(got, expected)
    assert (got_fp8 is None) == (expected_fp8 is None)
    if got_fp8 is not None:
        assert torch.equal(got_fp8.values.view(torch.uint8), required(expected_fp8).values.view(torch.uint8))
        assert torch.equal(got_fp8.scale, required(expected_fp8).scale)
