"""Gluon device functions of `linear_hopper_kernels`: what a warpgroup does with its part of a tile.

``OWN`` is that part: first row, first token, rows, tokens; then stages of the pipeline, and scales of a stage.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from deepseek_attn.kernels.common.gluon import barrier, reinterpret

_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_FLOOR_BITS = gl.constexpr(0x38D1B717)  # float32 bits of 1e-4, the smallest largest magnitude of a group
_INFINITY_BITS = gl.constexpr(0x7F800000)


@gluon.jit
def _await(buffers, n, OWN: gl.constexpr):
    mbarrier.wait(buffers[3].index(n % OWN[4]), n // OWN[4] & 1)


@gluon.jit
def _start(buffers, n, OWN: gl.constexpr, PART: gl.constexpr, zeros):
    """Starts the product of a part of block ``n``: a fresh one."""
    x = buffers[1].index(n % OWN[4]).slice(OWN[1], OWN[3]).permute((1, 0))
    w = buffers[0].index(n % OWN[4]).slice(OWN[0] + 64 * PART, 64)
    return warpgroup_mma(w, x, zeros, use_acc=False, is_async=True)


@gluon.jit
def _factors(buffers, n, w_scale, OWN: gl.constexpr, MMA: gl.constexpr):
    """The scales of the products of block ``n``."""
    scales = reinterpret(buffers[2].index(n % OWN[4]), gl.float32, [OWN[5]], _FLAT).slice(OWN[1], OWN[3])
    return (scales.load(gl.SliceLayout(0, MMA)) * w_scale)[None, :]


@gluon.jit
def _release(buffers, n, OWN: gl.constexpr):
    barrier()  # all four warps have multiplied
    mbarrier.arrive(buffers[4].index(n % OWN[4]))


@gluon.jit
def sum_scaled(buffers, n, first, end, scale_row, OWN: gl.constexpr):
    """The scaled products of FP8 blocks ``first`` to ``end``, added up: a tuple of parts of 64 rows.

    Of each two products, of two blocks or of two parts, one is under way while the other is added. ptxas follows that
    within a turn of the loop; across turns it would wait for each product by itself.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN[3], 32])
    zeros = gl.zeros([64, OWN[3]], gl.float32, layout=MMA)
    acc = zeros
    if OWN[2] == 64:
        for block in range(first, end - 1, 2):
            scale = gl.load(scale_row + block)
            next_scale = gl.load(scale_row + block + 1)
            _await(buffers, n, OWN)
            _await(buffers, n + 1, OWN)
            a = _start(buffers, n, OWN, 0, zeros)
            b = _start(buffers, n + 1, OWN, 0, zeros)
            a = warpgroup_mma_wait(1, deps=[a])
            acc += a * _factors(buffers, n, scale, OWN, MMA)
            b = warpgroup_mma_wait(0, deps=[b])
            acc += b * _factors(buffers, n + 1, next_scale, OWN, MMA)
            _release(buffers, n, OWN)
            mbarrier.arrive(buffers[4].index((n + 1) % OWN[4]))
            n += 2
        if (end - first) % 2 == 1:
            scale = gl.load(scale_row + end - 1)
            _await(buffers, n, OWN)
            a = _start(buffers, n, OWN, 0, zeros)
            a = warpgroup_mma_wait(0, deps=[a])
            acc += a * _factors(buffers, n, scale, OWN, MMA)
            _release(buffers, n, OWN)
        return (acc,)
    else:
        low = zeros
        next_scale = gl.load(scale_row + first)
        for block in range(first, end):
            scale = next_scale
            next_scale = gl.load(scale_row + gl.minimum(block + 1, end - 1))
            _await(buffers, n, OWN)
            a = _start(buffers, n, OWN, 0, zeros)
            b = _start(buffers, n, OWN, 1, zeros)
            factors = _factors(buffers, n, scale, OWN, MMA)
            a = warpgroup_mma_wait(1, deps=[a])
            acc += a * factors
            b = warpgroup_mma_wait(0, deps=[b])
            low += b * factors
            _release(buffers, n, OWN)
            n += 1
        return acc, low


@gluon.jit
def sum_plain(buffers, n, first, end, OWN: gl.constexpr, DTYPE: gl.constexpr):
    """The products of plain blocks ``first`` to ``end``, added up: a tuple of parts of 64 rows."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN[3], 16])
    ROWS: gl.constexpr = buffers[0].shape[1]
    TOKENS: gl.constexpr = buffers[1].shape[1]
    PARTS: gl.constexpr = OWN[2] // 64
    acc = ()
    for _i in gl.static_range(PARTS):
        acc += (gl.zeros([64, OWN[3]], gl.float32, layout=MMA),)
    for _block in range(first, end):
        _await(buffers, n, OWN)
        x = reinterpret(buffers[1].index(n % OWN[4]), DTYPE, [TOKENS, 64], PLAIN_LAYOUT)
        w = reinterpret(buffers[0].index(n % OWN[4]), DTYPE, [ROWS, 64], PLAIN_LAYOUT)
        new = ()
        for i in gl.static_range(PARTS):
            part = w.slice(OWN[0] + 64 * i, 64)
            new += (warpgroup_mma(part, x.slice(OWN[1], OWN[3]).permute((1, 0)), acc[i], is_async=True),)
        acc = ()
        for i in gl.static_range(PARTS):
            acc += (warpgroup_mma_wait(PARTS - 1 - i, deps=[new[i]]),)
        _release(buffers, n, OWN)
        n += 1
    return acc


@gluon.jit
def finish(acc, out, rounded, place, corner, SPLITS: gl.constexpr, POW2: gl.constexpr):
    """Stores a part of a tile. Of several shares, the last to arrive adds them up in order and clears the counter.

    Args:
        acc: tuple of ``[64, tokens]``; out: output and its rows.
        rounded: FP8 output, scales and their stride, or None instead of the first two.
        place: memory for shares, counter, number of this part, number of the share.
        corner: first row, last row of the weight, first token, number of tokens.
    """
    if SPLITS == 1:
        _store(acc, out, rounded, corner, POW2)
    else:
        PARTS: gl.constexpr = len(acc)
        TOKENS: gl.constexpr = acc[0].shape[1]
        SIZE: gl.constexpr = 64 * TOKENS
        MMA: gl.constexpr = acc[0].type.layout
        part_ptr, counter_ptr, number, split = place
        entry = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))[:, None] * TOKENS
        entry += gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))[None, :]
        part = part_ptr + number.to(gl.int64) * (SPLITS * PARTS * SIZE) + entry
        for i in gl.static_range(PARTS):
            gl.store(part + (split * PARTS + i) * SIZE, acc[i])
        barrier()  # the whole share is written before its arrival is counted
        if gl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLITS - 1:
            total = ()
            for i in gl.static_range(PARTS):
                value = gl.zeros_like(acc[i])
                for j in gl.static_range(SPLITS):
                    # its own share is still at hand
                    other = gl.load(part + (j * PARTS + i) * SIZE, mask=split != j, other=0, cache_modifier=".cg")
                    other = gl.where(split == j, acc[i], other)
                    value = other if j == 0 else value + other
                total += (value,)
            _store(total, out, rounded, corner, POW2)
            gl.store(counter_ptr, 0)


@gluon.jit
def _store(total, out, rounded, corner, POW2: gl.constexpr):
    """Stores parts of 64 rows, and the two of 128 rows also as FP8 under one scale for each token."""
    PARTS: gl.constexpr = len(total)
    TOKENS: gl.constexpr = total[0].shape[1]
    # a token's rows follow one another
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    out_ptr, out_stride = out
    q_ptr, scale_ptr, scale_stride = rounded
    start, last_row, first_token, M = corner
    row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    token = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    at = token[None, :].to(gl.int64) * gl.multiple_of(out_stride, 64) + row[:, None]
    values = ()
    for i in gl.static_range(PARTS):
        value = gl.convert_layout(total[i].to(out_ptr.dtype.element_ty), OUT)
        inside = (token < gl.where(start + 64 * i <= last_row, M, 0))[None, :]
        gl.store(gl.multiple_of(out_ptr, 16) + at + 64 * i, value, mask=inside)
        values += (value.to(gl.float32),)
    if q_ptr is not None:
        gl.static_assert(PARTS == 2)
        # the rule of `fp8_kernels.quantize_groups`; on the bits, a NaN is larger than every number
        amax = gl.maximum(
            gl.max(values[0].to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0),
            gl.max(values[1].to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0),
        )
        bits = gl.maximum(amax, _FLOOR_BITS)
        if POW2:
            bits = (bits.to(gl.float32, bitcast=True) * 0.002232142857142857).to(gl.int32, bitcast=True)
            bits = (bits + 0x7FFFFF) & ~0x7FFFFF
        else:
            bits = gl.div_rn(bits.to(gl.float32, bitcast=True), 448.0).to(gl.int32, bitcast=True)
        scale = bits.to(gl.float32, bitcast=True)
        inverse = ((254 << 23) - bits).to(gl.float32, bitcast=True)
        for i in gl.static_range(PARTS):
            if POW2:
                value = values[i] * inverse[None, :]
            else:
                value = gl.div_rn(values[i], scale[None, :] + gl.zeros_like(values[i]))
            gl.store(gl.multiple_of(q_ptr, 16) + at + 64 * i, value.to(gl.float8e4nv), mask=(token < M)[None, :])
        scale = gl.where(amax >= _INFINITY_BITS, float("nan"), scale)
        gl.store(scale_ptr + start // 128 * scale_stride + token, scale, mask=token < M)
