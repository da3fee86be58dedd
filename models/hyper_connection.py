"""Hyper-connections of a model's residual streams: ``kernels.hyper_connection`` with a module's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.kernels import hyper_connection as ops
from deepseek_attn.layers.weights import CheckpointModule, RMSNorm
from deepseek_attn.utils.tracing import traced

# the ops, as stages of a trace
hc_pre = traced("hc_pre")(ops.hc_pre)
hc_post = traced("hc_post")(ops.hc_post)
hc_post_pre = traced("hc_post_pre")(ops.hc_post_pre)
hc_delayed = traced("hc_delayed")(ops.hc_delayed)
hc_head = traced("hc_head")(ops.hc_head)


@traced("hc_collapse")
def hc_collapse(
    streams: torch.Tensor, pre: torch.Tensor, config: DeepseekV4Base, norm: torch.Tensor | None = None
) -> torch.Tensor:
    """`kernels.hyper_connection.hc_collapse`: streams ``[T, m, D]`` by ``pre [T, m]`` -> ``[T, D]``."""
    return ops.hc_collapse(streams, pre, config.rms_norm_eps, norm)


class Weights(Protocol):
    """A module with hyper-connection weights."""

    @property
    def loaded(self) -> Mapping[str, Any]:
        """See `CheckpointModule.loaded`."""
        ...


class StreamHead(Weights, Protocol):
    """A module with the weights of `declare_stream_head`.

    Attributes:
        norm: of the collapsed streams.
    """

    norm: RMSNorm


def hyper_connection(
    module: Weights, sublayer: str, config: DeepseekV4Base, norm: torch.Tensor | None = None
) -> ops.HyperConnection:
    """Hyper-connection weights of one sublayer (``attn``, ``ffn``, or the model's ``head``).

    Args:
        norm: RMSNorm weight of the collapsed stream.
    """
    weights = module.loaded
    fn, base, scale = (weights[f"hc_{sublayer}_{part}"] for part in ("fn", "base", "scale"))
    return ops.HyperConnection(fn, base, scale, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters, norm)


def declare_stream_head(module: CheckpointModule, config: DeepseekV4Base) -> None:
    """Declares the weights of `collapse_streams`, ``hc_head_*``, in ``module``."""
    module.declare("hc_head_fn", (config.hc_mult, config.hc_mult * config.hidden_size), torch.float32)
    module.declare("hc_head_base", (config.hc_mult,), torch.float32)
    module.declare("hc_head_scale", (1,), torch.float32)


def collapse_streams(module: StreamHead, streams: torch.Tensor, config: DeepseekV4Base) -> torch.Tensor:
    """Streams ``[T, hc_mult, hidden_size]`` -> hidden states ``[T, hidden_size]`` after ``module.norm``."""
    return hc_head(streams, hyper_connection(module, "head", config, module.norm.weight))
