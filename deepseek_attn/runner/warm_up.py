"""Steps of every size that a runner may compute, so that their kernels are listed, loaded and captured in advance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.cache.pages import NULL_PAGE
from deepseek_attn.kernels.sampling import greedy_tokens
from deepseek_attn.runner.graph_steps import CapturedStep, StepSize
from deepseek_attn.runner.graphs import length_bucket
from deepseek_attn.runner.loaded import LoadedModel
from deepseek_attn.runner.step import Rows
from deepseek_attn.runner.trailing import TrailingRows

QUESTION = 16
"""Tokens of a short first prompt."""


@dataclass
class WarmUp:
    """Steps of a runner that together launch every kernel that its steps can launch.

    They read and write null pages only, so they do not change the caches of sequences.

    Attributes:
        num_drafts: tokens that are drafted per step; 0 without speculation.
    """

    runner: LoadedModel
    num_drafts: int = 0

    def steps(self) -> Iterator[None]:
        """Runs a step of each size; yields after each."""
        for size in self.sizes():
            with self.runner.op_settings(), torch.inference_mode():  # not around a yield: they concern the process
                if isinstance(size, StepSize):
                    self.decode(size)
                else:
                    self.prefill(size)
            yield

    def sizes(self) -> list[StepSize | Rows]:
        """Every size of a step, in the order in which first requests are likely to need their kernels.

        The largest step of a prompt, decodes of one request, the steps after the first of a long prompt, a prompt as
        long as a question, other whole prompts, and all the rest.
        """
        decodes = [*self.decode_sizes(), *self.eager_decode_sizes()]
        alone = [size for size in decodes if (size.requests if isinstance(size, StepSize) else len(size)) == 1]
        prefills = [*self.prefill_sizes(), *self.mixed_sizes()]
        ((largest, _),) = prefills[0]

        def later(rows: Rows) -> tuple[bool, bool, bool]:
            (new, length), *others = rows
            prompt = not others and new == length and not new & (new - 1)
            return new < largest or bool(others), not prompt or new != QUESTION, not prompt

        prefills.sort(key=later)
        return [*prefills[:1], *alone, *prefills[1:], *(size for size in decodes if size not in alone)]

    def decode_sizes(self) -> list[StepSize]:
        """Every size of a decode step over persistent tensors."""
        graphs, limit, drafts = self.runner.graphs, self.runner.layout.max_model_len, self.num_drafts
        if graphs is None:
            return []
        lengths = sorted({length_bucket(n, limit) for n in powers(limit)})
        kinds = [(1, 0), (1 + drafts, 0)] if drafts else [(1, 0)]
        kinds[1:1] = [(1 + drafts, drafts)] if self._drafts_in_graphs else []
        sizes = [StepSize(n, rows, length, k) for rows, k in kinds for n in graphs.batches for length in lengths]
        return [size for size in sizes if size.rows <= self.runner.layout.max_num_batched_tokens]

    def decode(self, size: StepSize) -> None:
        """A decode step of this size: captured, where steps are."""
        for step in self.decode_steps(size):
            if step.graph is None:
                step.run()

    def decode_steps(self, size: StepSize) -> list[CapturedStep]:
        """The decode step of this size, and with drafts the step that drafts after it; captured, where steps are."""
        graphs, self.runner.parallel.step_rows = self.runner.graphs, size.rows
        if graphs is None:
            raise ValueError("the runner has no decode steps over persistent tensors: decode_sizes() is empty")
        steps: list[CapturedStep] = [graphs.step(size)]
        if self._drafts_in_graphs and not size.num_drafts:
            steps.append(graphs.draft_step(size._replace(num_drafts=self.num_drafts)))
        return steps

    def prefill_sizes(self) -> list[Rows]:
        """Shapes of eager steps.

        Kernels are chosen by the number of tokens, of requests, and by the longest request. Bounds of the choices lie
        at powers of two, or between two of them, a quarter of the way or more apart.
        """
        layout = self.runner.layout
        most, requests, longest = layout.max_num_batched_tokens, layout.max_num_seqs, layout.max_model_len
        sizes = []
        for tokens in reversed(grid(most)):
            power = tokens == most or not tokens & (tokens - 1)
            alone = min(tokens, longest)
            lengths = [n for n in powers(longest) if n > alone and power] or [longest]
            sizes += [[(alone, length)] for length in (alone, *lengths)]
            several = min(requests, tokens // 2)
            if several > 1:
                each = [tokens // several] * (several - 1) + [tokens - tokens // several * (several - 1)]
                each = [min(n, longest) for n in each]
                sizes += [[(n, max(n, length)) for n in each] for length in (0, longest)[1 - power :]]
            decodes = min(requests - 1, tokens - 2)
            if decodes > 0 and power:
                new = min(tokens - decodes, longest)
                sizes += [[(1, length)] * decodes + [(new, length)] for length in sorted({new, longest})]
        return sizes

    def mixed_sizes(self) -> list[Rows]:
        """Decode tokens beside a short prefill: attention reads queries in a mixed step, projected heads without one.

        A prefill's kernels do not depend on the decode tokens beside it.
        """
        layout, most_new = self.runner.layout, self.runner.decode_query_len
        longest, prefill = layout.max_model_len, most_new + 1
        requests, sizes = layout.max_num_seqs - 1, []
        most = min(requests * most_new, layout.max_num_batched_tokens - prefill)
        for tokens in grid(most) if most > 0 and prefill <= longest else []:
            rows = min(tokens, requests)
            new = [tokens // rows + (row < tokens % rows) for row in range(rows)]
            lengths = lengths_of(tokens, new[0], longest)
            sizes += [[*((n, length) for n in new), (prefill, prefill)] for length in lengths]
        return sizes

    def eager_decode_sizes(self) -> list[Rows]:
        """Decodes and verifications of drafts, as `prefill` takes them, if they or the drafting after them is eager."""
        layout, drafts = self.runner.layout, self.num_drafts
        if self.runner.graphs is not None and (not drafts or self._drafts_in_graphs):
            return []
        longest, sizes = layout.max_model_len, []
        for new in sorted({1, 1 + drafts}):
            most = min(layout.max_num_seqs, layout.max_num_batched_tokens // new)
            for requests in grid(most) if new <= longest else []:
                sizes += [[(new, length)] * requests for length in lengths_of(requests, new, longest)]
        return sizes

    @property
    def _drafts_in_graphs(self) -> bool:
        return self.num_drafts > 0 and self.runner.drafter is not None and self.runner.drafter.drafts_in_graphs

    def prefill(self, rows: Rows, trailing: TrailingRows | None = None) -> None:
        """An eager step; with drafts, the MTP layer runs over its tokens too.

        With ``trailing``, of whole prompts, upper layers compute the rows that results at their ends need.
        """
        runner, threshold = self.runner, self.runner.decode_query_len
        rows = sorted(rows, key=lambda row: row[0] > threshold)
        query_lens, seq_lens = (torch.tensor(part, dtype=torch.int64, device="cpu") for part in zip(*rows, strict=True))
        total, longest, spans = int(query_lens.sum()), int(seq_lens.max()), runner.layout.spans
        pages = {
            group: -(-longest // spans[group].page_tokens) if group in spans else 1 for group in runner.layout.pages
        }
        tables = {
            group: torch.full((len(rows), n), NULL_PAGE, dtype=torch.int32, device="cpu") for group, n in pages.items()
        }
        batch = StepInput(query_lens, seq_lens, tables, None, threshold)
        ids = torch.zeros(total, dtype=torch.int64, device=runner.device)
        runner.parallel.step_rows = total
        meta = runner.builder.build(batch)
        if runner.tables is not None:
            meta.engram = runner.tables.blank(total)
        if trailing is not None:
            trailing.attach(meta, batch, [trailing.whole_prompt(tokens) for tokens, _ in rows])
        model = runner.whole_model()
        states = model(ids, meta.positions, meta)
        greedy_tokens(model.logits(states[: len(rows)]))
        if self.num_drafts and runner.drafter is not None:
            runner.drafter.warm_up(batch, states, ids, self.num_drafts)


def powers(limit: int) -> list[int]:
    """Powers of two below ``limit``, then ``limit``."""
    return [1 << i for i in range((limit - 1).bit_length())] + [limit]


def lengths_of(count: int, least: int, limit: int) -> list[int]:
    """Lengths of ``count`` rows: `powers` from ``least`` on if ``count`` is a power of two, else ``limit`` alone."""
    return [limit] if count & (count - 1) else [n for n in powers(limit) if n >= least]


def grid(limit: int) -> list[int]:
    """Numbers of tokens up to ``limit``, ascending: powers of two, three between each two, and those one larger."""
    bounds = [power * quarters // 4 for power in powers(limit) for quarters in range(4, 8)]
    return sorted({n for bound in bounds for n in (bound, bound + 1) if n <= limit} | {limit})
