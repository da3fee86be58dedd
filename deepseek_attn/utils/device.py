"""Copies between host and device that do not synchronise; side streams; the memory of a device."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMINFO, STATM = Path("/proc/meminfo"), Path("/proc/self/statm")


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a GPU, or of the host within the limits of this process.

    2**62 where it is unknown (the device "meta", a CPU under Windows), so that no check fails.
    """
    if device.type == "meta" or (device.type == "cpu" and not hasattr(os, "sysconf")):
        return 1 << 62
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return physical


def available_memory() -> int:
    """Bytes of host memory that this process may still allocate: free memory and reclaimable caches.

    2**62 where they are unknown.
    """
    found = [1 << 62]
    try:
        fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError):  # not Linux
        pass
    try:
        limit, used = int(CGROUP_LIMIT.read_text()), int(CGROUP_LIMIT.with_name("memory.current").read_text())
        stat = dict(line.split() for line in CGROUP_LIMIT.with_name("memory.stat").read_text().splitlines())
        found.append(limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))
    except (OSError, ValueError, KeyError):  # no such files, or no limit
        pass
    return max(0, min(found))


def resident_memory() -> int:
    """Resident memory of this process, pinned memory included, in bytes; 0 where it is unknown (not Linux)."""
    with suppress(OSError):
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def peak_memory() -> int:
    """Peak resident memory of this process, in bytes; 0 where it is unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PinnedMemory:
    """Page-locked host memory of exactly ``nbytes`` bytes, released when no tensor uses it any more.

    The allocator behind ``pin_memory=True`` rounds sizes up to powers of two: up to twice the size of the experts.

    Raises:
        ValueError: CUDA cannot lock ``nbytes`` bytes.
    """

    def __init__(self, nbytes: int):
        self._map = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (self._address, False), "version": 3
        }  # fmt: skip
        self._locked = False
        driver: Any = torch.cuda.cudart()
        error = int(driver.cudaHostRegister(self._address, nbytes, 1))  # 1: portable
        if error:
            raise ValueError(
                f"CUDA cannot lock {nbytes:,} bytes of host memory (error {error}): raise the limit of locked memory "
                "(ulimit -l unlimited; docker run --ulimit memlock=-1), free host memory, or use expert_memory='disk'"
            )
        self._locked = True

    def __del__(self) -> None:
        if getattr(self, "_locked", False):
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(self._address)


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in page-locked host memory of exactly its size, which kernels can read."""
    values = torch.from_numpy(np.asarray(PinnedMemory(prod(shape) * dtype.itemsize)))
    return values.view(dtype).view(*shape)


def to_device(
    values: Sequence[int] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copies values on the host to ``device`` asynchronously, from pinned memory and in stream order.

    Args:
        values: integers, which become a tensor of ``dtype``, or a CPU tensor, which keeps its dtype.
    """
    cuda = device.type == "cuda"
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=dtype, pin_memory=cuda, device="cpu")
    elif cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=cuda)


def run_beside(
    function: Callable[[], T], device: torch.device, urgent: bool = False, behind: bool = True
) -> tuple[T, torch.cuda.Event | None]:
    """Runs ``function`` in parallel with the next launches; returns its result and the event of its completion.

    During CUDA graph capture it runs on a side stream. Otherwise it runs in order on the current stream, without an
    event: only within a graph do streams share memory in the order of their events.

    Args:
        urgent: use a second side stream, of high priority.
        behind: wait for earlier launches of the current stream. If False, wait only for the side stream's own.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return function(), None
    side = _side_stream(device, urgent)
    if behind:
        side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        result, complete = function(), torch.cuda.Event()
        complete.record()
    return result, complete


@cache
def _side_stream(device: torch.device, urgent: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)


@contextmanager
def on_side_stream(*tensors: torch.Tensor) -> Iterator[None]:
    """Context whose launches run on a side stream: after all earlier launches, in parallel with later ones.

    No effect on a CPU.

    Args:
        tensors: tensors that the context reads and that existed before it; no later launch may write them.
    """
    device = tensors[0].device
    if device.type != "cuda":
        yield
        return
    side = _side_stream(device, urgent=False)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    for tensor in tensors:
        tensor.record_stream(side)  # do not reuse their memory before the side stream has read it


class AsyncHostCopy:
    """Copies a tensor to the host asynchronously, in stream order: work launched later may overwrite the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self._host = tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.clone()
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()
        self._values: list | None = None

    def wait(self) -> list:
        """Waits for the copy; returns the values as (nested) lists."""
        if self._values is None:
            self._values = self.wait_for_tensor().tolist()
        return self._values

    def wait_for_tensor(self) -> torch.Tensor:
        """Waits for the copy, a tensor on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
