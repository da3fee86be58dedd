"""Bytes before anything is allocated: fixed per sequence, marginal per token, per layer and in total."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_attn.cache.layout import (
    STATE,
    WINDOW,
    WINDOW_PAGE,
    CacheLayout,
    PoolSpec,
    make_layout,
    ratio_group,
    snapshot_window_pages,
    window_pages_per_sequence,
)
from deepseek_attn.config.defaults import DEFAULT_MAX_ROLLBACK
from deepseek_attn.config.model import AnyConfig, AnySpec
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.indexer.types import SCORE_BYTES
from deepseek_attn.utils.sizes import largest
from deepseek_attn.utils.workspace import aligned_bytes

DEFAULT_ATTENTION = AttentionOptions()
MAX_SEQUENCES = 1 << 20  # of `sequences_that_fit`


@dataclass(frozen=True)
class LayerPlan:
    """Cache bytes of one layer.

    Attributes:
        fixed: per sequence, whatever its length (window pages and compressor rings).
        per_token: marginal bytes per token of context (compressed entries and index keys).
        index_per_token: the part of ``per_token`` that is index keys.
    """

    name: str
    kind: str
    fixed: int
    per_token: float
    index_per_token: float


@dataclass(frozen=True)
class Plan:
    """Bytes that a runner with these limits allocates.

    Attributes:
        layers: per layer; fixed, per_token: sums over the layers.
        caches: bytes of all pools, exactly the bytes that `CachePools` allocates.
        shared: the part of ``caches`` outside of sequences: null pages, and window pages of the running step.
        workspace: bytes reserved for gathered keys and selected indices.
        index_logits: peak bytes of the indexer's scores while they exist.
        rope: bytes of the rotary tables.
    """

    layout: CacheLayout
    layers: tuple[LayerPlan, ...]
    caches: int
    workspace: int
    index_logits: int
    rope: int

    @property
    def fixed(self) -> int:
        return sum(layer.fixed for layer in self.layers)

    @property
    def per_token(self) -> float:
        return sum(layer.per_token for layer in self.layers)

    @property
    def shared(self) -> int:
        layout = self.layout
        step = {WINDOW: 1 + layout.max_num_batched_tokens // WINDOW_PAGE}
        return sum(step.get(pool.group, 1) * pool.page_bytes for pool in layout.pools)

    @property
    def snapshots(self) -> int:
        """The part of ``caches`` for kept prefixes: window and part-full pages, and state rows."""
        layout = self.layout
        pages = {ratio_group(ratio): 1 for ratio in layout.ratios} | {WINDOW: snapshot_window_pages(layout.window)}
        bytes_per_snapshot = sum(
            pages.get(pool.group, 0) * pool.page_bytes + pool.snapshot_bytes for pool in layout.pools
        )
        return layout.max_snapshots * bytes_per_snapshot

    @property
    def total(self) -> int:
        return self.caches + self.workspace + self.index_logits + self.rope


def make_plan(
    config: AnyConfig,
    numerics: Numerics,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_rollback: int = DEFAULT_MAX_ROLLBACK,
    max_snapshots: int = 0,
    kv_cache_bytes: int | None = None,
    attention: AttentionOptions = DEFAULT_ATTENTION,
) -> Plan:
    """Plan of a runner with the given limits; allocates nothing."""
    limits = (max_model_len, max_num_seqs, max_num_batched_tokens, max_rollback)
    layout = make_layout(config, numerics, dtype, *limits, max_snapshots=max_snapshots, kv_cache_bytes=kv_cache_bytes)
    ropes = {spec.rope for spec in config.all_layers}
    return Plan(
        layout,
        tuple(plan_layer(spec, layout) for spec in config.all_layers),
        layout.nbytes(),
        workspace_bytes(config, numerics, dtype, layout, attention),
        index_logits_bytes(config, layout),
        sum(max_model_len * rope.dim * 4 for rope in ropes),
    )


def plan_layer(spec: AnySpec, layout: CacheLayout) -> LayerPlan:
    """Cache bytes of one layer of a layout."""
    pools = [pool for pool in layout.pools if pool.layer == spec.name]
    per_token = {pool.kind: bytes_per_token(pool, layout) for pool in pools}
    fixed = sum(fixed_pages(pool, layout) * pool.page_bytes for pool in pools)
    return LayerPlan(spec.name, spec.kind, fixed, sum(per_token.values()), per_token.get("index", 0.0))


def bytes_per_token(pool: PoolSpec, layout: CacheLayout) -> float:
    """Marginal bytes per token of a pool: its page over the tokens that a page covers; 0 for fixed pools."""
    if pool.group in (WINDOW, STATE):
        return 0.0
    return pool.page_bytes / layout.spans[pool.group].page_tokens


def fixed_pages(pool: PoolSpec, layout: CacheLayout) -> int:
    """Pages of a pool that every sequence holds."""
    if pool.group == WINDOW:
        return window_pages_per_sequence(layout.window, layout.max_rollback)
    return 1 if pool.group == STATE else 0


def workspace_bytes(
    config: AnyConfig,
    numerics: Numerics,
    dtype: torch.dtype,
    layout: CacheLayout,
    attention: AttentionOptions = DEFAULT_ATTENTION,
) -> int:
    """Rows that the keys of prefill requests are gathered to, and the buffer for selected entries."""
    spec = AttentionSpec.of(config, numerics, dtype)
    rows = attention.workspace_rows(spec, [layer.ratio for layer in config.all_layers], layout)
    has_indexer = any(layer.has_indexer for layer in config.all_layers)
    buffer = layout.max_num_batched_tokens * config.index_sizes.topk * 4 if has_indexer else 0
    return aligned_bytes((rows, config.head_dim), dtype) + buffer


def index_logits_bytes(config: AnyConfig, layout: CacheLayout) -> int:
    """Peak of the scores of one block of queries against the longest context."""
    ratios = [spec.ratio for spec in config.all_layers if spec.has_indexer]
    if not ratios:
        return 0
    entries = max(layout.max_model_len // min(ratios), 1)
    return 4 * entries * min(max(SCORE_BYTES // (4 * entries), 1), layout.max_num_batched_tokens)


def sequences_that_fit(
    plan_for: Callable[[int, int], Plan],
    memory: int,
    max_model_len: int,
    total_for: Callable[[int, int], int] | None = None,
) -> int:
    """Sequences of ``max_model_len`` tokens in ``memory`` bytes; ``plan_for(max_model_len, max_num_seqs)``.

    Args:
        total_for: the total in bytes for a value, if that takes longer than a plan; the result then fits and is within
            1 % of the largest value that does. Default: `Plan.total`.
    """
    return _most(
        lambda count: plan_for(max_model_len, max(count, 1)),
        total_for and (lambda count: total_for(max_model_len, max(count, 1))),
        memory,
        MAX_SEQUENCES,
    )


def tokens_that_fit(
    plan_for: Callable[[int, int], Plan],
    memory: int,
    max_num_seqs: int,
    limit: int,
    total_for: Callable[[int, int], int] | None = None,
) -> int:
    """Tokens per sequence for ``max_num_seqs`` sequences in ``memory`` bytes, at most ``limit``."""
    return _most(
        lambda length: plan_for(max(length, 1), max_num_seqs),
        total_for and (lambda length: total_for(max(length, 1), max_num_seqs)),
        memory,
        limit,
    )


def _most(plan_for: Callable[[int], Plan], total_for: Callable[[int], int] | None, memory: int, limit: int) -> int:
    """Largest value whose total fits; with ``total_for``, which is called a few times, within 1 % of the largest."""
    if total_for is None:
        return largest(lambda value: plan_for(value).total <= memory, 0, limit)

    def rest(value: int) -> int:
        return total_for(value) - plan_for(value).caches

    def fit(slope: float) -> int:
        """Values that fit if the remaining memory grows at this rate."""
        return largest(lambda value: plan_for(value).caches + least + slope * (value - 1) <= memory, 0, limit)

    least = rest(1)
    low, high = 0, fit(0)
    value = high
    while high - low > low // 100:
        width, more = high - low, rest(value)
        if plan_for(value).caches + more <= memory:
            low = value
        else:
            high = value - 1
        guess = fit((more - least) / max(value - 1, 1))
        if high - low > width // 2:  # other memory grows in steps, along which guesses would advance slowly
            guess = (low + high + 1) // 2
        value = min(max(guess, low + 1), high)
    return low
