"""Gluon device code of `sparse_attention` for Hopper: 64 heads over rows of a workspace, warp-specialised.

Persistent: a program computes job after job (64 heads of a query) without draining its pipeline. Four warps copy tiles
of 64 rows to shared memory, four compute logits and weights, eight hold the output ``[64, DIM]`` in registers and
multiply weights with keys. Two tiles are in flight.

Barriers, for each of the two stages: ``full`` (keys are in shared memory), ``ready`` (weights are), ``empty`` (both
were read). For each job: ``final`` (normalisers are in shared memory) and ``read`` (they were read).

Measured on an H200, 4096 queries of 64 heads over 640 keys: 879 us; tiles of 32 keys in four stages 989 us; logits of
the next tile before the weights of this one 1115 us.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepseek_attn.kernels.attention.softmax_hopper import scaled_logits, weigh_tile
from deepseek_attn.kernels.common.gluon import barrier, copy_to_shared
from deepseek_attn.kernels.common.triton_types import LOG2E

BLOCK = gl.constexpr(64)  # keys of a tile


@gluon.jit
def _job(job, heads, lens_ptr, width, HAS_LENS: gl.constexpr):
    """The query of a job, the first of its 64 heads and the number of columns that count."""
    blocks = (heads + 63) // 64
    t = (job // blocks).to(gl.int64)
    count = width
    if HAS_LENS:
        count = gl.maximum(gl.minimum(gl.load(lens_ptr + t), width), 0).to(gl.int32)
    return t, job % blocks * 64, count


@gluon.jit
def _copy(work, rows, keys, bias, full, empty, DIM: gl.constexpr, HAS_LENS: gl.constexpr):
    """Copies rows of keys, tile after tile; ``bias`` is -inf where there is no key."""
    heads, jobs, lens_ptr, width = work
    kv_ptr, kv_stride, limit, indices_ptr, indices_stride = rows
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, COPY))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    iteration = gl.to_tensor(0)
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        t, _head, count = _job(job, heads, lens_ptr, width, HAS_LENS)
        index_row = indices_ptr + t * indices_stride
        slot = gl.load(index_row + column, mask=column < count, other=-1)
        for start in range(0, count, BLOCK):
            stage = iteration & 1
            valid = (slot >= 0) & (slot < limit)
            row = kv_ptr + gl.where(valid, slot, 0).to(gl.int64) * kv_stride
            masked = gl.where(valid, 0.0, float("-inf"))
            mbarrier.wait(empty.index(stage), ((iteration >> 1) & 1) ^ 1)
            copy_to_shared(
                keys.index(stage), row[:, None] + channel[None, :], mask=valid[:, None]
            )  # zeros where there is no key
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            following = start + BLOCK + column
            slot = gl.load(index_row + following, mask=following < count, other=-1)
            bias.index(stage).store(masked)
            barrier()
            mbarrier.arrive(full.index(stage))
            iteration += 1


@gluon.jit
def _weigh(
    work,
    q,
    norms,
    queries,
    keys,
    bias,
    weights,
    decays,
    factors,
    barriers,
    DIM: gl.constexpr,
    HAS_LENS: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """Logits and weights of each tile, and the normalisers of each job."""
    heads, jobs, lens_ptr, width = work
    q_ptr, q_stride_t, q_stride_h, scale_log2 = q
    sink_ptr, lse_ptr, max_ptr = norms
    full, _empty, ready, final, read = barriers
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    zeros = gl.zeros([64, BLOCK], gl.float32, layout=LOGITS)
    iteration = gl.to_tensor(0)
    job_count = gl.to_tensor(0)
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        t, first_head, count = _job(job, heads, lens_ptr, width, HAS_LENS)
        q_row = q_ptr + t * q_stride_t + (first_head + row) * q_stride_h
        copy_to_shared(queries, q_row[:, None] + channel[None, :], mask=(first_head + row < heads)[:, None])
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LOGITS))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, LOGITS))
        for _start in range(0, count, BLOCK):
            stage = iteration & 1
            mbarrier.wait(full.index(stage), (iteration >> 1) & 1)
            fence_async_shared()  # keys were written by ordinary copies
            logits = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            attended = bias.index(stage).load(gl.SliceLayout(0, LOGITS)) == 0
            logits = warpgroup_mma_wait(0, deps=[logits])
            logits = scaled_logits(logits, attended, scale_log2)
            peak, total = weigh_tile(logits, peak, total, stage, weights, decays, ready)
            iteration += 1
        head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
        lonely = total == 0  # false for NaN: a NaN in a key that is attended stays visible
        denominator = total
        if HAS_SINK:
            sink = gl.load(sink_ptr + head, mask=head < heads, other=float("-inf")).to(gl.float32)
            denominator += gl.exp2(sink * LOG2E - gl.where(lonely, 0.0, peak))
        lse = gl.where(lonely, float("inf"), (peak + gl.log2(total)) * 0.6931471805599453)
        gl.store(lse_ptr + t * heads + head, lse, mask=head < heads)
        if max_ptr is not None:
            gl.store(max_ptr + t * heads + head, peak * 0.6931471805599453, mask=head < heads)
        mbarrier.wait(read, (job_count & 1) ^ 1)
        factors.store(gl.where(lonely, 0.0, 1 / denominator))
        barrier()
        mbarrier.arrive(final)
        job_count += 1


@gluon.jit
def _accumulate(work, out, keys, weights, decays, factors, barriers, DIM: gl.constexpr, HAS_LENS: gl.constexpr):
    """The sum of weights times keys of each job, and its output."""
    heads, jobs, lens_ptr, width = work
    out_ptr, out_stride_t, out_stride_h = out
    _full, empty, ready, final, read = barriers
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 4, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    row = gl.arange(0, 64, layout=ROWS)
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))
    iteration = gl.to_tensor(0)
    job_count = gl.to_tensor(0)
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        t, first_head, count = _job(job, heads, lens_ptr, width, HAS_LENS)
        acc = gl.zeros([64, DIM], gl.float32, layout=OUT)
        for _start in range(0, count, BLOCK):
            stage = iteration & 1
            mbarrier.wait(ready.index(stage), (iteration >> 1) & 1)
            acc = acc * decays.index(stage).load(ROWS)[:, None]
            fence_async_shared()
            acc = warpgroup_mma(weights.index(stage), keys.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()  # both warpgroups have read the keys
            mbarrier.arrive(empty.index(stage))
            iteration += 1
        mbarrier.wait(final, job_count & 1)
        factor = factors.load(ROWS)
        barrier()
        mbarrier.arrive(read)
        at = out_ptr + t * out_stride_t + (first_head + row) * out_stride_h
        value = (acc * factor[:, None]).to(out_ptr.dtype.element_ty)
        gl.store(at[:, None] + channel[None, :], value, mask=(first_head + row < heads)[:, None])
        job_count += 1


@gluon.jit(do_not_specialize=["H", "width", "limit", "jobs"])
def attend_rows_hopper_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    lens_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    H,
    jobs,
    scale_log2,
    width,
    limit,
    kv_stride,
    indices_stride,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    max_ptr,
    DIM: gl.constexpr,
    HAS_LENS: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """``jobs`` are blocks of 64 heads of a query. Rows and queries are of one 16-bit dtype; ``max_ptr`` may be None."""
    STAGES: gl.constexpr = 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DTYPE: gl.constexpr = kv_ptr.dtype.element_ty
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

    work = (H, jobs, lens_ptr, width)
    rows = (kv_ptr, kv_stride, limit, indices_ptr, indices_stride)
    q = (q_ptr, q_stride_t, q_stride_h, scale_log2)
    norms = (sink_ptr, lse_ptr, max_ptr)
    out = (out_ptr, out_stride_t, out_stride_h)
    barriers = (full, empty, ready, final, read)
    # registers of a thread: 168 for the output; a program has 65536
    gl.warp_specialize(
        [
            (_accumulate, (work, out, keys, weights, decays, factors, barriers, DIM, HAS_LENS)),
            (
                _weigh,
                (work, q, norms, queries, keys, bias, weights, decays, factors, barriers, DIM, HAS_LENS, HAS_SINK),
            ),
            (_copy, (work, rows, keys, bias, full, empty, DIM, HAS_LENS)),
        ],
        [4, 4],
        [112, 64],
    )
