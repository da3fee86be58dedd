"""Whether Triton kernels run on a tensor's device; elsewhere an op runs its plain-torch reference."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any

import torch

from deepseek_attn.kernels.common.device import compute_capability, on_gpu
from deepseek_attn.utils.context import holding

MIN_CAPABILITY = (8, 0)  # bf16 and tf32 tensor cores
NO_TRITON = "the package triton is not installed: pip install triton"
_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


def runs_triton(tensor: torch.Tensor) -> bool:
    """True for a tensor on an NVIDIA GPU of compute capability 8.0 or later, with Triton installed."""
    return on_gpu(tensor) and not _reference_only.get() and (tensor.is_meta or _runs_on(tensor.device))


class LazyModule:
    """A module of a package, imported when one of its functions is first called: `launch` imports Triton."""

    def __init__(self, package: str, name: str):
        self._name = f"{package}.{name}"

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


def reference_ops(enabled: bool = True) -> AbstractContextManager[bool]:
    """Runs every op called in this context by its torch reference, on a GPU too (``backend="reference"``, training).

    Scoped to the thread or task that enters it, as ``torch.nn.attention.sdpa_kernel`` is: other runners keep theirs.
    """
    return holding(_reference_only, _reference_only.get() or enabled)


@cache
def _runs_on(device: torch.device) -> bool:
    return not problem_on(device)


def problem_on(device: torch.device) -> str:
    """Why Triton kernels cannot run on ``device``; empty where they can."""
    if device.type != "meta" and (device.type != "cuda" or not torch.cuda.is_available()):
        return f"its kernels need an NVIDIA GPU; the device is {device}"
    if device.type == "cuda" and torch.version.cuda is None:
        return "its kernels are built for NVIDIA GPUs; this PyTorch is built for another vendor's"
    if not have_triton():
        return NO_TRITON
    if (capability := compute_capability(device)) < MIN_CAPABILITY:
        needed, found = (f"{major}.{minor}" for major, minor in (MIN_CAPABILITY, capability))
        return f"its kernels need compute capability {needed} or later; this GPU has {found}"
    return ""


def have_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def need_triton(purpose: str) -> None:
    """Checks that Triton is installed, before a module that imports it is imported.

    Raises:
        ValueError: it is missing; the message names ``purpose`` and the remedy.
    """
    if not have_triton():
        raise ValueError(f"{purpose} needs Triton: {NO_TRITON}")
