"""Results of the norms."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class NormedSum(NamedTuple):
    """Norm of a sum, and the sum."""

    normed: Tensor
    total: Tensor
