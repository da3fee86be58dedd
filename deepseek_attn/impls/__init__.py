"""Attention impls by name. Importing them needs no GPU and no optional package; `supported` says why one cannot run."""

from __future__ import annotations

import torch

from deepseek_attn.impls.base import AttentionLayer, AttentionSpec, DeepseekV4SparseMLAAttentionImpl
from deepseek_attn.impls.flashmla import DeepseekV4FlashMLASparseImpl
from deepseek_attn.impls.mixed import DeepseekV4MixedSparseImpl
from deepseek_attn.impls.reference import DeepseekV4ReferenceSparseImpl
from deepseek_attn.impls.triton import DeepseekV4TritonSparseImpl

__all__ = [
    "AttentionLayer",
    "AttentionSpec",
    "DeepseekV4FlashMLASparseImpl",
    "DeepseekV4MixedSparseImpl",
    "DeepseekV4ReferenceSparseImpl",
    "DeepseekV4SparseMLAAttentionImpl",
    "DeepseekV4TritonSparseImpl",
    "describe_impls",
    "get_impl",
    "impl_names",
]

IMPLS: tuple[type[DeepseekV4SparseMLAAttentionImpl], ...] = (
    DeepseekV4MixedSparseImpl,
    DeepseekV4FlashMLASparseImpl,
    DeepseekV4TritonSparseImpl,
    DeepseekV4ReferenceSparseImpl,
)
"""In order of preference for ``backend="auto"``; the last one runs everywhere."""


def impl_names() -> tuple[str, ...]:
    """Names of all impls, in order of preference."""
    return tuple(impl.name for impl in IMPLS)


def get_impl(
    name: str, device: torch.device | str = "cpu", spec: AttentionSpec | None = None
) -> type[DeepseekV4SparseMLAAttentionImpl]:
    """The impl called ``name``, or for ``"auto"`` the first that runs on ``device`` (for layers like ``spec``).

    Raises:
        ValueError: an unknown name, or an impl that cannot run here (with its reason).
    """
    device = torch.device(device)
    if name == "auto":
        return next(impl for impl in IMPLS if impl.supported(device, spec)[0])
    impl = next((impl for impl in IMPLS if impl.name == name), None)
    if impl is None:
        raise ValueError(f"unknown backend {name!r}: supported are auto, {', '.join(impl_names())}")
    usable, reason = impl.supported(device, spec)
    if not usable:
        raise ValueError(f"backend {name!r} cannot run on {device}: {reason}; backend='auto' picks one that can")
    return impl


def describe_impls(
    device: torch.device | str = "cpu", spec: AttentionSpec | None = None
) -> list[tuple[str, bool, str]]:
    """(name, usable on ``device`` for layers like ``spec``, reason) of every impl, in order of preference."""
    return [(impl.name, *impl.supported(torch.device(device), spec)) for impl in IMPLS]
