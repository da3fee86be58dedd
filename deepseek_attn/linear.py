"""Weights as modules own them, and the linear layers that compute with them.

A module declares the checkpoint tensors it owns; the loader hands each of them to its ``WeightSlot``. What a weight is
kept as (dequantised, FP8 blocks, packed FP4) is decided where it enters, so the loader knows nothing about numerics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from deepseek_attn.kernels.reference.quant import (
    decode_e8m0,
    dequantize_fp4,
    dequantize_fp8_block,
    fake_quant_fp8,
)
from deepseek_attn.numerics import Numerics

FP8_BLOCK = (128, 128)
FP4_GROUP = 32
FP8_INPUT_GROUP = 128


@dataclass(frozen=True)
class WeightSlot:
    """One place a checkpoint tensor enters a model.

    Attributes:
        shape: logical shape (unpacked).
        kind: ``"linear"`` (may arrive quantised, with a scale), ``"float"`` or ``"int"``.
        load: ``load(weight, scale)``. ``weight`` is a float tensor of ``shape``; or ``float8_e4m3fn`` of ``shape``
            with a float32 128 x 128 block grid as ``scale``; or packed FP4 ``uint8[out, in / 2]`` with
            ``uint8[out, in / 32]`` e8m0 bytes as ``scale``.
    """

    shape: tuple[int, ...]
    kind: str
    load: Callable[[torch.Tensor, torch.Tensor | None], None]

    @property
    def quantizable(self) -> bool:
        return self.kind == "linear"


class CheckpointModule(nn.Module):
    """A module that owns checkpoint tensors. It is built without them; each attribute is None until it is loaded."""

    def __init__(self, device: torch.device | str = "cpu"):
        super().__init__()
        self._device = torch.device(device)
        self._declared: dict[str, WeightSlot] = {}

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str = "float") -> None:
        """Declares the tensor ``name`` of this module, kept in ``dtype``."""
        self.register_parameter(name, None)

        def load(tensor: torch.Tensor, scale: torch.Tensor | None = None) -> None:
            setattr(self, name, _parameter(tensor.to(self._device, dtype)))

        self._declared[name] = WeightSlot(tuple(shape), kind, load)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Yields (name relative to this module, slot) for the tensors that this module itself owns."""
        yield from self._declared.items()


def checkpoint_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """All slots of ``model`` by their published tensor name."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, CheckpointModule):
            for name, slot in module.slots():
                found[f"{path}.{name}" if path else name] = slot
    return found


class RMSNorm(CheckpointModule):
    """Root-mean-square norm with weight: float32 inside, one rounding to the input dtype.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square (``rms_norm_eps``).
    """

    def __init__(self, dim: int, eps: float, device: torch.device | str = "cpu"):
        super().__init__(device)
        self.eps = eps
        self.declare("weight", (dim,), torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.eps, self.weight)


def rms_norm(x: torch.Tensor, eps: float, weight: torch.Tensor | None = None) -> torch.Tensor:
    """``x * rsqrt(mean(x^2) + eps) [* weight]`` over the last dimension, in float32, cast once to ``x.dtype``."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


class Linear(CheckpointModule):
    """``y = x W^T`` over a plain, FP8-block or packed-FP4 weight ``[out_features, in_features]``.

    With a quantised weight and ``fp8_input``, the input is rounded to FP8 per token and 128 channels, as DeepSeek's own
    FP8 linear does. Sums are float32; the output has the dtype of the input, or float32 with ``out_float32``.

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
    ):
        super().__init__(device)
        self.in_features, self.out_features = in_features, out_features
        self.keep_quantized, self.pow2_scales = numerics.quantized_weights, numerics.pow2_activation_scales
        self.fp8_input = numerics.fp8_activations if fp8_input is None else fp8_input
        self.dtype, self.out_float32 = dtype, out_float32
        self.register_parameter("weight", None)
        self.register_parameter("scale", None)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "weight", WeightSlot((self.out_features, self.in_features), "linear", self.load)

    def load(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        weight, scale = to_stored(weight, scale, self.keep_quantized, self.dtype, self._device)
        if scale is not None and self.fp8_input:
            check_fp8_input(self.in_features)
        self.weight = _parameter(weight)
        self.scale = None if scale is None else _parameter(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None and not self.out_float32:
            return F.linear(x, self.weight)
        x32 = quantized_input(x, self.fp8_input and self.scale is not None, self.pow2_scales)
        y = F.linear(x32, dequantize_weight(self.weight, self.scale))
        return y if self.out_float32 else y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


class GroupedLinear(Linear):
    """Block-diagonal linear: ``z[t, g] = W[g] x[t, g]`` with ``W = weight.view(groups, out, in)`` (``wo_a``).

    Args:
        groups: number of groups; the weight is ``[groups * out_features, in_features]``.
    """

    def __init__(self, groups: int, in_features: int, out_features: int, numerics: Numerics, dtype, device="cpu"):
        super().__init__(in_features, groups * out_features, numerics, dtype, device, fp8_input=numerics.fp8_wo_a_input)
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, groups, in_features]`` -> ``[T, groups, out_features]``."""
        quantized = self.scale is not None
        weight = dequantize_weight(self.weight, self.scale) if quantized else self.weight
        if quantized:
            x32 = quantized_input(x, self.fp8_input, self.pow2_scales)
        else:
            x32 = x
        z = torch.bmm(x32.transpose(0, 1), weight.view(self.groups, -1, self.in_features).transpose(1, 2))
        return z.transpose(0, 1).to(x.dtype)


class ExpertLinear(CheckpointModule):
    """The same projection of every expert, stacked: weight ``[experts, out_features, in_features]``.

    Checkpoint tensors arrive one expert at a time; the first one decides the storage format and allocates the stack.
    """

    def __init__(self, experts: int, in_features: int, out_features: int, numerics: Numerics, dtype, device="cpu"):
        super().__init__(device)
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.keep_quantized, self.fp8_input, self.dtype = numerics.quantized_weights, numerics.fp8_activations, dtype
        self.pow2_scales = numerics.pow2_activation_scales
        self.register_parameter("weight", None)
        self.register_parameter("scale", None)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        return iter(())  # `Experts` names them: the checkpoint counts experts before projections

    def expert_slot(self, index: int) -> WeightSlot:
        def load(weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
            self._load_expert(index, weight, scale)

        return WeightSlot((self.out_features, self.in_features), "linear", load)

    def _load_expert(self, index: int, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        weight, scale = to_stored(weight, scale, self.keep_quantized, self.dtype, self._device)
        if scale is not None and self.fp8_input:
            check_fp8_input(self.in_features)
        if self.weight is None:
            self.weight = _parameter(weight.new_empty((self.experts, *weight.shape)))
            self.scale = None if scale is None else _parameter(scale.new_empty((self.experts, *scale.shape)))
        if weight.dtype != self.weight.dtype:
            raise ValueError(
                f"expert {index} has a {weight.dtype} weight, other experts of the layer {self.weight.dtype}: "
                "all experts of a layer must have one format"
            )
        self.weight[index].copy_(weight)
        if scale is not None:
            self.scale[index].copy_(scale)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """``x [T, in_features]`` through one expert -> ``[T, out_features]`` in ``x.dtype``."""
        if self.scale is None:
            return F.linear(x, self.weight[expert])
        weight = dequantize_weight(self.weight[expert], self.scale[expert])
        return F.linear(quantized_input(x, self.fp8_input, self.pow2_scales), weight).to(x.dtype)


def to_stored(
    weight: torch.Tensor, scale: torch.Tensor | None, keep_quantized: bool, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a linear weight is kept as: moved as it is, or dequantised to ``dtype`` on the target device."""
    if scale is None:
        return weight.to(device, dtype), None
    weight, scale = weight.to(device), scale.to(device)
    if keep_quantized:
        return weight, scale
    return dequantize_weight(weight, scale).to(dtype), None


def dequantize_weight(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Float32 values of a stored weight: FP8 with a block grid, packed FP4 with e8m0 bytes, or plain."""
    if scale is None:
        return weight.float()
    if weight.dtype == torch.uint8:
        return dequantize_fp4(weight, decode_e8m0(scale), FP4_GROUP)
    return dequantize_fp8_block(weight, scale, FP8_BLOCK)


def quantized_input(x: torch.Tensor, fp8: bool, pow2: bool = True) -> torch.Tensor:
    """The input of a linear as float32, after the FP8 rounding per token and 128 channels if ``fp8``."""
    return fake_quant_fp8(x, FP8_INPUT_GROUP, pow2).float() if fp8 else x.float()


def check_fp8_input(in_features: int) -> None:
    if in_features % FP8_INPUT_GROUP:
        raise ValueError(
            f"an FP8 linear with {in_features} input features: FP8 activations need a multiple of {FP8_INPUT_GROUP}; "
            "use numerics='exact', which dequantises the weights"
        )


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
