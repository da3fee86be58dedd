"""RMS norm and rotary position embedding of rows: float32 inside, one rounding to the input's dtype each."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.kernels.common.invariance import in_row_tiles
from deepseek_attn.utils.tape import once


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) [* weight]`` over the last dimension, in float32, cast once to ``x.dtype``."""
    x32 = x.float()
    if _trains_on_gpu(x32):
        y = NormedRows.apply(x32, eps)[0]
    else:
        y = x32 * in_row_tiles(lambda rows: inverse_rms(rows, eps), x32)
    return (y if weight is None else y * weight).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``rsqrt(mean(x^2) + eps)`` over the last dimension of float32 ``x [..., d]``: ``[..., 1]``."""
    if _trains_on_gpu(x):
        return InverseRms.apply(x, eps)
    squares = x * x  # `square` is `pow`, which takes longer
    if x.device.type != "cpu":
        return torch.rsqrt(squares.mean(-1, keepdim=True) + eps)
    # for one row, `mean` takes twice as long as `sum`; an operation with a Python number takes as long as with a tensor
    return torch.addcdiv(constant(eps), squares.sum(-1, keepdim=True), constant(float(x.shape[-1]))).rsqrt_()


def _trains_on_gpu(x: Tensor) -> bool:
    """Whether gradients of ``x`` are needed on a GPU, where their cost is passes over memory."""
    if x.device.type == "cpu" or not torch.is_grad_enabled():
        return False
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]  # torch's stubs lack the module
    return x.requires_grad or functorch.is_batchedtensor(x)


def _inverse_norm(x: Tensor, eps: float) -> Tensor:
    """`inverse_rms` without a tensor of squares."""
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)


class InverseRms(torch.autograd.Function):
    """`inverse_rms`; the backward pass writes one tensor of the size of ``x``, autograd's own four."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float) -> Tensor:
        return _inverse_norm(x, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        return x * (gradients[0] * inverse.pow(3) / -x.shape[-1]), None


class NormedRows(torch.autograd.Function):
    """``x * inverse_rms(x)``, and the factor; forward and backward write four tensors of the size of ``x``, not ten."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        inverse = _inverse_norm(x, eps)
        return x * inverse, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])  # callers rotate the other output in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        along = (gradients[0] * x).mean(-1, keepdim=True) * inverse.pow(3)
        return torch.addcmul(gradients[0] * inverse, x, along, value=-1), None


@cache
@torch.inference_mode(False)
def constant(value: float) -> Tensor:
    """A float32 scalar on the CPU."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


@once
def freqs_cis_at(cos_sin: Tensor, positions: Tensor) -> Tensor:
    """``cos + i sin`` at ``positions [T]``: complex64 ``[T, n]`` of a float32 table ``[max_positions, 2 n]``."""
    cos, sin = cos_sin.index_select(0, positions).split_with_sizes([cos_sin.shape[-1] // 2] * 2, dim=-1)
    return torch.complex(cos, sin)


def apply_rope(x: Tensor, freqs_cis: Tensor, inverse: bool = False) -> Tensor:
    """Rotates the pairs ``(2i, 2i + 1)`` of the last channels: (a, b) -> (a cos - b sin, a sin + b cos).

    Args:
        x: ``[T, ..., d]``; the first ``d - 2 n`` channels pass through.
        freqs_cis: complex64 ``[T, n]`` from `freqs_cis_at`.
        inverse: rotate by the negative angle.

    Returns:
        A new tensor of the same shape and dtype: float32 arithmetic, one rounding.
    """
    return rotate_(x.clone(), freqs_cis, inverse)


def rotate_(x: Tensor, freqs_cis: Tensor, inverse: bool = False) -> Tensor:
    """`apply_rope` in place; returns ``x``."""
    tokens, pairs = freqs_cis.shape
    freqs_cis = (freqs_cis.conj() if inverse else freqs_cis).view(tokens, *(1,) * (x.dim() - 2), pairs)
    tail = x.narrow(-1, x.shape[-1] - 2 * pairs, 2 * pairs)
    if tail.device.type == "cpu" and _is_in_pairs(tail):
        torch.view_as_complex(tail.view(*tail.shape[:-1], pairs, 2)).mul_(freqs_cis)
        return x
    pairs32 = tail.to(torch.float32, copy=True, memory_format=torch.contiguous_format).unflatten(-1, (-1, 2))
    rotated = torch.view_as_complex(pairs32) * freqs_cis
    tail.copy_(torch.view_as_real(rotated).flatten(-2))
    return x


def _is_in_pairs(x: Tensor) -> bool:
    """Whether the channels of ``x`` can be viewed as complex64: an odd number before them gives odd offsets."""
    *strides, step = x.stride()
    even = x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in strides)
    return even and step == 1 and x.dtype == torch.float32


def apply_rope_half_split(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotates the pairs ``(i, i + n)`` of the *first* ``2 n`` channels, as the indexer of DeepSeek-V3.2 does.

    Same arguments and result as `apply_rope`; the last ``d - 2 n`` channels pass through.
    """
    tokens, pairs = freqs_cis.shape
    freqs_cis = freqs_cis.view(tokens, *(1,) * (x.dim() - 2), pairs)
    out = x.clone()
    head = out[..., : 2 * pairs]
    rotated = torch.complex(*head.float().chunk(2, dim=-1)) * freqs_cis
    head.copy_(torch.cat([rotated.real, rotated.imag], dim=-1))
    return out
