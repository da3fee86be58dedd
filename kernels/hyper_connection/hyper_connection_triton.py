"""Triton device code of `hyper_connection`: a kernel that updates the streams, and one that collapses them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.float32_product import summed


@triton.jit
def post_kernel(
    y_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[t, k] = post[t, k] y[t] + sum over j of comb[t, j, k] streams[t, j]``."""
    t = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < D
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.load(y_ptr + t * D + channel, mask=inside, other=0).to(tl.float32)
    old = ()
    for j in tl.static_range(M):
        old += (tl.load(streams_ptr + (t * M + j) * D + channel, mask=inside, other=0).to(tl.float32),)
    for k in tl.static_range(M):
        new = tl.load(post_ptr + t * M + k) * y
        for j in tl.static_range(M):
            new += tl.load(comb_ptr + (t * M + j) * M + k) * old[j]
        tl.store(out_ptr + (t * M + k) * D + channel, new.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_scale(squares, WIDTH: tl.constexpr, eps):
    return 1 / tl.sqrt_rn(squares / WIDTH + eps)


@triton.jit
def _balance(
    sums_ptr,
    base_ptr,
    scale_ptr,
    post_ptr,
    comb_ptr,
    first,
    T,
    rms_eps,
    hc_eps,
    D: tl.constexpr,
    M: tl.constexpr,
    M_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    INNER: tl.constexpr,
    ITERATIONS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Stores post (a sigmoid) and comb (Sinkhorn's rounds) of ``TOKENS`` tokens from ``first`` on."""
    token = first + tl.arange(0, TOKENS)
    known = token < T
    entry = tl.minimum(token, T - 1).to(tl.int64) * (ROWS + 1)
    rms = _rms_scale(summed(sums_ptr, entry + ROWS, T * (ROWS + 1), SPLITS, INNER), M * D, rms_eps)
    i = tl.arange(0, M_PADDED)
    one = (i < M)[None, :]
    gate = M + tl.minimum(i, M - 1)[None, :]
    mix = summed(sums_ptr, entry[:, None] + gate, T * (ROWS + 1), SPLITS, INNER) * rms[:, None]
    post = 2 / (1 + tl.exp(-(mix * tl.load(scale_ptr + 1) + tl.load(base_ptr + gate))))
    tl.store(post_ptr + token[:, None] * M + i[None, :], post, mask=known[:, None] & one)

    both = ((i < M)[:, None] & (i < M)[None, :])[None, :, :]
    cell = tl.where(both, 2 * M + i[None, :, None] * M + i[None, None, :], 0)
    logits = summed(sums_ptr, entry[:, None, None] + cell, T * (ROWS + 1), SPLITS, INNER) * rms[:, None, None]
    logits = logits * tl.load(scale_ptr + 2) + tl.load(base_ptr + cell)
    logits = tl.where(both, logits, float("-inf"))
    top = tl.max(logits, 2)
    comb = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)[:, :, None])
    comb = tl.where(both, comb / tl.sum(comb, 2)[:, :, None] + hc_eps, 0.0)
    comb = comb / (tl.sum(comb, 1) + hc_eps)[:, None, :]
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, 2) + hc_eps)[:, :, None]
        comb = comb / (tl.sum(comb, 1) + hc_eps)[:, None, :]
    out = comb_ptr + token[:, None, None].to(tl.int64) * (M * M) + i[None, :, None] * M + i[None, None, :]
    tl.store(out, comb, mask=known[:, None, None] & both)


@triton.jit(do_not_specialize=["T"])
def collapse_kernel(
    streams_ptr,
    sums_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    T,
    rms_eps,
    hc_eps,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    M: tl.constexpr,
    M_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    INNER: tl.constexpr,
    ITERATIONS: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs compute post and comb of ``TOKENS`` tokens each, the others collapse one token each.

    ``sums``: split-K partials of the product with ``fn``, then of the sum of squares, ``ROWS + 1`` per token.
    """
    program = tl.program_id(0)
    balancing = tl.num_programs(0) - T
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if program < balancing:
        _balance(
            sums_ptr,
            base_ptr,
            scale_ptr,
            post_ptr,
            comb_ptr,
            program * TOKENS,
            T,
            rms_eps,
            hc_eps,
            D,
            M,
            M_PADDED,
            ROWS,
            SPLITS,
            INNER,
            ITERATIONS,
            TOKENS,
        )
        return
    t = (program - balancing).to(tl.int64)
    channel = tl.arange(0, D_PADDED)
    inside = channel < D
    row = tl.arange(0, ROWS_PADDED)
    sums = summed(sums_ptr, t * (ROWS + 1) + tl.minimum(row, ROWS), T * (ROWS + 1), SPLITS, INNER)
    rms = _rms_scale(tl.sum(tl.where(row == ROWS, sums, 0), 0), M * D, rms_eps)
    logits = sums * rms * tl.load(scale_ptr) + tl.load(base_ptr + row, mask=row < M, other=0)
    pre = 1 / (1 + tl.exp(-logits)) + hc_eps
    x = tl.zeros((D_PADDED,), tl.float32)
    for j in tl.static_range(M):
        stream = tl.load(streams_ptr + (t * M + j) * D + channel, mask=inside, other=0).to(tl.float32)
        x += tl.sum(tl.where(row == j, pre, 0), 0) * stream
    x = x.to(x_ptr.dtype.element_ty)
    if NORM:
        x32 = x.to(tl.float32)
        y = x32 * _rms_scale(tl.sum(x32 * x32, 0), D, rms_eps) * tl.load(norm_ptr + channel, mask=inside, other=0)
        x = y.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + t * D + channel, x, mask=inside)
