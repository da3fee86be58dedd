"""Checks of the arguments of mixture-of-experts ops on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import INTS, check
from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.plans import cdiv
from deepseek_attn.kernels.moe.types import ExpertGroups, ExpertsPass, ExpertStack, HashRouting, HostExperts

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
    check("x", x, ("T", "D"), FLOATS)
    check("the gate", weight, ("E", x.shape[1]), (torch.float32, torch.bfloat16), contiguous=True)
    E, (n, kept) = len(weight), groups
    if score not in _SCORES:
        raise ValueError(f"unknown score {score!r}: supported are {', '.join(_SCORES)}")
    if n < 1 or n & (n - 1) or E % n or not 1 <= kept <= n or not 1 <= topk <= E // n * kept:
        raise ValueError(
            f"{topk} of {E} experts in the best {kept} of {n} groups: the number of groups must be a power of two that "
            "divides the experts, and the groups kept must hold enough of them"
        )
    check("the bias", bias, (E,), torch.float32, contiguous=True)
    if hashed is not None:
        check("the table of hash routing", hashed.table, ("V", topk), contiguous=True)
        check("the token ids of hash routing", hashed.token_ids, (len(x),), rows=True)


def check_experts(arguments: ExpertsPass) -> None:
    """Raises ValueError: arguments of `moe_experts` that do not fit."""
    x, experts, weights, *stacks = arguments[:6]
    w1, group = arguments.w1, arguments.input_format.group
    check("rows of slots", arguments.rows, ("E",), torch.int32, contiguous=True)
    check("x", x, ("T", "D"), FLOATS)
    check("experts", experts, (len(x), "k"), INTS)
    check("weights", weights, experts.shape, torch.float32)
    check("add", arguments.add, x.shape)
    E, inner, _ = w1.weight.shape
    for stack, rows in zip(stacks, (inner, inner, x.shape[1]), strict=True):
        _check_stack(stack, E, rows, x, group)
    formats = [stack.format for stack in stacks]
    widths = [stack.weight.shape[2] * (2 if stack.format == "fp4" else 1) for stack in stacks]
    if len(set(formats)) > 1 or widths != [x.shape[1], x.shape[1], inner]:
        raise ValueError(
            f"w1 and w3 must be [{E}, {inner}, {x.shape[1]}] and w2 [{E}, {x.shape[1]}, {inner}] in one format, got "
            f"{formats} with {widths} input channels"
        )


MAX_CACHED = 8192
"""Experts of a layer that `fetch_experts` chooses from: one program holds them all."""


def check_cache(cache: HostExperts, experts: Tensor) -> None:
    """Raises ValueError: arguments of `fetch_experts` or `prefetch_experts` that do not fit."""
    check("the experts of a cache", cache.row, ("E",), torch.int32, contiguous=True)
    E, S = len(cache.row), len(cache.owner)
    if E > MAX_CACHED or not 1 <= S <= E:
        raise ValueError(f"a cache of {S} of {E} experts: supported are 1 to E of up to {MAX_CACHED}")
    check("the rows of a cache", cache.owner, (S,), torch.int32, contiguous=True)
    check("counts of use", cache.uses, (E,), torch.int32, contiguous=True)
    check("rows to read", cache.found, (E,), torch.int32, contiguous=True)
    check("experts to copy", cache.moves, (2, E), torch.int32, contiguous=True)
    check("the number of experts to copy", cache.num_moves, (1,), torch.int32)
    check("experts to copy ahead", cache.ahead, (2, "copies"), torch.int32, contiguous=True)
    check("numbers of needed and copied experts", cache.totals, (4,), torch.int64, contiguous=True)
    check("experts", experts, ("T", "k"), INTS, contiguous=True)


def _check_stack(stack: ExpertStack, E: int, rows: int, x: Tensor, group: int) -> None:
    weight, scale, exponent = stack
    check("a stack of experts", weight, (E, rows, "in"), contiguous=True)
    width = weight.shape[2]
    if scale is None:
        check("a stack of experts without scales", weight, weight.shape, x.dtype)
    elif stack.is_fp4:
        check("scales of packed FP4 experts", scale, (E, rows, width // 16), torch.uint8, contiguous=True)
        check("exponents of rows", exponent, (E, rows), torch.uint8)
    else:
        check("a stack of experts with scales, packed FP4 or FP8,", weight, weight.shape, torch.float8_e4m3fn)
        blocks = (E, cdiv(rows, group), cdiv(width, group))
        check(f"scales of FP8 experts in blocks of {group} x {group}", scale, blocks, torch.float32, contiguous=True)
        if exponent is not None:
            raise ValueError(f"exponents of rows are for FP4, got {exponent.dtype} {tuple(exponent.shape)} for FP8")
