"""One row of the op benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class OpCase:
    """An op on data of one shape.

    Attributes:
        op: the op's name, that of its file in ``kernels/``.
        label: the shape, as the table shows it, for instance ``"wq_b M=1"``.
        make: ``make(device, seed)`` returns one set of random arguments; the harness makes as many as exceed the L2.
        run: by implementation (``"triton"``, ``"torch"``, ``"flashmla"``, ...), the function of those arguments.
            The first is ours. Everything must be capturable in a CUDA graph.
        bytes: bytes that must be read and written at least.
        flops: floating-point operations, 0 for ops that only move data.
        unit: ceiling that ``flops`` are compared with, ``"bf16"`` or ``"fp8"``.
    """

    op: str
    label: str
    make: Callable[[torch.device, int], tuple[Any, ...]]
    run: dict[str, Callable[..., Any]]
    bytes: int
    flops: int = 0
    unit: str = "bf16"
