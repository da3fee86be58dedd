"""Weights as modules own them, and the linear layers that compute with them.

A module declares the checkpoint tensors it owns; the loader hands each of them to its ``WeightSlot``. What a weight is
kept as (dequantised, FP8 blocks, packed FP4) is decided where it enters, so the loader knows nothing about numerics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F

from deepseek_attn.config.numerics import Numerics
from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.common.norm_rope import rms_norm
from deepseek_attn.kernels.linear import reference
from deepseek_attn.kernels.linear import reference as grouped_reference
from deepseek_attn.kernels.linear.reference import (
    FP4_GROUP,
    FP8_BLOCK,
    Segment,
    dequantize_weight,
    quantized_input,
)
from deepseek_attn.layers.experts import ExpertLinear
from deepseek_attn.layers.weights import (
    CheckpointModule,
    RMSNorm,
    Shard,
    WeightSlot,
    _parameter,
    check_fp8_input,
    checkpoint_slots,
    to_stored,
)

__all__ = [
    "FP4_GROUP",
    "FP8_BLOCK",
    "CheckpointModule",
    "ExpertLinear",
    "GroupedLinear",
    "Linear",
    "RMSNorm",
    "Shard",
    "WeightSlot",
    "checkpoint_slots",
    "dequantize_weight",
    "empty_quantized",
    "join_weights",
    "multi_linear",
    "quantized_input",
    "rms_norm",
]


class Linear(CheckpointModule):
    """``y = x W^T`` over a plain, FP8-block or packed-FP4 weight ``[out_features, in_features]``.

    With a quantised weight and ``fp8_input``, the input is rounded to FP8 per token and 128 channels, as DeepSeek's own
    FP8 linear does. Sums are float32; the output has the dtype of the input, or float32 with ``out_float32``.

    With a ``shard`` of the weight's rows, it computes that part of the outputs (``out_features`` of them); with one of
    its columns, it takes that part of the inputs (``in_features``) and computes a summand of the outputs.

    Raises:
        ValueError: when a quantised weight is loaded whose ``in_features`` the formats do not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        fp8_input: bool | None = None,
        out_float32: bool = False,
        shard: Shard | None = None,
    ):
        super().__init__(device)
        self.full_shape, self.shard = (out_features, in_features), shard
        self.out_features, self.in_features = shard.of(self.full_shape) if shard else self.full_shape
        self.keep_quantized, self.pow2_scales = numerics.quantized_weights, numerics.pow2_activation_scales
        self.fp8_input = numerics.fp8_activations if fp8_input is None else fp8_input
        self.dtype, self.out_float32 = dtype, out_float32
        self.register_parameter("weight", None)
        self.register_parameter("scale", None)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "weight", WeightSlot(self.full_shape, "linear", self.load, self.shard)

    def load(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        weight, scale = to_stored(weight, scale, self.keep_quantized, self.dtype, self._device)
        if scale is not None and self.fp8_input:
            check_fp8_input(self.in_features)
        self.weight = _parameter(weight)
        self.scale = None if scale is None else _parameter(scale)

    @property
    def segment(self) -> Segment:
        """This layer as the ops take it."""
        return Segment(self.weight, self.scale, self.fp8_input, torch.float32 if self.out_float32 else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None and not self.out_float32:
            return F.linear(x, self.weight)
        y = (triton_op(self, "linear") or reference).multi_linear(x.flatten(0, -2), [self.segment], self.pow2_scales)[0]
        return y.unflatten(0, x.shape[:-1])

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


def join_weights(linears: Sequence[Linear]) -> None:
    """Puts the weights of layers with one input behind one another in memory, so that one product can compute them.

    Each layer keeps its rows, as views; what `multi_linear` makes of neighbours is its own affair. Only plain weights
    of one dtype are joined.
    """
    linears = [linear for linear in linears if linear.weight is not None and linear.scale is None]
    if len({linear.weight.dtype for linear in linears}) != 1:
        return
    parts = torch.cat([linear.weight for linear in linears]).split([len(linear.weight) for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight = _parameter(part)


class GroupedLinear(Linear):
    """Block-diagonal linear: ``z[t, g] = W[g] x[t, g]`` with ``W = weight.view(groups, out, in)`` (``wo_a``).

    Args:
        groups: number of groups; the weight is ``[groups * out_features, in_features]``.
        shard: rows of whole groups, which are then all that there are.
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        shard: Shard | None = None,
    ):
        rows, fp8_input = groups * out_features, numerics.fp8_wo_a_input
        super().__init__(in_features, rows, numerics, dtype, device, fp8_input=fp8_input, shard=shard)
        self.groups = self.out_features // out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, groups, in_features]`` -> ``[T, groups, out_features]``."""
        return self.project(x).unflatten(1, (self.groups, -1))

    def project(
        self, o: torch.Tensor, positions: torch.Tensor | None = None, cos_sin: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Heads ``o [T, H, d]``, rotated back at ``positions [T]`` by a table ``cos_sin``, -> ``[T, groups * out]``.

        Heads go to the groups in order, ``H / groups * d = in_features``. Without positions nothing is rotated.
        """
        op = None if self.scale is None else triton_op(self, "grouped_linear")
        return (op or grouped_reference).grouped_linear(*self._arguments(o, positions, cos_sin))

    def project_quantized(
        self, o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """`project`, and the output as `multi_linear` takes it ``quantized``, where that takes no further launch."""
        op = None if self.scale is None else triton_op(self, "grouped_linear")
        if op is None:
            return self.project(o, positions, cos_sin), None
        return op.grouped_linear_quantized(*self._arguments(o, positions, cos_sin))

    def _arguments(self, o: torch.Tensor, positions: torch.Tensor | None, cos_sin: torch.Tensor | None) -> tuple:
        return o, self.weight, self.scale, self.groups, positions, cos_sin, self.fp8_input, self.pow2_scales


def multi_linear(
    x: torch.Tensor, linears: Sequence[Linear], quantized: tuple[torch.Tensor, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """``[linear(x) for linear in linears]``, on a GPU in one launch where few tokens are projected.

    Args:
        x: ``[T, in_features]``.
        linears: layers of one model, so of the same numerics.
        quantized: x rounded to FP8 with its scales, as `kernels.linear.reference.quantize_input` returns them, where
            the caller has them already.
    """
    fused = [i for i, linear in enumerate(linears) if triton_op(linear, "linear") is not None]
    outs = [None if i in fused else linear(x) for i, linear in enumerate(linears)]
    if fused:
        segments = [linears[i].segment for i in fused]
        op = triton_op(linears[fused[0]], "linear")
        found = op.multi_linear(x, segments, linears[fused[0]].pow2_scales, quantized)
        for i, out in zip(fused, found, strict=True):
            outs[i] = out
    return outs


def empty_quantized(x: torch.Tensor, linears: Sequence[Linear]) -> tuple[torch.Tensor, torch.Tensor, bool] | None:
    """Where another op should write x once more as ``quantized``, and whether the scales are powers of two.

    None where the layers do not round their input to FP8, or do that on the way.
    """
    if any(triton_op(linear, "linear") is None or not linear.fp8_input or linear.scale is None for linear in linears):
        return None
    op = triton_op(linears[0], "linear")
    return (*op.empty_quantized(x), linears[0].pow2_scales) if len(x) > op.QUANTIZE_ABOVE else None


def triton_op(linear: Linear, name: str) -> ModuleType | None:
    """The Triton op ``name`` if it computes with this layer's weight where that is, else None.

    Float32 weights are cuBLAS's, and a packed FP4 one is dequantised by the reference: published checkpoints have it
    in routed experts only.
    """
    weight, scale = linear.weight, linear.scale
    wanted = (torch.bfloat16, torch.float16) if scale is None else (torch.float8_e4m3fn,)
    if not runs_triton(weight) or weight.dtype not in wanted:
        return None
    if scale is not None and scale.dtype != torch.float32:
        return None
    return import_module(f"deepseek_attn.kernels.linear.{name}")
