"""Attention impls by name. Importing them needs no GPU and no optional package; `supported` gives the reason if an impl
cannot run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
from deepseek_attn.utils.registry import Registry, class_problems

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
    "find_impl",
    "get_impl",
    "impl_names",
    "register_impl",
]

Impls = Sequence[type[SplitAttentionImpl]]

DEEPSEEK_V4_IMPLS: Impls = (
    DeepseekV4MixedSparseImpl,
    DeepseekV4FlashMLASparseImpl,
    DeepseekV4TritonSparseImpl,
    DeepseekV4ReferenceSparseImpl,
)
"""In order of preference for ``backend="auto"``. ``reference`` runs everywhere, so ``auto`` never takes an impl that
comes after it. `v32.backends` has DeepSeek-V3.2's."""
DEEPSEEK_V41_IMPLS: Impls = (
    DeepseekV4MixedSparseImpl,
    DeepseekV4FlashMLASparseImpl,
    DeepseekV41TritonSparseImpl,
    DeepseekV41ReferenceSparseImpl,
)


IMPL_METHODS = (
    "kernels_supported", "supported", "padded_heads", "attend", "fuses_query_norm_rope", "forward_mqa", "attend_pages",
    "attend_rows",
)  # fmt: skip


def _impl_problems(cls: type[SparseMLAAttentionImpl]) -> list[str]:
    """Problems of an impl class from outside the package, other than missing methods and a missing name."""
    problems = []
    backend = getattr(cls, "backend_cls", None)
    if backend is None:
        problems.append("lacks backend_cls, the SparseMLABackend it belongs to")
    else:
        problems += [f"backend_cls {problem}" for problem in class_problems(backend, SparseMLABackend)]
        if not problems and not hasattr(backend, "supported_kv_records"):
            problems.append(f"backend_cls {backend.__name__} lacks supported_kv_records, names of cache records")
    for name in IMPL_METHODS:
        method = inspect.getattr_static(cls, name, None)
        if method is None:
            continue
        wanted = inspect.signature(getattr(SplitAttentionImpl, name))
        if not isinstance(method, classmethod | staticmethod):
            problems.append(f"{name} must be a classmethod: impls hold no state")
        elif not _takes(getattr(cls, name), len(wanted.parameters)):
            problems.append(f"{name} must take ({', '.join(wanted.parameters)})")
    return problems


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with ``count`` positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


OWN_IMPLS = Registry(
    "an attention impl", SparseMLAAttentionImpl, ("auto", "flashinfer", *(impl.name for impl in DEEPSEEK_V4_IMPLS)),
    _impl_problems,
)  # fmt: skip


def register_impl(cls: type[SparseMLAAttentionImpl]) -> type[SparseMLAAttentionImpl]:
    """Registers an impl from outside the package under its ``name``, for ``backend``; see `SparseMLAAttentionImpl`.

    Unregistered classes can be named as ``backend="module:Class"``. ``auto`` never selects an impl from outside.

    Raises:
        ValueError: the class lacks something; the message lists everything.
    """
    return OWN_IMPLS.register(cls)


def impl_names(impls: Impls = DEEPSEEK_V4_IMPLS) -> tuple[str, ...]:
    """Names of the impls, in order of preference."""
    return tuple(impl.name for impl in impls)


def get_impl(
    name: str,
    device: torch.device | str = "cpu",
    spec: AttentionSpec | None = None,
    impls: Impls = DEEPSEEK_V4_IMPLS,
) -> type[SparseMLAAttentionImpl]:
    """The impl called ``name``, or for ``"auto"`` the first that runs on ``device`` (for layers like ``spec``).

    Args:
        name: a name in ``impls``, the name of a registered impl (`register_impl`), or ``module:Class``.

    Raises:
        ValueError: an unknown name, or an impl that cannot run here (with its reason).
    """
    device = torch.device(device)
    if name == "auto":
        reasons = []
        for impl in impls:
            usable, reason = impl.supported(device, spec)
            if usable:
                return impl
            reasons.append(f"{impl.name}: {reason}")
        raise ValueError(f"no backend runs on {device}:\n  - " + "\n  - ".join(reasons))
    impl = find_impl(name, impls)
    usable, reason = impl.supported(device, spec)
    if not usable:
        raise ValueError(f"backend {name!r} cannot run on {device}: {reason}; backend='auto' selects one that can")
    return impl


def find_impl(name: str, impls: Impls) -> type[SparseMLAAttentionImpl]:
    """The impl called ``name``, whether or not it runs here. ValueError for names that `get_impl` does not know."""
    impl = next((impl for impl in impls if impl.name == name), None) or OWN_IMPLS.find(name)
    if impl is None:
        registered = "".join(f"{name}, " for name in OWN_IMPLS.classes)
        raise ValueError(
            f"unknown backend {name!r}: supported are auto, {', '.join(impl_names(impls))}, {registered}or an impl of "
            "your own as module:Class"
        )
    return impl


def combine_phases(
    decode: type[SparseMLAAttentionImpl], prefill: type[SparseMLAAttentionImpl]
) -> type[SparseMLAAttentionImpl]:
    """Combines two impls of one backend: decode of the first, prefill of the second; without head padding.

    Raises:
        ValueError: the impls differ, and they do not both derive from `SplitAttentionImpl`.
    """
    if decode is prefill:
        return decode
    if not issubclass(decode, SplitAttentionImpl):
        raise _phase_error(decode)
    if not issubclass(prefill, SplitAttentionImpl):
        raise _phase_error(prefill)

    class PhasesImpl(decode):
        name = f"{decode.name}+{prefill.name}"
        needs_masked_tails = decode.needs_masked_tails or prefill.needs_masked_tails
        waits_for_device = decode.waits_for_device or prefill.waits_for_device

        @classmethod
        def attend_rows(
            cls, layer: AttentionLayer, q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, output: Tensor | None
        ) -> Tensor:
            return prefill.attend_rows(layer, q, kv, indices, lens, output)

        @classmethod
        def padded_heads(cls, num_heads: int) -> int:
            return num_heads  # each kernel pads its own heads

    return PhasesImpl


def _phase_error(impl: type[SparseMLAAttentionImpl]) -> ValueError:
    return ValueError(f"backend {impl.name!r} attends to both phases at once: give it as backend, not for one phase")


class ImplDescription(NamedTuple):
    """An impl's name, its backend's name, whether the impl runs, and the reason if not."""

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
