"""Routed experts in pinned host memory: the rows of all layers on the GPU, and the copies that begin with a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deepseek_attn.kernels.moe import HostExperts
from deepseek_attn.kernels.moe.types import COPY_PROGRAMS, copied_parts, expert_parts
from deepseek_attn.layers.expert_memory import ExpertStats
from deepseek_attn.models.expert_rows import HOST_AREAS, RowRange, Stacks, divide_rows
from deepseek_attn.models.host_experts import AHEAD_COPIES, LayerExperts
from deepseek_attn.utils.sizes import show_bytes


@dataclass(eq=False)
class ExpertRows:
    """The rows of all layers of a model.

    Attributes:
        layers: in the order in which a step calls them, then layers that drafts call.
        leaders: the first layer of each area, in the order of a step.
        table: int32 ``[layers, ...]``, the row of each cached expert of each layer.
        nbytes: on the GPU; cached: experts that each layer caches, or all that it has.
    """

    layers: list[LayerExperts]
    leaders: list[LayerExperts]
    table: Tensor
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
        divided = divide_rows(stacks, device, budget, HOST_AREAS)
        streams = [torch.cuda.Stream(device, priority=-1) for _ in range(2)] if device.type == "cuda" else []
        width = -(-max(len(host[0].weight) for host in stacks) // 4) * 4  # rows of the table stay aligned
        table = torch.full((len(stacks), width), -1, dtype=torch.int32, device=device)
        layers = [
            LayerExperts(_with_first_experts(host, rows, table[number, : len(host[0].weight)]), rows.area, *streams)
            for number, (host, rows) in enumerate(zip(stacks, divided.layers, strict=True))
        ]
        last: dict[tuple[int, int], LayerExperts] = {}
        leaders = []
        for layer in layers[:in_turn]:
            before = last.get(area := (id(layer.stacks), layer.area))
            if before is None:
                leaders.append(layer)
            else:
                before.successor = layer
            last[area] = layer
        return cls(layers, leaders, table, divided.nbytes, divided.cached)

    @property
    def stats(self) -> ExpertStats:
        """Uses of experts by tokens that fetched them; waits for the device. Prompts, which copy all, do not count."""
        stats = ExpertStats()
        for layer in self.layers:
            needed, fetched, right, wrong = layer.state.totals.tolist()
            stats.count(needed - fetched - right, needed)
            stats.ahead, stats.dropped = stats.ahead + right, stats.dropped + wrong
            stats.bytes_read += (fetched + right) * sum(part[0].nbytes for part in expert_parts(layer.state.host))
        return stats

    def describe(self) -> str:
        """One line for people."""
        stats, count = self.stats, max(len(layer.state.row) for layer in self.layers)
        return (
            f"experts: {self.cached} of {count} per layer on the GPU ({show_bytes(self.nbytes)} with the experts of "
            f"prompts); {stats.hits:,} of {stats.hits + stats.misses:,} uses were there ({stats.hit_rate:.0%}), "
            f"{show_bytes(stats.bytes_read)} fetched; {stats.ahead:,} of the {stats.misses:,} others were predicted, "
            f"and {stats.dropped:,} that were not needed"
        )

    def begin(self, token_ids: Tensor, topk: int) -> None:
        """Starts the first copies for a step with these tokens ``[T]``, before their embedding is computed.

        If the step copies all experts, the host waits for the device once, to read which of them are cached.
        """
        leaders = [layer for layer in self.leaders if layer.wants_all(len(token_ids) * topk)]
        if not leaders:
            for layer in self.layers:
                layer.fetch_ahead(token_ids, topk)
            return
        if not self.table.is_meta:
            for layer, rows in zip(self.layers, self.table.tolist(), strict=True):
                layer.known = rows[: len(layer.state.row)]
        for layer in leaders:
            layer.copy_ahead()

    def end(self) -> None:
        """Lets the next launches wait for copies that no layer took: a step failed, or left layers out."""
        for layer in self.layers:
            layer.finish()

    def watch(self, model: nn.Module, topk: int) -> list[RemovableHandle]:
        """Calls `begin` and `end` around each call of ``model(token_ids, ...)``; topk: experts of a token."""
        before = model.register_forward_pre_hook(lambda module, args: self.begin(args[0], topk))
        return [before, model.register_forward_hook(lambda *args: self.end(), always_call=True)]


def _with_first_experts(host: Stacks, rows: RowRange, row: Tensor) -> HostExperts:
    """State of a layer whose first experts are in its rows; ``row``: int32 ``[E]`` of -1."""
    (stacks, first, cached, staged, _), device, E = rows, row.device, len(row)
    for source, target in zip(expert_parts(host), expert_parts(stacks), strict=True):
        target[first : first + cached].copy_(source[:cached], non_blocking=True)

    def filled(value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    owner = torch.arange(cached, dtype=torch.int32, device=device)
    row[:cached] = owner + first
    return HostExperts(
        host, stacks, row, owner, filled(0, E), first, staged, filled(0, E), filled(0, 2, E), filled(0, 1),
        filled(-1, 2, 1 + AHEAD_COPIES), filled(0, COPY_PROGRAMS), torch.zeros(4, dtype=torch.int64, device=device),
        copied_parts(host[:2], stacks[:2]), copied_parts(host[2:], stacks[2:]), copied_parts(host, stacks),
    )  # fmt: skip
