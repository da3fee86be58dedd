"""Facts about a tensor's GPU that choose a kernel or its launch configuration, and dtype tables; imports no triton."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.utils.context import holding

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations."""
LOG2E = 1.4426950408889634
"""``log2(e)``: kernels scale logits by it and use ``exp2``."""


class GPU(NamedTuple):
    """A GPU's compute capability (major, minor) and number of multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def native_fp8(self) -> bool:
        """The GPU converts and multiplies e4m3 itself: from compute capability 8.9 on."""
        return self.capability >= (8, 9)

    @property
    def pdl(self) -> bool:
        """A kernel may start before the previous one has ended (programmatic dependent launch): from 9.0 on."""
        return self.capability >= (9, 0)

    @property
    def hopper(self) -> bool:
        """The GPU has Hopper's instructions, which later GPUs lack: compute capability 9.0."""
        return self.capability == (9, 0)


_meta_gpu: ContextVar[GPU | None] = ContextVar("meta_gpu", default=None)


def meta_stands_for(target: GPU) -> AbstractContextManager[GPU]:
    """In this context tensors on the device "meta", which have no memory, are treated as if they were on a GPU.

    Ops then choose the kernels and configurations that they would launch there; `recorded_launches` records them.
    """
    return holding(_meta_gpu, target)


def launches_nothing(tensor: Tensor) -> bool:
    """Whether kernels on ``tensor`` do not run: it has no memory, or launches are recorded (`recorded_launches`)."""
    return tensor.is_meta or _meta_gpu.get() is not None


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU, or is a "meta" tensor that stands for a GPU tensor (`meta_stands_for`)."""
    return tensor.is_cuda or (tensor.is_meta and _meta_gpu.get() is not None)


def gpu(device: torch.device) -> GPU:
    """The GPU behind ``device``. A CPU, where Triton's interpreter runs, passes for a small GPU of capability 8.0."""
    target = _meta_gpu.get() if device.type == "meta" else None
    return target or _gpu(device)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of the GPU behind ``device``, or that "meta" stands for."""
    return gpu(device).capability if device.type == "meta" else torch.cuda.get_device_capability(device)


@cache
def _gpu(device: torch.device) -> GPU:
    if device.type != "cuda":
        return GPU((8, 0), 4)
    return GPU(torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count)


def fp8_view(tensor: Tensor) -> Tensor:
    """An FP8 tensor as kernels read it: as bytes (uint8) where the GPU has no FP8."""
    return tensor if gpu(tensor.device).native_fp8 else tensor.view(torch.uint8)
