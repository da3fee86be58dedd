"""Interfaces of attention: backends, their impls, and the layers that call the impls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from deepseek_attn.cache.pools import Pool
from deepseek_attn.cache.record import OWN_RECORDS, RECORD_KINDS
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.impls.queries import AttentionOutput, AttentionQueries
from deepseek_attn.kernels.common.quant import QuantizedRows
from deepseek_attn.utils.workspace import Workspace


@dataclass(frozen=True)
class AttentionSpec:
    """Shapes, cache record and dtype of a model's attention layers: the input of `supported`.

    Attributes:
        num_heads, head_dim: of the queries; rope_dim: rotated channels at the end of each head.
        kv_record: how K = V is stored: ``plain`` rows, ``fp8_v4`` or ``fp8_v32`` records, or V4.1's ``fp8_fp4`` pair.
        dtype: of queries and output.
        qk_nope_head_dim: channels of a head before absorption (V3.2); None for V4, whose queries are not absorbed.
        sparse: an indexer selects the entries, or a window bounds them; False for V3, which reads all tokens.
    """

    num_heads: int
    head_dim: int
    rope_dim: int = 64
    kv_record: str = "fp8_v4"
    dtype: torch.dtype = torch.bfloat16
    qk_nope_head_dim: int | None = None
    sparse: bool = True

    @classmethod
    def of(cls, config: AnyConfig, numerics: Numerics, dtype: torch.dtype, ranks: int = 1) -> AttentionSpec:
        """The spec of every layer of a model whose heads are sharded over ``ranks``."""
        v4 = isinstance(config, DeepseekV4Base)
        record = numerics.kv_record
        if record == "fp8_ds_mla":  # vLLM's name for both records
            record = "fp8_v4" if v4 else "fp8_v32"
        elif own := OWN_RECORDS.find(record):
            record = own.name
        return cls(
            num_heads=config.num_attention_heads // ranks,
            head_dim=config.head_dim,
            rope_dim=config.qk_rope_head_dim,
            kv_record=record,
            dtype=dtype,
            qk_nope_head_dim=None if v4 else config.qk_nope_head_dim,
            sparse=v4 or config.has_indexer,
        )

    @property
    def value_dim(self) -> int:
        """Leading channels of a key that are its value: all of them, or without the rotated ones (V3.2)."""
        return self.head_dim if self.qk_nope_head_dim is None else self.head_dim - self.rope_dim


class AttentionLayer(Protocol):
    """Attributes of a layer that impls read. The last ones are set in each call, all others once.

    DeepSeek-V4's layers have a window and, with a compress ratio, compressed entries. DeepSeek-V3.2's have one entry
    per token (``compress_ratio`` 1), no window and no sinks.
    """

    scale: float
    """Softmax scale."""
    rounds_weights: bool
    """Whether plain torch rounds softmax weights to the dtype of the queries, as kernels on tensor cores do."""

    @property
    def attn_sink(self) -> Tensor | None:
        """float32 ``[heads]``: a logit per head that joins the softmax denominator only; None without sinks."""
        ...

    head_dim: int
    """Channels of a query head, and of a key."""
    value_dim: int
    """Leading channels of a key that are its value: ``head_dim`` in V4, 512 of 576 in V3.2."""
    o_groups: int
    """Groups of the output projection; of V4's layers."""
    takes_quantized_heads: bool
    """Whether the output projection takes the result of `kernels.attention.attend_raw_q`; of V4's layers."""
    window_size: int
    """Keys in the sliding window, the query's own included; 0 without a window."""
    compress_ratio: int
    """Tokens per entry of ``kv_cache``; 0 for a layer that reads the window only."""
    index_topk: int | None
    """Entries that the layer's indexer selects per token; None for a layer without an indexer."""

    @property
    def swa_cache(self) -> Pool | None:
        """Keys of the window, one per token; None without a window."""
        ...

    @property
    def kv_cache(self) -> Pool | None:
        """Entries; None for a compress ratio of 0."""
        ...

    workspace: Workspace
    """Scratch memory shared by all layers."""
    prefill_workspace_rows: int
    """Rows of gathered keys that the workspace holds; 0 if prefill reads cache pages in place."""
    step: StepMetadata | None
    """Set by each call: metadata of the running step; None while warming up."""
    topk_indices_buffer: Tensor | None
    """Filled by each call of a layer with an indexer: int32 ``[>= T, index_topk]`` selected entries, -1 for none."""
    decode_topk_slots: Tensor | None
    """Set by each call: int32 ``[Dt, index_topk]``, cache slots of the decode tokens' selected entries; None if the
    layer has only written ``topk_indices_buffer``."""


def selected_entries(layer: AttentionLayer, first: int, last: int) -> Tensor:
    """Rows ``[first, last)`` of the layer's ``topk_indices_buffer``.

    Raises:
        RuntimeError: the layer has no buffer: its caches are not bound.
    """
    if layer.topk_indices_buffer is None:
        raise RuntimeError("a layer with an indexer has no buffer for selected entries: call its bind_caches first")
    return layer.topk_indices_buffer[first:last]


class SparseMLABackend(ABC):
    """Declares the support common to all impls of a backend. It is checked before an impl is selected.

    Attributes:
        supported_dtypes: of queries; supported_kv_records: records of entries.
    """

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)
    supported_kv_records: ClassVar[tuple[str, ...]]

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The backend's name."""

    @classmethod
    def problem(cls, spec: AttentionSpec) -> str:
        """The reason why no impl of the backend supports layers like ``spec``; empty if an impl may."""
        if spec.kv_record not in cls.supported_kv_records:
            records = " and ".join(cls.supported_kv_records)
            return f"it reads {records} records, and the KV record here is {spec.kv_record!r}"
        if spec.dtype not in cls.supported_dtypes:
            return f"it takes queries of {', '.join(map(str, cls.supported_dtypes))}, not {spec.dtype}"
        return ""


class DeepseekV4SparseMLABackend(SparseMLABackend):
    """DeepSeek-V4: a window and compressed entries under one softmax, with sinks."""

    supported_kv_records = ("plain", "fp8_v4")

    @staticmethod
    def get_name() -> str:
        return "DEEPSEEK_V4_SPARSE_MLA"

    @classmethod
    def problem(cls, spec: AttentionSpec) -> str:
        if spec.qk_nope_head_dim is not None:
            return "it is for DeepSeek-V4, and this model's queries are absorbed (DeepSeek-V3)"
        return super().problem(spec)


class DeepseekV41SparseMLABackend(DeepseekV4SparseMLABackend):
    """DeepSeek-V4.1: the same, and its official records."""

    supported_kv_records = ("plain", "fp8_v4", "fp8_fp4")

    @staticmethod
    def get_name() -> str:
        return "DEEPSEEK_V41_SPARSE_MLA"


class SparseMLAAttentionImpl(ABC):
    """Abstract impl of sparse attention. Impls hold no state: all state is on the layer passed to them.

    Attributes:
        name: the name that users select it by.
        backend_cls: its backend, which declares the support of all its impls.
        PREFILL_CHUNK_SIZE: number of full-length prefill requests that the workspace holds by default.
        batch_dependence: why a query's result depends on other requests of the batch. Empty if it does not, provided
            that ops are batch-invariant (`kernels.common.invariance`) and all queries read pages.
        needs_masked_tails: the impl requires -1 in the columns past the length of an index row. Other impls read the
            length, and tests fill these columns with slots that hold NaN.
        reads_own_records: the impl reads records from outside the package (`cache.record.register_record`), even if its
            backend does not list them.
        waits_for_device: decode steps cannot be captured as CUDA graphs.
    """

    name: ClassVar[str]
    backend_cls: ClassVar[type[SparseMLABackend]]
    PREFILL_CHUNK_SIZE: ClassVar[int] = 4
    batch_dependence: ClassVar[str] = "it does not say that its results are independent of the batch"
    needs_masked_tails: ClassVar[bool] = False
    reads_own_records: ClassVar[bool] = False
    waits_for_device: ClassVar[bool] = False

    @classmethod
    def supported(cls, device: torch.device, spec: AttentionSpec | None = None) -> tuple[bool, str]:
        """Whether the impl runs on ``device``, for layers like ``spec`` if it is given; and the reason if not."""
        known = spec
        if spec is not None and cls.reads_own_records and spec.kv_record not in RECORD_KINDS:
            known = replace(spec, kv_record="plain")
        problem = cls.backend_cls.problem(known) if known is not None else ""
        return (False, problem) if problem else cls.kernels_supported(torch.device(device), spec)

    @classmethod
    @abstractmethod
    def kernels_supported(cls, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        """`supported` for the impl's kernels alone, for a spec that the backend supports."""

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
            q: ``[T, padded_heads, head_dim]``, rotated; decode tokens before prefill tokens (``layer.step``).
            kv: ``[T, head_dim]`` keys of the same tokens, and positions: int64 ``[T]``. Today's impls read both from
                the caches and metadata; an impl that attends to a step's own keys before they are cached needs them.
            output: ``[T, padded_heads, value_dim]`` in the dtype of ``q``, to write to; None lets the impl return a
                kernel's own result without a copy.

        Returns:
            ``output``, or without one a tensor of its shape and dtype with contiguous channels. Rows of padding tokens
            are zero.

        Raises:
            ValueError: ``output`` of another shape or dtype.
        """

    @classmethod
    def attend(cls, layer: AttentionLayer, queries: AttentionQueries, kv: Tensor, positions: Tensor) -> AttentionOutput:
        """Attention of V4's layers, from projected queries to the input of the output projection.

        Args:
            queries: of the step's tokens. Their projections are freed before attention allocates memory.
            kv, positions: as in `forward_mqa`.
        """
        if cls.fuses_query_norm_rope(layer):
            return cls.attend_raw(layer, queries)
        return cls.forward_mqa(layer, queries.normed(), kv, positions)[:, : queries.raw.num_heads]

    @classmethod
    def fuses_query_norm_rope(cls, layer: AttentionLayer) -> bool:
        """Whether `attend` calls `attend_raw` in the current step of ``layer``; False without such kernels."""
        return False

    @classmethod
    def attend_raw(cls, layer: AttentionLayer, queries: AttentionQueries) -> QuantizedRows:
        """`attend` with fused kernels: norm and RoPE of the queries, inverse RoPE and quantisation of the output."""
        raise NotImplementedError(f"{cls.__name__} attends to normed and rotated queries only")
