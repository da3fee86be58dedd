"""Attention impls by name. Importing them needs no GPU and no optional package; `supported` says why one cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deepseek_attn.impls.base import (
    AttentionLayer,
    AttentionSpec,
    DeepseekV4SparseMLABackend,
    SparseMLAAttentionImpl,
    SparseMLABackend,
)
from deepseek_attn.impls.flashmla import DeepseekV4FlashMLASparseImpl
from deepseek_attn.impls.flow import SplitAttentionImpl
from deepseek_attn.impls.mixed import DeepseekV4MixedSparseImpl
from deepseek_attn.impls.reference import DeepseekV4ReferenceSparseImpl, DeepseekV41ReferenceSparseImpl
from deepseek_attn.impls.triton import DeepseekV4TritonSparseImpl, DeepseekV41TritonSparseImpl

__all__ = [
    "DEEPSEEK_V4_IMPLS",
    "DEEPSEEK_V41_IMPLS",
    "AttentionLayer",
    "AttentionSpec",
    "DeepseekV4FlashMLASparseImpl",
    "DeepseekV4MixedSparseImpl",
    "DeepseekV4ReferenceSparseImpl",
    "DeepseekV4SparseMLABackend",
    "DeepseekV4TritonSparseImpl",
    "DeepseekV41ReferenceSparseImpl",
    "DeepseekV41TritonSparseImpl",
    "Impls",
    "SparseMLAAttentionImpl",
    "SparseMLABackend",
    "combine_phases",
    "describe_impls",
    "get_impl",
    "impl_names",
]

Impls = Sequence[type[SplitAttentionImpl]]

DEEPSEEK_V4_IMPLS: Impls = (
    DeepseekV4MixedSparseImpl,
    DeepseekV4FlashMLASparseImpl,
    DeepseekV4TritonSparseImpl,
    DeepseekV4ReferenceSparseImpl,
)
"""In order of preference for ``backend="auto"``; the last one runs everywhere. `v32.backends` has DeepSeek-V3.2's."""
DEEPSEEK_V41_IMPLS: Impls = (*DEEPSEEK_V4_IMPLS[:2], DeepseekV41TritonSparseImpl, DeepseekV41ReferenceSparseImpl)


def impl_names(impls: Impls = DEEPSEEK_V4_IMPLS) -> tuple[str, ...]:
    """Names of the impls, in order of preference."""
    return tuple(impl.name for impl in impls)


def get_impl(
    name: str,
    device: torch.device | str = "cpu",
    spec: AttentionSpec | None = None,
    impls: Impls = DEEPSEEK_V4_IMPLS,
) -> type[SplitAttentionImpl]:
    """The impl called ``name``, or for ``"auto"`` the first that runs on ``device`` (for layers like ``spec``).

    Raises:
        ValueError: an unknown name, or an impl that cannot run here (with its reason).
    """
    device = torch.device(device)
    if name == "auto":
        return next(impl for impl in impls if impl.supported(device, spec)[0])
    impl = next((impl for impl in impls if impl.name == name), None)
    if impl is None:
        raise ValueError(f"unknown backend {name!r}: supported are auto, {', '.join(impl_names(impls))}")
    usable, reason = impl.supported(device, spec)
    if not usable:
        raise ValueError(f"backend {name!r} cannot run on {device}: {reason}; backend='auto' picks one that can")
    return impl


def combine_phases(decode: type[SplitAttentionImpl], prefill: type[SplitAttentionImpl]) -> type[SplitAttentionImpl]:
    """The impl that decodes as one impl does and prefills as another, of the same backend; without head padding."""
    if decode is prefill:
        return decode

    class PhasesImpl(decode):
        name = f"{decode.name}+{prefill.name}"
        attend_rows = prefill.attend_rows

        @classmethod
        def padded_heads(cls, num_heads: int) -> int:
            return num_heads  # each kernel pads as it needs

    return PhasesImpl


class ImplDescription(NamedTuple):
    """An impl's name, its backend's, whether it runs, and the reason."""

    name: str
    backend: str
    usable: bool
    reason: str


def describe_impls(
    device: torch.device | str = "cpu", spec: AttentionSpec | None = None, impls: Impls = DEEPSEEK_V4_IMPLS
) -> list[ImplDescription]:
    """Every impl, in order of preference: whether it runs on ``device`` for layers like ``spec``, and why."""
    device = torch.device(device)
    return [ImplDescription(impl.name, impl.backend_cls.get_name(), *impl.supported(device, spec)) for impl in impls]
