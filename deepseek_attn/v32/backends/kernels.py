"""Sparse MLA kernels under one interface: FlashMLA's where they run, Triton on other GPUs, plain torch elsewhere.

All read the same caches and indices and return the same tensors, so an impl does not depend on which it calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepseek_attn.cache.records_v32 import pool_view, record_of
from deepseek_attn.impls import flash_mla
from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.kernels.attention import PagedKeys, reference, sparse_attention, sparse_attention_paged
from deepseek_attn.kernels.common.dispatch import problem_on


@dataclass
class FlashMLASchedMeta:
    """The schedule of kernels that need none, always empty. FlashMLA has its class with these fields."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


class SparseMLAKernels(Protocol):
    """The kernels of sparse MLA, with FlashMLA's names and contracts."""

    name: str
    pads_heads: bool
    """Whether queries must have 64 or 128 heads."""

    def supported(self, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        """Whether the kernels run ``spec`` on ``device``, and the reason."""
        ...

    def get_mla_metadata(self, *args, **kwargs) -> tuple[Any, None]:
        """An empty schedule, filled by the first `flash_mla_with_kvcache` call that is given it."""
        ...

    def flash_mla_with_kvcache(
        self, q: Tensor, k_cache: Tensor, indices: Tensor, head_dim_v: int, softmax_scale: float, kernel_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention over slots of an FP8 cache.

        Args:
            q: ``[b, s_q, heads, head_dim]``.
            k_cache: uint8 ``[pages, n, 1, entry bytes]``.
            indices: int32 ``[b, s_q, K]`` slots, -1 for none.
            kernel_metadata: `FlashMLASparseMetadata.FP8KernelMetadata`.

        Returns:
            ``(out [b, s_q, heads, head_dim_v], lse float32 [b, heads, s_q])``; a query without keys gets 0 and +inf.
        """
        ...

    def flash_mla_sparse_fwd(
        self, q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int
    ) -> tuple[Tensor, Tensor]:
        """Attention over rows of a contiguous tensor.

        Args:
            q: ``[T, heads, head_dim]``.
            kv: ``[N, 1, head_dim]``.
            indices: int32 ``[T, 1, K]`` rows of ``kv``, -1 for none.

        Returns:
            ``(out [T, heads, d_v], lse float32 [T, heads])``; a query without keys gets 0 and +inf.
        """
        ...


class ReferenceKernels:
    """Plain torch, any device, any head count and head size."""

    name = "reference"
    pads_heads = False

    def supported(self, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        return True, "plain torch, any device"

    def get_mla_metadata(self, *args, **kwargs) -> tuple[FlashMLASchedMeta, None]:
        return FlashMLASchedMeta(), None

    def flash_mla_with_kvcache(self, q, k_cache, indices, head_dim_v, softmax_scale, kernel_metadata=None):
        b, s_q, heads, head_dim = q.shape
        cache = k_cache.squeeze(2)
        record = record_of(cache, head_dim_v, head_dim - head_dim_v)
        slots = indices.flatten(0, 1)
        keys = PagedKeys(record, pool_view(cache), cache.shape[1], slots, _used_columns(slots))
        out, lse = reference.sparse_attention_paged(q.flatten(0, 1), [keys], softmax_scale, d_v=head_dim_v)
        return out.unflatten(0, (b, s_q)), lse.view(b, s_q, heads).transpose(1, 2)

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v):
        rows = indices.squeeze(1)
        return reference.sparse_attention(q, kv.squeeze(1), rows, sm_scale, lens=_used_columns(rows), d_v=d_v)


class FlashMLAKernels:
    """FlashMLA through `deepseek_attn.impls.flash_mla`, which pads index rows and knows the installed flavour."""

    name = "flashmla"
    pads_heads = True

    def supported(self, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        return flash_mla.supported(device, spec)

    def get_mla_metadata(self, *args, **kwargs) -> tuple[Any, None]:
        return flash_mla.new_schedule(), None

    def flash_mla_with_kvcache(self, q, k_cache, indices, head_dim_v, softmax_scale, kernel_metadata=None):
        cache = k_cache.squeeze(2)
        record = record_of(cache, head_dim_v, q.shape[-1] - head_dim_v)
        keys = PagedKeys(record, pool_view(cache), cache.shape[1], indices)
        schedule = None if kernel_metadata is None else kernel_metadata.scheduler_metadata
        out, lse = flash_mla.sparse_decode(q, [keys], softmax_scale, schedule=schedule)
        return out, lse.transpose(1, 2)

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v):
        return flash_mla.sparse_prefill(q, kv.squeeze(1), indices.squeeze(1), sm_scale)


class TritonKernels:
    """`sparse_attention` in Triton: any head count, any GPU from compute capability 8.0 on."""

    name = "triton"
    pads_heads = False

    def supported(self, device: torch.device, spec: AttentionSpec | None) -> tuple[bool, str]:
        if problem := problem_on(device):
            return False, problem
        if spec is not None and spec.kv_record == "fp8_v32" and spec.rope_dim % 16:
            return False, f"its kernels read a multiple of 16 rotated values per key; this model has {spec.rope_dim}"
        major, minor = torch.cuda.get_device_capability(device)
        return True, f"Triton kernels on compute capability {major}.{minor}"

    def get_mla_metadata(self, *args, **kwargs) -> tuple[FlashMLASchedMeta, None]:
        return FlashMLASchedMeta(), None

    def flash_mla_with_kvcache(self, q, k_cache, indices, head_dim_v, softmax_scale, kernel_metadata=None):
        b, s_q, heads, head_dim = q.shape
        cache = k_cache.squeeze(2)
        record = record_of(cache, head_dim_v, head_dim - head_dim_v)
        keys = PagedKeys(record, pool_view(cache), cache.shape[1], indices.flatten(0, 1))
        out, lse = sparse_attention_paged(q.flatten(0, 1), [keys], softmax_scale, d_v=head_dim_v)
        return out.unflatten(0, (b, s_q)), lse.view(b, s_q, heads).transpose(1, 2)

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v):
        return sparse_attention(q, kv.squeeze(1), indices.squeeze(1), sm_scale, d_v=d_v)


KERNELS: dict[str, type[SparseMLAKernels]] = {
    "flashmla": FlashMLAKernels,
    "triton": TritonKernels,
    "reference": ReferenceKernels,
}
"""In order of preference. Neither a class nor an instance imports a kernel package; calls do."""


def get_kernels(name: str, device: torch.device | str, spec: AttentionSpec | None = None) -> SparseMLAKernels:
    """The kernels called ``name``, or for ``"auto"`` the first that run ``spec`` on ``device``.

    Raises:
        ValueError: an unknown name, or kernels that cannot run here (with the reason).
    """
    device = torch.device(device)
    if name == "auto":
        return next(k for k in (kernels() for kernels in KERNELS.values()) if k.supported(device, spec)[0])
    if name not in KERNELS:
        raise ValueError(f"unknown sparse MLA kernels {name!r}: supported are auto, {', '.join(KERNELS)}")
    kernels = KERNELS[name]()
    usable, reason = kernels.supported(device, spec)
    if not usable:
        raise ValueError(f"sparse MLA kernels {name!r} cannot run on {device}: {reason}; 'auto' picks some that can")
    return kernels


def describe_kernels(device: torch.device | str, spec: AttentionSpec | None = None) -> list[tuple[str, bool, str]]:
    """(name, usable on ``device``, reason) of all kernels."""
    return [(name, *kernels().supported(torch.device(device), spec)) for name, kernels in KERNELS.items()]


def _used_columns(indices: Tensor) -> Tensor | None:
    """Columns up to the last valid index, int32 ``[T]``; None on a GPU, where the reference reads all columns.

    The reference then skips the tail of short rows: 0.11 s instead of 0.64 s for a prompt of 256 tokens at ``K = 2048``
    (16 heads, one core).
    """
    if indices.device.type != "cpu" or indices.shape[1] == 0:
        return None
    columns = torch.arange(1, indices.shape[1] + 1, dtype=torch.int32)
    return torch.where(indices >= 0, columns, 0).amax(1)


def compute_fp8_decode_padded_heads(num_heads: int) -> int:
    """Query heads of the FP8 kernel after padding: 64 or 128, which is its limit."""
    return 64 if num_heads <= 64 else 128


def compute_prefill_padded_heads(num_heads: int, prefill_padding: int) -> int:
    """Query heads of the BF16 kernel after padding: ``prefill_padding`` (64, on SM100 128), or 128 for more heads."""
    return prefill_padding if num_heads <= prefill_padding else 128


def max_num_sm_parts(sm_count: int, padded_heads: int, capability_major: int) -> int:
    """Largest number of parts of a schedule of the FP8 kernel on a GPU with ``sm_count`` multiprocessors."""
    return sm_count if capability_major == 10 else sm_count // max(1, padded_heads // 64)
