"""Prompts of V4.1: upper layers compute the trailing rows alone, from which all later results follow.

`config.trailing` lists these layers, and the distance before a row of results from which each is needed. This module
chooses the rows of a step that they compute, for sequences that may begin and end anywhere in the step, and adds the
metadata of these rows to the step's.

A sequence has one number for all layers, `SequenceCache.exact_from`: a layer of a part holds the keys from
``exact_from - reach`` on. Results of tokens from ``exact_from`` on are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepseek_attn.attention.builder import MetadataBuilder, StepInput
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.config.trailing import TrailingPart
from deepseek_attn.impls.metadata import StepMetadata, TrailingStep
from deepseek_attn.layers.engram import SomeRows
from deepseek_attn.utils.device import to_device


@dataclass(frozen=True)
class SequenceRows:
    """New tokens ``start`` to ``end`` of a sequence, and which of them upper layers compute.

    Attributes:
        exact_from: of its cache after the step.
        all_rows: every layer computes all of them.
    """

    start: int
    end: int
    exact_from: int
    all_rows: bool = False

    def first(self, reach: int) -> int:
        """The first row that a part with this reach computes; ``end`` for none."""
        return self.start if self.all_rows else min(max(self.start, self.exact_from - reach), self.end)

    def window_start(self, reach: int) -> int:
        """The first row whose key the layers of such a part have, after the step."""
        return min(max(0, self.exact_from - reach), self.first(reach)) if self.exact_from else 0


@dataclass(frozen=True)
class TrailingRows:
    """Decides which rows of steps upper layers compute.

    Attributes:
        parts: of the model; builder: of its metadata; window: tokens that a query sees.
        max_rollback: tokens that a sequence can be truncated by in place.
        approximate: one window of rows takes the place of the rows that exact results need.
    """

    parts: tuple[TrailingPart, ...]
    builder: MetadataBuilder
    window: int
    max_rollback: int
    approximate: bool = False

    @property
    def rows(self) -> int:
        """Trailing rows of a prompt that the first of the upper layers computes."""
        return self.parts[0].reach + max(1, self.max_rollback)

    def whole_prompt(self, tokens: int) -> SequenceRows:
        """Rows of a prompt that is computed in one step, for results at its end."""
        wanted = max(0, tokens - max(1, self.max_rollback))
        return SequenceRows(0, tokens, wanted if wanted > self.parts[-1].reach else 0)

    def exact_from(self, cache: SequenceCache, end: int, results: int = 1) -> int | None:
        """`SequenceCache.exact_from` of a sequence when it has ``end`` tokens; None if its caches lack the needed keys.

        Args:
            end: length at which the last ``results`` rows need results; so do rows of sequences that go back by up to
                ``max_rollback`` tokens from there, if the caches still have their keys.
        """
        needed = max(0, end - max(results, 1))
        first, last = self.parts[0].reach, self.parts[-1].reach
        wanted = min(needed, max(0, end - self.max_rollback))
        if cache.exact_from <= wanted:
            return wanted if wanted - last > cache.num_tokens else cache.exact_from
        if wanted - first >= cache.num_tokens:
            return wanted
        if cache.exact_from <= needed:
            return cache.exact_from
        return needed if needed - first >= cache.num_tokens else None

    def serves(self, cache: SequenceCache, end: int) -> bool:
        """Whether a prompt of ``end`` tokens can continue from a cache, with results of any rows within a rollback."""
        return self.exact_from(cache, end, self.max_rollback) is not None

    def plan(self, cache: SequenceCache, new_tokens: int, end: int, results: int) -> SequenceRows:
        """Rows of a sequence that upper layers compute in a step with wanted results, or in a step before it.

        Args:
            end: length at which the last ``results`` rows need results, at least that after the step.

        Raises:
            ValueError: the caches lack keys that these results need.
        """
        exact_from, length = self.exact_from(cache, end, results), cache.num_tokens + new_tokens
        if exact_from is None:
            raise ValueError(
                f"results at {end} tokens need keys of upper layers that were left out when the first "
                f"{cache.num_tokens} tokens were computed for results from token {cache.exact_from} on: go on to that "
                "length (StepOptions.ends), or free the sequence and compute it again"
            )
        return SequenceRows(cache.num_tokens, length, exact_from)

    def needed(self, plans: Sequence[SequenceRows]) -> bool:
        """Whether some layer computes fewer rows than the step has, or has fewer keys than a row's window."""
        return any(
            plan.first(part.reach) > plan.start or (not part.queries_only and self._cut(plan, part.reach))
            for plan in plans
            for part in self.parts
        )

    def _cut(self, plan: SequenceRows, reach: int) -> bool:
        """Whether rows of a part see a window with missing keys."""
        first = plan.first(reach)
        return first < plan.end and plan.window_start(reach) > max(0, first - self.window + 1)

    def attach_ends(self, step: StepMetadata, batch: StepInput, caches: Sequence[SequenceCache]) -> list[int]:
        """`attach` for a step after which the last row of each request needs a result."""
        lengths = batch.query_lens.tolist()
        pairs = zip(caches, lengths, strict=True)
        plans = [self.plan(cache, n, cache.num_tokens + n, 1) for cache, n in pairs]
        return self.attach(step, batch, plans) if self.needed(plans) else lengths

    def attach(self, step: StepMetadata, batch: StepInput, plans: Sequence[SequenceRows]) -> list[int]:
        """Adds the metadata of each part's rows to a step's metadata, where they differ from the part before.

        Args:
            batch: the step's; plans: of its requests, in order.

        Returns:
            Number of rows of each request that have results: its last ones.
        """
        decodes, before = step.num_decodes, [plan.start for plan in plans]
        outer: StepMetadata = step
        for part in self.parts:
            firsts = [plan.first(part.reach) for plan in plans]
            cut = not part.queries_only and any(self._cut(plan, part.reach) for plan in plans)
            if firsts == before and not cut:
                continue
            rows, offset = list[int](), 0
            for plan, begin, first in zip(plans, before, firsts, strict=True):
                rows += range(offset + first - begin, offset + plan.end - begin)
                offset += plan.end - begin
            taken = None if firsts == before else to_device(rows, step.positions.device)
            outer.trailing = TrailingStep(part.layer, part.queries_only, taken, None)
            before = firsts
            if not rows:
                break
            kept = [i for i, (plan, first) in enumerate(zip(plans, firsts, strict=True)) if first < plan.end]
            inner = self._build(part, batch, [plans[i] for i in kept], kept, sum(i < decodes for i in kept), cut)
            inner.engram = outer.engram
            if taken is not None:
                inner.engram = {layer: SomeRows(found, taken) for layer, found in outer.engram.items()}
            inner.observer, inner.on_selection = step.observer, step.on_selection
            outer.trailing.step = outer = inner
        return [plan.end - first for plan, first in zip(plans, before, strict=True)]

    def _build(
        self, part: TrailingPart, batch: StepInput, plans: list[SequenceRows], kept: list[int], decodes: int, cut: bool
    ) -> StepMetadata:
        """Metadata of the rows of a part, of the requests ``kept`` of a batch."""
        firsts, starts = [plan.first(part.reach) for plan in plans], [plan.window_start(part.reach) for plan in plans]
        requests = torch.tensor(kept, dtype=torch.int64, device="cpu")
        seq_lens = batch.seq_lens[requests]
        inner = StepInput(
            seq_lens - torch.tensor(firsts, dtype=torch.int64, device="cpu"),
            seq_lens,
            {group: table[requests] for group, table in batch.block_tables.items()},
            decode_threshold=batch.decode_threshold,
            num_decodes=decodes,
            window_starts=torch.tensor(starts, dtype=torch.int64, device="cpu") if cut else None,
        )
        layers = [spec.index for spec in self.builder.layers]
        return self.builder.build(inner, self.builder.layers[layers.index(part.layer) :])
