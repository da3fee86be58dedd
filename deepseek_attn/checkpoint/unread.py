"""Weights that stay in a checkpoint until a step needs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_attn.checkpoint.names import CanonicalSource
from deepseek_attn.checkpoint.source import HeaderSource
from deepseek_attn.checkpoint.stored_weights import read_weight, scale_name
from deepseek_attn.kernels.common.quant import encode_e8m0
from deepseek_attn.layers.weights import Shard


@dataclass(frozen=True)
class CheckpointWeight:
    """A weight of published name that stays in the checkpoint; see `layers.expert_memory.UnreadWeight`.

    Attributes:
        shard, block: as in `read_weight`.
    """

    source: CanonicalSource
    name: str
    shard: Shard | None = None
    block: int = 128

    @property
    def dtype(self) -> str:
        return self.source.entries()[self.name].dtype

    @property
    def nbytes(self) -> int:
        entries = self.source.entries()
        return sum(entries[name].nbytes for name in (self.name, scale_name(self.name)) if name in entries)

    @property
    def in_threads(self) -> bool:
        return self.source.reads_in_threads

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        try:
            return read_weight(self.source, self.name, self.shard, self.block)
        except ValueError as error:
            raise ValueError(f"cannot read {self.source.shown(self.name)}: {error}") from error

    def read_scale(self) -> torch.Tensor:
        """See `UnreadWeight.read_scale`."""
        stored = self.source.read(scale_name(self.name) or "")
        return stored if stored.dtype == torch.uint8 else encode_e8m0(stored)

    def template(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return read_weight(HeaderSource(self.source.entries()), self.name, self.shard, self.block)
