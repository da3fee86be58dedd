"""Modules that own weights: slots for checkpoint tensors, shards of ranks, and RMSNorm.

A module declares the checkpoint tensors it owns; the loader hands each of them to its `WeightSlot`. The storage format
(dequantised, FP8 blocks, packed FP4) is decided there, so that the loader knows nothing about numerics.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from deepseek_attn.config.numerics import Numerics
from deepseek_attn.kernels.common.quant import merge_fp8_blocks
from deepseek_attn.kernels.engram import TableRows
from deepseek_attn.kernels.linear.formats import dequantize_weight
from deepseek_attn.kernels.norm import rms_norm

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a tensor: ``size`` values of dimension ``dim`` from ``start`` on."""

    dim: int
    start: int
    size: int

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the shard of a tensor of ``shape``."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


class SlotKind(Enum):
    """Formats in which a checkpoint may hold the tensor of a slot."""

    LINEAR = "linear"  # quantised, with a scale, or not
    FLOAT = "float"
    INT = "int"
    ROWS = "rows"  # a table that stays in the checkpoint: float8_e4m3fn, with e8m0 bytes per row and 32 columns


@dataclass(frozen=True)
class WeightSlot:
    """The place of a checkpoint tensor in a model.

    Attributes:
        shape: logical shape (unpacked) of the whole tensor.
        load: ``load(weight, scale)``. ``weight`` is a float tensor of ``shape``; or ``float8_e4m3fn`` of ``shape``
            with a float32 block grid as ``scale``; or packed FP4 ``uint8[out, in / 2]`` with
            ``uint8[out, in / 32]`` e8m0 bytes as ``scale``. With a shard, the shard of each.
        shard: this rank's part; None for all of it.
        elsewhere: the tensor belongs to another rank, and ``load`` is not called.
        block: rows and columns of an FP8 block.
        attach: called instead of ``load``: the tensor stays in the checkpoint, and is read while the model runs. Of
            `SlotKind.ROWS`, with a function that reads rows by index ``[n]``; else with an `UnreadWeight`.
        dense: bytes per value once it is loaded, of a weight without a scale; None: as stored.
        keeps_quantized: a weight with a scale is kept as stored; else it is dequantised, to ``dense`` bytes per value.
        in_host: the tensor is kept in host memory, whatever the device of the model.
    """

    shape: tuple[int, ...]
    kind: SlotKind
    load: Callable[[torch.Tensor, torch.Tensor | None], None]
    shard: Shard | None = None
    elsewhere: bool = False
    block: int = 128
    attach: Callable[[Any], None] | None = None
    dense: int | None = None
    keeps_quantized: bool = True
    in_host: bool = False

    @classmethod
    def by_row(
        cls, shape: tuple[int, int], attach: Callable[[Callable[[torch.Tensor], TableRows]], None]
    ) -> WeightSlot:
        """The slot of a table that is read by row while the model runs."""
        return cls(shape, SlotKind.ROWS, _not_loaded, attach=attach)

    @property
    def quantizable(self) -> bool:
        """Whether the checkpoint may store the tensor quantised."""
        return self.kind is SlotKind.LINEAR


def _not_loaded(weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    raise NotImplementedError


class Declared(NamedTuple):
    """The arguments of `CheckpointModule.declare`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: SlotKind
    shard: Shard | None
    check: Callable[[torch.Tensor], None]
    kept: torch.dtype | None


class CheckpointModule(nn.Module):
    """A module that owns checkpoint tensors. Its tensor attributes are None until they are loaded."""

    def __init__(self, device: torch.device | str = "cpu"):
        super().__init__()
        self._device = torch.device(device)
        self._declared: dict[str, Declared] = {}  # slots refer to their module: it holds none

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        kind: SlotKind = SlotKind.FLOAT,
        shard: Shard | None = None,
        check: Callable[[torch.Tensor], None] = lambda tensor: None,
        kept: torch.dtype | None = None,
    ) -> None:
        """Declares the tensor ``name`` of this module, stored in ``dtype``: all of it, or a ``shard``.

        Args:
            check: raises ValueError for values that the module cannot compute with. Does not refer to the module,
                which would keep it from being freed with its last user.
            kept: a tensor that the checkpoint has in this dtype is stored in it.
        """
        self.register_parameter(name, None)
        self._declared[name] = Declared(tuple(shape), dtype, kind, shard, check, kept)

    def _load(self, name: str, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        declared = self._declared[name]
        if not tensor.is_meta:  # without values
            declared.check(tensor)
        dtype = declared.kept if tensor.dtype == declared.kept else declared.dtype
        setattr(self, name, parameter(tensor.to(self._device, dtype)))

    @property
    def loaded(self) -> Mapping[str, Any]:
        """The module's tensors by name. Attribute access on a module takes several times as long."""
        return self._parameters

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Yields (name relative to this module, slot) for the tensors that this module itself owns."""
        for name, declared in self._declared.items():
            yield name, WeightSlot(declared.shape, declared.kind, partial(self._load, name), declared.shard)


class ModuleTable(nn.ModuleDict, Generic[ModuleT]):
    """Modules of one class by name."""

    if TYPE_CHECKING:  # torch declares them for any module

        def __getitem__(self, key: str) -> ModuleT: ...
        def values(self) -> ValuesView[ModuleT]: ...
        def items(self) -> ItemsView[str, ModuleT]: ...


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

    weight: torch.Tensor

    def __init__(self, dim: int, eps: float, device: torch.device | str = "cpu"):
        super().__init__(device)
        self.eps = eps
        self.declare("weight", (dim,), torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [..., dim]`` -> the same shape and dtype."""
        return rms_norm(x, self.eps, self.weight)


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter without gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def to_stored(
    weight: torch.Tensor, scale: torch.Tensor | None, numerics: Numerics, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight, scale) of a linear as stored on ``device``.

    Quantised, with FP8 blocks of ``numerics.fp8_group``; or dequantised to ``dtype``, with scale None.
    """
    if scale is None:
        return weight.to(device, dtype), None
    weight, scale = weight.to(device), scale.to(device)
    if numerics.quantized_weights:
        if weight.dtype == torch.float8_e4m3fn and numerics.weight_block < numerics.fp8_group:
            return merge_fp8_blocks(weight, scale, numerics.fp8_group // numerics.weight_block, numerics.weight_block)
        return weight, scale
    return dequantize_weight(weight, scale).to(dtype), None


def check_finite(tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that holds a NaN or an infinity."""
    bad = tensor[~tensor.isfinite()]
    if bad.numel():
        raise ValueError(f"{bad.numel()} of {tensor.numel()} values are not finite, such as {bad[0].item()}")


def check_fp8_input(in_features: int, group: int) -> None:
    """Raises ValueError if FP8 inputs in groups of ``group`` cannot have ``in_features`` channels."""
    if in_features % group:
        raise ValueError(
            f"an FP8 linear with {in_features} input features: FP8 activations need a multiple of {group}; "
            "use numerics='exact', which dequantises the weights"
        )
