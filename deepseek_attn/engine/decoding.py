"""How many tokens a decoding request takes in a step, and what is made of its logits.

`NextToken` samples one token after another. Anything else (speculation) subclasses it: `propose` may append drafts to
the sequences, so that a request has more than one token pending, and `accept` then decides which of them stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import sample
from deepseek_attn.runner import StepOutput

Work = list[tuple[Request, int]]


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
    """

    decode_tokens = 1
    mtp = False

    def options(self, work: Work) -> dict[str, Any]:
        """What `ModelRunner.step` is asked for, beside the batch."""
        return {}

    def propose(self, running: list[Request]) -> None:
        """Called before each attempt at a step; a request that has drafts already keeps them."""

    def accept(self, work: Work, output: StepOutput) -> Accepted:
        """Chooses the tokens of requests that have none pending; one whose logits are broken fails alone."""
        ready = [(request, rows) for (request, _), rows in zip(work, output.logits, strict=True) if is_ready(request)]
        if not ready:
            return Accepted()
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


def is_ready(request: Request) -> bool:
    """Whether all tokens of a request have been computed."""
    return not request.sequence.num_pending
