"""Everything that the projected query latent becomes: the layer's queries and those of its indexer."""

from __future__ import annotations

from torch import Tensor

from deepseek_attn.kernels.reference.index_query import index_query
from deepseek_attn.kernels.reference.query_norm_rope import query_norm_rope


def queries(heads: tuple, index: tuple) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Both ops in one call, for the same tokens.

    Args:
        heads: arguments of `query_norm_rope`; index: those of `index_query`.

    Returns:
        The result of each.

    Raises:
        ValueError: different numbers of tokens, or what either op refuses.
    """
    out, index_outs = query_norm_rope(*heads), index_query(*index)
    if len(out) != len(index_outs[0]):
        raise ValueError(f"queries of {len(out)} tokens, and of {len(index_outs[0])} for the indexer: must be the same")
    return out, index_outs
