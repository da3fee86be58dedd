"""Attention impls by name. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib

import torch

from deepseek_attn.impls.base import DeepseekV4SparseMLAAttentionImpl

# in order of preference for backend="auto"
_IMPLS = {
    "reference": ("deepseek_attn.impls.reference", "DeepseekV4ReferenceSparseImpl"),
}


def impl_names() -> tuple[str, ...]:
    return tuple(_IMPLS)


def _load(name: str) -> type[DeepseekV4SparseMLAAttentionImpl]:
    module, attribute = _IMPLS[name]
    return getattr(importlib.import_module(module), attribute)


def get_impl(name: str, device: torch.device | str = "cpu") -> type[DeepseekV4SparseMLAAttentionImpl]:
    """The impl called ``name``, or for ``"auto"`` the first that runs on ``device``.

    Raises:
        ValueError: an unknown name, or an impl that cannot run here (with its reason).
    """
    device = torch.device(device)
    if name == "auto":
        return next(impl for impl in map(_load, _IMPLS) if impl.supported(device)[0])
    if name not in _IMPLS:
        raise ValueError(f"unknown backend {name!r}: supported are auto, {', '.join(_IMPLS)}")
    impl = _load(name)
    usable, reason = impl.supported(device)
    if not usable:
        raise ValueError(f"backend {name!r} cannot run on {device}: {reason}; backend='auto' picks one that can")
    return impl


def describe_impls(device: torch.device | str = "cpu") -> list[tuple[str, bool, str]]:
    """(name, usable on ``device``, reason) of every impl."""
    return [(name, *_load(name).supported(torch.device(device))) for name in _IMPLS]
