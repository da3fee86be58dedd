"""Arguments of the Engram ops."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

SCALE_GROUP = 32  # columns of a row that share a scale


class TableRows(NamedTuple):
    """Rows of an Engram table as a checkpoint stores them.

    Attributes:
        values: float8_e4m3fn ``[..., columns]``.
        scales: e8m0 bytes, uint8 ``[..., columns / 32]``.
    """

    values: Tensor
    scales: Tensor
