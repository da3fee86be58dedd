"""One step of `ModelRunner`: its options, its results, and a step that was computed eagerly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from deepseek_attn.attention.builder import StepInput
from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.cache.manager import CacheManager, SequenceCache
from deepseek_attn.config.options import is_integer
from deepseek_attn.impls.attention_call import AttentionCall
from deepseek_attn.kernels.sampling import greedy_tokens
from deepseek_attn.runner.allowed_tokens import some_restricted
from deepseek_attn.runner.logprobs import ScoredRows, TokenLogprobs
from deepseek_attn.runner.prompts import shown
from deepseek_attn.runner.replay import Replay
from deepseek_attn.runner.sequence import Sequence
from deepseek_attn.runner.token_records import RecordOptions, TokenRecords
from deepseek_attn.utils.device import AsyncHostCopy, to_device

Batch = list[tuple[Sequence, int]]  # (sequence, new tokens)
Rows = list[tuple[int, int]]
"""The shape of a step: (new tokens, length after them) of each request."""


@dataclass(frozen=True)
class StepOptions:
    """Results that a step returns, and computations besides the backbone.

    Attributes:
        last: results are for the last ``last`` new tokens of each sequence, fewer where it has fewer.
        all_logits: results are for every new token; ``last`` is ignored.
        greedy: return the greedy token after each of these tokens instead of its logits.
        hidden_states: also return the hidden states of these tokens, for `ModelRunner.draft`.
        mtp: also run the MTP layer over the new tokens. Its cache must hold every earlier token, so set it in every
            step; a token whose next token is not known yet is left out of it.
        drafts: with ``greedy``, a sequence's new tokens after the first are drafts of the MTP layer, and this many
            tokens are drafted after the newest one, in the same step. Only where decode steps run over persistent
            tensors; elsewhere, request ``hidden_states`` and call `ModelRunner.draft`.
        next_step: with ``greedy``, sequences of the batch whose next step most likely computes the token chosen here,
            its drafts and nothing else, each with the most tokens that will ever be computed of it: that step is
            launched at once, before the host has read the token, where decode steps run over persistent tensors and
            pages are free.
        allowed: with ``greedy``, by sequence of the batch the tokens that may come after its last new one, a bit each
            as in `runner.allowed_tokens`; None: all. Without drafts, and with ``last`` 1. Empty: all, of all sequences.
        logprobs: with ``greedy``, by sequence of the batch the number of alternatives that are listed with the
            log-probability of its greedy tokens; None: no log-probabilities. Empty: of no sequence.
        scored: by sequence of the batch, tokens that it has already whose log-probabilities are computed; None: none.
            Empty: of no sequence.
        observer: called by each attention layer of the backbone after its attention, once for each token where a step
            computes tokens one at a time (`LoadedModel.one_by_one`). Such a step runs eagerly.
        record: by sequence of the batch, the records to make of its new tokens; None: no records. Such a step runs
            eagerly. Empty: of no sequence.
        replay: by sequence of the batch, the experts and entries to use; None: the model's own choice. Such a
            step runs eagerly. Empty: of no sequence.
        ends: by sequence of the batch, the length at which its next results are wanted: that after the step, or a later
            one up to its number of tokens. Until then it has no results, so that V4.1's upper layers can leave out its
            rows. Empty: results of every sequence.
    """

    last: int = 1
    all_logits: bool = False
    greedy: bool = False
    hidden_states: bool = False
    mtp: bool = False
    drafts: int = 0
    next_step: tuple[tuple[Sequence, int], ...] = ()
    allowed: tuple[bytes | None, ...] = ()
    logprobs: tuple[int | None, ...] = ()
    scored: tuple[ScoredRows | None, ...] = ()
    observer: Callable[[AttentionCall], None] | None = None
    record: tuple[RecordOptions | None, ...] = ()
    replay: tuple[Replay | None, ...] = ()
    ends: tuple[int, ...] = ()

    def results(self, place: int, new_tokens: int, length: int) -> int:
        """Number of the last new tokens of sequence ``place`` of the batch that have results.

        Args:
            length: of the sequence after the step.
        """
        if self.ends and self.ends[place] > length:
            return 0
        return new_tokens if self.all_logits else min(new_tokens, self.last)


@dataclass
class StepOutput:
    """Results of one step: lists with one item per request, in the order of the batch.

    Attributes:
        logits: float32 ``[n, vocab_size]``; `StepOptions.last` and ``all_logits`` set ``n``. None with ``greedy``.
        tokens: call it for the greedy tokens after the same ``n`` tokens, `INVALID_TOKEN` where the largest logit is
            not finite; it waits for the device. None without ``greedy``.
        drafts: call it for the tokens of `StepOptions.drafts`; None without.
        hidden_states: ``[n, ...]`` of the same tokens, as the backbone returns them; None without ``hidden_states``.
        mtp_logits: float32 ``[m, vocab_size]`` of the MTP layer, for all new tokens whose next token is known; None
            without ``mtp``.
        logprobs: call it for the log-probabilities of ``tokens``, None for a sequence without; it waits for the device.
            None without `StepOptions.logprobs`.
        scored: log-probabilities of the tokens in `StepOptions.scored`, None for a sequence without; None without any.
        records: records requested by `StepOptions.record`, None for a sequence without; None without any.
    """

    logits: list[torch.Tensor] | None = None
    tokens: Callable[[], list[list[int]]] | None = None
    drafts: Callable[[], list[list[int]]] | None = None
    hidden_states: list[torch.Tensor] | None = None
    mtp_logits: list[torch.Tensor] | None = None
    logprobs: Callable[[], list[TokenLogprobs | None]] | None = None
    scored: list[TokenLogprobs | None] | None = None
    records: list[TokenRecords | None] | None = None

    @property
    def rows(self) -> list[torch.Tensor]:
        """The ``logits``. RuntimeError for a step that chose the tokens itself."""
        if self.logits is None:
            raise RuntimeError("a step with greedy=True has no logits")
        return self.logits


class HasLogits(Protocol):
    """A model with an output head."""

    def logits(self, hidden_states: torch.Tensor, /) -> torch.Tensor: ...


@dataclass
class EagerStep:
    """A step that was computed without persistent tensors; `DecodeRun` has the same methods.

    ``counts[i]``: number of the last rows of request ``i`` that have results. Results are ordered by request.

    Attributes:
        lengths: rows of each request, its last new tokens; states: hidden states of all, ``[sum(lengths), ...]``.
        one_by_one: logits are computed for one token at a time (`LoadedModel.one_by_one`).
    """

    model: HasLogits
    lengths: list[int]
    states: torch.Tensor
    one_by_one: bool = False
    _last_logits: tuple[list[int], torch.Tensor] | None = None
    _last_tokens: tuple[list[int], torch.Tensor] | None = None
    _allowed: list[bytes | None] = field(default_factory=list)

    def hidden_states(self, counts: list[int]) -> torch.Tensor:
        return self._last_rows(counts)

    def logits(self, counts: list[int]) -> torch.Tensor:
        if self._last_logits is None or self._last_logits[0] != counts:
            self._last_logits = counts, self._logits(self._last_rows(counts))
        return self._last_logits[1]

    def some_logits(self, counts: list[int], rows: list[int]) -> torch.Tensor:
        """Some rows of ``logits(counts)``."""
        return self.logits(counts)[to_device(rows, self.states.device)]

    def some_tokens(self, counts: list[int], rows: list[int]) -> torch.Tensor:
        """The greedy tokens of `some_logits`, int64."""
        return self._greedy(counts)[to_device(rows, self.states.device)]

    def restrict(self, allowed: list[bytes | None]) -> None:
        """From now on, the token after each request's last row is the greedy allowed token."""
        self._allowed = allowed

    def _greedy(self, counts: list[int]) -> torch.Tensor:
        if self._last_tokens is None or self._last_tokens[0] != counts:
            logits = self.logits(counts)
            allowed = [mask for mask, count in zip(self._allowed, counts, strict=bool(self._allowed)) if count]
            logits = some_restricted(logits, allowed) if any(allowed) else logits
            self._last_tokens = counts, greedy_tokens(logits)
        return self._last_tokens[1]

    def logits_at(self, rows: list[int]) -> torch.Tensor:
        """Logits of some rows of the step."""
        return self._logits(self.states[to_device(rows, self.states.device)])

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        if self.one_by_one:  # copies: a product may also round by where in memory its rows begin
            return torch.cat([self.model.logits(row.clone()) for row in states.split(1)])
        return self.model.logits(states)

    def tokens(self, counts: list[int]) -> Callable[[], list[list[int]]]:
        """Starts to copy the greedy tokens to the host; returns a function that waits for them."""
        copy = AsyncHostCopy(self._greedy(counts))

        def wait() -> list[list[int]]:
            values = iter(copy.wait())
            return [[next(values) for _ in range(n)] for n in counts]

        return wait

    def _last_rows(self, counts: list[int]) -> torch.Tensor:
        if counts == self.lengths:
            return self.states
        return self.states[to_device(last_rows(self.lengths, counts), self.states.device)]


def last_rows(lengths: list[int], counts: list[int]) -> list[int]:
    """Row numbers of the last ``counts[i]`` of the ``lengths[i]`` consecutive rows of each request."""
    rows, end = [], 0
    for length, count in zip(lengths, counts, strict=True):
        end += length
        rows += range(end - count, end)
    return rows


def step_input(
    manager: CacheManager,
    caches: list[SequenceCache],
    query_lens: list[int],
    decode_query_len: int,
    token_valid: torch.Tensor | None = None,
) -> StepInput:
    """Input of the metadata builders: the next ``query_lens`` tokens of sequences with pages for them.

    Decodes, of at most ``decode_query_len`` tokens, come first.
    """
    lens = torch.tensor(query_lens, dtype=torch.int64, device="cpu")
    computed = torch.tensor([cache.num_tokens for cache in caches], dtype=torch.int64, device="cpu")
    return StepInput(lens, computed + lens, block_tables(manager, caches), token_valid, decode_query_len)


def block_tables(manager: CacheManager, caches: list[SequenceCache]) -> dict[str, torch.Tensor]:
    """int32 ``[len(caches), pages]`` by group, on the CPU."""
    return {group: manager.block_table(caches, group) for group in manager.layout.pages}


def check_batch(batch: Batch, layout: CacheLayout) -> None:
    """ValueError if (sequence, new tokens) pairs cannot be one step of a runner with this layout."""
    if not isinstance(batch, (list, tuple)) or not batch:
        raise ValueError(f"a step takes a list of (sequence, new tokens) pairs, got {shown(batch)}")
    for pair in batch:
        sequence, n = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        if not isinstance(sequence, Sequence) or not is_integer(n):
            raise ValueError(f"a step takes a list of (sequence, new tokens) pairs, got the member {shown(pair)}")
    if len({id(sequence) for sequence, _ in batch}) < len(batch):
        raise ValueError("a sequence appears twice in the batch")
    for sequence, n in batch:
        if not 1 <= n <= sequence.num_pending:
            raise ValueError(f"{shown(n)} tokens asked of a sequence with {sequence.num_pending} pending tokens")
    check_size(sum(n for _, n in batch), len(batch), layout)


BY_SEQUENCE = ("allowed", "logprobs", "scored", "record", "replay", "ends")


def check_options(batch: Batch, options: object) -> None:
    """ValueError if `StepOptions` do not fit a batch."""
    if not isinstance(options, StepOptions):
        raise ValueError(f"a step takes StepOptions, got {shown(options)}")
    if not is_integer(options.last) or options.last < 0:
        raise ValueError(f"StepOptions.last: {shown(options.last)}; it is an integer of at least 0")
    for name in BY_SEQUENCE:
        given = getattr(options, name)
        if len(given) not in (0, len(batch)):
            raise ValueError(f"StepOptions.{name}: {len(given)} values for a batch of {len(batch)} sequences")
    _check_ends(batch, options.ends)


def _check_ends(batch: Batch, ends: tuple[int, ...]) -> None:
    """ValueError if `StepOptions.ends` do not fit a batch."""
    for (sequence, n), end in zip(batch, ends, strict=bool(ends)):
        least, most = sequence.num_computed + n, len(sequence.token_ids)
        if not is_integer(end) or not least <= end <= most:
            raise ValueError(
                f"StepOptions.ends: {shown(end)} of a sequence that has {least} tokens after the step and {most} in "
                f"all: it is an integer from {least} to {most}"
            )


def check_size(num_tokens: int, num_sequences: int, layout: CacheLayout) -> None:
    """ValueError if a step is larger than its runner was made for."""
    limit = layout.max_num_batched_tokens
    if num_tokens > limit or num_sequences > layout.max_num_seqs:
        raise ValueError(
            f"a step of {num_tokens} tokens in {num_sequences} sequences exceeds max_num_batched_tokens={limit} or "
            f"max_num_seqs={layout.max_num_seqs}"
        )


def check_decode_query_len(length: object) -> None:
    """ValueError for a wrong ``decode_query_len``; None is the runner's."""
    if length is not None and (not is_integer(length) or length < 0):
        raise ValueError(f"decode_query_len={shown(length)}: must be an integer of at least 0, or None")


def check_query_lens(caches: list[SequenceCache], query_lens: list[int], layout: CacheLayout) -> None:
    """ValueError if the next ``query_lens`` tokens of sequences cannot be one step of a runner with this layout."""
    wrong = [n for n in query_lens if not is_integer(n) or n < 0]
    if wrong:
        raise ValueError(f"{wrong[0]!r} new tokens of a sequence: lengths are integers from 0")
    if len(caches) != len(query_lens) or not sum(query_lens):
        raise ValueError(
            f"{len(query_lens)} lengths with {sum(query_lens)} new tokens in all, of {len(caches)} sequences: a step "
            "has one length per sequence and at least one new token"
        )
    if len({id(cache) for cache in caches}) < len(caches):
        raise ValueError("a sequence appears twice in a step: its new tokens are one chunk")
    longest = max(cache.num_tokens + n for cache, n in zip(caches, query_lens, strict=True))
    if longest > layout.max_model_len:
        raise ValueError(f"a sequence of {longest} tokens exceeds max_model_len={layout.max_model_len}; raise it")
    check_size(sum(query_lens), len(caches), layout)
