"""Decode steps of a runner by size: which are captured, what they return, and steps that start before they are asked.

A step that reads the tokens of the one before it can start on the device before the host has seen them. `go_ahead`
starts it, and `run` returns its results if what it is asked for turns out to be that step, or a part of it. Whatever
else happens instead, nothing has to be taken back: a step writes only behind the computed tokens of its sequences,
where everything is written again before it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.config.model import LayerSpec
from deepseek_attn.runner.device_tables import DeviceTables
from deepseek_attn.runner.graph_steps import DecodeStep, DraftStep
from deepseek_attn.utils.device import AsyncHostCopy, to_device

FIRST_LENGTH = 8192  # graphs serve lengths up to a power of four times this: index rows are as wide as the longest


@dataclass
class DecodeRun:
    """A run of a `DecodeStep` that may still be on its way.

    Attributes:
        caches: the sequences; rows: which of the step's rows are theirs, padding left out.
        starts, versions: length and `SequenceCache.version` of each when the step was started.
    """

    step: DecodeStep
    caches: list[SequenceCache]
    rows: list[list[int]]
    starts: list[int]
    versions: list[int]
    _chosen: AsyncHostCopy

    def wait_for_tokens(self) -> list[list[int]]:
        """The greedy token after each row (`DecodeStep.tokens`) by sequence. Waits for the device."""
        values = self._chosen.wait()
        return [[values[row] for row in rows] for rows in self.rows]

    def tokens(self, counts: list[int]) -> Callable[[], list[list[int]]]:
        """Call what is returned for the greedy tokens after the last ``counts`` rows of each sequence; it waits."""
        return lambda: [tokens[-n:] for tokens, n in zip(self.wait_for_tokens(), counts, strict=True)]

    def hidden_states(self, counts: list[int]) -> torch.Tensor:
        """Of the last ``counts`` rows of each sequence, a copy: the next run of the step overwrites its results."""
        return self._gather(self.step.streams, counts)

    def logits(self, counts: list[int] | None = None) -> torch.Tensor:
        """Of the last ``counts`` rows of each sequence (None: all of them), a copy."""
        return self._gather(self.step.logits, counts)

    def _gather(self, tensor: torch.Tensor, counts: list[int] | None) -> torch.Tensor:
        counts = [len(rows) for rows in self.rows] if counts is None else counts
        rows = [row for rows, n in zip(self.rows, counts, strict=True) for row in rows[-n:]]
        if rows == list(range(len(rows))):
            return tensor[: len(rows)].clone()
        return tensor[to_device(rows, tensor.device)]

    def last(self, chosen: list[int]) -> torch.Tensor:
        """The most likely token after the last row of each of these sequences, int64 on the device."""
        rows = [self.rows[i][-1] for i in chosen]
        if rows == list(range(len(rows))):
            return self.step.tokens[: len(rows)]
        return self.step.tokens[to_device(rows, self.step.device)]

    def part(self, chosen: list[int]) -> DecodeRun:
        """The run as if it had been asked for some of its sequences only."""
        caches, rows, starts, versions = (
            [values[i] for i in chosen] for values in (self.caches, self.rows, self.starts, self.versions)
        )
        return DecodeRun(self.step, caches, rows, starts, versions, self._chosen)


@dataclass
class _Ahead:
    """A step that was started with the tokens of the one before it; fed: which of its tokens each sequence got."""

    run: DecodeRun
    before: DecodeRun
    fed: list[int]

    def taken(self, caches: list[SequenceCache], token_ids: list[list[int]]) -> DecodeRun | None:
        """The run, if the next step of these sequences is in it: nothing of theirs has changed since."""
        tokens, place = self.before.wait_for_tokens(), {id(cache): i for i, cache in enumerate(self.run.caches)}
        chosen = [place.get(id(cache)) for cache in caches]
        for i, cache, ids in zip(chosen, caches, token_ids, strict=True):
            if i is None or ids != tokens[self.fed[i]][-1:]:
                return None
            if self.run.starts[i] != cache.num_tokens or self.run.versions[i] != cache.version:
                return None
        return self.run if chosen == list(range(len(self.run.caches))) else self.run.part(chosen)


@dataclass
class Guesses:
    """What the MTP layer guessed: tokens, int64 ``[B, drafts]``, and the logits of the first ones, ``[B, vocab]``."""

    tokens: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Decode steps of a runner's backbone, and of its MTP layer, by size, captured when a size is first met.

    Args:
        layers: specs of the backbone's layers; draft_layers: those of the MTP layers, without which `draft` has none.
        batches: numbers of requests that have a graph; a step takes the smallest that holds it.
        capture: False runs the same steps eagerly, on any device.

    Attributes:
        nbytes: device memory that the graphs and their tables took so far.
        most_tokens: new tokens of a sequence in one step at most: 1, and the guesses where there is speculation.
        ahead: a step that has been started before it was asked for; None: there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[LayerSpec, ...],
        layout: CacheLayout,
        device: torch.device,
        batches: list[int] | None = None,
        capture: bool = True,
        draft_layers: tuple[LayerSpec, ...] = (),
    ):
        self.model, self.layout, self.device = model, layout, device
        self.layers, self.draft_layers = layers, draft_layers
        self.batches = sorted(batches or batch_sizes(layout.max_num_seqs))
        self.most_tokens = 1
        self.ahead: _Ahead | None = None
        self.tables = DeviceTables(layout, device)
        self.nbytes = self.tables.nbytes()
        self._capture = capture and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._capture else None
        self._steps: dict[tuple[int, ...], DecodeStep] = {}

    def takes(self, counts: list[int]) -> bool:
        """Whether a step with these numbers of new tokens runs here: small enough, and nobody has a prompt to read."""
        return len(counts) <= self.batches[-1] and max(counts) <= self.most_tokens

    def takes_drafts(self, counts: list[int]) -> bool:
        """Whether the MTP layer runs here over these numbers of rows."""
        return bool(self.draft_layers) and self.takes(counts)

    def run(self, caches: list[SequenceCache], token_ids: list[list[int]]) -> DecodeRun:
        """One step of the next tokens of each sequence, whose pages are reserved."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and (run := ahead.taken(caches, token_ids)):
            return run
        counts = [len(ids) for ids in token_ids]
        longest = max(cache.num_tokens + n for cache, n in zip(caches, counts, strict=True))
        step = self.step(len(caches), self.each(counts), longest)
        step.set(token_ids, [cache.num_tokens for cache in caches], self.tables.rows(caches))
        rows = [[request * step.each + i for i in range(n)] for request, n in enumerate(counts)]
        return self._start(step, caches, rows)

    def go_ahead(self, before: DecodeRun, caches: list[SequenceCache]) -> None:
        """Starts the step after ``before`` for some of its sequences, whose tokens have been committed.

        There must be pages for one more token of each. A size that has no graph yet is left for later.
        """
        longest = max(cache.num_tokens for cache in caches) + 1
        key = self._key(len(caches), 1, longest)
        if key not in self._steps and self._capture:
            return
        place = {id(cache): i for i, cache in enumerate(before.caches)}
        fed = [place[id(cache)] for cache in caches]
        step = self.step(len(caches), 1, longest)
        step.set([[0]] * len(caches), [cache.num_tokens for cache in caches], self.tables.rows(caches))
        torch.clamp(before.last(fed), min=0, out=step.token_ids[: len(caches)])  # INVALID_TOKEN has no embedding
        run = self._start(step, caches, [[row] for row in range(len(caches))])
        self.ahead = _Ahead(run, before, fed)

    def _start(self, step: DecodeStep, caches: list[SequenceCache], rows: list[list[int]]) -> DecodeRun:
        step.run()
        starts, versions = [cache.num_tokens for cache in caches], [cache.version for cache in caches]
        return DecodeRun(step, caches, rows, starts, versions, AsyncHostCopy(step.tokens))

    def draft(
        self,
        caches: list[SequenceCache],
        starts: list[int],
        streams: torch.Tensor,
        next_ids: list[list[int]],
        drafts: int,
    ) -> Guesses:
        """The MTP layer over rows from ``starts``, and guesses; for what it takes see `ModelRunner.draft`."""
        counts = [len(ids) for ids in next_ids]
        longest = max(start + n for start, n in zip(starts, counts, strict=True)) + drafts - 1
        key = (*self._key(len(caches), self.each(counts), longest), drafts)
        if key not in self._steps:
            step = DraftStep(self.model, self.draft_layers, self.layout, self.tables, *key)
            self._steps[key] = self._captured(step)
        step = self._steps[key]
        step.set_rows(streams, next_ids, starts, self.tables.rows(caches))
        step.run()
        return Guesses(step.guesses[: len(caches)], step.logits[: len(caches)])

    def each(self, counts: list[int]) -> int:
        """Rows of a request in a step for these numbers of tokens."""
        return 1 if max(counts) == 1 else max(self.most_tokens, *counts)

    def step(self, requests: int, each: int, longest: int) -> DecodeStep:
        """The smallest step that holds this, made and captured if it is new."""
        key = self._key(requests, each, longest)
        if key not in self._steps:
            step = DecodeStep(self.model, self.layers, self.layout, self.tables, *key)
            self._steps[key] = self._captured(step)
        return self._steps[key]

    def _key(self, requests: int, each: int, longest: int) -> tuple[int, int, int]:
        size = next(size for size in self.batches if size >= requests)
        return size, each, length_bucket(longest, self.layout.max_model_len)

    def _captured(self, step: DecodeStep) -> DecodeStep:
        if self._capture:
            self.nbytes += step.capture(self._pool)
        return step


def batch_sizes(limit: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 to 32, of 16 to 64, of 32 to 256, of 64 beyond; the last is ``limit``."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, 256, 32), *range(256, limit + 64, 64)]
    return [size for size in sizes if size < limit] + [limit]


def length_bucket(length: int, limit: int) -> int:
    """The least of 8192, 32768, 131072, ... that is no smaller than ``length``, at most ``limit``."""
    bucket = FIRST_LENGTH
    while bucket < length:
        bucket *= 4
    return min(bucket, limit)
