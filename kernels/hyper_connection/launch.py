"""Launches of hyper-connections in Triton; device code: `hyper_connection_triton`."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import check
from deepseek_attn.kernels.common.device import FLOATS, gpu
from deepseek_attn.kernels.common.float32_product import float32_product
from deepseek_attn.kernels.common.invariance import batch_invariant
from deepseek_attn.kernels.common.plans import Choice, cdiv, next_power_of_2, pdl_options
from deepseek_attn.kernels.hyper_connection.hyper_connection_triton import (
    CollapseArguments,
    CollapseConfig,
    StreamUpdate,
    hc_collapse_kernel,
    hc_mix_kernel,
    hc_post_kernel,
)
from deepseek_attn.kernels.hyper_connection.plan import MANY_TOKENS, POSTS, SPLIT, StreamsProblem, plan
from deepseek_attn.kernels.hyper_connection.types import DelayedInput, HyperConnection, SublayerInput, SublayerOutput


def hc_pre(streams: Tensor, hc: HyperConnection) -> tuple[Tensor, Tensor, Tensor]:
    """See `deepseek_attn.kernels.hyper_connection.hc_pre`."""
    return launch(streams, hc)[1:]


def hc_post_pre(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, hc: HyperConnection) -> SublayerInput:
    """See `deepseek_attn.kernels.hyper_connection.hc_post_pre`."""
    return launch(SublayerOutput(y, streams, post, comb), hc)


def hc_delayed(streams: Tensor | SublayerOutput, pre: Tensor, hc: HyperConnection) -> DelayedInput:
    """See `deepseek_attn.kernels.hyper_connection.hc_delayed`."""
    next_pre = torch.empty_like(pre)
    return DelayedInput(*launch(streams, hc, pre, next_pre), next_pre)


def hc_collapse(streams: Tensor, weights: Tensor, rms_eps: float, norm: Tensor | None = None) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_collapse`."""
    check("streams", streams, ("T", "m", "D"), FLOATS)
    check("the norm's weight", norm, streams.shape[2:], torch.float32)
    check(f"weights of streams {list(streams.shape)}", weights, streams.shape[:2], torch.float32, contiguous=True)
    streams = streams.contiguous()
    x = torch.empty(len(streams), streams.shape[2], dtype=streams.dtype, device=streams.device)
    args = CollapseArguments(streams, weights, None, None, None, norm, x, None, None, None, rms_eps, 0.0)
    _launch_collapse(plan(_problem(streams), gpu(streams.device)).collapse, args, 0)
    return x


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_post`."""
    made = POSTS.plan(_problem(streams), gpu(streams.device))
    return _launch_post(made, _update(SublayerOutput(y, streams, post, comb)))


def hc_head(streams: Tensor, hc: HyperConnection) -> Tensor:
    """See `deepseek_attn.kernels.hyper_connection.hc_head`."""
    return launch(streams, hc._replace(iterations=0)).x


def _problem(streams: Tensor, update: bool = False) -> StreamsProblem:
    return StreamsProblem(len(streams), streams.shape[2], batch_invariant(), update=update)


def _update(streams: Tensor | SublayerOutput) -> StreamUpdate:
    """Contiguous streams, with the sublayer's output that updates them if that is given."""
    if not isinstance(streams, SublayerOutput):
        return StreamUpdate(None, streams.contiguous(), None, None, None)
    y, streams, post, comb = streams
    T, m, D = streams.shape
    check("y", y, (T, D))
    check("post", post, (T, m), torch.float32, contiguous=True)
    check("comb", comb, (T, m, m), torch.float32, contiguous=True)
    streams = streams.contiguous()
    return StreamUpdate(y.contiguous(), streams, post, comb, torch.empty_like(streams))


def launch(
    streams: Tensor | SublayerOutput, hc: HyperConnection, pre: Tensor | None = None, next_pre: Tensor | None = None
) -> SublayerInput:
    """Updates the streams if they come with a sublayer's output, and collapses them.

    Args:
        hc: parameters; with 0 iterations, of the model's head, which has one scale and neither post nor comb.
        pre: ``[T, m]``, weights that collapse the streams; the weights computed from ``hc`` go to ``next_pre``.

    Without iterations, post and comb of the result are uninitialised.
    """
    _check(streams.streams if isinstance(streams, SublayerOutput) else streams, hc, pre)
    update = _update(streams)
    made = plan(_problem(update.streams, update.y is not None), gpu(update.streams.device))
    if made.update is not None:
        update = _update(_launch_post(made.update, update))
    (T, m, D), device, tiles = update.streams.shape, update.streams.device, made.product.config
    if made.product.kernel == "hc_mix_kernel":
        grid = cdiv(D, tiles.channels), cdiv(T, tiles.tokens)
        sums = torch.empty(grid[0], T, len(hc.fn) + 1, dtype=torch.float32, device=device)
        if T:
            options = {"ROWS": len(hc.fn), "TILES": tiles, **pdl_options(4, made.product.pdl)}
            hc_mix_kernel[grid](update, hc.fn, sums, T, D=D, M=m, **options)
    else:
        sums = float32_product(update.streams.view(T, m * D), hc.fn, SPLIT, squares=True, grouped_rows=MANY_TOKENS).sums
    new = update.streams if update.new is None else update.new
    x = torch.empty(T, D, dtype=new.dtype, device=device)
    post = torch.empty(T, m, dtype=torch.float32, device=device)
    comb = torch.empty(T, m, m, dtype=torch.float32, device=device)
    results = x, next_pre, post, comb
    args = CollapseArguments(new, pre, sums, hc.base, hc.scale, hc.norm, *results, hc.rms_eps, hc.hc_eps)
    _launch_collapse(made.collapse, args, hc.iterations)
    return SublayerInput(new, x, post, comb)


def _launch_post(plan: Choice, update: StreamUpdate) -> Tensor:
    (T, m, D), block = update.streams.shape, plan.config.size
    if T:
        hc_post_kernel[(T, cdiv(D, block))](update, D=D, M=m, BLOCK=block, **plan.options)
    return update.new


def _launch_collapse(plan: Choice, args: CollapseArguments, iterations: int) -> None:
    (T, m, D), tokens = args.streams.shape, plan.config.size
    splits, rows = (0, 0) if args.sums is None else (len(args.sums), len(args.base))
    balancing = cdiv(T, tokens) if iterations else 0
    config = CollapseConfig(D, m, rows, next_power_of_2(splits), iterations, tokens)
    if T:
        hc_collapse_kernel[(balancing + T,)](args, T, splits, CONFIG=config, **plan.options)


def _check(streams: Tensor, hc: HyperConnection, pre: Tensor | None) -> None:
    check("streams", streams, ("T", "m", "D"), FLOATS)
    _, m, D = streams.shape
    rows, scales = ((2 + m) * m, 3) if hc.iterations else (m, 1)
    check(f"fn of {m} streams", hc.fn, (rows, m * D), torch.float32, contiguous=True)
    check(f"base of {m} streams", hc.base, (rows,), torch.float32, contiguous=True)
    check(f"scale of {m} streams", hc.scale, (scales,), torch.float32, contiguous=True)
    check("the norm's weight", hc.norm, (D,), torch.float32)
    check(f"weights of streams {list(streams.shape)}", pre, streams.shape[:2], torch.float32, contiguous=True)
