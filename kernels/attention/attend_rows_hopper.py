"""Gluon device code of `sparse_attention` for Hopper: 64 heads over rows of a workspace, warp-specialised.

Persistent: a program computes job after job (64 heads of a query) without draining its pipeline. Four warps copy tiles
of 64 rows to shared memory, four compute logits and weights, eight hold the output ``[64, DIM]`` in registers and
multiply weights with keys. Two tiles are in flight.

Barriers, for each of the two stages: ``full`` (keys are in shared memory), ``ready`` (weights are in shared memory),
``empty`` (keys and weights were read). For each job: ``final`` (normalisers are in shared memory) and ``read`` (they
were read).

Measured on an H200, 4096 queries of 64 heads over 640 keys: 879 us; tiles of 32 keys in four stages 989 us; logits of
the next tile before the weights of this one 1115 us.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepseek_attn.kernels.attention.tile_steps_hopper import (
    LN2,
    AttendWork,
    SoftmaxBuffers,
    accumulate_tile,
    put_factors,
    scaled_logits,
    store_lse,
    weigh_tile,
)
from deepseek_attn.kernels.common.gluon import barrier, copy_to_shared

BLOCK = gl.constexpr(64)  # keys of a tile


class RowJobs(NamedTuple):
    """Jobs of all programs: blocks of 64 of ``H`` heads of a query.

    Attributes:
        lens: ``[T]`` leading columns of a query that count; None: all ``width``.
    """

    H: Any
    jobs: Any
    lens: Any
    width: Any


class RowTileBuffers(NamedTuple):
    """Shared memory of queries and of two tiles of rows, of the rows' dtype, and barriers.

    Attributes:
        queries: ``[64, DIM]``; keys: ``[2, 64, DIM]``; bias: float32 ``[2, 64]``, 0 or -inf.
        full, empty, ready, final, read: barriers, as above.
    """

    queries: Any
    keys: Any
    bias: Any
    full: Any
    empty: Any
    ready: Any
    final: Any
    read: Any


@gluon.jit
def _job(job, work):
    """The query of a job, the first of its 64 heads and the number of columns that count."""
    blocks = (work.H + 63) // 64
    t = (job // blocks).to(gl.int64)
    count = work.width
    if work.lens is not None:
        count = gl.maximum(gl.minimum(gl.load(work.lens + t), work.width), 0).to(gl.int32)
    return t, job % blocks * 64, count


@gluon.jit
def _copy(work, rows, limit, tiles, DIM: gl.constexpr):
    """Copies rows of keys tile by tile; ``bias`` is -inf for missing keys."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, COPY))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    iteration = gl.to_tensor(0)
    for job in range(gl.program_id(0), work.jobs, gl.num_programs(0)):
        t, _head, count = _job(job, work)
        index_row = rows.indices + t * rows.indices_stride
        slot = gl.load(index_row + column, mask=column < count, other=-1)
        for start in range(0, count, BLOCK):
            stage = iteration & 1
            valid = (slot >= 0) & (slot < limit)
            row = rows.pool + gl.where(valid, slot, 0).to(gl.int64) * rows.page_stride
            masked = gl.where(valid, 0.0, float("-inf"))
            # wait until the tile before the last one, in the same memory, was read by both products
            mbarrier.wait(tiles.empty.index(stage), ((iteration >> 1) & 1) ^ 1)
            copy_to_shared(
                tiles.keys.index(stage), row[:, None] + channel[None, :], mask=valid[:, None]
            )  # zeros for missing keys
            async_copy.mbarrier_arrive(tiles.full.index(stage), increment_count=False)  # when its copies have arrived
            following = start + BLOCK + column
            slot = gl.load(index_row + following, mask=following < count, other=-1)
            tiles.bias.index(stage).store(masked)
            barrier()  # all threads have stored their bias
            mbarrier.arrive(tiles.full.index(stage))
            iteration += 1


@gluon.jit
def _weigh(work, q, outputs, tiles, softmax, DIM: gl.constexpr):
    """Logits and weights of each tile, and the normalisers of each job."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    zeros = gl.zeros([64, BLOCK], gl.float32, layout=LOGITS)
    iteration = gl.to_tensor(0)
    job_count = gl.to_tensor(0)
    for job in range(gl.program_id(0), work.jobs, gl.num_programs(0)):
        t, first_head, count = _job(job, work)
        # only these warps read the queries; they have finished reading the previous job's queries
        q_row = q.q + t * q.stride_t + (first_head + row) * q.stride_h
        copy_to_shared(tiles.queries, q_row[:, None] + channel[None, :], mask=(first_head + row < work.H)[:, None])
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()  # tensor cores read the queries
        barrier()  # the copies of all threads have arrived
        peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LOGITS))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, LOGITS))
        for _start in range(0, count, BLOCK):
            stage = iteration & 1
            mbarrier.wait(tiles.full.index(stage), (iteration >> 1) & 1)  # keys and bias are in shared memory
            fence_async_shared()  # keys were written by ordinary copies
            keys = tiles.keys.index(stage).permute((1, 0))
            logits = warpgroup_mma(tiles.queries, keys, zeros, use_acc=False, is_async=True)
            attended = tiles.bias.index(stage).load(gl.SliceLayout(0, LOGITS)) == 0
            logits = warpgroup_mma_wait(0, deps=[logits])
            logits = scaled_logits(logits, attended, q.scale_log2)
            peak, total = weigh_tile(logits, peak, total, stage, softmax, tiles.ready)
            iteration += 1
        factor = store_lse(peak, total, AttendWork(t, 0, 1, first_head, work.H), outputs, False)
        if outputs.largest is not None:
            head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
            gl.store(outputs.largest + t * work.H + head, peak * LN2, mask=head < work.H)
        mbarrier.wait(tiles.read, (job_count & 1) ^ 1)  # the normalisers of the job before were read
        put_factors(factor, softmax.factors, tiles.final)
        job_count += 1


@gluon.jit
def _accumulate(work, outputs, tiles, softmax, DIM: gl.constexpr):
    """The sum of weights times keys of each job, and its output."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 4, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    row = gl.arange(0, 64, layout=ROWS)
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))
    iteration = gl.to_tensor(0)
    job_count = gl.to_tensor(0)
    for job in range(gl.program_id(0), work.jobs, gl.num_programs(0)):
        t, first_head, count = _job(job, work)
        acc = gl.zeros([64, DIM], gl.float32, layout=OUT)
        for _start in range(0, count, BLOCK):
            stage = iteration & 1
            mbarrier.wait(tiles.ready.index(stage), (iteration >> 1) & 1)  # weights are in shared memory, as keys are
            acc = accumulate_tile(acc, softmax, stage, tiles.keys, stage)
            mbarrier.arrive(tiles.empty.index(stage))  # the warps that copy may write the tile's memory
            iteration += 1
        mbarrier.wait(tiles.final, job_count & 1)  # normalisers are in shared memory
        factor = softmax.factors.load(ROWS)
        barrier()  # all warps have read the queries: the next job's queries may be written
        mbarrier.arrive(tiles.read)
        row_out = outputs.out + t * outputs.stride_t + (first_head + row) * outputs.stride_h
        value = (acc * factor[:, None]).to(outputs.out.dtype.element_ty)
        gl.store(row_out[:, None] + channel[None, :], value, mask=(first_head + row < work.H)[:, None])
        job_count += 1


@gluon.jit(do_not_specialize=["H", "width", "limit", "jobs"])
def attend_rows_hopper_kernel(q, rows, outputs, H, jobs, width, limit, DIM: gl.constexpr):
    """Rows and queries are of one 16-bit dtype.

    Args:
        q, rows, outputs: `AttendQueries`, `AttendPool` and `AttendOutputs` of `attend_triton`; a page is a row.
        H: heads; jobs: blocks of 64 heads of a query; width: columns of the indices; limit: rows; DIM: channels.
    """
    STAGES: gl.constexpr = 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DTYPE: gl.constexpr = rows.pool.dtype.element_ty
    queries = gl.allocate_shared_memory(DTYPE, [64, DIM], SHARED)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, DIM], SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [STAGES, 64, BLOCK], gl.NVMMASharedLayout(2 * BLOCK, 16, 2))
    bias = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT)
    factors = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    final = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)  # each thread whose copies arrived, and one for the bias
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(final, count=1)
    mbarrier.init(read, count=1)

    work = RowJobs(H, jobs, rows.lens, width)
    tiles = RowTileBuffers(queries, keys, bias, full, empty, ready, final, read)
    softmax = SoftmaxBuffers(weights, decays, factors)
    # registers of a thread: 168 for the output; a program has 65536
    gl.warp_specialize(
        [
            (_accumulate, (work, outputs, tiles, softmax, DIM)),
            (_weigh, (work, q, outputs, tiles, softmax, DIM)),
            (_copy, (work, rows, limit, tiles, DIM)),
        ],
        [4, 4],
        [112, 64],
    )
