"""The generation loop: which tokens go into the next step, and what happens to their logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch

from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import sample
from deepseek_attn.runner import ModelRunner


def plan_step(running: list[Request], max_num_batched_tokens: int) -> list[tuple[Request, int]]:
    """(request, tokens) of the next step: every decode first, then prompts in order while the budget lasts."""
    budget, work = max_num_batched_tokens, []
    for request in sorted(running, key=lambda r: r.sequence.num_pending > 1):
        n = min(request.sequence.num_pending, budget)
        if n:
            work.append((request, n))
            budget -= n
    return work


def run_requests(runner: ModelRunner, requests: Iterable[Request]) -> Iterator[list[tuple[Request, int, str]]]:
    """Runs requests to their end, as many at a time as the caches hold.

    Yields after each step (request, tokens computed, new text) for what took part in it. Closing the generator early
    frees every request.
    """
    waiting, running = deque(requests), []
    try:
        while waiting or running:
            while waiting and len(running) < runner.layout.max_num_seqs:
                running.append(waiting.popleft())
            work = plan_step(running, runner.layout.max_num_batched_tokens)
            logits = runner.step([(request.sequence, n) for request, n in work]).logits
            texts = sample_next(work, logits)
            yield [(request, n, texts.get(request, "")) for request, n in work]
            running = [request for request in running if request.finish_reason is None]
    finally:
        for request in [*running, *waiting]:
            request.sequence.free()


def sample_next(work: list[tuple[Request, int]], logits: list[torch.Tensor]) -> dict[Request, str]:
    """Samples a token for each request whose tokens are all computed; returns the new text of each."""
    ready = [i for i, (request, _) in enumerate(work) if not request.sequence.num_pending]
    if not ready:
        return {}
    chosen = [work[i][0] for i in ready]
    rows = torch.cat([logits[i] for i in ready])
    tokens = sample(rows, [r.params for r in chosen], [r.generator for r in chosen]).tolist()
    return {request: request.push(token) for request, token in zip(chosen, tokens, strict=True)}
