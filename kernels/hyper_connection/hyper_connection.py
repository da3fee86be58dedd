"""Hyper-connections in Triton: a product with ``fn``, a launch that collapses the streams, and one that updates them.

Updating the streams within the product was slower than in a separate launch, for any number of tokens. Device code:
`hyper_connection_triton`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.device import supports_pdl
from deepseek_attn.kernels.common.float32_product import float32_product
from deepseek_attn.kernels.common.invariance import planned_rows
from deepseek_attn.kernels.hyper_connection.hyper_connection_triton import collapse_kernel, post_kernel

SPLIT = 512  # channels of the flattened streams per split-K partial
SINKHORN_TOKENS = 8  # of a program that computes combs


def hc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
    norm: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `deepseek_attn.kernels.hyper_connection.hc_pre`."""
    _check(streams, fn, base, scale, norm, 3)
    return _collapse(streams.contiguous(), fn, base, scale, rms_eps, hc_eps, iterations, norm)


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_post`."""
    _check_post(y, streams, post, comb)
    (T, m, D), early = streams.shape, supports_pdl(streams.device)
    streams, y = streams.contiguous(), y.contiguous()
    out = torch.empty_like(streams)
    if T:
        block = min(triton.next_power_of_2(D), 256 if planned_rows(T) * D < 1 << 18 else 1024)
        post_kernel[(T, triton.cdiv(D, block))](
            y,
            streams,
            post,
            comb,
            out,
            D=D,
            M=m,
            BLOCK=block,
            PDL=early,
            enable_fp_fusion=True,
            num_warps=4 if block == 1024 else 2,
            launch_pdl=early,
        )
    return out


def hc_head(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rms_eps: float,
    hc_eps: float,
    norm: Tensor | None = None,
) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_head`."""
    _check(streams, fn, base, scale, norm, 1)
    return _collapse(streams.contiguous(), fn, base, scale, rms_eps, hc_eps, 0, norm)[0]


def _collapse(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
    norm: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Input of the sublayer, post and comb; the latter two are left uninitialised with 0 ``iterations``."""
    (T, m, D), early = streams.shape, supports_pdl(streams.device)
    x = torch.empty(T, D, dtype=streams.dtype, device=streams.device)
    post = torch.empty(T, m, dtype=torch.float32, device=streams.device)
    comb = torch.empty(T, m, m, dtype=torch.float32, device=streams.device)
    if T == 0:
        return x, post, comb
    mix = float32_product(streams.view(T, m * D), fn, SPLIT, squares=True)
    collapse_kernel[(T + (triton.cdiv(T, SINKHORN_TOKENS) if iterations else 0),)](
        streams,
        mix.sums,
        base,
        scale,
        base if norm is None else norm,
        x,
        post,
        comb,
        T,
        rms_eps,
        hc_eps,
        D=D,
        D_PADDED=triton.next_power_of_2(D),
        M=m,
        M_PADDED=triton.next_power_of_2(m),
        ROWS=len(base),
        ROWS_PADDED=triton.next_power_of_2(len(base) + 1),
        SPLITS=len(mix.sums),
        INNER=mix.inner,
        ITERATIONS=iterations,
        NORM=norm is not None,
        TOKENS=SINKHORN_TOKENS,
        PDL=early,
        enable_fp_fusion=True,
        num_warps=8 if D > 1024 else 4,
        launch_pdl=early,
    )
    return x, post, comb


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _check(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor | None, scales: int) -> None:
    if streams.dim() != 3 or not streams.is_floating_point() or not _on_gpu(streams):
        raise ValueError(
            f"streams must be [T, m, D] floats on a GPU, got {tuple(streams.shape)} {streams.dtype} on {streams.device}"
        )
    _, m, D = streams.shape
    rows = m if scales == 1 else (2 + m) * m
    given = [tuple(part.shape) for part in (fn, base, scale)]
    if given != [(rows, m * D), (rows,), (scales,)] or any(
        part.dtype != torch.float32 or not part.is_contiguous() for part in (fn, base, scale)
    ):
        raise ValueError(
            f"fn, base and scale of {m} streams of {D} channels must be contiguous float32 [{rows}, {m * D}], [{rows}] "
            f"and [{scales}], got {given}"
        )
    if norm is not None and (norm.shape != (D,) or norm.dtype != torch.float32):
        raise ValueError(f"the norm's weight must be float32 [{D}], got {tuple(norm.shape)} {norm.dtype}")


def _check_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> None:
    T, m, D = streams.shape
    if y.shape != (T, D) or post.shape != (T, m) or comb.shape != (T, m, m):
        raise ValueError(
            f"for streams {tuple(streams.shape)}, y, post and comb must be {(T, D)}, {(T, m)} and {(T, m, m)}, got "
            f"{tuple(y.shape)}, {tuple(post.shape)} and {tuple(comb.shape)}"
        )
    if any(part.dtype != torch.float32 or not part.is_contiguous() for part in (post, comb)):
        raise ValueError("post and comb must be contiguous float32, as hc_pre makes them")
