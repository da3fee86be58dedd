"""The linear ops: the reference against scalar loops, the Triton kernels compiled everywhere and run on a GPU."""

from typing import Any

import pytest
import torch

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.quant import InputFormat, quantize_fp8_block
from deepseek_attn.kernels.linear import QuantizedRows, Segment, reference
from deepseek_attn.kernels.linear.formats import UNQUANTIZED

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.kernels.common.plans import forced_row
from deepseek_attn.kernels.linear.launch import linear_problem, multi_linear, quantize_input
from deepseek_attn.kernels.linear.plan import (
    HOPPER,
    JOIN_FROM,
    LIBRARY,
    PLAIN_CHANNELS,
    TRITON,
    adjacent_runs,
    dot_format,
    large_for_cublas,
    plan,
)
from deepseek_attn.kernels.linear.problem import LinearDecodeTiles, LinearHopperTiles, LinearTiles, LinearWeight
from tests.kernels.compiled_launches import CAPABILITIES, compiled_ops, on_gpus
from tests.kernels.linear.products import H200, ROUNDED, config_of, forced, problem
from tests.support.typed import required

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
# results of the same quantised inputs: sums in another order, then at most one rounding
LIMIT = {BF16: 1.5e-3, F16: 4e-4, F32: 2e-5}


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def fp8_weight(n, k):
    return quantize_fp8_block(torch.randn(n, k))


def uneven_weight(n, k):
    """In blocks of 32, whose scales differ."""
    return quantize_fp8_block(
        torch.randn(n, k) * torch.logspace(-1, 1, n)[:, None] * torch.logspace(1, -1, k), (32, 32)
    )


def awkward(M, K, dtype=BF16):
    """Rows of all magnitudes: ordinary ones, zeros, tiny ones, a power of two times 448."""
    x = torch.randn(M, K) * torch.logspace(-2, 2, M).unsqueeze(1)
    x[::7] = 0
    x[1::7] *= 1e-7
    x[2::7, 5] = 448.0 * 4
    return x.to(dtype)


# --- the reference, by its definition ---


def test_reference_of_segments():
    x = awkward(9, 256, F32)
    weight, scale = fp8_weight(130, 256)
    plain = torch.randn(20, 256)
    q, q_scale, _ = quantized = reference.quantize_input(x)
    assert (q_scale.shape, q_scale.stride()) == ((9, 2), (1, 9))
    expected = torch.zeros(9, 130, dtype=torch.float64)
    for block in range(2):
        k = slice(128 * block, 128 * block + 128)
        product = q[:, k].double() @ weight[:, k].double().T
        expected += product * q_scale[:, block, None] * scale[:, block].repeat_interleave(128)[:130]
    got = reference.multi_linear(x, [Segment(weight, scale, ROUNDED), Segment(plain, out_dtype=BF16)])
    torch.testing.assert_close(got[0].double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got[1], (x @ plain.T).to(BF16))
    given = reference.multi_linear(x, [Segment(weight, scale, ROUNDED)], quantized=quantized)
    assert torch.equal(given[0], got[0])
    unrounded = reference.multi_linear(x, [Segment(weight, scale)])[0]
    assert relative(unrounded, got[0]) > 1e-3


# --- every kernel compiles for every generation, on any machine ---

META: dict[str, Any] = {"device": "meta"}


def meta_segments(K, scaled=(), plain=(), read=UNQUANTIZED, out_dtype=None):
    segments = []
    for n in scaled:
        grid = torch.empty(-(-n // read.group), -(-K // read.group), **META)
        segments.append(Segment(torch.empty(n, K, dtype=torch.float8_e4m3fn, **META), grid, read, out_dtype))
    return segments + [Segment(torch.empty(n, K, dtype=BF16, **META), out_dtype=F32) for n in plain]


C4A = {"scaled": (1024, 512), "plain": (1024, 1024, 256, 256, 64)}
PRODUCTS = {
    "one token": (1, BF16, meta_segments(4096, **C4A, read=ROUNDED)),
    "33 tokens": (33, BF16, meta_segments(4096, **C4A, read=ROUNDED)),
    "300 tokens": (300, BF16, meta_segments(1024, (32768, 8192), read=ROUNDED)),
    "unrounded input": (9, BF16, meta_segments(1024, (4096,))),
    "unrounded input, 300 tokens": (300, BF16, meta_segments(1024, (4096,))),
    "float32 results": (5, BF16, meta_segments(1024, (512,), read=ROUNDED, out_dtype=F32)),
    "float32 input": (16, F32, meta_segments(4096, (512,), (129280,))),
    "float32 input, 40 tokens": (40, F32, meta_segments(4096, (512,), (129280,))),
    "blocks of 32": (9, BF16, meta_segments(5120, (1280, 512), (512, 512, 64), InputFormat(True, group=32))),
    "blocks of 32, one token": (1, BF16, meta_segments(1280, (32768, 4096), (), InputFormat(True, group=32))),
    "blocks of 32, unrounded input": (300, BF16, meta_segments(4096, (8192,), (), InputFormat(group=32))),
    "many rows": (20, BF16, meta_segments(1024, (32768, 8192), read=ROUNDED)),
}


@pytest.mark.parametrize(("arch", "product"), on_gpus(PRODUCTS, ["33 tokens"]))
def test_products_compile(arch, product):
    M, dtype, segments = PRODUCTS[product]
    x = torch.empty(M, segments[0].weight.shape[1], dtype=dtype, **META)
    with forced_row(LIBRARY, LIBRARY.rows[-1]):  # the same launch where cuBLAS would be faster
        found = compiled_ops(arch, lambda: multi_linear(x, segments))
    quantizers = found.pop("quantize_input_kernel", [])
    kernels = [kernel for launches in found.values() for kernel in launches]
    assert len(kernels) == 1
    group, on_hopper = segments[0].input_format.group, HOPPER in found
    assert len(quantizers) == (segments[0].reads_fp8 and (M > 8 or on_hopper))
    for kernel in kernels + quantizers:
        assert ("griddepcontrol" in kernel.asm["ptx"]) == (CAPABILITIES[arch] >= (9, 0))
        assert "e4m3" not in kernel.asm["ptx"] or arch != "sm80"
    if CAPABILITIES[arch] >= (9, 0) and M <= 8 and not on_hopper:
        early = kernels[0].asm["ptx"].partition("griddepcontrol.wait")[0]
        assert "ld.global" in early, "the first weights are asked for while the launch ahead still runs"
    if arch == "sm90" and quantizers:
        assert ("f32.e4m3.e4m3" in kernels[0].asm["ptx"]) == segments[0].reads_fp8
        assert on_hopper or group == 128
        assert "cvt.rn.satfinite.e4m3x2" in quantizers[0].asm["ptx"]


@pytest.mark.parametrize("fp8", [True, False])
def test_blocks_of_32_are_expanded_for_many_tokens(fp8):
    """An input in FP8 is rounded before; bfloat16 holds both factors of the product, which is cuBLAS's."""
    x, read = torch.empty(600, 4096, dtype=BF16, **META), InputFormat(fp8, group=32)
    found = compiled_ops("sm90", lambda: multi_linear(x, meta_segments(4096, (8192,), (), read)))
    assert list(found) == ["quantize_input_kernel"] * fp8 + ["expand_weight_kernel"]


def test_inputs_are_quantised_once_or_rounded_once():
    """Rounded only for cuBLAS. Where a call has both kinds of blocks, programs quantise what blocks of 32 read."""
    x, small, large = torch.empty(600, 4096, dtype=BF16, **META), InputFormat(True, group=32), ROUNDED
    of_32, of_128, few = (meta_segments(4096, (n,), (), read) for n, read in ((512, small), (512, large), (64, small)))
    made = [plan(linear_problem(x, segments, None), H200) for segments in (of_32, of_128, of_32 + few, of_32 + of_128)]
    assert [(one.quantizes, one.rounds) for one in made] == [(False, True), *[(True, False)] * 3]
    assert [product.quantized for product in made[3].products] == [False, True]
    x = x[:5]  # quantised before: one launch for Hopper's tensor cores, instead of rows that are read 32 channels wide
    assert plan(linear_problem(x, of_32 + few, None), H200).quantizes
    assert not plan(linear_problem(x, of_128, None), H200).quantizes
    assert not plan(linear_problem(x, of_32, None), GPU((8, 9), 142)).quantizes


def test_factors_hold_what_they_are_given():
    """No product rounds its factors, and float32 results never come from 14-bit sums."""
    fp8 = torch.float8_e4m3fn

    def dot(x, weight, out, read=None, gpu=H200):
        return dot_format(x, [LinearWeight(64, weight, out, read)], gpu)

    assert dot(BF16, fp8, BF16, ROUNDED) == (fp8, 1, None)
    assert dot(BF16, fp8, F32, ROUNDED)[0] == F16
    assert dot(BF16, fp8, BF16, ROUNDED, GPU((8, 0), 108))[0] == F16
    assert dot(BF16, fp8, BF16, InputFormat()) == (BF16, 1, None)
    assert dot(F32, fp8, F32, InputFormat()) == (BF16, 3, None)
    assert dot(F32, BF16, F32) == (BF16, 3, None)
    assert dot(BF16, F32, F32) == (F32, 1, "tf32x3")
    assert dot(F16, BF16, F32) == (F32, 1, "tf32x3")


@pytest.mark.parametrize("K", [128, 640, 1024, 1536, 2048, 4096, 7168, 16384])
def test_splits_are_not_empty_and_alike_for_few_tokens(K):
    for rows, plain in ((1536, 2624), (40960, 0), (4096, 0), (0, 129280), (40, 40)):
        weights = [rows] * bool(rows), [plain] * bool(plain)
        configs = {M: config_of(TRITON, problem(M, K, *weights)) for M in (*range(1, 33), 33, 64, 100, 4096)}
        for few in (range(1, 9), range(9, 33)):
            assert len({(required(configs[M]).splits, required(configs[M]).plain_splits) for M in few}) == 1
            assert all(required(configs[M]).tokens >= M for M in few)
        for config in configs.values():
            for splits, channels in ((required(config).splits, 128), (required(config).plain_splits, PLAIN_CHANNELS)):
                share = -(-K // (splits * channels))
                assert share * (splits - 1) * channels < K, "a split without channels"


def test_cublas_takes_what_is_large():
    blackwell = GPU((10, 0), 148)
    for M, N, K in ((128, 32768, 1024), (512, 4096, 8192), (4096, 512, 4096)):
        assert large_for_cublas(problem(M, K, [N]), blackwell)
    for M, N, K in ((8, 32768, 1024), (64, 512, 4096), (256, 1024, 4096), (4096, 64, 4096)):
        assert not large_for_cublas(problem(M, K, plain=[N]), blackwell)


def test_equal_problems_share_a_plan():
    C4A = problem(8, 4096, (1024, 512), (1024, 64))
    assert plan(C4A, H200) is plan(problem(8, 4096, (1024, 512), (1024, 64)), H200)
    (launch,) = plan(C4A, H200).products
    assert (launch.choice.kernel, launch.weights) == (TRITON, (0, 1, 2, 3))


# --- on a GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda ---


def check(x, segments, **options):
    # the result may land where earlier ones lay: those are NaN
    poison = [torch.full((len(x), len(s.weight)), NAN, dtype=s.out_dtype or x.dtype, device=x.device) for s in segments]
    del poison
    got = multi_linear(x, segments, **options)
    expected = reference.multi_linear(x, segments)
    for mine, other in zip(got, expected, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        if mine.numel():
            assert relative(mine, other) <= LIMIT[mine.dtype]  # false for NaN
    return got


TOKENS = [1, 2, 3, 5, 9, 17, 33, 129, 1026]


@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("K", "scaled", "plain"), [
    (4096, (1024, 512), (1024, 256, 64)), (1536, (200, 72, 130), (70,)), (8192, (1024,), ()),
], ids=str)  # fmt: skip
def test_segments(gpu, K, scaled, plain, M):
    segments = [Segment(*fp8_weight(n, K), ROUNDED) for n in scaled]
    segments += [Segment(torch.randn(n, K).to(BF16), out_dtype=F32) for n in plain]
    check(awkward(M, K), segments)


def test_adjacent_weights():
    """Plain weights of equal dtypes, each of which begins where the one before ends, are one product of cuBLAS."""

    def runs(*segments, tokens=JOIN_FROM):
        return adjacent_runs(linear_problem(torch.empty(tokens, 4, dtype=BF16), segments, None))

    weights = torch.randn(9, 4).to(BF16).split([2, 3, 4])
    a, b, c = (Segment(weight, out_dtype=F32) for weight in weights)
    b_plain, c_plain = Segment(weights[1]), Segment(weights[2])
    assert runs(a, b, c) == [(0, 1, 2)]
    assert runs(a, b, c, tokens=JOIN_FROM - 1) == [(0,), (1,), (2,)]
    assert runs(b, a, c) == [(0,), (1,), (2,)]
    assert runs(a, b_plain, c_plain) == [(0,), (1, 2)]
    assert runs() == []


@pytest.mark.parametrize("M", [1, 40, 700, 2049])
def test_adjacent_weights_as_one_product(gpu, M):
    plain = torch.randn(1024 + 512 + 64, 2048).to(BF16).split([1024, 512, 64])
    segments = [Segment(*fp8_weight(512, 2048), ROUNDED), *(Segment(w, out_dtype=F32) for w in plain)]
    check(awkward(M, 2048), segments)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("M", [1, 33, 130])
def test_every_dtype(gpu, M, dtype):
    x = torch.randn(M, 256).to(dtype)
    segments = [Segment(*fp8_weight(200, 256), InputFormat(fp8), out) for fp8 in (True, False) for out in (None, F32)]
    segments += [Segment(torch.randn(70, 256).to(w), out_dtype=out) for w in (F32, BF16, F16) for out in (None, F32)]
    check(x, segments)


@pytest.mark.parametrize("M", [1, 9, 130])
def test_raw_scales(gpu, M):
    raw = InputFormat(fp8=True, pow2_scales=False)
    segments = [Segment(*fp8_weight(n, 1024), raw) for n in (256, 512)]
    x = torch.randn(M, 1024).to(BF16)
    got = multi_linear(x, segments)
    for mine, other in zip(got, reference.multi_linear(x, segments), strict=True):
        assert relative(mine, other) <= 4e-3  # the reference rounds the products with raw scales to bfloat16
    rounded = [Segment(segment.weight, segment.scale, ROUNDED) for segment in segments]
    assert relative(got[0], multi_linear(x, rounded)[0]) > 1e-3
    with pytest.raises(ValueError, match="must agree"):
        multi_linear(x, [segments[0], rounded[1]])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("M", [1, 8, 9, 40, 300])
def test_blocks_of_32(gpu, M, dtype):
    """V4.1's: inputs rounded and not, rows and channels that tiles do not divide; plain weights in the same launch."""
    for K in (96, 160, 1280):
        x = awkward(M, K, dtype)
        segments = [
            Segment(*uneven_weight(n, K), InputFormat(fp8, group=32), out_dtype)
            for n, fp8, out_dtype in ((70, True, None), (192, True, None), (33, False, None), (40, True, F32))
        ]
        segments.append(Segment(torch.randn(20, K).bfloat16(), out_dtype=F32))
        for got, expected in zip(multi_linear(x, segments), reference.multi_linear(x, segments), strict=True):
            assert got.dtype == expected.dtype
            assert relative(got, expected) <= LIMIT[dtype]


@pytest.mark.parametrize("K", [160, 72, 40])
def test_channels_that_are_no_multiple_of_a_block(gpu, K):
    segments = [Segment(*fp8_weight(130, K)), Segment(torch.randn(33, K).to(BF16))]
    check(torch.randn(7, K).to(BF16), segments)


CONFIGS = [
    LinearTiles(8),
    LinearTiles(16, 128, 4, 8),
    LinearTiles(16, splits=8, plain_splits=2, stages=3),
    LinearTiles(32, 64, 3, 5),
    LinearTiles(64, 128, 2, 2, warps=8, prefetched_blocks=3),
    LinearTiles(128, 128, warps=8, stages=3),
    LinearTiles(8, 128, warps=8),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration(gpu, config):
    segments = [Segment(*fp8_weight(n, 2048), ROUNDED) for n in (300, 512)]
    segments += [Segment(torch.randn(n, 2048).to(BF16), out_dtype=F32) for n in (200, 64)]
    for M in (1, 7, 40, 129):
        x = awkward(M, 2048)
        for quantized in (None, quantize_input(x)):
            with forced(config):
                check(x, segments, quantized=quantized)


HOPPER_CONFIGS = [
    LinearHopperTiles(128, 16, 64, 16, stages=3),
    LinearHopperTiles(64, 32, 64, 32, 4, 8, stages=4, spare=1),
    LinearHopperTiles(64, 64, 64, 32, 3, 5, stages=4),
    LinearHopperTiles(128, 64, 64, 64, 8, 2, stages=2),
    LinearHopperTiles(128, 128, 128, 64, 2, 4, stages=4),
    LinearHopperTiles(64, 128, 64, 64, 16, 16, stages=7),
    LinearHopperTiles(128, 8, 128, 8, stages=3, spare=1),
]


@pytest.mark.parametrize("config", HOPPER_CONFIGS, ids=str)
def test_every_hopper_configuration_of_blocks_of_32(hopper, config):
    """Scales that differ by row, channel and token; the same results whoever quantises the input, and in any rows."""
    read = InputFormat(True, group=32)
    for K, scaled, plain in (
        (2048, (320, 128, 512), (192, 64)),
        (640, (192,), ()),
        (128, (64,), ()),
        (1280, (1024,), ()),
    ):
        segments = [Segment(*uneven_weight(n, K), read) for n in scaled]
        segments += [Segment(torch.randn(n, K).to(BF16), out_dtype=F32) for n in plain]
        for M in (1, 17, 33, 100, 129):
            x = awkward(M, K)
            with forced(config):
                got = multi_linear(x, segments)
                again = multi_linear(x.flip(0), segments)
            for mine, other, expected in zip(got, again, reference.multi_linear(x, segments), strict=True):
                assert torch.equal(mine, other.flip(0))
                # sums of 32 products have about 14 bits
                assert relative(mine, expected) <= LIMIT[mine.dtype]


@pytest.mark.parametrize("config", HOPPER_CONFIGS, ids=str)
def test_every_hopper_configuration(hopper, config):
    for K, scaled, plain in ((2048, (320, 128, 512), (192, 64)), (640, (192,), ()), (1152, (1024,), (64, 128, 256))):
        segments = [Segment(*fp8_weight(n, K), ROUNDED) for n in scaled]
        segments += [Segment(torch.randn(n, K).to(BF16), out_dtype=F32) for n in plain]
        for M in (2, 17, 33, 100, 129):
            x = awkward(M, K)
            with forced(config):
                check(x, segments, quantized=quantize_input(x))


DECODE_CONFIGS = [
    LinearDecodeTiles(64, 1, stages=3, stages_at_once=1),
    LinearDecodeTiles(64, 3, stages=6, stages_at_once=4),
    LinearDecodeTiles(64, 2, stages=4, stage_blocks=2),
    LinearDecodeTiles(128, 1, stages=2),
    LinearDecodeTiles(128, 4, stages=5),
    LinearDecodeTiles(128, 7, stages=12, stages_at_once=3),
    LinearDecodeTiles(64, 2, stages=4, tokens=16),
    LinearDecodeTiles(128, 1, stages=3, stages_at_once=1, tokens=16),
]


@pytest.mark.parametrize("config", DECODE_CONFIGS, ids=str)
def test_every_configuration_of_few_tokens(hopper, config):
    """Tiles and stages that do not divide anything; the input quantised before and by the kernel, to the same bits."""
    for K, rows in ((2048, (320, 128, 512)), (640, (192,)), (1152, (128 * 140, 64)), (1536, (64,))):
        if config.stage_blocks > 1 and K in (640, 1152):
            continue
        weights = [fp8_weight(n, K) for n in rows]
        for M in (1, 3, config.tokens):
            x = awkward(M, K)
            for pow2 in (True, False):
                segments = [Segment(*weight, InputFormat(True, pow2)) for weight in weights]
                with forced(config):
                    given = multi_linear(x, segments, quantize_input(x, pow2))
                    own = given if config.tokens > 8 else multi_linear(x, segments)
                for one, other, expected in zip(given, own, reference.multi_linear(x, segments), strict=True):
                    assert torch.equal(one, other)
                    # products are added with about 14 bits, of which an outlier takes most; raw scales are rounded
                    assert relative(one, expected) <= (3e-3 if pow2 else 4e-3)


@pytest.mark.parametrize(("K", "rows", "most"), [
    (1024, (65536, 192), 16), (1536, (43648, 192), 16), (4096, (16384, 192), 16), (8192, (4096,), 8),
], ids=str)  # fmt: skip
def test_few_tokens_of_large_weights(gpu, K, rows, most):
    """What models launch: NaN stays in its token, one token's result is that of many, fifty launches are alike."""
    segments = [Segment(*fp8_weight(n, K), ROUNDED) for n in rows]
    x = awkward(most, K)
    check(x, segments, quantized=quantize_input(x))
    first = multi_linear(x, segments)
    for M in (most // 2 + 1, *[most] * 50):
        for mine, other in zip(multi_linear(x[:M], segments), first, strict=True):
            assert torch.equal(mine, other[:M])
    x[2, K - 1], x[5, 0] = NAN, float("inf")
    clean = [row for row in range(most) if row not in (2, 5)]
    for out, before in zip(multi_linear(x, segments), first, strict=True):
        assert out[[2, 5]].isnan().all()
        assert torch.equal(out[clean], before[clean])
    whole = torch.full((5, K + 256), NAN, dtype=BF16)
    whole[:, 128:-128] = awkward(5, K)
    check(whole[:, 128:-128], segments)


def test_strided_input(gpu):
    segments = [Segment(*fp8_weight(256, 512), ROUNDED), Segment(torch.randn(64, 512).to(BF16))]
    whole = torch.full((80, 1024), NAN, dtype=BF16)
    for M in (3, 20, 80):
        whole[:M, 256:768] = torch.randn(M, 512)
        check(whole[:M, 256:768], segments)
        whole[:M, 256:768] = NAN
    check(torch.randn(512, 5).to(BF16).T, segments)


def test_zero_rows_and_zero_segments(gpu):
    segments = [Segment(*fp8_weight(256, 512), ROUNDED), Segment(torch.randn(64, 512).to(BF16), out_dtype=F32)]
    outs = check(torch.empty(0, 512, dtype=BF16), segments)
    assert [tuple(out.shape) for out in outs] == [(0, 256), (0, 64)]
    assert multi_linear(torch.randn(3, 512), []) == []
    q, scale, _ = quantize_input(torch.empty(0, 512, dtype=BF16))
    assert (q.shape, scale.shape) == ((0, 512), (0, 4))


@pytest.mark.parametrize("M", [1, 20, 100])
def test_nan_and_infinity_stay_visible(gpu, M):
    x = torch.randn(M, 512).to(BF16)
    x[0, 7], x[M // 2, 300] = NAN, float("inf")
    out, plain = multi_linear(x, [Segment(*fp8_weight(256, 512), ROUNDED), Segment(torch.randn(64, 512).to(BF16))])
    for row in {0, M // 2}:
        assert out[row].isnan().all()
        assert not plain[row].isfinite().any()
    clean = [row for row in range(M) if row not in (0, M // 2)]
    assert out[clean].isfinite().all()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "raw"])
def test_the_quantiser_gives_the_same_bytes(gpu, pow2, dtype):
    for M, K in ((1, 128), (3, 1024), (65, 1536), (129, 384), (513, 7168)):
        x = awkward(M, K, dtype)
        (q, scale, _), (expected, expected_scale, _) = quantize_input(x, pow2), reference.quantize_input(x, pow2)
        assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_quantiser_takes_rows_anywhere(gpu, dtype):
    """Pairs of channels are read as one word, wherever rows begin."""
    whole = torch.randn(20, 771).to(dtype)
    for x in (whole[:, 1:769], whole[:, 2:770], whole[:1, 3:771], whole[::2, :768]):
        (q, scale, _), (expected, expected_scale, _) = quantize_input(x), reference.quantize_input(x)
        assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale, expected_scale)


def test_every_bfloat16_value_is_rounded_alike(gpu):
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(BF16)
    x = x[x.isfinite()].view(-1, 128)
    # neighbours share a scale in the rows; in the columns, values of all magnitudes do
    for rows in (x, x[:384].T.contiguous()):
        (q, scale, _), (expected, expected_scale, _) = quantize_input(rows), reference.quantize_input(rows)
        assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("M", [1, 8, 20, 70, 128, 200])
def test_fifty_launches_are_bit_identical(gpu, M):
    x = torch.randn(M, 4096).to(BF16)
    segments = [Segment(*fp8_weight(n, 4096), ROUNDED) for n in (1024, 512)]
    segments += [Segment(torch.randn(n, 4096).to(BF16), out_dtype=F32) for n in (1024, 64)]
    first = multi_linear(x, segments)
    for _ in range(50):
        for mine, other in zip(multi_linear(x, segments), first, strict=True):
            assert torch.equal(mine, other)


def test_a_row_does_not_depend_on_the_others(gpu):
    most = 64 if torch.cuda.get_device_capability() == (9, 0) else 32
    x = torch.randn(most, 4096).to(BF16)
    segments = [Segment(*fp8_weight(512, 4096), ROUNDED), Segment(torch.randn(256, 4096).to(BF16), out_dtype=F32)]
    whole = multi_linear(x, segments)
    for M in (9, 16, 17, 31, most // 2 + 1):
        for mine, other in zip(multi_linear(x[:M], segments), whole, strict=True):
            assert torch.equal(mine, other[:M])


@pytest.mark.parametrize("M", [1, 20, 200])
def test_replays_of_a_graph(gpu, M):
    x = torch.randn(M, 4096).to(BF16)
    segments = [Segment(*fp8_weight(512, 4096), ROUNDED), Segment(torch.randn(64, 4096).to(BF16), out_dtype=F32)]
    multi_linear(x, segments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = multi_linear(x, segments)
    for _ in range(3):
        x.copy_(torch.randn(M, 4096))
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        for mine, other in zip(outs, reference.multi_linear(x, segments), strict=True):
            assert relative(mine, other) <= LIMIT[mine.dtype]


def test_a_weight_over_two_gib(gpu):
    weight = torch.zeros(600_000, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight.view(torch.uint8)[-128:] = fp8_weight(128, 4096)[0].view(torch.uint8)
    grid = torch.ones(-(-600_000 // 128), 32)
    x = torch.randn(2, 4096).to(BF16)
    got = multi_linear(x, [Segment(weight, grid, ROUNDED)])[0][:, -128:]
    expected = reference.multi_linear(x, [Segment(weight[-128:], torch.ones(1, 32), ROUNDED)])[0]
    assert relative(got, expected) <= LIMIT[BF16]


def test_what_cannot_be_computed_is_refused():
    x, weight, scale = torch.randn(3, 256), *fp8_weight(130, 256)
    with pytest.raises(ValueError, match=r"x must be float32, bfloat16 or float16 \[M, K\]"):
        multi_linear(x.double(), [])
    with pytest.raises(ValueError, match=r"\[N, 256\], got float32 \[130, 128\]"):
        multi_linear(x, [Segment(torch.randn(130, 128))])
    with pytest.raises(ValueError, match=r"scale of weight \[130, 256\] must be contiguous float32 \[2, 2\]"):
        multi_linear(x, [Segment(weight, scale[:1])])
    with pytest.raises(ValueError, match=r"a quantised weight must be .*float8_e4m3fn.*got uint8"):
        multi_linear(x, [Segment(weight.view(torch.uint8), scale)])
    with pytest.raises(ValueError, match="FP8 inputs need a multiple of 128 channels, got 160"):
        multi_linear(torch.randn(3, 160), [Segment(*fp8_weight(10, 160), ROUNDED)])
    with pytest.raises(ValueError, match=r"quantised x must be float8_e4m3fn \[3, 256\]"):
        multi_linear(x, [Segment(weight, scale, ROUNDED)], quantized=QuantizedRows(x, x))
    with pytest.raises(ValueError, match="multiple of 128 channels"):
        quantize_input(torch.randn(3, 200))
