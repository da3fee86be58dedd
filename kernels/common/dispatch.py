"""Whether Triton kernels run on a tensor's device; elsewhere an op runs its plain-torch reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from deepseek_attn.kernels.common.device import compute_capability, on_gpu

MIN_CAPABILITY = (8, 0)  # bf16 and tf32 tensor cores
NO_TRITON = "the package triton is not installed: pip install triton"
P = ParamSpec("P")
T = TypeVar("T")
_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


def runs_triton(tensor: torch.Tensor) -> bool:
    """True for a tensor on an NVIDIA GPU of compute capability 8.0 or later, with Triton installed."""
    return on_gpu(tensor) and not _reference_only.get() and (tensor.is_meta or _runs_on(tensor.device))


def contract(
    module: str = "launch", tensor: str = "", when: Callable[..., bool] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of an op in a family's ``__init__.py``: calls the function of its name that computes it here.

    That function is in ``module`` of the family where Triton runs, else in its ``reference``. Either module is imported
    by the first call that needs it.

    Args:
        tensor: attribute of the first argument whose device decides; by default the argument is the tensor itself.
        when: decides instead, by the arguments of a call.
    """

    def decorate(op: Callable[P, T]) -> Callable[P, T]:
        first = op.__code__.co_varnames[0]

        @wraps(op)
        def call(*args: P.args, **named: P.kwargs) -> T:
            if when is None:
                given: Any = args[0] if args else named[first]
                in_triton = runs_triton(getattr(given, tensor) if tensor else given)
            else:
                in_triton = when(*args, **named)
            home = importlib.import_module(f"{op.__module__}.{module if in_triton else 'reference'}")
            return getattr(home, op.__name__)(*args, **named)

        return call

    return decorate


@contextmanager
def reference_ops(enabled: bool = True) -> Iterator[None]:
    """Runs every op called in this context by its torch reference, on a GPU too (``backend="reference"``, training).

    Scoped to the thread or task that enters it, as ``torch.nn.attention.sdpa_kernel`` is: other runners keep theirs.
    """
    token = _reference_only.set(_reference_only.get() or enabled)
    try:
        yield
    finally:
        _reference_only.reset(token)


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
    capability = compute_capability(device)
    if capability < MIN_CAPABILITY:
        return (
            f"its kernels need compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or later; this GPU has "
            f"{capability[0]}.{capability[1]}"
        )
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
