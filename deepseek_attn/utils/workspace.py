"""The scratch arena that all layers share: grown during warm-up, then locked. Its views are valid within one call."""

from __future__ import annotations

import math

import torch

ALIGNMENT = 256


class Workspace:
    """A byte buffer on one device. Contents are undefined; views of different calls alias.

    Before `lock`, a request that does not fit grows the buffer; afterwards it is an error, because captured graphs hold
    the buffer's address.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.locked = False
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)

    def nbytes(self) -> int:
        """Current size in bytes."""
        return self._buffer.numel()

    def lock(self) -> None:
        """Fixes size and address: later requests must fit."""
        self.locked = True

    def get(self, *requests: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """One view per ``(shape, dtype)``; they do not overlap, and each is 256-byte aligned within the buffer.

        Raises:
            RuntimeError: locked, and the buffer is too small.
        """
        sizes = [aligned_bytes(shape, dtype) for shape, dtype in requests]
        if sum(sizes) > self._buffer.numel():
            if self.locked:
                raise RuntimeError(
                    f"the workspace is locked at {self.nbytes()} bytes and {sum(sizes)} are needed for "
                    f"{[tuple(shape) for shape, _ in requests]}: reserve the largest step during warm-up"
                )
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        views, offset = [], 0
        for (shape, dtype), size in zip(requests, sizes, strict=True):
            count = math.prod(shape) * dtype.itemsize
            views.append(self._buffer[offset : offset + count].view(dtype).view(shape))
            offset += size
        return views


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a view of this shape in the arena, rounded up to the alignment."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
