"""Routed experts that stay in a checkpoint's files: the number kept in memory, and the reads of the others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from deepseek_attn.checkpoint.source import TensorInfo
from deepseek_attn.checkpoint.stored_weights import scale_name
from deepseek_attn.layers.expert_files import ExpertReaders
from deepseek_attn.layers.expert_memory import DISK, ExpertMemory, ExpertStats
from deepseek_attn.layers.weights import checkpoint_slots
from deepseek_attn.models.file_experts import keep_on_device
from deepseek_attn.models.moe import Experts
from deepseek_attn.runner.host_experts import STEP_BYTES, STEP_BYTES_PER_TOKEN
from deepseek_attn.utils.device import available_memory, peak_memory
from deepseek_attn.utils.sizes import show_bytes

FREE_SHARE = 0.5  # of the free memory, which experts take without ``expert_cache_bytes``


@dataclass
class ExpertFiles:
    """The caches of all layers whose experts stay in the checkpoint.

    Attributes:
        slots: experts that each layer keeps on the device (of a CPU: in memory); experts: that it has, on this rank.
        nbytes: bytes of all slots.
        readers: threads that read.
    """

    slots: int
    experts: int
    nbytes: int
    readers: ExpertReaders

    @classmethod
    def open(
        cls, model: nn.Module, memory: ExpertMemory, device: torch.device, tokens: int, ranks: int
    ) -> ExpertFiles | None:
        """Gives each layer its cache, or its rows on a GPU; None for a model whose experts are elsewhere.

        Called when everything else of the runner's lifetime is allocated.

        Args:
            tokens: largest number of a step; ranks: processes that share the free memory of this host.

        Raises:
            ValueError: too little memory of a GPU.
        """
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        if memory.kind != DISK or not layers:
            return None
        projections = list(chain.from_iterable(layer.projections for layer in layers))
        experts = projections[0].experts
        readers = ExpertReaders(weight for linear in projections for weight in linear.unread.values())
        if device.type != "cpu":
            budget = memory.cache_bytes or gpu_budget(device, tokens)
            found, divided = keep_on_device([layer.projections for layer in layers], device, budget, readers)
            for layer, rows in zip(layers, found, strict=True):
                layer.rows = rows
            return cls(min(divided.cached, experts), experts, divided.nbytes, readers)
        one = sum(next(iter(linear.unread.values())).nbytes for linear in projections)
        size = memory.cache_bytes or int(available_memory() * FREE_SHARE) // ranks
        slots = max(1, min(experts, size // one))
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
            f"experts: {self.slots} of {self.experts} per layer kept in {show_bytes(self.nbytes)}; "
            f"{stats.hits:,} of {stats.hits + stats.misses:,} uses were there ({stats.hit_rate:.0%}), "
            f"{show_bytes(stats.bytes_read)} read; peak memory of the process {show_bytes(peak_memory())}"
        )

    def close(self) -> None:
        """Ends the threads that read."""
        self.readers.close()


def gpu_budget(device: torch.device, tokens: int) -> int:
    """Bytes of the GPU's free memory that experts take without ``expert_cache_bytes``."""
    if device.type == "meta":
        return 1 << 62
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free - STEP_BYTES - STEP_BYTES_PER_TOKEN * tokens


def check_cache(model: nn.Module, entries: dict[str, TensorInfo], memory: ExpertMemory) -> None:
    """ValueError if ``expert_cache_bytes`` is less than one expert of each layer takes.

    Args:
        entries: headers of the checkpoint, under published names.
    """
    if memory.kind != DISK or memory.cache_bytes is None:
        return  # of a GPU, `keep_on_device` knows more
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
