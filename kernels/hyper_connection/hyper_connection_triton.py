"""Triton device code of `hyper_connection`: kernels that update the streams, project them and collapse them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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


@triton.jit(do_not_specialize=["T"])
def mix_kernel(
    y_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    new_ptr,
    fn_ptr,
    sums_ptr,
    T,
    D: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    UPDATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums over ``BLOCK`` channels of each stream of the product with ``fn``, then of squares: ``ROWS + 1`` per token.

    For few tokens, ``TOKENS`` of a program: ``fn`` is read before the launch ahead has ended, and multiplied in
    float32 without tensor cores. ``UPDATE``: the streams are updated before, as by `post_kernel`, and written to
    ``new``.
    """
    split = tl.program_id(0)
    channel = split * BLOCK + tl.arange(0, BLOCK)
    inside = channel < D
    row = tl.arange(0, COLUMNS)
    fn = ()
    for k in tl.static_range(M):
        at = fn_ptr + row[:, None] * (M * D) + k * D + channel[None, :]
        fn += (tl.load(at, mask=(row < ROWS)[:, None] & inside[None, :], other=0),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in tl.static_range(TOKENS):
        token = tl.program_id(1) * TOKENS + i
        t = tl.minimum(token, T - 1).to(tl.int64)
        known = inside & (token < T)
        old = ()
        for k in tl.static_range(M):
            old += (tl.load(streams_ptr + (t * M + k) * D + channel, mask=known, other=0),)
        if UPDATE:
            y = tl.load(y_ptr + t * D + channel, mask=known, other=0).to(tl.float32)
        acc = tl.zeros((COLUMNS, BLOCK), tl.float32)
        for k in tl.static_range(M):
            x = old[k]
            if UPDATE:
                new = tl.load(post_ptr + t * M + k) * y
                for j in tl.static_range(M):
                    new += tl.load(comb_ptr + (t * M + j) * M + k) * old[j].to(tl.float32)
                x = new.to(new_ptr.dtype.element_ty)
                tl.store(new_ptr + (t * M + k) * D + channel, x, mask=known)
            x = x.to(tl.float32)[None, :]
            acc += tl.where(row[:, None] == ROWS, x, fn[k]) * x
        sums = sums_ptr + (split * T + t) * (ROWS + 1) + row
        tl.store(sums, tl.sum(acc, 1), mask=(row <= ROWS) & (token < T))


@triton.jit
def _rms_scale(squares, WIDTH: tl.constexpr, eps):
    return 1 / tl.sqrt_rn(squares / WIDTH + eps)


@triton.jit
def _logits(
    sums_ptr,
    t,
    T,
    splits,
    rms_eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """``fn @ rms_norm(streams)`` of token ``t``, ``[COLUMNS]``: the partials of `mix_kernel`, added up."""
    split, column = tl.arange(0, SPLITS_PADDED), tl.arange(0, COLUMNS)
    at = (split.to(tl.int64) * T + t)[:, None] * (ROWS + 1) + column[None, :]
    sums = tl.sum(tl.load(sums_ptr + at, mask=(split < splits)[:, None] & (column <= ROWS)[None, :], other=0), 0)
    return sums * _rms_scale(_entry(sums, ROWS), WIDTH, rms_eps)


@triton.jit
def _entry(vector, index):
    """One entry of a vector, on all threads; up to 32 entries, without a barrier."""
    return tl.sum(tl.where(tl.arange(0, vector.shape[0]) == index, vector, 0), 0)


@triton.jit
def _reciprocal(x):
    """``1 / x`` of a positive float32, to the last bit or the one before: one instruction."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _divided_rows(comb, hc_eps, M: tl.constexpr):
    """A matrix whose rows are divided by their sums plus ``hc_eps``."""
    out = ()
    for i in tl.static_range(M):
        total = comb[i * M]
        for j in tl.static_range(1, M):
            total += comb[i * M + j]
        factor = _reciprocal(total + hc_eps)
        for j in tl.static_range(M):
            out += (comb[i * M + j] * factor,)
    return out


@triton.jit
def _divided_columns(comb, hc_eps, M: tl.constexpr):
    """A matrix whose columns are divided by their sums plus ``hc_eps``."""
    factors = ()
    for j in tl.static_range(M):
        total = comb[j]
        for i in tl.static_range(1, M):
            total += comb[i * M + j]
        factors += (_reciprocal(total + hc_eps),)
    out = ()
    for i in tl.static_range(M):
        for j in tl.static_range(M):
            out += (comb[i * M + j] * factors[j],)
    return out


@triton.jit
def _balance(
    sums_ptr,
    base_ptr,
    scale_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    first,
    T,
    splits,
    rms_eps,
    hc_eps,
    D: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ITERATIONS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Stores post (a sigmoid) and comb (Sinkhorn's rounds) of ``TOKENS`` tokens from ``first`` on; pre if it is given.

    A thread holds whole matrices, so that the rounds wait for arithmetic only, not for other threads.
    """
    # rows of post and comb, then those of pre, which come first in memory
    LAST: tl.constexpr = ROWS if pre_ptr is None else ROWS + M
    scale = (tl.load(scale_ptr + 1), tl.load(scale_ptr + 2))
    base = ()
    for row in tl.static_range(M, ROWS):
        base += (tl.load(base_ptr + row),)
    if pre_ptr is not None:
        scale += (tl.load(scale_ptr),)
        for row in tl.static_range(M):
            base += (tl.load(base_ptr + row),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logits = ()
    if TOKENS == 1:
        t, known = first.to(tl.int64), None
        vector = _logits(sums_ptr, t, T, splits, rms_eps, M * D, ROWS, COLUMNS, SPLITS_PADDED)
        for row in tl.static_range(M, LAST):
            logits += (_entry(vector, row % ROWS),)
    else:
        token = first + tl.arange(0, TOKENS)
        known = token < T
        t = tl.minimum(token, T - 1).to(tl.int64)
        squares = tl.zeros((TOKENS,), tl.float32)
        # a constant number of rounds, so that the loads of all splits and rows are on their way together
        for split in tl.static_range(SPLITS_PADDED):
            squares += tl.load(sums_ptr + (split * T + t) * (ROWS + 1) + ROWS, mask=split < splits, other=0)
        rms = _rms_scale(squares, M * D, rms_eps)
        for row in tl.static_range(M, LAST):
            total = tl.zeros((TOKENS,), tl.float32)
            for split in tl.static_range(SPLITS_PADDED):
                total += tl.load(sums_ptr + (split * T + t) * (ROWS + 1) + row % ROWS, mask=split < splits, other=0)
            logits += (total * rms,)
    if pre_ptr is not None:
        for k in tl.static_range(M):
            gate = 1 / (1 + tl.exp(-(logits[ROWS - M + k] * scale[2] + base[ROWS - M + k]))) + hc_eps
            tl.store(pre_ptr + t * M + k, gate, mask=known)
    for k in tl.static_range(M):
        tl.store(post_ptr + t * M + k, 2 / (1 + tl.exp(-(logits[k] * scale[0] + base[k]))), mask=known)
    comb = ()
    for i in tl.static_range(M):
        row = ()
        for j in tl.static_range(M):
            row += (logits[M + i * M + j] * scale[1] + base[M + i * M + j],)
        top = row[0]
        for j in tl.static_range(1, M):
            top = tl.maximum(top, row[j])
        total = 0.0
        weights = ()
        for j in tl.static_range(M):
            weight = tl.exp(row[j] - top)
            weights += (weight,)
            total += weight
        for j in tl.static_range(M):
            comb += (weights[j] / total + hc_eps,)
    comb = _divided_columns(comb, hc_eps, M)
    for _ in range(ITERATIONS - 1):
        comb = _divided_columns(_divided_rows(comb, hc_eps, M), hc_eps, M)
    for cell in tl.static_range(M * M):
        tl.store(comb_ptr + t * (M * M) + cell, comb[cell], mask=known)


@triton.jit(do_not_specialize=["T", "splits"])
def collapse_kernel(
    streams_ptr,
    weights_ptr,
    sums_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    x_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    T,
    splits,
    rms_eps,
    hc_eps,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ITERATIONS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs compute post and comb of ``TOKENS`` tokens each, the others collapse one token each.

    Streams are weighted by pre, or by ``weights [T, M]`` if these are given; ``pre_ptr``: where to store pre, or None.
    Without ``ITERATIONS`` there are only programs that collapse; given weights, they need no ``sums``, base and scale.

    ``sums``: ``splits`` partials of `mix_kernel`, or of a `float32_product`: no constant, which would make a kernel for
    every number of them. Parameters are read before the launch ahead is over.
    """
    program = tl.program_id(0)
    balancing = tl.num_programs(0) - T
    if ITERATIONS > 0:  # noqa: SIM102 - one is a constant, the other a branch
        if program < balancing:
            _balance(
                sums_ptr,
                base_ptr,
                scale_ptr,
                pre_ptr,
                post_ptr,
                comb_ptr,
                program * TOKENS,
                T,
                splits,
                rms_eps,
                hc_eps,
                D,
                M,
                ROWS,
                COLUMNS,
                SPLITS_PADDED,
                ITERATIONS,
                TOKENS,
                PDL,
            )
            return
    t = (program - balancing).to(tl.int64)
    channel = tl.arange(0, D_PADDED)
    inside = channel < D
    if weights_ptr is None:
        column = tl.arange(0, COLUMNS)
        base, scale = tl.load(base_ptr + column, mask=column < M, other=0), tl.load(scale_ptr)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + channel, mask=inside, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.zeros((D_PADDED,), tl.float32)
    if weights_ptr is None:
        streams = ()
        for j in tl.static_range(M):
            streams += (tl.load(streams_ptr + (t * M + j) * D + channel, mask=inside, other=0),)
        logits = _logits(sums_ptr, t, T, splits, rms_eps, M * D, ROWS, COLUMNS, SPLITS_PADDED)
        pre = 1 / (1 + tl.exp(-(logits * scale + base))) + hc_eps
        for j in tl.static_range(M):
            x += _entry(pre, j) * streams[j].to(tl.float32)
    else:
        for j in tl.static_range(M):
            stream = tl.load(streams_ptr + (t * M + j) * D + channel, mask=inside, other=0)
            x += tl.load(weights_ptr + t * M + j) * stream.to(tl.float32)
    x = x.to(x_ptr.dtype.element_ty)
    if norm_ptr is not None:
        x32 = x.to(tl.float32)
        y = x32 * _rms_scale(tl.sum(x32 * x32, 0), D, rms_eps) * weight
        x = y.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + t * D + channel, x, mask=inside)
