"""Rows of the hyper-connections: collapsing the streams, and updating them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from deepseek_attn.bench.cases.case import OpCase
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.kernels.common.dispatch import runs_triton
from deepseek_attn.kernels.hyper_connection import reference

TOKENS = (1, 8, 32, 128, 4096)


def cases(device: torch.device) -> list[OpCase]:
    """The rows that can run on ``device``: all of them on a GPU that the Triton kernels know, else none."""
    if not runs_triton(torch.empty(0, device=device)):
        return []
    from deepseek_attn.kernels.hyper_connection import hyper_connection

    def call(ops: ModuleType, op: str, config: ModelConfig) -> Callable:
        numbers = (config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)
        return {
            "hc_pre": lambda y, streams, post, comb, *fn, norm: ops.hc_pre(streams, *fn, *numbers, norm),
            "hc_post": lambda y, streams, post, comb, *fn, norm: ops.hc_post(y, streams, post, comb),
        }[op]

    rows = []
    for preset in ("v4_flash", "v4_pro"):
        config = ModelConfig.from_pretrained(preset)
        for T in TOKENS:
            for op in ("hc_pre", "hc_post"):
                ours, torchs = call(hyper_connection, op, config), call(reference, op, config)
                run = {"triton": _with_norm(ours), "torch": _with_norm(torchs)}
                rows.append(OpCase(op, f"{preset} T={T}", _maker(T, config), run, bytes=_bytes(op, T, config)))
    return rows


def _with_norm(op: Callable) -> Callable:
    return lambda *args: op(*args[:-1], norm=args[-1])


def _maker(T: int, config: ModelConfig) -> Callable[[torch.device, int], tuple]:
    m, D = config.hc_mult, config.hidden_size
    rows = (2 + m) * m

    def make(device: torch.device, seed: int) -> tuple:
        g = torch.Generator(device).manual_seed(seed)
        shapes = ((T, D), (T, m, D), (T, m), (T, m, m), (rows, m * D), (rows,), (3,), (D,))
        y, streams, *rest = (torch.randn(*shape, device=device, generator=g) for shape in shapes)
        return y.bfloat16(), streams.bfloat16(), *rest

    return make


def _bytes(op: str, T: int, config: ModelConfig) -> int:
    """Streams and rows are bfloat16; what mixes them is float32 and read once."""
    m, D = config.hc_mult, config.hidden_size
    row, streams = 2 * T * D, 2 * T * m * D
    fn = 4 * (2 + m) * m * m * D
    return {"hc_pre": streams + row + fn, "hc_post": 2 * streams + row}[op]
