"""Projections into and out of the latent space: torch reference against float64, Triton kernels against it."""

import itertools
import math

import pytest
import torch

from deepseek_attn.kernels.common.device import gpu
from deepseek_attn.kernels.common.quant import quantize_fp8
from deepseek_attn.kernels.latent import LatentQueries, LatentWeight, reference
from deepseek_attn.kernels.latent.plan import LatentProblem, plan_absorb
from tests.support.tiers import tiered
from tests.support.typed import required

NAN = float("nan")
POSITIONS = 70
# heads, channels without rotation, rotated ones, latent ones, padded heads
SHAPES = {
    "V3.2": (4, 128, 64, 512, 7),
    "odd": (3, 20, 6, 40, 5),
    "alone": (1, 128, 64, 512, 1),
    "wide": (2, 192, 32, 96, 2),
}
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.triton)])
def ops(request, device):
    """The ops of the implementation under test."""
    if request.param == "torch":
        return reference
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.latent import launch

    return launch


@pytest.fixture
def dequantize(ops, device):
    """`dequantize_weight` of the implementation under test."""
    if ops is reference:
        return reference.dequantize_weight
    problem = LatentProblem(4096, 128, dtype=torch.bfloat16, fp8_weight=True, quantize=False)
    plan = plan_absorb(problem, gpu(device))
    return lambda weight, dtype: ops.dequantize_weight(weight, dtype, plan)


def halves(shape, dtype, device, v=None):
    """Plain ``W_UK [heads, nope, rank]`` and ``W_UV [heads, v, rank]``, views of one weight as in a checkpoint."""
    heads, nope, _, rank, _ = SHAPES[shape]
    both = (torch.randn(heads, nope + (v or nope), rank, device=device) * rank**-0.5).to(dtype)
    return LatentWeight(both[:, :nope]), LatentWeight(both[:, nope:])


def make_queries(shape, dtype, device, T=9):
    heads, nope, rope, _, padded = SHAPES[shape]
    wide = torch.randn(T, heads * (nope + rope) + 16, device=device).to(dtype)
    angles = torch.rand(POSITIONS, rope // 2, device=device) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(POSITIONS, (T,), device=device)
    return LatentQueries(wide[:, :-16], halves(shape, dtype, device)[0], table, positions, padded)


def expected_queries(queries):
    """Float64, head by head and pair by pair."""
    q, table, positions = (x.double().cpu() for x in (queries.q, queries.cos_sin, queries.positions))
    weight, padded = reference.dequantize_weight(queries.weight, queries.q.dtype).double().cpu(), queries.padded_heads
    (heads, nope, rank), rope = weight.shape, table.shape[1]
    out = torch.zeros(len(q), padded, rank + rope, dtype=torch.float64)
    for t in range(len(q)):
        cos, sin = table[int(positions[t])].chunk(2)
        for h in range(heads):
            head = q[t, h * (nope + rope) : (h + 1) * (nope + rope)]
            out[t, h, :rank] = (head[:nope, None] * weight[h]).sum(0)
            a, b = head[nope::2], head[nope + 1 :: 2]
            out[t, h, rank::2], out[t, h, rank + 1 :: 2] = a * cos - b * sin, a * sin + b * cos
    return out


def close(got, expected):
    """Relative to the size of a head: sums of products of rounded factors differ in their last place."""
    size = expected.abs().amax(-1, keepdim=True)
    assert got.isfinite().all()
    assert ((got.double().cpu() - expected).abs() <= LIMIT[got.dtype] * size).all()


QUICK = [(shape, dtype, 9) for shape in SHAPES for dtype in DTYPES]
QUICK += [("V3.2", torch.bfloat16, 33), ("odd", torch.float16, 1), ("alone", torch.float32, 130)]


@pytest.mark.parametrize(("shape", "dtype", "T"), tiered(itertools.product(SHAPES, DTYPES, [1, 9, 33, 130]), QUICK))
def test_queries(ops, device, shape, dtype, T):
    queries = make_queries(shape, dtype, device, T)
    got = ops.absorb_queries(queries)
    assert (got.shape, got.dtype) == (
        (T, queries.padded_heads, queries.weight.rows.shape[2] + queries.cos_sin.shape[1]),
        dtype,
    )
    close(got, expected_queries(queries))
    assert got[:, queries.weight.rows.shape[0] :].eq(0).all()


@pytest.mark.parametrize("T", [5, 130])
def test_any_strides_of_the_weights(ops, device, T):
    """The layout of `MLAAbsorption`, ``[rank, heads, channels]``, gives what the checkpoint's gives."""
    queries = make_queries("V3.2", torch.float16, device, T)
    other = queries.weight.rows.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    close(ops.absorb_queries(queries._replace(weight=LatentWeight(other))), ops.absorb_queries(queries).double().cpu())
    latents, weight = torch.randn(T, 4, 512, device=device).half(), halves("V3.2", torch.float16, device)[1]
    other = weight.rows.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    values = ops.project_values(latents, weight).values
    close(ops.project_values(latents, LatentWeight(other)).values, values.double().cpu())


def test_no_rank_is_left_out(ops, device):
    """A single weight reaches a single output."""
    queries = make_queries("odd", torch.float16, device, T=2)
    for nope, latent in ((0, 39), (19, 0)):
        weight = torch.zeros_like(queries.weight.rows)
        weight[1, nope, latent] = 2
        got = ops.absorb_queries(queries._replace(weight=LatentWeight(weight)))[..., :40]
        expected = torch.zeros_like(got)
        expected[:, 1, latent] = 2 * queries.q[:, 26 + nope]
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("shape", "dtype", "T"), tiered(itertools.product(SHAPES, DTYPES, [1, 9, 33, 130]), QUICK))
def test_values(ops, device, shape, dtype, T):
    heads, _, _, rank, padded = SHAPES[shape]
    latents = torch.full((T, padded, rank), NAN, device=device).to(dtype)
    latents[:, :heads] = torch.randn(T, heads, rank, device=device).to(dtype)
    weight = halves(shape, dtype, device, v=48)[1]
    got = ops.project_values(latents, weight).values
    assert (got.shape, got.dtype) == ((T, heads * 48), dtype)
    expected = (latents[:, :heads, None].double() * weight.rows.double()).sum(-1)
    close(got.unflatten(1, (heads, 48)), expected.cpu())


@pytest.mark.parametrize(
    ("dtype", "T", "pow2"),
    tiered(
        itertools.product([torch.bfloat16, torch.float16], [1, 9, 60, 130], [True, False]),
        [(torch.bfloat16, 1, True), (torch.float16, 9, False), (torch.bfloat16, 60, True), (torch.float16, 130, False)],
    ),
)
def test_values_are_also_quantised(ops, device, dtype, T, pow2):
    latents = (torch.randn(T, 5, 512, device=device) * torch.logspace(-3, 2, T, device=device)[:, None, None]).to(dtype)
    latents[0, 1] = 0
    weight = halves("V3.2", dtype, device, v=128)[1]
    weight = LatentWeight(weight.rows[:3])
    values, quantized = ops.project_values(latents, weight, pow2)
    close(values.unflatten(1, (3, 128)), (latents[:, :3, None].double() * weight.rows.double()).sum(-1).cpu())
    if quantized is None:
        assert ops is reference or T > 64
        return
    codes, scale = quantize_fp8(values, 128, pow2=pow2)
    assert quantized.pow2_scales == pow2
    assert quantized.scale.stride(0) == 1 or T == 1
    assert torch.equal(quantized.values.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(quantized.scale, scale)


def test_values_that_are_not_finite_stay_visible(ops, device):
    latents, weight = torch.randn(7, 5, 512, device=device).half(), halves("V3.2", torch.float16, device, v=128)[1]
    weight = LatentWeight(weight.rows[:3])
    latents[2, 2, 100], latents[4, 0, 7], latents[5, 3] = NAN, float("inf"), NAN
    values, quantized = ops.project_values(latents, weight, True)
    values = values.unflatten(1, (3, 128))
    hurt = torch.zeros(7, 3, dtype=torch.bool, device=device)
    hurt[2, 2] = hurt[4, 0] = True
    assert torch.equal(~values.isfinite().all(-1), hurt)
    if quantized is not None:
        decoded = quantized.values.float().unflatten(1, (3, 128)) * quantized.scale.unsqueeze(-1)
        assert torch.equal(decoded.isnan().all(-1), hurt)


def test_tokens_do_not_depend_on_the_batch(ops, device):
    """Within the tokens that one launch computes in one way."""
    queries, latents = make_queries("V3.2", torch.float16, device, T=8), torch.randn(8, 4, 512, device=device).half()
    weight = halves("V3.2", torch.float16, device)[1]
    rows, values = ops.absorb_queries(queries), ops.project_values(latents, weight).values
    for t in range(8):
        row = slice(t, t + 1)
        alone = queries._replace(q=queries.q[row], positions=queries.positions[row])
        close(ops.absorb_queries(alone), rows[row].double().cpu())
        close(ops.project_values(latents[row], weight).values, values[row].double().cpu())


def test_no_tokens(ops, device):
    queries = make_queries("V3.2", torch.bfloat16, device, T=0)
    assert ops.absorb_queries(queries).shape == (0, 7, 576)
    weight = halves("V3.2", torch.bfloat16, device)[1]
    assert ops.project_values(torch.empty(0, 4, 512, device=device).bfloat16(), weight).values.shape == (0, 512)
    values, _ = ops.project_values(torch.empty(0, 4, 512, device=device).bfloat16(), weight, True)
    assert values.shape == (0, 512)


def test_refuses():
    queries = make_queries("odd", torch.bfloat16, "cpu")
    wrong = {
        "weight must be .heads, nope, rank. in the dtype of q": {"weight": LatentWeight(queries.weight.rows.float())},
        "q must be float32, bfloat16 or float16 .T, 78.": {"q": queries.q[:, :-1]},
        "padded_heads >= 3": {"padded_heads": 2},
        "positions must be .9.": {"positions": queries.positions[:8]},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            reference.absorb_queries(queries._replace(**change))
    latents, weight = torch.zeros(2, 3, 40), LatentWeight(torch.zeros(3, 8, 40))
    for message, arguments in {
        "weight must be .heads, v_head_dim, rank.": (latents, LatentWeight(weight.rows.half())),
        "latents must have at least 3 heads": (latents[:, :2], weight),
        "with contiguous rows": (latents.transpose(1, 2).contiguous().transpose(1, 2), weight),
    }.items():
        with pytest.raises(ValueError, match=message):
            reference.project_values(*arguments)


# --- FP8 weights with block scales ---

# heads, channels without rotation, rotated ones, latent ones, padded heads, value channels
FP8_SHAPES = {
    "V3.2": (3, 128, 64, 512, 5, 128),
    "two blocks": (2, 256, 32, 128, 2, 256),
    "alone": (1, 128, 8, 256, 4, 384),
}


def fp8_halves(shape, device, scales=(-6, 3)):
    """Every e4m3 number but NaN, under scales over many binades that are no powers of two, apart in one tensor."""
    heads, nope, _, rank, _, v = FP8_SHAPES[shape]
    codes = torch.randint(0, 256, (heads, nope + v, rank), dtype=torch.uint8)
    codes[codes % 128 == 127] = 0
    rows = codes.to(device).view(torch.float8_e4m3fn)
    grid = (heads, (nope + v) // 128, rank // 128)
    scale = (torch.rand(grid) + 0.5) * torch.logspace(*scales, steps=math.prod(grid)).view(grid)
    scale = scale.to(device)
    return LatentWeight(rows[:, :nope], scale[:, : nope // 128]), LatentWeight(rows[:, nope:], scale[:, nope // 128 :])


def by_hand(weight, dtype):
    """The plain weight, block by block."""
    rows, scale = weight.rows.float(), weight.scale
    out = torch.full_like(rows, NAN)
    for h, i, j in itertools.product(*map(range, scale.shape)):
        block = h, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        out[block] = rows[block] * scale[h, i, j]
    return LatentWeight(out.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", FP8_SHAPES)
def test_fp8_weights_stand_for_plain_ones(dequantize, device, shape, dtype):
    for weight in fp8_halves(shape, device, (-6, 1)):
        assert torch.equal(dequantize(weight, dtype), by_hand(weight, dtype).rows)


FP8_CASES = list(itertools.product(FP8_SHAPES, [torch.bfloat16, torch.float16], [1, 9, 40, 70, 130]))
FP8_MAIN = [("V3.2", torch.bfloat16, 1), ("V3.2", torch.float16, 70), ("V3.2", torch.bfloat16, 130),
            ("two blocks", torch.bfloat16, 9), ("alone", torch.float16, 40)]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype", "T"), tiered(FP8_CASES, FP8_MAIN))
def test_fp8_weights_give_what_plain_ones_give(ops, device, shape, dtype, T):
    """Against float64 sums over the plain weights."""
    heads, nope, rope, rank, padded, v = FP8_SHAPES[shape]
    keys, values = fp8_halves(shape, device, (-4, -3))
    angles = torch.rand(POSITIONS, rope // 2, device=device) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(POSITIONS, (T,), device=device)
    q = torch.randn(T, heads * (nope + rope), device=device).to(dtype)
    queries = LatentQueries(q, keys, table, positions, padded)
    got = ops.absorb_queries(queries)
    close(got, expected_queries(queries._replace(weight=by_hand(keys, dtype))))
    assert got[:, heads:].eq(0).all()
    latents = torch.full((T, padded, rank), NAN, device=device).to(dtype)
    latents[:, :heads] = torch.randn(T, heads, rank, device=device).to(dtype)
    expected = (latents[:, :heads, None].double() * by_hand(values, dtype).rows.double()).sum(-1).cpu()
    close(ops.project_values(latents, values).values.unflatten(1, (heads, v)), expected)
    projected, quantized = ops.project_values(latents, values, True)
    close(projected.unflatten(1, (heads, v)), expected)
    if quantized is not None:
        codes, scale = quantize_fp8(projected, 128)
        assert torch.equal(quantized.values.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(quantized.scale, scale)


def test_a_nan_of_an_fp8_weight_stays_visible(ops, device):
    values = fp8_halves("V3.2", device, (-4, -3))[1]
    values.rows.view(torch.uint8)[1, 70, 300] = 0x7F
    required(values.scale)[2, 0, 1] = NAN
    out = ops.project_values(torch.ones(3, 3, 512, device=device).bfloat16(), values).values.unflatten(1, (3, 128))
    hurt = torch.zeros(3, 3, 128, dtype=torch.bool, device=device)
    hurt[:, 1, 70] = hurt[:, 2] = True
    assert torch.equal(out.isnan(), hurt)


def test_refuses_fp8_weights_with_other_blocks():
    weight = fp8_halves("V3.2", "cpu")[1]
    latents = torch.zeros(2, 3, 512)
    for wrong in (
        weight._replace(scale=required(weight.scale)[:, :, :3]),
        weight._replace(scale=required(weight.scale).double()),
        weight._replace(rows=weight.rows.view(torch.uint8)),
        LatentWeight(weight.rows[:, :100], weight.scale),
    ):
        with pytest.raises(ValueError, match="an FP8 weight is float8_e4m3fn with rows and rank multiples of 128"):
            reference.project_values(latents, wrong)
    with pytest.raises(ValueError, match=r"weight must be .heads, v_head_dim, rank."):
        reference.project_values(latents, LatentWeight(weight.rows))
