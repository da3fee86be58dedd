"""Linear layers of routed experts: one stacked weight for all experts of a rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from deepseek_attn.config.numerics import Numerics
from deepseek_attn.kernels.common.quant import InputFormat, row_exponents
from deepseek_attn.kernels.linear.formats import dequantize_weight, quantized_input
from deepseek_attn.layers.expert_files import ExpertFileCache, ExpertReaders, StoredPair
from deepseek_attn.layers.expert_memory import DISK, HOST, RESIDENT, ExpertMemory, UnreadWeight
from deepseek_attn.layers.weights import (
    CheckpointModule,
    Shard,
    SlotKind,
    WeightSlot,
    check_fp8_input,
    parameter,
    to_stored,
)
from deepseek_attn.utils.device import pinned_empty


class ExpertLinear(CheckpointModule):
    """The same projection of every expert, stacked: weight ``[experts, out_features, in_features]``.

    Checkpoint tensors arrive one expert at a time; the first one decides the storage format and allocates the stack.

    Args:
        experts: number of experts of this rank; first: the checkpoint's number of the first of them.
        shard: this rank's part of each expert's weight, as of a `Linear`; None for all of it.
        memory: where the stack is: on the device, or in host memory, which is pinned if the device is a GPU. With
            ``disk`` there is no stack, and `cache` has some experts.

    Attributes:
        unread: experts of this rank that stay in the checkpoint, by number.
        template: weight and scale of one expert as the op reads them, without values, on the device "meta"; None until
            the first expert is loaded.
        cache: None but for ``disk``, until `open_cache`.
    """

    template: StoredPair | None = None
    cache: ExpertFileCache | None = None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        first: int = 0,
        memory: ExpertMemory = RESIDENT,
        shard: Shard | None = None,
    ):
        super().__init__(device)
        self.experts, self.first, self.full_shape, self.shard = experts, first, (out_features, in_features), shard
        self.out_features, self.in_features = shard.of(self.full_shape) if shard else self.full_shape
        self.numerics, self.dtype, self.memory = numerics, dtype, memory
        self.in_host = memory.kind == HOST and self._device.type != "cpu"
        self.input_format = InputFormat(numerics.fp8_activations, numerics.pow2_activation_scales, numerics.fp8_group)
        self.register_parameter("weight", None)
        self.register_parameter("scale", None)
        self.register_buffer("exponent", None, persistent=False)
        self._has_exponents = self.input_format.fp8
        self.unread: dict[int, UnreadWeight] = {}

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        return iter(())  # `Experts` names them: the checkpoint counts experts before projections

    def expert_slot(self, index: int) -> WeightSlot:
        """The slot of expert ``index`` of the checkpoint, which may be another rank's."""

        def load(weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
            self._load_expert(index - self.first, weight, scale)

        def attach(weight: UnreadWeight) -> None:
            self._attach_expert(index - self.first, weight)

        return WeightSlot(
            self.full_shape,
            SlotKind.LINEAR,
            load,
            self.shard,
            elsewhere=not 0 <= index - self.first < self.experts,
            block=self.numerics.weight_block,
            attach=attach if self.memory.kind == DISK else None,
            dense=self.dtype.itemsize,
            keeps_quantized=self.numerics.quantized_weights,
            in_host=self.in_host,
        )

    def _attach_expert(self, index: int, weight: UnreadWeight) -> None:
        if self.template is None:
            self.template = self.convert(*weight.template())
        first = next(iter(self.unread.values()), weight)
        if weight.dtype != first.dtype:
            raise ValueError(
                f"expert {self.first + index} has a {weight.dtype} weight, other experts of the layer {first.dtype}: "
                "all experts of a layer must have one format"
            )
        self.unread[index] = weight

    def convert(self, weight: torch.Tensor, scale: torch.Tensor | None) -> StoredPair:
        """A stored weight and its scale as the op reads them, on the device unless the stack is in host memory."""
        device = weight.device if weight.is_meta or self.in_host else self._device
        weight, scale = to_stored(weight, scale, self.numerics, self.dtype, device)
        if scale is not None and self.input_format.fp8:
            check_fp8_input(self.in_features, self.input_format.group)
        return weight, scale

    @property
    def opened_cache(self) -> ExpertFileCache:
        """The `cache`. RuntimeError before `open_cache`."""
        if self.cache is None:
            raise RuntimeError(
                "the experts stay in the checkpoint's files, and have no cache yet: load the model first"
            )
        return self.cache

    def exponents(self, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row exponents of an FP4 expert, and the scales to keep. ValueError if it has no exponents."""
        found = row_exponents(weight, scale)
        if found is None:
            raise ValueError("an expert's scales changed after the model was loaded: load it again")
        return found

    def all_have_exponents(self) -> bool:
        """Whether all FP4 experts that stay in the checkpoint have row exponents; reads scales, few weights."""
        if not self._has_exponents or self._device.type == "meta":
            return self._has_exponents
        # a weight without zeros, which row_exponents looks at only where scales alone do not decide
        dense = torch.tensor(0x11, dtype=torch.uint8, device="cpu").expand(self.out_features, self.in_features // 2)
        for weight in self.unread.values():
            scale = weight.read_scale()
            if row_exponents(dense, scale) is None and row_exponents(weight()[0], scale) is None:
                return False
        return True

    def open_cache(self, slots: int, readers: ExpertReaders) -> None:
        """Makes the cache of a layer whose experts stay in the checkpoint."""
        self.cache = ExpertFileCache(self.unread, slots, readers)

    def one_expert(self) -> list[torch.Tensor]:
        """Weight of one expert, and its scale if it has one: the first one's, or without values (`template`)."""
        parts = self.template
        if parts is None:
            parts = self.weight[0], None if self.scale is None else self.scale[0]
        return [part for part in parts if part is not None]

    def read_expert(self, index: int) -> torch.Tensor:
        """The weight of one expert of this rank, by number, as the op reads it."""
        return self.weight[index] if self.template is None else self.convert(*self.unread[index]())[0]

    def _load_expert(self, index: int, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        weight, scale = self.convert(weight, scale)
        if self.weight is None:
            self.weight = parameter(self._empty_stack(weight))
            self.scale = None if scale is None else parameter(self._empty_stack(scale))
        if weight.dtype != self.weight.dtype:
            raise ValueError(
                f"expert {self.first + index} has a {weight.dtype} weight, other experts of the layer "
                f"{self.weight.dtype}: all experts of a layer must have one format"
            )
        if scale is not None and self.scale is not None:
            self.scale[index].copy_(self._load_exponent(index, weight, scale))
        self.weight[index].copy_(weight)

    def _empty_stack(self, expert: torch.Tensor) -> torch.Tensor:
        """An empty stack: a tensor like ``expert`` for each expert."""
        shape = (self.experts, *expert.shape)
        if self.in_host and self._device.type == "cuda":
            return pinned_empty(shape, expert.dtype)
        return expert.new_empty(shape)

    def _load_exponent(self, index: int, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Records the row exponents of an FP4 expert while all experts have them; returns the scales to keep."""
        if weight.dtype != torch.uint8 or not self._has_exponents:
            return scale
        found = row_exponents(weight, scale)
        if found is None:
            self._has_exponents, self.exponent = False, None
            return scale
        exponent, scale = found
        if self.exponent is None:
            self.exponent = self._empty_stack(exponent)
        self.exponent[index] = exponent
        return scale

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """``x [T, in_features]`` through one expert -> ``[T, out_features]`` in the dtype of ``x``; in plain torch."""
        if self.scale is None:
            return F.linear(x, self.weight[expert])
        weight = dequantize_weight(self.weight[expert], self.scale[expert])
        return F.linear(quantized_input(x, self.input_format), weight).to(x.dtype)
