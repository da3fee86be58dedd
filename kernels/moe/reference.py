"""Mixture of experts in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.kernels.common.checks import INTS, check
from deepseek_attn.kernels.common.device import FLOATS
from deepseek_attn.kernels.common.norm_rope import constant
from deepseek_attn.kernels.common.plans import cdiv
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.linear.formats import dequantize_weight, quantized_input
from deepseek_attn.kernels.moe.types import (
    COPY_PROGRAMS,
    ExpertGroups,
    ExpertRange,
    ExpertsCall,
    ExpertSlots,
    ExpertStack,
    HashRouting,
    HostExperts,
    Router,
    expert_parts,
)
from deepseek_attn.kernels.moe.uses import DECAY, MAX_TOKENS, USE
from deepseek_attn.utils.tape import reads_values, recording

SCORES = {
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}


def moe_route(
    x: Tensor, router: Router, hashed: HashRouting | None = None, own: ExpertRange | None = None
) -> tuple[Tensor, Tensor]:
    """See `deepseek_attn.kernels.moe.moe_route`."""
    check_route(x, router, hashed)
    weight, topk, score, factor, normalize, bias, groups = router
    scores = SCORES[score](F.linear(x.float(), weight.float()))
    if hashed is not None:
        experts = hashed.table.index_select(0, hashed.token_ids)
    else:
        experts = _choose(scores if bias is None else scores + bias, topk, groups)
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if own is not None:
        experts = experts - own.first
        experts = torch.where((experts >= 0) & (experts < own.count), experts, -1)
    return experts, weights * constant(factor)


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
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up).to(dtype)


def expert_linear(x: Tensor, stack: ExpertStack, expert: int, input_format: InputFormat) -> Tensor:
    """``x [R, in]`` through one expert of ``stack``: ``[R, out]`` in the dtype of x."""
    weight = stack.weight[expert]
    if stack.scale is None:
        return F.linear(x, weight)
    dense = dequantize_weight(weight, stack.scale[expert])
    return F.linear(quantized_input(x, input_format), dense).to(x.dtype)


def moe_experts(call: ExpertsCall) -> Tensor:
    """See `deepseek_attn.kernels.moe.moe_experts`."""
    check_experts(call)
    x, add, add_ready, slots = call.x, call.add, call.add_ready, call.slots
    for ready in () if slots is None else (slots.gates_ready, slots.outputs_ready):
        if ready is not None:
            ready.wait()
    out = _of_one_token(call) if recording() and slots is None else _of_tokens(call)
    if add_ready is not None:
        add_ready.wait()
    return out if add is None else (out + add).to(x.dtype)


def _of_tokens(call: ExpertsCall) -> Tensor:
    """Sums, float32 ``[T, D]``: a product for each expert, of its tokens; a token's are added in order of experts."""
    x, experts, _, w1, w3, w2, limit, weigh_output, input_format, *_ = call
    out = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    expert_of_pair = experts.flatten()
    order = expert_of_pair.argsort(stable=True)  # of pairs of a token and an expert, by expert
    order = order[expert_of_pair[order] >= 0]
    if not len(order):
        return out
    tokens, weight = order // experts.shape[1], call.weights.flatten()[order].unsqueeze(1)
    chosen, sizes = (part.tolist() for part in expert_of_pair[order].unique_consecutive(return_counts=True))
    rows = chosen if call.slots is None else call.slots.rows[chosen].tolist()

    def project(inputs: Tensor, stack: ExpertStack) -> Tensor:
        blocks = zip(inputs.split_with_sizes(sizes), rows, strict=True)
        return torch.cat([expert_linear(block, stack, row, input_format) for block, row in blocks])

    inputs = x.index_select(0, tokens)
    hidden = swiglu(project(inputs, w1), project(inputs, w3), limit)
    if not weigh_output:
        hidden *= weight
    outputs = project(hidden.to(x.dtype), w2).float()
    return out.index_add_(0, tokens, outputs.mul_(weight) if weigh_output else outputs)


def _of_one_token(call: ExpertsCall) -> Tensor:
    """`_of_tokens` of one token for a tape: values are read for the products alone."""
    x, experts, _, w1, w3, w2, limit, weigh_output, input_format, *_ = call
    weight = call.weights.t()

    def project(rows: Sequence[Tensor], stack: ExpertStack) -> Tensor:
        outs = x.new_empty(experts.shape[1], stack.weight.shape[1])
        transposed = [weight.t() for weight in stack.weight.unbind()]
        _project_rows(rows, stack, transposed, experts, input_format, outs.split(1))
        return outs

    rows = [x] * experts.shape[1]
    hidden = swiglu(project(rows, w1), project(rows, w3), limit)
    if not weigh_output:
        hidden = hidden * weight
    out = project(hidden.to(x.dtype).split(1), w2).float()
    out = out * weight if weigh_output else out
    if len(rows) == 2:  # a sum of two has no order
        return out[:1] + out[1:]
    total = out[:1].clone()
    _sum_by_expert(out.split(1), experts, total)
    return total


@reads_values
def _sum_by_expert(rows: Sequence[Tensor], experts: Tensor, total: Tensor) -> None:
    """Writes the sum of the rows in increasing order of their experts."""
    (chosen,) = experts.tolist()
    first, *others = sorted(range(len(rows)), key=chosen.__getitem__)
    total.copy_(rows[first])
    for place in others:
        total += rows[place]


@reads_values
def _project_rows(
    rows: Sequence[Tensor],
    stack: ExpertStack,
    weights: list[Tensor],
    experts: Tensor,
    input_format: InputFormat,
    outs: Sequence[Tensor],
) -> None:
    """Writes `expert_linear` of each row ``[1, in]`` with its expert to ``outs``; ``weights``: transposed."""
    for row, expert, out in zip(rows, experts.tolist()[0], outs, strict=True):
        if stack.scale is None:
            torch.mm(row, weights[expert], out=out)
        else:
            out.copy_(expert_linear(row, stack, expert, input_format))


def fetch_experts(
    cache: HostExperts, experts: Tensor, stream: torch.cuda.Stream | None = None, prefetched: bool = False
) -> ExpertSlots:
    """See `deepseek_attn.kernels.moe.fetch_experts`."""
    count_expert_uses(cache, experts)
    needed = set(experts.flatten().tolist()) - {-1}
    right, wrong = _drop_wrong_guesses(cache, needed) if prefetched else (0, 0)
    rows = cache.row.tolist()
    missing = sorted(expert for expert in needed if rows[expert] < 0)
    counts = [len(needed), len(missing), right, wrong]
    cache.totals.add_(torch.tensor(counts, dtype=torch.int64, device=cache.totals.device))
    free = _free_slots(cache, needed)
    found, targets = list(rows), []
    for place, expert in enumerate(missing):
        if place < len(free):
            _take_slot(cache, free[place], expert)
            targets.append(cache.first + free[place])
        else:
            targets.append(cache.staged + place - len(free))
        found[expert] = targets[-1]
    for i, values in enumerate((missing, targets)):
        cache.moves[i, : len(missing)] = torch.tensor(values, dtype=torch.int32, device=cache.moves.device)
    cache.num_moves.fill_(len(missing))
    cache.found.copy_(torch.tensor(found, dtype=torch.int32, device=cache.found.device))
    _copy_experts(cache, missing, targets)
    return ExpertSlots(cache.found)


def prefetch_experts(
    cache: HostExperts, predicted: Tensor, stream: torch.cuda.Stream | None = None, before: HostExperts | None = None
) -> None:
    """See `deepseek_attn.kernels.moe.prefetch_experts`."""
    check_predicted(cache, predicted, before)
    by_rank = [expert for expert in predicted.t().flatten().tolist() if expert >= 0]
    if before is None and int(cache.num_moves) < 0:
        cache.totals[3] += _drop_wrong_guesses(cache, set(by_rank))[1]
    else:
        cache.ahead.fill_(-1)
    entries = range(1, cache.ahead.shape[1])
    if before is not None:
        entries = range(int((before.ahead[0] < 0).all()))
    rows = cache.row.tolist()
    missing = [expert for expert in dict.fromkeys(by_rank) if rows[expert] < 0]
    # as many as there are guesses, free slots and entries of `ahead`
    pairs = list(zip(missing, _free_slots(cache, set(by_rank)), entries, strict=False))
    for expert, slot, i in pairs:
        _take_slot(cache, slot, expert)
        cache.ahead[0, i], cache.ahead[1, i] = expert, cache.first + slot
    _copy_experts(cache, [expert for expert, *_ in pairs], [cache.first + slot for _, slot, _ in pairs])
    cache.num_moves.fill_(0 if before is None else -1)


def _drop_wrong_guesses(cache: HostExperts, needed: set[int]) -> tuple[int, int]:
    """Frees the rows of experts copied ahead that are not needed; returns the numbers of right and of wrong guesses."""
    right = wrong = 0
    for i, (expert, row) in enumerate(cache.ahead.t().tolist()):
        if expert in needed:
            right += 1
        elif expert >= 0:
            wrong += 1
            cache.ahead[0, i] = cache.row[expert] = cache.owner[row - cache.first] = -1
    return right, wrong


def _free_slots(cache: HostExperts, kept: set[int]) -> list[int]:
    """Slots without an expert, then those of experts to evict, in this order; not of the experts to be kept."""
    owners, uses = cache.owner.tolist(), cache.uses.tolist()
    order = sorted((-1, slot, slot) if own < 0 else (uses[own], own, slot) for slot, own in enumerate(owners))
    return [slot for *_, slot in order if owners[slot] not in kept]


def _take_slot(cache: HostExperts, slot: int, expert: int) -> None:
    """Gives a slot's row to an expert."""
    if (old := int(cache.owner[slot])) >= 0:
        cache.row[old] = -1
    cache.owner[slot], cache.row[expert] = expert, cache.first + slot


def _copy_experts(cache: HostExperts, experts: Sequence[int], rows: Sequence[int]) -> None:
    for source, target in zip(expert_parts(cache.host), expert_parts(cache.device), strict=True):
        for expert, row in zip(experts, rows, strict=True):
            target[row].copy_(source[expert])


def count_expert_uses(cache: HostExperts, experts: Tensor) -> None:
    """See `deepseek_attn.kernels.moe.count_expert_uses`."""
    check_cache(cache, experts)
    chosen = experts.flatten()
    tokens = torch.bincount(chosen[chosen >= 0], minlength=len(cache.uses)).clamp(max=MAX_TOKENS)
    cache.uses.sub_(cache.uses >> DECAY).add_((tokens * USE).to(torch.int32))


def check_route(x: Tensor, router: Router, hashed: HashRouting | None) -> None:
    """Raises ValueError: arguments of `moe_route` that do not fit."""
    weight, topk, score, *_, bias, groups = router
    check("x", x, ("T", "D"), FLOATS)
    check("the gate", weight, ("E", x.shape[1]), (torch.float32, torch.bfloat16), contiguous=True)
    E, (n, kept) = len(weight), groups
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}: supported are {', '.join(SCORES)}")
    if n < 1 or E % n or not 1 <= kept <= n or not 1 <= topk <= E // n * kept:
        raise ValueError(
            f"{topk} of {E} experts in the best {kept} of {n} groups: the number of groups must divide the experts, "
            "and the groups kept must hold enough of them"
        )
    check("the bias", bias, (E,), torch.float32, contiguous=True)
    if hashed is not None:
        check("the table of hash routing", hashed.table, ("V", topk), contiguous=True)
        check("the token ids of hash routing", hashed.token_ids, (len(x),), rows=True)


def check_experts(call: ExpertsCall) -> None:
    """Raises ValueError: arguments of `moe_experts` that do not fit."""
    x, experts, stacks = call.x, call.experts, (call.w1, call.w3, call.w2)
    check("rows of slots", call.rows, ("E",), torch.int32, contiguous=True)
    check("x", x, ("T", "D"), FLOATS)
    check("experts", experts, (len(x), "k"), INTS)
    check("weights", call.weights, experts.shape, torch.float32)
    check("add", call.add, x.shape)
    if not isinstance(stacks[0].weight, Tensor):
        return  # experts that are read from files one by one: loading has compared their shapes with the config's
    E, inner, _ = stacks[0].weight.shape
    for stack, rows in zip(stacks, (inner, inner, x.shape[1]), strict=True):
        _check_stack(stack, E, rows, x, call.input_format.group)
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
    check("first jobs of copying programs", cache.resume, (COPY_PROGRAMS,), torch.int32, contiguous=True)
    check("numbers of needed and copied experts", cache.totals, (4,), torch.int64, contiguous=True)
    check("experts", experts, ("T", "k"), INTS, contiguous=True)


def check_predicted(cache: HostExperts, predicted: Tensor, before: HostExperts | None) -> None:
    """Raises ValueError: arguments of `prefetch_experts` that do not fit."""
    check_cache(cache, predicted)
    check("entries of the layer before", before and before.ahead, cache.ahead.shape, torch.int32, contiguous=True)
    if predicted.numel() > MAX_CACHED:
        raise ValueError(f"{predicted.numel()} predicted experts: supported are up to {MAX_CACHED}")


def _check_stack(stack: ExpertStack, E: int, rows: int, x: Tensor, group: int) -> None:
    weight, scale, exponent = stack
    check("a stack of experts", weight, (E, rows, "in"), contiguous=True)
    width = weight.shape[2]
    if scale is None:
        check("a stack of experts without scales", weight, weight.shape, x.dtype)
    elif stack.format == "fp4":
        check("scales of packed FP4 experts", scale, (E, rows, width // 16), torch.uint8, contiguous=True)
        check("exponents of rows", exponent, (E, rows), torch.uint8)
    else:
        check("a stack of experts with scales, packed FP4 or FP8,", weight, weight.shape, torch.float8_e4m3fn)
        blocks = (E, cdiv(rows, group), cdiv(width, group))
        check(f"scales of FP8 experts in blocks of {group} x {group}", scale, blocks, torch.float32, contiguous=True)
        if exponent is not None:
            raise ValueError(f"exponents of rows are for FP4, got {exponent.dtype} {tuple(exponent.shape)} for FP8")
