"""Adapter of FlashInfer: whether its sparse MLA kernel runs here, and the same function on other devices."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.kernels.attention import sparse_attention

TrtllmDecode = Callable[..., Tensor]

FUNCTION = "trtllm_batch_decode_with_kv_cache_mla"
MODULE = "flashinfer.decode"
INSTALL = "pip install flashinfer-python"
HEAD_DIM, ROPE_DIM = 576, 64
DTYPES = (torch.bfloat16, torch.float16)
TOPK_MULTIPLE = 4
"""Index rows are read 16 bytes at a time: ``sparse_mla_top_k`` must be a multiple of 4."""

WORKSPACE_BYTES = 394 << 20
"""Size of the kernel's workspace, as vLLM allocates it. It holds semaphores and must be zeroed once."""


@functools.cache
def _load() -> tuple[TrtllmDecode | None, str]:
    """FlashInfer's function, or None and the reason; imported once, and only on a GPU that can run it."""
    try:
        return getattr(importlib.import_module(MODULE), FUNCTION), ""
    except ModuleNotFoundError as error:
        missing = "not installed" if error.name == "flashinfer" else f"broken ({error})"
        return None, f"the package flashinfer is {missing}: {INSTALL}"
    except AttributeError:
        return None, f"the installed flashinfer has no {FUNCTION}: {INSTALL} --upgrade"
    except Exception as error:  # a shared library that does not load can raise anything
        return None, f"importing flashinfer fails ({type(error).__name__}: {error}); reinstall it: {INSTALL}"


def supported(device: torch.device | str, spec: AttentionSpec | None = None) -> tuple[bool, str]:
    """Whether FlashInfer's sparse MLA kernel runs ``spec`` on ``device``, and the reason."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return False, f"FlashInfer's sparse MLA needs an NVIDIA GPU; the device is {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 10:
        return False, f"FlashInfer's sparse MLA needs compute capability 10.x; this GPU has {major}.{minor}"
    if spec is not None and (spec.head_dim, spec.rope_dim) != (HEAD_DIM, ROPE_DIM):
        return (
            False,
            f"its kernel takes 576 values per key, 64 rotated; this model has {spec.head_dim}, {spec.rope_dim}",
        )
    if spec is not None and spec.dtype not in DTYPES:
        return False, f"its kernel takes bfloat16 or float16 queries, not {spec.dtype}"
    decode, problem = _load()
    return decode is not None, problem or f"flashinfer on compute capability {major}.{minor}"


def pick(device: torch.device, dtype: torch.dtype) -> TrtllmDecode:
    """FlashInfer's function where it runs, else `trtllm_decode`."""
    decode = _load()[0] if supported(device)[0] and dtype in DTYPES else None
    return decode or trtllm_decode


def trtllm_decode(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
) -> Tensor:
    """FlashInfer's ``trtllm_batch_decode_with_kv_cache_mla`` for sparse calls, in Triton or plain torch.

    Args:
        query: ``[T, 1, heads, kv_lora_rank + qk_rope_head_dim]``.
        kv_cache: ``[pages, 1, n, kv_lora_rank + qk_rope_head_dim]``.
        workspace_buffer, qk_nope_head_dim, max_seq_len: not used.
        block_tables: int32 ``[T, 1, sparse_mla_top_k]`` slots (not pages); the first ``seq_lens [T]`` of a row count.
        bmm1_scale: factor of the logits; bmm2_scale: of the output.

    Returns:
        ``[T, 1, heads, kv_lora_rank]``.
    """
    tokens, queries = query.shape[:2]
    if queries != 1 or block_tables.shape != (tokens, 1, sparse_mla_top_k) or seq_lens.shape != (tokens,):
        raise ValueError(
            f"need query [T, 1, heads, dim], block_tables [T, 1, {sparse_mla_top_k}] and seq_lens [T]: got "
            f"{list(query.shape)}, {list(block_tables.shape)}, {list(seq_lens.shape)}"
        )
    rows = kv_cache.reshape(-1, kv_lora_rank + qk_rope_head_dim)
    out, _ = sparse_attention(query.squeeze(1), rows, block_tables.squeeze(1), bmm1_scale, None, seq_lens, kv_lora_rank)
    return (out * bmm2_scale if bmm2_scale != 1.0 else out).unsqueeze(1)


def workspace_buffer(device: torch.device) -> Tensor:
    """The zeroed scratch buffer that all layers on ``device`` share; empty where FlashInfer does not run."""
    return _workspace_buffer(torch.device(device), WORKSPACE_BYTES if supported(device)[0] else 0)


@functools.cache
def _workspace_buffer(device: torch.device, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
