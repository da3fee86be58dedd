"""Manifold-constrained hyper-connections: ``m`` residual streams, mixed around every sublayer.

All of it is float32, without TF32: the mixing weights go through 20 rounds of Sinkhorn normalisation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.hyper_connection.types import DelayedInput, HyperConnection, SublayerInput, SublayerOutput

if TYPE_CHECKING:
    from deepseek_attn.kernels.hyper_connection import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def hc_pre(streams: Tensor, hc: HyperConnection) -> tuple[Tensor, Tensor, Tensor]:
    """Collapses the streams into a sublayer's input, and computes how `hc_post` mixes its output back in.

    With ``y = fn @ rms_norm(flatten(streams))`` split into pre, post and comb: the input is the sum of the streams
    weighted by ``sigmoid(pre) + hc_eps``, post is ``2 sigmoid(post)``, and comb is made doubly stochastic. Each part is
    first scaled by its entry of ``scale`` and shifted by ``base``.

    Args:
        streams: ``[T, m, D]``.

    Returns:
        x ``[T, D]`` in the streams' dtype, post float32 ``[T, m]``, comb float32 ``[T, m, m]``.

    Raises:
        ValueError: on a GPU, shapes or dtypes that do not fit.
    """
    return (triton_ops if runs_triton(streams) else torch_ops).hc_pre(streams, hc)


def hc_delayed(streams: Tensor | SublayerOutput, pre: Tensor, hc: HyperConnection) -> DelayedInput:
    """`hc_pre`, or `hc_post_pre` for a sublayer's output, with collapse weights from the previous sublayer (V4.1).

    Needs the same number of launches as `hc_pre` or `hc_post_pre`.

    Args:
        streams: ``[T, m, D]``, or a sublayer's output, which updates the streams first.
        pre: float32 ``[T, m]``: weights that collapse the streams.

    Returns:
        The streams, x collapsed with ``pre``, and computed from ``hc``: post, comb and the next sublayer's ``pre``.

    Raises:
        ValueError: on a GPU, shapes or dtypes that do not fit.
    """
    return (triton_ops if runs_triton(pre) else torch_ops).hc_delayed(streams, pre, hc)


def hc_collapse(streams: Tensor, weights: Tensor, rms_eps: float, norm: Tensor | None = None) -> Tensor:
    """Sum of ``streams [T, m, D]`` weighted by float32 ``weights [T, m]``, then an RMSNorm if ``norm [D]`` is given.

    Returns:
        ``[T, D]`` in the streams' dtype, rounded after the sum and again after the norm.

    Raises:
        ValueError: on a GPU, shapes or dtypes that do not fit.
    """
    return (triton_ops if runs_triton(streams) else torch_ops).hc_collapse(streams, weights, rms_eps, norm)


def hc_post_pre(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, hc: HyperConnection) -> SublayerInput:
    """`hc_post` of one sublayer and `hc_pre` of the next: the new streams and the next sublayer's input.

    Takes two launches on a GPU for very few tokens, else three or four.

    Args:
        y, streams, post, comb: as in `hc_post`; hc: of the next sublayer.

    Raises:
        ValueError: on a GPU, shapes or dtypes that do not fit.
    """
    return (triton_ops if runs_triton(y) else torch_ops).hc_post_pre(y, streams, post, comb, hc)


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams ``X'_k = post_k y + sum_j comb[j, k] X_j``: the sum runs over the first index of ``comb``.

    Args:
        y: ``[T, D]``, the sublayer's output; streams: ``[T, m, D]`` from before it.
        post, comb: float32 ``[T, m]`` and ``[T, m, m]``, from the sublayer's `hc_pre`.

    Returns:
        ``[T, m, D]`` in the streams' dtype, rounded once.

    Raises:
        ValueError: on a GPU, shapes or dtypes that do not fit.
    """
    return (triton_ops if runs_triton(y) else torch_ops).hc_post(y, streams, post, comb)


def hc_head(streams: Tensor, hc: HyperConnection) -> Tensor:
    """Collapses the streams at the end of a model, as `hc_pre` does for a sublayer.

    Args:
        streams: ``[T, m, D]``.

    Returns:
        ``[T, D]`` in the streams' dtype.

    Raises:
        ValueError: on a GPU, shapes or dtypes that do not fit.
    """
    return (triton_ops if runs_triton(streams) else torch_ops).hc_head(streams, hc)
