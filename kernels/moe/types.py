"""Arguments of the mixture-of-experts ops that have several parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.kernels.common.quant import InputFormat


class ExpertGroups(NamedTuple):
    """Group-limited routing: experts come from the ``kept`` best of ``num_groups`` groups of consecutive experts.

    The score of a group is the sum of its two best experts' scores, bias included.
    """

    num_groups: int
    kept: int


UNGROUPED = ExpertGroups(1, 1)


class HashRouting(NamedTuple):
    """Experts by token id: row ``token_ids[t]`` of ``table``.

    Attributes:
        table: int64 ``[vocab_size, topk]``; token_ids: int64 ``[T]``, padding included in the table's range.
    """

    table: Tensor
    token_ids: Tensor


class ExpertRange(NamedTuple):
    """Experts of one rank: ``count`` from number ``first`` on."""

    first: int
    count: int


class ExpertStack(NamedTuple):
    """One projection of all experts.

    Attributes:
        weight: ``[E, out, in]`` of a float dtype; or float8_e4m3fn; or packed FP4, uint8 ``[E, out, in / 2]``.
        scale: float32 ``[E, ceil(out / group), ceil(in / group)]`` of FP8 weights, e8m0 bytes ``[E, out, in / 32]`` of
            FP4 weights; None for plain weights. ``group`` is `InputFormat.group`.
        exponent: uint8 ``[E, out]`` from `row_exponents`, for FP4 weights that FP8 tensor cores can multiply exactly.
    """

    weight: Tensor
    scale: Tensor | None = None
    exponent: Tensor | None = None

    @property
    def is_fp4(self) -> bool:
        """The weight is packed FP4."""
        return self.weight.dtype == torch.uint8

    @property
    def format(self) -> str:
        """``plain``, ``fp8`` or ``fp4``."""
        return "plain" if self.scale is None else "fp4" if self.is_fp4 else "fp8"


class ExpertsPass(NamedTuple):
    """Arguments of one pass of `moe_experts`; rows of ``x`` and ``add`` have contiguous channels.

    Attributes:
        out: contiguous ``[T, D]``, the sum. All other attributes: arguments of `moe_experts`.
    """

    x: Tensor
    experts: Tensor
    weights: Tensor
    w1: ExpertStack
    w3: ExpertStack
    w2: ExpertStack
    limit: float
    weigh_output: bool
    input_format: InputFormat
    add: Tensor | None
    add_ready: torch.cuda.Event | None
    out: Tensor
