"""What goes into a sublayer between hyper-connections, and what comes out of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SublayerInput(NamedTuple):
    """The residual streams before a sublayer, and what collapsing them gives.

    Attributes:
        streams: ``[T, m, D]``.
        x: ``[T, D]``, the sublayer's input.
        post, comb: float32 ``[T, m]`` and ``[T, m, m]``: how `hc_post` mixes the sublayer's output back in.
    """

    streams: Tensor
    x: Tensor
    post: Tensor
    comb: Tensor

    def output(self, y: Tensor) -> SublayerOutput:
        """With the sublayer's output ``y [T, D]``."""
        return SublayerOutput(y, self.streams, self.post, self.comb)


class SublayerOutput(NamedTuple):
    """A sublayer's output, and streams that it does not update yet: the arguments of `hc_post`."""

    y: Tensor
    streams: Tensor
    post: Tensor
    comb: Tensor
