"""Manifold-constrained hyper-connections with what a model's config says; the ops are in ``kernels``."""

from __future__ import annotations

from types import ModuleType

import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.hyper_connection import reference
from deepseek_attn.utils.tracing import traced


@traced("hc_pre")
def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    config: ModelConfig,
    norm: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapses the streams into a sublayer's input and decides how its output goes back.

    Args:
        streams: ``[T, m, D]``; fn, base, scale: checkpoint ``hc_attn_*`` or ``hc_ffn_*``.
        norm: weight of the sublayer's RMS norm; the input is normed then.

    Returns:
        x ``[T, D]`` in the streams' dtype, post float32 ``[T, m]``, comb float32 ``[T, m, m]``.
    """
    return _ops(streams).hc_pre(streams, fn, base, scale, *_numbers(config), norm)


@traced("hc_post")
def hc_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """New streams from a sublayer's output ``y [T, D]``, and post and comb of its ``hc_pre``."""
    return _ops(streams).hc_post(y, streams, post, comb)


@traced("hc_head")
def hc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    config: ModelConfig,
    norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Collapses the streams at the end of the model: ``[T, m, D]`` -> ``[T, D]``, normed if ``norm`` is given."""
    return _ops(streams).hc_head(streams, fn, base, scale, *_numbers(config)[:2], norm)


def _numbers(config: ModelConfig) -> tuple[float, float, int]:
    return config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters


def _ops(streams: torch.Tensor) -> ModuleType:
    if not runs_triton(streams):
        return reference
    from deepseek_attn.kernels.hyper_connection import hyper_connection

    return hyper_connection
