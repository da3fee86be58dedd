"""Triton device code of the router: adds up split-K partials of the scores and selects the experts of each token.

    partial sums -- summed --> logits -- score --> scores -- + bias, kept groups, largest first --> experts
                                                     +------ of the chosen, normalised, times factor --> weights

A warp selects for one token. `float32_product` computes the partial sums in an earlier launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from deepseek_attn.kernels.common.float32_product_triton import summed
from deepseek_attn.kernels.moe.types import ExpertGroups

_REMOVED = tl.constexpr(-(1 << 31))  # sorts below all scores


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


class RouterRows(NamedTuple):
    """Runtime arguments of `moe_select_kernel`.

    Attributes:
        sums: float32 ``[SPLITS, T, E]``, partial sums of the logits; bias: float32 ``[E]`` or None.
        table: int64 ``[vocab_size, TOPK]``, experts by token id, or None for scored routing; token_ids: int64 ``[T]``.
        experts: int64 ``[T, TOPK]``; weights: float32 ``[T, TOPK]``, the results.
        factor: of the weights; first, count: experts of this rank.
    """

    sums: Any
    bias: Any
    table: Any
    token_ids: Any
    experts: Any
    weights: Any
    factor: Any
    first: Any
    count: Any


@dataclass(frozen=True)
class RouterConfig:
    """Constants of `moe_select_kernel`.

    Attributes:
        E, TOPK: experts in all and per token.
        SPLITS, INNER: see `summed`.
        SCORE: ``sqrtsoftplus``, ``sigmoid`` or ``softmax``; NORMALIZE: divide weights by their sum.
        GROUPS: `ExpertGroups`.
    """

    E: int
    TOPK: int
    SPLITS: int
    INNER: int
    SCORE: str
    NORMALIZE: bool
    GROUPS: ExpertGroups
    PDL: bool


@triton.jit(do_not_specialize=["T"])
def moe_select_kernel(rows, T, ROUTER: tl.constexpr):
    """Experts and weights of one token of ``T``; rows: `RouterRows`, ROUTER: `RouterConfig`."""
    E: tl.constexpr = ROUTER.E
    E_PADDED: tl.constexpr = triton.next_power_of_2(E)
    TOPK: tl.constexpr = ROUTER.TOPK
    TOPK_PADDED: tl.constexpr = triton.next_power_of_2(TOPK)
    GROUPS: tl.constexpr = ROUTER.GROUPS.num_groups
    KEPT: tl.constexpr = ROUTER.GROUPS.kept
    SCORE: tl.constexpr = ROUTER.SCORE  # Triton 3.6 passes text on under a constexpr name alone
    t = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_PADDED)
    inside = expert < E
    if ROUTER.PDL:
        gdc_wait()  # until the partial sums are written
        gdc_launch_dependents()
    logits = summed(rows.sums, t * E + tl.minimum(expert, E - 1), T * E, ROUTER.SPLITS, ROUTER.INNER)
    scores = _score(logits, inside, SCORE)
    i = tl.arange(0, TOPK_PADDED)
    chosen = tl.zeros((TOPK_PADDED,), tl.int32)
    weights = tl.zeros((TOPK_PADDED,), tl.float32)
    if rows.table is not None:
        row = tl.load(rows.token_ids + t)
        chosen = tl.load(rows.table + row * TOPK + i, mask=i < TOPK, other=0).to(tl.int32)
    else:
        # the bias enters the choice, not the weights
        biased = scores
        if rows.bias is not None:
            biased += tl.load(rows.bias + expert, mask=inside, other=0)
        if GROUPS > 1:
            # the score of a group is the sum of its two best experts' scores. Experts of dropped groups get -inf, not
            # 0: a biased score may be negative
            group = expert // (E // GROUPS)
            g = tl.arange(0, GROUPS)
            members = tl.where((group[:, None] == g[None, :]) & inside[:, None], biased[:, None], float("-inf"))
            index = tl.where(members == tl.max(members, 0)[None, :], expert[:, None], E_PADDED)
            best = tl.min(index, 0)
            second = tl.max(tl.where(expert[:, None] == best[None, :], float("-inf"), members), 0)
            group_key = _sort_key(tl.max(members, 0) + second)
            keep = tl.zeros((E_PADDED,), tl.int1)
            for _ in tl.static_range(KEPT):
                winner, group_key = _pop_largest(group_key, g)
                keep = keep | (group == winner)
            biased = tl.where(keep, biased, float("-inf"))
        # a round per expert; the keys are int32, whose largest in a warp is found by one instruction
        key = tl.where(inside, _sort_key(biased), _REMOVED)
        for position in tl.static_range(TOPK):
            winner, key = _pop_largest(key, expert)
            chosen = tl.where(i == position, winner, chosen)
    for position in tl.static_range(TOPK):
        winner = tl.sum(tl.where(i == position, chosen, 0), 0)
        # as integers, whose largest is found by one instruction
        score = tl.max(tl.where(expert == winner, scores.to(tl.int32, bitcast=True), _REMOVED), 0)
        weights = tl.where(i == position, score.to(tl.float32, bitcast=True), weights)
    if ROUTER.NORMALIZE:
        weights = tl.div_rn(weights, tl.broadcast_to(tl.sum(weights, 0), (TOPK_PADDED,)))
    # ids count from the first expert of this rank on
    first = rows.first
    chosen = tl.where((chosen >= first) & (chosen < first + rows.count), chosen - first, -1)
    tl.store(rows.experts + t * TOPK + i, chosen.to(tl.int64), mask=i < TOPK)
    tl.store(rows.weights + t * TOPK + i, weights * rows.factor, mask=i < TOPK)
