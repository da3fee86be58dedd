"""Logits processing: the changes of the model's logits by a request's parameters, before a token is chosen.

In this order, which is vLLM's, in float32:

1. -inf for tokens that ``allowed_token_ids`` leaves out, for the last tokens of bad words, and, before ``min_tokens``
   tokens, for EOS and stop tokens
2. ``logit_bias`` is added
3. ``logits_processors``
4. repetition, frequency and presence penalty
5. -inf for tokens that structured output does not allow; vLLM does this first, which is the same but for functions
6. `engine.drawing`: argmax, or temperature, min-p, top-k, top-p and a draw

Everything depends on the tokens before a row alone: the prompt, the output, and drafts that the row comes after. So a
draft is verified with the logits that its token would have been sampled from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from deepseek_attn.engine.drawing import ELEMENTS_PER_BLOCK
from deepseek_attn.engine.sampling import ResolvedParams
from deepseek_attn.engine.structured import Allowed, GrammarState
from deepseek_attn.runner.allowed_tokens import restrict
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.utils.device import to_device

NOTHING_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, min_tokens and logits_processors exclude every token of "
    "the vocabulary together, or a logits processor returned NaN or +inf; change one of them"
)


@dataclass
class _Counts:
    """How often tokens occur in a request, on the model's device.

    Attributes:
        prompt: bool ``[vocab]``, tokens of the prompt.
        output: float32 ``[vocab]``, occurrences in the first ``length`` tokens behind the prompt.
    """

    prompt: torch.Tensor
    output: torch.Tensor
    length: int = 0


class LogitsRules:
    """How one request's logits are processed. Tensors are kept on the device and follow from the tokens alone.

    Args:
        params: resolved parameters.
        bad_words: token ids of the bad words.
        stop_token_ids: tokens that do not come before ``min_tokens`` tokens.
        grammar: which tokens structured output allows.

    Raises:
        ValueError: a token id outside the vocabulary, or a logits processor of another signature.
    """

    def __init__(
        self,
        params: ResolvedParams,
        bad_words: Iterable[tuple[int, ...]],
        stop_token_ids: Iterable[int],
        vocab_size: int,
        grammar: GrammarState | None = None,
    ):
        self.params, self.vocab_size, self.grammar = params, vocab_size, grammar
        self.stop_token_ids = sorted(stop_token_ids)
        words = sorted(set(bad_words))
        self.banned = [word[0] for word in words if len(word) == 1]
        self.sequences = [word for word in words if len(word) > 1]
        self.processors = [of_row(processor) for processor in params.logits_processors]
        self.penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self._has_addend = bool(params.allowed_token_ids or self.banned or params.logit_bias)
        self._addend: torch.Tensor | None = None
        self._counts: _Counts | None = None
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words", [token for word in words for token in word]),
        ):
            if unknown := sorted(token for token in ids if token >= vocab_size):
                raise ValueError(f"{name} has the ids {unknown[:9]}: the vocabulary has {vocab_size} tokens")

    def apply_to(self, num_generated: int) -> bool:
        """Whether the logits after ``num_generated`` tokens, or later ones, are processed."""
        always = self._has_addend or self.sequences or self.processors or self.penalised or self.grammar is not None
        return bool(always or (num_generated < self.params.min_tokens and self.stop_token_ids))

    @property
    def only_grammar(self) -> bool:
        """Whether no parameter but structured output has rules, which `allowed` then follows."""
        others = self._has_addend or self.sequences or self.processors or self.penalised or self.params.min_tokens
        return self.grammar is not None and not others

    def allowed(self, output: list[int]) -> bytes | None:
        """The tokens that structured output allows after these, a bit each; None without structured output.

        Raises:
            RuntimeError: the grammar is too complex for llguidance's limits.
        """
        if self.grammar is None:
            return None
        found = self.grammar.allowed(output)
        return self._reasoning_mask if found is None else found.mask

    @cached_property
    def _reasoning_mask(self) -> bytes:
        """Mask of the tokens allowed within the reasoning before a structured answer."""
        bits = np.ones(-(-self.vocab_size // 32) * 32, dtype=bool)
        bits[self._not_reasoned] = False
        return np.packbits(bits, bitorder="little").tobytes()

    @cached_property
    def _not_reasoned(self) -> list[int]:
        """Tokens excluded within the reasoning before a structured answer."""
        return [*self.stop_token_ids, *(() if self.grammar is None else self.grammar.not_reasoned)]

    def forget(self) -> None:
        """Frees the tensors; they are made again from the tokens when they are needed."""
        self._addend = self._counts = None
        if self.grammar is not None:
            self.grammar.forget()

    def addend(self, device: torch.device) -> torch.Tensor | None:
        """float32 ``[vocab]`` that is added to every row: bias, and -inf for tokens that never come."""
        if not self._has_addend or self._addend is not None:
            return self._addend
        allowed, bias = self.params.allowed_token_ids, self.params.logit_bias
        addend = torch.full((self.vocab_size,), -torch.inf if allowed else 0.0, dtype=torch.float32, device=device)
        if allowed:
            addend[_ids(allowed, device)] = 0.0
        if bias:
            addend[_ids(bias, device)] += torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        if self.banned:
            addend[_ids(self.banned, device)] = -torch.inf
        self._addend = addend
        return addend

    def excluded(self, output: list[int], ended: bool = False) -> list[int]:
        """Tokens that do not come after these tokens of the output, though they may come after others.

        Reasoning before a structured answer does not end the text.
        """
        found = [word[-1] for word in self.sequences if output[len(output) - len(word) + 1 :] == list(word[:-1])]
        early = len(output) < self.params.min_tokens and not ended
        if self.grammar is not None and self.grammar.is_reasoning(output):
            return found + self._not_reasoned
        return found + (self.stop_token_ids if early else [])

    def counts(self, row: LogitsRow, device: torch.device) -> _Counts:
        """Occurrences of tokens in the prompt and the confirmed output; only those new since the last call are sent."""
        # while they change they are not kept: an interruption then leaves nothing that is counted half
        counts, self._counts = self._counts, None
        if counts is None or counts.length > row.confirmed - row.prompt:
            counts = _Counts(
                torch.zeros(self.vocab_size, dtype=torch.bool, device=device),
                torch.zeros(self.vocab_size, dtype=torch.float32, device=device),
            )
            if self.params.repetition_penalty != 1:
                counts.prompt[_ids(row.token_ids[: row.prompt], device)] = True
        if new := row.token_ids[row.prompt + counts.length : row.confirmed]:
            ones = torch.ones(len(new), dtype=torch.float32, device=device)
            counts.output.index_add_(0, _ids(new, device), ones)  # small integers: exact in any order
        counts.length = row.confirmed - row.prompt
        self._counts = counts
        return counts


@dataclass
class LogitsRow:
    """A row of logits, and the tokens before it.

    Attributes:
        rules: the rules of its request; None without rules.
        token_ids: the request's tokens; the first ``end`` tokens come before the row.
        prompt: number of tokens of the prompt.
        confirmed: number of prompt and sampled tokens.
        end: number of prompt and sampled tokens and of drafts before the row.
    """

    rules: LogitsRules | None
    token_ids: list[int]
    prompt: int
    confirmed: int
    end: int

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt : self.end]


Chosen = list[tuple[int, LogitsRules]]  # numbers of rows, and the rules of their requests


def processed_logits(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> tuple[torch.Tensor, dict[int, str]]:
    """The logits to sample from; rows of requests that process nothing are unchanged.

    Args:
        logits: float32 ``[B, vocab]``, which stays as it is.
        rows: one per row.

    Returns:
        (logits, errors of logits processors by row). The logits are ``logits`` itself if no request has rules.
    """
    chosen = [(i, row.rules) for i, row in enumerate(rows) if row.rules is not None]
    if not chosen:
        return logits, {}
    structured, failures = _structured(rows, chosen)  # on the host, while the device still computes the logits
    logits = logits.clone()
    block = max(1, ELEMENTS_PER_BLOCK // logits.shape[1])
    for start in range(0, len(chosen), block):
        part = chosen[start : start + block]
        _exclude(logits, rows, part, {i for i, allowed in structured.items() if allowed.ended})
        failures |= _run_processors(logits, rows, part)
        _penalise(logits, rows, part)
        _keep_allowed(logits, {i: structured[i].mask for i, _ in part if i in structured})
    return logits, failures


def _structured(rows: Sequence[LogitsRow], chosen: Chosen) -> tuple[dict[int, Allowed], dict[int, str]]:
    """(tokens that structured output allows, its errors), both by row."""
    found, failures = dict[int, Allowed](), dict[int, str]()
    for i, rules in chosen:
        if rules.grammar is not None:
            try:
                allowed = rules.grammar.allowed(rows[i].output)
            except RuntimeError as error:  # a grammar that is too complex for llguidance's limits
                failures[i] = str(error)
            else:
                found |= {} if allowed is None else {i: allowed}
    return found, failures


def _keep_allowed(logits: torch.Tensor, masks: dict[int, bytes]) -> None:
    """Sets all tokens to -inf whose bit is 0."""
    if not masks:
        return
    index = _ids(masks, logits.device)
    logits[index] = restrict(logits[index], list(masks.values()))


def _exclude(logits: torch.Tensor, rows: Sequence[LogitsRow], chosen: Chosen, ended: set[int]) -> None:
    """Adds biases, and sets tokens to -inf.

    Args:
        ended: rows after a text that is complete: ``min_tokens`` does not keep it from its end.
    """
    device = logits.device
    addends = [(i, addend) for i, rules in chosen if (addend := rules.addend(device)) is not None]
    if addends:
        logits[_ids([i for i, _ in addends], device)] += torch.stack([addend for _, addend in addends])
    pairs = [
        (i, token)
        for i, rules in chosen
        if rules.sequences or rules.params.min_tokens or rules.grammar is not None
        for token in rules.excluded(rows[i].output, i in ended)
    ]
    if pairs:
        logits[tuple(_ids(column, device) for column in zip(*pairs, strict=True))] = -torch.inf


def _run_processors(logits: torch.Tensor, rows: Sequence[LogitsRow], chosen: Chosen) -> dict[int, str]:
    """Replaces rows by the results of their requests' functions; returns the errors by row."""
    failures = {}
    for i, rules in chosen:
        try:
            for processor in rules.processors:
                found = processor(rows[i], logits[i].clone())
                if not isinstance(found, torch.Tensor) or found.shape != logits[i].shape or found.is_complex():
                    given = f"shape {list(found.shape)}" if isinstance(found, torch.Tensor) else f"{found!r:.80}"
                    raise ValueError(f"it returned {given}, and the row has the shape {list(logits[i].shape)}")
                logits[i] = found
        except Exception as error:  # of the caller's function: the other requests go on
            failures[i] = f"a logits processor failed: {type(error).__name__}: {error}"
    return failures


def _penalise(logits: torch.Tensor, rows: Sequence[LogitsRow], chosen: Chosen) -> None:
    """Repetition, frequency and presence penalty."""
    chosen = [(i, rules) for i, rules in chosen if rules.penalised]
    if not chosen:
        return
    device, params = logits.device, [rules.params for _, rules in chosen]
    found = [rules.counts(rows[i], device) for i, rules in chosen]
    counts = torch.stack([count.output for count in found])
    drafts = [
        (n, token) for n, (i, _) in enumerate(chosen) for token in rows[i].token_ids[rows[i].confirmed : rows[i].end]
    ]
    if drafts:
        where = tuple(_ids(column, device) for column in zip(*drafts, strict=True))
        counts.index_put_(where, torch.ones(1, dtype=torch.float32, device=device), accumulate=True)
    index = _ids([i for i, _ in chosen], device)
    values = logits[index]
    repetition, frequency, presence = (
        torch.tensor([getattr(p, name) for p in params], dtype=torch.float32, device=device)[:, None]
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    if any(p.repetition_penalty != 1 for p in params):
        repeated = (counts > 0) | torch.stack([count.prompt for count in found])
        values = torch.where(repeated, torch.where(values > 0, values / repetition, values * repetition), values)
    logits[index] = values - frequency * counts - presence * (counts > 0)


def of_row(processor: Callable[..., torch.Tensor]) -> Callable[[LogitsRow, torch.Tensor], torch.Tensor]:
    """A logits processor of ``(output, row)`` or ``(prompt, output, row)``, as a function of the tokens and the row.

    Raises:
        ValueError: it needs another number of arguments.
    """
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # a built-in function without a signature
        return lambda row, values: processor(row.output, values)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in positional)
    if needed == 3:
        return lambda row, values: processor(row.token_ids[: row.prompt], row.output, values)
    if needed == 2:
        return lambda row, values: processor(row.output, values)
    raise ValueError(
        f"logits_processors: {processor!r:.120} needs {needed} arguments, and is called with (output token ids, row) "
        "or (prompt token ids, output token ids, row)"
    )


def bad_word_ids(words: Iterable[str | Sequence[int]], tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Token ids of bad words: as they are written at the beginning of a text and, where those differ, behind a space.

    vLLM leaves out the form behind a space where it has another number of tokens, so that the word still comes.

    Raises:
        ValueError: text without a tokenizer.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(tuple(word))
            continue
        if tokenizer is None:
            raise ValueError(
                f"bad_words has the text {word!r:.80}, and there is no tokenizer: use lists of token ids, or a "
                "checkpoint folder with tokenizer.json"
            )
        plain, spaced = (tuple(tokenizer.encode(space + word.lstrip())) for space in ("", " "))
        found.append(plain)
        if spaced[-len(plain) :] != plain:
            found.append(spaced)
    return found


def _ids(values: Iterable[int], device: torch.device) -> torch.Tensor:
    return to_device(list(values), device)
