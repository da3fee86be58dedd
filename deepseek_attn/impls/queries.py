"""Queries that a layer passes to its impl, and the attention output passed to the output projection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.kernels.common.raw_queries import RawQueries
from deepseek_attn.kernels.insert import query_norm_rope

AttentionOutput = Tensor | QuantizedRows
"""Heads ``[T, num_heads, value_dim]``; or heads rotated back and quantised, in the layout of `attend_raw_q`."""


@dataclass
class AttentionQueries:
    """Queries of a step's tokens: first projected, later normed and rotated.

    Kernels that fuse norm and RoPE read ``raw``, or ``q`` if it is set. All other kernels read `normed`.

    Attributes:
        raw: the projected queries. `normed` replaces its ``q`` by the result, which frees the projections.
        q: ``[T, padded_heads, head_dim]``, normed and rotated; None until then.
    """

    raw: RawQueries
    q: Tensor | None = None

    def normed(self) -> Tensor:
        """Normed and rotated queries. The first call computes them and frees the projections of the same size."""
        if self.q is None:
            self.q = query_norm_rope(self.raw)
            self.raw = self.raw._replace(q=self.q.flatten(1))
        return self.q
