"""The interface of attention impls, and of the layers they attend for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from deepseek_attn.cache.pools import Pool
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.utils.workspace import Workspace


@dataclass(frozen=True)
class AttentionSpec:
    """Shapes, cache record and dtype of a model's attention layers, by which an impl says whether it supports them.

    Attributes:
        num_heads, head_dim: of the queries; rope_dim: rotated channels at the end of each head.
        kv_record: how K = V is stored: ``plain`` rows, ``fp8_v4`` or ``fp8_v32`` records.
        dtype: of queries and output.
    """

    num_heads: int
    head_dim: int
    rope_dim: int = 64
    kv_record: str = "fp8_v4"
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, config: AnyConfig, numerics: Numerics, dtype: torch.dtype, ranks: int = 1) -> AttentionSpec:
        """The spec of every layer of a model whose heads are sharded over ``ranks``."""
        record = "plain"
        if numerics.kv_record == "fp8_ds_mla":  # vLLM's name for both records
            record = "fp8_v4" if isinstance(config, ModelConfig) else "fp8_v32"
        return cls(config.num_attention_heads // ranks, config.head_dim, config.qk_rope_head_dim, record, dtype)


class AttentionLayer(Protocol):
    """Attributes of a layer that impls read. Those that each call sets come last; the others are set once."""

    scale: float
    """Softmax scale."""
    attn_sink: Tensor
    """float32 ``[heads]``: a logit per head that joins the softmax denominator only."""
    head_dim: int
    """Channels of a query head, and of a key, which is also the value."""
    window_size: int
    """Keys in the sliding window, the query's own included."""
    compress_ratio: int
    """Tokens per compressed entry; 0 for a layer that reads the window only."""
    index_topk: int | None
    """Compressed entries that the layer's indexer selects per token; None for a layer without an indexer."""
    swa_cache: Pool
    """Keys of the window, one per token."""
    kv_cache: Pool | None
    """Compressed entries; None for a compress ratio of 0."""
    workspace: Workspace
    """Scratch memory shared by all layers."""
    step: StepMetadata | None
    """Set by each call: metadata of the running step; None while warming up."""
    topk_indices_buffer: Tensor | None
    """Filled by each call of a layer with an indexer: int32 ``[>= T, index_topk]`` selected entries, -1 for none."""
    decode_topk_slots: Tensor | None
    """Set by each call: int32 ``[Dt, index_topk]``, cache slots of the decode tokens' selected entries; None if the
    layer has only written ``topk_indices_buffer``."""

    def workspace_rows(self) -> int:
        """Rows of gathered keys that one request of any length can need."""
        ...


class DeepseekV4SparseMLAAttentionImpl(ABC):
    """Abstract impl of V4 sparse attention. Impls hold no state: all of it is on the layer they are given.

    Attributes:
        name: the name users choose it by.
        PREFILL_CHUNK_SIZE: prefill requests of full length that the workspace holds at once.
    """

    name: ClassVar[str]
    PREFILL_CHUNK_SIZE: ClassVar[int] = 4

    @classmethod
    @abstractmethod
    def supported(cls, device: torch.device, spec: AttentionSpec | None = None) -> tuple[bool, str]:
        """Whether the impl can run on ``device``, for layers like ``spec`` if one is given, and the reason."""

    @classmethod
    def padded_heads(cls, num_heads: int) -> int:
        """Number of query heads after padding."""
        return num_heads

    @classmethod
    @abstractmethod
    def forward_mqa(
        cls, layer: AttentionLayer, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor | None = None
    ) -> Tensor:
        """Attention of ``q`` over the caches of ``layer``, which already hold the step's own keys.

        Args:
            q: ``[T, padded_heads, head_dim]``, rotated; decode tokens before prefill tokens (``layer.step.swa``).
            kv: ``[T, head_dim]`` keys of the same tokens, and positions: int64 ``[T]``. Today's impls read both from
                the caches and metadata; an impl that attends to a step's own keys before they are cached needs them.
            output: like ``q``, to write to; None lets the impl return a kernel's own result without a copy.

        Returns:
            ``output``, or without one a tensor of its shape and dtype with contiguous channels. Rows of padding tokens
            are zero.

        Raises:
            ValueError: ``output`` of another shape or dtype.
        """
