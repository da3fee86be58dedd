"""Copies between host and device that do not synchronise."""

from __future__ import annotations

import torch


def to_device(values: list[int], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of ``values`` that nobody waits for: it is on the device when what is launched next gets there."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class AsyncHostCopy:
    """Values of a tensor on their way to the host. The tensor may be overwritten by what is launched later."""

    def __init__(self, tensor: torch.Tensor):
        self._host = tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.clone()
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()
        self._values: list | None = None

    def wait(self) -> list:
        """The values as (nested) lists, once they are here."""
        if self._values is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._values = self._host.tolist()
        return self._values
