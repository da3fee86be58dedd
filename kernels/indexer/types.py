"""Arguments and results of the indexer's ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.cache.record import Record

KEY_FORMATS = {"plain": "plain", "index_fp8": "fp8", "index_fp4": "fp4"}  # by name of the record
TRITON_HEAD_DIM = 128
"""Channels of the heads that the Triton kernel of `index_query` takes."""
SCORE_BYTES = 64 << 20
"""Most bytes of float32 scores that `index_select` holds at a time."""
MAX_TRITON_TOPK = 4096
"""Most columns that the Triton kernel of `topk_indices` selects."""

HOPPER_HEADS, HOPPER_KEYS = 64, 64
"""Heads of the queries, and keys of a tile, of the kernels of scores in Gluon."""
HOPPER_TOKENS = 8
"""Tokens of a program of `index_scores_hopper_kernel`."""


class IndexQueryRows(NamedTuple):
    """Projected queries of the indexer, before RoPE and quantisation.

    Attributes:
        q: ``[T, heads * dim]``, the projected queries; weights: ``[T, heads]``, the projected head weights.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: ``[T]``.
        scale: factor of the head weights.
        key_format: how the keys are stored, and therefore the queries quantised: ``"plain"`` (not at all), ``"fp8"``
            (e4m3 with one power-of-two scale per head) or ``"fp4"`` (e2m1 with a scale per 32 channels).
        hadamard: multiply each head by a Hadamard matrix before it is quantised.
        half_split: RoPE rotates the pairs ``(i, i + rope_dim / 2)`` of the first channels, as in DeepSeek-V3.2;
            otherwise ``(2 i, 2 i + 1)`` of the last ones.
        score_dtype: as in `IndexQueries`.
    """

    q: Tensor
    weights: Tensor
    cos_sin: Tensor
    positions: Tensor
    scale: float
    key_format: str
    hadamard: bool = False
    half_split: bool = False
    score_dtype: torch.dtype = torch.float32


class IndexQueries(NamedTuple):
    """Queries as they are scored.

    Attributes:
        q: ``[T, heads, dim]``, float8_e4m3fn for FP8 and FP4 keys, else the dtype of the projection. For FP4 keys the
            even channels come first, then the odd channels: a byte of an FP4 key holds an even and an odd channel.
        weights: float32 ``[T, heads]``, every scale of ``q`` included.
        score_dtype: products of queries and keys, products with the weights and their sums are each rounded to it.
    """

    q: Tensor
    weights: Tensor
    score_dtype: torch.dtype = torch.float32

    def of(self, tokens: slice | list[int]) -> IndexQueries:
        """The queries of some tokens."""
        return self._replace(q=self.q[tokens], weights=self.weights[tokens])


class CandidateBlocks(NamedTuple):
    """Blocks of entries that one indexer keeps for each query; other indexers select only from these blocks (V4.1).

    Attributes:
        size: entries per block.
        kept: int32 ``[T, n]`` blocks of each query in ascending order, then -1.
        fill: True: write ``kept``, the block of the newest visible entry and the ``n - 1`` blocks with the highest
            scores; the selection itself is not limited. False: entries outside ``kept`` are not selected.
    """

    size: int
    kept: Tensor
    fill: bool


class PagedIndexKeys(NamedTuple):
    """Keys of the indexer in the pages of a pool.

    Attributes:
        record: the byte layout of an entry, ``index_fp8``, ``index_fp4`` or ``plain``.
        pool: uint8 ``[pages, bytes]``; entries: per page.
        block_table: int32 ``[B, P]``, the pages of each request.
        token_to_req: ``[T]``, the request (row of the block table) of each query.
    """

    record: Record
    pool: Tensor
    entries: int
    block_table: Tensor
    token_to_req: Tensor
