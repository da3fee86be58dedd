"""Hyper-connections in Triton: a launch that multiplies the streams with ``fn``, and one that collapses them.

For very few tokens the first of them updates the streams as well. Device code: `hyper_connection_triton`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepseek_attn.kernels.common.device import gpu, on_gpu, supports_pdl
from deepseek_attn.kernels.common.float32_product import float32_product, split_weight
from deepseek_attn.kernels.common.invariance import batch_invariant, planned_rows
from deepseek_attn.kernels.common.tiles import tiled
from deepseek_attn.kernels.hyper_connection.hyper_connection_triton import (
    collapse_kernel,
    mix_kernel,
    post_kernel,
)
from deepseek_attn.kernels.hyper_connection.post_product_hopper import BLOCK, COLUMNS, TILE, TOKENS, post_product_kernel
from deepseek_attn.kernels.hyper_connection.post_product_hopper import M as STREAMS
from deepseek_attn.kernels.hyper_connection.types import (
    DelayedInput,
    HyperConnection,
    SublayerInput,
    SublayerOutput,
)

FUSED = 8  # tokens up to which streams are updated and projected in one launch; more take less time in two
FEW = 32  # tokens up to which streams are projected without tensor cores
MANY_ON_HOPPER = 512  # tokens from which one launch updates and projects the streams on Hopper
MANY = 1024  # tokens from which a program projects more channels, and one computes the combs of many tokens
SPLIT = 256  # channels of the flattened streams per split-K partial, for more than few tokens


def tiling(T: int) -> tuple[int, int]:
    """Tokens of a program of `mix_kernel` and channels of each stream: the fastest measured on an H200."""
    return (1, 64) if T == 1 else (2 if T <= FUSED else 4, 32)


def hc_pre(streams: Tensor, hc: HyperConnection) -> tuple[Tensor, Tensor, Tensor]:
    """See `deepseek_attn.kernels.hyper_connection.hc_pre`."""
    _check(streams, hc, 3)
    before = _collapse(None, streams.contiguous(), hc)
    return before.x, before.post, before.comb


def hc_post_pre(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, hc: HyperConnection) -> SublayerInput:
    """See `deepseek_attn.kernels.hyper_connection.hc_post_pre`."""
    _check(streams, hc, 3)
    _check_post(y, streams, post, comb)
    return _collapse((y.contiguous(), post, comb), streams.contiguous(), hc)


def hc_delayed(streams: Tensor | SublayerOutput, pre: Tensor, hc: HyperConnection) -> DelayedInput:
    """See `deepseek_attn.kernels.hyper_connection.hc_delayed`."""
    update = None
    if isinstance(streams, SublayerOutput):
        y, streams, post, comb = streams
        _check_post(y, streams, post, comb)
        update = y.contiguous(), post, comb
    _check(streams, hc, 3)
    _check_pre(streams, pre)
    next_pre = torch.empty_like(pre)
    return DelayedInput(*_collapse(update, streams.contiguous(), hc, pre, next_pre), next_pre)


def hc_collapse(streams: Tensor, weights: Tensor, rms_eps: float, norm: Tensor | None = None) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_collapse`."""
    if streams.dim() != 3 or not streams.is_floating_point():
        raise ValueError(f"streams must be [T, m, D] floats, got {tuple(streams.shape)} {streams.dtype}")
    _check_norm(streams, norm)
    _check_pre(streams, weights)
    return _launch_collapse(streams.contiguous(), None, None, None, rms_eps, 0.0, 0, norm, weights, None).x


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


def hc_head(streams: Tensor, hc: HyperConnection) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_head`."""
    _check(streams, hc, 1)
    return _collapse(None, streams.contiguous(), hc._replace(iterations=0)).x


def _collapse(
    update: tuple[Tensor, Tensor, Tensor] | None,
    streams: Tensor,
    hc: HyperConnection,
    pre: Tensor | None = None,
    next_pre: Tensor | None = None,
) -> SublayerInput:
    """Collapses the streams, updated before by ``(y, post, comb)`` if that is given.

    ``pre [T, m]``: weights instead of those that ``hc`` gives, which go to ``next_pre``.
    """
    sums = None
    if len(streams):
        streams, sums = _projected(update, streams, hc.fn)
    return _launch_collapse(
        streams, sums, hc.base, hc.scale, hc.rms_eps, hc.hc_eps, hc.iterations, hc.norm, pre, next_pre
    )


def _launch_collapse(
    streams: Tensor,
    sums: Tensor | None,
    base: Tensor | None,
    scale: Tensor | None,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
    norm: Tensor | None,
    pre: Tensor | None,
    next_pre: Tensor | None,
) -> SublayerInput:
    """`_collapse` of ``sums [splits, T, len(base) + 1]``, which `_projected` makes.

    With 0 ``iterations`` post and comb are left uninitialised; with ``pre`` too, sums, base and scale are not needed.
    """
    (T, m, D), early, device = streams.shape, supports_pdl(streams.device), streams.device
    x = torch.empty(T, D, dtype=streams.dtype, device=device)
    post = torch.empty(T, m, dtype=torch.float32, device=device)
    comb = torch.empty(T, m, m, dtype=torch.float32, device=device)
    if T == 0:
        return SublayerInput(streams, x, post, comb)
    splits, rows = (0, 0) if sums is None else (len(sums), len(base))
    balanced_tokens = 128 if T >= MANY and not batch_invariant() else 1
    balancing = triton.cdiv(T, balanced_tokens) if iterations else 0
    collapse_kernel[(balancing + T,)](
        streams,
        pre,
        sums,
        base,
        scale,
        norm,
        x,
        next_pre,
        post,
        comb,
        T,
        splits,
        rms_eps,
        hc_eps,
        D=D,
        D_PADDED=triton.next_power_of_2(D),
        M=m,
        ROWS=rows,
        COLUMNS=triton.next_power_of_2(rows + 1),
        SPLITS_PADDED=triton.next_power_of_2(splits),
        ITERATIONS=iterations,
        TOKENS=balanced_tokens,
        PDL=early,
        enable_fp_fusion=True,
        num_warps=4,
        launch_pdl=early,
    )
    return SublayerInput(streams, x, post, comb)


def _few(T: int) -> bool:
    return T <= FEW and not batch_invariant()


def _projected(update: tuple[Tensor, Tensor, Tensor] | None, streams: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """The streams, updated if there is an update; and partial sums ``[splits, T, len(fn) + 1]`` of their product."""
    T, m, D = streams.shape
    few = _few(T)
    if update is not None and _fits_hopper(update[0], streams):
        return _post_product(*update, streams, fn)
    if update is not None and not (few and T <= FUSED):
        streams, update = hc_post(update[0], streams, *update[1:]), None
    if few:
        return _mix(update, streams, fn)
    return streams, float32_product(streams.view(T, m * D), fn, SPLIT, squares=True, many=MANY).sums


def _fits_hopper(y: Tensor, streams: Tensor) -> bool:
    """Whether `post_product_kernel` updates these streams, and sooner than launches of their own.

    It loads tiles, which must begin at multiples of 16 bytes.
    """
    T, m, D = streams.shape
    many = T >= MANY_ON_HOPPER and not batch_invariant()
    bfloat16 = y.dtype == streams.dtype == torch.bfloat16
    fits = m == STREAMS.value and D % BLOCK.value == 0 and y.data_ptr() % 16 == streams.data_ptr() % 16 == 0
    return many and bfloat16 and fits and gpu(y.device).capability == (9, 0)


def _post_product(y: Tensor, post: Tensor, comb: Tensor, streams: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """`_projected` of streams that are updated in the same launch."""
    (T, _, D), rows = streams.shape, len(fn)
    tiles = triton.cdiv(T, TOKENS.value)
    splits = max(1, min(gpu(y.device).multiprocessors // tiles, D // BLOCK.value))
    new = torch.empty_like(streams)
    sums = torch.empty(splits, T, rows + 1, dtype=torch.float32, device=y.device)
    terms = split_weight(fn, paired=True).flatten(0, 1)
    post_product_kernel[(tiles, splits)](
        tiled(y, TOKENS.value, BLOCK.value, TILE.value),
        tiled(streams.flatten(1), TOKENS.value, BLOCK.value, TILE.value),
        tiled(terms, COLUMNS.value, BLOCK.value, TILE.value),
        post,
        comb,
        new,
        sums,
        T,
        D=D,
        ROWS=rows,
        enable_fp_fusion=True,
        num_warps=8,
        maxnreg=168,
        launch_pdl=True,
    )
    return new, sums


def _mix(update: tuple[Tensor, Tensor, Tensor] | None, streams: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """The streams, updated if there is an update; and partial sums ``[splits, T, len(fn) + 1]`` of their product."""
    (T, m, D), rows, early = streams.shape, len(fn), supports_pdl(streams.device)
    new = streams if update is None else torch.empty_like(streams)
    tokens, channels = tiling(T)
    splits = triton.cdiv(D, channels)
    sums = torch.empty(splits, T, rows + 1, dtype=torch.float32, device=streams.device)
    y, post, comb = update or (streams, sums, sums)
    mix_kernel[(splits, triton.cdiv(T, tokens))](
        y,
        streams,
        post,
        comb,
        new,
        fn,
        sums,
        T,
        D=D,
        M=m,
        ROWS=rows,
        COLUMNS=triton.next_power_of_2(rows + 1),
        BLOCK=channels,
        TOKENS=tokens,
        UPDATE=update is not None,
        PDL=early,
        enable_fp_fusion=True,
        num_warps=4,
        launch_pdl=early,
    )
    return new, sums


def _check(streams: Tensor, hc: HyperConnection, scales: int) -> None:
    if streams.dim() != 3 or not streams.is_floating_point() or not on_gpu(streams):
        raise ValueError(
            f"streams must be [T, m, D] floats on a GPU, got {tuple(streams.shape)} {streams.dtype} on {streams.device}"
        )
    _, m, D = streams.shape
    rows = m if scales == 1 else (2 + m) * m
    weights = (hc.fn, hc.base, hc.scale)
    given = [tuple(part.shape) for part in weights]
    if given != [(rows, m * D), (rows,), (scales,)] or any(
        part.dtype != torch.float32 or not part.is_contiguous() for part in weights
    ):
        raise ValueError(
            f"fn, base and scale of {m} streams of {D} channels must be contiguous float32 [{rows}, {m * D}], [{rows}] "
            f"and [{scales}], got {given}"
        )
    _check_norm(streams, hc.norm)


def _check_norm(streams: Tensor, norm: Tensor | None) -> None:
    D = streams.shape[2]
    if norm is not None and (norm.shape != (D,) or norm.dtype != torch.float32):
        raise ValueError(f"the norm's weight must be float32 [{D}], got {tuple(norm.shape)} {norm.dtype}")


def _check_pre(streams: Tensor, weights: Tensor) -> None:
    T, m, _ = streams.shape
    if weights.shape != (T, m) or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(
            f"weights that collapse streams {tuple(streams.shape)} must be contiguous float32 {(T, m)}, got "
            f"{tuple(weights.shape)} {weights.dtype}, strides {weights.stride()}"
        )


def _check_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> None:
    T, m, D = streams.shape
    if y.shape != (T, D) or post.shape != (T, m) or comb.shape != (T, m, m):
        raise ValueError(
            f"for streams {tuple(streams.shape)}, y, post and comb must be {(T, D)}, {(T, m)} and {(T, m, m)}, got "
            f"{tuple(y.shape)}, {tuple(post.shape)} and {tuple(comb.shape)}"
        )
    if any(part.dtype != torch.float32 or not part.is_contiguous() for part in (post, comb)):
        raise ValueError("post and comb must be contiguous float32, as hc_pre makes them")
