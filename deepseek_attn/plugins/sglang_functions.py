"""SGLang's FlashMLA functions over `flash_mla_api`, for the functions with conventions of SGLang's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepseek_attn import flash_mla_api
from deepseek_attn.flash_mla_api import FlashMLASchedMeta, flash_mla_with_kvcache

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


def get_mla_metadata(
    cache_seqlens: Tensor | None = None, *args: object, **kwargs: object
) -> tuple[FlashMLASchedMeta | Tensor, Tensor | None]:
    """An empty schedule and None or, for ``cache_seqlens [b]``, two int32 tensors ``[1, 8]`` and ``[b + 1]`` of zeros.

    SGLang slices and copies those two between its CUDA graphs; `flash_mla_with_kvcache` takes them and reads neither.
    """
    if cache_seqlens is None:
        return flash_mla_api.get_mla_metadata()
    schedule = cache_seqlens.new_zeros(1, 8, dtype=torch.int32)
    return schedule, cache_seqlens.new_zeros(len(cache_seqlens) + 1, dtype=torch.int32)


def flash_mla_sparse_fwd(
    *args: Any, use_legacy: bool = True, **kwargs: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`flash_mla_api.flash_mla_sparse_fwd`, with ``max_logits`` and ``lse`` to base 2 unless ``use_legacy=False``."""
    return flash_mla_api.flash_mla_sparse_fwd(*args, return_log2_lse=True if use_legacy else None, **kwargs)
