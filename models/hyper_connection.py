"""Hyper-connections of a model's residual streams: ``kernels.hyper_connection`` with the constants of a config."""

from __future__ import annotations

import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.kernels import hyper_connection as ops
from deepseek_attn.layers.weights import CheckpointModule
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
    """`kernels.hyper_connection.hc_pre`: the sublayer's input ``[T, D]``, post ``[T, m]`` and comb ``[T, m, m]``."""
    return ops.hc_pre(streams, fn, base, scale, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters, norm)


@traced("hc_delayed")
def hc_delayed(
    streams: torch.Tensor | ops.SublayerOutput,
    pre: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    config: DeepseekV4Base,
    norm: torch.Tensor | None = None,
) -> ops.DelayedInput:
    """`kernels.hyper_connection.hc_delayed`: streams, collapsed with the weights of the sublayer before."""
    numbers = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
    return ops.hc_delayed(streams, pre, fn, base, scale, *numbers, norm)


@traced("hc_collapse")
def hc_collapse(
    streams: torch.Tensor, pre: torch.Tensor, config: DeepseekV4Base, norm: torch.Tensor | None = None
) -> torch.Tensor:
    """`kernels.hyper_connection.hc_collapse`: streams ``[T, m, D]`` by ``pre [T, m]`` -> ``[T, D]``."""
    return ops.hc_collapse(streams, pre, config.rms_norm_eps, norm)


@traced("hc_post")
def hc_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """`kernels.hyper_connection.hc_post`: new streams from a sublayer's output ``y [T, D]``."""
    return ops.hc_post(y, streams, post, comb)


@traced("hc_post_pre")
def hc_post_pre(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    config: ModelConfig,
    norm: torch.Tensor | None = None,
) -> ops.SublayerInput:
    """`kernels.hyper_connection.hc_post_pre`: streams updated by one sublayer and collapsed for the next."""
    numbers = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
    return ops.hc_post_pre(y, streams, post, comb, fn, base, scale, *numbers, norm)


@traced("hc_head")
def hc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    config: ModelConfig,
    norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.hyper_connection.hc_head`: streams ``[T, m, D]`` -> ``[T, D]``, normed if ``norm`` is given."""
    return ops.hc_head(streams, fn, base, scale, config.rms_norm_eps, config.hc_eps, norm)


def declare_stream_head(module: CheckpointModule, config: ModelConfig) -> None:
    """Declares the weights of `collapse_streams`, ``hc_head_*``, in ``module``."""
    module.declare("hc_head_fn", (config.hc_mult, config.hc_mult * config.hidden_size), torch.float32)
    module.declare("hc_head_base", (config.hc_mult,), torch.float32)
    module.declare("hc_head_scale", (1,), torch.float32)


def collapse_streams(module: CheckpointModule, streams: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Streams ``[T, hc_mult, hidden_size]`` -> hidden states ``[T, hidden_size]`` after ``module.norm``."""
    weights = module.hc_head_fn, module.hc_head_base, module.hc_head_scale
    return hc_head(streams, *weights, config, module.norm.weight)
