"""One row of the op benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.v4 import DeepseekV4Base


def v4_preset(name: str) -> DeepseekV4Base:
    """The preset of this name, of V4 or V4.1."""
    config = ModelConfig.from_preset(name)
    if not isinstance(config, DeepseekV4Base):
        raise ValueError(f"preset {name} is not of V4 or V4.1")
    return config


@dataclass(frozen=True)
class OpCase:
    """An op on data of one shape.

    Attributes:
        op: the op's name, which is also the name of its file in ``kernels/``.
        label: the shape, as the table shows it, for instance ``"wq_b M=1"``.
        make: ``make(device, seed)`` returns one set of random arguments; the harness makes sets until they exceed the
        L2.
        run: implementation (``"triton"``, ``"torch"``, ``"flashmla"``, ...) -> function of these arguments.
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
