"""Decoding: how many tokens a request computes in a step, and which tokens its results lead to.

`NextToken` samples one token per step. Speculation subclasses it: `propose` may append drafts to the sequences, so that
a request has more than one token pending, and `accept` then decides which of them stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from deepseek_attn.engine.drawing import sample_valid
from deepseek_attn.engine.logits import NOTHING_LEFT, processed_logits
from deepseek_attn.engine.logprobs import greedy_logprobs_of, sampled_logprobs
from deepseek_attn.engine.request import Request
from deepseek_attn.kernels.sampling import INVALID_TOKEN
from deepseek_attn.runner import ModelRunner, StepOptions, StepOutput
from deepseek_attn.runner.logprobs import TokenLogprobs

Work = list[tuple[Request, int]]
BROKEN_LOGITS = "the model's logits hold NaN or infinity: check the weights and numerics"


@dataclass
class Accepted:
    """The tokens that a step's results led to.

    Attributes:
        tokens: new tokens of each request without pending tokens. The engine appends them to its sequence, so accepted
            drafts are removed from ``token_ids`` before, while their entries stay in the caches.
        failures: error messages of requests that failed.
        verified: (drafts, accepted drafts) of each request that had drafts.
        logprobs: log-probabilities of the tokens of each request that wants them, perhaps of rejected ones behind them.
    """

    tokens: dict[Request, list[int]] = field(default_factory=dict)
    failures: dict[Request, str] = field(default_factory=dict)
    verified: dict[Request, tuple[int, int]] = field(default_factory=dict)
    logprobs: dict[Request, TokenLogprobs] = field(default_factory=dict)


class NextToken:
    """One sampled token per request and step.

    Attributes:
        decode_tokens: a request with at most this many pending tokens is decoding, and computes all of them in one
            step.
        mtp: the MTP layer's caches are filled as well.
    """

    decode_tokens = 1
    mtp = False

    def options(self, work: Work, runner: ModelRunner, async_allowed: bool) -> StepOptions:
        """Options of the runner's step.

        Args:
            async_allowed: the next step may be launched before the tokens of this one have been read.
        """
        allowed = self.allowed_tokens(work, runner)
        if allowed is None:
            return self.options_with_logits(work)
        requests = self.next_step(work, runner) if async_allowed else []
        next_step = tuple((request.sequence, request.max_computed) for request in requests)
        return replace(self.greedy_options(work, runner), next_step=next_step, allowed=allowed)

    def allowed_tokens(self, work: Work, runner: ModelRunner) -> tuple[bytes | None, ...] | None:
        """`StepOptions.allowed` of a step in which the runner chooses all tokens; None where it does not.

        It does where decode steps run over persistent tensors, and all requests take the likeliest token, or the
        likeliest token that structured output allows. The host computes these while the device already computes
        a step that was launched before.
        """
        if runner.graphs is None or not all(self.is_chosen_by_runner(request) for request, _ in work):
            return None
        try:
            masks = tuple(
                request.allowed_tokens() if n == request.sequence.num_pending else None for request, n in work
            )
        except RuntimeError:  # the request fails when its logits are processed
            return None
        return masks if any(masks) else ()

    def is_chosen_by_runner(self, request: Request) -> bool:
        """Whether the next token follows from the largest logit, without a random number."""
        rules = request.rules
        processed = request.processes_logits and not (rules is not None and rules.only_grammar)
        return request.params.greedy and request.takes_computed and not processed

    def options_with_logits(self, work: Work) -> StepOptions:
        """Options of a step whose tokens are chosen from logits, request by request."""
        return StepOptions()

    def greedy_options(self, work: Work, runner: ModelRunner) -> StepOptions:
        """Options of a step in which the runner chooses all tokens."""
        return StepOptions(greedy=True)

    def next_step(self, work: Work, runner: ModelRunner) -> list[Request]:
        """Requests whose next step computes the tokens that this step chooses; empty if another step may come next."""
        for request, n in work:
            if request.sequence.num_pending > n or may_leave_snapshot(runner, request.sequence.num_computed, n):
                return []
        return [request for request, _ in work if request.tokens_left > 1]

    def propose(self, running: list[Request]) -> None:
        """Called before each step; may append drafts to requests without drafts."""

    def forget(self) -> None:
        """Called after a step that broke off: drafts are gone."""

    def accept(self, work: Work, output: StepOutput) -> Accepted:
        """Chooses the next tokens of requests without pending tokens; a request without a next token fails alone."""
        if not any(is_ready(request) for request, _ in work):
            return Accepted()  # without waiting for the device
        if output.tokens is not None:
            chosen = zip(work, output.tokens(), strict=True)
            accepted = accept_greedy({request: tokens for (request, _), tokens in chosen if is_ready(request)})
            accepted.logprobs = greedy_logprobs_of(work, output)
            return accepted
        ready = [(request, rows) for (request, _), rows in zip(work, output.rows, strict=True) if is_ready(request)]
        accepted, owners = Accepted(), [(request, 0) for request, _ in ready]
        logits = torch.cat([rows for _, rows in ready])
        tokens = next_tokens(logits, owners)
        for (request, _), token in zip(ready, tokens, strict=True):
            if isinstance(token, str):
                accepted.failures[request] = token
            else:
                accepted.tokens[request] = [token]
        accepted.logprobs = sampled_logprobs(owners, logits, tokens)
        return accepted


def next_tokens(logits: torch.Tensor, owners: list[tuple[Request, int]]) -> list[int | str]:
    """The token after each row, or the reason why it has no token.

    Args:
        logits: float32 ``[B, vocab]``, which stays as it is.
        owners: of each row, the request, and the number of drafts before the row.
    """
    rows = [request.logits_row(ahead) for request, ahead in owners]
    allowed, failures = processed_logits(logits, rows)
    generators = [request.random_numbers(ahead) for request, ahead in owners]
    tokens: list[int | str] = sample_valid(allowed, [request.params for request, _ in owners], generators).tolist()
    broken = [i for i, token in enumerate(tokens) if token == INVALID_TOKEN]
    if broken:
        finite = logits[broken].amax(-1).isfinite().tolist()
        for i, is_finite in zip(broken, finite, strict=True):
            tokens[i] = NOTHING_LEFT if is_finite else BROKEN_LOGITS
    for i, failure in failures.items():
        tokens[i] = failure
    return tokens


def accept_greedy(chosen: dict[Request, list[int]]) -> Accepted:
    """The greedy tokens that a step returned; a request whose logits are broken fails alone."""
    accepted = Accepted()
    for request, tokens in chosen.items():
        if INVALID_TOKEN in tokens:
            accepted.failures[request] = BROKEN_LOGITS
        else:
            accepted.tokens[request] = tokens
    return accepted


def may_leave_snapshot(runner: ModelRunner, computed: int, n: int) -> bool:
    """Whether the prefix cache may take a snapshot when ``n`` tokens after ``computed`` ones have been computed.

    It then shares pages of the request, which the next step copies before it writes to them.
    """
    return runner.prefixes is not None and -(computed + 1) % runner.layout.snapshot_block < n


def is_ready(request: Request) -> bool:
    """Whether all tokens of a request have been computed."""
    return not request.sequence.num_pending
