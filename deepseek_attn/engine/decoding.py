"""How many tokens a decoding request takes in a step, and what is made of its logits.

`NextToken` samples one token after another. Anything else (speculation) subclasses it: `propose` may append drafts to
the sequences, so that a request has more than one token pending, and `accept` then decides which of them stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import sample
from deepseek_attn.kernels.sampling import INVALID_TOKEN
from deepseek_attn.runner import StepOptions, StepOutput

Work = list[tuple[Request, int]]
BROKEN_LOGITS = "the model's logits hold NaN or infinity: check the weights and numerics"


@dataclass
class Accepted:
    """What a step's logits led to.

    Attributes:
        tokens: new tokens of each request whose turn was complete. The engine appends them to its sequence, so drafts
            that stay are taken out of ``token_ids`` before, while their entries stay in the caches.
        failures: what went wrong with a request.
        verified: of requests that had drafts: how many, and how many of them stay.
    """

    tokens: dict[Request, list[int]] = field(default_factory=dict)
    failures: dict[Request, str] = field(default_factory=dict)
    verified: dict[Request, tuple[int, int]] = field(default_factory=dict)


class NextToken:
    """One sampled token per request and step.

    Attributes:
        decode_tokens: a request with at most this many pending tokens is decoding, and takes them all in one step.
        mtp: the MTP layer's caches are filled as well.
        may_go_ahead: the next step may start before the tokens of this one have been read; the engine says so.
    """

    decode_tokens = 1
    mtp = False
    may_go_ahead = True

    def options(self, work: Work) -> StepOptions:
        """What `ModelRunner.step` is asked for, beside the batch."""
        if not all_greedy(work):
            return StepOptions()
        return StepOptions(greedy=True, next_step=tuple(request.sequence for request in self.going_on(work)))

    def going_on(self, work: Work) -> list[Request]:
        """Requests whose next step reads the most likely token of this one; none if some other step may come next."""
        if not self.may_go_ahead or any(
            request.sequence.num_pending > n or leaves_snapshot(request, n) for request, n in work
        ):
            return []
        return [request for request, _ in work if request.tokens_left > 1]

    def propose(self, running: list[Request]) -> None:
        """Called before each attempt at a step; a request that has drafts already keeps them."""

    def accept(self, work: Work, output: StepOutput) -> Accepted:
        """Chooses the tokens of requests that have none pending; one whose logits are broken fails alone."""
        if not any(is_ready(request) for request, _ in work):
            return Accepted()  # without waiting for the device
        if output.tokens is not None:
            chosen = zip(work, output.tokens(), strict=True)
            return greedily({request: tokens for (request, _), tokens in chosen if is_ready(request)})
        ready = [(request, rows) for (request, _), rows in zip(work, output.logits, strict=True) if is_ready(request)]
        try:
            return Accepted(self._sample(ready))
        except RuntimeError:
            accepted = Accepted()
            for pair in ready:
                try:
                    accepted.tokens |= self._sample([pair])
                except RuntimeError as error:
                    accepted.failures[pair[0]] = str(error)
            return accepted

    def _sample(self, ready: list[tuple[Request, torch.Tensor]]) -> dict[Request, list[int]]:
        requests = [request for request, _ in ready]
        rows = torch.cat([rows for _, rows in ready])
        tokens = sample(rows, [r.params for r in requests], [r.generator for r in requests]).tolist()
        return {request: [token] for request, token in zip(requests, tokens, strict=True)}


def greedily(chosen: dict[Request, list[int]]) -> Accepted:
    """The most likely tokens that a step found itself; a request whose logits are broken fails alone."""
    accepted = Accepted()
    for request, tokens in chosen.items():
        if INVALID_TOKEN in tokens:
            accepted.failures[request] = BROKEN_LOGITS
        else:
            accepted.tokens[request] = tokens
    return accepted


def all_greedy(work: Work) -> bool:
    """Whether the runner may choose the tokens: where decode steps do so, and nobody draws."""
    return work[0][0].sequence.runner.graphs is not None and all(request.params.greedy for request, _ in work)


def leaves_snapshot(request: Request, n: int) -> bool:
    """Whether the prefix cache may share a request's pages after ``n`` more tokens: its next step then copies them."""
    runner, length = request.sequence.runner, request.sequence.num_computed + n
    return runner.prefixes is not None and not length % runner.layout.snapshot_block


def is_ready(request: Request) -> bool:
    """Whether all tokens of a request have been computed."""
    return not request.sequence.num_pending
