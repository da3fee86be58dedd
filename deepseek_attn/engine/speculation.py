"""Speculative decoding: the MTP layer or a DSpark drafter drafts the next tokens, and one step verifies all of them.

A draft is accepted if it is the token that would have been sampled there: each row of the model's own logits is
processed by the tokens before it, drafts included, and sampled with the random numbers that it would have used. So the
text is the same as without speculation, greedy or not, and sampled tokens keep their distribution (a draft ``d`` is
accepted with the probability ``p(d)``).

The MTP layer pairs a token's hidden states with the token after it. So the MTP row of a request's last token is
computed once the next token is sampled, together with the drafts after it. Where all requests are greedy and decode
steps run over persistent tensors, this is part of the step (`DecodeStep`), so that the next step can start before the
host has read any token; elsewhere `accept` calls the runner. A DSpark drafter is always called by `accept`: it
makes keys of the confirmed tokens' hidden states, then drafts a block after them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.engine.decoding import (
    BROKEN_LOGITS,
    Accepted,
    NextToken,
    Work,
    is_ready,
    may_leave_snapshot,
    next_tokens,
)
from deepseek_attn.engine.logprobs import greedy_logprobs_of, sampled_logprobs
from deepseek_attn.engine.request import Request
from deepseek_attn.kernels.sampling import INVALID_TOKEN
from deepseek_attn.runner import ModelRunner, StepOptions, StepOutput
from deepseek_attn.runner.drafting import DraftRows
from deepseek_attn.runner.logprobs import TokenLogprobs
from deepseek_attn.utils.device import AsyncHostCopy


@dataclass
class _Verification:
    """The last confirmed token of a request and its drafts: one row each, after which a token is chosen.

    Attributes:
        place: of the request in the step.
        first: position of the first row; rows of a prompt before its last one are left out, their next token is known.
        rows: number of rows.
        tokens: tokens after the rows up to the last accepted draft, once they are known.
    """

    request: Request
    place: int
    first: int
    rows: int
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, place: int) -> _Verification:
        first = request.confirmed_length - 1
        return cls(request, place, first, len(request.sequence.token_ids) - first)

    @property
    def drafts(self) -> list[int]:
        return self.request.sequence.token_ids[self.first + 1 :]

    def verify(self, chosen: list[int | str], accepted: Accepted) -> bool:
        """Accepts the leading drafts that equal the chosen tokens, and the token after them; False without a token.

        Args:
            chosen: the token after each row, or the reason why it has no token; later rows are then ignored.
        """
        tokens = list[int]()
        for token in chosen:
            if isinstance(token, str):
                if not tokens:
                    accepted.failures[self.request] = token
                    return False
                break
            tokens.append(token)
        drafts = self.drafts
        right = next((i for i, draft in enumerate(drafts) if tokens[i : i + 1] != [draft]), len(drafts))
        if drafts:
            accepted.verified[self.request] = len(drafts), right
        self._keep(tokens[: right + 1])
        accepted.tokens[self.request] = self.tokens
        return True

    def _keep(self, tokens: list[int]) -> None:
        """Rolls back the rejected drafts.

        Accepted drafts leave ``token_ids`` too: the engine appends them one by one, and checks for stops.
        """
        sequence = self.request.sequence
        sequence.truncate(self.first + len(tokens), keep_pages=True)
        del sequence.token_ids[self.first + 1 :]
        self.tokens = tokens


class MTPSpeculation(NextToken):
    """Decodes with ``num_drafts`` drafts of the MTP layer, or of a DSpark drafter, per request and step.

    Raises:
        ValueError: a model without either, or more drafts than it makes, or than a step can compute or roll back.
    """

    mtp = True

    def __init__(self, runner: ModelRunner, num_drafts: int = 1):
        runner.expect_drafts(num_drafts)
        self.runner, self.num_drafts = runner, num_drafts
        self.decode_tokens = 1 + num_drafts
        self._drafts: dict[Request, list[int]] = {}
        self._arriving: tuple[list[Request], AsyncHostCopy] | None = None  # drafts that are not read yet

    def is_chosen_by_runner(self, request: Request) -> bool:
        return super().is_chosen_by_runner(request) and not request.processes_logits

    def options_with_logits(self, work: Work) -> StepOptions:
        # prompt rows go through the MTP layer within the step: pages that they read may be freed after it
        return StepOptions(last=self.decode_tokens, hidden_states=True, mtp=has_prompts(work))

    def greedy_options(self, work: Work, runner: ModelRunner) -> StepOptions:
        if self._drafts_within_step(work, runner):
            return StepOptions(last=self.decode_tokens, greedy=True, drafts=self.num_drafts)
        return replace(self.options_with_logits(work), greedy=True)

    def next_step(self, work: Work, runner: ModelRunner) -> list[Request]:
        return super().next_step(work, runner) if self._drafts_within_step(work, runner) else []

    def _drafts_within_step(self, work: Work, runner: ModelRunner) -> bool:
        """Whether a greedy step verifies drafts and nothing else, where the runner can draft the next ones in it."""
        drafter, graphs = runner.drafter, runner.graphs
        if drafter is None or graphs is None or not drafter.drafts_in_graphs or has_prompts(work):
            return False
        return graphs.supports([n for _, n in work], self.decode_tokens)

    def propose(self, running: list[Request]) -> None:
        if self._arriving is not None:
            requests, drafts = self._arriving
            self._drafts |= zip(requests, drafts.wait(), strict=True)
            self._arriving = None
        still_running = set(running)
        self._drafts = {request: drafts for request, drafts in self._drafts.items() if request in still_running}
        for request in running:
            drafts = self._drafts.pop(request, [])
            if request.sequence.num_pending == 1:
                request.sequence.token_ids += drafts[: max(0, request.tokens_left - 1)]

    def forget(self) -> None:
        self._drafts, self._arriving = {}, None

    def accept(self, work: Work, output: StepOutput) -> Accepted:
        accepted = Accepted()
        if not any(is_ready(request) for request, _ in work):
            return accepted  # without waiting for the device
        ready = [_Verification.of(request, i) for i, (request, _) in enumerate(work) if is_ready(request)]
        if output.tokens is not None:
            greedy = output.tokens()
            tokens = [[BROKEN_LOGITS if t == INVALID_TOKEN else t for t in greedy[v.place][-v.rows :]] for v in ready]
            of_rows = greedy_logprobs_of(work, output)
            accepted.logprobs = {v.request: of_rows[v.request][-v.rows :] for v in ready if v.request in of_rows}
        else:
            logits = output.logits or []
            tokens, accepted.logprobs = self._sample(ready, [logits[v.place][-v.rows :] for v in ready])
        verified = [v for v, after in zip(ready, tokens, strict=True) if v.verify(after, accepted)]
        wanted = [v for v in verified if self._needs_draft_rows(v)]
        if output.drafts is not None:
            drafts = output.drafts()
            self._drafts |= {v.request: drafts[v.place] for v in wanted}
        elif wanted:
            states = output.hidden_states or []
            with suppress(torch.OutOfMemoryError, MemoryError):  # sampled tokens are kept, with drafts or without
                self._draft(wanted, [states[v.place][-v.rows :][: len(v.tokens)] for v in wanted])
        return accepted

    def _needs_draft_rows(self, verified: _Verification) -> bool:
        """Whether a request goes on after its new tokens, or leaves a snapshot from which others do."""
        added = len(verified.tokens)
        return verified.request.tokens_left > added or may_leave_snapshot(self.runner, verified.first, added)

    def _sample(
        self, ready: list[_Verification], rows: list[torch.Tensor]
    ) -> tuple[list[list[int | str]], dict[Request, TokenLogprobs]]:
        """(token after each row of each request, or the reason why it has no token; requested log-probabilities)."""
        logits, owners = torch.cat(rows), [(v.request, i) for v in ready for i in range(v.rows)]
        tokens = next_tokens(logits, owners)
        chosen = iter(tokens)
        return [[next(chosen) for _ in range(v.rows)] for v in ready], sampled_logprobs(owners, logits, tokens)

    def _draft(self, verified: list[_Verification], hidden_states: list[torch.Tensor]) -> None:
        """Fills the MTP layer's rows of the confirmed tokens, and drafts the tokens after the newest one."""
        pairs = zip(verified, hidden_states, strict=True)
        batch = [DraftRows(v.request.sequence, v.first, states, v.tokens) for v, states in pairs]
        drafts = self.runner.draft(batch, self._num_drafts_that_fit(verified)).tokens
        if drafts.shape[1]:
            self._arriving = [v.request for v in verified], AsyncHostCopy(drafts)

    def _num_drafts_that_fit(self, verified: list[_Verification]) -> int:
        """Drafts that have pages and positions: most write rows past the last computed token."""
        sequences, drafter = [v.request.sequence for v in verified], self.runner.drafter
        if drafter is None:
            return 0
        extra, fewest = drafter.rows_past_end(self.num_drafts), 0 if drafter.rows_past_end(1) else 1
        if max(sequence.num_computed for sequence in sequences) + extra > self.runner.layout.max_model_len:
            return fewest
        try:
            if extra:
                self.runner.manager.reserve([(sequence.cache, extra) for sequence in sequences])
        except OutOfPages:
            return fewest
        return self.num_drafts


def has_prompts(work: Work) -> bool:
    """Whether some rows of a step have a next token that is known already."""
    return any(request.sequence.num_computed < request.confirmed_length - 1 for request, _ in work)
