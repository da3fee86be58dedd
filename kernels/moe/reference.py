"""Mixture of experts in plain torch: which experts a token goes through, and what they compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.kernels.linear import dequantize_weight, quantized_input

# CPU matrix products round a row differently when there are fewer rows than a tile. Padding to whole tiles makes a
# token's result independent of which other tokens chose the same expert.
ROW_TILE = 16

SCORES = {
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}

Stack = tuple[Tensor, Tensor | None]
"""One projection of all experts. Weight ``[E, out, in]`` and None; or float8_e4m3fn ``[E, out, in]`` and float32 scales
``[E, ceil(out / 128), ceil(in / 128)]``; or packed FP4, uint8 ``[E, out, in / 2]``, and e8m0 bytes
``[E, out, in / 32]``."""


def moe_route(
    x: Tensor,
    weight: Tensor,
    topk: int,
    score: str,
    factor: float,
    normalize: bool,
    bias: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    choice: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Expert ids int64 ``[T, topk]`` and their float32 weights of tokens ``x [T, D]``.

    Args:
        weight: float32 ``[E, D]``; products are float32 (no TF32).
        score: ``sqrtsoftplus``, ``sigmoid`` or ``softmax``.
        factor: multiplies the weights; ``normalize``: they are divided by their sum first.
        bias: float32 ``[E]``, added to the scores that choose, not to those that weigh.
        groups: ``(n, kept)``: experts come from the ``kept`` best of ``n`` groups of consecutive experts. A group
            counts as much as its two best experts together, bias included.
        choice: ``(table [V, topk], token_ids [T])``: experts are looked up by token id, and only weighed by scores.

    Notes:
        Ids are in the order of falling score, the lower id first where scores are equal.
    """
    scores = SCORES[score](F.linear(x.float(), weight))
    if choice is not None:
        table, token_ids = choice
        experts = table[token_ids]
    else:
        experts = _choose(scores if bias is None else scores + bias, topk, *groups)
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights * factor


def _choose(scores: Tensor, topk: int, groups: int, kept: int) -> Tensor:
    if groups > 1:
        grouped = scores.unflatten(-1, (groups, -1))
        best = _top(grouped.topk(2, dim=-1).values.sum(-1), kept)
        left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        # -inf and not 0: a biased score may be negative
        scores = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)
    return _top(scores, topk)


def _top(values: Tensor, k: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def swiglu(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once to ``dtype``; clamped first to ``limit``, if that is not 0.

    ``up`` is clamped on both sides, ``gate`` from above only.
    """
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up).to(dtype)


def expert_linear(x: Tensor, weight: Tensor, scale: Tensor | None, fp8_input: bool, pow2: bool) -> Tensor:
    """``x [R, in]`` through one expert's ``weight`` and ``scale`` (see ``Stack``): ``[R, out]`` in the dtype of x."""
    if scale is None:
        return F.linear(x, weight)
    return F.linear(quantized_input(x, fp8_input, pow2), dequantize_weight(weight, scale)).to(x.dtype)


def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w1: Stack,
    w3: Stack,
    w2: Stack,
    limit: float,
    weigh_output: bool = False,
    fp8_input: bool = False,
    pow2: bool = True,
    add: Tensor | None = None,
    spread: int | None = None,
) -> Tensor:
    """Weighted sum of ``w2(swiglu(w1 x, w3 x))`` over the experts that each token goes through.

    Args:
        x: ``[T, D]``; experts: ``[T, k]``, ids in 0 .. E - 1, or -1 for an expert that is not here and adds nothing;
            weights: float32 ``[T, k]``.
        w1, w3: stacks of ``[E, I, D]``; w2: ``[E, D, I]``.
        limit: clamp of ``swiglu``, 0 for none.
        weigh_output: weights multiply the outputs of ``w2`` (DeepSeek-V3) instead of its inputs (V4). The two differ
            by rounding.
        fp8_input: inputs of quantised weights are rounded to FP8 per token and 128 channels, under scales that are
            powers of two if ``pow2``.
        add: ``[T, D]``, what to add to the sum, in its dtype.
        spread: experts that the router chooses from, those that are not here included; default: E. For speed only.

    Returns:
        Float32 ``[T, D]``; with ``add``, in the dtype of x.

    Notes:
        A token's experts add up in the order of their ids, so the sum does not depend on the batch.
    """

    def run(rows: Tensor, segments: list[tuple[int, int, int]], weight: Tensor) -> Tensor:
        """Weighted outputs of ``rows [R, D]``: rows start to end of each segment by its expert."""

        def project(stack: Stack, rows: Tensor) -> Tensor:
            dense, scale = stack
            return torch.cat(
                [
                    expert_linear(rows[start:end], dense[e], None if scale is None else scale[e], fp8_input, pow2)
                    for e, start, end in segments
                ]
            )

        hidden = swiglu(project(w1, rows), project(w3, rows), limit)
        if not weigh_output:
            hidden *= weight
        out = project(w2, hidden.to(rows.dtype)).float()
        return out * weight if weigh_output else out

    here = experts >= 0
    if not here.any():
        out = torch.zeros(x.shape, device=x.device)
    elif len(x) == 1:  # nothing to sort or to pad
        order = experts[0].argsort(stable=True)
        order = order[here[0, order]]
        segments = [(expert, i, i + 1) for i, expert in enumerate(experts[0, order].tolist())]
        out = run(x.expand(len(segments), -1), segments, weights[0, order, None]).sum(0, keepdim=True)
    else:
        order = experts.flatten().argsort(stable=True)
        order = order[here.flatten()[order]]
        tokens = order // experts.shape[1]
        place, segments = _lay_out(experts.flatten()[order], len(w1[0]))
        rows = x.new_zeros(segments[-1][2], x.shape[1])
        rows[place] = x[tokens]
        weight = weights.new_zeros(len(rows), 1)
        weight[place] = weights.flatten()[order].unsqueeze(1)
        parts = run(rows, segments, weight)[place]
        out = torch.zeros(x.shape, device=x.device).index_add_(0, tokens, parts)
    return out if add is None else (out + add).to(x.dtype)


def _lay_out(expert_of_row: Tensor, count: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Where sorted rows go: their places, and (expert, start, end) of each expert that has rows."""
    counts = torch.bincount(expert_of_row, minlength=count)
    padded = (counts + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    place = torch.arange(len(expert_of_row), device=expert_of_row.device) + shift[expert_of_row]
    sizes = zip(padded.tolist(), ends.tolist(), strict=True)
    return place, [(expert, end - size, end) for expert, (size, end) in enumerate(sizes) if size]
