"""Log-probabilities of a step: selects the tokens that need them, and hands the results to the requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from deepseek_attn.engine.request import Request
from deepseek_attn.runner import StepOptions, StepOutput
from deepseek_attn.runner.logprobs import PendingLogprobs, TokenLogprobs, packed_logprobs
from deepseek_attn.utils.device import to_device


def with_logprobs(options: StepOptions, work: list[tuple[Request, int]]) -> StepOptions:
    """The options of a step, and the log-probabilities that its requests need.

    Where the runner chooses the tokens, it computes theirs too: on the device, before the next step is launched.
    """
    scored = tuple(request.logprobs.missing for request, _ in work)
    if any(scored):
        options = replace(options, scored=scored)
    if options.greedy:
        tops = tuple(request.logprobs.top if n == request.sequence.num_pending else None for request, n in work)
        if any(top is not None for top in tops):
            options = replace(options, logprobs=tops)
    return options


def keep_scored(work: list[tuple[Request, int]], output: StepOutput) -> None:
    """Gives requests the log-probabilities of their prompts that a step has computed."""
    for (request, _), scored in zip(work, output.scored or [], strict=False):
        if scored is not None:
            request.logprobs.prompt.append(scored)


def greedy_logprobs_of(work: list[tuple[Request, int]], output: StepOutput) -> dict[Request, TokenLogprobs]:
    """Log-probabilities of the tokens that the runner chose, of the requests that want them. Waits for the device."""
    found = zip(work, output.logprobs() if output.logprobs else [], strict=False)
    return {request: part for (request, _), part in found if part is not None}


def sampled_logprobs(
    owners: Sequence[tuple[Request, int]], logits: torch.Tensor, tokens: Sequence[int | str]
) -> dict[Request, TokenLogprobs]:
    """Log-probabilities of sampled tokens, of the requests that want them.

    Args:
        owners: of each row, the request, and the number of drafts before the row; see `next_tokens`.
        logits: the model's own, float32 ``[R, vocab]``.
        tokens: the token after each row, or the reason why it has no token.
    """
    rows = [row for row, (request, _) in enumerate(owners) if request.logprobs.top is not None]
    if not rows:
        return {}
    counts = Counter(owners[row][0] for row in rows)
    tops = [request.logprobs.top or 0 for request in counts]
    chosen = to_device([0 if isinstance(token := tokens[row], str) else token for row in rows], logits.device)
    packed = packed_logprobs(logits[to_device(rows, logits.device)], chosen, max(tops))
    found = PendingLogprobs(packed, chosen, list(counts.values()), tops).wait()
    return {request: part for request, part in zip(counts, found, strict=True) if part is not None}
