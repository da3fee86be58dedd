"""Models whose DSpark drafts are often right, and drafts of one step."""

from __future__ import annotations

import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.recipes import Recipe
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.engine.stats import EngineStats
from deepseek_attn.runner.drafting import DraftRows, DraftTokens
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.step import StepOptions
from tests.support.typed import required


class DraftedSource(RandomSource):
    """Random weights whose Markov head and output head mostly answer a token with the next one of the vocabulary."""

    certainty = 30.0

    def values(self, name: str, recipe: Recipe) -> torch.Tensor:
        values = super().values(name, recipe)
        if name == "head.weight":
            same = super().values("embed.weight", self._recipes["embed.weight"])
            return values + self.certainty * same.shape[1] ** -0.5 * values.std() / same.std() * same.roll(1, 0)
        if name.endswith(("markov_head.markov_w2.weight", "markov_head.head.weight")):
            embed = name.replace("w2.weight", "w1.weight").replace("head.head", "head.embed")
            return super().values(embed, self._recipes[embed]).roll(1, 0)
        return values


def draft_after(runner: ModelRunner, tokens: list[int], chunks: list[int], newest: int) -> DraftTokens:
    """Drafts after ``tokens`` and ``newest``, the tokens computed in chunks with drafts after each."""
    sequence = runner.sequence([*tokens, newest])
    options = StepOptions(all_logits=True, hidden_states=True, mtp=True)
    block, drafts = required(runner.config.dspark).dspark_block_size, None
    for n in chunks:
        output = runner.step([(sequence, n)], options)
        done = sequence.num_computed
        runner.manager.reserve([(sequence.cache, block)])
        rows = DraftRows(
            sequence, done - n, required(output.hidden_states)[0], sequence.token_ids[done - n + 1 : done + 1]
        )
        drafts = runner.draft([rows], block)
    sequence.free()
    return required(drafts)


def complete(
    runner: ModelRunner, jobs: list[tuple[list[int], SamplingParams]], speculate: int
) -> tuple[list[tuple[int, ...]], EngineStats]:
    """Texts of all jobs (prompt, sampling) together, with ``speculate`` drafts per step, and what it took."""
    engine = Engine(runner, None, MTPSpeculation(runner, speculate) if speculate else None)
    requests = [Request.create(runner, None, ids, params, i) for i, (ids, params) in enumerate(jobs)]
    for request in requests:
        engine.submit(request)
    while any(request.finish_reason is None for request in requests):
        engine.step()
    return [tuple(request.completion().token_ids) for request in requests], engine.stats
