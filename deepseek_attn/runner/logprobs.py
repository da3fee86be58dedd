"""Log-probabilities of tokens, computed from rows of logits, a block of rows at a time.

They are of the model's own distribution: logits before temperature, filters, penalties and any other processing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol, overload

import numpy as np
import torch

from deepseek_attn.config.options import is_integer
from deepseek_attn.utils.device import AsyncHostCopy, on_side_stream, to_device

LOGITS_PER_BLOCK = 1 << 24  # logits of known tokens that exist at once: 64 MiB
ELEMENTS_PER_BLOCK = 1 << 22  # logits that are processed at once: scratch below 128 MiB
MAX_TOP = 1024  # alternatives per token: for more, whole rows of logits are the better interface
TOP_RULE = f"must be an integer from 0 (the token alone) to {MAX_TOP}; for whole rows of logits use ModelRunner.score"
FRACTION_BITS = 34  # a sum of 2**18 multiples of 2**-34, each at most 1, has 52 bits: exact in float64
UNIT = 2.0**FRACTION_BITS
COLUMN_BITS = 52 - FRACTION_BITS
MAX_SUMMANDS = 1 << COLUMN_BITS


class TokenLogprob(NamedTuple):
    """One token: its log-probability, its rank, and the most likely tokens in its place with theirs, in order."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of ``n`` consecutive tokens, each given all tokens before it.

    Iteration and integer indices give a `TokenLogprob`, slices give `TokenLogprobs`.

    Attributes:
        token_ids: int64 ``[n]``.
        logprobs: float64 ``[n]``, natural logarithms.
        ranks: int64 ``[n]``, 1 plus the number of tokens with a larger logit.
        top_ids: int64 ``[n, k]``, the most likely tokens; of equal ones the lower id is first.
        top_logprobs: float64 ``[n, k]``, descending.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[TokenLogprobs], top: int) -> TokenLogprobs:
        """The tokens of all parts, concatenated; without parts, ``n = 0`` with ``top`` columns."""
        parts = parts or [cls.of([], np.empty((0, 2 + 2 * top)), top)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in NAMES))

    @classmethod
    def of(cls, token_ids: Sequence[int] | np.ndarray, packed: np.ndarray, top: int) -> TokenLogprobs:
        """Rows of `packed_logprobs`, of which the first ``top`` alternatives are kept; copies."""
        ids = packed.shape[1] // 2 + 1  # the first column after the ids
        return cls(
            np.array(token_ids, dtype=np.int64),
            packed[:, 0].copy(),
            packed[:, 1].astype(np.int64),
            packed[:, 2:ids][:, :top].astype(np.int64),
            packed[:, ids:][:, :top].copy(),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, index: slice) -> TokenLogprobs: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | TokenLogprobs:
        if isinstance(index, slice):
            return TokenLogprobs(*(getattr(self, name)[index] for name in NAMES))
        top = zip(self.top_ids[index].tolist(), self.top_logprobs[index].tolist(), strict=True)
        return TokenLogprob(int(self.token_ids[index]), float(self.logprobs[index]), int(self.ranks[index]), dict(top))

    def __iter__(self) -> Iterator[TokenLogprob]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLogprobs):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in NAMES)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # how Python marks a class whose objects can change

    def to_dict(self) -> dict[str, list]:
        """Lists by the names of the attributes, for JSON."""
        return {name: getattr(self, name).tolist() for name in NAMES}


NAMES = tuple(field.name for field in fields(TokenLogprobs))


def check_top(top: object, name: str) -> None:
    """ValueError if ``top`` is not a supported number of alternatives."""
    if is_top(top):
        return
    raise ValueError(f"{name}={top!r}: {TOP_RULE}")


def is_top(top: object) -> bool:
    """Whether it is a supported number of alternatives."""
    return is_integer(top) and 0 <= top <= MAX_TOP


class ScoredRows(NamedTuple):
    """Tokens of a sequence whose log-probabilities a step computes: those after positions ``first`` to ``end - 1``.

    Attributes:
        top: number of alternatives.
    """

    first: int
    end: int
    top: int


class HasLogitRows(Protocol):
    """A computed step, `EagerStep` or `DecodeRun`."""

    def logits_at(self, rows: list[int], /) -> torch.Tensor: ...

    def some_logits(self, counts: list[int], rows: list[int], /) -> torch.Tensor: ...

    def some_tokens(self, counts: list[int], rows: list[int], /) -> torch.Tensor: ...


class PendingLogprobs:
    """Log-probabilities of tokens of several requests, on their way to the host.

    Args:
        packed: see `packed_logprobs`, the rows of one request after those of another.
        tokens: int64 ``[rows]``, the tokens.
        counts: rows of each request, None for a request without log-probabilities.
        tops: alternatives of each request.
    """

    def __init__(self, packed: torch.Tensor, tokens: torch.Tensor, counts: list[int | None], tops: list[int]):
        self._copy = AsyncHostCopy(torch.cat([packed, tokens[:, None].double()], dim=1))
        self._counts, self._tops = counts, tops

    def wait(self) -> list[TokenLogprobs | None]:
        """By request. Waits for the device."""
        rows, found, start = self._copy.wait_for_tensor().numpy(), list[TokenLogprobs | None](), 0
        for count, top in zip(self._counts, self._tops, strict=True):
            if count is None:
                found.append(None)
                continue
            own, start = rows[start : start + count], start + count
            found.append(TokenLogprobs.of(own[:, -1], own[:, :-1], top))
        return found


def greedy_logprobs(step: HasLogitRows, counts: list[int], tops: list[int | None]) -> PendingLogprobs:
    """Log-probabilities of the greedy tokens after the last ``counts[i]`` rows of each request.

    A few rows are copied and computed beside the next step, which overwrites the logits of this one.

    Args:
        tops: alternatives of each request; None: no log-probabilities.
    """
    ends = list(itertools.accumulate(counts))
    asked = [None if top is None else n for top, n in zip(tops, counts, strict=True)]
    rows = [row for end, n in zip(ends, asked, strict=True) for row in range(end - (n or 0), end)]
    logits, tokens = step.some_logits(counts, rows), step.some_tokens(counts, rows)
    alternatives = [top or 0 for top in tops]

    def start() -> PendingLogprobs:
        return PendingLogprobs(packed_logprobs(logits, tokens, max(alternatives)), tokens, asked, alternatives)

    if logits.numel() > ELEMENTS_PER_BLOCK:
        return start()
    logits, tokens = logits.clone(), tokens.clone()
    with on_side_stream(logits, tokens):
        return start()


def known_logprobs(
    step: HasLogitRows, batch: list[tuple[list[int], int, int]], scored: list[ScoredRows | None], vocab: int
) -> list[TokenLogprobs | None]:
    """Log-probabilities of known tokens of the sequences, from the logits of the tokens before them in this step.

    Waits for the device. Logits are computed for a block of tokens at a time.

    Args:
        batch: token ids of each sequence, position of its first new token, and number of new tokens.
        scored: wanted tokens of each sequence, None for none; tokens outside the step or the sequence are left out.
    """
    rows, targets, counts, start = list[int](), list[int](), list[int | None](), 0
    for (token_ids, first, n), wanted in zip(batch, scored, strict=True):
        count = None
        if wanted is not None:
            begin, end = max(first, wanted.first), min(first + n, wanted.end, len(token_ids) - 1)
            count = max(0, end - begin)
            rows += range(start + begin - first, start + begin - first + count)
            targets += token_ids[begin + 1 : begin + 1 + count]
        counts.append(count)
        start += n
    tops = [0 if wanted is None else wanted.top for wanted in scored]
    if not rows:
        return [None if n is None else TokenLogprobs.join([], top) for n, top in zip(counts, tops, strict=True)]
    block, parts, tokens = max(1, LOGITS_PER_BLOCK // vocab), list[torch.Tensor](), list[torch.Tensor]()
    for begin in range(0, len(rows), block):
        logits = step.logits_at(rows[begin : begin + block])
        tokens.append(to_device(targets[begin : begin + block], logits.device))
        parts.append(packed_logprobs(logits, tokens[-1], max(tops)))
    return PendingLogprobs(torch.cat(parts), torch.cat(tokens), counts, tops).wait()


def packed_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """Log-probability and rank of one token per row of logits, then the ids and log-probabilities of the likeliest.

    Args:
        logits: float32 ``[R, vocab]``, finite or -inf.
        tokens: int64 ``[R]``; a negative one is read as token 0.
        top: number of alternatives.

    Returns:
        float64 ``[R, 2 + 2 * k]`` with ``k = min(top, vocab)``; integers are exact in it.

    Raises:
        ValueError: a vocabulary of more than 2**18 tokens.

    Notes:
        A row's bits depend on the row, its token and nothing else. The sum of exponentials is exact: its terms are
        rounded to multiples of 2**-68 and added as multiples of 2**-34 and of 2**-68, whose float64 sums are exact in
        any order. So log-probabilities equal a float64 log-softmax up to its last bits.
    """
    rows, vocab = logits.shape
    if vocab > MAX_SUMMANDS:
        raise ValueError(f"log-probabilities over {vocab} tokens: supported are vocabularies of up to {MAX_SUMMANDS}")
    top, block = min(top, vocab), max(1, ELEMENTS_PER_BLOCK // vocab)
    packed = torch.empty(rows, 2 + 2 * top, dtype=torch.float64, device=logits.device)
    for start in range(0, rows, block):
        part, out = logits[start : start + block].contiguous(), packed[start : start + block]
        chosen = part.gather(1, tokens[start : start + block, None].clamp(min=0))
        log_sum = _log_sum_exp(part)
        out[:, :1] = chosen.double() - log_sum
        out[:, 1] = (part > chosen).sum(1) + 1
        if top:
            values, ids = _top(part, top)
            out[:, 2 : 2 + top], out[:, 2 + top :] = ids, values.double() - log_sum
    return packed


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """float64 ``[R, 1]``, in the same order of rounding for any number of rows."""
    peak = logits.amax(1, keepdim=True).double()
    mass = (logits - peak).exp_().mul_(UNIT)  # float64, as the peak is
    whole = mass.floor()
    rest = mass.sub_(whole).mul_(UNIT).round_()
    total = whole.sum(1, keepdim=True) + rest.sum(1, keepdim=True) / UNIT
    return peak + (total.log() - FRACTION_BITS * math.log(2))


def _top(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest logits of each row and their columns; of equal ones the lower column first.

    They are the largest of integers that are all different: the logit's bits, as a number of the same order, above the
    negative column.
    """
    bits = (logits + 0.0).view(torch.int32)  # 0.0 for -0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = (ordered << COLUMN_BITS) - torch.arange(logits.shape[1], dtype=torch.int64, device=logits.device)
    columns = -keys.topk(k, dim=1).values & (MAX_SUMMANDS - 1)
    return logits.gather(1, columns), columns
