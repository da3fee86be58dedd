"""Hyper-connections in plain torch."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.kernels.common.norm_rope import inverse_rms, rms_norm
from deepseek_attn.kernels.hyper_connection.types import DelayedInput, HyperConnection, SublayerInput, SublayerOutput
from deepseek_attn.utils.tape import reads_values

FEW_TOKENS = 32
"""Up to this many, Sinkhorn's rounds on a CPU are NumPy's: 78 operations, 70 us (35 for one token) instead of 150."""


def stream_mix(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """``fn @ rms_normed(flattened streams)``: ``[T, m, D]`` -> float32 ``[T, fn.shape[0]]``."""
    flat = streams.float().flatten(1)
    return F.linear(flat, fn) * inverse_rms(flat, eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """A nearly doubly stochastic ``[T, m, m]`` from logits: softmax of rows, then columns and rows in alternation."""
    m = logits.shape[-1]
    if logits.shape[0] <= FEW_TOKENS and logits.device.type == "cpu" and not logits.requires_grad:
        return _sinkhorn_of_few(logits.softmax(-1), iterations, eps)
    same_row, same_column, floor = _sum_matrices(m, eps, logits.device)
    # one product gives the sums already spread over the entries they divide: 0.5 ms instead of 2.0 for 1024 tokens
    mix = logits.softmax(-1).flatten(1) + eps
    mix = mix / torch.addmm(floor, mix, same_column)
    for _ in range(iterations - 1):
        mix = mix / torch.addmm(floor, mix, same_row)
        mix = mix / torch.addmm(floor, mix, same_column)
    return mix.unflatten(1, (m, m))


@reads_values
def _sinkhorn_of_few(mix: Tensor, iterations: int, eps: float) -> Tensor:
    """`sinkhorn` after the softmax, of a few tokens on a CPU; in place."""
    m = mix.shape[-1]
    same_row, same_column = _sum_matrices_with_eps(m)
    flat = mix.numpy().reshape(m * m if len(mix) == 1 else (-1, m * m))  # one row: BLAS is twice as fast with a vector
    with_eps, sums = np.empty((*flat.shape[:-1], 1 + m * m), np.float32), np.empty_like(flat)
    with_eps.fill(eps)
    entries = with_eps[..., 1:]
    entries += flat
    for _ in range(iterations - 1):
        np.divide(entries, with_eps.dot(same_column, sums), entries)
        np.divide(entries, with_eps.dot(same_row, sums), entries)
    np.divide(entries, with_eps.dot(same_column, sums), flat)
    return mix


@cache
def _sum_matrices_with_eps(m: int) -> tuple[np.ndarray, np.ndarray]:
    """`_sum_matrices` in NumPy, for rows of ``eps`` followed by a flattened ``[m, m]``: it is added to each sum.

    BLAS adds ``eps`` and the entries in order, as torch does for few rows.
    """
    same_row, same_column, _ = _sum_matrices(m, 0.0, torch.device("cpu"))
    ones = torch.ones(1, m * m, dtype=torch.float32, device="cpu")
    return torch.cat([ones, same_row]).numpy(), torch.cat([ones, same_column]).numpy()


@cache
@torch.inference_mode(False)
def _part_of_row(m: int, device: torch.device) -> Tensor:
    """The part that each row of ``fn`` belongs to: 0 pre, 1 post, 2 comb."""
    return torch.tensor([0] * m + [1] * m + [2] * m * m, device=device, dtype=torch.int64)


@cache
@torch.inference_mode(False)
def _sum_matrices(m: int, eps: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices that sum a flattened ``[m, m]`` over its rows and over its columns, and ``eps`` as a vector."""
    index = torch.arange(m * m, device="cpu")
    same_row = (index[:, None] // m == index // m).float()
    same_column = (index[:, None] % m == index % m).float()
    return same_row.to(device), same_column.to(device), torch.full((m * m,), eps, device=device, dtype=torch.float32)


@cache
@torch.inference_mode(False)
def _gate_range(m: int, eps: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values of the pre and post gates where the sigmoid is 0, and their differences to the values where it is 1."""
    return torch.tensor([eps] * m + [0.0] * m, device=device, dtype=torch.float32), torch.tensor(
        [1.0] * m + [2.0] * m, device=device, dtype=torch.float32
    )


def hc_mix(streams: Tensor, hc: HyperConnection) -> tuple[Tensor, Tensor, Tensor]:
    """pre and post float32 ``[T, m]`` and comb float32 ``[T, m, m]``; see `hc_pre`."""
    m, device = streams.shape[1], streams.device
    scales = hc.scale.index_select(0, _part_of_row(m, device))
    logits = torch.addcmul(hc.base, stream_mix(streams, hc.fn, hc.rms_eps), scales)
    gates, comb = logits[:, : 2 * m], logits[:, 2 * m :]
    # pre is sigmoid + hc_eps, and post is 2 sigmoid
    pre, post = torch.addcmul(*_gate_range(m, hc.hc_eps, device), torch.sigmoid(gates)).split_with_sizes((m, m), -1)
    return pre, post, sinkhorn(comb.view(-1, m, m), hc.iterations, hc.hc_eps)


def hc_pre(streams: Tensor, hc: HyperConnection) -> tuple[Tensor, Tensor, Tensor]:
    """See `deepseek_attn.kernels.hyper_connection.hc_pre`."""
    pre, post, comb = hc_mix(streams, hc)
    return hc_collapse(streams, pre, hc.rms_eps, hc.norm), post, comb


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_post`."""
    mixed = torch.bmm(comb.transpose(1, 2), streams.float())
    return torch.addcmul(mixed, post.unsqueeze(-1), y.float().unsqueeze(1)).to(streams.dtype)


def hc_post_pre(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, hc: HyperConnection) -> SublayerInput:
    """See `deepseek_attn.kernels.hyper_connection.hc_post_pre`."""
    streams = hc_post(y, streams, post, comb)
    return SublayerInput(streams, *hc_pre(streams, hc))


def hc_delayed(streams: Tensor | SublayerOutput, pre: Tensor, hc: HyperConnection) -> DelayedInput:
    """See `deepseek_attn.kernels.hyper_connection.hc_delayed`."""
    if isinstance(streams, SublayerOutput):
        streams = hc_post(*streams)
    next_pre, post, comb = hc_mix(streams, hc)
    return DelayedInput(streams, hc_collapse(streams, pre, hc.rms_eps, hc.norm), post, comb, next_pre)


def hc_head(streams: Tensor, hc: HyperConnection) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_head`."""
    mix = stream_mix(streams, hc.fn, hc.rms_eps)
    return hc_collapse(streams, torch.sigmoid(mix * hc.scale + hc.base) + hc.hc_eps, hc.rms_eps, hc.norm)


def hc_collapse(streams: Tensor, weights: Tensor, rms_eps: float, norm: Tensor | None = None) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_collapse`."""
    x = torch.bmm(weights.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
    if norm is None:
        return x
    return rms_norm(x, rms_eps, norm)
