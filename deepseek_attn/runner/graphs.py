"""Decode steps of a runner by size: captured when a size is first met, and launched before they are requested.

A decode step reads the results of the previous step on the device: the newest token of each request, drafts of the
tokens after it, and their position. So it can run before the host has read them (asynchronous scheduling).
`DecodeGraphs.launch_next_step` launches it, and `run` returns its results if that step is requested next, or a subset
of its sequences. Otherwise nothing has to be undone: a step writes only past the computed tokens of its sequences,
where everything is written again before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.kernels.sampling import greedy_tokens
from deepseek_attn.layers.engram import Chunk, EngramTables
from deepseek_attn.models.block import Backbone
from deepseek_attn.runner.allowed_tokens import restrict
from deepseek_attn.runner.device_tables import DeviceTables
from deepseek_attn.runner.graph_steps import CapturedStep, DecodeStep, DraftStep, StepSize
from deepseek_attn.utils.device import AsyncHostCopy, to_device

Step = TypeVar("Step", bound=CapturedStep)
FIRST_LENGTH = 8192  # sizes by length: this times a power of 4, because index rows are as wide as the longest request


class NextInputs(NamedTuple):
    """Inputs that a step has left for the one after it: the newest token with drafts, and the newest one's position."""

    token_ids: list[int]
    start: int


@dataclass
class DecodeRun:
    """A launched run of a `DecodeStep`, perhaps not finished on the device; methods as `EagerStep` has them.

    Attributes:
        caches: the sequences; places: their numbers among the step's requests.
        lengths: rows of each sequence, padding left out.
        versions: `SequenceCache.version` of each when the step was launched.
    """

    step: DecodeStep
    caches: list[SequenceCache]
    places: list[int]
    lengths: list[int]
    versions: list[int]
    _host_results: AsyncHostCopy

    @classmethod
    def launch(cls, step: DecodeStep, caches: list[SequenceCache], lengths: list[int]) -> DecodeRun:
        """Runs the step on its inputs and starts to copy its results to the host."""
        step.run()
        versions = [cache.version for cache in caches]
        return cls(step, caches, list(range(len(caches))), lengths, versions, AsyncHostCopy(step.results))

    def wait_for_tokens(self) -> list[list[int]]:
        """The greedy token after each row by sequence. Waits for the device."""
        values = self._host_results.wait()
        return [values[request][:n] for request, n in zip(self.places, self.lengths, strict=True)]

    def wait_for_next_inputs(self) -> list[NextInputs]:
        """Inputs of the step after this one, by sequence. Waits for the device."""
        values, first = self._host_results.wait(), self.step.size.rows_per_request
        return [NextInputs(values[request][first:-1], values[request][-1]) for request in self.places]

    def tokens(self, counts: list[int]) -> Callable[[], list[list[int]]]:
        """Returns a function that waits for the greedy tokens after the last ``counts`` rows of each sequence."""
        return lambda: [tokens[-n:] for tokens, n in zip(self.wait_for_tokens(), counts, strict=True)]

    def drafts(self) -> list[list[int]]:
        """The tokens that the step drafted for each sequence. Waits for the device."""
        return [inputs.token_ids[1:] for inputs in self.wait_for_next_inputs()]

    def hidden_states(self, counts: list[int]) -> torch.Tensor:
        """Of the last ``counts`` rows of each sequence, a copy: the next run of the step overwrites its results."""
        return self._gather(self.step.hidden_states, counts)

    def logits(self, counts: list[int] | None = None) -> torch.Tensor:
        """Of the last ``counts`` rows of each sequence (None: all of them), a copy."""
        return self._gather(self.step.logits, self.lengths if counts is None else counts)

    def some_logits(self, counts: list[int], rows: list[int]) -> torch.Tensor:
        """Some rows of ``logits(counts)``, perhaps a view of the step's results."""
        of_step = self._rows(counts)
        return select(self.step.logits, [of_step[row] for row in rows])

    def some_tokens(self, counts: list[int], rows: list[int]) -> torch.Tensor:
        """The greedy tokens of `some_logits`, int64; perhaps a view of the step's results."""
        of_step = self._rows(counts)
        return select(self.step.tokens, [of_step[row] for row in rows])

    @torch.inference_mode()
    def restrict(self, allowed: list[bytes | None]) -> None:
        """Replaces the token after each sequence's last row by the greedy allowed token.

        The next step may be launched with it before the host knows it. Only for steps without drafts.
        """
        step, some = self.step, [i for i, mask in enumerate(allowed) if mask is not None]
        rows = self._rows([1] * len(self.places))
        row = to_device([rows[i] for i in some], step.logits.device)
        tokens = greedy_tokens(restrict(step.logits[row], [mask for mask in allowed if mask is not None]))
        requests, width = step.size.requests, step.size.rows_per_request
        step.tokens[row] = tokens
        step.results[:, :width] = step.tokens.view(requests, width)
        request = to_device([self.places[i] for i in some], tokens.device)
        step.results[request, width] = tokens.clamp(min=0)  # the next step's input: INVALID_TOKEN has no embedding
        self._host_results = AsyncHostCopy(step.results)

    def logits_at(self, rows: list[int]) -> torch.Tensor:
        """Some rows of ``logits()``, perhaps a view of the step's results."""
        return self.some_logits(self.lengths, rows)

    def _gather(self, tensor: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return select(tensor, self._rows(counts)).clone()

    def _rows(self, counts: list[int]) -> list[int]:
        """Rows of the step that are the last ``counts`` of each sequence."""
        ends = [p * self.step.size.rows_per_request + n for p, n in zip(self.places, self.lengths, strict=True)]
        return [row for end, n in zip(ends, counts, strict=True) for row in range(end - n, end)]

    def subset(self, requests: list[int], lengths: list[int]) -> DecodeRun:
        """The same run, with the results of some of its sequences only."""
        return replace(
            self,
            caches=[self.caches[i] for i in requests],
            places=[self.places[i] for i in requests],
            lengths=lengths,
            versions=[self.versions[i] for i in requests],
        )


def select(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of a tensor; a view where they are the first ones."""
    if rows == list(range(len(rows))):
        return tensor[: len(rows)]
    return tensor[to_device(rows, tensor.device)]


@dataclass
class PrelaunchedStep:
    """A step that was launched on the device results of the previous step.

    Attributes:
        previous: the run before; input_requests: for each sequence of ``run``, its place in ``previous``.
        limits: for each sequence, positions from there on were padding.
    """

    run: DecodeRun
    previous: DecodeRun
    input_requests: list[int]
    limits: list[int]

    def reuse_if_matches(
        self, caches: list[SequenceCache], token_ids: list[list[int]], num_drafts: int
    ) -> DecodeRun | None:
        """The run, if it computed this very step: the same tokens, and sequences that have not changed since."""
        if self.run.step.size.num_drafts != num_drafts:
            return None
        inputs = self.previous.wait_for_next_inputs()
        request_of = {id(cache): i for i, cache in enumerate(self.run.caches)}
        requests: list[int] = []
        for cache, ids in zip(caches, token_ids, strict=True):
            i = request_of.get(id(cache))
            if i is None or self.run.versions[i] != cache.version:
                return None
            launched, start = inputs[self.input_requests[i]]
            if start != cache.num_tokens or ids != launched[: max(0, self.limits[i] - start)]:
                return None
            requests.append(i)
        return self.run.subset(requests, [len(ids) for ids in token_ids])


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
        engram: looks up the rows of a model with Engram layers, whose steps wait for them before they are launched.

    Attributes:
        nbytes: device memory that the graphs and their tables took so far.
        prelaunched: a step that was launched before it was requested, or None.
    """

    def __init__(
        self,
        model: Backbone,
        layout: CacheLayout,
        device: torch.device,
        batches: list[int] | None = None,
        capture: bool = True,
        engram: EngramTables | None = None,
    ):
        self.model, self.layout, self.engram = model, layout, engram
        self.batches = sorted(batches or batch_sizes(min(layout.max_num_seqs, layout.max_num_batched_tokens)))
        self.prelaunched: PrelaunchedStep | None = None
        self.tables = DeviceTables(layout, device)
        self.nbytes = self.tables.nbytes()
        self._capture = capture and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._capture else None
        self._decode_steps: dict[StepSize, DecodeStep] = {}
        self._draft_steps: dict[StepSize, DraftStep] = {}

    def supports(self, query_lens: list[int], decode_query_len: int) -> bool:
        """Whether a step with these numbers of new tokens runs here: decodes only, and not too many of them.

        Padding included, it has at most as many rows as a step may have tokens: the layers' scratch memory is made for
        these.
        """
        if len(query_lens) > self.batches[-1] or max(query_lens) > decode_query_len:
            return False
        return self._fits(self.size_for([decode_query_len] * len(query_lens), 1, decode_query_len))

    def _fits(self, size: StepSize) -> bool:
        return size.rows <= self.layout.max_num_batched_tokens

    def run(
        self,
        caches: list[SequenceCache],
        token_ids: list[list[int]],
        decode_query_len: int = 1,
        num_drafts: int = 0,
        limits: list[int] | None = None,
        size: StepSize | None = None,
        chunks: Sequence[Chunk] = (),
        starts: list[int] | None = None,
    ) -> DecodeRun:
        """One step over the next tokens of each sequence, whose pages are reserved.

        Args:
            num_drafts: tokens to draft after the newest one; then ``token_ids`` are a token and drafts of those after.
            limits: lengths up to which the sequences have pages for drafts.
            size: holds the step; default: see `size_for`.
            chunks: the new tokens of each sequence, with those before; needed with Engram layers.
            starts: positions of the first new tokens; default: behind the tokens that are committed.
        """
        prelaunched, self.prelaunched = self.prelaunched, None
        if prelaunched is not None and (run := prelaunched.reuse_if_matches(caches, token_ids, num_drafts)):
            return run
        query_lens, starts = [len(ids) for ids in token_ids], starts or [cache.num_tokens for cache in caches]
        if size is None:
            longest = max(start + n for start, n in zip(starts, query_lens, strict=True))
            size = self.size_for(query_lens, max([longest, *(limits or [])]), decode_query_len, num_drafts)
        rows = {} if self.engram is None or not chunks else self.engram.look_up(chunks, size.rows_per_request)
        step = self.step(size)
        step.set_inputs(token_ids, starts, self.tables.rows(caches), limits=limits)
        if step.engram is not None:
            step.engram.fill(rows)
        return DecodeRun.launch(step, caches, query_lens)

    def launch_next_step(self, previous: DecodeRun, caches: list[SequenceCache], limits: list[int]) -> None:
        """Launches the step after ``previous`` for some of its sequences, whose tokens have been committed.

        A size without a graph is not captured for it. A step that needs Engram rows cannot be launched: they follow
        from tokens that the host does not have yet.

        Args:
            limits: lengths up to which the sequences may grow and have pages.
        """
        if self.engram is not None:
            return
        num_drafts = previous.step.size.num_drafts
        size = self.size_for([1 + num_drafts] * len(caches), max(limits), num_drafts=num_drafts)
        if not self._fits(size) or (size not in self._decode_steps and self._capture):
            return
        request_of = {id(cache): i for i, cache in enumerate(previous.caches)}
        input_requests = [request_of[id(cache)] for cache in caches]
        step, none = self.step(size), [0] * len(caches)
        step.set_inputs([[]] * len(caches), none, self.tables.rows(caches), ends=limits, limits=limits)
        sources = [previous.places[i] for i in input_requests]
        step.token_ids.view(size.requests, -1)[: len(caches)] = select(previous.step.next_ids, sources)
        step.starts[: len(caches)] = select(previous.step.next_starts, sources)
        run = DecodeRun.launch(step, caches, none)
        self.prelaunched = PrelaunchedStep(run, previous, input_requests, limits)

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
        size = self.size_for(query_lens, longest, decode_query_len)._replace(num_drafts=num_drafts)
        step = self.draft_step(size)
        step.set_draft_inputs(hidden_states, next_ids, starts, self.tables.rows(caches))
        step.run()
        return DraftTokens(step.drafts[: len(caches)], step.logits[: len(caches)])

    def step(self, size: StepSize) -> DecodeStep:
        """The step of this size, made and captured if it is new."""
        if size not in self._decode_steps:
            self._decode_steps[size] = self._captured(
                DecodeStep(self.model, self.layout, self.tables, size, engram=self.engram)
            )
        return self._decode_steps[size]

    def draft_step(self, size: StepSize) -> DraftStep:
        """The drafts of this size, made and captured if they are new."""
        if size not in self._draft_steps:
            self._draft_steps[size] = self._captured(DraftStep(self.model, self.layout, self.tables, size))
        return self._draft_steps[size]

    def size_for(self, query_lens: list[int], longest: int, decode_query_len: int = 1, num_drafts: int = 0) -> StepSize:
        """The smallest size that holds these numbers of new tokens and sequences up to ``longest`` after the step.

        Every request has one row, or every request has ``decode_query_len`` rows, some of them padding. Padding costs
        little: a decode step spends its time reading the weights, and groups of equal length would read them once per
        group. In a step that drafts, a request has one row per token that the next step verifies.
        """
        requests = next(size for size in self.batches if size >= len(query_lens))
        rows = 1 if max(query_lens) == 1 else max(decode_query_len, *query_lens)
        length = length_bucket(longest, self.layout.max_model_len)
        return StepSize(requests, 1 + num_drafts if num_drafts else rows, length, num_drafts)

    def _captured(self, step: Step) -> Step:
        if self._capture:
            self.nbytes += step.capture(self._pool)
        return step


def batch_sizes(limit: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 to 32, of 16 to 64, of 32 to 256, of 64 beyond; the last is ``limit``."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, 256, 32), *range(256, limit + 64, 64)]
    return [size for size in sizes if size < limit] + [limit]


def length_bucket(length: int, limit: int) -> int:
    """The smallest of 8192, 32768, 131072, ... that is at least ``length``; at most ``limit``."""
    bucket = FIRST_LENGTH
    while bucket < length:
        bucket *= 4
    return min(bucket, limit)
