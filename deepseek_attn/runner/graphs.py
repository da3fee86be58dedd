"""Decode steps of a runner by size: captured when a size is first met, and launched before they are requested.

A decode step that reads the greedy tokens of the step before it can run on the device before the host has read them
(asynchronous scheduling). `DecodeGraphs.launch_next_step` launches it, and `run` returns its results if that step is
requested next, or a subset of its sequences. Otherwise nothing has to be undone: a step writes only past the
computed tokens of its sequences, where everything is written again before it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.models.block import layer_specs
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.runner.device_tables import DeviceTables
from deepseek_attn.runner.graph_steps import DecodeStep, DraftStep, StepSize
from deepseek_attn.utils.device import AsyncHostCopy, to_device

FIRST_LENGTH = 8192  # sizes by length: this times a power of 4, because index rows are as wide as the longest request


@dataclass
class DecodeRun:
    """A launched run of a `DecodeStep`, perhaps not finished on the device; methods as `EagerStep` has them.

    Attributes:
        caches: the sequences; rows: the step's rows of each sequence, padding left out.
        starts, versions: length and `SequenceCache.version` of each sequence when the step was launched.
    """

    step: DecodeStep
    caches: list[SequenceCache]
    rows: list[list[int]]
    starts: list[int]
    versions: list[int]
    _host_tokens: AsyncHostCopy

    @classmethod
    def launch(cls, step: DecodeStep, caches: list[SequenceCache], rows: list[list[int]]) -> DecodeRun:
        """Runs the step on its inputs and starts to copy its tokens to the host."""
        step.run()
        starts, versions = [cache.num_tokens for cache in caches], [cache.version for cache in caches]
        return cls(step, caches, rows, starts, versions, AsyncHostCopy(step.tokens))

    def wait_for_tokens(self) -> list[list[int]]:
        """The greedy token after each row by sequence. Waits for the device."""
        values = self._host_tokens.wait()
        return [[values[row] for row in rows] for rows in self.rows]

    def tokens(self, counts: list[int]) -> Callable[[], list[list[int]]]:
        """Returns a function that waits for the greedy tokens after the last ``counts`` rows of each sequence."""
        return lambda: [tokens[-n:] for tokens, n in zip(self.wait_for_tokens(), counts, strict=True)]

    def hidden_states(self, counts: list[int]) -> torch.Tensor:
        """Of the last ``counts`` rows of each sequence, a copy: the next run of the step overwrites its results."""
        return self._gather(self.step.hidden_states, counts)

    def logits(self, counts: list[int] | None = None) -> torch.Tensor:
        """Of the last ``counts`` rows of each sequence (None: all of them), a copy."""
        return self._gather(self.step.logits, counts)

    def _gather(self, tensor: torch.Tensor, counts: list[int] | None) -> torch.Tensor:
        counts = [len(rows) for rows in self.rows] if counts is None else counts
        rows = [row for rows, n in zip(self.rows, counts, strict=True) for row in rows[-n:]]
        if rows == list(range(len(rows))):
            return tensor[: len(rows)].clone()
        return tensor[to_device(rows, tensor.device)]

    def last_tokens(self, requests: list[int]) -> torch.Tensor:
        """The greedy token after the last row of each of these sequences, int64 on the device."""
        rows = [self.rows[i][-1] for i in requests]
        if rows == list(range(len(rows))):
            return self.step.tokens[: len(rows)]
        return self.step.tokens[to_device(rows, self.step.device)]

    def subset(self, requests: list[int]) -> DecodeRun:
        """The same run, with the results of some of its sequences only."""
        return replace(
            self,
            caches=[self.caches[i] for i in requests],
            rows=[self.rows[i] for i in requests],
            starts=[self.starts[i] for i in requests],
            versions=[self.versions[i] for i in requests],
        )


@dataclass
class PrelaunchedStep:
    """A step that was launched on the tokens of the one before it.

    Attributes:
        previous: the run before; input_requests: for each sequence of ``run``, its place in ``previous``.
    """

    run: DecodeRun
    previous: DecodeRun
    input_requests: list[int]

    def reuse_if_matches(self, caches: list[SequenceCache], token_ids: list[list[int]]) -> DecodeRun | None:
        """The run, if it computed this very step: the same tokens, and sequences that have not changed since."""
        tokens, place = self.previous.wait_for_tokens(), {id(cache): i for i, cache in enumerate(self.run.caches)}
        requests: list[int] = []
        for cache, ids in zip(caches, token_ids, strict=True):
            i = place.get(id(cache))
            if i is None or ids != tokens[self.input_requests[i]][-1:]:
                return None
            if self.run.starts[i] != cache.num_tokens or self.run.versions[i] != cache.version:
                return None
            requests.append(i)
        return self.run if requests == list(range(len(self.run.caches))) else self.run.subset(requests)


@dataclass
class DraftTokens:
    """Drafts of the MTP layer: tokens, int64 ``[B, num_drafts]``, and the logits of the first ones, ``[B, vocab]``."""

    tokens: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Decode steps of a model, and drafts of its MTP layer, by size; each is captured when its size is first met.

    Args:
        batches: numbers of requests that have a graph; a step uses the smallest that holds it.
        capture: False runs the same steps eagerly, on any device.

    Attributes:
        nbytes: device memory that the graphs and their tables took so far.
        prelaunched: a step that was launched before it was requested, or None.
    """

    def __init__(
        self,
        model: DeepseekV4,
        layout: CacheLayout,
        device: torch.device,
        batches: list[int] | None = None,
        capture: bool = True,
    ):
        self.model, self.layout = model, layout
        self.layers = tuple(spec for spec in layer_specs(model) if not spec.is_mtp)
        self.draft_layers = tuple(spec for spec in layer_specs(model) if spec.is_mtp)
        self.batches = sorted(batches or batch_sizes(layout.max_num_seqs))
        self.prelaunched: PrelaunchedStep | None = None
        self.tables = DeviceTables(layout, device)
        self.nbytes = self.tables.nbytes()
        self._capture = capture and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._capture else None
        self._decode_steps: dict[StepSize, DecodeStep] = {}
        self._draft_steps: dict[tuple[StepSize, int], DraftStep] = {}

    def supports(self, query_lens: list[int], decode_query_len: int) -> bool:
        """Whether a step with these numbers of new tokens runs here: decodes only, and not too many of them."""
        return len(query_lens) <= self.batches[-1] and max(query_lens) <= decode_query_len

    def supports_drafts(self, query_lens: list[int], decode_query_len: int) -> bool:
        """Whether the MTP layer runs here over these numbers of rows."""
        return bool(self.draft_layers) and self.supports(query_lens, decode_query_len)

    def run(self, caches: list[SequenceCache], token_ids: list[list[int]], decode_query_len: int = 1) -> DecodeRun:
        """One step over the next tokens of each sequence, whose pages are reserved; see `size_for`."""
        prelaunched, self.prelaunched = self.prelaunched, None
        if prelaunched is not None and (run := prelaunched.reuse_if_matches(caches, token_ids)):
            return run
        query_lens = [len(ids) for ids in token_ids]
        longest = max(cache.num_tokens + n for cache, n in zip(caches, query_lens, strict=True))
        step = self.step(self.size_for(query_lens, longest, decode_query_len))
        step.set_inputs(token_ids, [cache.num_tokens for cache in caches], self.tables.rows(caches))
        first_rows = [request * step.size.rows_per_request for request in range(len(caches))]
        rows = [list(range(first, first + n)) for first, n in zip(first_rows, query_lens, strict=True)]
        return DecodeRun.launch(step, caches, rows)

    def launch_next_step(self, previous: DecodeRun, caches: list[SequenceCache]) -> None:
        """Launches the step after ``previous`` for some of its sequences, whose tokens have been committed.

        There must be pages for one more token of each. A size without a graph is not captured for it.
        """
        query_lens, longest = [1] * len(caches), max(cache.num_tokens for cache in caches) + 1
        size = self.size_for(query_lens, longest)
        if size not in self._decode_steps and self._capture:
            return
        place = {id(cache): i for i, cache in enumerate(previous.caches)}
        input_requests = [place[id(cache)] for cache in caches]
        step = self.step(size)
        step.set_inputs([[0]] * len(caches), [cache.num_tokens for cache in caches], self.tables.rows(caches))
        # INVALID_TOKEN has no embedding
        torch.clamp(previous.last_tokens(input_requests), min=0, out=step.token_ids[: len(caches)])
        run = DecodeRun.launch(step, caches, [[row] for row in range(len(caches))])
        self.prelaunched = PrelaunchedStep(run, previous, input_requests)

    def draft(
        self,
        caches: list[SequenceCache],
        starts: list[int],
        hidden_states: torch.Tensor,
        next_ids: list[list[int]],
        num_drafts: int,
        decode_query_len: int = 1,
    ) -> DraftTokens:
        """The MTP layer over rows from ``starts``, then drafts; arguments as in `DraftRows`, request after request."""
        query_lens = [len(ids) for ids in next_ids]
        longest = max(start + n for start, n in zip(starts, query_lens, strict=True)) + num_drafts - 1
        size = self.size_for(query_lens, longest, decode_query_len)
        step = self._draft_steps.get((size, num_drafts))
        if step is None:
            step = DraftStep(self.model, self.draft_layers, self.layout, self.tables, size, num_drafts)
            self._capture_step(step)
            self._draft_steps[size, num_drafts] = step
        step.set_draft_inputs(hidden_states, next_ids, starts, self.tables.rows(caches))
        step.run()
        return DraftTokens(step.drafts[: len(caches)], step.logits[: len(caches)])

    def step(self, size: StepSize) -> DecodeStep:
        """The step of this size, made and captured if it is new."""
        step = self._decode_steps.get(size)
        if step is None:
            step = DecodeStep(self.model, self.layers, self.layout, self.tables, size)
            self._capture_step(step)
            self._decode_steps[size] = step
        return step

    def size_for(self, query_lens: list[int], longest: int, decode_query_len: int = 1) -> StepSize:
        """The smallest size that holds these numbers of new tokens and sequences up to ``longest`` after the step.

        Requests have one row each, or ``decode_query_len``, of which some may be padding. Padding costs little, because
        a decode step's time is that of reading the weights, which requests grouped by their rows would do per group.
        """
        requests = next(size for size in self.batches if size >= len(query_lens))
        rows_per_request = 1 if max(query_lens) == 1 else max(decode_query_len, *query_lens)
        return StepSize(requests, rows_per_request, length_bucket(longest, self.layout.max_model_len))

    def _capture_step(self, step: DecodeStep) -> None:
        if self._capture:
            self.nbytes += step.capture(self._pool)


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
