"""The router of a mixture of experts in Triton: scores in true float32, then the experts of each token.

One launch computes split-K partials of the scores, a second one adds them up and selects.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from deepseek_attn.kernels.common.device import on_gpu, supports_pdl
from deepseek_attn.kernels.common.float32_product import float32_product, summed
from deepseek_attn.kernels.moe.types import UNGROUPED, ExpertGroups, ExpertRange, HashRouting

SPLIT = 256  # channels per split-K partial
_REMOVED = tl.constexpr(-(1 << 31))
_SCORES = ("sqrtsoftplus", "sigmoid", "softmax")


@triton.jit
def _score(logits, inside, SCORE: tl.constexpr):
    if SCORE == "sigmoid":
        return 1 / (1 + libdevice.exp(-logits))
    if SCORE == "softmax":
        shifted = libdevice.exp(logits - tl.max(tl.where(inside, logits, float("-inf")), 0))
        return shifted / tl.sum(tl.where(inside, shifted, 0), 0)
    return tl.sqrt_rn(tl.where(logits > 20, logits, libdevice.log1p(libdevice.exp(logits))))


@triton.jit
def _sort_key(value):
    """int32 that orders as the value does; a NaN is above all numbers. None is `_REMOVED`."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _pop_largest(key, index):
    """Index of the largest key, the lowest of equal ones, and the keys without it."""
    winner = tl.min(tl.where(key == tl.max(key, 0), index, 0x7FFFFFFF), 0)
    return winner, tl.where(index == winner, _REMOVED, key)


@triton.jit(do_not_specialize=["T"])
def select_kernel(
    sums_ptr,
    bias_ptr,
    table_ptr,
    token_ids_ptr,
    experts_ptr,
    weights_ptr,
    T,
    factor,
    first,
    count,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    INNER: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOOKUP: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Experts and weights of one token."""
    t = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_PADDED)
    inside = expert < E
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logits = summed(sums_ptr, t * E + tl.minimum(expert, E - 1), T * E, SPLITS, INNER)
    scores = _score(logits, inside, SCORE)
    i = tl.arange(0, TOPK_PADDED)
    chosen = tl.zeros((TOPK_PADDED,), tl.int32)
    weights = tl.zeros((TOPK_PADDED,), tl.float32)
    if LOOKUP:
        row = tl.load(token_ids_ptr + t)
        chosen = tl.load(table_ptr + row * TOPK + i, mask=i < TOPK, other=0).to(tl.int32)
    else:
        biased = scores
        if HAS_BIAS:
            biased += tl.load(bias_ptr + expert, mask=inside, other=0)
        if GROUPS > 1:
            group = expert // (E // GROUPS)
            g = tl.arange(0, GROUPS)
            members = tl.where((group[:, None] == g[None, :]) & inside[:, None], biased[:, None], float("-inf"))
            place = tl.where(members == tl.max(members, 0)[None, :], expert[:, None], E_PADDED)
            best = tl.min(place, 0)
            second = tl.max(tl.where(expert[:, None] == best[None, :], float("-inf"), members), 0)
            group_key = _sort_key(tl.max(members, 0) + second)
            keep = tl.zeros((E_PADDED,), tl.int1)
            for _ in tl.static_range(KEPT):
                winner, group_key = _pop_largest(group_key, g)
                keep = keep | (group == winner)
            biased = tl.where(keep, biased, float("-inf"))
        key = tl.where(inside, _sort_key(biased), _REMOVED)
        for place in tl.static_range(TOPK):
            winner, key = _pop_largest(key, expert)
            chosen = tl.where(i == place, winner, chosen)
    for place in tl.static_range(TOPK):
        winner = tl.sum(tl.where(i == place, chosen, 0), 0)
        # as integers, whose largest is found by one instruction
        score = tl.max(tl.where(expert == winner, scores.to(tl.int32, bitcast=True), _REMOVED), 0)
        weights = tl.where(i == place, score.to(tl.float32, bitcast=True), weights)
    if NORMALIZE:
        weights = tl.div_rn(weights, tl.broadcast_to(tl.sum(weights, 0), (TOPK_PADDED,)))
    chosen = tl.where((chosen >= first) & (chosen < first + count), chosen - first, -1)
    tl.store(experts_ptr + t * TOPK + i, chosen.to(tl.int64), mask=i < TOPK)
    tl.store(weights_ptr + t * TOPK + i, weights * factor, mask=i < TOPK)


def moe_route(
    x: Tensor,
    weight: Tensor,
    topk: int,
    score: str,
    factor: float,
    normalize: bool,
    bias: Tensor | None = None,
    groups: ExpertGroups = UNGROUPED,
    hashed: HashRouting | None = None,
    own: ExpertRange | None = None,
) -> tuple[Tensor, Tensor]:
    """See `deepseek_attn.kernels.moe.moe_route`."""
    _check(x, weight, topk, score, bias, groups, hashed)
    T, E = len(x), len(weight)
    x = x if x.stride(1) == 1 else x.contiguous()
    experts = torch.empty(T, topk, dtype=torch.int64, device=x.device)
    weights = torch.empty(T, topk, dtype=torch.float32, device=x.device)
    if T == 0:
        return experts, weights
    early = supports_pdl(x.device)
    logits = float32_product(x, weight, SPLIT)
    table, token_ids = hashed or (experts, experts)
    select_kernel[(T,)](
        logits.sums,
        weight if bias is None else bias,
        table,
        token_ids,
        experts,
        weights,
        T,
        float(factor),
        *(own or ExpertRange(0, E)),
        E=E,
        E_PADDED=triton.next_power_of_2(E),
        SPLITS=len(logits.sums),
        INNER=logits.inner,
        TOPK=topk,
        TOPK_PADDED=triton.next_power_of_2(topk),
        SCORE=score,
        NORMALIZE=normalize,
        HAS_BIAS=bias is not None,
        LOOKUP=hashed is not None,
        GROUPS=groups.num_groups,
        KEPT=groups.kept,
        PDL=early,
        enable_fp_fusion=True,
        num_warps=1,
        launch_pdl=early,
    )
    return experts, weights


def _check(
    x: Tensor,
    weight: Tensor,
    topk: int,
    score: str,
    bias: Tensor | None,
    groups: ExpertGroups,
    hashed: HashRouting | None,
) -> None:
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
