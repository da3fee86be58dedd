"""Suspends the caller's torch settings that would change results while this library computes.

Default dtype and default device are not suspended: every factory call names both (tests/house/test_factories.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from threading import Lock, get_ident
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
SMALLEST = sys.float_info.min  # of the normal numbers: half of it is 0 in a thread that flushes denormals
_inside: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def own_torch_state() -> Iterator[None]:
    """Context in which results do not depend on the caller's torch settings; they are restored on exit.

    Inside: no autocast, float32 products in float32 (no TF32, no bfloat16), no flushing of denormals. Nested contexts
    do nothing. The precision of float32 products is a setting of the process: products of other threads are in float32
    too while a thread is inside.
    """
    if _inside.get():
        yield
        return
    with ExitStack() as stack:
        stack.callback(_inside.reset, _inside.set(True))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if SMALLEST / 2 == 0:
            torch.set_flush_denormal(False)
            stack.callback(torch.set_flush_denormal, True)
        stack.callback(_float32_products.leave)  # before it is entered: an exception within that leaves it too
        _float32_products.enter()
        yield


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context in which torch's operations of the calling thread run on ``count`` threads of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_own_torch_state(function: Callable[P, R]) -> Callable[P, R]:
    """Runs a function in `own_torch_state`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _inside.get():
            return function(*args, **kwargs)
        with own_torch_state():
            return function(*args, **kwargs)

    return call


class _Float32Products:
    """Disables TF32 and bfloat16 in float32 products from the first thread's `enter` until the last thread's `leave`.

    A thread counts once. If an interrupt kept it from leaving, its next `enter` does not count it twice.
    """

    def __init__(self):
        self.lock = Lock()
        self.inside: set[int] = set()  # threads
        self.before: list[tuple[Any, str]] = []  # torch's backends and their precisions
        self.overall: str | None = None

    def enter(self) -> None:
        with self.lock:
            self.inside.discard(get_ident())
            if not self.inside:
                mkldnn: Any = torch.backends.mkldnn  # torch gives the module its attribute ``matmul`` at run time
                backends: tuple[Any, ...] = torch.backends.cuda.matmul, mkldnn.matmul
                precisions = [(backend, backend.fp32_precision) for backend in backends]
                self.before = [(backend, before) for backend, before in precisions if before not in ("ieee", "none")]
                self.overall = None
                if self.before:
                    with suppress(RuntimeError):  # torch raises where a backend was set separately
                        self.overall = torch.get_float32_matmul_precision()
                    overall = None if self.overall is None else "highest"
                    self._set(overall, [(backend, "ieee") for backend, _ in self.before])
            self.inside.add(get_ident())

    def leave(self) -> None:
        with self.lock:
            self.inside.discard(get_ident())
            if not self.inside and self.before:
                self._set(self.overall, self.before)
                self.before = []

    def _set(self, overall: str | None, precisions: list[tuple[Any, str]]) -> None:
        if overall is not None:
            torch.set_float32_matmul_precision(overall)
        for backend, precision in precisions:
            backend.fp32_precision = precision


_float32_products = _Float32Products()
