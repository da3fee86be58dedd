"""Mixture of experts: hash routing in V4's first layers, scored routing elsewhere, group-limited in V3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deepseek_attn.config.model import AnyConfig, AnySpec
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.kernels.moe import (
    ExpertRange,
    HashRouting,
    moe_experts,
    moe_route,
    swiglu,
)
from deepseek_attn.kernels.moe.types import UNGROUPED, ExpertGroups, ExpertsCall, ExpertSlots, ExpertStack, Router
from deepseek_attn.layers.expert_memory import DISK, RESIDENT, ExpertMemory
from deepseek_attn.layers.experts import ExpertLinear
from deepseek_attn.layers.linear import Linear, multi_linear
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.layers.split import shard_unit, splits_widths
from deepseek_attn.layers.weights import CheckpointModule, Shard, SlotKind, WeightSlot, check_finite
from deepseek_attn.models.file_experts import FileExperts
from deepseek_attn.models.host_experts import LayerExperts
from deepseek_attn.utils.device import run_beside
from deepseek_attn.utils.tracing import traced


class Gate(CheckpointModule):
    """The router: experts of each token and their weights.

    Scored layers choose the highest ``score + bias``; the bias does not enter the weights. Hash layers look experts up
    by token id (``tid2eid``), and scores only weigh them. With a ``shard`` of the experts, ids count from its first one
    on, and are -1 for others. A model whose ``dtype`` is not float32 keeps a bfloat16 weight: products with it take a
    third of the time on a GPU and differ in the rounding of sums alone. Else the weight is float32.
    """

    groups = UNGROUPED
    weight: torch.Tensor
    bias: torch.Tensor
    tid2eid: torch.Tensor

    def __init__(
        self,
        config: AnyConfig,
        spec: AnySpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shard: Shard | None = None,
    ):
        super().__init__(device)
        self.local_experts = None if shard is None else ExpertRange(shard.start, shard.size)
        self.topk, self.factor = config.num_experts_per_tok, config.routed_scaling_factor
        self.normalize, self.score = config.normalizes_weights, config.scoring_func
        self.hash = spec.hash_routing
        kept = None if dtype == torch.float32 else torch.bfloat16
        self.declare("weight", (config.n_routed_experts, config.hidden_size), torch.float32, kept=kept)
        if self.hash:
            table, check = (config.vocab_size, self.topk), partial(check_experts, config.n_routed_experts)
            self.declare("tid2eid", table, torch.int64, kind=SlotKind.INT, check=check)
        else:
            self.declare("bias", (config.n_routed_experts,), torch.float32, check=check_finite)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [T, hidden_size]``, ``token_ids [T]`` -> expert ids ``[T, k]`` and float32 weights ``[T, k]``."""
        return moe_route(x, self.router, self._hashed(token_ids), self.local_experts)

    @property
    def router(self) -> Router:
        """The parameters of `forward`, for the op."""
        bias = None if self.hash else self.bias
        return Router(self.weight, self.topk, self.score, self.factor, self.normalize, bias, self.groups)

    def _hashed(self, token_ids: torch.Tensor) -> HashRouting | None:
        return HashRouting(self.tid2eid, token_ids) if self.hash else None

    def all_experts(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The expert ids of `forward`, counted over the experts of all ranks: ``[T, k]``."""
        return moe_route(x, self.router, self._hashed(token_ids))[0]

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """The expert ids of `forward` of a layer without hash routing, for an x that is not yet its final one."""
        return self(x, x.new_empty(0, dtype=torch.int64))[0]

    def lookup(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The expert ids of `forward` of a layer with hash routing, which follow from the token ids alone."""
        experts = self.tid2eid[token_ids]
        if self.local_experts is None:
            return experts
        first, count = self.local_experts
        experts = experts - first
        return torch.where((experts >= 0) & (experts < count), experts, -1)

    def weigh(self, x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of `forward` for given experts: int64 ``[T, k]``, counted over the experts of all ranks."""
        given = HashRouting(experts.contiguous(), torch.arange(len(x), dtype=torch.int64, device=x.device))
        return moe_route(x, self.router._replace(bias=None), given, self.local_experts)


class GroupLimitedGate(Gate):
    """A gate of DeepSeek-V3: experts come from the best ``topk_group`` of ``n_group`` groups; see `ExpertGroups`."""

    def __init__(
        self,
        config: DeepseekV32Config,
        spec: AnySpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shard: Shard | None = None,
    ):
        super().__init__(config, spec, dtype, device, shard)
        self.groups = ExpertGroups(config.n_group, config.topk_group)


class MLP(CheckpointModule):
    """``w2(swiglu(w1 x, w3 x))``: the expert that every token goes through, or a layer without experts.

    Args:
        inner: width between the projections.
        limit: clamp of ``swiglu``.
        split: this rank's shard of a dimension of the inner width (see `Parallel.shard`); outputs then have to be
            summed over the ranks.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        limit: float,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        split: Callable[[int, int], Shard | None] = lambda dim, total: None,
    ):
        super().__init__(device)
        self.limit = limit
        self.w1 = Linear(hidden, inner, numerics, dtype, device, shard=split(0, inner))
        self.w3 = Linear(hidden, inner, numerics, dtype, device, shard=split(0, inner))
        self.w2 = Linear(inner, hidden, numerics, dtype, device, shard=split(1, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = multi_linear(x, [self.w1, self.w3])
        (y,) = multi_linear(swiglu(gate, up, self.limit, x.dtype), [self.w2])
        return y


class Experts(CheckpointModule):
    """The routed experts (checkpoint: ``ffn.experts.J.w1 / w2 / w3``), each projection stacked over the experts.

    Args:
        weigh_output: an expert's weight multiplies its output (DeepSeek-V3) instead of the input of ``w2`` (V4). The
            two differ by rounding.
        shard: the experts of this rank, over which outputs are summed; None for all of them.
        memory: where the experts are kept.
        width: this rank's channels of the inner width of each expert, over which outputs are summed; None for all.

    Attributes:
        rows: rows on the GPU for experts in host memory or in files; None if the experts are in the memory of their
            device, or in files on a CPU.
    """

    rows: LayerExperts | FileExperts | None = None

    def __init__(
        self,
        config: AnyConfig,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        weigh_output: bool = False,
        shard: Shard | None = None,
        memory: ExpertMemory = RESIDENT,
        width: Shard | None = None,
    ):
        super().__init__(device)
        self.weigh_output, self.memory = weigh_output, memory
        self.count, self.limit = config.n_routed_experts, config.swiglu_limit
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        first, kept = (shard.start, shard.size) if shard else (0, self.count)
        columns = width and replace(width, dim=1)
        self.w1 = ExpertLinear(kept, hidden, inner, numerics, dtype, device, first, memory, width)
        self.w3 = ExpertLinear(kept, hidden, inner, numerics, dtype, device, first, memory, width)
        self.w2 = ExpertLinear(kept, inner, hidden, numerics, dtype, device, first, memory, columns)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        for index in range(self.count):
            for name in ("w1", "w2", "w3"):
                yield f"{index}.{name}.weight", getattr(self, name).expert_slot(index)

    def forward(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        add: torch.Tensor | None = None,
        add_ready: torch.cuda.Event | None = None,
        slots: ExpertSlots | None = None,
    ) -> torch.Tensor:
        """Weighted sum of each token's experts: ``x [T, D]``, ``experts`` and ``weights [T, k]`` -> float32 ``[T, D]``.

        With ``add [T, D]``, the dtype of x: the sum is rounded after the addition, which waits for ``add_ready``.
        ``slots``: of ``rows.find``, if it was called.
        """
        options = self.limit, self.weigh_output, self.w1.input_format, add, self.count, add_ready
        if self.memory.kind == DISK and self.rows is None:
            with self._cached_stacks(experts) as stacks:
                return moe_experts(ExpertsCall(x, experts, weights, *stacks, *options))
        if self.rows is None:
            return moe_experts(ExpertsCall(x, experts, weights, *self.stacks(), *options))
        slots = self.rows.find(experts) if slots is None else slots
        out = moe_experts(ExpertsCall(x, experts, weights, *self.rows.stacks, *options, slots))
        self.rows.release()
        return out

    def stacks(self) -> tuple[ExpertStack, ExpertStack, ExpertStack]:
        """All experts, in the order in which `moe_experts` takes the projections."""
        return _stack(self.w1), _stack(self.w3), _stack(self.w2)

    @property
    def projections(self) -> tuple[ExpertLinear, ExpertLinear, ExpertLinear]:
        """In the order in which `moe_experts` takes their stacks."""
        return self.w1, self.w3, self.w2

    @contextmanager
    def _cached_stacks(self, experts: torch.Tensor) -> Iterator[tuple[ExpertStack, ExpertStack, ExpertStack]]:
        """Stacks that read the experts of a step from the checkpoint's files as the op reaches them."""
        tokens = needed_experts(experts)
        caches = [linear.opened_cache for linear in self.projections]
        try:
            hits = [cache.begin(tokens) for cache in caches]
            caches[0].stats.count(hits[0], len(tokens))
            yield _lazy_stack(self.w1), _lazy_stack(self.w3), _lazy_stack(self.w2)
        finally:
            for cache in caches:
                cache.end()


def _stack(linear: ExpertLinear) -> ExpertStack:
    """Weights of a projection, for the op; in host memory if the experts are kept there."""
    weights = linear.loaded
    return ExpertStack(weights["weight"], weights["scale"], linear._buffers["exponent"])


def needed_experts(experts: torch.Tensor) -> dict[int, int]:
    """Tokens that use each expert of a routing ``[T, k]``, by its number in increasing order; waits for the device."""
    found = experts.unique(return_counts=True)
    return {expert: count for expert, count in zip(*(part.tolist() for part in found), strict=True) if expert >= 0}


def check_experts(num_experts: int, table: torch.Tensor) -> None:
    """ValueError for a hash table of other experts: kernels index weights by its entries, unchecked."""
    least, most = table.aminmax()
    if least < 0 or most >= num_experts:
        raise ValueError(
            f"it names experts {int(least)} to {int(most)}, and n_routed_experts is {num_experts}: "
            "experts are 0 to n_routed_experts - 1"
        )


class _CachedRows:
    """One tensor of each expert of a projection's cache, indexed by expert like a stack's tensor."""

    def __init__(self, linear: ExpertLinear, part: int):
        self.linear, self.part = linear, part

    def __len__(self) -> int:
        return self.linear.opened_cache.experts

    def __getitem__(self, expert: int) -> torch.Tensor | None:
        return self.linear.opened_cache.get(expert, self.linear.convert)[self.part]


def _lazy_stack(linear: ExpertLinear) -> ExpertStack:
    """Weights of a projection that stay in the checkpoint, for the op in plain torch, which reads them by expert."""
    rows: list[Any] = [_CachedRows(linear, part) for part in (0, 1)]
    return ExpertStack(rows[0], None if linear.template is None or linear.template[1] is None else rows[1])


class MoE(CheckpointModule):
    """Routed experts plus the shared one. Of several ranks, each has a shard of every expert; see `splits_widths`.

    Where widths do not divide, each has some of the routed experts. With data-parallel attention, each has all of the
    shared one, for its own tokens.
    """

    def __init__(
        self,
        config: AnyConfig,
        spec: AnySpec,
        numerics: Numerics,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        parallel: Parallel | None = None,
        memory: ExpertMemory = RESIDENT,
    ):
        super().__init__(device)
        self.parallel = parallel = parallel or Parallel.single()
        by_width = splits_widths(config, parallel.world)
        shard = None if by_width else parallel.shard(0, config.n_routed_experts)
        width = parallel.shard(0, config.moe_intermediate_size) if by_width else None
        if grouped := isinstance(config, DeepseekV32Config):
            self.gate = GroupLimitedGate(config, spec, dtype, device, shard)
        else:
            self.gate = Gate(config, spec, dtype, device, shard)
        self.experts = Experts(config, numerics, dtype, device, grouped, shard, memory, width)
        inner = config.moe_intermediate_size * config.n_shared_experts
        limit, split = config.swiglu_limit, partial(parallel.token_shard, unit=shard_unit(config, numerics))
        self.shared_experts = MLP(config.hidden_size, inner, limit, numerics, dtype, device, split)

    @traced("moe")
    def forward(self, x: torch.Tensor, token_ids: torch.Tensor, hidden: Any = None) -> torch.Tensor:
        """``x [T, hidden_size]``, ``token_ids [T]`` -> ``[T, hidden_size]``.

        hidden: the block's state before its experts, from which the next block predicts its own; see `expect_experts`.
        """
        rows = self.experts.rows
        if not isinstance(rows, LayerExperts):
            shared = self._shared(x)
            everyone, token_ids = self._gather(x, token_ids)
            routed = self.experts(everyone, *self.gate(everyone, token_ids), *shared)
            return self.parallel.sum_experts(routed, len(x))
        everyone, token_ids = self._gather(x, token_ids)
        hidden = hidden if len(x) else None  # a rank without tokens of its own has nothing to predict from
        if hidden is not None:
            rows.predict(hidden, len(everyone) * self.gate.topk)
        experts, weights = self.gate(everyone, token_ids)
        slots = rows.find(experts)
        shared = self._shared(x)  # behind the choice of rows, which its many programs would delay
        if hidden is not None and rows.look_ahead(hidden, experts):
            slots = slots._replace(beside_copies=True)
        routed = self.experts(everyone, experts, weights, *shared, slots)
        return self.parallel.sum_experts(routed, len(x))

    def _gather(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of all ranks, and their ids if routing reads them."""
        everyone = self.parallel.gather_tokens(x)
        return everyone, self.parallel.gather_tokens(token_ids) if self.gate.hash else token_ids

    def mixture(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """This rank's routed experts and its part of the shared one: ``experts`` and ``weights [T, k]`` of a gate."""
        return self.experts(x, experts, weights, *self._shared(x))

    def _shared(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """This rank's part of the shared expert, computed in parallel with the next launches."""
        return run_beside(lambda: self.parallel.own_tokens(self.shared_experts(x) if len(x) else x), x.device)
