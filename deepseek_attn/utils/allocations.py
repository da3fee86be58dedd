"""Allocations of tensors as they happen, on any device, and the segments that CUDA's caching allocator would make."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
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
    """In this context storages of tensors that ops return are counted while they live, views once.

    On the device "meta" these are the allocations of the same code on a GPU, except allocations inside torch's kernels.

    Args:
        block: sizes are rounded up to multiples of it.

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


class _Block:
    """A block of a segment; ``None`` neighbours mark the segment's ends."""

    def __init__(self, address: int, size: int, small: bool, previous: _Block | None = None):
        self.address, self.size, self.small = address, size, small
        self.previous = previous
        self.following: _Block | None = None
        self.free = False


class CachingAllocator:
    """PyTorch's caching allocator on one stream, with its default settings and endless memory.

    Small blocks, up to 1 MiB, come from segments of 2 MiB; others from segments of 20 MiB or, from 10 MiB on, of their
    own size. A free block is split and merged with its neighbours; segments are kept.

    Attributes:
        reserved: bytes of all segments.
    """

    def __init__(self):
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address), by whether small
        self._blocks: dict[int, _Block] = {}  # free ones by address
        self._used: dict[object, _Block] = {}

    def replay(self, events: Iterable[Event], name: object = None) -> None:
        """Allocates and frees in this order. A free without an allocation under this ``name`` is ignored."""
        for key, nbytes in events:
            if nbytes:
                self.allocate((name, key), nbytes)
            elif (name, key) in self._used:
                self.free((name, key))

    def allocate(self, key: object, nbytes: int) -> None:
        size = rounded(nbytes)
        small = size <= MIB
        found = bisect_left(self._free[small], (size, 0))
        if found < len(self._free[small]):
            _, address = self._free[small].pop(found)
            block = self._blocks.pop(address)
        else:
            block = _Block(self.reserved, segment_size(size), small)
            self.reserved += block.size
        rest = block.size - size
        if rest >= BLOCK if small else rest > MIB:
            tail = _Block(block.address + size, rest, small, block)
            _join(tail, block.following)
            block.size, block.following = size, tail
            self._put_back(tail)
        block.free = False
        self._used[key] = block

    def free(self, key: object) -> None:
        block = self._used.pop(key)
        if block.previous is not None and block.previous.free:
            before = self._take(block.previous)
            before.size += block.size
            _join(before, block.following)
            block = before
        if block.following is not None and block.following.free:
            after = self._take(block.following)
            block.size += after.size
            _join(block, after.following)
        self._put_back(block)

    def _take(self, block: _Block) -> _Block:
        self._free[block.small].remove((block.size, block.address))
        return self._blocks.pop(block.address)

    def _put_back(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.address))
        self._blocks[block.address] = block


def _join(block: _Block, following: _Block | None) -> None:
    block.following = following
    if following is not None:
        following.previous = block


def segment_size(nbytes: int) -> int:
    """Bytes that the caching allocator requests from the driver for a block that fits nowhere."""
    if nbytes <= MIB:
        return 2 * MIB
    return 20 * MIB if nbytes < 10 * MIB else rounded(nbytes, 2 * MIB)
