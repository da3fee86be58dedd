"""Facts about a tensor's GPU that choose a kernel or its launch configuration, and dtype tables; imports no triton."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations."""
LOG2E = 1.4426950408889634
"""``log2(e)``: kernels scale logits by it and use ``exp2``."""


class GPU(NamedTuple):
    """Compute capability (major, minor) and number of multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int


@cache
def gpu(device: torch.device) -> GPU:
    """The GPU behind ``device``. A CPU, where Triton's interpreter runs, passes for a small GPU of capability 8.0."""
    if device.type != "cuda":
        return GPU((8, 0), 4)
    return GPU(torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count)


def has_native_fp8(device: torch.device) -> bool:
    """Whether the GPU converts and multiplies e4m3 itself: from compute capability 8.9 on."""
    return gpu(device).capability >= (8, 9)


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before the previous one has ended (programmatic dependent launch): from 9.0 on."""
    return gpu(device).capability >= (9, 0)


def fp8_view(tensor: Tensor) -> Tensor:
    """An FP8 tensor as kernels read it: as bytes (uint8) where the GPU has no FP8."""
    return tensor if has_native_fp8(tensor.device) else tensor.view(torch.uint8)
