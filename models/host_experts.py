"""Routed experts in pinned host memory: the rows on the GPU that hold some of them, and the order of the copies.

All layers with experts of one format share stacks on the GPU. Each layer caches S of its E experts in rows of its own.
Behind these rows are two areas of E - S rows, which layers use in turn, for experts that one call alone needs.

* Few tokens: `fetch_experts` copies the experts that the tokens chose and the GPU lacks, on the stream of the step.
* Many tokens need nearly every expert: all experts that are not cached are copied ahead of the routing, on a stream of
  its own, while the layer before computes. The copies read the residents on the device, so that the bus carries E - S
  experts of a layer; DMA would need the host to know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deepseek_attn.kernels.moe import ExpertStack, HostExperts, count_expert_uses, fetch_experts
from deepseek_attn.kernels.moe.types import copied_parts, expert_parts
from deepseek_attn.layers.expert_memory import ExpertStats
from deepseek_attn.utils.sizes import show_bytes

STREAM_LOAD = 2
"""Pairs of a token and an expert, per expert of the layer, from which on all experts are copied ahead: of random
routings 0.86 of the experts are needed then."""
AREAS = 2  # for the layer that computes, and for the next one's copies

Stacks = tuple[ExpertStack, ExpertStack, ExpertStack]
"""w1, w3 and w2."""


class ExpertFormat(NamedTuple):
    """Layers whose experts have the same tensors.

    Attributes:
        experts: E; nbytes: of one expert; layers: their number.
    """

    experts: int
    nbytes: int
    layers: int

    def held(self, cached: int) -> int:
        """Bytes on the GPU if each layer caches this number of experts, or all that it has."""
        cached = min(cached, self.experts)
        return self.nbytes * (self.layers * cached + AREAS * (self.experts - cached))


def cached_experts(formats: Sequence[ExpertFormat], budget: int) -> int:
    """The largest number of experts that each layer may cache within ``budget`` bytes on the GPU.

    Raises:
        ValueError: the budget does not suffice for one of each layer.
    """
    most = max(form.experts for form in formats)
    held = {cached: sum(form.held(cached) for form in formats) for cached in range(1, most + 1)}
    fitting = [cached for cached, nbytes in held.items() if nbytes <= budget]
    if not fitting:
        layers = sum(form.layers for form in formats)
        raise ValueError(
            f"{budget:,} bytes of GPU memory for routed experts in host memory: the least is {min(held.values()):,}, "
            f"for one expert of each of {layers} layers, and twice the other experts of a layer, which prompts are "
            "computed from. Raise expert_cache_bytes, free GPU memory, or use more ranks"
        )
    return fitting[-1]


class LayerExperts:
    """The experts of one layer, for its `moe_experts`.

    Attributes:
        state: rows and copies of the layer.
        stream: where copies ahead run; None but on a GPU.
        following: the layer whose experts are copied while this one computes.
    """

    def __init__(self, state: HostExperts, stream: torch.cuda.Stream | None):
        self.state, self.stream = state, stream
        self.following: LayerExperts | None = None
        self._arrived: torch.cuda.Event | None = None
        self._is_ahead = False

    @property
    def stacks(self) -> Stacks:
        """Stacks on the GPU, which `find` names the rows of."""
        return self.state.device

    @property
    def has_all(self) -> bool:
        """Every expert of the layer has a row of its own."""
        return len(self.state.owner) == len(self.state.row)

    def wants_all(self, pairs: int) -> bool:
        """Whether a call with this number of pairs of a token and an expert takes all experts."""
        return not self.has_all and pairs >= STREAM_LOAD * len(self.state.row)

    def find(self, experts: Tensor) -> Tensor:
        """The row of each expert of a routing ``[T, k]``, once the next launches run: ``slots`` of `moe_experts`."""
        if self.has_all:
            return self.state.row
        wants_all = self.wants_all(experts.numel())
        if not self._is_ahead and not wants_all:
            return fetch_experts(self.state, experts.contiguous())
        self.copy_ahead()
        if self.following is not None and wants_all:
            self.following.copy_ahead()
        self.finish()
        count_expert_uses(self.state, experts.contiguous())
        return self.state.found

    def copy_ahead(self) -> None:
        """Starts to copy all experts that are not cached, unless that has been done for the coming call.

        The copies wait for everything launched so far, such as the products of the last layer that used their rows.
        """
        if self._is_ahead or self.has_all:
            return
        self._is_ahead = True
        if self.stream is None:
            fetch_experts(self.state)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            fetch_experts(self.state)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def finish(self) -> None:
        """Lets the next launches wait for copies ahead, used or not."""
        if self._arrived is not None:
            self._arrived.wait()
        self._is_ahead, self._arrived = False, None


@dataclass(eq=False)
class ExpertRows:
    """The rows of all layers of a model.

    Attributes:
        layers: in the order in which a step calls them, then layers that drafts call.
        nbytes: on the GPU; cached: experts that each layer caches, or all that it has.
    """

    layers: list[LayerExperts]
    nbytes: int
    cached: int

    @classmethod
    def of(
        cls, stacks: Sequence[Stacks], device: torch.device, budget: int | None, in_turn: int | None = None
    ) -> ExpertRows:
        """Allocates rows for layers whose experts are in host memory, and copies each layer's first experts to them.

        Args:
            stacks: of each layer.
            budget: bytes; None: one expert of each layer is cached (for a model without memory).
            in_turn: layers, from the first one on, that a step calls in order; default: all.

        Raises:
            ValueError: see `cached_experts`.
        """
        kinds = expert_formats(stacks)
        cached = 1 if budget is None else cached_experts([form for form, _ in kinds], budget)
        stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        layers: dict[int, LayerExperts] = {}
        for form, found in kinds:
            rows = min(cached, form.experts)
            shared = _empty_rows(stacks[found[0]], len(found) * rows + AREAS * (form.experts - rows), device)
            for place, number in enumerate(found):
                staged = len(found) * rows + place % AREAS * (form.experts - rows)
                state = _with_first_experts(stacks[number], shared, place * rows, rows, staged)
                layers[number] = LayerExperts(state, stream)
        ordered = [layers[number] for number in range(len(stacks))]
        for layer, following in pairwise(ordered[:in_turn]):
            layer.following = following
        return cls(ordered, sum(form.held(cached) for form, _ in kinds), cached)

    @property
    def stats(self) -> ExpertStats:
        """Uses of experts by tokens that fetched them; waits for the device. Prompts, which copy all, do not count."""
        uses, misses, nbytes = 0, 0, 0
        for layer in self.layers:
            needed, copied = layer.state.totals.tolist()
            uses, misses = uses + needed, misses + copied
            nbytes += copied * sum(part[0].nbytes for part in expert_parts(layer.state.host))
        return ExpertStats(uses - misses, misses, nbytes)

    def describe(self) -> str:
        """One line for people."""
        stats, count = self.stats, max(len(layer.state.row) for layer in self.layers)
        return (
            f"experts: {self.cached} of {count} per layer on the GPU ({show_bytes(self.nbytes)} with the experts of "
            f"prompts); {stats.hits:,} of {stats.hits + stats.misses:,} uses were there ({stats.hit_rate:.0%}), "
            f"{show_bytes(stats.bytes_read)} fetched"
        )

    def begin(self, pairs: int) -> None:
        """Starts the first layer's copies for a step with this number of pairs, before its embedding is computed."""
        if self.layers[0].wants_all(pairs):
            self.layers[0].copy_ahead()

    def end(self) -> None:
        """Lets the next launches wait for copies that no layer took: a step failed, or left layers out."""
        for layer in self.layers:
            layer.finish()

    def watch(self, model: nn.Module, topk: int) -> list[RemovableHandle]:
        """Calls `begin` and `end` around each call of ``model(token_ids, ...)``; topk: experts of a token."""
        before = model.register_forward_pre_hook(lambda module, args: self.begin(args[0].numel() * topk))
        return [before, model.register_forward_hook(lambda *args: self.end(), always_call=True)]


def expert_formats(stacks: Sequence[Stacks]) -> list[tuple[ExpertFormat, list[int]]]:
    """The formats of layers with these stacks, each with the numbers of its layers."""
    kinds: dict[Any, list[int]] = {}
    for number, layer in enumerate(stacks):
        parts = tuple(None if part is None else (part.dtype, part.shape[1:]) for stack in layer for part in stack)
        kinds.setdefault((len(layer[0].weight), parts), []).append(number)

    def nbytes(layer: Stacks) -> int:
        return sum(part[0].nbytes for part in expert_parts(layer))

    return [(ExpertFormat(E, nbytes(stacks[found[0]]), len(found)), found) for (E, _), found in kinds.items()]


def _empty_rows(stacks: Stacks, rows: int, device: torch.device) -> Stacks:
    """Stacks of ``rows`` experts like those in host memory."""

    def empty(part: Tensor) -> Tensor:
        return torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device=device)

    w1, w3, w2 = (
        ExpertStack(empty(weight), *(None if part is None else empty(part) for part in others))
        for weight, *others in stacks
    )
    return w1, w3, w2


def _with_first_experts(host: Stacks, shared: Stacks, first: int, rows: int, staged: int) -> HostExperts:
    """State of a layer whose first experts are in its rows."""
    device, E = shared[0].weight.device, len(host[0].weight)
    for source, target in zip(expert_parts(host), expert_parts(shared), strict=True):
        target[first : first + rows].copy_(source[:rows], non_blocking=True)

    def filled(value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    row, owner = filled(-1, E), torch.arange(rows, dtype=torch.int32, device=device)
    row[:rows] = owner + first
    return HostExperts(
        host, shared, row, owner, filled(0, E), first, staged, filled(0, E), filled(0, 2, E), filled(0, 1),
        torch.zeros(2, dtype=torch.int64, device=device), copied_parts(host, shared),
    )  # fmt: skip
