"""Routed experts that stay in a checkpoint's files: how many of them a model keeps in memory, and what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from torch import nn

from deepseek_attn.checkpoint.source import TensorInfo
from deepseek_attn.checkpoint.stored_weights import scale_name
from deepseek_attn.layers.expert_files import ExpertReaders
from deepseek_attn.layers.expert_memory import DISK, ExpertMemory, ExpertStats
from deepseek_attn.layers.weights import checkpoint_slots
from deepseek_attn.models.moe import Experts
from deepseek_attn.utils.device import available_memory, peak_memory
from deepseek_attn.utils.sizes import show_bytes

FREE_SHARE = 0.5  # of the free memory, which experts take without ``expert_cache_bytes``


@dataclass
class ExpertFiles:
    """The caches of all layers whose experts stay in the checkpoint.

    Attributes:
        slots: experts that each layer keeps in memory; experts: that it has, on this rank.
        nbytes: bytes of all slots.
        readers: threads that read.
    """

    slots: int
    experts: int
    nbytes: int
    readers: ExpertReaders

    @classmethod
    def open(cls, model: nn.Module, memory: ExpertMemory, ranks: int) -> ExpertFiles | None:
        """Gives each layer its cache; None for a model whose experts are elsewhere.

        Args:
            ranks: processes that share the free memory of this host.
        """
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        if memory.kind != DISK or not layers:
            return None
        projections = list(chain.from_iterable(layer.projections for layer in layers))
        one = sum(next(iter(linear.unread.values())).nbytes for linear in projections)
        experts = projections[0].experts
        size = memory.cache_bytes or int(available_memory() * FREE_SHARE) // ranks
        slots = max(1, min(experts, size // one))
        readers = ExpertReaders(weight for linear in projections for weight in linear.unread.values())
        for linear in projections:
            linear.open_cache(slots, readers)
        return cls(slots, experts, slots * one, readers)

    @property
    def stats(self) -> ExpertStats:
        return self.readers.stats

    def describe(self) -> str:
        """One line for people."""
        stats = self.stats
        return (
            f"experts: {self.slots} of {self.experts} per layer in memory ({show_bytes(self.nbytes)}); "
            f"{stats.hits:,} of {stats.hits + stats.misses:,} uses were there ({stats.hit_rate:.0%}), "
            f"{show_bytes(stats.bytes_read)} read; peak memory of the process {show_bytes(peak_memory())}"
        )

    def close(self) -> None:
        """Ends the threads that read."""
        self.readers.close()


def check_cache(model: nn.Module, entries: dict[str, TensorInfo], memory: ExpertMemory) -> None:
    """ValueError if ``expert_cache_bytes`` is less than one expert of each layer takes.

    Args:
        entries: headers of the checkpoint, under published names.
    """
    if memory.kind != DISK or memory.cache_bytes is None:
        return
    kept = {name: slot for name, slot in checkpoint_slots(model).items() if slot.attach and slot.quantizable}
    pairs = [(name, scale_name(name)) for name, slot in kept.items() if not slot.elsewhere]
    total = sum(entries[name].nbytes for name in chain.from_iterable(pairs) if name in entries)
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    least = -(-total // layers[0].w1.experts) if layers else 0
    if memory.cache_bytes < least:
        raise ValueError(
            f"expert_cache_bytes={memory.cache_bytes}: one expert of each of {len(layers)} layers has {least:,} bytes, "
            "which is the least"
        )
