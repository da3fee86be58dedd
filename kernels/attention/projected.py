"""Arguments of kernels that read heads as they were projected, and write them as the output projection reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Projected(NamedTuple):
    """Runtime arguments.

    Attributes:
        positions: ``[T]``; cos_sin: ``[max_positions, rope channels]``; eps: of the norm of queries.
        fp8: the output, heads of a group after one another: from one group to the next ``group_stride`` elements, from
            one token to the next ``row_stride``; group_heads: heads of a group.
        fp8_scale: its scales, a row of ``fp8_scale_stride`` elements for each 128 channels of each head.
    """

    positions: Tensor
    cos_sin: Tensor
    max_positions: int
    eps: float
    fp8: Tensor
    group_stride: int
    row_stride: int
    group_heads: int
    fp8_scale: Tensor
    fp8_scale_stride: int


@dataclass(frozen=True)
class ProjectedShape:
    """Constants.

    Attributes:
        DTYPE: of the heads; ROPE: rotated channels; ROTATED: queries are normed and rotated already; NORM: else norm
            them before they are rotated; POW2: kind of scales; NATIVE_FP8: the GPU converts to FP8.
    """

    DTYPE: Any
    ROPE: int
    ROTATED: bool
    NORM: bool
    POW2: bool
    NATIVE_FP8: bool


class ProjectedLaunch(NamedTuple):
    """Both, for a launch."""

    arguments: Projected
    shape: ProjectedShape
