"""Gluon device code of `sparse_attention_paged` for Hopper: 64 heads over ``fp8_v32`` pages, warp-specialised.

The division of labour is that of `attend_hopper`: four warps decode tiles of 64 keys into shared memory, four compute
logits and weights, eight hold the output ``[64, NOPE]`` in registers and multiply weights with keys. Two decoded tiles
are in flight. What differs: the values are the quantised channels alone, so that rotary keys and queries have memory of
their own; keys are bfloat16; and 576 channels leave room for the weights of one tile only.

Barriers, for each of the two stages: ``full`` (keys are in shared memory), ``empty`` (both products have read them);
for each tile: ``ready`` (weights are in shared memory), ``spent`` (they were read). ``queried``: queries are in shared
memory; ``final``: normalisers are.
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

from deepseek_attn.kernels.attention.attend_hopper_keys import interleave
from deepseek_attn.kernels.attention.softmax_hopper import scaled_logits, soften
from deepseek_attn.kernels.common.gluon import barrier, reinterpret

ROPE = gl.constexpr(64)  # rotary channels


@gluon.jit
def _count(t, keys, HAS_LENS: gl.constexpr):
    """Columns of query ``t`` that count."""
    _pool, _page_stride, _indices, lens_ptr, width, _limit = keys
    count = width
    if HAS_LENS:
        count = gl.maximum(gl.minimum(gl.load(lens_ptr + t), width), 0).to(gl.int32)
    return count


@gluon.jit
def _slots(tile, count, keys, layout: gl.constexpr):
    """Slots of the keys of a tile, -1 where there is none."""
    _pool, _page_stride, indices, _lens_ptr, _width, limit = keys
    column = tile * 64 + gl.arange(0, 64, layout=layout)
    slot = gl.load(indices + column, mask=column < count, other=-1)
    return gl.where((slot >= 0) & (slot < limit), slot.to(gl.int32), -1)


@gluon.jit
def _row(slot, keys, NOPE: gl.constexpr, N: gl.constexpr):
    """Pointers to the entries of slots, of any entry where there is none."""
    pool, page_stride, _indices, _lens_ptr, _width, _limit = keys
    entry = gl.maximum(slot, 0)
    return pool + (entry // N).to(gl.int64) * page_stride + entry % N * (NOPE + NOPE // 32 + 2 * ROPE)


@gluon.jit
def _load_scales(row, valid, NOPE: gl.constexpr):
    """The float32 scales of entries, two at a time as int64."""
    scales = ()
    for i in gl.static_range(NOPE // 256):
        scales += (gl.load((row + NOPE).to(gl.pointer_type(gl.int64)) + i, mask=valid, other=0),)
    return scales


@gluon.jit
def _load_piece(row, valid, i: gl.constexpr, layout: gl.constexpr):
    """64 quantised channels of entries as 32-bit words."""
    word = 16 * i + gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    return gl.load(row.to(gl.pointer_type(gl.int32))[:, None] + word[None, :], mask=valid[:, None], other=0)


@gluon.jit
def _load_rope(row, valid, NOPE: gl.constexpr):
    """The rotary keys of entries as pairs of bfloat16."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    row = gl.convert_layout((row + NOPE + NOPE // 32).to(gl.pointer_type(gl.int32)), gl.SliceLayout(1, PAIRS))
    valid = gl.convert_layout(valid, gl.SliceLayout(1, PAIRS))
    pair = gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, PAIRS))
    return gl.load(row[:, None] + pair[None, :], mask=valid[:, None], other=0)


@gluon.jit
def _scaled(piece, scale):
    """Four e4m3 values in a word, times float32 ``scale``, rounded to bfloat16: two words of pairs."""
    return gl.inline_asm_elementwise(
        """{ .reg .b16 low, high, h0, h1, h2, h3; .reg .b32 a, b; .reg .f32 f0, f1, f2, f3;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high;
        mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b;
        cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
        mul.rn.f32 f0, f0, $3; mul.rn.f32 f1, f1, $3; mul.rn.f32 f2, f2, $3; mul.rn.f32 f3, f3, $3;
        cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }""",
        "=r,=r,r,f",
        [piece, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _decode(work, keys, tiles, bias, barriers, NOPE: gl.constexpr, N: gl.constexpr, HAS_LENS: gl.constexpr):
    """Decodes the keys of tile after tile into pairs of bfloat16; ``bias`` is -inf where there is no key.

    As soon as a piece is in shared memory, that of the next tile is loaded into its registers: it has a whole tile's
    time to arrive.
    """
    t, split, splits, _first_head, _H = work
    latents, ropes = tiles
    full, empty, _ready, _spent, _queried, _final = barriers
    RAW: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, RAW)
    PIECES: gl.constexpr = NOPE // 64
    count = _count(t, keys, HAS_LENS)
    slot = _slots(split, count, keys, ROWS)
    following = _slots(split + splits, count, keys, ROWS)
    row = _row(slot, keys, NOPE, N)
    scales = _load_scales(row, slot >= 0, NOPE)
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces += (_load_piece(row, slot >= 0, i, RAW),)
    rope = _load_rope(row, slot >= 0, NOPE)
    latent_pairs = reinterpret(latents, gl.int32, [2, 64, NOPE // 2], gl.NVMMASharedLayout(128, 32, 2))
    rope_pairs = reinterpret(ropes, gl.int32, [2, 64, ROPE // 2], gl.NVMMASharedLayout(128, 32, 2))
    iteration = gl.to_tensor(0)
    for tile in range(split, (count + 63) // 64, splits):
        stage = iteration & 1
        row = _row(following, keys, NOPE, N)
        valid = following >= 0
        next_scales = _load_scales(row, valid, NOPE)
        after = _slots(tile + 2 * splits, count, keys, ROWS)
        mbarrier.wait(empty.index(stage), ((iteration >> 1) & 1) ^ 1)
        bias.index(stage).store(gl.where(slot >= 0, 0.0, float("-inf")))
        next_pieces = ()
        for i in gl.static_range(PIECES):
            scale = (scales[i // 4] >> (i // 2 % 2 * 32)).to(gl.int32).to(gl.float32, bitcast=True)
            low, high = _scaled(pieces[i], scale[:, None])
            latent_pairs.index(stage).slice(32 * i, 32, dim=1).store(interleave(low, high))
            next_pieces += (_load_piece(row, valid, i, RAW),)
        rope_pairs.index(stage).store(rope)
        rope = _load_rope(row, valid, NOPE)
        barrier()
        mbarrier.arrive(full.index(stage))
        slot = following
        following = after
        pieces = next_pieces
        scales = next_scales
        iteration += 1


@gluon.jit
def _weigh(
    work, keys, scale_log2, lse_ptr, queries, tiles, bias, weights, decays, factors, barriers,
    SPLIT: gl.constexpr, HAS_LENS: gl.constexpr,
):  # fmt: skip
    """Logits and weights of each tile, and the normalisers."""
    t, split, splits, first_head, H = work
    latent_queries, rope_queries = queries
    latents, ropes = tiles
    full, _empty, ready, spent, queried, final = barriers
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zeros = gl.zeros([64, 64], gl.float32, layout=LOGITS)
    peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LOGITS))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, LOGITS))
    count = _count(t, keys, HAS_LENS)
    mbarrier.wait(queried, 0)
    iteration = gl.to_tensor(0)
    for _tile in range(split, (count + 63) // 64, splits):
        stage = iteration & 1
        mbarrier.wait(full.index(stage), (iteration >> 1) & 1)
        fence_async_shared()  # keys were written by ordinary stores
        logits = warpgroup_mma(
            latent_queries, latents.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        logits = warpgroup_mma(rope_queries, ropes.index(stage).permute((1, 0)), logits, is_async=True)
        attended = bias.index(stage).load(gl.SliceLayout(0, LOGITS)) == 0
        logits = warpgroup_mma_wait(0, deps=[logits])
        weight, decay, peak, total = soften(scaled_logits(logits, attended, scale_log2), peak, total)
        weight = weight.to(weights.dtype)
        mbarrier.wait(spent, (iteration & 1) ^ 1)
        weights.store(weight)
        decays.store(decay)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready)
        iteration += 1
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
    lonely = total == 0  # false for NaN: a NaN in a key that is attended stays visible
    lse = gl.where(lonely, float("-inf"), peak + gl.log2(total))
    if SPLIT:
        gl.store(lse_ptr + (t * splits + split) * H + head, lse, mask=head < H)
    else:
        gl.store(lse_ptr + t * H + head, gl.where(lonely, float("inf"), lse * 0.6931471805599453), mask=head < H)
    factors.store(gl.where(lonely, 0.0, 1 / total))
    barrier()
    mbarrier.arrive(final)


@gluon.jit
def _accumulate(
    work, keys, q, out, queries, tiles, weights, decays, factors, barriers,
    NOPE: gl.constexpr, SPLIT: gl.constexpr, HAS_LENS: gl.constexpr,
):  # fmt: skip
    """Loads the tile of queries, sums weights times keys, and stores the output."""
    t, split, splits, first_head, H = work
    q_ptr, q_stride_t, q_stride_h = q
    out_ptr, out_stride_t, out_stride_h = out
    latent_queries, rope_queries = queries
    latents, _ropes = tiles
    _full, empty, ready, spent, queried, final = barriers
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, NOPE // 4, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    channel = gl.arange(0, NOPE, layout=gl.SliceLayout(0, WIDE))
    narrow_row = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW))
    rotary = NOPE + gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))
    q_row = q_ptr + t * q_stride_t + first_head * q_stride_h
    inside = first_head + row < H
    q_tile = gl.load((q_row + row * q_stride_h)[:, None] + channel[None, :], mask=inside[:, None], other=0)
    narrow = (first_head + narrow_row < H)[:, None]
    rope_tile = gl.load((q_row + narrow_row * q_stride_h)[:, None] + rotary[None, :], mask=narrow, other=0)
    count = _count(t, keys, HAS_LENS)
    latent_queries.store(q_tile)
    rope_queries.store(rope_tile)
    fence_async_shared()
    barrier()
    mbarrier.arrive(queried)

    acc = gl.zeros([64, NOPE], gl.float32, layout=OUT)
    iteration = gl.to_tensor(0)
    for _tile in range(split, (count + 63) // 64, splits):
        stage = iteration & 1
        mbarrier.wait(ready, iteration & 1)
        acc = acc * decays.load(ROWS)[:, None]
        fence_async_shared()
        acc = warpgroup_mma(weights, latents.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()  # both warpgroups have read weights and keys
        mbarrier.arrive(spent)
        mbarrier.arrive(empty.index(stage))
        iteration += 1
    mbarrier.wait(final, 0)
    value = acc * factors.load(ROWS)[:, None]
    if SPLIT:  # float32: four threads write the 32 bytes of a sector
        row_out = out_ptr + ((t * splits + split) * H + first_head) * NOPE
        place = gl.arange(0, 64, layout=ROWS)
        column = gl.arange(0, NOPE, layout=gl.SliceLayout(0, OUT))
        at = row_out + place[:, None] * NOPE + column[None, :]
        gl.store(at, value.to(out_ptr.dtype.element_ty), mask=(first_head + place < H)[:, None])
    else:
        # the queries are no longer read: their memory stages the output, so that whole lines are written
        result = reinterpret(latent_queries, out_ptr.dtype.element_ty, [64, NOPE], gl.NVMMASharedLayout(128, 16, 2))
        result.store(value.to(out_ptr.dtype.element_ty))
        barrier()
        row_out = out_ptr + t * out_stride_t + first_head * out_stride_h + row * out_stride_h
        gl.store(row_out[:, None] + channel[None, :], result.load(WIDE), mask=inside[:, None])


@gluon.jit(do_not_specialize=["H", "width", "limit"])
def attend_v32_hopper_kernel(
    q_ptr,
    pool_ptr,
    indices_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    H,
    scale_log2,
    width,
    limit,
    page_stride,
    indices_stride,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    NOPE: gl.constexpr,
    N: gl.constexpr,
    HAS_LENS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Grid ``(queries * blocks of 64 heads, splits)``; without SPLIT the result is final."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # programs of a query's head blocks are neighbours, since they read the same keys
    blocks = (H + 63) // 64
    splits = gl.num_programs(1)
    t = (gl.program_id(0) // blocks).to(gl.int64)
    split = gl.program_id(1)
    first_head = gl.program_id(0) % blocks * 64
    gdc_launch_dependents()
    latent_queries = gl.allocate_shared_memory(gl.bfloat16, [64, NOPE], SHARED)
    rope_queries = gl.allocate_shared_memory(gl.bfloat16, [64, ROPE], SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [2, 64, NOPE], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, ROPE], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    factors = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    spent = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    queried = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    final = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(spent, count=1)
    mbarrier.init(queried, count=1)
    mbarrier.init(final, count=1)
    gdc_wait()

    work = (t, split, splits, first_head, H)
    keys = (pool_ptr, page_stride, indices_ptr + t * indices_stride, lens_ptr, width, limit)
    q = (q_ptr, q_stride_t, q_stride_h)
    out = (out_ptr, out_stride_t, out_stride_h)
    queries = (latent_queries, rope_queries)
    tiles = (latents, ropes)
    barriers = (full, empty, ready, spent, queried, final)
    gl.warp_specialize(
        [
            (
                _accumulate,
                (work, keys, q, out, queries, tiles, weights, decays, factors, barriers, NOPE, SPLIT, HAS_LENS),
            ),
            (
                _weigh,
                (
                    work, keys, scale_log2, lse_ptr, queries, tiles, bias, weights, decays, factors, barriers,
                    SPLIT, HAS_LENS,
                ),
            ),
            (_decode, (work, keys, tiles, bias, barriers, NOPE, N, HAS_LENS)),
        ],
        [4, 4],
        [72, 120],  # registers of a thread; 160 are left for the output: a program has 65536
    )  # fmt: skip
