"""Checks of the arguments of mixture-of-experts ops on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.device import FLOATS, on_gpu
from deepseek_attn.kernels.common.plans import cdiv
from deepseek_attn.kernels.moe.types import ExpertGroups, ExpertStack, HashRouting

_SCORES = ("sqrtsoftplus", "sigmoid", "softmax")


def check_route(
    x: Tensor,
    weight: Tensor,
    topk: int,
    score: str,
    bias: Tensor | None,
    groups: ExpertGroups,
    hashed: HashRouting | None,
) -> None:
    """Raises ValueError: arguments of `moe_route` that do not fit."""
    if x.dim() != 2 or not on_gpu(x) or not x.is_floating_point():
        raise ValueError(f"x must be [T, D] of floats on a GPU, got {tuple(x.shape)} {x.dtype} on {x.device}")
    known = weight.dtype in (torch.float32, torch.bfloat16)
    if weight.shape[1:] != x.shape[1:] or not known or not weight.is_contiguous():
        raise ValueError(
            f"the gate must be contiguous float32 or bfloat16 [E, {x.shape[1]}] for x {tuple(x.shape)}, got "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
    E, (n, kept) = len(weight), groups
    if score not in _SCORES:
        raise ValueError(f"unknown score {score!r}: supported are {', '.join(_SCORES)}")
    if n < 1 or n & (n - 1) or E % n or not 1 <= kept <= n or not 1 <= topk <= E // n * kept:
        raise ValueError(
            f"{topk} of {E} experts in the best {kept} of {n} groups: the number of groups must be a power of two that "
            "divides the experts, and the groups kept must hold enough of them"
        )
    if bias is not None and (bias.shape != (E,) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise ValueError(f"the bias must be contiguous float32 [{E}], got {tuple(bias.shape)} {bias.dtype}")
    if hashed is not None:
        table, ids = hashed
        if table.shape[1:] != (topk,) or not table.is_contiguous() or ids.shape != (len(x),) or ids.stride(0) != 1:
            raise ValueError(
                f"hash routing needs a contiguous table [V, {topk}] and contiguous token ids [{len(x)}], got "
                f"{tuple(table.shape)} and {tuple(ids.shape)}"
            )


def check_swiglu(gate: Tensor, up: Tensor) -> None:
    """Raises ValueError: arguments of `swiglu` that do not fit."""
    if gate.shape != up.shape or not on_gpu(gate):
        raise ValueError(f"gate and up must have one shape, on a GPU, got {tuple(gate.shape)} and {tuple(up.shape)}")


def check_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    stacks: tuple[ExpertStack, ExpertStack, ExpertStack],
    group: int,
    add: Tensor | None,
) -> None:
    """Raises ValueError: arguments of `moe_experts` that do not fit; ``group``: of FP8 weights."""
    if x.dim() != 2 or x.dtype not in FLOATS or not on_gpu(x):
        raise ValueError(
            f"x must be [T, D] float32, bfloat16 or float16 on a GPU, got {tuple(x.shape)} {x.dtype} on {x.device}"
        )
    if experts.dim() != 2 or experts.shape != weights.shape or len(experts) != len(x):
        raise ValueError(
            f"experts and weights must be [{len(x)}, k] for x {tuple(x.shape)}, got {tuple(experts.shape)} and "
            f"{tuple(weights.shape)}"
        )
    if experts.dtype not in (torch.int32, torch.int64) or weights.dtype != torch.float32:
        raise ValueError(f"experts must be int32 or int64 and weights float32, got {experts.dtype}, {weights.dtype}")
    if add is not None and add.shape != x.shape:
        raise ValueError(f"add must be {tuple(x.shape)} like x, got {tuple(add.shape)}")
    w1, w3, w2 = stacks
    E, inner, _ = w1.weight.shape
    for stack, rows in ((w1, inner), (w3, inner), (w2, x.shape[1])):
        _check_stack(stack, E, rows, x, group)
    formats = [stack.format for stack in stacks]
    widths = [stack.weight.shape[2] * (2 if stack.format == "fp4" else 1) for stack in stacks]
    if len(set(formats)) > 1 or widths != [x.shape[1], x.shape[1], inner]:
        raise ValueError(
            f"w1 and w3 must be [{E}, {inner}, {x.shape[1]}] and w2 [{E}, {x.shape[1]}, {inner}] in one format, got "
            f"{formats} with {widths} input channels"
        )


def _check_stack(stack: ExpertStack, E: int, rows: int, x: Tensor, group: int) -> None:
    weight, scale, exponent = stack
    if weight.dim() != 3 or weight.shape[:2] != (E, rows) or not weight.is_contiguous():
        raise ValueError(
            f"a stack of {E} experts with {rows} outputs must be contiguous [{E}, {rows}, in], got "
            f"{tuple(weight.shape)}, strides {weight.stride()}"
        )
    if scale is None:
        if weight.dtype != x.dtype:
            raise ValueError(f"a weight without scales must have the dtype of x, {x.dtype}, got {weight.dtype}")
        return
    width = weight.shape[2]
    if stack.is_fp4:
        dtype, shape, fits = torch.uint8, (E, rows, width // 16), width % 16 == 0
    else:
        dtype, shape = torch.float32, (E, cdiv(rows, group), cdiv(width, group))
        fits = weight.dtype == torch.float8_e4m3fn
    if not fits or scale.dtype != dtype or scale.shape != shape or not scale.is_contiguous():
        raise ValueError(
            f"a quantised stack is float8_e4m3fn [E, out, in] with float32 scales of its {group} x {group} blocks, or "
            "packed FP4 uint8 [E, out, in / 2] with e8m0 bytes [E, out, in / 32], got "
            f"{weight.dtype} {tuple(weight.shape)} with {scale.dtype} {tuple(scale.shape)}"
        )
    if exponent is not None and (exponent.shape, exponent.dtype, stack.is_fp4) != ((E, rows), torch.uint8, True):
        raise ValueError(
            f"exponents of rows are uint8 [{E}, {rows}], for FP4, got {exponent.dtype} {tuple(exponent.shape)} for "
            f"{stack.format}"
        )
