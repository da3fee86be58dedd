"""Limits of a run, shape of the cache, and requirements on the kernels of a sparse MLA backend."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepseek_attn.cache.records_v32 import KV_CACHE_DTYPES
from deepseek_attn.impls.base import AttentionSpec

MIN_HEADS_FOR_BF16_PREFILL = 32
"""With fewer heads per rank, FP8 batches stay mixed: the BF16 prefill kernel would compute mostly padding heads."""

FP8_MODES = ("auto", "mixed", "separate")
WORKSPACE_REQUESTS = 5
"""Requests of full length that the default prefill workspace holds."""


class AttentionCGSupport(enum.Enum):
    """Which batches a metadata builder supports under CUDA graphs."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class DeviceCapability(NamedTuple):
    """CUDA compute capability."""

    major: int
    minor: int = 0


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of one layer's cache.

    Attributes:
        block_size: tokens per page.
        head_size: latent + rope values per token; rope_dim: the latter.
    """

    block_size: int = 64
    head_size: int = 576
    rope_dim: int = 64
    num_kv_heads: int = 1


@dataclass(frozen=True)
class SparseMLAConfig:
    """Limits and choices of a run.

    Attributes:
        num_heads: attention heads of this rank.
        topk_tokens: ``index_topk``, the width of the indexer's rows.
        max_model_len: most tokens of a request.
        max_num_seqs, max_num_batched_tokens: most requests and most token rows of a step, padding included.
        kv_cache_dtype: ``"auto"``, ``"bfloat16"`` or ``"fp8_ds_mla"``.
        num_speculative_tokens: draft tokens verified per step; a decode has up to one more new token than that.
        fp8_mode: ``"mixed"`` (the FP8 kernel for every token), ``"separate"`` (decodes on the FP8 kernel, prefills
            gathered to BF16) or ``"auto"``: mixed below `MIN_HEADS_FOR_BF16_PREFILL` heads.
        prefill_workspace_rows: rows of gathered keys; None for `get_prefill_workspace_size`, bounded by what
            ``max_num_seqs`` requests can hold.
        kernels: ``"auto"`` or a name that `kernels.describe_kernels` lists.
        dtype: of the queries.
    """

    num_heads: int
    topk_tokens: int = 2048
    max_model_len: int = 163840
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_cache_dtype: str = "auto"
    num_speculative_tokens: int = 0
    fp8_mode: str = "auto"
    prefill_workspace_rows: int | None = None
    kernels: str = "auto"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self):
        problems = [
            f"{name} must be at least {least}, got {getattr(self, name)}"
            for name, least in _LEAST.items()
            if getattr(self, name) < least
        ]
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            problems.append(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}")
        if self.fp8_mode not in FP8_MODES:
            problems.append(f"fp8_mode must be one of {', '.join(FP8_MODES)}, got {self.fp8_mode!r}")
        if self.prefill_workspace_rows is not None and self.prefill_workspace_rows < self.max_model_len:
            problems.append(
                f"prefill_workspace_rows must hold one request of max_model_len {self.max_model_len} tokens, "
                f"got {self.prefill_workspace_rows}"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def use_fp8_kv_cache(self) -> bool:
        return self.kv_cache_dtype == "fp8_ds_mla"

    @property
    def fp8_use_mixed_batch(self) -> bool:
        """Whether an FP8 batch is one call of the decode kernel."""
        if self.fp8_mode == "auto":
            return self.num_heads < MIN_HEADS_FOR_BF16_PREFILL
        return self.fp8_mode == "mixed"

    @property
    def reorder_batch_threshold(self) -> int:
        """Requests of up to this many new tokens are decodes and must come first."""
        return 1 + self.num_speculative_tokens

    @property
    def workspace_rows(self) -> int:
        """Rows of the BF16 prefill workspace."""
        if self.prefill_workspace_rows is not None:
            return self.prefill_workspace_rows
        return min(get_prefill_workspace_size(self.max_model_len), self.max_num_seqs * self.max_model_len)

    def attention_spec(self, head_size: int, rope_dim: int) -> AttentionSpec:
        """Shapes and dtypes that the kernels must support."""
        record = "fp8_v32" if self.use_fp8_kv_cache else "plain"
        return AttentionSpec(self.num_heads, head_size, rope_dim, record, self.dtype)


_LEAST = {
    "num_heads": 1,
    "topk_tokens": 1,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "num_speculative_tokens": 0,
}


def get_prefill_workspace_size(max_model_len: int) -> int:
    """Rows of the prefill workspace: five requests of full length (944 MB at 163840 tokens and 576 bf16 values)."""
    return WORKSPACE_REQUESTS * max_model_len
