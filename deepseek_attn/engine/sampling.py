"""Sampling parameters of a request, checked on construction."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, TypeGuard, cast

import numpy as np
import torch

from deepseek_attn.config.defaults import DEFAULT_MAX_TOKENS, MAX_COMPLETIONS, REPETITION_PENALTIES
from deepseek_attn.config.options import is_integer
from deepseek_attn.runner.logprobs import TOP_RULE, is_top

MASK64 = (1 << 64) - 1


DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": DEFAULT_MAX_TOKENS,
}
NUMBERS = (*DEFAULTS, "presence_penalty", "frequency_penalty", "min_tokens", "n", "seed", "logprobs", "prompt_logprobs")
MAX_BIAS = 100.0  # of a token, as in OpenAI's API
MAX_PENALTY = 2.0  # presence and frequency, as in OpenAI's API


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Names and meanings are vLLM's. Where temperature, top_k, top_p, min_p, repetition_penalty or max_tokens is None, a
    request takes the value of the checkpoint's ``generation_config.json``. Without a value there: temperature 1, all
    tokens, no penalty, and 256 new tokens. `engine.logits` has the order in which logits are processed.

    Attributes:
        temperature: logits are divided by it; 0 is greedy (the lowest index wins ties).
        top_k: keep the ``top_k`` most likely tokens; 0 keeps all.
        top_p: of those, keep the smallest set of most likely tokens whose mass is at least ``top_p``.
        max_tokens: at most this many new tokens.
        seed: None draws a fresh seed; an integer makes the request reproducible.
        stop_token_ids: tokens that end the request, besides EOS.
        stop: strings that end the request; the text ends before the string. A single string is accepted.
        ignore_eos: continue after EOS (benchmarks).
        min_p: drop tokens less likely than ``min_p`` times the most likely one; before top-k and top-p.
        repetition_penalty: positive logits of tokens in the prompt or the output are divided by it, others multiplied.
        presence_penalty: subtracted from the logits of tokens that the output has.
        frequency_penalty: subtracted from a token's logit once for each time that the output has it.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: the only tokens that may be sampled; None: all tokens.
        bad_words: words (text, or a list of token ids) whose last token never comes after the others in the output. A
            list of a single token id bans that token.
        min_tokens: neither EOS nor a stop token comes, and no stop string counts, before this many new tokens.
        n: completions of the prompt, each with random numbers of its own: `Completion.outputs`. At most 16384.
        include_stop_str_in_output: the text ends with the stop string, or with the text of the stop token.
        skip_special_tokens: leave special tokens out of the text.
        logits_processors: functions of ``(output token ids, row)``, or of ``(prompt token ids, output token ids,
            row)``, that return the row to sample from, in order. The row is float32 ``[vocab]`` on the model's device,
            a copy that may be changed. The result must depend on the arguments alone: with drafts, a function is also
            called for outputs that do not come about.
        json_schema: the text is JSON of this schema (an object, its JSON text, or a class with ``model_json_schema``).
        regex: the whole text matches this regular expression.
        choices: the text equals one of these strings.
        grammar: the text is of this grammar, in llguidance's Lark or in GBNF (``::=``).
        logprobs: for each generated token its log-probability, its rank, and this many of the most likely tokens with
            theirs; of the model's own distribution, before temperature and filters. 0: the token alone; None: nothing.
        prompt_logprobs: the same for each token of the prompt but the first. Such a prompt is computed whole: it takes
            no prefix from the prefix cache.

    Raises:
        ValueError: listing every parameter that is out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    min_tokens: int = 0
    n: int = 1
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logits_processors: Sequence[Callable[..., torch.Tensor]] = ()
    json_schema: str | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        numbers = [(name, _plain_number(getattr(self, name))) for name in NUMBERS]
        for name, value in (
            *numbers,
            ("stop", _one_or_several(self.stop, str)),
            ("stop_token_ids", _as_tuple(self.stop_token_ids)),
            ("logit_bias", _with_integer_keys(self.logit_bias)),
            ("allowed_token_ids", _as_tuple(self.allowed_token_ids)),
            ("bad_words", _as_words(self.bad_words)),
            ("json_schema", _as_schema(self.json_schema)),
            ("choices", _as_tuple(self.choices)),
            ("logits_processors", _one_or_several(self.logits_processors, Callable)),
        ):
            object.__setattr__(self, name, value)
        given = {name: value for name, value in vars(self).items() if value is not None or name not in DEFAULTS}
        problems = [f"{name}={given[name]!r}: {rule}" for name, ok, rule in self._rules() if name in given and not ok]
        if problems:
            raise ValueError("invalid sampling parameters:\n  - " + "\n  - ".join(problems))

    def _rules(self):
        temperature_ok = _is_real(self.temperature) and 0 <= self.temperature < math.inf
        penalty, (least, most) = self.repetition_penalty, REPETITION_PENALTIES
        strings, bias, words, choices = self.stop, self.logit_bias, self.bad_words, self.choices
        structures = [n for n in ("json_schema", "regex", "choices", "grammar") if getattr(self, n) is not None]
        min_ok = is_integer(self.min_tokens) and self.min_tokens >= 0
        n_ok = is_integer(self.n) and 1 <= self.n <= MAX_COMPLETIONS
        penalty_rule = f"must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}] (0: no penalty)"
        return [
            ("temperature", temperature_ok, "must be a finite number >= 0 (0 is greedy)"),
            ("top_k", is_integer(self.top_k) and self.top_k >= 0, "must be an integer >= 0 (0 keeps all tokens)"),
            ("top_p", _is_real(self.top_p) and 0 < self.top_p <= 1, "must be in (0, 1] (1 keeps all tokens)"),
            ("min_p", _is_real(self.min_p) and 0 <= self.min_p <= 1, "must be in [0, 1] (0 keeps all tokens)"),
            (
                "repetition_penalty",
                _is_real(penalty) and least <= penalty <= most,
                f"must be in [{least:g}, {most:g}] (1: no penalty)",
            ),
            ("presence_penalty", _is_within(self.presence_penalty, MAX_PENALTY), penalty_rule),
            ("frequency_penalty", _is_within(self.frequency_penalty, MAX_PENALTY), penalty_rule),
            (
                "logit_bias",
                isinstance(bias, Mapping)
                and all(is_integer(i) and i >= 0 and _is_within(b, MAX_BIAS) for i, b in bias.items()),
                f"must map token ids to numbers in [-{MAX_BIAS:g}, {MAX_BIAS:g}]; bad_words=[[id]] bans a token",
            ),
            (
                "allowed_token_ids",
                self.allowed_token_ids is None or (_are_ids(self.allowed_token_ids) and self.allowed_token_ids),
                "must be None or token ids, integers >= 0, at least one",
            ),
            (
                "bad_words",
                isinstance(words, tuple)
                and all(word.strip() if isinstance(word, str) else word and _are_ids(word) for word in words),
                "must be words: text that is not blank, or lists of token ids",
            ),
            ("max_tokens", is_integer(self.max_tokens) and self.max_tokens >= 1, "must be an integer >= 1"),
            ("min_tokens", min_ok, "must be an integer >= 0"),
            (
                "min_tokens",
                not (min_ok and is_integer(self.max_tokens)) or self.min_tokens <= self.max_tokens,
                f"must be at most max_tokens={self.max_tokens}",
            ),
            ("n", n_ok, f"must be an integer from 1 to {MAX_COMPLETIONS}"),
            ("json_schema", self.json_schema is None or isinstance(self.json_schema, str), "must be a JSON schema"),
            *(
                (name, value is None or (isinstance(value, str) and value), "must be text that is not empty")
                for name, value in (("regex", self.regex), ("grammar", self.grammar))
            ),
            (
                "choices",
                choices is None or (isinstance(choices, tuple) and choices and all(_is_text(c) for c in choices)),
                "must be texts that are not empty, at least one",
            ),
            *(
                (name, len(structures) < 2, f"only one of {', '.join(structures)} can be given")
                for name in structures[1:2]
            ),
            *(
                (name, not self.ignore_eos, "must not be beside ignore_eos: EOS is what ends the text")
                for name in structures[:1]
            ),
            (
                "n",
                not n_ok or self.n == 1 or self.temperature != 0,
                "must be 1 with temperature 0: greedy completions of a prompt are all the same",
            ),
            (
                "seed",
                self.seed is None or (is_integer(self.seed) and 0 <= self.seed <= MASK64),
                "must be None or an integer in [0, 2**64)",
            ),
            ("stop_token_ids", _are_ids(self.stop_token_ids), "must be token ids, integers >= 0"),
            (
                "stop",
                isinstance(strings, tuple) and all(isinstance(s, str) and s for s in strings),
                "must be a non-empty string or several",
            ),
            (
                "logits_processors",
                isinstance(self.logits_processors, tuple) and all(map(callable, self.logits_processors)),
                "must be functions",
            ),
            *(
                (name, isinstance(getattr(self, name), bool), "must be True or False")
                for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
            ),
            ("logprobs", self.logprobs is None or is_top(self.logprobs), TOP_RULE),
            ("prompt_logprobs", self.prompt_logprobs is None or is_top(self.prompt_logprobs), TOP_RULE),
        ]

    def resolved(self, defaults: Mapping[str, Any] = DEFAULTS) -> ResolvedParams:
        """A copy with values for fields that are None: from ``defaults``, else the library's defaults."""
        unset = {name: defaults.get(name, value) for name, value in DEFAULTS.items() if getattr(self, name) is None}
        return cast("ResolvedParams", replace(self, **unset) if unset else self)  # none of its values is None now

    @property
    def greedy(self) -> bool:
        """Whether no random number is used."""
        return self.temperature == 0


class ResolvedParams(SamplingParams):
    """For type checkers: `SamplingParams` as `SamplingParams.resolved` returns them, without None."""

    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    min_p: float
    repetition_penalty: float


def checked_params(params: SamplingParams | None, supported: str = "SamplingParams") -> SamplingParams:
    """``params``, or the defaults for None; ValueError for another type, with the ``supported`` ones."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params: {supported}, got {params!r}")
    return params


def _plain_number(value):
    """A number of NumPy as Python's; anything else as it is."""
    if isinstance(value, (bool, int, float)):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def _as_tuple(value):
    """A tuple of a collection's members, with Python's numbers; anything else as it is."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    return tuple(map(_plain_number, value)) if isinstance(value, (list, tuple, set, frozenset, range)) else value


def _one_or_several(value, kind):
    """A tuple of one value of a kind, or of several; of none for None."""
    return () if value is None else (value,) if isinstance(value, kind) else _as_tuple(value)


def _as_words(value):
    """Bad words; a list of token ids becomes a tuple."""
    words = _one_or_several(value, str)
    return tuple(map(_as_tuple, words)) if isinstance(words, tuple) else words


def _as_schema(value):
    """The JSON text of a schema; anything else as it is."""
    if isinstance(value, str) or value is None:
        return value
    if callable(schema := getattr(value, "model_json_schema", None)):
        value = schema()
    try:
        return json.dumps(value) if isinstance(value, (Mapping, bool)) else value
    except (TypeError, ValueError):
        return value


def _is_text(value) -> bool:
    return isinstance(value, str) and bool(value)


def _with_integer_keys(value):
    """A bias with the keys of a JSON object as integers; anything else, or a wrong key, as it is."""
    if not isinstance(value, Mapping):
        return {} if value is None else value
    return {
        int(key) if isinstance(key, str) and key.isdecimal() else _plain_number(key): _plain_number(bias)
        for key, bias in value.items()
    }


def _are_ids(value) -> bool:
    return isinstance(value, tuple) and all(is_integer(i) and i >= 0 for i in value)


def _is_within(value, limit: float) -> bool:
    return _is_real(value) and -limit <= value <= limit


def _is_real(value: object) -> TypeGuard[float]:
    return is_integer(value) or isinstance(value, float)
