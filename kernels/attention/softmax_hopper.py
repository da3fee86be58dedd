"""Gluon device code shared by the attention kernels for Hopper: one tile of the online softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from deepseek_attn.kernels.common.gluon import barrier


@gluon.jit
def scaled_logits(product, attended, scale_log2):
    """Logits ``[64, keys]`` to base 2 from products; -inf in columns without a key, which are not ``attended [keys]``.

    They are selected, not added: a NaN in a query without keys, as in rows that fill up a batch, must not be seen.
    """
    return gl.where(attended[None, :], product * scale_log2, float("-inf"))


@gluon.jit
def soften(logits, peak, total):
    """A tile's weights ``[64, keys]``, the factors that rescale earlier tiles, and ``(peak, total)`` with this tile."""
    new_peak = gl.maximum(peak, gl.max(logits, 1))
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = gl.exp2(peak - shift)
    weight = gl.exp2(logits - shift[:, None])
    return weight, decay, new_peak, total * decay + gl.sum(weight, 1)


@gluon.jit
def weigh_tile(logits, peak, total, stage, weights, decays, ready):
    """Stores a tile's weights, and the factors that rescale earlier tiles, for the warps that accumulate the output.

    Args:
        logits: ``[64, keys]``, to base 2; peak, total: ``[64]`` running maximum and sum of the tiles so far.
        weights, decays, ready: buffers and barriers of both stages, of which this tile has ``stage``.

    Returns:
        ``(peak, total)`` with this tile.
    """
    weight, decay, peak, total = soften(logits, peak, total)
    weights.index(stage).store(weight.to(weights.dtype))
    decays.index(stage).store(decay)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready.index(stage))
    return peak, total
