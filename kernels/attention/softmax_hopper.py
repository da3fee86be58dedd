"""Gluon device code that both attention kernels for Hopper have in common: a step of the running softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from deepseek_attn.kernels.common.gluon import barrier


@gluon.jit
def weigh_tile(logits, peak, total, stage, weights, decays, ready):
    """Leaves a tile's weights, and what earlier ones are to be multiplied by, to the warps that add up keys.

    Args:
        logits: ``[64, keys]``, to base 2. peak, total: ``[64]``, of the tiles so far.
        weights, decays, ready: of both stages, of which this tile has ``stage``.

    Returns:
        The peak and the total with this tile.
    """
    new_peak = gl.maximum(peak, gl.max(logits, 1))
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = gl.exp2(peak - shift)
    weight = gl.exp2(logits - shift[:, None])
    total = total * decay + gl.sum(weight, 1)
    weights.index(stage).store(weight.to(weights.dtype))
    decays.index(stage).store(decay)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready.index(stage))
    return new_peak, total
