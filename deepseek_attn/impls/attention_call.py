"""The call of an attention layer in a step, as passed to `StepOptions.observer`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """Queries, keys and output of one call of a layer.

    The tensors are the step's own: read them before the observer returns.

    Attributes:
        layer: its name, for instance ``layers.2``; the layer holds the step's metadata and its selection.
        q, kv: arguments of `SparseMLAAttentionImpl.forward_mqa`.
        output: ``[T, heads, value_dim]``, the result of that call.
        index_queries: the indexer's queries ``[T, heads, dim]``, weights ``[T, heads]`` and the dtype that scores are
            rounded to (`kernels.indexer.IndexQueries`); None if it could select every entry.
    """

    layer: str
    q: Tensor
    kv: Tensor
    output: Tensor
    index_queries: tuple[Tensor, Tensor, torch.dtype] | None
