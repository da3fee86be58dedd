"""How a runner computes one step: eager, or over persistent tensors; its results, and the step after it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.impls.metadata import StepMetadata
from deepseek_attn.layers.engram import Chunk, Lookup
from deepseek_attn.layers.parallel import StepNeeds
from deepseek_attn.models.block import Backbone
from deepseek_attn.models.moe import MoE
from deepseek_attn.runner.drafting import Drafter
from deepseek_attn.runner.graph_steps import StepSize
from deepseek_attn.runner.graphs import DecodeRun
from deepseek_attn.runner.loaded import LoadedModel
from deepseek_attn.runner.logprobs import greedy_logprobs, known_logprobs
from deepseek_attn.runner.step import (
    Batch,
    EagerStep,
    StepOptions,
    StepOutput,
    block_tables,
    step_input,
)
from deepseek_attn.runner.step_recorder import StepRecorder
from deepseek_attn.runner.tapes import DecodeTapes
from deepseek_attn.runner.token_records import RecordedLayers
from deepseek_attn.runner.trailing import SequenceRows
from deepseek_attn.utils.tracing import stage, traced
from deepseek_attn.utils.turns import in_turn

logger = logging.getLogger(__name__)
T = TypeVar("T")


class StepRunner(LoadedModel):
    """The parts of `ModelRunner.step`."""

    def _output(
        self, results: EagerStep | DecodeRun, rows: Batch, order: list[int], options: StepOptions
    ) -> StepOutput:
        """The results that ``options`` request, in the order of the batch.

        Args:
            rows: the batch with decodes first; order: place in the batch of each of them.
        """
        places = sorted(range(len(order)), key=order.__getitem__)

        def in_batch_order(values: Iterable[T]) -> list[T]:
            values = list(values)
            return [values[i] for i in places]

        output, lengths = StepOutput(), results.lengths
        counts = [
            options.results(place, n, sequence.num_computed + n)
            for place, (sequence, n) in zip(order, rows, strict=True)
        ]
        if options.mtp:
            states = results.hidden_states(lengths)
            drafts = self._need_drafter().step_logits(rows, lengths, states, self.decode_query_len)
            output.mtp_logits = None if drafts is None else in_batch_order(drafts)
        if options.hidden_states:
            output.hidden_states = in_batch_order(results.hidden_states(counts).clone().split(counts))
        if any(options.scored):
            batch = [
                (sequence.token_ids, sequence.num_computed + n - kept, kept)
                for (sequence, n), kept in zip(rows, lengths, strict=True)
            ]
            scored = known_logprobs(results, batch, [options.scored[i] for i in order], self.config.vocab_size)
            output.scored = in_batch_order(scored)
        if not options.greedy:
            output.logits = in_batch_order(results.logits(counts).split(counts))
            return output
        if any(options.allowed):
            results.restrict([options.allowed[i] for i in order])
        tokens = results.tokens(counts)
        output.tokens = lambda: in_batch_order(tokens())
        if any(top is not None for top in options.logprobs):
            logprobs = greedy_logprobs(results, counts, [options.logprobs[i] for i in order])
            output.logprobs = lambda: in_batch_order(logprobs.wait())
        if options.drafts and isinstance(results, DecodeRun):
            output.drafts = lambda: in_batch_order(results.drafts())
        return output

    def _recorder(self, model: Backbone, rows: Batch, order: list[int], options: StepOptions) -> StepRecorder | None:
        """The recorder of a step in which something is recorded or replayed; order: place in the batch of each row."""
        if not (any(options.record) or any(options.replay)):
            return None
        record = [options.record[i] if options.record else None for i in order]
        replay = [options.replay[i] if options.replay else None for i in order]
        return StepRecorder(model, self._recorded_layers(), self.parallel, rows, record, replay)

    def _recorded_layers(self) -> RecordedLayers:
        return RecordedLayers.of(self.whole_model(), self.dtype, self.layout.max_model_len)

    def _replays(self, lengths: list[int], options: StepOptions, decode_query_len: int | None = None) -> bool:
        """Whether a step runs over persistent tensors, as a CUDA graph on a GPU."""
        if self.graphs is None or options.observer or any(options.record) or any(options.replay):
            return False
        return self.graphs.supports(lengths, decode_query_len or self.decode_query_len)

    def _compute(
        self,
        model: Backbone,
        rows: Batch,
        options: StepOptions,
        eager: bool,
        size: StepSize | None,
        recorder: StepRecorder | None,
        plans: list[SequenceRows],
    ) -> EagerStep | DecodeRun:
        """The step: eagerly, or over persistent tensors of the size that the ranks have agreed on, if they have.

        Args:
            plans: see `_row_plans`.
        """
        caches, lengths = [sequence.cache for sequence, _ in rows], [n for _, n in rows]
        token_ids = [seq.token_ids[seq.num_computed : seq.num_computed + n] for seq, n in rows]
        if self.graphs is not None and not eager:
            limits = self._reserve_drafts(caches, lengths, options.drafts) if options.drafts else None
            return self.graphs.run(
                caches, token_ids, self.decode_query_len, options.drafts, limits, size, chunks_of(rows)
            )
        if self.graphs is not None:
            self.graphs.prelaunched = None  # a different step than the launched one
        tapes = self.tapes if recorder is None and not options.observer and not plans else None
        if tapes is not None and lengths == [1]:
            [(sequence, _)], [[token]] = rows, token_ids
            if run := tapes.repeat(sequence.cache, token, sequence.num_computed):
                return run
        if self.one_by_one:
            return self._compute_one_by_one(model, rows, options, recorder, plans, tapes)
        lookups = self._look_up(chunks_of(rows))  # reads while the metadata is built, too
        ids = torch.tensor([token for tokens in token_ids for token in tokens], device=self.device, dtype=torch.int64)
        batch = step_input(self.manager, caches, lengths, self.decode_query_len)
        with stage("metadata"):
            meta = self.builder.build(batch)
            meta.observer, meta.engram = options.observer, lookups
            if self.trailing is not None and plans:
                lengths = self.trailing.attach(meta, batch, plans)
        if recorder is not None:
            recorder.begin(meta)
        try:
            return EagerStep(model, lengths, model(ids, meta.positions, meta))
        finally:
            meta.forget_watchers()

    def _compute_one_by_one(
        self,
        model: Backbone,
        rows: Batch,
        options: StepOptions,
        recorder: StepRecorder | None,
        plans: list[SequenceRows],
        tapes: DecodeTapes | None,
    ) -> EagerStep:
        """A step that launches each token separately, after the earlier tokens of its sequence."""
        states, lengths, one = [], [], torch.ones(1, dtype=torch.int64, device="cpu")
        for place, (sequence, n) in enumerate(rows):
            tables, kept = block_tables(self.manager, [sequence.cache]), 0
            for position in range(sequence.num_computed, sequence.num_computed + n):
                token = sequence.token_ids[position]
                if tapes is not None and (run := tapes.repeat(sequence.cache, token, position)):
                    states.append(run.hidden_states([1]))
                    kept += 1
                    continue
                batch, results = StepInput(one, one + position, tables), 1
                meta = self.builder.build(batch)
                meta.observer, meta.engram = options.observer, self._look_up([Chunk(sequence.token_ids, position, 1)])
                if self.trailing is not None and plans:
                    row = replace(plans[place], start=position, end=position + 1)
                    [results] = self.trailing.attach(meta, batch, [row])
                if recorder is not None:
                    recorder.begin(meta, first=len(states))
                ids = torch.tensor([token], device=self.device, dtype=torch.int64)
                try:
                    states.append(model(ids, meta.positions, meta))
                finally:
                    meta.forget_watchers()
                kept += results
            lengths.append(kept)
        return EagerStep(model, lengths, torch.cat(states), one_by_one=True)

    def _row_plans(self, rows: Batch, order: list[int], options: StepOptions) -> list[SequenceRows]:
        """Rows of each sequence that upper layers compute; empty for a step in which all layers compute all rows.

        Records, replays and observers see all rows of a step.

        Args:
            order: place in the batch of each row of ``rows``.

        Raises:
            ValueError: see `TrailingRows.plan`.
        """
        if self.trailing is None:
            return []
        # decodes of sequences with all keys: no row is left out
        limit = self.decode_query_len
        if not options.ends and all(n <= limit and s.cache.exact_from <= s.num_computed for s, n in rows):
            return []
        plans, watched = [], bool(options.observer or any(options.record) or any(options.replay))
        for (sequence, n), place in zip(rows, order, strict=True):
            length = sequence.num_computed + n
            every = options.all_logits or bool(options.scored and options.scored[place])
            end = options.ends[place] if options.ends and not every else length
            plan = self.trailing.plan(sequence.cache, n, end, n if every else min(n, options.last))
            if watched:
                plan = replace(plan, exact_from=sequence.cache.exact_from, all_rows=True)
            plans.append(plan)
        return plans if self.trailing.needed(plans) else []

    def _look_up(self, chunks: list[Chunk]) -> dict[int, Lookup]:
        """Starts to read the rows of Engram tables of the step's tokens; by layer."""
        return {} if self.tables is None else self.tables.look_up(chunks)

    def _reserve_drafts(self, caches: list[SequenceCache], lengths: list[int], num_drafts: int) -> list[int]:
        """Reserves pages for the entries that drafting writes past the new tokens; returns the lengths they cover.

        The draft after the newest token needs no row past it, the next one needs one.
        """
        ends = [cache.num_tokens + n for cache, n in zip(caches, lengths, strict=True)]
        limits = [min(end + num_drafts - 1, self.layout.max_model_len) for end in ends]
        try:
            self.manager.reserve([(c, limit - c.num_tokens) for c, limit in zip(caches, limits, strict=True)])
        except OutOfPages:
            return ends
        return limits

    @torch.inference_mode()
    def _launch_next_step(self, run: DecodeRun, batch: list[tuple[SequenceCache, int]]) -> None:
        """Launches the step after ``run`` for (sequence, most tokens that will be computed of it).

        The host does not know yet how many drafts are accepted. Pages must suffice if all are, and rollback past the
        entries that the launched step overwrites must be possible if none is.
        """
        # ranks agree on a step when it is requested; Engram rows follow from tokens that the host does not have yet
        if not batch or self.graphs is None or self.parallel.dp_attention or self.tables is not None:
            return
        num_drafts = run.step.size.num_drafts
        if 2 * num_drafts > self.layout.max_rollback:
            return
        # behind all drafts: the next step's rows, and the rows of its drafts after the first
        ahead = 1 + num_drafts + max(0, num_drafts - 1)
        limits = [min(most, cache.num_tokens + ahead) for cache, most in batch]
        caches = [cache for cache, _ in batch]
        try:
            self.manager.reserve([(c, max(0, limit - c.num_tokens)) for c, limit in zip(caches, limits, strict=True)])
        except OutOfPages:
            return
        for cache in caches:
            self.manager.raise_low_water(cache, cache.num_tokens + num_drafts - self.layout.max_rollback)
        try:
            with self.op_settings():
                self.graphs.launch_next_step(run, caches, limits)
        except Exception:  # the step is computed when it is requested, and raises then
            logger.debug("the next step could not be launched early", exc_info=True)

    @in_turn
    @torch.inference_mode()
    def wait_for_ranks(self) -> None:
        """With data-parallel attention, takes part in the steps of other ranks until none has work left.

        Every rank calls this when its own work is done, even if it had no work; `score` and `LLM` call it themselves.
        """
        if not self.parallel.dp_attention:
            return
        x = torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        ids = torch.zeros(0, dtype=torch.int64, device=self.device)
        while (needs := self.parallel.agree(StepNeeds(eager=self.graphs is None), self.device)).rows:
            size = self._common_size(needs)
            with self.op_settings():
                if self.graphs is not None and size is not None:
                    self.graphs.run([], [], size=size)
                    continue
                for module in self.model.layers.modules():
                    if isinstance(module, MoE):
                        module(x, ids)

    def _common_size(self, needs: StepNeeds) -> StepSize | None:
        """With data-parallel attention, size of a decode step of all ranks, which may fill less of it; None: eager."""
        if self.graphs is None or needs.eager:
            return None
        size = self.graphs.size_for([1] * needs.rows, needs.longest)
        self.parallel.step_rows = size.rows
        return size

    @traced("metadata")
    def _metadata(
        self,
        caches: list[SequenceCache],
        query_lens: list[int],
        decode_query_len: int,
        token_valid: torch.Tensor | None = None,
    ) -> StepMetadata:
        return self.builder.build(step_input(self.manager, caches, query_lens, decode_query_len, token_valid))

    def _need_drafter(self) -> Drafter:
        if self.drafter is None:
            raise ValueError(
                "there is no MTP layer: the checkpoint lacks it, only some layers were loaded, or attention is "
                "data-parallel"
            )
        return self.drafter


def chunks_of(rows: Batch) -> list[Chunk]:
    """The tokens that a step computes of each sequence."""
    return [Chunk(sequence.token_ids, sequence.num_computed, n) for sequence, n in rows]
