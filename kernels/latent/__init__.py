"""Projections into and out of the latent space that all heads share (V3.2): queries before attention, values after it.

Both weights are halves of the checkpoint's ``kv_b_proj [heads, nope + v_head_dim, rank]``: with ``W_UK`` applied to the
query and ``W_UV`` to the output, attention runs over cached latents ("absorbed"). With few tokens a launch reads its
weight once, at memory speed; with many, cuBLAS multiplies. An FP8 weight stays FP8: launches for few tokens convert it
in registers, cuBLAS is handed a plain copy that lives as long as the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.latent.types import LatentQueries, LatentWeight, ProjectedValues

if TYPE_CHECKING:
    from deepseek_attn.kernels.latent import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def absorb_queries(queries: LatentQueries) -> Tensor:
    """Per head ``[q_nope W_UK, rope(q_pe)]``: queries for cached latents and rotary keys, and heads of zeros behind.

    ``rope`` rotates the pairs ``(2 i, 2 i + 1)`` at ``positions``, in float32. Sums are float32; both parts are rounded
    to the dtype once.

    Returns:
        ``[T, padded_heads, rank + rope_dim]`` in the dtype of ``q``.

    Raises:
        ValueError: shapes or dtypes that disagree, or that the kernel does not support.
    """
    return (triton_ops if runs_triton(queries.q) else torch_ops).absorb_queries(queries)


def project_values(latents: Tensor, weight: LatentWeight, pow2_scales: bool | None = None) -> ProjectedValues:
    """Values of attended latents, head by head: ``out[t, h] = W_UV[h] latents[t, h]``, summed in float32.

    Args:
        latents: ``[T, at least heads, rank]`` with contiguous channels; further heads (padding) are not read.
        weight: ``W_UV [heads, v_head_dim, rank]``, FP8 or in the dtype of ``latents``.
        pow2_scales: as in `kernels.linear.quantize_input`; None if nothing reads quantised values.

    Returns:
        ``[T, heads * v_head_dim]``, contiguous, in the dtype of ``latents``; and ``quantize_input(values,
        pow2_scales)`` where that needs no further launch: on a GPU with few tokens, if ``v_head_dim`` is 128, so that a
        head is one group of channels.

    Raises:
        ValueError: shapes or dtypes that disagree.
    """
    return (triton_ops if runs_triton(latents) else torch_ops).project_values(latents, weight, pow2_scales)
