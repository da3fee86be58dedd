"""Hyper-connections against a scalar float64 transcription of the formulas."""

import math
from typing import Any

import pytest
import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.kernels.hyper_connection import HyperConnection
from deepseek_attn.kernels.hyper_connection.reference import sinkhorn
from deepseek_attn.models.hyper_connection import hc_head, hc_post, hc_pre
from tests.support.typed import of_type

TINY = ModelConfig.from_preset("tiny")


def config(**changes):
    return TINY.replace(rms_norm_eps=1e-3, hc_eps=1e-2, **changes)


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def scalar_mix(streams, fn, eps):
    """Rows of ``fn`` times the flattened streams of one token, over their root mean square."""
    flat = [v for stream in streams for v in stream]
    rms = math.sqrt(sum(v * v for v in flat) / len(flat) + eps)
    return [sum(w * v for w, v in zip(row, flat, strict=True)) / rms for row in fn]


def scalar_sinkhorn(logits, rounds, eps):
    """``C[j][k]``: softmax over k, plus eps; columns (sums over j); then rows and columns ``rounds`` - 1 times."""
    m = len(logits)
    C = []
    for row in logits:
        top = max(row)
        exps = [math.exp(v - top) for v in row]
        C.append([e / sum(exps) + eps for e in exps])

    def columns(C):
        sums = [sum(C[j][k] for j in range(m)) + eps for k in range(m)]
        return [[C[j][k] / sums[k] for k in range(m)] for j in range(m)]

    C = columns(C)
    for _ in range(rounds - 1):
        sums = [sum(row) + eps for row in C]
        C = columns([[v / sums[j] for v in C[j]] for j in range(m)])
    return C


def scalar_pre(streams, fn, base, scale, cfg):
    m = cfg.hc_mult
    mix = scalar_mix(streams, fn, cfg.rms_norm_eps)
    pre = [sigmoid(mix[i] * scale[0] + base[i]) + cfg.hc_eps for i in range(m)]
    post = [2 * sigmoid(mix[m + i] * scale[1] + base[m + i]) for i in range(m)]
    logits = [[mix[2 * m + j * m + k] * scale[2] + base[2 * m + j * m + k] for k in range(m)] for j in range(m)]
    x = [sum(pre[j] * streams[j][d] for j in range(m)) for d in range(len(streams[0]))]
    return x, post, scalar_sinkhorn(logits, cfg.hc_sinkhorn_iters, cfg.hc_eps)


def weights(cfg, width, rows=None):
    """Sizeable random ``fn``, ``base`` and ``scale``: no part of the formula is close to neutral."""
    rows = (2 + cfg.hc_mult) * cfg.hc_mult if rows is None else rows
    return torch.randn(rows, cfg.hc_mult * width) * 0.3, torch.randn(rows), torch.rand(3) + 0.5


def connection(cfg, fn, base, scale):
    return HyperConnection(fn, base, scale, cfg.rms_norm_eps, cfg.hc_eps, cfg.hc_sinkhorn_iters)


def close(actual, expected, dtype=torch.float32):
    tolerance: dict[str, Any] = (
        {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-6}
    )
    torch.testing.assert_close(actual.cpu().double(), torch.tensor(expected, dtype=torch.float64), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "rounds"), [(4, 20), (4, 1), (3, 2), (1, 20), (2, 7)], ids=str)
def test_pre(m, rounds, dtype, device):
    cfg = config(hc_mult=m, hc_sinkhorn_iters=rounds)
    fn, base, scale = weights(cfg, 10)
    streams = torch.randn(5, m, 10).to(dtype)
    x, post, comb = hc_pre(streams.to(device), connection(cfg, *(part.to(device) for part in (fn, base, scale))))
    assert (x.dtype, post.dtype, comb.dtype) == (dtype, torch.float32, torch.float32)
    for t in range(5):
        expected = scalar_pre(streams[t].tolist(), fn.tolist(), base.tolist(), scale.tolist(), cfg)
        close(x[t], expected[0], dtype)
        close(post[t], expected[1])
        close(comb[t], expected[2])


def test_published_iterations():
    """20 in the config: one column round, then 19 row and column rounds. One round more or less shows."""
    logits = torch.randn(3, 4, 4) * 4
    out = sinkhorn(logits, 20, 1e-6)
    for t in range(3):
        close(out[t], scalar_sinkhorn(logits[t].tolist(), 20, 1e-6))
    assert of_type(ModelConfig.from_preset("v4_flash"), ModelConfig).hc_sinkhorn_iters == 20
    few = sinkhorn(logits, 3, 1e-2)
    for t in range(3):
        close(few[t], scalar_sinkhorn(logits[t].tolist(), 3, 1e-2))
    assert (few - sinkhorn(logits, 4, 1e-2)).abs().max() > 1e-4


def test_sinkhorn_ends_with_columns():
    """Columns sum to 1 within eps; rows only nearly."""
    out = sinkhorn(torch.randn(20, 4, 4) * 5, 2, 1e-6)
    torch.testing.assert_close(out.sum(-2), torch.ones(20, 4), rtol=0, atol=1e-5)
    assert (out.sum(-1) - 1).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_post_sums_over_the_first_index(dtype):
    y, streams = torch.randn(6, 9).to(dtype), torch.randn(6, 4, 9).to(dtype)
    post, comb = torch.randn(6, 4), torch.randn(6, 4, 4)
    out = hc_post(y, streams, post, comb)
    assert out.dtype == dtype
    for t in range(6):
        expected = [
            [
                post[t, k].item() * y[t, d].item()
                + sum(comb[t, j, k].item() * streams[t, j, d].item() for j in range(4))
                for d in range(9)
            ]
            for k in range(4)
        ]
        close(out[t], expected, dtype)


def test_head():
    cfg = config(hc_mult=3)
    fn, base, _ = weights(cfg, 7, rows=3)
    scale, streams = torch.tensor([0.7]), torch.randn(4, 3, 7)
    out = hc_head(streams, connection(cfg, fn, base, scale))
    for t in range(4):
        mix = scalar_mix(streams[t].tolist(), fn.tolist(), cfg.rms_norm_eps)
        pre = [sigmoid(v * scale.item() + b) + cfg.hc_eps for v, b in zip(mix, base.tolist(), strict=True)]
        close(out[t], [sum(pre[j] * streams[t, j, d].item() for j in range(3)) for d in range(7)])


def test_zero_streams_are_finite():
    cfg = config()
    fn, base, scale = weights(cfg, 8)
    x, post, comb = hc_pre(torch.zeros(2, 4, 8), connection(cfg, fn, base, scale))
    assert x.eq(0).all()
    assert post.isfinite().all()
    assert comb.isfinite().all()
    close(post[0], [2 * sigmoid(v) for v in base[4:8].tolist()])


def test_a_token_does_not_depend_on_the_others():
    cfg = config()
    hc = connection(cfg, *weights(cfg, 64))
    streams = torch.randn(7, 4, 64)
    x, post, comb = hc_pre(streams, hc)
    changed = streams.clone()
    changed[:3] = torch.randn(3, 4, 64) * 100
    for before, after in zip((x, post, comb), hc_pre(changed, hc), strict=True):
        assert torch.equal(before[3:], after[3:])


def test_no_tokens():
    cfg = config()
    x, post, comb = hc_pre(torch.empty(0, 4, 8), connection(cfg, *weights(cfg, 8)))
    assert (x.shape, post.shape, comb.shape) == ((0, 8), (0, 4), (0, 4, 4))
    assert hc_post(x, torch.empty(0, 4, 8), post, comb).shape == (0, 4, 8)
