"""Mixture of experts in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.kernels.linear import dequantize_weight, quantized_input
from deepseek_attn.kernels.moe.arguments import UNGROUPED, ExpertGroups, ExpertRange, ExpertStack, HashRouting

# CPU matrix products round a row differently when there are fewer rows than a tile. Padding to whole tiles makes a
# token's result independent of which other tokens chose the same expert. So do products of one row at a time, which are
# faster for the few rows of a decode step.
ROW_TILE = 16

SCORES = {
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}


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
    scores = SCORES[score](F.linear(x.float(), weight))
    if hashed is not None:
        experts = hashed.table[hashed.token_ids]
    else:
        experts = _choose(scores if bias is None else scores + bias, topk, groups)
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if own is not None:
        experts = experts - own.first
        experts = torch.where((experts >= 0) & (experts < own.count), experts, -1)
    return experts, weights * factor


def _choose(scores: Tensor, topk: int, groups: ExpertGroups) -> Tensor:
    if groups.num_groups > 1:
        grouped = scores.unflatten(-1, (groups.num_groups, -1))
        best = _top(grouped.topk(2, dim=-1).values.sum(-1), groups.kept)
        left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        # -inf and not 0: a biased score may be negative
        scores = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)
    return _top(scores, topk)


def _top(values: Tensor, k: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def swiglu(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `deepseek_attn.kernels.moe.swiglu`."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up).to(dtype)


def expert_linear(x: Tensor, stack: ExpertStack, expert: int, fp8_input: bool, pow2_scales: bool) -> Tensor:
    """``x [R, in]`` through one expert of ``stack``: ``[R, out]`` in the dtype of x."""
    weight = stack.weight[expert]
    if stack.scale is None:
        return F.linear(x, weight)
    dense = dequantize_weight(weight, stack.scale[expert])
    return F.linear(quantized_input(x, fp8_input, pow2_scales, stack.fp8_group), dense).to(x.dtype)


def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w1: ExpertStack,
    w3: ExpertStack,
    w2: ExpertStack,
    limit: float,
    weigh_output: bool = False,
    fp8_input: bool = False,
    pow2_scales: bool = True,
    add: Tensor | None = None,
    num_routed: int | None = None,
    add_ready: torch.cuda.Event | None = None,
) -> Tensor:
    """See `deepseek_attn.kernels.moe.moe_experts`."""

    def run(rows: Tensor, segments: list[tuple[int, int, int]], weight: Tensor) -> Tensor:
        """Weighted outputs of ``rows [R, D]``: rows start to end of each segment by its expert."""

        def project(stack: ExpertStack, rows: Tensor) -> Tensor:
            return torch.cat(
                [expert_linear(rows[start:end], stack, e, fp8_input, pow2_scales) for e, start, end in segments]
            )

        hidden = swiglu(project(w1, rows), project(w3, rows), limit)
        if not weigh_output:
            hidden *= weight
        out = project(w2, hidden.to(rows.dtype)).float()
        return out * weight if weigh_output else out

    is_local = experts >= 0
    if not is_local.any():
        out = torch.zeros(x.shape, device=x.device)
    else:
        order = experts.flatten().argsort(stable=True)
        order = order[is_local.flatten()[order]]
        tokens, expert_of_pair = order // experts.shape[1], experts.flatten()[order]
        pair_weights = weights.flatten()[order].unsqueeze(1)
        # a quantised expert is dequantised for each of its segments
        if len(x) == 1 or (w1.scale is None and experts.numel() <= ROW_TILE):
            segments = [(expert, i, i + 1) for i, expert in enumerate(expert_of_pair.tolist())]
            pair_outputs = run(x[tokens], segments, pair_weights)
        else:
            place, segments = _lay_out(expert_of_pair, len(w1.weight))
            rows = x.new_zeros(segments[-1][2], x.shape[1])
            rows[place] = x[tokens]
            weight = pair_weights.new_zeros(len(rows), 1)
            weight[place] = pair_weights
            pair_outputs = run(rows, segments, weight)[place]
        out = torch.zeros(x.shape, device=x.device).index_add_(0, tokens, pair_outputs)
    if add_ready is not None:
        add_ready.wait()
    return out if add is None else (out + add).to(x.dtype)


def _lay_out(expert_of_row: Tensor, count: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Place of each row, given sorted by expert, and (expert, start, end) of each expert that has rows.

    Each expert's rows are padded to whole tiles of ``ROW_TILE``.
    """
    counts = torch.bincount(expert_of_row, minlength=count)
    padded = (counts + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    place = torch.arange(len(expert_of_row), device=expert_of_row.device) + shift[expert_of_row]
    sizes = zip(padded.tolist(), ends.tolist(), strict=True)
    return place, [(expert, end - size, end) for expert, (size, end) in enumerate(sizes) if size]
