"""Gluon device code of `linear_hopper`: products of one input with several weights on Hopper's tensor cores.

A job is a tile of ``ROWS`` rows of a weight by ``TOKENS`` tokens, over all channels or one share of them. One warp asks
for blocks of 128 bytes of channels of both, ``STAGES`` of them ahead, the first ones of the weight before the launch
ahead has ended. One or two warpgroups multiply: the weight is the left factor, of which tensor cores take 64 rows at
once. Products with an FP8 weight are fresh for each block, and added under its scales. Factors come from shared memory.

Tried on an H200, 128 tokens: the input kept in shared memory by programs that go through tiles of 64 rows of ``wq_b``
21.3 us instead of 20.0; without loading the input at all 19.5; without adding the products 16.6.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_attn.kernels.common.gluon import load_tile, reinterpret
from deepseek_attn.kernels.linear.linear_hopper_products import PLAIN_LAYOUT, finish, sum_plain, sum_scaled


@gluon.jit
def _pick(values, firsts: gl.constexpr, tile):
    """The value of the segment that holds ``tile``: segment i starts at tile ``firsts[i]``."""
    value = values[0]
    for i in gl.static_range(1, len(firsts)):
        value = gl.where(tile >= firsts[i], values[i], value)
    return value


@gluon.jit
def _pick_constant(values: gl.constexpr, firsts: gl.constexpr, tile):
    value = gl.to_tensor(values[0])
    for i in gl.static_range(1, len(firsts)):
        value = gl.where(tile >= firsts[i], values[i], value)
    return value


@gluon.jit
def _turns(job, end):
    """How often a program goes from one job to its next until ``end``."""
    programs = gl.num_programs(0)
    return gl.maximum(end - job + programs - 1, 0) // programs


@gluon.jit
def _share(job, m_tiles, BLOCKS: gl.constexpr, SPLITS: gl.constexpr):
    """Tile and share of a job among those of its kind, the first block and the end of the share."""
    SHARE: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    tile = job // m_tiles // SPLITS
    split = job // m_tiles % SPLITS
    return tile, split, split * SHARE, gl.minimum(split * SHARE + SHARE, BLOCKS)


@gluon.jit
def _rows(tile, SIZES: gl.constexpr, FIRSTS: gl.constexpr, GROUP_ROWS: gl.constexpr, ROWS: gl.constexpr):
    """The first row of a tile, the last one of its weight or group, and the group."""
    if GROUP_ROWS > 0:
        GROUP_TILES: gl.constexpr = (GROUP_ROWS + ROWS - 1) // ROWS
        group = tile // GROUP_TILES
        return group * GROUP_ROWS + tile % GROUP_TILES * ROWS, (group + 1) * GROUP_ROWS - 1, group
    else:
        start = (tile - _pick_constant(FIRSTS, FIRSTS, tile)) * ROWS
        return start, _pick_constant(SIZES, FIRSTS, tile) - 1, tile * 0


@gluon.jit
def _ask_weight(descs, tile, row, block, full, buffer, FIRSTS: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr):
    """Asks for a block of the weight that holds ``tile``."""
    channel = block * (128 if FP8 else 64)
    if not FP8:
        buffer = reinterpret(buffer, DTYPE, [buffer.shape[0], 64], PLAIN_LAYOUT)
    for i in gl.static_range(len(FIRSTS)):
        here = tile >= FIRSTS[i]
        if i + 1 < len(FIRSTS):
            here = here & (tile < FIRSTS[i + 1])
        load_tile(descs[i], [row, channel], full, buffer, pred=here)


@gluon.jit
def _load(
    job,
    jobs,
    first_job,
    n,
    ahead,
    m_tiles,
    inputs,
    weights,
    group_stride,
    buffers,
    CUT: gl.constexpr,
    SIZES: gl.constexpr,
    FIRSTS: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    FP8: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Asks for the blocks of the jobs of one kind that are this program's; returns what the next kind starts from."""
    ROWS: gl.constexpr = CUT[1]
    TOKENS: gl.constexpr = CUT[2]
    STAGES: gl.constexpr = CUT[5]
    BLOCKS: gl.constexpr = CUT[0] // 128 if FP8 else (CUT[0] + 63) // 64
    SCALES: gl.constexpr = 4 * (TOKENS if TOKENS > 32 else 32) if FP8 else 0
    BYTES: gl.constexpr = (ROWS + TOKENS) * 128 + SCALES
    w_buffer, x_buffer, scale_buffer, full, empty = buffers
    for _i in range(_turns(job, jobs)):
        token = job % m_tiles * TOKENS
        tile, _split, first, end = _share(job - first_job, m_tiles, BLOCKS, SPLITS)
        row, _last, group = _rows(tile, SIZES, FIRSTS, GROUP_ROWS, ROWS)
        ahead = gl.minimum(ahead, end - first)
        for i in range(ahead):
            mbarrier.expect(full.index(i), BYTES)
            _ask_weight(weights, tile, row, first + i, full.index(i), w_buffer.index(i), FIRSTS, FP8, DTYPE)
        if ahead > 0:
            gdc_wait()
        for block in range(first, end):
            stage = n % STAGES
            filled = full.index(stage)
            if block >= first + ahead:
                mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
                mbarrier.expect(filled, BYTES)
                _ask_weight(weights, tile, row, block, filled, w_buffer.index(stage), FIRSTS, FP8, DTYPE)
            if FP8:
                place = [group * group_stride + token, block * 128]
                load_tile(inputs[0], place, filled, x_buffer.index(stage))
                place = [group * BLOCKS + block, token]
                load_tile(inputs[1], place, filled, scale_buffer.index(stage))
            else:
                buffer = reinterpret(x_buffer.index(stage), DTYPE, [TOKENS, 64], PLAIN_LAYOUT)
                load_tile(inputs[2], [token, block * 64], filled, buffer)
            n += 1
        ahead = 0
        job += gl.num_programs(0)
    return job, n, ahead


@gluon.jit
def _load_all(
    jobs,
    M,
    inputs,
    weights,
    plain_weights,
    group_stride,
    buffers,
    CUT: gl.constexpr,
    SCALED: gl.constexpr,
    PLAIN: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Asks for the blocks of all jobs of this program in turn."""
    SIZES: gl.constexpr = SCALED[0]
    FIRSTS: gl.constexpr = SCALED[1]
    PLAIN_SIZES: gl.constexpr = PLAIN[0]
    PLAIN_FIRSTS: gl.constexpr = PLAIN[1]
    m_tiles = (M + CUT[2] - 1) // CUT[2]
    scaled_jobs = m_tiles * SCALED[2] * SCALED[3]
    job = gl.program_id(0)
    n = job * 0
    ahead = n + CUT[5]  # blocks of weights that are asked for before the launch ahead has ended
    if SCALED[2] > 0:
        job, n, ahead = _load(
            job, scaled_jobs, 0, n, ahead, m_tiles, inputs, weights, group_stride, buffers, CUT, SIZES, FIRSTS,
            SCALED[3], SCALED[4], True, DTYPE,
        )  # fmt: skip
    if PLAIN[2] > 0:
        _load(
            job, jobs, scaled_jobs, n, ahead, m_tiles, inputs, plain_weights, group_stride, buffers, CUT, PLAIN_SIZES,
            PLAIN_FIRSTS, PLAIN[3], 0, False, DTYPE,
        )  # fmt: skip


@gluon.jit
def _multiply_all(
    jobs,
    M,
    scales,
    outs,
    plain_outs,
    rounded,
    parts,
    buffers,
    OWNER: gl.constexpr,
    CUT: gl.constexpr,
    SCALED: gl.constexpr,
    PLAIN: gl.constexpr,
    DTYPE: gl.constexpr,
    POW2: gl.constexpr,
):
    """The part of each tile that belongs to warpgroup ``OWNER``: some of its rows, or some of its tokens."""
    K: gl.constexpr = CUT[0]
    ROWS: gl.constexpr = CUT[1]
    TOKENS: gl.constexpr = CUT[2]
    SIZES: gl.constexpr = SCALED[0]
    FIRSTS: gl.constexpr = SCALED[1]
    TILES: gl.constexpr = SCALED[2]
    PLAIN_SIZES: gl.constexpr = PLAIN[0]
    PLAIN_FIRSTS: gl.constexpr = PLAIN[1]
    OWN_ROWS: gl.constexpr = CUT[3]
    OWN_TOKENS: gl.constexpr = CUT[4]
    STAGES: gl.constexpr = CUT[5]
    OWNERS: gl.constexpr = ROWS // OWN_ROWS * (TOKENS // OWN_TOKENS)
    ROW: gl.constexpr = OWNER * OWN_ROWS if ROWS > OWN_ROWS else 0
    TOKEN: gl.constexpr = OWNER * OWN_TOKENS if TOKENS > OWN_TOKENS else 0
    SCALES: gl.constexpr = TOKENS if TOKENS > 32 else 32
    OWN: gl.constexpr = (ROW, TOKEN, OWN_ROWS, OWN_TOKENS, STAGES, SCALES)
    part_ptr, plain_part_ptr, counter_ptr = parts
    m_tiles = (M + TOKENS - 1) // TOKENS
    scaled_jobs = m_tiles * TILES * SCALED[3]
    job = gl.program_id(0)
    n = job * 0
    gdc_wait()
    if TILES > 0:
        for _i in range(_turns(job, scaled_jobs)):
            tile, split, first, end = _share(job, m_tiles, K // 128, SCALED[3])
            start, last_row, _group = _rows(tile, SIZES, FIRSTS, SCALED[4], ROWS)
            scale_row = _pick(scales, FIRSTS, tile) + (start + ROW) // 128 * (K // 128)
            sums = sum_scaled(buffers, n, first, end, scale_row, OWN)
            number = (tile * m_tiles + job % m_tiles) * OWNERS + OWNER
            place = (part_ptr, counter_ptr + number, number, split)
            corner = (start + ROW, last_row, job % m_tiles * TOKENS + TOKEN, M)
            out = (_pick(outs, FIRSTS, tile), _pick_constant(SIZES, FIRSTS, tile))
            finish(sums, out, rounded, place, corner, SCALED[3], POW2)
            n += end - first
            job += gl.num_programs(0)
    if PLAIN[2] > 0:
        for _i in range(_turns(job, jobs)):
            tile, split, first, end = _share(job - scaled_jobs, m_tiles, (K + 63) // 64, PLAIN[3])
            start, last_row, _group = _rows(tile, PLAIN_SIZES, PLAIN_FIRSTS, 0, ROWS)
            sums = sum_plain(buffers, n, first, end, OWN, DTYPE)
            number = (tile * m_tiles + job % m_tiles) * OWNERS + OWNER
            place = (plain_part_ptr, counter_ptr + m_tiles * TILES * OWNERS + number, number, split)
            corner = (start + ROW, last_row, job % m_tiles * TOKENS + TOKEN, M)
            out = (_pick(plain_outs, PLAIN_FIRSTS, tile), _pick_constant(PLAIN_SIZES, PLAIN_FIRSTS, tile))
            finish(sums, out, (None, None, 0), place, corner, PLAIN[3], POW2)
            n += end - first
            job += gl.num_programs(0)


@gluon.jit(do_not_specialize=["M", "jobs", "group_stride", "rounded_scale_stride"])
def linear_hopper_kernel(
    q_desc,
    scale_desc,
    x_desc,
    w0,
    w1,
    w2,
    p0,
    p1,
    p2,
    p3,
    p4,
    scales,
    outs,
    plain_outs,
    rounded_ptr,
    rounded_scale_ptr,
    part_ptr,
    plain_part_ptr,
    counter_ptr,
    M,
    jobs,
    group_stride,
    rounded_scale_stride,
    CUT: gl.constexpr,
    SCALED: gl.constexpr,
    PLAIN: gl.constexpr,
    DTYPE: gl.constexpr,
    POW2: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Persistent: ``jobs`` tiles and shares of FP8 weights, then of plain ones.

    Args:
        q_desc, scale_desc: rounded input ``[M, K]`` and its scales ``[K / 128, M]``; x_desc: the plain one, ``DTYPE``.
        w0, ..., p0, ...: FP8 weights and plain ones. scales, outs: tuples by FP8 weight; plain_outs: by plain one.
        rounded_ptr, rounded_scale_ptr: the output once more, rounded to FP8; or None.
        group_stride: rows from the input of one group to the next.
        CUT: K, rows and tokens of a tile, rows and tokens of a warpgroup, stages.
        SCALED: sizes, first tiles, number of tiles, splits, rows of a group; PLAIN: the first four for plain weights.
        REGISTERS: of a thread of the second warpgroup.
    """
    gdc_launch_dependents()
    ROWS: gl.constexpr = CUT[1]
    TOKENS: gl.constexpr = CUT[2]
    OWNERS: gl.constexpr = ROWS // CUT[3] * (TOKENS // CUT[4])
    STAGES: gl.constexpr = CUT[5]
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_buffer = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], BYTES)
    x_buffer = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, 128], BYTES)
    # TMA writes at multiples of 128 bytes
    SCALES: gl.constexpr = TOKENS if TOKENS > 32 else 32
    scale_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SCALES], gl.NVMMASharedLayout(0, 32, 2))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=OWNERS)
    fence_async_shared()
    inputs = (q_desc, scale_desc, x_desc)
    weights = (w0, w1, w2)
    plain_weights = (p0, p1, p2, p3, p4)
    buffers = (w_buffer, x_buffer, scale_buffer, full, empty)
    parts = (part_ptr, plain_part_ptr, counter_ptr)
    rounded = (rounded_ptr, rounded_scale_ptr, rounded_scale_stride)
    # fmt: off
    if OWNERS == 1:
        gl.warp_specialize(
            [
                (_multiply_all, (jobs, M, scales, outs, plain_outs, rounded, parts, buffers, 0, CUT, SCALED, PLAIN,
                                 DTYPE, POW2)),
                (_load_all, (jobs, M, inputs, weights, plain_weights, group_stride, buffers, CUT, SCALED, PLAIN,
                             DTYPE)),
            ],
            [1],
            [40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_all, (jobs, M, scales, outs, plain_outs, rounded, parts, buffers, 0, CUT, SCALED, PLAIN,
                                 DTYPE, POW2)),
                (_multiply_all, (jobs, M, scales, outs, plain_outs, rounded, parts, buffers, 1, CUT, SCALED, PLAIN,
                                 DTYPE, POW2)),
                (_load_all, (jobs, M, inputs, weights, plain_weights, group_stride, buffers, CUT, SCALED, PLAIN,
                             DTYPE)),
            ],
            [4, 1],
            [REGISTERS, 40],
        )
    # fmt: on
