"""One step's metadata for DeepSeek-V3.2: built once, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.cache.layout import TOKENS, TOKENS_PAGE
from deepseek_attn.layers.rope import RotaryTable
from deepseek_attn.v32.backends.builder import FlashMLASparseMetadataBuilder
from deepseek_attn.v32.backends.metadata import FlashMLASparseMetadata
from deepseek_attn.v32.backends.step import StepInput as BackendStepInput


@dataclass
class TokenStepMetadata:
    """Per-step tensors and lengths that all layers share, on the device except fields ending in ``_cpu``.

    Attributes:
        positions: int64 ``[T]``.
        num_visible: int64 ``[T]``, tokens that a query may see: those up to itself, or 0 for padding.
        slot_mapping: int64 ``[T]``, -1 for padding.
        block_table: int32 ``[B, pages]``.
        query_start_loc_cpu: int32 ``[B + 1]``; seq_lens_cpu: int32 ``[B]``.
        cached_lens_cpu: int64 ``[B]``, tokens in the caches after the step: without padding, at the end of a request.
        attention: the sparse backend's metadata; None for a model without an indexer.
        freqs_cis: rotations at ``positions`` by rotary table, filled by the first layer that needs them.
    """

    positions: torch.Tensor
    num_visible: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor
    cached_lens_cpu: torch.Tensor
    attention: FlashMLASparseMetadata | None
    freqs_cis: dict[RotaryTable, torch.Tensor] = field(default_factory=dict)

    def freqs_cis_of(self, rope: RotaryTable) -> torch.Tensor:
        """``rope.at(positions)``, computed once per step."""
        if rope not in self.freqs_cis:
            self.freqs_cis[rope] = rope.at(self.positions)
        return self.freqs_cis[rope]


class TokenMetadataBuilder:
    """Builds a step's metadata.

    Args:
        backend: builder of the sparse backend's metadata; None for a model without an indexer.
    """

    def __init__(self, backend: FlashMLASparseMetadataBuilder | None, device: torch.device | str = "cpu"):
        self.backend, self.device = backend, torch.device(device)

    def build(self, step: StepInput) -> TokenStepMetadata:
        """Metadata of one step, on the device."""
        batch = BackendStepInput.from_lens(
            step.query_lens, step.seq_lens, step.block_tables[TOKENS], TOKENS_PAGE, self.device
        )
        prefix_lens, starts = step.seq_lens - step.query_lens, batch.query_start_loc_cpu.long()
        requests = torch.repeat_interleave(torch.arange(batch.num_reqs), step.query_lens)
        positions = torch.arange(batch.num_actual_tokens) - starts[requests] + prefix_lens[requests]
        num_visible, cached_lens = positions + 1, step.seq_lens
        if step.token_valid is not None:
            num_visible = torch.where(step.token_valid, num_visible, 0)
            cached_lens = cached_lens - torch.bincount(requests[~step.token_valid], minlength=batch.num_reqs)
            batch.slot_mapping.masked_fill_(~step.token_valid.to(self.device), -1)
        return TokenStepMetadata(
            positions=positions.to(self.device, non_blocking=True),
            num_visible=num_visible.to(self.device, non_blocking=True),
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens_cpu=batch.seq_lens_cpu,
            cached_lens_cpu=cached_lens,
            attention=None if self.backend is None else self.backend.build(0, batch),
        )
