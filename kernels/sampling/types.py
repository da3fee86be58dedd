"""Results of the sampling ops."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AcceptedDrafts(NamedTuple):
    """The newest token of each request; int64 ``[B]`` each.

    Attributes:
        last_rows: the row after which the token was chosen.
        next_ids: the token; 0 replaces `INVALID_TOKEN`.
        next_starts: the token's position.
    """

    last_rows: Tensor
    next_ids: Tensor
    next_starts: Tensor
