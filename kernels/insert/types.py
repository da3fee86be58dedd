"""Arguments and results of this family's ops: rows of a step's tokens, their queries, compressors of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.cache.record import Record
from deepseek_attn.kernels.common.quant import QuantizedRows


class CacheRows(NamedTuple):
    """Where a step's rows are stored in a paged cache.

    Attributes:
        record: byte layout of an entry.
        pool: uint8 ``[pages, page bytes]``.
        page_entries: entries per page.
        slots: int64 ``[T]``, ``page * page_entries + offset`` of each row; -1 for padding, which is not stored.
    """

    record: Record
    pool: Tensor
    page_entries: int
    slots: Tensor


class TokenRows(NamedTuple):
    """Query latent and key of a step's tokens, as projected.

    Attributes:
        qr: ``[T, q_lora]``; kv: ``[T, d]``, in V3.2 ``[T, kv_lora_rank + rope_dim]``, the latent, then the rotary key;
            float32, bfloat16 or float16 with contiguous rows, which may be columns of one product; ``d`` even.
        q_weight, kv_weight: float32 norm weights ``[q_lora]`` and ``[d]`` or ``[kv_lora_rank]``; eps: of both norms.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines; positions: int64 ``[T]``.
        cache: where rows of ``kv`` are stored; in V3.2 records ``plain`` or ``fp8_v32``.
        qr_fp8: buffers for the normed latent quantised to FP8, ``q_lora`` a multiple of 128; None if nothing reads it.
    """

    qr: Tensor
    kv: Tensor
    q_weight: Tensor
    kv_weight: Tensor
    eps: float
    cos_sin: Tensor
    positions: Tensor
    cache: CacheRows
    qr_fp8: QuantizedRows | None = None


class LatentAndKey(NamedTuple):
    """Results of `insert_tokens`: the normed query latent ``[T, q_lora]`` and the normed, rotated key ``[T, d]``."""

    qr: Tensor
    kv: Tensor


class IndexKeyRows(NamedTuple):
    """Index keys of a step's tokens, as projected: one per token (V3.2).

    Attributes:
        k: ``[T, index_head_dim]`` float32, bfloat16 or float16 with contiguous rows.
        weight, bias: float32 ``[index_head_dim]`` of the layer norm; eps: its epsilon.
        hadamard: multiply the rotated key by a Hadamard matrix; ``index_head_dim`` is then a power of two.
        cache: where the keys are stored; records ``plain``, ``index_fp8`` or ``index_fp4``.
    """

    k: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    hadamard: bool
    cache: CacheRows


@dataclass(frozen=True)
class CompressPart:
    """One compressor of a layer: its projections of the step's tokens, and the pools it writes.

    Attributes:
        kv, score: float32 ``[T, coff * d]``, values and gate scores, the scores without ``ape``; ``coff`` is 2 with
            overlap, else 1.
        ape: float32 ``[ratio, coff * d]``, added to the scores by position within the window.
        state: float32 ``[pages, rows, 2 * coff * d]``, a ring of (value, score with ``ape``) rows per request.
        norm_weight: float32 ``[d]``; eps: of the entry's norm.
        cos_sin: float32 ``[max_positions, rope_dim]``, cosines then sines.
        record, pool, page_entries: byte layout of an entry, uint8 ``[pages, page bytes]``, entries per page.
        dtype: to which an entry is rounded after pooling, after the norm and after the rotation.
        hadamard: multiply the entry by a Hadamard matrix before it is stored.
    """

    kv: Tensor
    score: Tensor
    ape: Tensor
    state: Tensor
    norm_weight: Tensor
    eps: float
    cos_sin: Tensor
    record: Record
    pool: Tensor
    page_entries: int
    dtype: torch.dtype
    hadamard: bool = False

    @property
    def dim(self) -> int:
        return self.norm_weight.shape[0]


@dataclass(eq=False)
class CompressBatch:
    """A step's tokens as the compressors of one (ratio, overlap) see them. All tensors are on the device.

    Attributes:
        ratio: tokens per window; overlap: an entry also pools the previous window.
        rows: rows of a request's ring, at least the ``coff * ratio`` tokens that an entry pools.
        positions: int64 ``[T]``; token_to_req: int32 ``[T]``. Tokens of a request are consecutive.
        query_start_loc: int32 ``[B + 1]`` first token of each request; padding rows count as tokens.
        prefix_lens: int32 ``[B]`` length of each request before the step.
        ring_pages: int32 ``[B]`` page of each request's ring in the state pools.
        slots: int64 ``[T]`` compressed slot of the entry that a token completes, -1 for none.
        valid: bool ``[T]``; padding rows complete no window and are not stored.
        max_query_len: largest number of new tokens of a request, on the host.
    """

    ratio: int
    overlap: bool
    rows: int
    positions: Tensor
    token_to_req: Tensor
    query_start_loc: Tensor
    prefix_lens: Tensor
    ring_pages: Tensor
    slots: Tensor
    valid: Tensor
    max_query_len: int

    @cached_property
    def window_starts(self) -> Tensor:
        """Position of the first token of each token's window, int64 ``[T]``."""
        return self.positions // self.ratio * self.ratio

    @cached_property
    def latent_rows(self) -> Tensor:
        """Row of each token that completes an entry, -1 for others, int64 ``[T]``."""
        rows = torch.arange(len(self.slots), device=self.slots.device)
        return torch.where(self.slots >= 0, rows, -1)

    @property
    def pooled_tokens(self) -> int:
        """Tokens that an entry pools."""
        return (2 if self.overlap else 1) * self.ratio
