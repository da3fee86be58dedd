"""Inputs and outputs of sublayers between hyper-connections."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HyperConnection(NamedTuple):
    """Parameters of the hyper-connection around a sublayer, or of the one at the end of a model (`hc_head`).

    Attributes:
        fn, base, scale: contiguous float32 ``[(2 + m) m, m D]``, ``[(2 + m) m]`` and ``[3]`` (checkpoint:
            ``hc_attn_*``, ``hc_ffn_*``; rows: m pre, m post, m x m comb); at the end ``[m, m D]``, ``[m]`` and ``[1]``
            (``hc_head_*``).
        rms_eps: of the norms.
        hc_eps: added to gates and to the sums that Sinkhorn's rounds divide by.
        iterations: Sinkhorn rounds; none at the end of a model.
        norm: float32 ``[D]``, weight of the RMSNorm that follows; None leaves the collapsed streams unnormed.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    rms_eps: float
    hc_eps: float
    iterations: int
    norm: Tensor | None = None


class SublayerInput(NamedTuple):
    """Input of a sublayer: the residual streams, the collapsed stream, and the weights for `hc_post`.

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


class DelayedInput(NamedTuple):
    """`SublayerInput` of V4.1, whose x is collapsed with weights of the previous sublayer.

    Attributes:
        pre: float32 ``[T, m]``, weights for the next sublayer.
    """

    streams: Tensor
    x: Tensor
    post: Tensor
    comb: Tensor
    pre: Tensor

    def output(self, y: Tensor) -> DelayedOutput:
        """With the sublayer's output ``y [T, D]``."""
        return DelayedOutput(SublayerOutput(y, self.streams, self.post, self.comb), self.pre)


class DelayedOutput(NamedTuple):
    """Arguments of the next sublayer's `hc_delayed`.

    Attributes:
        streams: a sublayer's output with the streams that it does not update yet; or streams ``[T, m, D]``.
        pre: float32 ``[T, m]``, weights that collapse the streams.
    """

    streams: Tensor | SublayerOutput
    pre: Tensor
