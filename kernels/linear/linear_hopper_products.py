"""Gluon device functions of `linear_hopper`: how a warpgroup multiplies and stores its part of a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepseek_attn.kernels.common.fp8_hopper import fp8_scales, to_fp8
from deepseek_attn.kernels.common.gluon import barrier, reinterpret
from deepseek_attn.kernels.linear.linear_hopper_weights import PLAIN_LAYOUT
from deepseek_attn.kernels.linear.problem import LinearHopperTiles, WeightTiles

_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@dataclass(frozen=True)
class LinearHopperTiling:
    """Constants of a launch. Triton 3.6 accepts a field in a list only when it is bound to a constexpr name.

    Attributes:
        K: channels of the input.
        CONFIG: `LinearHopperTiles`.
        GROUPS: groups of channels with scales in a block of 128, one or four; a weight's rows are grouped alike.
        FP8, PLAIN: tiles of the weights of either kind.
        DTYPE: of plain weights and their input.
        POW2: scales of the quantised output are powers of two.
        REGISTERS: of a thread of the second warpgroup.
    """

    K: int
    CONFIG: LinearHopperTiles
    GROUPS: int
    FP8: WeightTiles
    PLAIN: WeightTiles
    DTYPE: gl.dtype
    POW2: bool
    REGISTERS: int

    @property
    def SCALES(self) -> int:
        """Input scales of a group of channels in a stage; TMA writes at multiples of 128 bytes."""
        return max(self.CONFIG.tokens, 32)

    @property
    def ROW_STEP(self) -> int:
        """Rows from one warpgroup's part to the next; 0 if both have all rows."""
        return self.CONFIG.warpgroup_rows % self.CONFIG.rows

    @property
    def TOKEN_STEP(self) -> int:
        """Tokens from one warpgroup's part to the next; 0 if both have all tokens."""
        return self.CONFIG.warpgroup_tokens % self.CONFIG.tokens


class LinearBuffers(NamedTuple):
    """Shared memory by stage: blocks of weight and input, barriers of full and empty stages; input scales by group."""

    weight: Any
    x: Any
    scales: Any
    full: Any
    empty: Any


class TilePart(NamedTuple):
    """The part of a tile that a warpgroup multiplies.

    Attributes:
        row, token: first of the part; last_row: of its weight, or of its group; num_tokens: of the input.
        number: of the part; split: which split-K partial of it.
    """

    row: Any
    last_row: Any
    token: Any
    num_tokens: Any
    number: Any
    split: Any


class HopperMemory(NamedTuple):
    """Pointers to the results of a launch other than its outputs.

    Attributes:
        quantized, quantized_scale: the output in FP8 ``[M, N]`` and its scales ``[N / 128, M]``, or None.
        partials, plain_partials: float32 split-K partials of tiles of FP8 and of plain weights, or None.
        counters: int32, of the partials of a tile that have arrived.
    """

    quantized: Any
    quantized_scale: Any
    partials: Any
    plain_partials: Any
    counters: Any


class QuantizedOutput(NamedTuple):
    """FP8 output ``q``, its scales ``[N / 128, M]`` and their row stride; ``q`` is None without an FP8 output."""

    q: Any
    scale: Any
    scale_stride: Any


@gluon.jit
def _await(buffers, n, TILING: gl.constexpr):
    """Waits until block ``n`` is in shared memory: barrier phases alternate from one use of a stage to the next."""
    mbarrier.wait(
        buffers.full.index(n % TILING.CONFIG.stages), n // TILING.CONFIG.stages & 1
    )  # for the bytes that TMA writes


@gluon.jit
def _start(buffers, n, WARPGROUP: gl.constexpr, TILING: gl.constexpr, HALF: gl.constexpr, zeros):
    """Starts the product of 64 rows of block ``n``, into a fresh accumulator."""
    ROW: gl.constexpr = WARPGROUP * TILING.ROW_STEP + 64 * HALF
    TOKEN: gl.constexpr = WARPGROUP * TILING.TOKEN_STEP
    TOKENS: gl.constexpr = TILING.CONFIG.warpgroup_tokens
    x = buffers.x.index(n % TILING.CONFIG.stages).slice(TOKEN, TOKENS).permute((1, 0))
    w = buffers.weight.index(n % TILING.CONFIG.stages).slice(ROW, 64)
    return warpgroup_mma(w, x, zeros, use_acc=False, is_async=True)


@gluon.jit
def _token_scales(buffers, n, group, LAYOUT: gl.constexpr, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """The tokens' scales of a group of channels of block ``n``."""
    SCALES: gl.constexpr = TILING.SCALES
    TOKEN: gl.constexpr = WARPGROUP * TILING.TOKEN_STEP
    scales = buffers.scales.index(n % TILING.CONFIG.stages * TILING.GROUPS + group)
    return reinterpret(scales, gl.float32, [SCALES], _FLAT).slice(TOKEN, TILING.CONFIG.warpgroup_tokens).load(LAYOUT)


@gluon.jit
def _release(buffers, n, TILING: gl.constexpr):
    """Gives the stage of block ``n`` back to the warp that loads.

    A barrier alone does not wait for loads from shared memory. Other launches on the multiprocessor can delay those of
    the tokens' scales until TMA has overwritten them.
    """
    fence_async_shared()  # this thread's loads have ended: what TMA writes later is not read
    barrier()  # all four warps have multiplied
    mbarrier.arrive(buffers.empty.index(n % TILING.CONFIG.stages))


@gluon.jit
def sum_scaled(buffers, n, first, end, scale_row, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """Sum of the scaled products of FP8 blocks ``first`` to ``end``: a tuple of accumulators of 64 rows.

    Products come in pairs (two blocks, or two halves): the second runs while the first is added. ptxas overlaps them
    only within an iteration of the loop; across iterations it would wait for each product separately.
    """
    TOKENS: gl.constexpr = TILING.CONFIG.warpgroup_tokens
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    zeros = gl.zeros([64, TOKENS], gl.float32, layout=MMA)
    acc = zeros
    if TILING.CONFIG.warpgroup_rows == 64:
        for block in range(first, end - 1, 2):
            scale = gl.load(scale_row + block)
            next_scale = gl.load(scale_row + block + 1)
            _await(buffers, n, TILING)
            _await(buffers, n + 1, TILING)
            a = _start(buffers, n, WARPGROUP, TILING, 0, zeros)
            b = _start(buffers, n + 1, WARPGROUP, TILING, 0, zeros)
            a = warpgroup_mma_wait(1, deps=[a])  # the first product has ended, the second runs on
            acc += a * (_token_scales(buffers, n, 0, COLUMN, WARPGROUP, TILING) * scale)[None, :]
            b = warpgroup_mma_wait(0, deps=[b])
            acc += b * (_token_scales(buffers, n + 1, 0, COLUMN, WARPGROUP, TILING) * next_scale)[None, :]
            _release(buffers, n, TILING)
            mbarrier.arrive(buffers.empty.index((n + 1) % TILING.CONFIG.stages))  # the barrier above holds for both
            n += 2
        if (end - first) % 2 == 1:
            scale = gl.load(scale_row + end - 1)
            _await(buffers, n, TILING)
            a = _start(buffers, n, WARPGROUP, TILING, 0, zeros)
            a = warpgroup_mma_wait(0, deps=[a])
            acc += a * (_token_scales(buffers, n, 0, COLUMN, WARPGROUP, TILING) * scale)[None, :]
            _release(buffers, n, TILING)
        return (acc,)
    else:
        low = zeros
        next_scale = gl.load(scale_row + first)  # a block ahead, so that no product waits for it
        for block in range(first, end):
            scale = next_scale
            next_scale = gl.load(scale_row + gl.minimum(block + 1, end - 1))
            _await(buffers, n, TILING)
            a = _start(buffers, n, WARPGROUP, TILING, 0, zeros)
            b = _start(buffers, n, WARPGROUP, TILING, 1, zeros)
            # both halves of the rows have these scales, which are read while the products run
            factors = (_token_scales(buffers, n, 0, COLUMN, WARPGROUP, TILING) * scale)[None, :]
            a = warpgroup_mma_wait(1, deps=[a])
            acc += a * factors
            b = warpgroup_mma_wait(0, deps=[b])
            low += b * factors
            _release(buffers, n, TILING)
            n += 1
        return acc, low


@gluon.jit
def _start_group(buffers, n, step, WARPGROUP: gl.constexpr, TILING: gl.constexpr, zeros):
    """Starts a product of 64 rows and 32 channels of block ``n``: all rows of a group of channels come first."""
    PARTS: gl.constexpr = TILING.CONFIG.warpgroup_rows // 64
    ROW: gl.constexpr = WARPGROUP * TILING.ROW_STEP + step % PARTS * 64
    TOKEN: gl.constexpr = WARPGROUP * TILING.TOKEN_STEP
    CHANNEL: gl.constexpr = step // PARTS * 32
    x = buffers.x.index(n % TILING.CONFIG.stages).slice(TOKEN, TILING.CONFIG.warpgroup_tokens).slice(CHANNEL, 32, dim=1)
    w = buffers.weight.index(n % TILING.CONFIG.stages).slice(ROW, 64).slice(CHANNEL, 32, dim=1)
    return warpgroup_mma(w, x.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def sum_of_groups(buffers, n, first, end, scale_ptr, row, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """`sum_scaled` of weights with a scale for 32 rows and channels, ``[N / 32, K / 32]``, from ``row`` on.

    While a product is added, the next ones run: of few tokens the whole block, so that it is waited for once.
    """
    TOKENS: gl.constexpr = TILING.CONFIG.warpgroup_tokens
    GROUPS: gl.constexpr = TILING.GROUPS
    PARTS: gl.constexpr = TILING.CONFIG.warpgroup_rows // 64
    STEPS: gl.constexpr = GROUPS * PARTS
    PART: gl.constexpr = 2 * TILING.K // 32  # scales from a part of the rows to the next
    AHEAD: gl.constexpr = 4 if TOKENS <= 32 else 2  # products under way at once
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    zeros = gl.zeros([64, TOKENS], gl.float32, layout=MMA)
    # rows by their block of 32: both rows of a thread have one scale, so that it multiplies a token's scale once
    sum_of_none = zeros.reshape([2, 32, TOKENS])
    BY_BLOCK: gl.constexpr = sum_of_none.type.layout
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, BY_BLOCK))
    block_of_rows = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, BY_BLOCK)))
    scale_row = scale_ptr + (row // 32 + block_of_rows) * (TILING.K // 32)
    acc = ()
    scales = ()
    for _part in gl.static_range(PARTS):
        acc += (sum_of_none,)
    for step in gl.static_range(STEPS):
        scales += (gl.load(scale_row + step % PARTS * PART + first * GROUPS + step // PARTS),)
    for block in range(first, end):
        # scales are read a block ahead, so that no product waits for them
        following = gl.minimum(block + 1, end - 1) * GROUPS
        _await(buffers, n, TILING)
        products = ()
        later = ()
        for step in gl.static_range(AHEAD - 1):
            products += (_start_group(buffers, n, step, WARPGROUP, TILING, zeros),)
        for group in gl.static_range(GROUPS):
            # the tokens' scales are read while products run
            token_scale = _token_scales(buffers, n, group, COLUMN, WARPGROUP, TILING)[None, None, :]
            sums = ()
            for part in gl.static_range(PARTS):
                later += (gl.load(scale_row + part * PART + following + group),)
                if group * PARTS + part + AHEAD <= STEPS:
                    started = _start_group(buffers, n, group * PARTS + part + AHEAD - 1, WARPGROUP, TILING, zeros)
                    products += (started,)
                factors = token_scale * scales[group * PARTS + part][:, None, None]
                pending = products[group * PARTS + part]
                product = warpgroup_mma_wait(len(products) - 1 - group * PARTS - part, deps=[pending])
                sums += (acc[part] + product.reshape([2, 32, TOKENS]) * factors,)
            acc = sums
        scales = later
        _release(buffers, n, TILING)
        n += 1
    by_row = ()
    for part in gl.static_range(len(acc)):
        by_row += (gl.convert_layout(acc[part].reshape([64, TOKENS]), MMA),)
    return by_row


@gluon.jit
def sum_plain(buffers, n, first, end, WARPGROUP: gl.constexpr, TILING: gl.constexpr):
    """Sum of the products of plain blocks ``first`` to ``end``: a tuple of accumulators of 64 rows."""
    DTYPE: gl.constexpr = TILING.DTYPE
    PART_TOKENS: gl.constexpr = TILING.CONFIG.warpgroup_tokens
    ROW: gl.constexpr = WARPGROUP * TILING.ROW_STEP
    TOKEN: gl.constexpr = WARPGROUP * TILING.TOKEN_STEP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_TOKENS, 16])
    ROWS: gl.constexpr = buffers.weight.shape[1]
    TOKENS: gl.constexpr = buffers.x.shape[1]
    PARTS: gl.constexpr = TILING.CONFIG.warpgroup_rows // 64
    acc = ()
    for _i in gl.static_range(PARTS):
        acc += (gl.zeros([64, PART_TOKENS], gl.float32, layout=MMA),)
    # a product adds to the one before; the tensor cores have ended with a stage before it is given back
    for _block in range(first, end):
        _await(buffers, n, TILING)
        x = reinterpret(buffers.x.index(n % TILING.CONFIG.stages), DTYPE, [TOKENS, 64], PLAIN_LAYOUT)
        w = reinterpret(buffers.weight.index(n % TILING.CONFIG.stages), DTYPE, [ROWS, 64], PLAIN_LAYOUT)
        new = ()
        for i in gl.static_range(PARTS):
            rows = w.slice(ROW + 64 * i, 64)
            new += (warpgroup_mma(rows, x.slice(TOKEN, PART_TOKENS).permute((1, 0)), acc[i], is_async=True),)
        acc = ()
        for i in gl.static_range(PARTS):
            acc += (warpgroup_mma_wait(PARTS - 1 - i, deps=[new[i]]),)
        _release(buffers, n, TILING)
        n += 1
    return acc


@gluon.jit
def finish(
    acc,
    out_ptr,
    out_stride,
    quantized_output,
    partials_ptr,
    counter_ptr,
    part,
    SPLITS: gl.constexpr,
    POW2: gl.constexpr,
):
    """Stores a part of a tile. Of several split-K partials, the last to arrive adds them up in order.

    It also resets the counter.

    Args:
        acc: tuple of ``[64, tokens]``.
        out_ptr, out_stride: output ``[M, out_stride]``, and as `QuantizedOutput`.
        partials_ptr: scratch for partial sums.
        counter_ptr: counter of this part's partial sums that have arrived.
        part: `TilePart`.
    """
    if SPLITS == 1:
        _store(acc, out_ptr, out_stride, quantized_output, part, POW2)
    else:
        PARTS: gl.constexpr = len(acc)
        TOKENS: gl.constexpr = acc[0].shape[1]
        SIZE: gl.constexpr = 64 * TOKENS
        MMA: gl.constexpr = acc[0].type.layout
        entry = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))[:, None] * TOKENS
        entry += gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))[None, :]
        partials = partials_ptr + part.number.to(gl.int64) * (SPLITS * PARTS * SIZE) + entry
        for i in gl.static_range(PARTS):
            gl.store(partials + (part.split * PARTS + i) * SIZE, acc[i])
        barrier()  # the whole partial is written before its arrival is counted
        if gl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLITS - 1:
            total = ()
            for i in gl.static_range(PARTS):
                value = gl.zeros_like(acc[i])
                for j in gl.static_range(SPLITS):
                    # this split's partial is still in registers
                    other = gl.load(
                        partials + (j * PARTS + i) * SIZE, mask=part.split != j, other=0, cache_modifier=".cg"
                    )
                    other = gl.where(part.split == j, acc[i], other)
                    value = other if j == 0 else value + other
                total += (value,)
            _store(total, out_ptr, out_stride, quantized_output, part, POW2)
            gl.store(counter_ptr, 0)  # for the next launch


@gluon.jit
def _store(total, out_ptr, out_stride, quantized_output, part, POW2: gl.constexpr):
    """Stores accumulators of 64 rows, and two of them also as FP8 under one scale for each token."""
    PARTS: gl.constexpr = len(total)
    TOKENS: gl.constexpr = total[0].shape[1]
    # a token's rows follow one another
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    start = part.row
    M = part.num_tokens
    row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    token = part.token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    at = token[None, :].to(gl.int64) * gl.multiple_of(out_stride, 64) + row[:, None]
    values = ()
    for i in gl.static_range(PARTS):
        # through shared memory: a thread of the product has few rows of many tokens
        value = gl.convert_layout(total[i].to(out_ptr.dtype.element_ty), OUT)
        inside = (token < gl.where(start + 64 * i <= part.last_row, M, 0))[None, :]
        gl.store(gl.multiple_of(out_ptr, 16) + at + 64 * i, value, mask=inside)
        values += (value.to(gl.float32),)
    if quantized_output.q is not None:
        gl.static_assert(PARTS == 2)
        # as in `kernels.common.fp8_triton.quantize_groups`; on the bits, a NaN is larger than every number
        amax = gl.maximum(
            gl.max(values[0].to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0),
            gl.max(values[1].to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0),
        )
        scale, inverse, shown = fp8_scales(amax, POW2)
        # the rows of both parts share the scale
        for i in gl.static_range(PARTS):
            value = to_fp8(values[i], scale[None, :], inverse[None, :], POW2)
            gl.store(gl.multiple_of(quantized_output.q, 16) + at + 64 * i, value, mask=(token < M)[None, :])
        gl.store(quantized_output.scale + start // 128 * quantized_output.scale_stride + token, shown, mask=token < M)
