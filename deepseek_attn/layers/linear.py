"""Linear layers as modules: one weight, a block-diagonal one, and several that project the same input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from deepseek_attn.config.numerics import Numerics
from deepseek_attn.kernels import linear as ops
from deepseek_attn.kernels.common.quant import InputFormat, QuantizedRows
from deepseek_attn.layers.weights import (
    CheckpointModule,
    Shard,
    SlotKind,
    WeightSlot,
    check_fp8_input,
    parameter,
    to_stored,
)


class Linear(CheckpointModule):
    """``y = x W^T`` over a plain, FP8-block or packed-FP4 weight ``[out_features, in_features]``.

    With a quantised weight and ``fp8_input``, the input is quantised to FP8 per token and ``numerics.fp8_group``
    channels, as DeepSeek's own FP8 linear does. Sums are float32; the output has the dtype of the input, or float32
    with ``out_float32``.

    A ``shard`` of the weight's rows computes that part of the outputs (``out_features`` of them). A shard of its
    columns reads that part of the inputs (``in_features``); its outputs have to be summed over the ranks.

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
        fp8_input = numerics.fp8_activations if fp8_input is None else fp8_input
        self.input_format = InputFormat(fp8_input, numerics.pow2_activation_scales, numerics.fp8_group)
        self.numerics, self.dtype, self.out_float32 = numerics, dtype, out_float32
        self.register_parameter("weight", None)
        self.register_parameter("scale", None)
        self._segment: ops.Segment | None = None

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        stored = {"block": self.numerics.weight_block, "keeps_quantized": self.numerics.quantized_weights}
        yield (
            "weight",
            WeightSlot(self.full_shape, SlotKind.LINEAR, self.load, self.shard, dense=self.dtype.itemsize, **stored),
        )

    def load(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        weight, scale = to_stored(weight, scale, self.numerics, self.dtype, self._device)
        if scale is not None and self.input_format.fp8:
            check_fp8_input(self.in_features, self.input_format.group)
        self.weight = parameter(weight)
        self.scale = None if scale is None else parameter(scale)

    def drop(self) -> None:
        """Frees the weight, which something else has taken over."""
        self.register_parameter("weight", None)
        self.register_parameter("scale", None)

    @property
    def segment(self) -> ops.Segment:
        """Weight and options of this layer, for the ops."""
        weight, scale, known = self._parameters["weight"], self._parameters["scale"], self._segment
        return known if known and known.weight is weight and known.scale is scale else self._new_segment()

    def _new_segment(self) -> ops.Segment:
        out_dtype = torch.float32 if self.out_float32 else None
        self._segment = ops.Segment(self.weight, self.scale, self.input_format, out_dtype)
        return self._segment

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [..., in_features]`` -> ``[..., out_features]``."""
        (y,) = ops.multi_linear(x.flatten(0, -2), [self.segment])
        return y.unflatten(0, x.shape[:-1])

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


def join_weights(linears: Sequence[Linear]) -> None:
    """Makes the plain weights of layers with one input adjacent in memory, if they have one dtype.

    Each layer's weight becomes a view. `multi_linear` may fuse adjacent weights into one product.
    """
    linears = [linear for linear in linears if linear.weight is not None and linear.scale is None]
    if len({linear.weight.dtype for linear in linears}) != 1:
        return
    views = torch.cat([linear.weight for linear in linears]).split([len(linear.weight) for linear in linears])
    for linear, part in zip(linears, views, strict=True):
        linear.weight = parameter(part)


class GroupedLinear(Linear):
    """Block-diagonal linear: ``z[t, g] = W[g] x[t, g]`` with ``W = weight.view(groups, out, in)`` (``wo_a``).

    Without an FP8 input, a GPU's weight is dequantised at load, as in DeepSeek's own code: bfloat16 holds its values.

    Args:
        groups: number of groups; the weight is ``[groups * out_features, in_features]``.
        in_features, out_features: of one group.
        shard: rows of whole groups; this layer then has only these groups.
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
        if not fp8_input and torch.device(device).type != "cpu":
            numerics = replace(numerics, quantized_weights=False)
        super().__init__(in_features, rows, numerics, dtype, device, fp8_input=fp8_input, shard=shard)
        self.groups = self.out_features // out_features

    @property
    def takes_quantized_heads(self) -> bool:
        """Whether `project_quantized` takes the result of `kernels.attention.attend_raw_q`."""
        return self.scale is not None and self.input_format == InputFormat(fp8=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, groups, in_features]`` -> ``[T, groups, out_features]``."""
        return self.project(x).unflatten(1, (self.groups, -1))

    def project(
        self, o: torch.Tensor, positions: torch.Tensor | None = None, cos_sin: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Heads ``o [T, H, d]`` -> ``[T, groups * out_features]``, rotated back at ``positions [T]`` before.

        Heads go to the groups in order, ``H / groups * d = in_features``; see `kernels.linear.grouped_linear`. Without
        positions nothing is rotated.
        """
        return ops.grouped_linear(o, self.segment, self.groups, positions, cos_sin)[0]

    def project_quantized(
        self, o: torch.Tensor | QuantizedRows, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, QuantizedRows | None]:
        """`project`, also of a result of `attend_raw_q`: the output, and its quantised copy if that is free."""
        if isinstance(o, QuantizedRows):
            if self.scale is None:
                raise ValueError("quantised heads need an FP8 weight: see takes_quantized_heads")
            return ops.grouped_linear_of_quantized(o, self.weight, self.scale, self.dtype)
        return ops.grouped_linear(o, self.segment, self.groups, positions, cos_sin)


def multi_linear(
    x: torch.Tensor, linears: Sequence[Linear], quantized: QuantizedRows | None = None
) -> list[torch.Tensor]:
    """``[linear(x) for linear in linears]``, on a GPU in one launch where there are few tokens.

    Args:
        x: ``[T, in_features]``.
        linears: layers of one model, so of the same numerics; at least one.
        quantized: `kernels.linear.quantize_input` of x, if the caller has it already.
    """
    return ops.multi_linear(x, [linear.segment for linear in linears], quantized)


def empty_quantized(x: torch.Tensor, linears: Sequence[Linear]) -> QuantizedRows | None:
    """Allocates FP8 values and scales for the op that writes ``x`` to fill as well; `multi_linear` reads them.

    None if these layers take no FP8 input, or quantise it themselves (see `kernels.linear.empty_quantized`).
    """
    return ops.empty_quantized(x, [linear.segment for linear in linears])
