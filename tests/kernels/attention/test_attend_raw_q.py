"""Attention from projected heads to the FP8 input of the output projection: against plain torch, and against its parts.

On a GPU with every configuration; in Triton's interpreter in float32, which it multiplies correctly.
"""

import pytest
import torch

from deepseek_attn.kernels.attention import attend_raw_q, reference
from deepseek_attn.kernels.common import device
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.raw_queries import RawQueries
from tests.kernels.attention.sparse_attention_cases import (
    INF,
    NAN,
    TINY,
    V4,
    Launch,
    forced,
    make_pool,
    relative,
    skip_unless_it_runs,
)
from tests.support.typed import required

EPS = 1e-6
POSITIONS = 700


def case(T, H, record=V4, dtype=torch.bfloat16, widths=(128, 90), norm=True, pages=99):
    """Heads of two magnitudes at positions of every part of the table, pools with holes, and sinks."""
    q = (torch.randn(T, H, record.dim) * torch.logspace(-2, 2, H)[:, None]).flatten(1).to(dtype)
    angles = torch.rand(POSITIONS, record.rope_dim // 2) * 6.3
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], 1), torch.randint(POSITIONS, (T,))
    positions[0], positions[-1] = POSITIONS - 1, 0
    heads = RawQueries(q, H, EPS, cos_sin, positions, H, norm=norm)
    pools = [make_pool(record, T, K, n, pages) for K, n in zip(widths, (64, 2), strict=False)]
    return heads, pools, record.dim**-0.5, torch.randn(H) * 2


def dequantized(rows: QuantizedRows):
    """Float32 ``[T, channels]``."""
    values = rows.values.float().transpose(0, 1).flatten(1)
    return (values.unflatten(1, (-1, 128)) * rows.scale.unsqueeze(2)).flatten(1)


def check(got, expected, limit):
    assert got.values.shape == expected.values.shape
    assert got.scale.shape == expected.scale.shape
    assert got.pow2_scales == expected.pow2_scales
    assert relative(dequantized(got), dequantized(expected)) <= limit  # false for NaN


def same(got, expected):
    return torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8)) and torch.equal(
        got.scale, expected.scale
    )


# plain torch


def test_the_reference_is_its_parts():
    """Norm, RoPE, attention, inverse RoPE, quantisation: written out for one token and head."""
    heads, pools, scale, sink = case(3, 4, TINY, torch.float32, (5, 9))
    rows = attend_raw_q(heads, pools, scale, sink, 2, None)
    assert rows.values.shape == (2, 3, 2 * TINY.dim)
    t, h, nope = 1, 3, TINY.nope_dim
    x = heads.q.view(3, 4, -1)[t, h].double()
    x = x / (x.square().mean() + EPS).sqrt()
    cos, sin = heads.cos_sin[heads.positions[t]].double().chunk(2)
    pairs = torch.view_as_complex(x[nope:].view(-1, 2).contiguous()) * torch.complex(cos, sin)
    q = torch.cat([x[:nope], torch.view_as_real(pairs).flatten()])
    keys = []
    for pool in pools:
        slots = pool.indices[t, : required(pool.lens)[t]].long()
        slots = slots[(slots >= 0) & (slots < len(pool.pool) * pool.entries)]
        keys.append(pool.record.gather(pool.pool, pool.entries, slots, torch.float32).double())
    keys = torch.cat(keys)
    power = (keys @ q * scale).exp()
    o = (power @ keys) / (power.sum() + sink[h].double().exp())
    back = torch.view_as_complex(o[nope:].view(-1, 2).contiguous()) * torch.complex(cos, -sin)
    o = torch.cat([o[:nope], torch.view_as_real(back).flatten()])
    size = rows.scale[t, h]
    assert torch.equal(size.log2(), size.log2().round())
    assert o.abs().max() <= 448 * size < 2.01 * o.abs().max()
    found = rows.values[h // 2, t, h % 2 * TINY.dim :][: TINY.dim].double() * size
    assert relative(found, o) < 0.04  # of e4m3


# the kernels


def op(heads, pools, scale, sink, groups, config=None, q=None):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.attention.launch import attend_raw_q

    with forced(config):
        return attend_raw_q(heads, pools, scale, sink, groups, q)


def configs():
    from tests.kernels.attention.test_sparse_attention_triton import CONFIGS

    return CONFIGS


@pytest.mark.triton
@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize(("record", "H", "groups", "norm"), [
    (V4, 6, 2, True), (TINY, 5, 1, False), (type(V4)(320, 64), 4, 4, True),
], ids=str)  # fmt: skip
def test_in_float32(device, record, H, groups, norm, splits):
    with device:
        inputs = case(3, H, record, torch.float32, (9, 40), norm)
        expected = reference.attend_raw_q(*inputs, groups, None)
        got = op(*inputs, groups, Launch(16, 16, 4, 1, 64 if splits == 3 else 128, splits))
        check(got, expected, 4e-3)  # a value between two of e4m3 may become the other one


@pytest.mark.parametrize("at", range(10))
def test_every_configuration(gpu, at):
    config = configs()[at]
    skip_unless_it_runs(config)
    for T, H, groups in ((21, 100, 4), (1, 64, 8), (5, 128, 16)):
        arguments = case(T, H, widths=(128, 700))
        expected = reference.attend_raw_q(*arguments, groups, None)
        first = op(*arguments, groups, config=config)
        check(first, expected, 1.2e-2)
        assert all(same(op(*arguments, groups, config=config), first) for _ in range(5))


@pytest.mark.parametrize("K", [None, 1, 64, 192, 513, 1024])
@pytest.mark.parametrize("H", [8, 64, 128])
def test_what_is_chosen(gpu, H, K):
    from deepseek_attn.kernels.insert import query_norm_rope

    for T in (1, 2, 9, 33, 70):
        arguments = case(T, H, widths=(128,) if K is None else (128, K))
        expected = reference.attend_raw_q(*arguments, 8, None)
        check(op(*arguments, 8), expected, 1.2e-2)
        check(op(*arguments, 8, q=query_norm_rope(arguments[0])), expected, 1.2e-2)


@pytest.mark.parametrize("at", range(10))
def test_roundings_are_those_of_the_parts(gpu, at):
    """But for what a compiler adds in one instruction here and in two there; without the norm, whose sums differ."""
    from deepseek_attn.kernels.attention.launch import sparse_attention_paged
    from deepseek_attn.kernels.common.plans import RowsProblem
    from deepseek_attn.kernels.insert import query_norm_rope
    from deepseek_attn.kernels.linear.launch import Rope, quantize_rows
    from deepseek_attn.kernels.linear.plan import QUANTIZERS

    config = configs()[at]
    skip_unless_it_runs(config)
    heads, pools, scale, sink = case(23, 24, norm=False, widths=(128, 300))
    heads = heads._replace(q=(heads.q.float() / 30).bfloat16())
    q = query_norm_rope(heads)
    with forced(config):
        out, _ = sparse_attention_paged(q, pools, scale, sink)
    rows, rope = out.flatten(1), Rope(heads.positions, heads.cos_sin, 512)
    quantizer = QUANTIZERS.plan(RowsProblem(len(rows), rows.shape[1]), device.gpu(rows.device))
    expected = quantize_rows(quantizer, rows, True, 3, rope)
    for got in (op(heads, pools, scale, sink, 3, config), op(heads, pools, scale, sink, 3, config, q)):
        # the portable kernel leaves one split to the second launch as well, and rounds its partials
        limit = 3e-3 if config.splits > 1 or config.hopper else 5e-2
        assert (got.values.view(torch.uint8) != expected.values.view(torch.uint8)).float().mean() < limit
        check(got, expected, 1.2e-2)
        assert (got.scale != expected.scale).float().mean() < 2e-3


@pytest.mark.parametrize("at", [1, 7, 8])
def test_positions_outside_the_table_are_not_rotated(gpu, at):
    """Padding tokens of a captured graph may have any position."""
    config = configs()[at]
    skip_unless_it_runs(config)
    heads, pools, scale, sink = case(9, 64)
    heads.positions[2:5] = torch.tensor([-1, POSITIONS, 2**40])
    still = heads._replace(cos_sin=torch.cat([torch.ones(POSITIONS, 32), torch.zeros(POSITIONS, 32)], 1))
    still.positions[2:5] = 0
    expected = dequantized(reference.attend_raw_q(still, pools, scale, sink, 8, None))[2:5]
    heads.positions[2:5] = torch.tensor([-1, POSITIONS, 2**40])
    assert relative(dequantized(op(heads, pools, scale, sink, 8, config=config))[2:5], expected) <= 1.2e-2


@pytest.mark.parametrize("at", range(10))
def test_nan_stays_where_it_is(gpu, at):
    """NaN in a query without keys is not seen; in a query with keys, all of its heads' groups are NaN."""
    config = configs()[at]
    skip_unless_it_runs(config)
    heads, pools, scale, sink = case(13, 64, widths=(128, 63))
    for keys in pools:
        required(keys.lens)[[2, 7]] = 0
    expected = reference.attend_raw_q(heads, pools, scale, sink, 8, None)
    heads.q[[2, 7]] = NAN
    heads.q[12, 5 * 512] = INF  # all of its keys are live
    got = op(heads, pools, scale, sink, 8, config=config)
    assert dequantized(got)[[2, 7]].eq(0).all()
    wrong = dequantized(got)[12].unflatten(0, (64, 512)).isnan()
    assert wrong[5].all()
    assert not wrong[[h for h in range(64) if h != 5]].any()
    others = [t for t in range(13) if t not in (2, 7, 12)]
    assert relative(dequantized(got)[others], dequantized(expected)[others]) <= 1.2e-2


def test_replayed(gpu):
    """A captured graph serves other queries, positions and lengths; rows and columns of strided projections."""
    heads, pools, scale, sink = case(33, 64, widths=(128, 300))
    wide = torch.full((33, 64 * 512 + 64), NAN).bfloat16()
    wide[:, 32:-32] = heads.q
    heads = heads._replace(q=wide[:, 32:-32])
    op(heads, pools, scale, sink, 8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(heads, pools, scale, sink, 8)
    most = required(pools[1].lens).clone()
    for _ in range(3):
        heads.q.normal_()
        heads.positions.copy_(torch.randint(POSITIONS, (33,)))
        required(pools[1].lens).copy_(torch.minimum(most, torch.randint(301, (33,))))
        graph.replay()
        check(got, reference.attend_raw_q(heads, pools, scale, sink, 8, None), 1.2e-2)
        first = QuantizedRows(got.values.clone(), got.scale.clone())
        for _ in range(50):
            graph.replay()
            assert same(got, first)


def test_no_tokens(gpu):
    heads, pools, scale, sink = case(2, 8)
    none = heads._replace(q=heads.q[:0], positions=heads.positions[:0])
    pools = [keys._replace(indices=keys.indices[:0], lens=required(keys.lens)[:0]) for keys in pools]
    assert op(none, pools, scale, sink, 4).values.shape == (4, 0, 1024)


def test_errors(gpu):
    heads, pools, scale, sink = case(2, 8)
    with pytest.raises(ValueError, match=r"3 groups .* groups of equal size"):
        op(heads, pools, scale, sink, 3)
    with pytest.raises(ValueError, match="padded to 16"):
        op(heads._replace(padded_heads=16), pools, scale, sink, 4)
    with pytest.raises(ValueError, match="32 of them rotated"):
        op(heads._replace(cos_sin=heads.cos_sin[:, :32].contiguous()), pools, scale, sink, 4)
    with pytest.raises(ValueError, match="contiguous rows"):
        op(heads._replace(q=heads.q.t().contiguous().t()), pools, scale, sink, 4)
    with pytest.raises(ValueError, match=r"q must be bfloat16 \[2, 8, 512\]"):
        op(heads, pools, scale, sink, 4, q=torch.zeros(2, 8, 256).bfloat16())
    with pytest.raises(ValueError, match="queries need keys"):
        op(heads, [keys._replace(indices=keys.indices[:, :0]) for keys in pools], scale, sink, 4)
