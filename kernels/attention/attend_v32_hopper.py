"""Gluon device code of `sparse_attention_paged` for Hopper: 64 heads over ``fp8_v32`` pages, warp-specialised.

Warps are specialised as in `attend_hopper`: four warps decode tiles of 64 keys into shared memory, four compute logits
and weights, eight hold the output ``[64, NOPE]`` in registers and multiply weights with keys. Two decoded tiles are in
flight. Differences: the values are the quantised channels alone, so rotary keys and queries have separate memory; keys
are bfloat16; and 576 channels leave room for the weights of one tile only.

Barriers, for each of the two stages: ``full`` (keys are in shared memory), ``empty`` (both products have read them);
for each tile: ``ready`` (weights are in shared memory), ``spent`` (they were read). ``queried``: queries are in shared
memory; ``final``: normalisers are in shared memory.
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

from deepseek_attn.kernels.attention.attend_hopper_keys import interleave
from deepseek_attn.kernels.attention.tile_steps_hopper import (
    AttendWork,
    SoftmaxBuffers,
    accumulate_tile,
    put_factors,
    put_weights,
    scaled_logits,
    soften,
    store_lse,
    store_staged,
)
from deepseek_attn.kernels.common.gluon import barrier, reinterpret

ROPE = gl.constexpr(64)  # rotary channels


class LatentKeys(NamedTuple):
    """Keys of a query.

    Attributes:
        pool: first page; page_stride: bytes from one page to the next.
        indices: this query's row of slots; lens: ``[T]`` leading columns that count; None: all ``width``.
        limit: entries in the pool.
    """

    pool: Any
    page_stride: Any
    indices: Any
    lens: Any
    width: Any
    limit: Any


class LatentTileBuffers(NamedTuple):
    """Shared memory of queries and of two decoded tiles, all bfloat16, and barriers.

    Attributes:
        q_latent, q_rope: ``[64, NOPE]`` and ``[64, 64]`` channels of the queries.
        latents, ropes: ``[2, 64, NOPE]`` and ``[2, 64, 64]`` channels of the keys.
        bias: float32 ``[2, 64]``, 0 or -inf.
        full, empty, ready, spent, queried, final: barriers, as above.
    """

    q_latent: Any
    q_rope: Any
    latents: Any
    ropes: Any
    bias: Any
    full: Any
    empty: Any
    ready: Any
    spent: Any
    queried: Any
    final: Any


@gluon.jit
def _count(t, keys):
    """Columns of query ``t`` that count."""
    count = keys.width
    if keys.lens is not None:
        count = gl.maximum(gl.minimum(gl.load(keys.lens + t), keys.width), 0).to(gl.int32)
    return count


@gluon.jit
def _slots(tile, count, keys, layout: gl.constexpr):
    """Slots of the keys of a tile, -1 for missing keys."""
    column = tile * 64 + gl.arange(0, 64, layout=layout)
    slot = gl.load(keys.indices + column, mask=column < count, other=-1)
    return gl.where((slot >= 0) & (slot < keys.limit), slot.to(gl.int32), -1)


@gluon.jit
def _row(slot, keys, NOPE: gl.constexpr, N: gl.constexpr):
    """Pointers to the entries of slots; a missing slot gets a pointer to an arbitrary entry, and its load is masked."""
    entry = gl.maximum(slot, 0)
    return keys.pool + (entry // N).to(gl.int64) * keys.page_stride + entry % N * (NOPE + NOPE // 32 + 2 * ROPE)


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
def _decode(work, keys, tiles, SHAPE: gl.constexpr):
    """Decodes the keys tile by tile into pairs of bfloat16; ``bias`` is -inf for missing keys.

    As soon as a piece is in shared memory, the next tile's piece is loaded into the same registers: the load has the
    time of a whole tile to arrive.
    """
    NOPE: gl.constexpr = SHAPE.FIRST.nope
    N: gl.constexpr = SHAPE.FIRST.entries
    RAW: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, RAW)
    PIECES: gl.constexpr = NOPE // 64
    splits = work.splits
    count = _count(work.t, keys)
    slot = _slots(work.split, count, keys, ROWS)
    following = _slots(work.split + splits, count, keys, ROWS)
    row = _row(slot, keys, NOPE, N)
    scales = _load_scales(row, slot >= 0, NOPE)
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces += (_load_piece(row, slot >= 0, i, RAW),)
    rope = _load_rope(row, slot >= 0, NOPE)
    latent_pairs = reinterpret(tiles.latents, gl.int32, [2, 64, NOPE // 2], gl.NVMMASharedLayout(128, 32, 2))
    rope_pairs = reinterpret(tiles.ropes, gl.int32, [2, 64, ROPE // 2], gl.NVMMASharedLayout(128, 32, 2))
    iteration = gl.to_tensor(0)
    for tile in range(work.split, (count + 63) // 64, splits):
        stage = iteration & 1
        # load scales of tile i + 1 and slots of tile i + 2 while tile i waits for free shared memory
        row = _row(following, keys, NOPE, N)
        valid = following >= 0
        next_scales = _load_scales(row, valid, NOPE)
        after = _slots(tile + 2 * splits, count, keys, ROWS)
        # wait until the tile before the last one, in the same memory, was read by both products
        mbarrier.wait(tiles.empty.index(stage), ((iteration >> 1) & 1) ^ 1)
        tiles.bias.index(stage).store(gl.where(slot >= 0, 0.0, float("-inf")))
        next_pieces = ()
        for i in gl.static_range(PIECES):
            scale = (scales[i // 4] >> (i // 2 % 2 * 32)).to(gl.int32).to(gl.float32, bitcast=True)
            low, high = _scaled(pieces[i], scale[:, None])
            latent_pairs.index(stage).slice(32 * i, 32, dim=1).store(interleave(low, high))
            next_pieces += (_load_piece(row, valid, i, RAW),)
        rope_pairs.index(stage).store(rope)
        rope = _load_rope(row, valid, NOPE)
        barrier()  # all threads have stored their keys: the warps that weigh may read the tile
        mbarrier.arrive(tiles.full.index(stage))
        slot = following
        following = after
        pieces = next_pieces
        scales = next_scales
        iteration += 1


@gluon.jit
def _weigh(work, keys, scale_log2, outputs, tiles, softmax, SHAPE: gl.constexpr):
    """Logits and weights of each tile, and the normalisers."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zeros = gl.zeros([64, 64], gl.float32, layout=LOGITS)
    peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LOGITS))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, LOGITS))
    count = _count(work.t, keys)
    mbarrier.wait(tiles.queried, 0)  # queries are in shared memory
    iteration = gl.to_tensor(0)
    for _tile in range(work.split, (count + 63) // 64, work.splits):
        stage = iteration & 1
        mbarrier.wait(tiles.full.index(stage), (iteration >> 1) & 1)  # keys are in shared memory
        fence_async_shared()  # keys were written by ordinary stores
        logits = warpgroup_mma(
            tiles.q_latent, tiles.latents.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        logits = warpgroup_mma(tiles.q_rope, tiles.ropes.index(stage).permute((1, 0)), logits, is_async=True)
        attended = tiles.bias.index(stage).load(gl.SliceLayout(0, LOGITS)) == 0
        logits = warpgroup_mma_wait(0, deps=[logits])
        weight, decay, peak, total = soften(scaled_logits(logits, attended, scale_log2), peak, total)
        weight = weight.to(softmax.weights.dtype)
        mbarrier.wait(tiles.spent, (iteration & 1) ^ 1)  # the weights of the tile before were read
        put_weights(weight, decay, softmax, 0)
        mbarrier.arrive(tiles.ready)  # the warps that accumulate may read the weights
        iteration += 1
    put_factors(store_lse(peak, total, work, outputs, SHAPE.SPLIT), softmax.factors, tiles.final)


@gluon.jit
def _accumulate(work, keys, q, outputs, tiles, softmax, SHAPE: gl.constexpr):
    """Loads the tile of queries, sums weights times keys, and stores the output."""
    NOPE: gl.constexpr = SHAPE.FIRST.nope
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, NOPE // 4, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    t = work.t
    first_head = work.first_head
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    channel = gl.arange(0, NOPE, layout=gl.SliceLayout(0, WIDE))
    narrow_row = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW))
    rotary = NOPE + gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))
    q_row = q.q + t * q.stride_t + first_head * q.stride_h
    inside = first_head + row < work.H
    q_tile = gl.load((q_row + row * q.stride_h)[:, None] + channel[None, :], mask=inside[:, None], other=0)
    narrow = (first_head + narrow_row < work.H)[:, None]
    rope_tile = gl.load((q_row + narrow_row * q.stride_h)[:, None] + rotary[None, :], mask=narrow, other=0)
    count = _count(t, keys)
    tiles.q_latent.store(q_tile)
    tiles.q_rope.store(rope_tile)
    fence_async_shared()  # tensor cores read the queries
    barrier()  # all threads have stored theirs
    mbarrier.arrive(tiles.queried)

    acc = gl.zeros([64, NOPE], gl.float32, layout=OUT)
    iteration = gl.to_tensor(0)
    for _tile in range(work.split, (count + 63) // 64, work.splits):
        stage = iteration & 1
        mbarrier.wait(tiles.ready, iteration & 1)  # weights are in shared memory, as keys are
        acc = accumulate_tile(acc, softmax, 0, tiles.latents, stage)
        mbarrier.arrive(tiles.spent)  # the warps that weigh may write the next weights
        mbarrier.arrive(tiles.empty.index(stage))  # the warps that decode may write the tile's memory
        iteration += 1
    mbarrier.wait(tiles.final, 0)  # normalisers are in shared memory
    value = acc * softmax.factors.load(ROWS)[:, None]
    if SHAPE.SPLIT:  # float32: four threads write the 32 bytes of a sector
        row_out = outputs.out + ((t * work.splits + work.split) * work.H + first_head) * NOPE
        head_row = gl.arange(0, 64, layout=ROWS)
        column = gl.arange(0, NOPE, layout=gl.SliceLayout(0, OUT))
        target = row_out + head_row[:, None] * NOPE + column[None, :]
        gl.store(target, value.to(outputs.out.dtype.element_ty), mask=(first_head + head_row < work.H)[:, None])
    else:
        row_out = outputs.out + t * outputs.stride_t + first_head * outputs.stride_h
        store_staged(value, tiles.q_latent, row_out, outputs.stride_h, work, outputs.out.dtype.element_ty)


@gluon.jit(do_not_specialize=["H", "width", "limit"])
def attend_v32_hopper_kernel(q, keys, outputs, H, width, limit, SHAPE: gl.constexpr):
    """Grid ``(queries * blocks of 64 heads, splits)``; without SPLIT the result is final.

    Args:
        q, keys, outputs: `AttendQueries`, `AttendPool` and `AttendOutputs` of `attend_triton`, without a sink.
        H: heads; width: columns of the indices; limit: entries in the pool; SHAPE: `AttendShape`.
    """
    NOPE: gl.constexpr = SHAPE.FIRST.nope
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # programs of a query's head blocks are neighbours, since they read the same keys
    blocks = (H + 63) // 64
    splits = gl.num_programs(1)
    t = (gl.program_id(0) // blocks).to(gl.int64)
    split = gl.program_id(1)
    first_head = gl.program_id(0) % blocks * 64
    gdc_launch_dependents()
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [64, NOPE], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, ROPE], SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [2, 64, NOPE], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, ROPE], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SHARED)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [1, 64], FLAT)
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
    gdc_wait()  # the previous kernel has written queries, keys and indices

    work = AttendWork(t, split, splits, first_head, H)
    row = keys.indices + t * keys.indices_stride
    latent_keys = LatentKeys(keys.pool, keys.page_stride, row, keys.lens, width, limit)
    tiles = LatentTileBuffers(q_latent, q_rope, latents, ropes, bias, full, empty, ready, spent, queried, final)
    softmax = SoftmaxBuffers(weights, decays, factors)
    gl.warp_specialize(
        [
            (_accumulate, (work, latent_keys, q, outputs, tiles, softmax, SHAPE)),
            (_weigh, (work, latent_keys, q.scale_log2, outputs, tiles, softmax, SHAPE)),
            (_decode, (work, latent_keys, tiles, SHAPE)),
        ],
        [4, 4],
        [72, 120],  # registers of a thread; 160 are left for the output: a program has 65536
    )
