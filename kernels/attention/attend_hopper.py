"""Gluon device code of `sparse_attention_paged` for Hopper: 64 heads over ``fp8_v4`` pages, warp-specialised.

The same contract and arguments as ``attend_kernel``. Four warps decode tiles of 64 keys into shared memory, four
compute logits and weights, eight hold the output ``[64, DIM]`` in registers and multiply weights with keys. Two decoded
tiles are in flight.

Barriers, for each of the two stages: ``full`` (keys are in shared memory), ``ready`` (weights are in shared memory),
``empty`` (keys and weights were read). ``queried``: queries are in shared memory; ``final``: normalisers are in shared
memory.

Measured on an H200, in cycles per tile: decoding 1100, the first product 1170, weights 700 to 1000, the second product
1500. The decoding warps set the pace, 4700 with the loads they wait for. Without the register limits below, ptxas waits
for every single product (``wgmma`` serialised) or spills accumulators: 1.6 times as slow. Rescaling the output only
where a peak rose by more than 256 times, and leaving out the L2 prefetches, changed nothing (both within 2 %).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.attention.attend_hopper_keys import KeyLists, KeyPools, decode, key_counts
from deepseek_attn.kernels.attention.tile_steps_hopper import (
    AttendWork,
    SoftmaxBuffers,
    accumulate_tile,
    put_factors,
    scaled_logits,
    store_lse,
    store_staged,
    weigh_tile,
)
from deepseek_attn.kernels.common.fp8_hopper import fp8_scales, to_fp8
from deepseek_attn.kernels.common.gluon import barrier, reinterpret


class AttendTileBuffers(NamedTuple):
    """Shared memory of queries and of two decoded tiles, and barriers.

    Attributes:
        queries: float16 ``[64, DIM]``; keys: float16 ``[2, 64, DIM]``; bias: float32 ``[2, 64]``, 0 or -inf.
        rotation: float32 ``[64]``, 32 cosines and 32 sines at the query's position.
        full, ready, empty, queried, final: barriers, as above.
    """

    queries: Any
    keys: Any
    bias: Any
    rotation: Any
    full: Any
    ready: Any
    empty: Any
    queried: Any
    final: Any


@gluon.jit
def _weigh(work, lists, scale_log2, outputs, tiles, softmax, SHAPE: gl.constexpr, POOLS: gl.constexpr):
    """Logits and weights of each tile, and the normalisers."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zeros = gl.zeros([64, 64], gl.float32, layout=LOGITS)
    counts = key_counts(work.t, lists, POOLS)
    peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LOGITS))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, LOGITS))
    mbarrier.wait(tiles.queried, 0)  # queries are in shared memory
    iteration = gl.to_tensor(0)
    for _tile in range(work.split, counts.tiles, work.splits):
        stage = iteration & 1
        mbarrier.wait(tiles.full.index(stage), (iteration >> 1) & 1)  # keys are in shared memory
        fence_async_shared()  # keys were written by ordinary stores
        keys = tiles.keys.index(stage).permute((1, 0))
        logits = warpgroup_mma(tiles.queries, keys, zeros, use_acc=False, is_async=True)
        attended = tiles.bias.index(stage).load(gl.SliceLayout(0, LOGITS)) == 0
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = scaled_logits(logits, attended, scale_log2)
        peak, total = weigh_tile(logits, peak, total, stage, softmax, tiles.ready)
        iteration += 1
    put_factors(store_lse(peak, total, work, outputs, SHAPE.SPLIT), softmax.factors, tiles.final)


@gluon.jit
def _put_queries(work, q, tiles, raw_q, DIM: gl.constexpr, RAW_Q: gl.constexpr):
    """Puts a tile of queries into shared memory; raw queries are normed and rotated first.

    For raw queries, ``tiles.rotation`` keeps the cosines and sines at the query's position.
    """
    t = work.t
    first_head = work.first_head
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, PIECE))
    channel = gl.arange(0, 64, layout=gl.SliceLayout(0, PIECE))
    inside = (first_head + row < work.H)[:, None]
    pieces_ptr = (q.q + t * q.stride_t + (first_head + row) * q.stride_h)[:, None] + channel[None, :]
    pieces = ()
    for i in gl.static_range(DIM // 64):
        pieces += (gl.load(pieces_ptr + 64 * i, mask=inside, other=0),)
    if RAW_Q is not None:
        gl.static_assert(RAW_Q.ROPE == 64)
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 4, 2], [4, 8, 1], [8, 1, 1], [2, 1, 0])
        pair = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
        position = gl.load(raw_q.positions + t)
        known = (position >= 0) & (position < raw_q.max_positions) & (pair >= 0)
        table = raw_q.cos_sin + position.to(gl.int64) * 64 + pair
        cos = gl.load(table, mask=known, other=1)
        sin = gl.load(table + 32, mask=known, other=0)
        tiles.rotation.slice(0, 32).store(cos)
        tiles.rotation.slice(32, 32).store(sin)
        if not RAW_Q.ROTATED:
            pieces = _rotated(pieces, cos, sin, raw_q, DIM, RAW_Q)
    for i in gl.static_range(DIM // 64):
        tiles.queries.slice(64 * i, 64, dim=1).store(pieces[i].to(gl.float16))


@gluon.jit
def _rotated(pieces, cos, sin, raw_q, DIM: gl.constexpr, RAW_Q: gl.constexpr):
    """Pieces ``[64, 64]`` of raw queries, normed and rotated, with the rounding of `query_norm_rope`."""
    PIECE: gl.constexpr = pieces[0].type.layout
    if RAW_Q.NORM:
        squares = gl.zeros([64, 64], gl.float32, layout=PIECE)
        for i in gl.static_range(DIM // 64):
            squares += pieces[i].to(gl.float32) * pieces[i].to(gl.float32)
        factor = gl.rsqrt(gl.sum(squares, 1) / DIM + raw_q.eps)[:, None]
        normed = ()
        for i in gl.static_range(DIM // 64):
            normed += ((pieces[i].to(gl.float32) * factor).to(RAW_Q.DTYPE),)
        pieces = normed
    rotated = ()
    for i in gl.static_range(DIM // 64 - 1):
        rotated += (pieces[i],)
    a, b = gl.split(pieces[DIM // 64 - 1].to(gl.float32).reshape([64, 32, 2]))
    PAIR: gl.constexpr = gl.SliceLayout(0, a.type.layout)
    cos = gl.convert_layout(cos, PAIR)[None, :]
    sin = gl.convert_layout(sin, PAIR)[None, :]
    y = gl.join(a * cos - b * sin, a * sin + b * cos).reshape([64, 64])
    return rotated + (gl.convert_layout(y.to(RAW_Q.DTYPE), PIECE),)


@gluon.jit
def _store_quantized(value, work, tiles, raw_q, SHAPE: gl.constexpr):
    """Rotates float32 heads ``[64, 512]`` back, and stores them in FP8 with a scale per 128 channels."""
    t = work.t
    first_head = work.first_head
    H = work.H
    # a thread holds channels of two of the four groups. Each half of the output is a tensor of its own, shared by the
    # warps of both halves: [head, half of the warps, 64 channels]
    value = value.to(SHAPE.DTYPE).to(gl.float32)
    value = value.reshape([64, 2, 2, 2, 64]).permute((0, 2, 4, 3, 1))
    lower, upper = gl.split(value)
    lower0, lower1 = gl.split(lower)
    upper0, upper1 = gl.split(upper)
    # rotated channels are the last 64 of the warps' second half
    first, second = gl.split(upper1.reshape([64, 2, 32, 2]))
    TABLE: gl.constexpr = gl.SliceLayout(0, first.type.layout)
    cos = tiles.rotation.slice(0, 32).load(gl.SliceLayout(0, TABLE))[None, :]
    sin = tiles.rotation.slice(32, 32).load(gl.SliceLayout(0, TABLE))[None, :]
    last = (gl.arange(0, 2, layout=gl.SliceLayout(1, TABLE)) == 1)[:, None]
    cos = gl.where(last, cos, 1.0)[None, :, :]
    sin = gl.where(last, sin, 0.0)[None, :, :]
    # as in `row_ops_triton.rotated_back`
    real = gl.where(sin == 0, first * cos, first * cos + second * sin)
    imaginary = gl.where(sin == 0, second * cos, second * cos - first * sin)
    upper1 = gl.join(real, imaginary).reshape([64, 2, 64]).to(SHAPE.DTYPE).to(gl.float32)
    upper1 = gl.convert_layout(upper1, upper0.type.layout)

    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, lower0.type.layout)))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, lower0.type.layout)))
    scale_ptr = raw_q.fp8_scale + (head[:, None] * 4 + half[None, :]).to(gl.int64) * raw_q.fp8_scale_stride + t
    inside = (head < H)[:, None] & (half >= 0)[None, :]
    lower = _quantized(lower0, lower1, scale_ptr, inside, SHAPE)
    upper = _quantized(upper0, upper1, scale_ptr + 2 * raw_q.fp8_scale_stride, inside, SHAPE)
    codes = gl.join(lower, upper).permute((0, 4, 1, 3, 2)).reshape([64, 512])
    # reuse the memory of the queries to stage the output, so that stores write whole cache lines
    staged = reinterpret(tiles.queries, gl.float8e4nv, [64, 512], gl.NVMMASharedLayout(128, 8, 2))
    staged.store(codes)
    barrier()  # all warps have staged their channels
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [8, 1], [1, 0])
    row = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    channel = gl.arange(0, 512, layout=gl.SliceLayout(0, WIDE))
    values = raw_q.fp8 + t * raw_q.row_stride + (row // raw_q.group_heads) * raw_q.group_stride
    values += row % raw_q.group_heads * 512
    gl.store(values[:, None] + channel[None, :], staged.load(WIDE), mask=(row < H)[:, None])


@gluon.jit
def _quantized(first, second, scale_ptr, inside, SHAPE: gl.constexpr):
    """Two halves of groups ``[64, 2, 64]`` as FP8 ``[64, 2, 64, 2]``; stores their scales."""
    bits = gl.maximum(first.to(gl.int32, bitcast=True) & 0x7FFFFFFF, second.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
    scale, inverse, shown = fp8_scales(gl.max(bits, 2), SHAPE.POW2)
    gl.store(scale_ptr, shown, mask=inside)
    scale = scale[:, :, None]
    inverse = inverse[:, :, None]
    return gl.join(to_fp8(first, scale, inverse, SHAPE.POW2), to_fp8(second, scale, inverse, SHAPE.POW2))


@gluon.jit
def _accumulate(
    work, lists, q, outputs, tiles, softmax, raw_q, SHAPE: gl.constexpr, POOLS: gl.constexpr
):  # fmt: skip
    """Loads the tile of queries, sums weights times keys, and stores the output."""
    DIM: gl.constexpr = SHAPE.DIM
    SPLIT: gl.constexpr = SHAPE.SPLIT
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 4, 16])
    counts = key_counts(work.t, lists, POOLS)
    RAW_Q: gl.constexpr = SHAPE.RAW_Q  # Triton 3.6 passes no field of a constant
    _put_queries(work, q, tiles, raw_q, DIM, RAW_Q)
    fence_async_shared()  # tensor cores read the queries
    barrier()  # all threads have stored theirs
    mbarrier.arrive(tiles.queried)

    acc = gl.zeros([64, DIM], gl.float32, layout=OUT)
    iteration = gl.to_tensor(0)
    for _tile in range(work.split, counts.tiles, work.splits):
        stage = iteration & 1
        mbarrier.wait(tiles.ready.index(stage), (iteration >> 1) & 1)  # weights are in shared memory, as keys are
        acc = accumulate_tile(acc, softmax, stage, tiles.keys, stage)
        mbarrier.arrive(tiles.empty.index(stage))  # the warps that decode may write the tile's memory
        iteration += 1
    mbarrier.wait(tiles.final, 0)  # normalisers are in shared memory
    value = acc * softmax.factors.load(gl.SliceLayout(1, OUT))[:, None]
    if RAW_Q is not None and not SPLIT:
        _store_quantized(value, work, tiles, raw_q, RAW_Q)
    else:
        if SPLIT:
            row_out = outputs.out + ((work.t * work.splits + work.split) * work.H + work.first_head) * DIM
            out_stride = DIM
        else:
            row_out = outputs.out + work.t * outputs.stride_t + work.first_head * outputs.stride_h
            out_stride = outputs.stride_h
        store_staged(value, tiles.queries, row_out, out_stride, work, outputs.out.dtype.element_ty)


@gluon.jit(do_not_specialize=["H", "width0", "width1", "limit0", "limit1"])
def attend_hopper_kernel(
    q, first, second, outputs, raw_q, H, width0, width1, limit0, limit1, SHAPE: gl.constexpr
):  # fmt: skip
    """Takes the arguments of `attend_kernel`. Grid ``(queries * blocks of 64 heads, splits)``."""
    POOLS: gl.constexpr = SHAPE.POOLS  # a tuple cannot be compared with None on Triton 3.6
    DIM: gl.constexpr = SHAPE.DIM
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # programs of a query's head blocks are neighbours, since they read the same keys
    blocks = (H + 63) // 64
    splits = gl.num_programs(1)
    t = (gl.program_id(0) // blocks).to(gl.int64)
    split = gl.program_id(1)
    first_head = gl.program_id(0) % blocks * 64
    gdc_launch_dependents()
    queries = gl.allocate_shared_memory(gl.float16, [64, DIM], SHARED)
    keys = gl.allocate_shared_memory(gl.float16, [2, 64, DIM], SHARED)
    weights = gl.allocate_shared_memory(gl.float16, [2, 64, 64], SHARED)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    factors = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    rotation = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    queried = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    final = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(queried, count=1)
    mbarrier.init(final, count=1)
    gdc_wait()  # the previous kernel has written queries, keys and indices

    work = AttendWork(t, split, splits, first_head, H)
    other = first
    if POOLS == 2:
        other = second
    lists = KeyLists(
        first.lens, other.lens, width0, width1,
        first.indices + t * first.indices_stride, other.indices + t * other.indices_stride, limit0, limit1,
    )  # fmt: skip
    pools = KeyPools(first.pool, other.pool, first.page_stride, other.page_stride)
    tiles = AttendTileBuffers(queries, keys, bias, rotation, full, ready, empty, queried, final)
    softmax = SoftmaxBuffers(weights, decays, factors)
    gl.warp_specialize(
        [
            (_accumulate, (work, lists, q, outputs, tiles, softmax, raw_q, SHAPE, POOLS)),
            (_weigh, (work, lists, q.scale_log2, outputs, tiles, softmax, SHAPE, POOLS)),
            (decode, (work, lists, pools, tiles, SHAPE, POOLS)),
        ],
        [4, 4],
        [72, 120],  # registers of a thread; 160 are left for the output: a program has 65536
    )
