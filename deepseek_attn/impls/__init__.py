"""Attention impls by name. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib

import torch

from deepseek_attn.impls.base import AttentionSpec, DeepseekV4SparseMLAAttentionImpl

# in order of preference for backend="auto"; the last one runs everywhere
_IMPLS = {
    "mixed": ("deepseek_attn.impls.mixed", "DeepseekV4MixedSparseImpl"),
    "flashmla": ("deepseek_attn.impls.flashmla", "DeepseekV4FlashMLASparseImpl"),
    "triton": ("deepseek_attn.impls.triton", "DeepseekV4TritonSparseImpl"),
    "reference": ("deepseek_attn.impls.reference", "DeepseekV4ReferenceSparseImpl"),
}
_HOMES = {attribute: module for module, attribute in _IMPLS.values()}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def impl_names() -> tuple[str, ...]:
    return tuple(_IMPLS)


def _load(name: str) -> type[DeepseekV4SparseMLAAttentionImpl]:
    module, attribute = _IMPLS[name]
    return getattr(importlib.import_module(module), attribute)


def get_impl(
    name: str, device: torch.device | str = "cpu", spec: AttentionSpec | None = None
) -> type[DeepseekV4SparseMLAAttentionImpl]:
    """The impl called ``name``, or for ``"auto"`` the first that runs on ``device`` (for layers like ``spec``).

    Raises:
        ValueError: an unknown name, or an impl that cannot run here (with its reason).
    """
    device = torch.device(device)
    if name == "auto":
        return next(impl for impl in map(_load, _IMPLS) if impl.supported(device, spec)[0])
    if name not in _IMPLS:
        raise ValueError(f"unknown backend {name!r}: supported are auto, {', '.join(_IMPLS)}")
    impl = _load(name)
    usable, reason = impl.supported(device, spec)
    if not usable:
        raise ValueError(f"backend {name!r} cannot run on {device}: {reason}; backend='auto' picks one that can")
    return impl


def describe_impls(
    device: torch.device | str = "cpu", spec: AttentionSpec | None = None
) -> list[tuple[str, bool, str]]:
    """(name, usable on ``device`` for layers like ``spec``, reason) of every impl, in order of preference."""
    return [(name, *_load(name).supported(torch.device(device), spec)) for name in _IMPLS]
