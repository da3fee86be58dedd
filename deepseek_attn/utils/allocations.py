"""Allocations of tensors as they happen, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512  # bytes; allocations are rounded up to multiples
MIB = 1 << 20


class Event(NamedTuple):
    """Storage ``key`` of ``nbytes`` is allocated; or freed, with ``nbytes`` 0."""

    key: int
    nbytes: int


class AllocationTrace(TorchDispatchMode):
    """Context that counts the storages of tensors that ops return while they are alive; views share a storage.

    On the device "meta" these are the allocations of the same code on a GPU, except allocations inside torch's kernels.

    Args:
        block: bytes; sizes are rounded up to its multiples.

    Attributes:
        events: allocations and frees in their order.
        living: bytes by key; nbytes: their sum; peak: its maximum since the last `reset_peak`.
    """

    def __init__(self, device: torch.device, block: int = BLOCK):
        super().__init__()
        self.device, self.block = device, block
        self.events: list[Event] = []
        self.living: dict[int, int] = {}
        self.nbytes = self.peak = 0
        self._keys: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.device.type == self.device.type:
                self._note(value.untyped_storage())
        return out

    def key(self, tensor: torch.Tensor) -> int | None:
        """The key of a tensor's storage; None if no op returned it here."""
        return self._keys.get(tensor.untyped_storage())

    def reset_peak(self) -> None:
        self.peak = self.nbytes

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._keys or not storage.nbytes():
            return
        key, size = len(self.events), rounded(storage.nbytes(), self.block)
        self._keys[storage] = key
        self.events.append(Event(key, size))
        self.living[key] = size
        self.nbytes += size
        self.peak = max(self.peak, self.nbytes)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.events.append(Event(key, 0))
        self.nbytes -= self.living.pop(key)


def rounded(nbytes: int, multiple: int = BLOCK) -> int:
    return -(-nbytes // multiple) * multiple


class Held(NamedTuple):
    """Bytes of allocations: alive at the end (``kept``), and the maximum alive at one time (``peak``)."""

    kept: int
    peak: int


def held(events: Iterable[Event]) -> Held:
    """Sums allocations and frees in order. Frees of storages allocated earlier are ignored."""
    living: dict[int, int] = {}
    now = peak = 0
    for key, nbytes in events:
        now += nbytes - living.pop(key, 0)
        if nbytes:
            living[key] = nbytes
        peak = max(peak, now)
    return Held(now, peak)
