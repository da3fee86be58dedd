"""Wraps an impl for tests of layers: poisons memory that it must not read, and records its results."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from deepseek_attn.impls.base import AttentionLayer, SparseMLAAttentionImpl
from deepseek_attn.impls.flow import SplitAttentionImpl, decode_topk
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.impls.queries import AttentionOutput, AttentionQueries
from deepseek_attn.kernels.common.quant import QuantizedRows, dequantize_fp8

NULL_SLOT = 0
"""A slot of the null page, which no sequence writes to: poisoned caches hold NaN there."""
FP8_GROUP = 128  # channels that share a scale of quantised heads


class Attended(NamedTuple):
    """Results of an impl for the tokens of a step.

    Attributes:
        heads: ``[T, heads, value_dim]`` on the CPU.
        rotated_back: the inverse rotation has been applied (`SparseMLAAttentionImpl.attend_raw`).
    """

    heads: Tensor
    rotated_back: bool


class WatchedLayer(AttentionLayer, Protocol):
    """A layer under a `WatchedImpl`; ``num_heads``: number of heads of the recorded output."""

    num_heads: int


class WatchedImpl:
    """Takes the place of a layer's impl, and calls that impl.

    Columns of index tensors past a row's length point to slots, or rows of gathered keys, that hold NaN: an impl that
    ignores the lengths returns NaN. Impls with ``needs_masked_tails`` find -1 there.

    Attributes:
        impl: the wrapped impl; attended: results of its last call.
    """

    def __init__(self, impl: type[SparseMLAAttentionImpl]):
        self.impl, self.poisons = impl, not impl.needs_masked_tails
        self.attended: Attended | None = None
        if self.poisons and issubclass(impl, SplitAttentionImpl):
            self.impl = poisoned_rows(impl)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.impl, name)

    def forward_mqa(
        self, layer: WatchedLayer, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor | None = None
    ) -> Tensor:
        """See `SparseMLAAttentionImpl.forward_mqa`."""
        self._poison(layer)
        result = self.impl.forward_mqa(layer, q, kv, positions, output)
        self.attended = Attended(result[:, : layer.num_heads].to("cpu", copy=True), False)
        return result

    def attend(self, layer: WatchedLayer, queries: AttentionQueries, kv: Tensor, positions: Tensor) -> AttentionOutput:
        """See `SparseMLAAttentionImpl.attend`."""
        self._poison(layer)
        result = self.impl.attend(layer, queries, kv, positions)
        if isinstance(result, QuantizedRows):
            values = result.values.transpose(0, 1).flatten(1)  # groups side by side
            rows = dequantize_fp8(values.contiguous(), result.scale.contiguous(), FP8_GROUP)
            self.attended = Attended(rows.unflatten(1, (layer.num_heads, -1)).cpu(), True)
        else:
            self.attended = Attended(result.to("cpu", copy=True), False)
        return result

    def _poison(self, layer: AttentionLayer) -> None:
        if self.poisons and layer.step is not None:
            poison_page_indices(layer, layer.step)


def poison_page_indices(layer: AttentionLayer, step: StepMetadata) -> None:
    """Writes a slot of NaN to every column of the step's decode index tensors past the valid length."""
    if not step.num_decode_tokens:
        return
    if step.swa is not None:
        poison_tails(step.swa.decode_swa_indices.squeeze(1), step.swa.decode_swa_lens, NULL_SLOT)
    if layer.kv_cache is not None:
        slots, lens = decode_topk(layer, step)
        poison_tails(slots, lens, NULL_SLOT)
        if layer.index_topk is not None:
            layer.decode_topk_slots = slots


def poison_tails(indices: Tensor, lens: Tensor, value: int) -> None:
    """Fills the columns of ``indices [T, K]`` past ``lens [T]``."""
    column = torch.arange(indices.shape[1], device=indices.device)
    indices.masked_fill_(column >= lens.unsqueeze(1), value)


def poisoned_rows(impl: type[SplitAttentionImpl]) -> type[SplitAttentionImpl]:
    """The impl with one more gathered row, of NaN, which every column past the lengths names."""

    class PoisonedRowsImpl(impl):
        @classmethod
        def attend_rows(
            cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
        ) -> Tensor:
            poison_tails(indices, lens, len(kv))
            kv = torch.cat([kv, kv.new_full((1, kv.shape[1]), torch.nan)])
            return super().attend_rows(layer, q, kv, indices, lens, output)

    return PoisonedRowsImpl
