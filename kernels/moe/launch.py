"""Launches of the mixture of experts: from one token to thousands; no shape depends on the routing.

Device code: `router_triton`, `experts_triton`; products on Hopper: `launch_hopper`. A pair is a (token, expert) of the
routing, numbered ``token * k + i``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from deepseek_attn.kernels.common.checks import check, contiguous_rows
from deepseek_attn.kernels.common.device import fp8_view, gpu
from deepseek_attn.kernels.common.float32_product import float32_product
from deepseek_attn.kernels.common.plans import Choice, RowsProblem, cdiv, launch_options, next_power_of_2
from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.common.triton_types import TRITON_DTYPES
from deepseek_attn.kernels.moe.cache_triton import (
    CacheState,
    choose_ahead_kernel,
    choose_rows_kernel,
    copy_experts_kernel,
)
from deepseek_attn.kernels.moe.experts_triton import (
    CombinedPairs,
    GroupedProduct,
    PairRouting,
    ProductInput,
    StackPointers,
    count_pairs_kernel,
    grouped_product_kernel,
    moe_combine_kernel,
    place_pairs_kernel,
    prepare_inputs_kernel,
    swiglu_kernel,
)
from deepseek_attn.kernels.moe.launch_hopper import launch_hopper
from deepseek_attn.kernels.moe.plan import CACHE_ROWS, COPIES, PASS_TOKENS, SELECTS, SWIGLUS, plan_experts
from deepseek_attn.kernels.moe.problem import ExpertsPlan, ExpertsProblem
from deepseek_attn.kernels.moe.reference import check_cache, check_experts, check_predicted, check_route
from deepseek_attn.kernels.moe.router_triton import RouterConfig, RouterRows, moe_select_kernel
from deepseek_attn.kernels.moe.types import (
    CopiedParts,
    ExpertRange,
    ExpertsCall,
    ExpertSlots,
    ExpertStack,
    HashRouting,
    HostExperts,
    Router,
)


def moe_route(
    x: Tensor, router: Router, hashed: HashRouting | None = None, own: ExpertRange | None = None
) -> tuple[Tensor, Tensor]:
    """See `kernels.moe.moe_route`."""
    check_route(x, router, hashed)
    weight, topk, score, factor, normalize, bias, groups = router
    if (count := groups.num_groups) & (count - 1):
        raise ValueError(f"{count} groups of experts: kernels choose from a power of two")
    (T, D), E = x.shape, len(weight)
    x = contiguous_rows(x)
    experts = torch.empty(T, topk, dtype=torch.int64, device=x.device)
    weights = torch.empty(T, topk, dtype=torch.float32, device=x.device)
    if T:
        plan = SELECTS.plan(RowsProblem(T, D), gpu(x.device))
        logits = float32_product(x, weight, plan.config.size)
        rows = logits.sums, bias, *(hashed or (None, None)), experts, weights, float(factor), *(own or (0, E))
        config = RouterConfig(E, topk, len(logits.sums), logits.inner, score, normalize, groups, plan.pdl)
        moe_select_kernel[(T,)](RouterRows(*rows), T, ROUTER=config, **launch_options(plan.config.warps, plan.pdl))
    return experts, weights


def swiglu(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `kernels.moe.swiglu`."""
    check("up", up, gate.shape)
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if size := out.numel():
        plan = SWIGLUS.plan(RowsProblem(size), gpu(gate.device))
        block = plan.config.size
        swiglu_kernel[(cdiv(size, block),)](
            gate, up, out, float(limit), size, CLAMP=limit > 0, BLOCK=block, **plan.options
        )
    return out


def moe_experts(call: ExpertsCall) -> Tensor:
    """See `kernels.moe.moe_experts`."""
    check_experts(call)
    x, experts, weights = contiguous_rows(call.x), call.experts.contiguous(), call.weights.contiguous()
    add = None if call.add is None else contiguous_rows(call.add)
    out = torch.empty(x.shape, dtype=torch.float32 if add is None else x.dtype, device=x.device)
    for start in range(0, len(x), PASS_TOKENS):
        part = slice(start, start + PASS_TOKENS)
        one_pass = call._replace(x=x[part], experts=experts[part], weights=weights[part], limit=float(call.limit))
        if add is not None:
            one_pass = one_pass._replace(add=add[part])
        launch(plan_experts(ExpertsProblem.of(one_pass), gpu(x.device)), one_pass, out[part])
    return out


def launch(plan: ExpertsPlan, call: ExpertsCall, out: Tensor) -> None:
    """One pass: the outputs of all pairs, then their weighted sum over each token, to ``out [T, D]``."""
    pair_outputs = (launch_hopper if plan.hopper else launch_grouped)(plan, call)
    if call.add_ready is not None:
        call.add_ready.wait()
    (T, D), topk, block = out.shape, call.experts.shape[1], plan.combine.config.size
    add_stride = 0 if call.add is None else call.add.stride(0)
    moe_combine_kernel[(T, cdiv(D, block))](
        CombinedPairs(pair_outputs, call.experts, call.weights, call.add, out, add_stride),
        D=D,
        TOPK=topk,
        WEIGH=call.weigh_output,
        BLOCK=block,
        **plan.combine.options,
    )


def launch_grouped(plan: ExpertsPlan, call: ExpertsCall) -> Tensor:
    """Outputs of all pairs ``[T * k, D]`` by `grouped_product_kernel`, without their weights if ``weigh_output``."""
    x, pairs = call.x, call.experts.numel()
    routing = PairRouting(call.experts, call.weights, None, None, call.rows)
    if plan.grouping.kernel == "place_pairs_kernel":
        routing = group_pairs(routing, call.num_experts, plan.product.config.pairs, plan.grouping)
    hidden, outputs = x.new_empty(pairs, call.w1.weight.shape[1]), x.new_empty(pairs, x.shape[1])
    inputs = _product_input(plan.inputs, plan, x, call.input_format)
    call.wait_for("gates_ready")
    _product(plan, call, inputs, True, routing, hidden)
    inputs = _product_input(plan.hidden, plan, hidden, call.input_format)
    call.wait_for("outputs_ready")
    _product(plan, call, inputs, False, routing, outputs)
    return outputs


def group_pairs(routing: PairRouting, count: int, tile: int, choice: Choice) -> PairRouting:
    """``routing`` with its pairs grouped by expert, of ``count`` experts; allocates tiles for any routing."""
    experts, pairs, device = routing.experts, routing.experts.numel(), routing.experts.device
    tiles = min(pairs, count) + max(0, pairs - count) // tile
    counts, sorted_pairs, tile_row = (
        torch.empty(length, dtype=torch.int32, device=device) for length in (count, tiles * tile, tiles)
    )
    options = {"BLOCK": choice.config.size} | choice.options
    count_pairs_kernel[(count,)](experts, counts, pairs, **options)
    place_pairs_kernel[(count,)](
        experts, counts, sorted_pairs, tile_row, routing.slots, pairs, tiles, E=count, TILE=tile, **options
    )
    return routing._replace(sorted=sorted_pairs, tile_row=tile_row)


def _product_input(choice: Choice | None, plan: ExpertsPlan, x: Tensor, input_format: InputFormat) -> ProductInput:
    """Rows ``[R, K]`` in the form that the product reads; converted if there is a ``choice``."""
    if choice is None:
        return ProductInput(x, None, x.stride(0))
    (R, K), block, group, factors = x.shape, choice.config.size, input_format.group, plan.factors
    values, scale = torch.empty(R, K, dtype=factors.dtype, device=x.device), None
    if factors.scaled:
        scale = torch.empty(R, cdiv(K, group), dtype=torch.float32, device=x.device)
    prepare_inputs_kernel[(R, cdiv(K, block))](
        *(x, values, scale, x.stride(0)),
        K=K,
        BLOCK=block,
        QUANTIZE=factors.quantize,
        POW2=input_format.pow2_scales,
        EVENS_FIRST=factors.weights == "fp4",
        FP8_GROUP=group,
        **choice.options,
    )
    return ProductInput(values, scale, K)


def _product(
    plan: ExpertsPlan, call: ExpertsCall, x: ProductInput, gated: bool, routing: PairRouting, out: Tensor
) -> None:
    """Launches ``out[pair] = swiglu(w1 x, w3 x)`` of the pair's expert and token, or ``w2 x`` of the pair's row."""
    (pairs, N), tiles, factors = out.shape, plan.product.config, plan.factors
    topk = call.experts.shape[1] if gated else 1

    def pointers(stack: ExpertStack) -> StackPointers:
        return StackPointers(fp8_view(stack.weight) if factors.weights == "fp8" else stack.weight, stack.scale)

    grouped = routing.tile_row is not None
    grouped_product_kernel[(cdiv(2 * N if gated else N, tiles.rows), len(routing.tile_row) if grouped else pairs)](
        x,
        pointers(call.w1 if gated else call.w2),
        pointers(call.w3) if gated else None,
        out,
        routing,
        pairs,
        call.limit,
        PRODUCT=GroupedProduct(
            *(N, x.data.shape[1], topk, factors.weights, gated, call.limit > 0),
            WEIGH=gated and not call.weigh_output,
            FP8_GROUP=call.input_format.group,
            DTYPE=TRITON_DTYPES[factors.dtype],
            SLOTS=0 if grouped else next_power_of_2(pairs),
            TILES=tiles,
            NATIVE_FP8=plan.product.native_fp8,
            PDL=plan.product.pdl,
        ),
        num_stages=tiles.stages,
        **launch_options(tiles.warps, plan.product.pdl),
    )


def fetch_experts(
    cache: HostExperts, experts: Tensor, stream: torch.cuda.Stream | None = None, prefetched: bool = False
) -> ExpertSlots:
    """See `kernels.moe.fetch_experts`."""
    check_cache(cache, experts)
    if not experts.numel():
        return ExpertSlots(cache.found)
    _choose_rows(cache, experts, cache.ahead.shape[1] if prefetched else 0)
    ready = (None, None) if stream is None else (torch.cuda.Event(), torch.cuda.Event())
    with _behind_current(stream):
        for parts, event in zip((cache.gates, cache.outputs), ready, strict=True):
            _copy_parts(cache, parts, cache.num_moves)
            if event is not None:
                event.record()
    return ExpertSlots(cache.found, *ready)


def _behind_current(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """Context of launches on ``stream``, behind the current stream; without one, on the current stream."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    return torch.cuda.stream(stream)


def prefetch_experts(
    cache: HostExperts, predicted: Tensor, stream: torch.cuda.Stream | None = None, before: HostExperts | None = None
) -> None:
    """See `kernels.moe.prefetch_experts`."""
    check_predicted(cache, predicted, before)
    E, plan = len(cache.row), CACHE_ROWS.plan(RowsProblem(1, len(cache.row)), gpu(cache.row.device))
    choose_ahead_kernel[(1,)](
        predicted,
        _state(cache, before),
        predicted.numel(),
        len(cache.owner),
        cache.first,
        E=E,
        PAIRS=max(16, next_power_of_2(predicted.numel())),
        TOPK=predicted.shape[1],
        COPIES=cache.ahead.shape[1],
        **plan.options,
    )
    with _behind_current(stream):
        _copy_parts(cache, cache.whole, before and before.num_moves, True)


def _copy_parts(cache: HostExperts, parts: CopiedParts, number: Tensor | None, ahead: bool = False) -> None:
    """Launches the copies of these parts of the experts in ``moves``, or in ``ahead``; see `copy_experts_kernel`."""
    plan = COPIES.plan(RowsProblem(1, len(cache.row)), gpu(cache.row.device))
    moves = cache.ahead if ahead else cache.moves
    copy_experts_kernel[(min(plan.config.size, len(cache.resume)),)](
        parts.table,
        moves,
        number,
        cache.resume,
        parts.units,
        MOVES=moves.shape[1],
        PARTS=len(parts.table),
        ALIGNED=parts.aligned,
        DROPS=ahead,
        **plan.options,
    )


def count_expert_uses(cache: HostExperts, experts: Tensor) -> None:
    """See `kernels.moe.count_expert_uses`."""
    check_cache(cache, experts)
    if experts.numel():
        _choose_rows(cache, experts, None)


def _choose_rows(cache: HostExperts, experts: Tensor, ahead: int | None) -> None:
    """Launches the program that counts uses and, unless ``ahead`` is None, lists experts to copy, with their rows."""
    E, plan = len(cache.row), CACHE_ROWS.plan(RowsProblem(1, len(cache.row)), gpu(cache.row.device))
    choose_rows_kernel[(1,)](
        experts,
        _state(cache),
        experts.numel(),
        len(cache.owner),
        cache.first,
        cache.staged,
        E=E,
        BLOCK=plan.config.size,
        AHEAD=ahead,
        **plan.options,
    )


def _state(cache: HostExperts, before: HostExperts | None = None) -> CacheState:
    return CacheState(*(getattr(cache, name) for name in CacheState._fields[:-1]), before=before and before.ahead)
