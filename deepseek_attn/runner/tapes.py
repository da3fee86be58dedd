"""Decode steps of one token on a CPU, as tapes."""

from __future__ import annotations

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.models.block import Backbone
from deepseek_attn.runner.graphs import DecodeGraphs, DecodeRun, Step
from deepseek_attn.utils.tape import NotRepeatable

FIRST = 48  # steps that are computed as they are: recording one takes as long as 50 of them


class DecodeTapes(DecodeGraphs):
    """Repeats recorded decode steps of one token.

    Attributes:
        steps: steps of one token so far.
        problem: why a step could not be recorded; empty if all could.
    """

    def __init__(self, model: Backbone, layout: CacheLayout):
        super().__init__(model, layout, model.embed.weight.device, batches=[1], capture=False)
        self.steps, self.problem = 0, ""
        self.hooks = [hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    def repeat(self, cache: SequenceCache, token_id: int, position: int) -> DecodeRun | None:
        """The step of one token; None if it has to be computed as it is."""
        self.steps += 1
        if self.steps <= FIRST or self.problem or any(self.hooks):
            return None
        try:
            return self.run([cache], [[token_id]], starts=[position])
        except NotRepeatable as error:  # some layers have written their caches, and will write the same again
            self.problem = str(error)
        return None

    def _captured(self, step: Step) -> Step:
        step.records = True
        return step
