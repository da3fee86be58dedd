"""Gluon device code shared by the attention kernels for Hopper: the steps of a tile of 64 heads and 64 keys.

Warps that decode or copy put tiles of keys into shared memory, warps that weigh compute logits and weights, warps that
accumulate hold the output in registers. The head of each kernel's file describes its barriers.
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

from deepseek_attn.kernels.common.gluon import barrier, reinterpret
from deepseek_attn.kernels.common.triton_types import LOG2E

LN2 = gl.constexpr(0.6931471805599453)


class AttendWork(NamedTuple):
    """The work of a program: 64 heads of query ``t``, from ``first_head`` of ``H`` on, over one split of its keys."""

    t: Any
    split: Any
    splits: Any
    first_head: Any
    H: Any


class SoftmaxBuffers(NamedTuple):
    """Shared memory between the weighing and the accumulating warps.

    Attributes:
        weights: 16-bit ``[stages, 64, 64]`` weights of heads and keys.
        decays: float32 ``[stages, 64]`` factors that rescale the output of earlier tiles.
        factors: float32 ``[64]`` normalisers, the last step.
    """

    weights: Any
    decays: Any
    factors: Any


@gluon.jit
def scaled_logits(product, attended, scale_log2):
    """Logits ``[64, keys]`` to base 2 from products; -inf in columns without a key, which are not ``attended [keys]``.

    -inf replaces the logit and is not added to it, because queries without keys, such as padding rows, may hold NaN.
    """
    return gl.where(attended[None, :], product * scale_log2, float("-inf"))


@gluon.jit
def soften(logits, peak, total):
    """A tile's weights ``[64, keys]``, the factors that rescale earlier tiles, and ``(peak, total)`` with this tile."""
    new_peak = gl.maximum(peak, gl.max(logits, 1))
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)  # no key yet: -inf - -inf would be NaN
    decay = gl.exp2(peak - shift)
    weight = gl.exp2(logits - shift[:, None])
    return weight, decay, new_peak, total * decay + gl.sum(weight, 1)


@gluon.jit
def put_weights(weight, decay, softmax, stage):
    """Stores a tile's weights and decays; the caller then lets the warps that accumulate read them."""
    softmax.weights.index(stage).store(weight.to(softmax.weights.dtype))
    softmax.decays.index(stage).store(decay)
    fence_async_shared()  # tensor cores read the weights
    barrier()  # all threads have stored theirs


@gluon.jit
def weigh_tile(logits, peak, total, stage, softmax, ready):
    """Stores a tile's weights, and the factors that rescale earlier tiles, for the warps that accumulate the output.

    Args:
        logits: ``[64, keys]``, to base 2; peak, total: ``[64]`` running maximum and sum of the tiles so far.
        stage: of this tile in the `SoftmaxBuffers` ``softmax`` and barriers ``ready`` of two tiles.

    Returns:
        ``(peak, total)`` with this tile.
    """
    weight, decay, peak, total = soften(logits, peak, total)
    put_weights(weight, decay, softmax, stage)
    mbarrier.arrive(ready.index(stage))  # the warps that accumulate may read the weights
    return peak, total


@gluon.jit
def store_lse(peak, total, work, outputs, SPLIT: gl.constexpr):
    """Stores log-sum-exps of heads; returns the factors ``[64]`` that normalise their output.

    Of a split-K partial the log-sum-exp is to base 2, and the sink is left to the kernel that combines partials.
    """
    head = work.first_head + gl.arange(0, 64, layout=peak.type.layout)
    lonely = total == 0  # false for NaN: a NaN in a key that is attended stays visible
    denominator = total
    lse = gl.where(lonely, float("-inf"), peak + gl.log2(total))
    if SPLIT:
        gl.store(outputs.lse + (work.t * work.splits + work.split) * work.H + head, lse, mask=head < work.H)
    else:
        if outputs.sink is not None:
            sink = gl.load(outputs.sink + head, mask=head < work.H, other=float("-inf")).to(gl.float32)
            denominator += gl.exp2(sink * LOG2E - gl.where(lonely, 0.0, peak))
        gl.store(outputs.lse + work.t * work.H + head, gl.where(lonely, float("inf"), lse * LN2), mask=head < work.H)
    return gl.where(lonely, 0.0, 1 / denominator)


@gluon.jit
def put_factors(factor, factors, final):
    """Stores normalisers, and lets the warps that accumulate read them."""
    factors.store(factor)
    barrier()  # all threads have stored theirs
    mbarrier.arrive(final)


@gluon.jit
def accumulate_tile(acc, softmax, stage, keys, key_stage):
    """Waits for the tile's ``ready`` barrier, then adds its weights times keys to the output."""
    acc = acc * softmax.decays.index(stage).load(gl.SliceLayout(1, acc.type.layout))[:, None]
    fence_async_shared()  # keys were written by ordinary stores or copies, of other warps
    acc = warpgroup_mma(softmax.weights.index(stage), keys.index(key_stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()  # both warpgroups have read weights and keys: their memory may be written again
    return acc


@gluon.jit
def store_staged(value, queries, row_out, out_stride, work, dtype: gl.constexpr):
    """Stores heads ``[64, channels]`` to rows from ``row_out`` on, ``out_stride`` apart.

    Stages the output in the shared memory of the queries, so that stores write whole cache lines.
    """
    DIM: gl.constexpr = value.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    staged = reinterpret(queries, dtype, [64, DIM], gl.NVMMASharedLayout(128, 16, 2))
    staged.store(value.to(dtype))
    barrier()  # all warps have staged their part
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
    inside = (work.first_head + row < work.H)[:, None]
    gl.store(row_out + row[:, None] * out_stride + channel[None, :], staged.load(WIDE), mask=inside)
