"""Speculative decoding with the MTP layer: it guesses the next tokens, and one step of the model checks them all.

A guess stays if it is the very token that would have been sampled there: the sampler runs on the model's own logits,
row by row, with the random numbers that each row would have used. So text is the same as without speculation, greedy or
not, and what a temperature draws keeps its distribution (a guess ``d`` is accepted with the probability ``p(d)``).

The MTP layer pairs a token's streams with the token after it. Its row of a request's last token therefore waits until
the next token is sampled; everything that a request computed in a step is drafted from right after that.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from deepseek_attn.cache.manager import OutOfPages
from deepseek_attn.engine.decoding import BROKEN_LOGITS, Accepted, NextToken, Work, all_greedy, is_ready
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import CounterGenerator, sample
from deepseek_attn.kernels.sampling import INVALID_TOKEN
from deepseek_attn.runner import ModelRunner, StepOptions, StepOutput
from deepseek_attn.utils.device import AsyncHostCopy


@dataclass
class _Turn:
    """Rows of a request whose next token is to be chosen: its last certain token, then its guesses.

    Attributes:
        chosen: the most likely token after each row, or its logits; streams: one row each.
        first: position of the first one.
        tokens: what comes after each row that stays.
    """

    request: Request
    chosen: list[int] | torch.Tensor
    streams: torch.Tensor
    first: int
    tokens: list[int]

    @classmethod
    def of(cls, request: Request, chosen: list[int] | torch.Tensor, streams: torch.Tensor) -> _Turn:
        """Leaves out rows of a prompt before its last one: their next token is known."""
        first = request.certain_length - 1
        rows = len(request.sequence.token_ids) - first
        return cls(request, chosen[-rows:], streams[-rows:], first, [])

    @property
    def guesses(self) -> list[int]:
        return self.request.sequence.token_ids[self.first + 1 :]

    def keep(self, tokens: list[int]) -> None:
        """Takes back the guesses after those that lead to ``tokens``.

        Tokens of right guesses leave ``token_ids`` too: the engine appends them, and looks for stops on the way.
        """
        sequence = self.request.sequence
        sequence.truncate(self.first + len(tokens))
        del sequence.token_ids[self.first + 1 :]
        self.tokens, self.streams = tokens, self.streams[: len(tokens)]


class MTPSpeculation(NextToken):
    """Decodes with ``num_drafts`` guesses of the MTP layer per request and step.

    Guesses after the first come from the MTP layer's own streams.

    Raises:
        ValueError: a model without an MTP layer, or more guesses than a step can take or take back.
    """

    mtp = True

    def __init__(self, runner: ModelRunner, num_drafts: int = 1):
        layout = runner.layout
        # a step that broke off can be repeated in place if it had at most max_rollback tokens of a request
        limit = min(layout.max_rollback, layout.max_num_batched_tokens) - 1
        if not runner.has_mtp:
            raise ValueError(
                "speculation needs an MTP layer, and this model has none (num_nextn_predict_layers is 0, or only some "
                "layers were loaded); leave it out"
            )
        if isinstance(num_drafts, bool) or not isinstance(num_drafts, int) or not 1 <= num_drafts <= limit:
            raise ValueError(
                f"{num_drafts!r} drafts per step: supported are 1 to {limit}, one less than "
                f"max_rollback={layout.max_rollback} and max_num_batched_tokens={layout.max_num_batched_tokens} allow"
            )
        self.runner, self.num_drafts = runner, num_drafts
        self.decode_tokens = 1 + num_drafts
        if runner.graphs is not None:
            runner.graphs.most_tokens = max(runner.graphs.most_tokens, self.decode_tokens)
        self._guesses: dict[Request, list[int]] = {}
        self._arriving: tuple[list[Request], AsyncHostCopy] | None = None  # guesses that nobody has waited for yet

    def options(self, work: Work) -> StepOptions:
        # rows of prompts go through the MTP layer with the step: what they read may be freed after it
        prompts = any(request.sequence.num_computed < request.certain_length - 1 for request, _ in work)
        return StepOptions(last=self.decode_tokens, hidden_states=True, mtp=prompts, greedy=all_greedy(work))

    def propose(self, running: list[Request]) -> None:
        if self._arriving is not None:
            requests, guesses = self._arriving
            self._guesses |= zip(requests, guesses.wait(), strict=True)
            self._arriving = None
        here = set(running)
        self._guesses = {request: guesses for request, guesses in self._guesses.items() if request in here}
        for request in running:
            guesses = self._guesses.pop(request, [])
            if request.sequence.num_pending == 1:
                request.sequence.token_ids += guesses[: max(0, request.tokens_left - 1)]

    def accept(self, work: Work, output: StepOutput) -> Accepted:
        accepted = Accepted()
        if not any(is_ready(request) for request, _ in work):
            return accepted  # without waiting for the device
        found = output.logits if output.tokens is None else output.tokens()
        turns = [
            _Turn.of(request, chosen, streams)
            for (request, _), chosen, streams in zip(work, found, output.hidden_states, strict=True)
            if is_ready(request)
        ]
        tokens = self._sample(turns) if output.tokens is None else [sound_part(turn.chosen) for turn in turns]
        turns = [turn for turn, after in zip(turns, tokens, strict=True) if check(turn, after, accepted)]
        turns = [turn for turn in turns if turn.request.tokens_left > len(turn.tokens)]
        if turns:
            with suppress(torch.OutOfMemoryError, MemoryError):  # what was sampled stands, with guesses or without
                self._draft(turns)
        return accepted

    def _sample(self, turns: list[_Turn]) -> list[list[int]]:
        """What comes after each row of each turn, up to a row whose logits are broken."""
        if not turns:
            return []
        rows = torch.cat([turn.chosen for turn in turns])
        owners = [(turn.request, i) for turn in turns for i in range(len(turn.chosen))]
        sound = rows.amax(-1).isfinite()
        draws = [ahead(request.generator, i) for request, i in owners]
        tokens = sample(torch.where(sound[:, None], rows, 0.0), [request.params for request, _ in owners], draws)
        chosen = iter(torch.where(sound, tokens, INVALID_TOKEN).tolist())
        return [sound_part([next(chosen) for _ in turn.chosen]) for turn in turns]

    def _draft(self, turns: list[_Turn]) -> None:
        """Fills the MTP layer's rows of what was computed, and guesses the tokens after the newest one."""
        batch = [(turn.request.sequence, turn.first, turn.streams, turn.tokens) for turn in turns]
        guesses = self.runner.draft(batch, self._room(turns)).tokens
        self._arriving = [turn.request for turn in turns], AsyncHostCopy(guesses)

    def _room(self, turns: list[_Turn]) -> int:
        """How many guesses there are pages and positions for: later ones write rows past the last computed token."""
        sequences = [turn.request.sequence for turn in turns]
        extra = self.num_drafts - 1
        if max(sequence.num_computed for sequence in sequences) + extra > self.runner.layout.max_model_len:
            return 1
        try:
            if extra:
                self.runner.manager.reserve([(sequence.cache, extra) for sequence in sequences])
        except OutOfPages:
            return 1
        return self.num_drafts


def sound_part(tokens: list[int]) -> list[int]:
    """The tokens before the first one whose logits are broken."""
    return tokens[: tokens.index(INVALID_TOKEN)] if INVALID_TOKEN in tokens else tokens


def check(turn: _Turn, tokens: list[int], accepted: Accepted) -> bool:
    """Keeps the guesses that are what was sampled, and the token after them; False if there is none."""
    if not tokens:
        accepted.failures[turn.request] = BROKEN_LOGITS
        return False
    guesses = turn.guesses
    right = next((i for i, guess in enumerate(guesses) if tokens[i : i + 1] != [guess]), len(guesses))
    if guesses:
        accepted.verified[turn.request] = len(guesses), right
    turn.keep(tokens[: right + 1])
    if not turn.request.params.greedy:
        turn.request.generator.position += len(turn.tokens)
    accepted.tokens[turn.request] = turn.tokens
    return True


def ahead(generator: CounterGenerator, draws: int) -> CounterGenerator:
    """The random numbers of ``generator`` after ``draws`` more of them."""
    copy = CounterGenerator(generator.key)
    copy.position = generator.position + draws
    return copy
