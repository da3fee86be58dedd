"""Logits and log-probabilities of whole texts, computed step by step through the caches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from typing import Protocol

import torch
from tqdm.auto import tqdm

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.config.options import is_integer
from deepseek_attn.runner.logprobs import ScoredRows, TokenLogprobs
from deepseek_attn.runner.prompts import TokenIds, each_prompt
from deepseek_attn.runner.record_store import RecordStore
from deepseek_attn.runner.replay import Replay
from deepseek_attn.runner.sequence import Sequence
from deepseek_attn.runner.step import Batch, StepOptions, StepOutput


class Scorer(Protocol):
    """The methods of `ModelRunner` that `score_prompts` calls."""

    layout: CacheLayout

    def sequence(self, token_ids: TokenIds) -> Sequence: ...

    def step(self, batch: Batch, options: StepOptions) -> StepOutput: ...

    def wait_for_ranks(self) -> None: ...


def score_prompts(
    runner: Scorer,
    prompts: Iterable[TokenIds],
    chunk_size: int | None = None,
    *,
    mtp: bool = False,
    replays: list[Replay | None] | None = None,
    stores: list[RecordStore] | None = None,
    progress: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Result of `ModelRunner.score`; of `ModelRunner.score_mtp` with ``mtp``, without it the second list is empty.

    Args:
        replays: of each prompt, its given experts and entries; stores: of each prompt, the store of its records.
    """
    sequences = [runner.sequence(prompt) for prompt in each_prompt(prompts)]
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    mtp_logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    options = StepOptions(all_logits=True, mtp=mtp)
    with closing(
        scoring_steps(runner, sequences, lambda chosen: options, chunk_size, progress, replays, stores)
    ) as steps:
        for i, place, out in steps:
            if out.logits is not None:
                logits[i].append(out.logits[place].cpu())
            if out.mtp_logits is not None:
                mtp_logits[i].append(out.mtp_logits[place].cpu())
    return [torch.cat(chunks) for chunks in logits], [torch.cat(chunks) for chunks in mtp_logits] if mtp else []


def score_logprobs(
    runner: Scorer,
    prompts: Iterable[TokenIds],
    top: int,
    chunk_size: int | None = None,
    *,
    replays: list[Replay | None] | None = None,
    progress: bool = False,
) -> list[TokenLogprobs]:
    """Result of `ModelRunner.score_logprobs`."""
    sequences = [runner.sequence(prompt) for prompt in each_prompt(prompts)]
    parts: list[list[TokenLogprobs]] = [[] for _ in sequences]

    def options(chosen: list[Sequence]) -> StepOptions:
        return StepOptions(scored=tuple(ScoredRows(0, len(sequence.token_ids) - 1, top) for sequence in chosen))

    with closing(scoring_steps(runner, sequences, options, chunk_size, progress, replays)) as steps:
        for i, place, out in steps:
            if out.scored is not None and (part := out.scored[place]) is not None:
                parts[i].append(part)
    return [TokenLogprobs.join(chunks, top) for chunks in parts]


def scoring_steps(
    runner: Scorer,
    sequences: list[Sequence],
    options: Callable[[list[Sequence]], StepOptions],
    chunk_size: int | None,
    progress: bool,
    replays: list[Replay | None] | None = None,
    stores: list[RecordStore] | None = None,
) -> Generator[tuple[int, int, StepOutput]]:
    """Computes all tokens; yields for each sequence of each step its number, its place in the step, and the output.

    Args:
        options: of a step over these sequences.
        replays: of each sequence, its given experts and entries; stores: of each sequence, the store of its records.
    """
    if chunk_size is not None and (not is_integer(chunk_size) or chunk_size < 1):
        raise ValueError(f"chunk_size={chunk_size!r}: must be an integer of at least 1")
    bar = tqdm(total=sum(len(s.token_ids) for s in sequences), unit="tok", disable=None if progress else True)
    try:
        with bar:
            while pending := [i for i, s in enumerate(sequences) if s.num_pending]:
                work = plan_chunks([(i, sequences[i]) for i in pending], chunk_size, runner.layout)
                step_options = options([sequences[i] for i, _ in work])
                if replays is not None:
                    step_options = replace(step_options, replay=tuple(replays[i] for i, _ in work))
                if stores is not None:
                    step_options = replace(step_options, record=tuple(stores[i].options for i, _ in work))
                out = runner.step([(sequences[i], n) for i, n in work], step_options)
                for place, (i, n) in enumerate(work):
                    if stores is not None and out.records is not None and (rows := out.records[place]) is not None:
                        stores[i].put(sequences[i].num_computed - n, rows)
                    yield i, place, out
                    if not sequences[i].num_pending:
                        sequences[i].free()
                        sequences[i].token_ids.clear()
                        if stores is not None:
                            stores[i].finish(stores[i].length)  # closes its files
                    bar.update(n)
    finally:
        for sequence in sequences:
            sequence.free()
    runner.wait_for_ranks()


def plan_chunks(
    pending: list[tuple[int, Sequence]], chunk_size: int | None, layout: CacheLayout
) -> list[tuple[int, int]]:
    """(index, number of tokens) of each sequence in the next step: sequences in order, up to the token budget."""
    budget, work = layout.max_num_batched_tokens, []
    for index, sequence in pending[: layout.max_num_seqs]:
        n = min(sequence.num_pending, budget, chunk_size or budget)
        if n:
            work.append((index, n))
            budget -= n
    return work
