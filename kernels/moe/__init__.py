"""Mixture of experts: the router, and the routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepseek_attn.kernels.common.dispatch import LazyModule, runs_triton
from deepseek_attn.kernels.linear import FP8_GROUPS
from deepseek_attn.kernels.moe.types import ExpertRange, ExpertsCall, ExpertSlots, HashRouting, HostExperts, Router

if TYPE_CHECKING:
    from deepseek_attn.kernels.moe import launch as triton_ops, reference as torch_ops
else:
    triton_ops, torch_ops = LazyModule(__name__, "launch"), LazyModule(__name__, "reference")


def moe_route(
    x: Tensor, router: Router, hashed: HashRouting | None = None, own: ExpertRange | None = None
) -> tuple[Tensor, Tensor]:
    """Experts of each token, and their weights.

    Args:
        x: ``[T, D]``.
        hashed: experts are looked up by token id instead, and scores only weigh them.
        own: ids count from its first expert on, and are -1 for experts that are not among them, as `moe_experts` takes
            them.

    Returns:
        expert ids int64 ``[T, topk]`` in order of falling score (of equal ones the lower id first), or as in the table;
        float32 weights ``[T, topk]``.

    Raises:
        ValueError: shapes, dtypes or groups that do not fit. On a GPU token ids are not checked.
    """
    return (triton_ops if runs_triton(x) else torch_ops).moe_route(x, router, hashed, own)


def moe_experts(call: ExpertsCall) -> Tensor:
    """Weighted sum of ``w2(swiglu(w1 x, w3 x))`` over the experts of each token.

    Returns:
        Float32 ``[T, D]``; with ``add``, in the dtype of x. A token's experts add up in the order of their ids, so the
        sum does not depend on the batch.

    Raises:
        ValueError: shapes, dtypes or formats that do not fit.

    Notes:
        In Triton, FP4 weights under scales from 2**-68 to 2**65 are exact; under larger ones they become infinite. FP8
        products of a block of 128 channels are summed as the tensor cores do: on compute capability 9.0 with about 14
        bits. There, FP4 weights with exponents of rows become FP8, exactly, if x has 16 bits and an FP8 input, and the
        number of tokens is large enough for this to be faster. Such a sum may move an intermediate result to the next
        FP8 value: outputs differ from results of exact sums by 0.4 to 0.6 % of the norm (H200).
    """
    ops = triton_ops if runs_triton(call.x) and call.input_format.group in FP8_GROUPS else torch_ops
    return ops.moe_experts(call)


def fetch_experts(
    cache: HostExperts, experts: Tensor, stream: torch.cuda.Stream | None = None, prefetched: bool = False
) -> ExpertSlots:
    """Copies the needed experts that the device lacks from host memory; returns the row of each expert.

    The device chooses the experts to copy, so the host does not wait, and CUDA graphs can capture the call.

    Args:
        cache: of the layer. ``row``, ``owner``, ``uses`` and ``totals`` are updated; ``found``, ``moves`` and
            ``num_moves`` are written.
        experts: contiguous ids ``[T, k]`` of the layer's next `moe_experts`, -1 for experts of other ranks; only these
            are copied. They evict cached experts that these tokens do not need: empty rows are filled first, then the
            experts with the smallest ``uses`` are evicted, at equal counts the lower id. Experts for which the layer
            has no row left go to the rows from ``staged`` on, in order of their ids.
        stream: runs the copies, w1 and w3 first, so that the first product does not wait for w2. None: the copies run
            on the current stream. CUDA only.
        prefetched: `prefetch_experts` was called for these tokens, with the same ``stream``, and the current stream is
            behind its choice. Experts that it chose and that are not needed lose their rows, wherever their copies are:
            the rows of later calls do not depend on time.

    Returns:
        Slots for `moe_experts`. ``rows`` is ``cache.found``; its values are undefined for experts that are not needed.

    Notes:
        Each call reduces every use count by a 64th and adds 4096 per token that chose the expert, for up to 255 tokens.
        The same sequence of calls yields the same rows on every device.

    Raises:
        ValueError: experts that are not integers, or tensors of the cache that do not fit.
    """
    return (triton_ops if runs_triton(cache.row) else torch_ops).fetch_experts(cache, experts, stream, prefetched)


def prefetch_experts(
    cache: HostExperts, predicted: Tensor, stream: torch.cuda.Stream | None = None, before: HostExperts | None = None
) -> None:
    """Copies predicted experts that the device lacks from host memory, before the routing is known.

    `fetch_experts` with the routing must follow, with ``prefetched=True``: it ends copies of other experts. Nothing may
    read the rows of the layer between both calls. Results do not depend on the prediction.

    Args:
        cache: of the layer. ``row``, ``owner`` and ``totals`` are updated; ``ahead``, ``num_moves`` and ``resume`` are
            written.
        predicted: contiguous ids ``[T, k]`` in order of falling score, -1 for experts of other ranks. As many as
            ``ahead`` has room for behind its first entry are copied: first every token's first expert, then every
            token's second one. They evict experts as `fetch_experts` does, but no predicted ones, and use no rows from
            ``staged`` on.
        stream: runs the copies. None: they run on the current stream. CUDA only.
        before: cache of the previous layer, for an early call. The call must follow `prefetch_experts` of that layer.
            It copies one expert, the first entry of ``ahead``, if that call copies none. The copy pauses when
            `fetch_experts` of the previous layer finds experts to copy. It therefore needs a ``stream`` of its own,
            which waits for all earlier copies. A second call without ``before`` must follow, on a ``stream`` that waits
            for the early one. If the second call does not predict the expert again, the expert loses its row.
            Otherwise the second call copies the rest of it first.

    Raises:
        ValueError: ids that are not integers, more than 8192 of them, or tensors of the cache that do not fit.
    """
    (triton_ops if runs_triton(cache.row) else torch_ops).prefetch_experts(cache, predicted, stream, before)


def count_expert_uses(cache: HostExperts, experts: Tensor) -> None:
    """Updates ``cache.uses`` as `fetch_experts` with these experts does, and nothing else."""
    (triton_ops if runs_triton(cache.row) else torch_ops).count_expert_uses(cache, experts)


def swiglu(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once to ``dtype``.

    Args:
        gate, up: of one shape.
        limit: if not 0, ``up`` is clamped on both sides before, and ``gate`` from above only. NaN stays NaN.

    Raises:
        ValueError: on a GPU, different shapes.
    """
    return (triton_ops if runs_triton(gate) else torch_ops).swiglu(gate, up, limit, dtype)
