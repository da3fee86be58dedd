"""Memory, traffic and step time of a model on ranks, predicted from floors and from a machine's measured rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from statistics import NormalDist

import torch

from deepseek_attn.cache.layout import CacheLayout, make_layout
from deepseek_attn.config.model import AnyConfig, AnySpec
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.estimates.floors import (
    ATTENTION,
    ENGRAM,
    EXPERTS,
    HEAD,
    NORMS,
    ROUTING,
    FloorWork,
    ModelWork,
    Product,
    StepShape,
    expected_experts,
)
from deepseek_attn.estimates.machines import FEW_ROWS, Machine
from deepseek_attn.layers.parallel import Parallel, exchanged
from deepseek_attn.layers.peers import PEER_RANKS
from deepseek_attn.layers.split import shard_unit, splits_widths

GPUS_PER_HOST = 8
OTHER, COMMUNICATION = "once per step", "communication"
ROUTED, ROUTED_WEIGHTS = "routed experts", "routed weights"


@dataclass(frozen=True)
class RankLayout:
    """Layout of a model over ranks and hosts.

    Attributes:
        dp_attention: data-parallel attention: each rank has other requests, and all weights of attention.
        per_host: GPUs of one host, that NVLink connects.
    """

    ranks: int
    dp_attention: bool = False
    per_host: int = GPUS_PER_HOST

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.per_host)

    @property
    def token_ranks(self) -> int:
        """Ranks that share heads and vocabulary."""
        return 1 if self.dp_attention else self.ranks

    def own(self, batch: int) -> int:
        """Requests of one rank, of ``batch`` in all."""
        return -(-batch // self.ranks) if self.dp_attention else batch

    def rank_config(self, config: AnyConfig) -> AnyConfig:
        """The config of one rank: heads, groups and vocabulary divided by the ranks."""
        names = ("num_attention_heads", "num_key_value_heads", "o_groups", "vocab_size")
        split = {name: getattr(config, name) // self.token_ranks for name in names if getattr(config, name, 1) > 1}
        return replace(config, **split)  # unchecked: token ids of a drafter lie outside a part of the vocabulary


@dataclass(frozen=True)
class Collective:
    """Exchanges of one kind in a step.

    Attributes:
        sent: bytes that each GPU sends, to GPUs of its host, in all of them; network: to other hosts.
    """

    name: str
    calls: int
    sent: int
    network: int
    microseconds: float


@dataclass(frozen=True)
class StepPrediction:
    """A step of ``shape`` on one rank: microseconds by stage, and its collectives."""

    shape: StepShape
    stages: dict[str, float]
    collectives: tuple[Collective, ...]

    @property
    def microseconds(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True)
class RankModel:
    """A model on the ranks of a machine.

    Attributes:
        dtype: of hidden states.
    """

    config: AnyConfig
    numerics: Numerics
    dtype: torch.dtype
    layout: RankLayout
    machine: Machine

    @cached_property
    def own(self) -> AnyConfig:
        return self.layout.rank_config(self.config)

    @cached_property
    def _own_work(self) -> ModelWork:
        return ModelWork(self.own, self.numerics, self.dtype)

    def step(self, batch: int, tokens: int, context: int) -> StepPrediction:
        """A step of ``batch`` requests of all ranks, each with ``tokens`` new tokens and ``context`` after it.

        Requests end there: V4.1's upper layers compute the rows that results of their last tokens need.
        """
        shape, work = StepShape(self.layout.own(batch), tokens, context), self._own_work
        caches = self._caches(shape)
        stages: dict[str, float] = defaultdict(float)
        for spec in self.own.layers:
            every = self.layout.dp_attention
            attention = work.attention(spec, caches, shape) if every else work.attention_to_end(spec, caches, shape)
            rows = (shape if every else work.shape_of(spec, shape)).rows
            expert_rows = rows * self.layout.ranks if every else rows
            stages[ATTENTION] += self.machine.attention(spec, tokens == 1).microseconds(attention, self.machine.rates)
            stages[EXPERTS] += self._time(EXPERTS, self._experts(spec, expert_rows, rows), expert_rows)
            stages[NORMS] += self._time(NORMS, work.norms(spec, rows), rows)
            stages[ROUTING] += self._time(ROUTING, work.routing(spec, expert_rows), expert_rows)
            if (engram := work.engram(spec, shape.rows)).bytes:  # as far from its floor as the head, a large linear too
                stages[ENGRAM] += self._time(HEAD, engram, rows)
        stages[HEAD] += self._time(HEAD, work.head(shape.batch), shape.batch)
        stages[OTHER] += self.machine.step_us
        collectives = tuple(self._collectives(shape)) if self.layout.ranks > 1 else ()
        stages[COMMUNICATION] = sum(collective.microseconds for collective in collectives)
        return StepPrediction(shape, dict(stages), collectives)

    def _time(self, stage: str, work: FloorWork, rows: int) -> float:
        costs = self.machine.few if rows <= FEW_ROWS else self.machine.many
        return costs[stage].microseconds(work, self.machine.rates)

    def _caches(self, shape: StepShape) -> CacheLayout:
        return make_layout(self.config, self.numerics, self.dtype, shape.context, shape.batch, max(shape.rows, 16), 16)

    def _mlp_part(self, size: int) -> int:
        """Bytes of the rank that has most of a dense MLP or shared expert with ``size`` bytes."""
        width, unit = self.config.moe_intermediate_size, shard_unit(self.config, self.numerics)
        shard = Parallel(0, self.layout.token_ranks).shard(0, width, unit)
        return size if shard is None else size * shard.size // width

    def _experts(self, spec: AnySpec, rows: int, own_rows: int) -> FloorWork:
        """Work of one rank's experts: its part of the routed ones for ``rows`` tokens, and of the shared one.

        Of the routed experts' weights it is the share of the rank that reads most, since all ranks wait for it.
        """
        config = self.config.draft_stages if spec.is_mtp and self.config.dspark is not None else self.config
        work, ranks = ModelWork(config, self.numerics, self.dtype), self.layout.ranks
        routed, shared = work.experts(spec, rows), work.experts(spec, own_rows)
        sizes = dict(routed.bytes)
        sizes["weights"] = self._mlp_part(sizes["weights"])
        if ROUTED_WEIGHTS in sizes:
            sizes[ROUTED_WEIGHTS] = round(sizes[ROUTED_WEIGHTS] * self._routed_share(config, rows))
        products = [
            Product(part.name, part.unit, part.flops // ranks) for part in routed.products if part.name == ROUTED
        ]
        products += [
            Product(part.name, part.unit, part.flops // self.layout.token_ranks)
            for part in shared.products
            if part.name != ROUTED
        ]
        return FloorWork(sizes, tuple(products))

    def chosen_experts(self, rows: int) -> float:
        """Expected number of different experts that ``rows`` tokens choose, on the rank that has most of them.

        Where each rank has a part of every expert, all of the chosen ones.
        """
        chosen = expected_experts(self.config.n_routed_experts, self.config.num_experts_per_tok, rows)
        parts = splits_widths(self.config, self.layout.ranks)
        return chosen if parts else chosen * self._routed_share(self.config, rows)

    def _routed_share(self, config: AnyConfig, rows: int) -> float:
        """Expected part of the chosen experts' weights that the rank with most of them reads."""
        if splits_widths(config, self.layout.ranks):
            return 1 / self.layout.ranks
        return busiest_share(config.n_routed_experts, config.num_experts_per_tok, rows, self.layout.ranks)

    def _collectives(self, shape: StepShape) -> Iterator[Collective]:
        layers, width = len(self.own.layers), shape.rows * self.config.hidden_size * self.dtype.itemsize
        if self.layout.dp_attention:
            hashed = sum(getattr(spec, "hash_routing", False) for spec in self.own.layers)
            yield self._collective("gather tokens", layers, width)
            yield self._collective("gather token ids", hashed, shape.rows * 8)
            yield self._collective("sum experts", layers, width)
        else:
            yield self._collective("sum", 2 * layers + 1, width, reduce=True)
            yield self._collective("gather logits", 1, shape.batch * self.own.vocab_size * 4)

    def _collective(self, name: str, calls: int, part: int, reduce: bool = False) -> Collective:
        """The exchange of messages of ``part`` bytes between all ranks; ``reduce``: the messages are summed."""
        layout, machine = self.layout, self.machine
        others = layout.ranks - 1
        if layout.hosts == 1 and layout.ranks in PEER_RANKS and exchanged(part, layout.ranks):
            sent = others * part * 2  # a number travels with every word
            time = machine.peers.latency_us + sent / machine.peers.bytes_per_second * 1e6
            return Collective(name, calls, calls * sent, 0, calls * time)
        rounds = 2 if reduce else 1
        sent = others * part * rounds // (layout.ranks if reduce else 1)  # in a ring
        outside = sent // layout.per_host if layout.hosts > 1 else 0  # hosts are joined by a ring per GPU
        between = rounds * (layout.hosts - 1)
        latency = machine.nccl.latency_us + machine.nccl.hop_us * (rounds * (others - 1) - between)
        latency += machine.network.latency_us * (layout.hosts > 1) + machine.network.hop_us * between
        transfer = max(sent / machine.nccl.bytes_per_second, outside / machine.network.bytes_per_second) * 1e6
        return Collective(name, calls, calls * sent, calls * outside, calls * (latency + transfer))


def busiest_share(experts: int, topk: int, rows: int, ranks: int) -> float:
    """Expected part of the chosen experts that the rank with most of them has; 1 / ``ranks`` if all are chosen.

    Tokens choose evenly, so the number of a rank's chosen experts is hypergeometric. The largest of these numbers,
    which add up to a constant, is taken from the order statistics of a normal distribution (Blom's approximation).
    """
    if ranks == 1:
        return 1.0
    chosen = expected_experts(experts, topk, rows)
    deviation = sqrt(chosen * (experts - chosen) / (experts - 1) / ranks)
    largest = chosen / ranks + deviation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return min(max(largest, 1.0), experts / ranks) / chosen
