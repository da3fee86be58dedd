"""Arguments of the mixture-of-experts ops that have several parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.kernels.common.quant import InputFormat
from deepseek_attn.kernels.linear.formats import UNQUANTIZED


class ExpertGroups(NamedTuple):
    """Group-limited routing: experts come from the ``kept`` best of ``num_groups`` groups of consecutive experts.

    The score of a group is the sum of its two best experts' scores, bias included.
    """

    num_groups: int
    kept: int


UNGROUPED = ExpertGroups(1, 1)


class Router(NamedTuple):
    """How a layer's router chooses and weighs experts.

    Attributes:
        weight: float32 or bfloat16 ``[E, D]``; products are float32 (no TF32).
        topk: experts per token.
        score: ``sqrtsoftplus``, ``sigmoid`` or ``softmax``.
        factor: multiplies the weights; normalize: they are divided by their sum first.
        bias: float32 ``[E]``, added to the scores that choose experts, not to their weights.
        groups: limits the choice; on a GPU their number is a power of two.
    """

    weight: Tensor
    topk: int
    score: str
    factor: float
    normalize: bool
    bias: Tensor | None = None
    groups: ExpertGroups = UNGROUPED


class HashRouting(NamedTuple):
    """Experts by token id: row ``token_ids[t]`` of ``table``.

    Attributes:
        table: int64 ``[vocab_size, topk]``; token_ids: int64 ``[T]``, padding included in the table's range.
    """

    table: Tensor
    token_ids: Tensor


class ExpertRange(NamedTuple):
    """Experts of one rank: ``count`` from number ``first`` on."""

    first: int
    count: int


class ExpertStack(NamedTuple):
    """One projection of all experts.

    Attributes:
        weight: ``[E, out, in]`` of a float dtype; or float8_e4m3fn; or packed FP4, uint8 ``[E, out, in / 2]``.
        scale: float32 ``[E, ceil(out / group), ceil(in / group)]`` of FP8 weights, e8m0 bytes ``[E, out, in / 32]`` of
            FP4 weights; None for plain weights. ``group`` is `InputFormat.group`.
        exponent: uint8 ``[E, out]`` from `row_exponents`, for FP4 weights that FP8 tensor cores can multiply exactly.
    """

    weight: Tensor
    scale: Tensor | None = None
    exponent: Tensor | None = None

    @property
    def format(self) -> str:
        """``plain``, ``fp8`` or ``fp4``."""
        return "plain" if self.scale is None else "fp4" if self.weight.dtype == torch.uint8 else "fp8"


class ExpertSlots(NamedTuple):
    """Rows of stacks that hold the experts of a call of `moe_experts`, and when they do.

    Attributes:
        rows: int32 ``[E]``, the row of each expert. Only rows of chosen experts are read.
        gates_ready, outputs_ready: events of another stream that complete the rows of w1 and w3, and of w2: the first
            product, and the second, wait for them. None: earlier launches complete the rows. CUDA only.
        beside_copies: copies of other experts run beside the second product.
    """

    rows: Tensor
    gates_ready: torch.cuda.Event | None = None
    outputs_ready: torch.cuda.Event | None = None
    beside_copies: bool = False


class HostExperts(NamedTuple):
    """Routed experts of one layer in pinned host memory; the device caches some of them.

    A row of the device's stacks holds one expert; several layers share the stacks. The rows of ``owner`` cache experts
    of this layer from call to call. The rows from ``staged`` on hold experts for the layer's next products only.

    Attributes:
        host: stacks w1, w3 and w2 of all E experts.
        device: stacks of the same formats, ``[R, ...]``, on the device.
        row: int32 ``[E]``, the row of each cached expert, -1 for others.
        owner: int32 ``[S]``, the expert in each of the rows ``first .. first + S - 1``, -1 for none.
        uses: int32 ``[E]``, counts of use that decay; see `fetch_experts`.
        first, staged: rows; at least E - S rows follow ``staged``.
        found: int32 ``[E]``, written by `fetch_experts`: the row of each expert that the products may read.
        moves: int32 ``[2, E]``, written by `fetch_experts`: the copied experts, and the row of each.
        num_moves: int32 ``[1]``, initially 0. `fetch_experts` writes the number of copied experts. `prefetch_experts`
            writes 0, or -1 in an early call.
        ahead: int32 ``[2, A]``, written by `prefetch_experts`: ids of the experts that it copies, -1 for none, and
            their rows. Only early calls fill the first entry. `fetch_experts` sets ids of unneeded experts to -1.
        resume: int32 ``[COPY_PROGRAMS]``, the first job of each program that copies ahead.
        totals: int64 ``[4]``, over all calls: experts needed; experts that `fetch_experts` copied; experts that
            `prefetch_experts` copied and that were needed; experts that it copied and that were not.
        gates, outputs, whole: `copied_parts` of w1 and w3, of w2, and of all three.
    """

    host: tuple[ExpertStack, ExpertStack, ExpertStack]
    device: tuple[ExpertStack, ExpertStack, ExpertStack]
    row: Tensor
    owner: Tensor
    uses: Tensor
    first: int
    staged: int
    found: Tensor
    moves: Tensor
    num_moves: Tensor
    ahead: Tensor
    resume: Tensor
    totals: Tensor
    gates: CopiedParts
    outputs: CopiedParts
    whole: CopiedParts


class CopiedParts(NamedTuple):
    """Tensors of an expert as `copy_experts_kernel` copies them, in units of `COPY_BYTES`.

    Attributes:
        table: int64 ``[parts, 4]`` on the device: addresses of the first expert in host memory and of the first row
            on the device, bytes of an expert, and the number of the part's first unit.
        units: of one expert; aligned: addresses and sizes are multiples of 16 bytes.
    """

    table: Tensor
    units: int
    aligned: bool


COPY_BYTES = 16384
"""Bytes that a program copies at once: 8 loads of 16 bytes in flight for each of 128 threads."""
COPY_PROGRAMS = 512
"""Programs that copy, at most; a power of two."""


def expert_parts(stacks: Sequence[ExpertStack]) -> list[Tensor]:
    """Tensors of stacks, ``[E, ...]`` each: weights, scales and exponents, as far as the format has them."""
    return [part for stack in stacks for part in stack if part is not None]


def copied_parts(host: Sequence[ExpertStack], device: Sequence[ExpertStack]) -> CopiedParts:
    """Parts of `HostExperts`; all tensors are contiguous, and pinned in host memory if the device is a GPU.

    Raises:
        ValueError: stacks of different formats, or not contiguous.
    """
    sources, targets = expert_parts(host), expert_parts(device)
    where, units = targets[0].device, 0
    rows: list[list[int]] = []
    for source, target in zip(sources, targets, strict=True):
        if source.dtype != target.dtype or source.shape[1:] != target.shape[1:]:
            raise ValueError(
                f"experts in host memory are {source.dtype} {list(source.shape)}, and rows for them on the device "
                f"{target.dtype} {list(target.shape)}: dtypes and all sizes but the first must be equal"
            )
        if not source.is_contiguous() or not target.is_contiguous():
            raise ValueError("stacks of experts must be contiguous to be copied")
        if where.type == "cuda" and not (source.is_cuda or source.is_pinned()):
            raise ValueError("experts in host memory must be pinned: a GPU reads no other memory of the host")
        nbytes = source[0].nbytes
        rows.append([source.data_ptr(), target.data_ptr(), nbytes, units])
        units += -(-nbytes // COPY_BYTES)
    aligned = all(value % 16 == 0 for row in rows for value in row[:3])
    return CopiedParts(torch.tensor(rows, dtype=torch.int64, device=where), units, aligned)


class ExpertsCall(NamedTuple):
    """Arguments of `moe_experts`.

    Attributes:
        x: ``[T, D]`` float32, bfloat16 or float16.
        experts: ids ``[T, k]`` in 0 .. E - 1, or -1 for an expert of another rank, which contributes 0.
        weights: float32 ``[T, k]``.
        w1, w3: stacks of ``[E, I, D]``; w2: of ``[E, D, I]``. All have one format.
        limit: clamp of `swiglu`, 0 for none.
        weigh_output: weights multiply the outputs of ``w2`` (DeepSeek-V3) instead of its inputs (V4). The two differ
            by rounding.
        input_format: how products with quantised weights read their input, per token. Groups of neither 128 nor 32
            channels are computed in plain torch.
        add: ``[T, D]``, added to the sum before it is rounded.
        num_routed: experts that the router chooses from, including other ranks' experts; default: E. For speed only.
        add_ready: event of another stream that completes ``add``: only the sum waits for it. CUDA only.
        slots: the row of the stacks that holds each expert; the stacks then need not have E rows. None: expert e is in
            row e. The result is the same to the bit.
    """

    x: Tensor
    experts: Tensor
    weights: Tensor
    w1: ExpertStack
    w3: ExpertStack
    w2: ExpertStack
    limit: float
    weigh_output: bool = False
    input_format: InputFormat = UNQUANTIZED
    add: Tensor | None = None
    num_routed: int | None = None
    add_ready: torch.cuda.Event | None = None
    slots: ExpertSlots | None = None

    @property
    def rows(self) -> Tensor | None:
        """Rows of the stacks, by expert; None: expert e is in row e."""
        return None if self.slots is None else self.slots.rows

    @property
    def num_experts(self) -> int:
        """Number of experts, the bound of valid ids."""
        return len(self.w1.weight if self.rows is None else self.rows)

    def wait_for(self, ready: str) -> None:
        """Makes later launches wait for an event of ``slots``, if it has one."""
        event = getattr(self.slots, ready, None)
        if event is not None:
            event.wait()
