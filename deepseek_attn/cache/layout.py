"""Which pools a model needs, and their sizes: read by the allocator and by the planner.

Every kind of cache is paged, and page 0 of each group is a null page: freed window pages and padded rows point at it,
which keeps every read and write legal.

    group      holds                                     one page                        grows with
    window     K = V of the last tokens, every layer     64 tokens                       nothing (fixed per sequence)
    ratio R    compressed entries (+ indexer keys)       max(32, 256 // R) entries       tokens / R
    state      projections of tokens whose compression   one ring per sequence           nothing
               window is still open or may be reopened
    tokens     latent rows (+ indexer keys) of V3.2      64 tokens                       tokens

DeepSeek-V4 has the first three, DeepSeek-V3.2 only the last. V4.1's layers share entries and index keys; the layer that
makes them has the pools. Pools hold ``max_num_seqs`` sequences of ``max_model_len`` tokens at once. With
``kv_cache_bytes`` they hold the number of tokens that fits (`CacheLayout.fit_pages`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch

from deepseek_attn.cache.records import Record, make_index_record
from deepseek_attn.cache.records_v32 import LATENT_GROUP, make_v32_record
from deepseek_attn.cache.records_v41 import FP8_GROUP, make_v41_records
from deepseek_attn.config.defaults import DEFAULT_MAX_ROLLBACK
from deepseek_attn.config.model import AnyConfig, AnySpec, LayerSpec
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.config.v4 import DeepseekV4Base
from deepseek_attn.config.v32 import DeepseekV32Config, V32LayerSpec
from deepseek_attn.utils.sizes import largest

WINDOW_PAGE = TOKENS_PAGE = 64
WINDOW, STATE, TOKENS = "window", "state", "tokens"
PAGE_TOKENS = {WINDOW: WINDOW_PAGE, TOKENS: TOKENS_PAGE}  # of the groups with an entry per token


def ratio_group(ratio: int) -> str:
    return f"ratio{ratio}"


def entries_per_page(ratio: int) -> int:
    """Compressed entries of one page. At least 32: two-entry pages (256 tokens of C128A) are 48 % padding."""
    return max(32, 256 // ratio)


class EntryPages(NamedTuple):
    """The group of pages that holds a layer's entries, and entries per page."""

    group: str
    entries: int


def entry_pages(spec: AnySpec) -> EntryPages:
    """Group and page size of the entries of a layer that has any (``ratio`` above 0)."""
    if isinstance(spec, V32LayerSpec):
        return EntryPages(TOKENS, TOKENS_PAGE)
    return EntryPages(ratio_group(spec.ratio), entries_per_page(spec.ratio))


def divides_blocks(ratio: int) -> bool:
    """Whether blocks of `CacheLayout.snapshot_block` are a multiple of this compress ratio."""
    return ratio.bit_count() == 1


def state_rows(spec: LayerSpec, max_rollback: int) -> int:
    """Rows of a compressor's ring: the open window, the one before it if windows overlap, and the rollback."""
    return spec.coff * spec.ratio + max_rollback


class Span(NamedTuple):
    """(tokens per page, tokens per entry) of a group."""

    page_tokens: int
    ratio: int


@dataclass(frozen=True)
class PoolSpec:
    """One pool of one layer.

    Attributes:
        layer: ``layers.N`` or ``mtp.N``.
        kind: ``window``, ``compressed``, ``latent``, ``index``, ``state`` or ``index_state``.
        group: pools of a group share page ids.
        entries: rows per page.
        record: how a row is stored; None for state pools.
        width: float32 values per state row; 0 for pools with a record.
        carry: number of state rows that a snapshot keeps: one window's if windows overlap, and one window's more if
            it may be taken inside a window (`divides_blocks`).
    """

    layer: str
    kind: str
    group: str
    entries: int
    record: Record | None = None
    width: int = 0
    carry: int = 0

    @property
    def page_bytes(self) -> int:
        return self.record.page_bytes(self.entries) if self.record else self.entries * self.width * 4

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot outside of its pages."""
        return self.carry * self.width * 4


@dataclass(frozen=True)
class CacheLayout:
    """All pools of a model and the number of pages of each group.

    Attributes:
        max_snapshots: prefixes that can be kept for reuse at the same time.
    """

    pools: tuple[PoolSpec, ...]
    pages: dict[str, int]
    window: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_rollback: int
    max_snapshots: int = 0

    def nbytes(self) -> int:
        """Bytes that `CachePools` allocates for this layout."""
        return sum(
            self.pages[pool.group] * pool.page_bytes + self.max_snapshots * pool.snapshot_bytes for pool in self.pools
        )

    @property
    def snapshot_block(self) -> int:
        """A snapshot is taken at a multiple of this many tokens: no page of the window is part full.

        Compression windows of a power of two are not open there either. Others may be, and snapshots keep their rows: a
        common multiple of ratios such as 3, 5 and 7 would be longer than most prompts.
        """
        return math.lcm(WINDOW_PAGE, *filter(divides_blocks, self.ratios))

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether caches keep everything that later tokens read: no window pages are freed."""
        return WINDOW not in self.pages

    @property
    def growing(self) -> dict[str, int]:
        """Tokens per page, by group, of the groups in which a sequence needs more pages as it grows."""
        return {group: span.page_tokens for group, span in self.spans.items() if group != WINDOW}

    @property
    def capacity(self) -> int | None:
        """Tokens of context that the pools hold, all sequences together; None if nothing grows with the tokens."""
        return min(((self.pages[group] - 1) * span for group, span in self.growing.items()), default=None)

    @property
    def ratios(self) -> tuple[int, ...]:
        return tuple(int(group[len("ratio") :]) for group in self.pages if group.startswith("ratio"))

    @property
    def spans(self) -> dict[str, Span]:
        """Of each group whose pages follow the tokens."""
        spans = {group: Span(tokens, 1) for group, tokens in PAGE_TOKENS.items() if group in self.pages}
        return spans | {ratio_group(r): Span(r * entries_per_page(r), r) for r in self.ratios}

    def fit_pages(self, kv_cache_bytes: int) -> CacheLayout:
        """The layout whose growing groups have the pages that ``kv_cache_bytes`` hold.

        The same number of tokens fits into each growing group. Each sequence and snapshot has one page more, which its
        last tokens fill in part. Sequences compete for pages: together they can be longer than the pools.

        Raises:
            ValueError: a single sequence of ``max_model_len`` tokens does not fit beside the fixed groups.
        """
        page_bytes = {group: sum(p.page_bytes for p in self.pools if p.group == group) for group in self.growing}
        fixed = self.nbytes() - sum(self.pages[group] * size for group, size in page_bytes.items())
        part_full = self.max_num_seqs + self.max_snapshots

        def pages_for(tokens: int) -> dict[str, int]:
            return {group: 1 + part_full + tokens // span for group, span in self.growing.items()}

        def cost(tokens: int) -> int:
            return fixed + sum(pages * page_bytes[group] for group, pages in pages_for(tokens).items())

        least = cost(self.max_model_len)
        if kv_cache_bytes < least:
            raise ValueError(
                f"kv_cache_bytes={kv_cache_bytes} is too little: one sequence of max_model_len={self.max_model_len} "
                f"tokens, and the fixed pages of max_num_seqs={self.max_num_seqs} sequences, take {least} bytes; "
                "raise kv_cache_bytes, or lower max_model_len, max_num_seqs or max_snapshots"
            )
        if not page_bytes:
            return self
        most = self.max_model_len + kv_cache_bytes
        tokens = largest(lambda tokens: cost(tokens) <= kv_cache_bytes, self.max_model_len, most)
        return replace(self, pages=self.pages | pages_for(tokens))


def window_pages_per_sequence(window: int, max_rollback: int) -> int:
    """Live window pages of a sequence between steps, one more for a chunk that starts inside a page."""
    return -(-(window - 1 + max_rollback) // WINDOW_PAGE) + 2


def snapshot_window_pages(window: int) -> int:
    """Window pages of a snapshot: they hold the last ``window - 1`` tokens before the end of a page."""
    return -(-(window - 1) // WINDOW_PAGE)


def compressed_pages(tokens: int, ratio: int) -> int:
    """Pages that hold the entries of ``tokens`` tokens."""
    return -(-(tokens // ratio) // entries_per_page(ratio))


def make_layout(
    config: AnyConfig,
    numerics: Numerics,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_rollback: int = DEFAULT_MAX_ROLLBACK,
    layers: tuple[AnySpec, ...] | None = None,
    max_snapshots: int = 0,
    kv_cache_bytes: int | None = None,
) -> CacheLayout:
    """Layout for ``max_num_seqs`` sequences of up to ``max_model_len`` tokens, all of which fit at once.

    Args:
        max_num_batched_tokens: tokens of one step; their window entries need pages until the step ends.
        max_rollback: tokens that ``truncate`` can roll back without recomputing.
        layers: the layers that are present (default: all, MTP layers included).
        max_snapshots: prefixes kept for reuse; each has separate window pages and state rows.
        kv_cache_bytes: bytes of all pools together. The window and state groups keep their size; the groups that grow
            with the tokens share the remaining bytes, be they fewer or more than all sequences need at
            ``max_model_len``.

    Raises:
        ValueError: the record of ``numerics`` does not fit the head dimensions, or ``kv_cache_bytes`` does not hold
            one sequence of ``max_model_len`` tokens.
    """
    layers = config.all_layers if layers is None else layers
    check_records(config, numerics)
    if isinstance(config, DeepseekV32Config):
        window, pools = 0, _token_pools(config, numerics, dtype, layers)
        pages = {TOKENS: 1 + max_num_seqs * -(-max_model_len // TOKENS_PAGE)}
    else:
        specs, window = cast("tuple[LayerSpec, ...]", layers), config.sliding_window
        pools = _window_and_entry_pools(config, numerics, dtype, specs, max_rollback)
        pages = {
            WINDOW: 1
            + max_num_seqs * window_pages_per_sequence(window, max_rollback)
            + max_num_batched_tokens // WINDOW_PAGE
            + max_snapshots * snapshot_window_pages(window)
        }
        for ratio in sorted({spec.ratio for spec in specs if spec.owns_entries}):
            # a snapshot may hold the only copy of a page that is part full
            pages[ratio_group(ratio)] = 1 + max_num_seqs * compressed_pages(max_model_len, ratio) + max_snapshots
        if any(spec.compresses for spec in specs):
            pages[STATE] = 1 + max_num_seqs
    limits = (max_model_len, max_num_seqs, max_num_batched_tokens, max_rollback, max_snapshots)
    layout = CacheLayout(tuple(pools), pages, window, *limits)
    return layout if kv_cache_bytes is None else layout.fit_pages(kv_cache_bytes)


def _token_pools(
    config: DeepseekV32Config, numerics: Numerics, dtype: torch.dtype, layers: tuple[AnySpec, ...]
) -> Iterator[PoolSpec]:
    kind = {"plain": "auto"}.get(numerics.kv_record, numerics.kv_record)
    latent = make_v32_record(kind, config.kv_lora_rank, config.qk_rope_head_dim, dtype, scale_rule="official")
    for spec in layers:
        yield PoolSpec(spec.name, "latent", TOKENS, TOKENS_PAGE, latent)
        if spec.has_indexer:
            index = make_index_record(numerics.index_record, config.index_sizes.head_dim, dtype)
            yield PoolSpec(spec.name, "index", TOKENS, TOKENS_PAGE, index)


def _window_and_entry_pools(
    config: DeepseekV4Base, numerics: Numerics, dtype: torch.dtype, layers: tuple[LayerSpec, ...], max_rollback: int
) -> Iterator[PoolSpec]:
    dims = config.nope_head_dim, config.qk_rope_head_dim
    window_record, entry_record = make_v41_records(numerics.kv_record, *dims, dtype)
    index_record = make_index_record(numerics.index_record, config.index_head_dim, dtype)
    for spec in layers:
        yield PoolSpec(spec.name, "window", WINDOW, WINDOW_PAGE, window_record)
        if not spec.owns_entries:
            continue
        group, entries = entry_pages(spec)
        rows, width = state_rows(spec, max_rollback), 2 * spec.coff
        carry = (spec.coff - divides_blocks(spec.ratio)) * spec.ratio
        yield PoolSpec(spec.name, "compressed", group, entries, entry_record)
        if spec.compresses:
            yield PoolSpec(spec.name, "state", STATE, rows, width=width * config.head_dim, carry=carry)
        if spec.owns_index_keys:
            yield PoolSpec(spec.name, "index", group, entries, index_record)
        if spec.compresses_index_keys:
            yield PoolSpec(spec.name, "index_state", STATE, rows, width=width * config.index_head_dim, carry=carry)


def check_records(config: AnyConfig, numerics: Numerics) -> None:
    """Raises ValueError, with both problems if there are two, when the records of ``numerics`` do not fit the model."""
    problems = []
    if isinstance(config, DeepseekV32Config):
        if numerics.kv_record != "plain" and config.kv_lora_rank % LATENT_GROUP:
            problems.append(
                f"latents are stored in groups of {LATENT_GROUP} channels, and kv_lora_rank is {config.kv_lora_rank}"
            )
    elif numerics.kv_record == "fp8_fp4" and config.head_dim % FP8_GROUP:
        problems.append(f"K is stored in groups of {FP8_GROUP} channels, and head_dim is {config.head_dim}")
    elif numerics.kv_record == "fp8_ds_mla" and config.nope_head_dim % 64:
        problems.append(
            f"K is stored in groups of 64 channels, and head_dim - qk_rope_head_dim is {config.nope_head_dim}"
        )
    if numerics.index_record != "plain" and (config.index_head_dim or 0) % 32:
        problems.append(
            f"indexer keys are quantised in groups of 32 channels, and index_head_dim is {config.index_head_dim}"
        )
    if problems:
        raise ValueError(f"numerics={numerics.name!r} does not fit this config (use 'exact'): " + "; ".join(problems))
