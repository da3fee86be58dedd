"""Triton device code of hyper-connections: kernels that update streams, multiply them with ``fn`` and collapse them.

```
hc_post_kernel            new streams                                          every token, blocks of channels
hc_mix_kernel             new streams, partial sums of the product             few tokens
float32_product_kernel    partial sums of the product                          many tokens
hc_collapse_kernel        first programs: sums -> post, comb (Sinkhorn)        others: sums -> pre -> x, normed
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class StreamUpdate(NamedTuple):
    """Streams, and the sublayer's output that updates them; all contiguous.

    Attributes:
        y: ``[T, D]``, or None to leave the streams as they are; post, comb and new are then None too.
        streams, new: ``[T, M, D]``, before and after the update.
        post, comb: float32 ``[T, M]`` and ``[T, M, M]``.
    """

    y: Any
    streams: Any
    post: Any
    comb: Any
    new: Any


class CollapseArguments(NamedTuple):
    """Runtime arguments of `hc_collapse_kernel`; all contiguous.

    Attributes:
        streams: ``[T, M, D]``.
        weights: float32 ``[T, M]`` that collapse the streams; None: collapse with ``pre``, computed from ``sums``.
        sums: float32 ``[splits, T, ROWS + 1]``, partial sums of the product and of squares.
        base, scale: of the `HyperConnection`; norm: float32 ``[D]`` or None.
        x: ``[T, D]``; pre, post, comb: results, float32 ``[T, M]``, ``[T, M]`` and ``[T, M, M]``; ``pre`` is not stored
            if None.
        rms_eps, hc_eps: of the `HyperConnection`.
    """

    streams: Any
    weights: Any
    sums: Any
    base: Any
    scale: Any
    norm: Any
    x: Any
    pre: Any
    post: Any
    comb: Any
    rms_eps: Any
    hc_eps: Any


@dataclass(frozen=True)
class CollapseConfig:
    """Constants of `hc_collapse_kernel`.

    Attributes:
        D, M: channels of a stream, and streams; ROWS: of ``fn``.
        SPLITS_PADDED: a power of two, at least the number of partial sums.
        ITERATIONS: Sinkhorn rounds; 0: no post and comb.
        TOKENS: of a program that computes post and comb.
    """

    D: int
    M: int
    ROWS: int
    SPLITS_PADDED: int
    ITERATIONS: int
    TOKENS: int


@triton.jit
def _updated_stream(update, t, y, old, k: tl.constexpr, M: tl.constexpr):
    """``post[t, k] y + sum over j of comb[t, j, k] old[j]``, float32."""
    new = tl.load(update.post + t * M + k) * y
    for j in tl.static_range(M):
        new += tl.load(update.comb + (t * M + j) * M + k) * old[j].to(tl.float32)
    return new


@triton.jit
def hc_post_kernel(update, D: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program ``(t, block)``: updates ``BLOCK`` channels of the streams of token ``t``."""
    t = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < D
    if PDL:
        gdc_wait()  # until the sublayer has written y
        gdc_launch_dependents()
    y = tl.load(update.y + t * D + channel, mask=inside, other=0).to(tl.float32)
    # every new stream is a sum of all old ones: they are read once and kept in registers
    old = ()
    for j in tl.static_range(M):
        old += (tl.load(update.streams + (t * M + j) * D + channel, mask=inside, other=0).to(tl.float32),)
    for k in tl.static_range(M):
        new = _updated_stream(update, t, y, old, k, M)
        tl.store(update.new + (t * M + k) * D + channel, new.to(update.new.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def hc_mix_kernel(
    update, fn_ptr, sums_ptr, T, D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(split, tokens)``: sums over its channels of the product with ``fn``, and of squares.

    For few tokens: ``fn`` is read before the previous kernel has ended, and multiplied in float32 without tensor
    cores. With ``update.y`` the streams are updated first, and written to ``update.new``.

    Args:
        D, M: channels of a stream, and streams; ROWS: of ``fn``; TILES: `MixTiles`.
    """
    COLUMNS: tl.constexpr = triton.next_power_of_2(ROWS + 1)
    TOKENS: tl.constexpr = TILES.tokens
    BLOCK: tl.constexpr = TILES.channels
    split = tl.program_id(0)
    channel = split * BLOCK + tl.arange(0, BLOCK)
    inside = channel < D
    row = tl.arange(0, COLUMNS)
    # weights first: no kernel of a step writes them
    fn = ()
    for k in tl.static_range(M):
        at = fn_ptr + row[:, None] * (M * D) + k * D + channel[None, :]
        fn += (tl.load(at, mask=(row < ROWS)[:, None] & inside[None, :], other=0),)
    if PDL:
        gdc_wait()  # until streams and y have been written
        gdc_launch_dependents()
    for i in tl.static_range(TOKENS):
        token = tl.program_id(1) * TOKENS + i
        t = tl.minimum(token, T - 1).to(tl.int64)
        known = inside & (token < T)
        old = ()
        for k in tl.static_range(M):
            old += (tl.load(update.streams + (t * M + k) * D + channel, mask=known, other=0),)
        if update.y is not None:
            y = tl.load(update.y + t * D + channel, mask=known, other=0).to(tl.float32)
        acc = tl.zeros((COLUMNS, BLOCK), tl.float32)
        for k in tl.static_range(M):
            x = old[k]
            if update.y is not None:
                # rounded as it is stored: the product is of the stream that the next sublayer reads
                x = _updated_stream(update, t, y, old, k, M).to(update.new.dtype.element_ty)
                tl.store(update.new + (t * M + k) * D + channel, x, mask=known)
            x = x.to(tl.float32)[None, :]
            acc += tl.where(row[:, None] == ROWS, x, fn[k]) * x  # row ROWS: x times itself
        sums = sums_ptr + (split * T + t) * (ROWS + 1) + row
        tl.store(sums, tl.sum(acc, 1), mask=(row <= ROWS) & (token < T))


@triton.jit
def _rms_scale(squares, WIDTH: tl.constexpr, eps):
    return 1 / tl.sqrt_rn(squares / WIDTH + eps)


@triton.jit
def _logits(args, t, T, splits, CONFIG: tl.constexpr):
    """``fn @ rms_norm(streams)`` of token ``t``, padded to a power of two: the partial sums, added up and scaled."""
    COLUMNS: tl.constexpr = triton.next_power_of_2(CONFIG.ROWS + 1)
    split, column = tl.arange(0, CONFIG.SPLITS_PADDED), tl.arange(0, COLUMNS)
    at = (split.to(tl.int64) * T + t)[:, None] * (CONFIG.ROWS + 1) + column[None, :]
    inside = (split < splits)[:, None] & (column <= CONFIG.ROWS)[None, :]
    sums = tl.sum(tl.load(args.sums + at, mask=inside, other=0), 0)
    return sums * _rms_scale(_entry(sums, CONFIG.ROWS), CONFIG.M * CONFIG.D, args.rms_eps)


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
def _balance(args, first, T, splits, CONFIG: tl.constexpr, PDL: tl.constexpr):
    """Stores post (a sigmoid), comb (Sinkhorn's rounds) and, if given, pre of ``TOKENS`` tokens from ``first`` on.

    A thread holds whole matrices, so that the rounds wait for arithmetic only, not for other threads.
    """
    M: tl.constexpr = CONFIG.M
    TOKENS: tl.constexpr = CONFIG.TOKENS
    ROWS: tl.constexpr = CONFIG.ROWS
    # logits of post and comb, then of pre; in memory pre comes first
    LAST: tl.constexpr = ROWS if args.pre is None else ROWS + M
    # weights first: no kernel of a step writes them
    scale = (tl.load(args.scale + 1), tl.load(args.scale + 2))
    base = ()
    for row in tl.static_range(M, ROWS):
        base += (tl.load(args.base + row),)
    if args.pre is not None:
        scale += (tl.load(args.scale),)
        for row in tl.static_range(M):
            base += (tl.load(args.base + row),)
    if PDL:
        gdc_wait()  # until the partial sums have been written
        gdc_launch_dependents()
    logits = ()
    if CONFIG.TOKENS == 1:
        # one token: the threads share the partial sums, then each takes every logit
        t, known = first.to(tl.int64), None
        vector = _logits(args, t, T, splits, CONFIG)
        for row in tl.static_range(M, LAST):
            logits += (_entry(vector, row % ROWS),)
    else:
        # a token per thread, which adds up its own partial sums
        token = first + tl.arange(0, TOKENS)
        known = token < T
        t = tl.minimum(token, T - 1).to(tl.int64)
        sums = ()
        for _ in tl.static_range(M, LAST):
            sums += (tl.zeros((TOKENS,), tl.float32),)
        squares = tl.zeros((TOKENS,), tl.float32)
        # Load all rows of one split, then add them. Loading all splits first is no faster, but compiles in 8 s instead
        # of 1.5: Triton's layout pass visits every operation once for each of the 200 loads.
        for split in range(splits):
            at = args.sums + (split * T + t) * (ROWS + 1)
            squares += tl.load(at + ROWS)
            more = ()
            for row in tl.static_range(M, LAST):
                more += (sums[row - M] + tl.load(at + row % ROWS),)
            sums = more
        rms = _rms_scale(squares, M * CONFIG.D, args.rms_eps)
        for row in tl.static_range(LAST - M):
            logits += (sums[row] * rms,)
    if args.pre is not None:
        for k in tl.static_range(M):
            gate = 1 / (1 + tl.exp(-(logits[ROWS - M + k] * scale[2] + base[ROWS - M + k]))) + args.hc_eps
            tl.store(args.pre + t * M + k, gate, mask=known)
    for k in tl.static_range(M):
        tl.store(args.post + t * M + k, 2 / (1 + tl.exp(-(logits[k] * scale[0] + base[k]))), mask=known)
    # softmax of each row of the M x M logits
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
            comb += (weights[j] / total + args.hc_eps,)
    # Sinkhorn: the softmax has divided the rows, so the first round is of columns alone
    comb = _divided_columns(comb, args.hc_eps, M)
    for _ in range(CONFIG.ITERATIONS - 1):
        comb = _divided_columns(_divided_rows(comb, args.hc_eps, M), args.hc_eps, M)
    for cell in tl.static_range(M * M):
        tl.store(args.comb + t * (M * M) + cell, comb[cell], mask=known)


@triton.jit(do_not_specialize=["T", "splits"])
def hc_collapse_kernel(args, T, splits, CONFIG: tl.constexpr, PDL: tl.constexpr):
    """The first programs compute post and comb of ``TOKENS`` tokens each, all other programs collapse one token each.

    Without ``ITERATIONS`` all programs collapse; given ``weights``, they need no sums, base and scale. ``splits``, the
    number of partial sums, is not a constant, because a constant would make a kernel for every number.
    """
    D: tl.constexpr = CONFIG.D
    D_PADDED: tl.constexpr = triton.next_power_of_2(D)
    M: tl.constexpr = CONFIG.M
    program = tl.program_id(0)
    balancing = tl.num_programs(0) - T
    # these programs take the longest, and so they come first
    if CONFIG.ITERATIONS > 0:  # noqa: SIM102 - first a constexpr, then a runtime branch
        if program < balancing:
            _balance(args, program * CONFIG.TOKENS, T, splits, CONFIG, PDL)
            return
    t = (program - balancing).to(tl.int64)
    channel = tl.arange(0, D_PADDED)
    inside = channel < D
    # weights first: no kernel of a step writes them
    if args.weights is None:
        COLUMNS: tl.constexpr = triton.next_power_of_2(CONFIG.ROWS + 1)
        column = tl.arange(0, COLUMNS)
        base, scale = tl.load(args.base + column, mask=column < M, other=0), tl.load(args.scale)
    if args.norm is not None:
        weight = tl.load(args.norm + channel, mask=inside, other=0)
    if PDL:
        gdc_wait()  # until streams and partial sums have been written
        gdc_launch_dependents()
    x = tl.zeros((D_PADDED,), tl.float32)
    if args.weights is None:
        # streams are on their way while the partial sums are added up to pre
        streams = ()
        for j in tl.static_range(M):
            streams += (tl.load(args.streams + (t * M + j) * D + channel, mask=inside, other=0),)
        logits = _logits(args, t, T, splits, CONFIG)
        pre = 1 / (1 + tl.exp(-(logits * scale + base))) + args.hc_eps
        for j in tl.static_range(M):
            x += _entry(pre, j) * streams[j].to(tl.float32)
    else:
        for j in tl.static_range(M):
            stream = tl.load(args.streams + (t * M + j) * D + channel, mask=inside, other=0)
            x += tl.load(args.weights + t * M + j) * stream.to(tl.float32)
    x = x.to(args.x.dtype.element_ty)
    if args.norm is not None:
        # of the rounded x, as a norm in a launch of its own would read it
        x32 = x.to(tl.float32)
        y = x32 * _rms_scale(tl.sum(x32 * x32, 0), D, args.rms_eps) * weight
        x = y.to(args.x.dtype.element_ty)
    tl.store(args.x + t * D + channel, x, mask=inside)
