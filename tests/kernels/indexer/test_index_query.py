"""Indexer queries: the torch reference against its parts, the Triton kernel against the reference."""

import os

import pytest
import torch

from deepseek_attn.kernels.common.norm_rope import apply_rope, freqs_cis_at
from deepseek_attn.kernels.common.quant import fake_quant_fp8, hadamard
from deepseek_attn.kernels.indexer import IndexQueryRows, index_scores, reference
from tests.support.rounded import fake_quant_fp4

NAN, INF = float("nan"), float("inf")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FORMATS = ["plain", "fp8", "fp4"]


def make(T, H, dtype, device="cpu", rope=64):
    angles = torch.rand(50, rope // 2, device=device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    q = torch.randn(T, H * 128, device=device).to(dtype)
    return q, torch.randn(T, H, device=device), cos_sin, torch.randint(50, (T,), device=device)


def values(q, factor):
    """float32 queries times the scale that their weight holds: dequantised."""
    return q.float() * factor[..., None]


def in_order(q, fmt):
    """Channels of queries in their own order: for FP4 keys the even ones come first."""
    return torch.stack(q.chunk(2, -1), -1).flatten(-2) if fmt == "fp4" else q


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotate", [False, True], ids=["", "hadamard"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_reference_is_rope_hadamard_and_rounding(fmt, rotate, dtype):
    q, weights, cos_sin, positions = make(5, 3, dtype)
    got, factor, _ = reference.index_query(IndexQueryRows(q, weights, cos_sin, positions, 0.25, fmt, rotate))
    plain = apply_rope(q.view(5, 3, 128), freqs_cis_at(cos_sin, positions))
    plain = hadamard(plain) if rotate else plain
    expected = {"plain": plain, "fp8": fake_quant_fp8(plain, 128), "fp4": fake_quant_fp4(plain)}[fmt]
    assert got.dtype == (dtype if fmt == "plain" else torch.float8_e4m3fn)
    assert torch.equal(values(in_order(got, fmt), factor / (weights * 0.25)), expected.float())


def test_half_split_pairs_are_of_the_first_channels():
    q, weights, cos_sin, positions = make(4, 2, torch.float32)
    got, *_ = reference.index_query(IndexQueryRows(q, weights, cos_sin, positions, 1.0, "plain", half_split=True))
    order = torch.stack([torch.arange(32), torch.arange(32) + 32], 1).flatten()
    shuffled = torch.cat([q.view(4, 2, 128)[..., 64:], q.view(4, 2, 128)[..., order]], -1)
    expected = apply_rope(shuffled, freqs_cis_at(cos_sin, positions))
    torch.testing.assert_close(got[..., 64:], expected[..., :64])
    torch.testing.assert_close(got[..., order], expected[..., 64:])


def test_scores_of_rounded_queries_need_no_scale_of_theirs():
    q, weights, cos_sin, positions = make(4, 3, torch.bfloat16)
    keys = torch.randn(20, 128)
    plain, factor, _ = reference.index_query(IndexQueryRows(q, weights, cos_sin, positions, 0.1, "plain"))
    for fmt, rounded in (("fp8", fake_quant_fp8(plain, 128)), ("fp4", fake_quant_fp4(plain))):
        quantized = reference.index_query(IndexQueryRows(q, weights, cos_sin, positions, 0.1, fmt))
        got = index_scores(in_order(quantized.q, fmt), keys, quantized.weights)
        torch.testing.assert_close(got, index_scores(rounded.float(), keys, factor), rtol=1e-5, atol=1e-4)


def test_fp4_scales_far_apart_are_exact():
    q, weights, cos_sin, positions = make(1, 1, torch.float32)
    cos_sin[:] = torch.cat([torch.ones(32), torch.zeros(32)])
    q = q * 2.0 ** torch.tensor([0, -12, 1, -3]).repeat_interleave(32)
    got, factor, _ = reference.index_query(IndexQueryRows(q, weights, cos_sin, positions, 1.0, "fp4"))
    assert torch.equal(values(in_order(got, "fp4"), factor / weights), fake_quant_fp4(q.view(1, 1, 128)))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_a_head_with_a_nan_or_an_infinity_does_not_pass_unseen(fmt, bad):
    q, weights, cos_sin, positions = make(3, 2, torch.float32)
    q[1, 5] = bad
    got, factor, _ = reference.index_query(IndexQueryRows(q, weights, cos_sin, positions, 1.0, fmt))
    bad_heads = (got.float().isnan().any(-1) | factor.isnan()).tolist()
    assert bad_heads == [[False, False], [True, False], [False, False]]


# --- the kernel: on a GPU with DEEPSEEK_ATTN_TEST_DEVICE=cuda, in float32 also by TRITON_INTERPRET=1 ---


@pytest.fixture
def kernel(triton_device):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.indexer.launch import index_query

    return index_query


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("half_split", [False, True], ids=["", "half_split"])
@pytest.mark.parametrize("rotate", [False, True], ids=["", "hadamard"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_kernel(kernel, device, fmt, rotate, half_split, dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter rounds to bfloat16 towards zero")
    for T, H in ((1, 64), (9, 20), (70, 64)) if device.type == "cuda" else ((3, 5),):
        rows = IndexQueryRows(*make(T, H, dtype, device), 0.125, fmt, rotate, half_split)
        (q, weights, _), (expected, expected_weights, _) = kernel(rows), reference.index_query(rows)
        assert q.dtype == expected.dtype
        # torch may round the products of a rotation once more: then a few values lie on the other side of a bound
        if INTERPRETED or fmt != "plain" or dtype != torch.float32:
            same = (q.float() == expected.float()).float().mean()
            assert same == 1 if INTERPRETED else same > 0.995
        else:
            torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values(q, weights), values(expected, expected_weights), rtol=0.3, atol=0.02)
        known = weights == expected_weights
        assert known.all() if INTERPRETED else known.float().mean() > 0.99


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_kernel_shows_a_nan_and_an_infinity(kernel, device, fmt, bad):
    q, weights, cos_sin, positions = make(3, 2, torch.float32, device)
    q[1, 5] = bad
    _, factor, _ = kernel(IndexQueryRows(q, weights, cos_sin, positions, 1.0, fmt))
    assert factor.isnan().tolist() == [[False, False], [True, False], [False, False]]


def test_kernel_takes_strided_rows_and_padding_past_the_table(kernel, device):
    q, weights, cos_sin, positions = make(4, 2, torch.float32, device)
    expected = kernel(IndexQueryRows(q, weights, cos_sin, positions, 1.0, "fp8"))
    whole, wide = torch.full((4, 300), NAN, device=device), torch.full((4, 9), NAN, device=device)
    whole[:, 3:259], wide[:, 1:3] = q, weights
    positions[3] = 10**6
    got = kernel(IndexQueryRows(whole[:, 3:259], wide[:, 1:3], cos_sin, positions, 1.0, "fp8"))
    assert torch.equal(got.q.view(torch.uint8)[:3], expected.q.view(torch.uint8)[:3])
    assert torch.equal(got.weights[:3], expected.weights[:3])


def test_kernel_takes_no_rows(kernel, device):
    q, weights, _ = kernel(IndexQueryRows(*make(0, 2, torch.float32, device), 1.0, "fp4"))
    assert (q.shape, weights.shape) == ((0, 2, 128), (0, 2))


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("weights must be", {"weights": torch.zeros(3, 2, dtype=torch.int32)}),
        ("q must be", {"q": torch.zeros(2, 256)}),
        ("q of 255 channels for 2 heads", {"q": torch.zeros(3, 255)}),
        ("q of 100 channels for 2 heads, of which 64 rotate", {"q": torch.zeros(3, 100)}),
        ("positions must be", {"positions": torch.zeros(2, dtype=torch.int64)}),
        ("cos_sin must be contiguous float32", {"cos_sin": torch.zeros(9, 64, dtype=torch.bfloat16)}),
        ("index keys are plain, fp8, fp4, got 'fp6'", {"key_format": "fp6"}),
    ],
    ids=str,
)
def test_refuses(words, change):
    rows = IndexQueryRows(*make(3, 2, torch.float32), 1.0, "fp8")
    with pytest.raises(ValueError, match=words):
        reference.index_query(rows._replace(**change))


def test_kernel_refuses_what_it_cannot_take(kernel, device):
    rows = IndexQueryRows(*make(3, 2, torch.float32, device), 1.0, "fp8")
    for words, change in {
        "q must be": {"q": rows.q[:2]},
        "q of 255 channels": {"q": rows.q[:, :255]},
        "index keys are": {"key_format": "fp6"},
        "positions must be": {"positions": rows.positions[:2]},
        "q must be float32, bfloat16 or float16": {"q": rows.q.int()},
    }.items():
        with pytest.raises(ValueError, match=words):
            kernel(rows._replace(**change))


@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("fmt", FORMATS)
def test_with_the_heads_of_the_layer_in_one_launch(kernel, device, fmt, T):
    """Equal to the bit to what either op returns alone; padding heads are zero."""
    from deepseek_attn.kernels.indexer.launch import queries
    from deepseek_attn.kernels.insert import RawQueries
    from deepseek_attn.kernels.insert.launch import query_norm_rope

    if INTERPRETED and T > 5:
        pytest.skip("slow in the interpreter")
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    q, weights, cos_sin, positions = make(T, 20, dtype, device)
    heads = RawQueries(torch.randn(T, 7 * 512, device=device).to(dtype), 7, 1e-6, cos_sin, positions, 9)
    index = IndexQueryRows(q, weights, cos_sin, positions, 0.25, fmt)
    got, index_queries = queries(heads, index)
    assert torch.equal(got, query_norm_rope(heads))
    assert got[:, 7:].eq(0).all()
    expected = kernel(index)
    assert torch.equal(index_queries.q.view(torch.uint8), expected.q.view(torch.uint8))
    assert torch.equal(index_queries.weights, expected.weights)
    with pytest.raises(ValueError, match=f"queries of {T} tokens, and of 0 for the indexer"):
        queries(heads, index._replace(q=q[:0], weights=weights[:0], positions=positions[:0]))


@pytest.mark.parametrize("T", [0, 1, 9, 70, 130])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize(
    "triton", [pytest.param(False, id="torch"), pytest.param(True, id="triton", marks=pytest.mark.triton)]
)
def test_with_the_latent_queries_of_the_layer(request, device, triton, fp8, T):
    """Few tokens in one launch, many in several: equal to the bit to what either op returns alone."""
    from deepseek_attn.kernels.latent import LatentQueries, LatentWeight, reference as latent

    op, absorb, index_query = reference.latent_queries, latent.absorb_queries, reference.index_query
    if triton:
        index_query = request.getfixturevalue("kernel")
        from deepseek_attn.kernels.indexer.launch import latent_queries as op
        from deepseek_attn.kernels.latent.launch import absorb_queries as absorb
    q, weights, cos_sin, positions = make(T, 20, torch.float16, device)
    heads = torch.randn(T, 3 * 192, device=device).half()
    weight = LatentWeight(torch.randn(3, 128, 96, device=device).half())
    if fp8:
        rows = torch.randn(3, 128, 256, device=device).to(torch.float8_e4m3fn)
        weight = LatentWeight(rows, torch.rand(3, 1, 2, device=device))
    queries = LatentQueries(heads, weight, cos_sin, positions, 5)
    index = IndexQueryRows(q, weights, cos_sin, positions, 0.25, "fp8", half_split=True)
    got, index_queries = op(queries, index)
    assert torch.equal(got, absorb(queries))
    assert got[:, 3:].eq(0).all()
    expected = index_query(index)
    assert torch.equal(index_queries.q.view(torch.uint8), expected.q.view(torch.uint8))
    assert torch.equal(index_queries.weights, expected.weights)
    other = index._replace(q=q.new_zeros(T + 1, 2560), weights=weights.new_zeros(T + 1, 20))
    with pytest.raises(ValueError, match=f"queries of {T} tokens, and of {T + 1} for the indexer"):
        op(queries, other._replace(positions=positions.new_zeros(T + 1)))
