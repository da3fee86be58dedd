"""One step's metadata, shared by all layers, for `FlashMLASparseImpl` and for `FlashInferMLASparseImpl`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class SparseMLAMetadata:
    """One step for any backend: ``B`` requests, ``rows`` token rows with the padding at their end.

    Attributes:
        num_reqs, max_query_len, max_seq_len: of the batch.
        num_actual_tokens: rows that are tokens, without padding.
        query_start_loc: int32 ``[B + 1]``.
        slot_mapping: int64 ``[rows]``, -1 for padding rows.
        block_table: int32 ``[B, pages]``.
        req_id_per_token: int32 ``[rows]``, a view of the builder's buffer: the next step overwrites it. Padding rows
            hold 0.
        block_size: tokens per page; topk_tokens: width of the indexer's rows.
    """

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    req_id_per_token: Tensor
    block_size: int = 64
    topk_tokens: int = 2048


@dataclass
class FlashMLASparseMetadata(SparseMLAMetadata):
    """A step for `FlashMLASparseImpl`.

    Attributes:
        fp8_extra_metadata: None for a BF16 cache; `FP8KernelMetadata` when ``fp8_use_mixed_batch``;
            `FP8SeparatePrefillDecode` otherwise.
    """

    @dataclass
    class FP8KernelMetadata:
        """Arguments of the FP8 kernel besides queries, cache and indices.

        Attributes:
            scheduler_metadata: the kernel's schedule, fresh each step and shared by the layers.
            dummy_block_table: int32 ``[n, 1]``; cache_lens: int32 ``[n]``, all ``max_model_len``. The kernel does not
                read them in sparse mode.
        """

        scheduler_metadata: Any
        dummy_block_table: Tensor
        cache_lens: Tensor

    @dataclass
    class FP8SeparatePrefillDecode:
        """Decodes on the FP8 kernel, prefills gathered to BF16. Tokens exclude padding."""

        @dataclass
        class Decode:
            """The first ``num_decode_tokens`` rows; all decodes have ``decode_query_len`` new tokens."""

            kernel_metadata: FlashMLASparseMetadata.FP8KernelMetadata
            decode_query_len: int

        @dataclass
        class Prefill:
            """``R`` prefill requests.

            Attributes:
                seq_lens: int32 ``[R]``, context and new tokens.
                request_ids: int32 ``[rows]``, 0 .. R - 1 for prefill tokens, -1 for all other rows.
                workspace_starts: int32 ``[R]``, first workspace row of a request, counted from its chunk's start.
            """

            @dataclass
            class Chunk:
                """Requests that are in the workspace at the same time.

                Attributes:
                    seq_lens, block_table, workspace_starts: the chunk's part of the batch's tensors (views).
                    tokens_slice: rows of the batch that belong to the chunk.
                    req_start_idx: first request, counted among the prefills.
                    chunk_tot_seqlen: workspace rows used.
                """

                seq_lens: Tensor
                tokens_slice: slice
                block_table: Tensor
                req_start_idx: int
                workspace_starts: Tensor
                chunk_tot_seqlen: int

            seq_lens: Tensor
            request_ids: Tensor
            workspace_starts: Tensor
            chunks: list[FlashMLASparseMetadata.FP8SeparatePrefillDecode.Prefill.Chunk]

        num_prefills: int = 0
        num_decodes: int = 0
        num_prefill_tokens: int = 0
        num_decode_tokens: int = 0
        decode: FlashMLASparseMetadata.FP8SeparatePrefillDecode.Decode | None = None
        prefill: FlashMLASparseMetadata.FP8SeparatePrefillDecode.Prefill | None = None

    fp8_extra_metadata: FP8SeparatePrefillDecode | FP8KernelMetadata | None = None
    fp8_use_mixed_batch: bool = False


@dataclass
class FlashInferMLASparseMetadata(SparseMLAMetadata):
    """A step for `FlashInferMLASparseImpl`: every token row is one query.

    Attributes:
        seq_lens: int32 ``[B]``, context and new tokens.
    """

    seq_lens: Tensor = field(kw_only=True)
