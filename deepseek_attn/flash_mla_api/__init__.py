"""FlashMLA's Python interface over this library's kernels: a drop-in where FlashMLA itself does not run.

    from deepseek_attn.flash_mla_api import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Same arguments, shapes, dtypes and conventions: Triton on an NVIDIA GPU of compute capability 8.0 or later, plain torch
elsewhere. It takes the arguments of all flavours of the package ``flash_mla`` (upstream, ``sgl-flash-mla``, vLLM's
fork), and any number of heads, indices per row and entries per page. V4.1's caches, dense decoding over FP8 caches and
batch invariance are refused. Nothing here computes gradients.
"""

from __future__ import annotations

from deepseek_attn.flash_mla_api.decode import flash_mla_with_kvcache
from deepseek_attn.flash_mla_api.prefill import flash_mla_sparse_fwd
from deepseek_attn.flash_mla_api.schedule import FlashMLASchedMeta, get_mla_metadata

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]
