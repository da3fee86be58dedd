"""Stopping: when a request ends, and which text may go out before that is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.text.reply import ControlMark
from deepseek_attn.text.tokenizer import IncrementalDecoder, Tokenizer


class StopStep(NamedTuple):
    """Result of one token: text to emit now, and why the request ended (None: it has not)."""

    text: str
    reason: str | None


class StopChecker:
    """Watches one request's tokens for EOS, stop tokens, stop strings and ``max_tokens``.

    Text that could still become a stop string is held back, so no part of a stop string that then completes is ever
    emitted, unless ``include_stop_str_in_output`` is set. When stop strings overlap, the one that is complete
    first wins, wherever token boundaries fall. A stop string that is complete within ``min_tokens`` tokens is ordinary
    text.

    Args:
        params: the request's sampling parameters.
        eos_token_ids: ids that end a turn (checkpoint field ``eos_token_id``); ignored if ``params.ignore_eos``.
        decoder: decodes ids to text. None works on ids only; text is then empty and stop strings are refused.
        controls: texts of the tokens that divide a reply, by their ids, for `marks`.

    Attributes:
        marks: the ``controls`` in the text, emitted and held back.

    Raises:
        ValueError: stop strings without a decoder.
        RuntimeError: a token is pushed after the end.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        decoder: IncrementalDecoder | None,
        controls: Mapping[int, str] | None = None,
    ):
        if params.stop and decoder is None:
            raise ValueError(
                f"stop strings {list(params.stop)} need a tokenizer, and there is none: use stop_token_ids, or a "
                "checkpoint folder with tokenizer.json"
            )
        self.reason: str | None = None
        self.count = 0
        self._params = params.resolved()
        self._decoder = decoder
        self._stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._controls = controls or {}
        self._decoded = 0  # characters
        self.marks: list[ControlMark] = []
        self._held = ""

    def push(self, token_id: int, last: bool = False) -> StopStep:
        """Account for one generated token.

        The reason is ``"stop"`` (EOS, stop token or stop string, whose text is not emitted) or ``"length"``
        (``max_tokens`` reached, or ``last``; held-back text is emitted).
        """
        if self.reason is not None:
            raise RuntimeError(f"the request has ended (reason {self.reason!r}); use a new StopChecker per request")
        self.count += 1
        stops = token_id in self._stop_ids
        if stops and not self._params.include_stop_str_in_output:
            return self._finish("stop", "")
        text = self._decode(self._decoder.push(token_id)) if self._decoder else ""
        if token_id in self._controls:  # an added token: its text does not wait for the bytes of the next
            control = self._controls[token_id]
            self.marks.append(ControlMark(self._decoded - len(control), control))
        if self.reason is None and stops:
            return self._finish("stop", text)
        if self.reason is None and (last or self.count >= self._params.max_tokens):
            return self._finish("length", text)
        return StopStep(text, self.reason)

    def abort(self) -> str:
        """End the request from outside; returns the text that was held back."""
        return "" if self.reason else self._finish("abort", "").text

    def _finish(self, reason: str, text: str) -> StopStep:
        if self._decoder:
            text += self._decode(self._decoder.flush())
        if self.reason is None:  # else a stop string completed within the flushed text
            text, self._held, self.reason = text + self._held, "", reason
        return StopStep(text, self.reason)

    def _decode(self, text: str) -> str:
        self._decoded += len(text)
        return self._scan(text)

    def _scan(self, text: str) -> str:
        """Append ``text`` to the text held back, and return the part that certainly precedes any stop string."""
        before, text, self._held = len(self._held), self._held + text, ""
        if self.count > self._params.min_tokens:
            # one that ends in the text held back was complete before there were min_tokens tokens, and does not count
            matches = [
                (start + len(stop), start)
                for stop in self._params.stop
                if (start := text.find(stop, max(0, before - len(stop) + 1))) >= 0
            ]
            if matches:
                self.reason = "stop"
                end, start = min(matches)
                return text[: end if self._params.include_stop_str_in_output else start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._params.stop), default=0)
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._params.stop):
                return n
        return 0


def with_stop_tokens(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with the special tokens that stop strings are the text of, where decoding skips special tokens.

    Raises:
        ValueError: a stop string has a special token beside other text, and could never be found.
    """
    tokens = []
    for stop in params.stop if params.skip_special_tokens else ():
        special = [span for span in tokenizer.find_added(stop) if span[2] in tokenizer.special_ids]
        for start, end, token in special:
            if end - start != len(stop):
                raise ValueError(
                    f"stop={stop!r}: {stop[start:end]!r} is a special token, which is never part of the text: pass "
                    f"stop_token_ids=({token},), skip_special_tokens=False, or a stop string without it"
                )
            tokens.append(token)
    return replace(params, stop_token_ids=(*params.stop_token_ids, *tokens)) if tokens else params
