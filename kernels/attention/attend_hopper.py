"""Gluon device code of `sparse_attention_paged` for Hopper: 64 heads over ``fp8_v4`` pages, warp-specialised.

The same contract and arguments as ``attend_kernel``. Four warps decode tiles of 64 keys into shared memory, four
compute logits and weights, eight hold the output ``[64, DIM]`` in registers and multiply weights with keys. Two decoded
tiles are in flight.

Barriers, for each of the two stages: ``full`` (keys are in shared memory), ``ready`` (weights are), ``empty`` (both
were read). ``queried``: queries are in shared memory; ``final``: normalisers are.

Measured on an H200, in cycles per tile: decoding 1100, the first product 1170, weights 700 to 1000, the second product
1500. The decoding warps set the pace, 4700 with the loads they wait for. Without the register limits below, ptxas waits
for every single product (``wgmma`` serialised) or spills accumulators: 1.6 times as slow. Rescaling the output only
where a peak rose by more than 256 times, and leaving out the L2 prefetches, changed nothing (both within 2 %).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.attention.attend_hopper_keys import decode, lengths
from deepseek_attn.kernels.attention.softmax_hopper import scaled_logits, weigh_tile
from deepseek_attn.kernels.common.fp8_hopper import fp8_scales, to_fp8
from deepseek_attn.kernels.common.gluon import barrier, reinterpret
from deepseek_attn.kernels.common.triton_types import LOG2E


@gluon.jit
def _weigh(
    work, where, scale_log2, norms, queries, keys, bias, weights, decays, factors, barriers,
    SPLIT: gl.constexpr, POOLS: gl.constexpr, HAS_LENS0: gl.constexpr, HAS_LENS1: gl.constexpr,
    HAS_SINK: gl.constexpr,
):  # fmt: skip
    """Logits and weights of each tile, and the normalisers."""
    t, split, splits, first_head, H = work
    sink_ptr, lse_ptr = norms
    full, ready, _empty, queried, final = barriers
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zeros = gl.zeros([64, 64], gl.float32, layout=LOGITS)
    _len0, _len1, _tiles0, tiles = lengths(t, where, POOLS, HAS_LENS0, HAS_LENS1)
    peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LOGITS))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, LOGITS))
    mbarrier.wait(queried, 0)
    iteration = gl.to_tensor(0)
    for _tile in range(split, tiles, splits):
        stage = iteration & 1
        mbarrier.wait(full.index(stage), (iteration >> 1) & 1)
        fence_async_shared()  # keys were written by ordinary stores
        logits = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        attended = bias.index(stage).load(gl.SliceLayout(0, LOGITS)) == 0
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = scaled_logits(logits, attended, scale_log2)
        peak, total = weigh_tile(logits, peak, total, stage, weights, decays, ready)
        iteration += 1
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
    lonely = total == 0  # false for NaN: a NaN in a key that is attended stays visible
    denominator = total
    lse = gl.where(lonely, float("-inf"), peak + gl.log2(total))
    if SPLIT:
        gl.store(lse_ptr + (t * splits + split) * H + head, lse, mask=head < H)
    else:
        if HAS_SINK:
            sink = gl.load(sink_ptr + head, mask=head < H, other=float("-inf")).to(gl.float32)
            denominator += gl.exp2(sink * LOG2E - gl.where(lonely, 0.0, peak))
        gl.store(lse_ptr + t * H + head, gl.where(lonely, float("inf"), lse * 0.6931471805599453), mask=head < H)
    factors.store(gl.where(lonely, 0.0, 1 / denominator))
    barrier()
    mbarrier.arrive(final)


@gluon.jit
def _put_queries(work, q, queries, rotation, projected, DIM: gl.constexpr, PROJECTED: gl.constexpr):
    """Puts a tile of queries into shared memory, normed and rotated if they are ``projected``.

    Cosines and sines at the query's position stay in ``rotation``.
    """
    t, _split, _splits, first_head, H = work
    q_ptr, q_stride_t, q_stride_h = q
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, PIECE))
    channel = gl.arange(0, 64, layout=gl.SliceLayout(0, PIECE))
    inside = (first_head + row < H)[:, None]
    pieces_ptr = (q_ptr + t * q_stride_t + (first_head + row) * q_stride_h)[:, None] + channel[None, :]
    pieces = ()
    for i in gl.static_range(DIM // 64):
        pieces += (gl.load(pieces_ptr + 64 * i, mask=inside, other=0),)
    if PROJECTED is not None:
        gl.static_assert(PROJECTED.ROPE == 64)
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 4, 2], [4, 8, 1], [8, 1, 1], [2, 1, 0])
        pair = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
        position = gl.load(projected.positions + t)
        known = (position >= 0) & (position < projected.max_positions) & (pair >= 0)
        table = projected.cos_sin + position.to(gl.int64) * 64 + pair
        cos = gl.load(table, mask=known, other=1)
        sin = gl.load(table + 32, mask=known, other=0)
        rotation.slice(0, 32).store(cos)
        rotation.slice(32, 32).store(sin)
        if not PROJECTED.ROTATED:
            pieces = _rotated(pieces, cos, sin, projected, DIM, PROJECTED)
    for i in gl.static_range(DIM // 64):
        queries.slice(64 * i, 64, dim=1).store(pieces[i].to(gl.float16))


@gluon.jit
def _rotated(pieces, cos, sin, projected, DIM: gl.constexpr, PROJECTED: gl.constexpr):
    """Pieces ``[64, 64]`` of projected heads, normed and rotated; as `query_norm_rope` rounds them."""
    PIECE: gl.constexpr = pieces[0].type.layout
    if PROJECTED.NORM:
        squares = gl.zeros([64, 64], gl.float32, layout=PIECE)
        for i in gl.static_range(DIM // 64):
            squares += pieces[i].to(gl.float32) * pieces[i].to(gl.float32)
        factor = gl.rsqrt(gl.sum(squares, 1) / DIM + projected.eps)[:, None]
        normed = ()
        for i in gl.static_range(DIM // 64):
            normed += ((pieces[i].to(gl.float32) * factor).to(PROJECTED.DTYPE),)
        pieces = normed
    rotated = ()
    for i in gl.static_range(DIM // 64 - 1):
        rotated += (pieces[i],)
    a, b = gl.split(pieces[DIM // 64 - 1].to(gl.float32).reshape([64, 32, 2]))
    PAIR: gl.constexpr = gl.SliceLayout(0, a.type.layout)
    cos = gl.convert_layout(cos, PAIR)[None, :]
    sin = gl.convert_layout(sin, PAIR)[None, :]
    y = gl.join(a * cos - b * sin, a * sin + b * cos).reshape([64, 64])
    return rotated + (gl.convert_layout(y.to(PROJECTED.DTYPE), PIECE),)


@gluon.jit
def _store_quantized(value, work, queries, rotation, projected, SHAPE: gl.constexpr):
    """Stores heads ``[64, 512]``, float32, rotated back and as FP8 per 128 channels."""
    t, _split, _splits, first_head, H = work
    # a thread has channels of two of the four groups; their halves are tensors, which warps of one half of the output
    # and of the other share: [head, half of the warps, 64 channels]
    value = value.to(SHAPE.DTYPE).to(gl.float32)
    value = value.reshape([64, 2, 2, 2, 64]).permute((0, 2, 4, 3, 1))
    lower, upper = gl.split(value)
    lower0, lower1 = gl.split(lower)
    upper0, upper1 = gl.split(upper)
    # rotated channels are the last 64 of the warps' second half
    first, second = gl.split(upper1.reshape([64, 2, 32, 2]))
    TABLE: gl.constexpr = gl.SliceLayout(0, first.type.layout)
    cos = rotation.slice(0, 32).load(gl.SliceLayout(0, TABLE))[None, :]
    sin = rotation.slice(32, 32).load(gl.SliceLayout(0, TABLE))[None, :]
    last = (gl.arange(0, 2, layout=gl.SliceLayout(1, TABLE)) == 1)[:, None]
    cos = gl.where(last, cos, 1.0)[None, :, :]
    sin = gl.where(last, sin, 0.0)[None, :, :]
    # as in `row_ops.rotated_back`
    real = gl.where(sin == 0, first * cos, first * cos + second * sin)
    imaginary = gl.where(sin == 0, second * cos, second * cos - first * sin)
    upper1 = gl.join(real, imaginary).reshape([64, 2, 64]).to(SHAPE.DTYPE).to(gl.float32)
    upper1 = gl.convert_layout(upper1, upper0.type.layout)

    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, lower0.type.layout)))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, lower0.type.layout)))
    scale_ptr = projected.fp8_scale + (head[:, None] * 4 + half[None, :]).to(gl.int64) * projected.fp8_scale_stride + t
    inside = (head < H)[:, None] & (half >= 0)[None, :]
    lower = _quantized(lower0, lower1, scale_ptr, inside, SHAPE)
    upper = _quantized(upper0, upper1, scale_ptr + 2 * projected.fp8_scale_stride, inside, SHAPE)
    codes = gl.join(lower, upper).permute((0, 4, 1, 3, 2)).reshape([64, 512])
    # the queries are no longer read: their memory stages the output, so that whole lines are written
    staged = reinterpret(queries, gl.float8e4nv, [64, 512], gl.NVMMASharedLayout(128, 8, 2))
    staged.store(codes)
    barrier()
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [8, 1], [1, 0])
    row = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    channel = gl.arange(0, 512, layout=gl.SliceLayout(0, WIDE))
    values = projected.fp8 + t * projected.row_stride + (row // projected.group_heads) * projected.group_stride
    values += row % projected.group_heads * 512
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
    work, where, q, out, queries, keys, weights, decays, factors, rotation, projected, barriers,
    DIM: gl.constexpr, SPLIT: gl.constexpr, POOLS: gl.constexpr, HAS_LENS0: gl.constexpr, HAS_LENS1: gl.constexpr,
    PROJECTED: gl.constexpr,
):  # fmt: skip
    """Loads the tile of queries, sums weights times keys, and stores the output."""
    t, split, splits, first_head, H = work
    out_ptr, out_stride_t, out_stride_h = out
    _full, ready, empty, queried, final = barriers
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 4, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    _len0, _len1, _tiles0, tiles = lengths(t, where, POOLS, HAS_LENS0, HAS_LENS1)
    _put_queries(work, q, queries, rotation, projected, DIM, PROJECTED)
    fence_async_shared()
    barrier()
    mbarrier.arrive(queried)

    acc = gl.zeros([64, DIM], gl.float32, layout=OUT)
    iteration = gl.to_tensor(0)
    for _tile in range(split, tiles, splits):
        stage = iteration & 1
        mbarrier.wait(ready.index(stage), (iteration >> 1) & 1)
        acc = acc * decays.index(stage).load(ROWS)[:, None]
        fence_async_shared()
        acc = warpgroup_mma(weights.index(stage), keys.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()  # both warpgroups have read the keys
        mbarrier.arrive(empty.index(stage))
        iteration += 1
    mbarrier.wait(final, 0)
    value = acc * factors.load(ROWS)[:, None]
    if PROJECTED is not None and not SPLIT:
        _store_quantized(value, work, queries, rotation, projected, PROJECTED)
    else:
        if SPLIT:
            row_out = out_ptr + ((t * splits + split) * H + first_head) * DIM
            out_stride = DIM
        else:
            row_out = out_ptr + t * out_stride_t + first_head * out_stride_h
            out_stride = out_stride_h
        # the queries are no longer read: their memory stages the output, so that whole lines are written
        result = reinterpret(queries, out_ptr.dtype.element_ty, [64, DIM], gl.NVMMASharedLayout(128, 16, 2))
        result.store(value.to(out_ptr.dtype.element_ty))
        barrier()
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
        inside = (first_head + row < H)[:, None]
        gl.store(row_out + row[:, None] * out_stride + channel[None, :], result.load(WIDE), mask=inside)


@gluon.jit(do_not_specialize=["H", "width0", "width1", "limit0", "limit1"])
def attend_hopper_kernel(
    q_ptr,
    pool0_ptr,
    pool1_ptr,
    indices0_ptr,
    indices1_ptr,
    lens0_ptr,
    lens1_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    H,
    scale_log2,
    width0,
    width1,
    limit0,
    limit1,
    page_stride0,
    page_stride1,
    indices_stride0,
    indices_stride1,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    projected,
    NOPE: gl.constexpr,
    N0: gl.constexpr,
    N1: gl.constexpr,
    POOLS: gl.constexpr,
    HAS_LENS0: gl.constexpr,
    HAS_LENS1: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    PROJECTED: gl.constexpr,
):
    DIM: gl.constexpr = NOPE + 64
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
    gdc_wait()

    work = (t, split, splits, first_head, H)
    where = (lens0_ptr, lens1_ptr, width0, width1)
    q = (q_ptr, q_stride_t, q_stride_h)
    pools = (pool0_ptr, pool1_ptr, page_stride0, page_stride1)
    limits = (indices0_ptr + t * indices_stride0, indices1_ptr + t * indices_stride1, limit0, limit1)
    norms = (sink_ptr, lse_ptr)
    out = (out_ptr, out_stride_t, out_stride_h)
    barriers = (full, ready, empty, queried, final)
    gl.warp_specialize(
        [
            (
                _accumulate,
                (
                    work, where, q, out, queries, keys, weights, decays, factors, rotation, projected, barriers,
                    DIM, SPLIT, POOLS, HAS_LENS0, HAS_LENS1, PROJECTED,
                ),
            ),
            (
                _weigh,
                (
                    work, where, scale_log2, norms, queries, keys, bias, weights, decays, factors, barriers,
                    SPLIT, POOLS, HAS_LENS0, HAS_LENS1, HAS_SINK,
                ),
            ),
            (
                decode,
                (
                    work, where, pools, limits, keys, bias, barriers,
                    NOPE, N0, N1, POOLS, HAS_LENS0, HAS_LENS1,
                ),
            ),
        ],
        [4, 4],
        [72, 120],  # registers of a thread; 160 are left for the output: a program has 65536
    )  # fmt: skip
