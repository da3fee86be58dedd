"""Gluon device code of `hyper_connection` for Hopper and many tokens: streams are updated and projected in one launch.

A program updates 128 tokens, 32 channels of each stream at a time, and multiplies what it has made with ``fn`` from
registers, so that the new streams are written and not read again. ``fn`` is three bfloat16 values that add up to its
float32, as in `kernels.common.float32_product`.

A thread has eight channels of a row, which are 16 bytes for loads and stores. As the left factor of a tensor core's
product it would have other ones; so the channels of fn are in the order that `split_weight` calls paired.
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

from deepseek_attn.kernels.common.gluon import arrive_alone, load_tile

TOKENS = gl.constexpr(128)  # of a program
BLOCK = gl.constexpr(32)  # channels of each stream that are updated and multiplied at once
COLUMNS = gl.constexpr(32)  # rows of fn that are loaded: (2 + M) * M = 24 and, unused, those after them
TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))  # of what is loaded, in shared memory
STAGES = gl.constexpr(3)  # blocks in shared memory
M = gl.constexpr(4)  # streams
TERMS = gl.constexpr(3)  # bfloat16 values that add up to one of fn
# two at once: values that are multiplied as well as stored would be converted one by one, which is slower
_TO_BFLOAT16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


class Inputs(NamedTuple):
    """Tensor descriptors: ``y [T, D]``, streams ``[T, M D]`` and the terms of fn ``[TERMS rows, M D]``."""

    y: Any
    streams: Any
    terms: Any


class Stages(NamedTuple):
    """Shared memory of blocks: the streams and y, the terms of fn, and barriers of loaded and of used ones."""

    rows: Any
    terms: Any
    full: Any
    empty: Any


@gluon.constexpr_function
def _layout():
    """Layout of a block ``[128, 32]``: that of a tensor core's left factor, but for the order of the channels."""
    in_thread = [[0, 1], [0, 2], [0, 4], [8, 0]]
    return gl.DistributedLinearLayout(
        in_thread, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]], [], [128, 32]
    )


@gluon.jit
def _blocks(split, splits, D: gl.constexpr):
    """The first block of channels of a split, and the end of its blocks."""
    return D // BLOCK * split // splits, D // BLOCK * (split + 1) // splits


@gluon.jit
def _load_all(inputs, stages, D: gl.constexpr, ROWS: gl.constexpr):
    """Loads the blocks of this program in order."""
    token = gl.program_id(0) * TOKENS
    begin, end = _blocks(gl.program_id(1), gl.num_programs(1), D)
    gdc_wait()
    for block in range(begin, end):
        stage = (block - begin) % STAGES
        mbarrier.wait(stages.empty.index(stage), ((block - begin) // STAGES & 1) ^ 1)
        full = stages.full.index(stage)
        mbarrier.expect(full, 2 * BLOCK * ((M + 1) * TOKENS + M * TERMS * COLUMNS))
        load_tile(inputs.y, [token, block * BLOCK], full, stages.rows.index(stage * (M + 1) + M))
        for k in gl.static_range(M):
            channel = k * D + block * BLOCK
            load_tile(inputs.streams, [token, channel], full, stages.rows.index(stage * (M + 1) + k))
            for term in gl.static_range(TERMS):
                buffer = stages.terms.index((stage * M + k) * TERMS + term)
                load_tile(inputs.terms, [term * ROWS, channel], full, buffer)


@gluon.jit
def _update_all(post_ptr, comb_ptr, new_ptr, sums_ptr, T, stages, D: gl.constexpr, ROWS: gl.constexpr):
    """Updates the streams block by block, and adds up the products of what they become, and its squares."""
    LAYOUT: gl.constexpr = _layout()
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, COLUMNS, 16])
    split = gl.program_id(1)
    begin, end = _blocks(split, gl.num_programs(1), D)
    token = gl.program_id(0) * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, LAYOUT))
    known = token < T
    t = gl.minimum(token, T - 1).to(gl.int64)
    gdc_wait()
    post, comb = (), ()
    for k in gl.static_range(M):
        post += (gl.load(post_ptr + t * M + k)[:, None],)
    for cell in gl.static_range(M * M):
        comb += (gl.load(comb_ptr + t * (M * M) + cell)[:, None],)
    place = new_ptr + (t * (M * D))[:, None] + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    total = gl.zeros([TOKENS, COLUMNS], gl.float32, layout=PRODUCT)
    squares = gl.zeros([TOKENS, BLOCK], gl.float32, layout=LAYOUT)
    for block in range(begin, end):
        stage = (block - begin) % STAGES
        mbarrier.wait(stages.full.index(stage), (block - begin) // STAGES & 1)
        y = stages.rows.index(stage * (M + 1) + M).load(LAYOUT).to(gl.float32)
        old = ()
        for j in gl.static_range(M):
            old += (stages.rows.index(stage * (M + 1) + j).load(LAYOUT).to(gl.float32),)
        product = gl.zeros([TOKENS, COLUMNS], gl.float32, layout=PRODUCT)
        for k in gl.static_range(M):
            x = post[k] * y
            for j in gl.static_range(M):
                x += comb[j * M + k] * old[j]
            x = gl.inline_asm_elementwise(_TO_BFLOAT16, "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
            gl.store(place + k * D + block * BLOCK, x, mask=known[:, None])
            squares += x.to(gl.float32) * x.to(gl.float32)
            left = x.reshape([TOKENS, 4, 2, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([TOKENS, BLOCK])
            left = gl.convert_layout(left, gl.DotOperandLayout(0, PRODUCT, 2))
            for term in gl.static_range(TERMS):
                factor = stages.terms.index((stage * M + k) * TERMS + TERMS - 1 - term).permute((1, 0))
                product = warpgroup_mma(left, factor, product, use_acc=k + term > 0, is_async=True)
        total += warpgroup_mma_wait(0, deps=[product])
        arrive_alone(stages.empty.index(stage), increment_count=False)
    row = gl.program_id(0) * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, PRODUCT))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PRODUCT))
    at = (split.to(gl.int64) * T + row)[:, None] * (ROWS + 1) + column[None, :]
    gl.store(sums_ptr + at, total, mask=(row < T)[:, None] & (column < ROWS)[None, :])
    gl.store(sums_ptr + (split * T + t) * (ROWS + 1) + ROWS, gl.sum(squares, 1), mask=known)


@gluon.jit(do_not_specialize=["T"])
def post_product_kernel(
    y_desc,
    streams_desc,
    terms_desc,
    post_ptr,
    comb_ptr,
    new_ptr,
    sums_ptr,
    T,
    D: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Program ``(i, split)``: `post_kernel` of its tokens and channels, and the sums of `mix_kernel` of them."""
    gdc_launch_dependents()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (M + 1), TOKENS, BLOCK], TILE)
    terms = gl.allocate_shared_memory(gl.bfloat16, [STAGES * M * TERMS, COLUMNS, BLOCK], TILE)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=32 * gl.num_warps())
    fence_async_shared()
    inputs, stages = Inputs(y_desc, streams_desc, terms_desc), Stages(rows, terms, full, empty)
    gl.warp_specialize(
        [
            (_update_all, (post_ptr, comb_ptr, new_ptr, sums_ptr, T, stages, D, ROWS)),
            (_load_all, (inputs, stages, D, ROWS)),
        ],
        [1],
        [40],
    )
