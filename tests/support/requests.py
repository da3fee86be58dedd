"""Prompts, greedy parameters and an engine run to its end, for tests of requests."""

from __future__ import annotations

import torch

from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.outputs import RequestOutput
from deepseek_attn.engine.sampling import SamplingParams


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids from 10 to 259, which every small vocabulary has; the same for the same seed."""
    return torch.randint(10, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(count: int, **options) -> SamplingParams:
    """Exactly ``count`` tokens, each the most probable, unless an option says otherwise."""
    return SamplingParams(temperature=0, max_tokens=count, **{"ignore_eos": True, **options})


def finish(engine: Engine) -> list[RequestOutput]:
    """Runs the engine until no request is left; the outputs of all steps, in order."""
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs
