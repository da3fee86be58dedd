"""Rows of the hyper-connections: collapsing the streams, updating them, and both."""

from __future__ import annotations

import torch

from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.kernels.hyper_connection import (
    HyperConnection,
    SublayerOutput,
    hc_delayed,
    hc_post,
    hc_post_pre,
    hc_pre,
    reference,
)
from deepseek_attn.lab.bench.cases.case import OpCase, v4_preset

TOKENS = (1, 8, 32, 128, 4096)


def cases(device: torch.device) -> list[OpCase]:
    """The benchmark rows, for a device that runs the Triton kernels."""
    rows = []
    for preset in ("v4_flash", "v4_pro"):
        config = v4_preset(preset)
        for T in TOKENS:
            rows += [case(f"{preset} T={T}", T, config) for case in (_pre, _post, _post_pre)]
    config = v4_preset("v41_flash")
    return rows + [_delayed(f"v41_flash T={T}", T, config) for T in TOKENS]


def _pre(label: str, T: int, config: DeepseekV4Base) -> OpCase:
    m, D = config.hc_mult, config.hidden_size
    rows, numbers = (2 + m) * m, (config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)

    def make(device: torch.device, seed: int) -> tuple:
        fn, base, scale, norm = _random(device, seed, (rows, m * D), (rows,), (3,), (D,))
        return _random(device, seed + 1, (T, m, D))[0].bfloat16(), HyperConnection(fn, base, scale, *numbers, norm)

    size = 2 * T * m * D + 2 * T * D + 4 * rows * m * D
    return OpCase("hc_pre", label, make, {"triton": hc_pre, "torch": reference.hc_pre}, bytes=size)


def _post(label: str, T: int, config: DeepseekV4Base) -> OpCase:
    m, D = config.hc_mult, config.hidden_size

    def make(device: torch.device, seed: int) -> tuple:
        y, streams, post, comb = _random(device, seed, (T, D), (T, m, D), (T, m), (T, m, m))
        return y.bfloat16(), streams.bfloat16(), post, comb

    size = 4 * T * m * D + 2 * T * D
    return OpCase("hc_post", label, make, {"triton": hc_post, "torch": reference.hc_post}, bytes=size)


def _post_pre(label: str, T: int, config: DeepseekV4Base) -> OpCase:
    post, pre = _post(label, T, config), _pre(label, T, config)

    def make(device: torch.device, seed: int) -> tuple:
        return *post.make(device, seed), *pre.make(device, seed)[1:]

    def separately(
        y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, hc: HyperConnection
    ) -> tuple:
        return hc_pre(hc_post(y, streams, post, comb), hc)

    run_by = {"triton": hc_post_pre, "two ops": separately, "torch": reference.hc_post_pre}
    streams = 2 * T * config.hc_mult * config.hidden_size
    return OpCase("hc_post_pre", label, make, run_by, bytes=post.bytes + pre.bytes - streams)


def _delayed(label: str, T: int, config: DeepseekV4Base) -> OpCase:
    post_pre = _post_pre(label, T, config)

    def make(device: torch.device, seed: int) -> tuple:
        y, streams, post, comb, hc = post_pre.make(device, seed)
        return SublayerOutput(y, streams, post, comb), _random(device, seed + 2, post.shape)[0], hc

    run_by = {"triton": hc_delayed, "torch": reference.hc_delayed}
    return OpCase("hc_delayed", label, make, run_by, bytes=post_pre.bytes)


def _random(device: torch.device, seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    g = torch.Generator(device).manual_seed(seed)
    return [torch.randn(*shape, device=device, generator=g) for shape in shapes]
