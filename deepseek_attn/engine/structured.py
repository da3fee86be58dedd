"""Structured output: which tokens a JSON schema, a regular expression, choices or a grammar allow next (llguidance)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.text.tokenizer import Tokenizer

MAX_GRAMMARS = 64  # that are kept compiled per tokenizer
KINDS = ("json_schema", "regex", "choices", "grammar")

_tables: WeakKeyDictionary[Tokenizer, dict[tuple[int, tuple[int, ...]], GrammarTable]] = WeakKeyDictionary()


def compiled_grammar(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]
) -> Any:
    """The llguidance matcher that a request copies; None for a request without structure.

    Raises:
        ValueError: llguidance is not installed, there is no tokenizer or no EOS token, or the schema, expression or
            grammar is wrong or has parts that llguidance cannot guarantee.
    """
    kind = next((kind for kind in KINDS if getattr(params, kind) is not None), None)
    if kind is None:
        return None
    if tokenizer is None:
        raise ValueError(f"{kind} needs a tokenizer, and there is none: use a checkpoint folder with tokenizer.json")
    key = vocab_size, tuple(sorted(eos_token_ids))
    if not key[1]:
        raise ValueError(f"{kind}: the checkpoint has no eos_token_id, and nothing else ends a structured text")
    tables = _tables.setdefault(tokenizer, {})
    if key not in tables:
        tables[key] = GrammarTable(tokenizer, *key)
    return tables[key].compiled(kind, getattr(params, kind))


def with_response_format(
    params: SamplingParams, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> SamplingParams:
    """Parameters of a chat whose ``response_format`` also restricts the tokens.

    ``params`` is returned unchanged, so that the prompt alone requests the format: without llguidance, with ``"strict":
    false``, with tools (the model may call them instead), for a continued answer, and if ``params`` has a structure.
    The encoding checks the form.

    Args:
        messages, options: of the chat, see `ChatOptions`.
    """
    given = options.get("response_format")
    form = given if isinstance(given, dict) else {}
    kind, described = form.get("type"), form.get("json_schema")
    described = described if kind == "json_schema" and isinstance(described, dict) else {}
    schema = {"type": "object"} if kind == "json_object" else described.get("schema")
    if schema is None or described.get("strict") is False or find_spec("llguidance") is None:
        return params
    tools = options.get("tools") and options.get("tool_choice") != "none"
    if tools or any(message.get("tools") for message in messages):
        return params
    if options.get("continue_final_message") or any(messages[-1].get(key) for key in ("prefix", "wo_eos")):
        return params
    return params if any(getattr(params, name) is not None for name in KINDS) else replace(params, json_schema=schema)


class GrammarTable:
    """The grammars compiled for one tokenizer, at most `MAX_GRAMMARS`; the least recently used one goes first.

    Args:
        vocab_size: of the model; ids without a token never come.
        eos_token_ids: allowed where the text may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]):
        llguidance = import_llguidance()
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids[0])
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._matchers: OrderedDict[tuple[str, Any], Any] = OrderedDict()

    def compiled(self, kind: str, given: Any) -> Any:
        """The matcher of a value of one of `KINDS`; ValueError if the value is wrong."""
        matcher = self._matchers.get((kind, given))
        if matcher is None:
            llguidance = import_llguidance()
            grammar = grammar_text(kind, given)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(f"{kind} {given!r:.120}: {matcher.get_error().strip()[:600]}")
            self._matchers[kind, given] = matcher
        self._matchers[kind, given] = self._matchers.pop((kind, given), matcher)
        while len(self._matchers) > MAX_GRAMMARS:
            self._matchers.popitem(last=False)
        return matcher


def grammar_text(kind: str, given: Any) -> str:
    """llguidance's form of a value of one of `KINDS`."""
    llguidance = import_llguidance()
    matcher = llguidance.LLMatcher
    try:
        if kind == "json_schema":
            return matcher.grammar_from_json_schema(given)
        if kind == "regex":
            return matcher.grammar_from_regex(given)
        if kind == "choices":
            return matcher.grammar_from_lark("start: " + " | ".join(map(quoted, given)))
        return matcher.grammar_from_lark(llguidance.gbnf_to_lark.gbnf_to_lark(given) if "::=" in given else given)
    except Exception as error:
        raise ValueError(f"{kind} {given!r:.120}: {error}") from error


def quoted(text: str) -> str:
    """A string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


class Allowed(NamedTuple):
    """Tokens that may come next.

    Attributes:
        mask: one bit per token of the vocabulary, in words of 32 bits.
        ended: only EOS may.
    """

    mask: bytes
    ended: bool


class GrammarState:
    """How far one request's text is in its grammar: a matcher that follows from the tokens.

    Args:
        compiled: a matcher at the beginning.
        begins_after: the token ``</think>`` if the prompt ends within reasoning: the grammar then begins after it.
        not_reasoned: tokens that do not come within reasoning: ``｜DSML｜`` would end it, and begin calls.
    """

    def __init__(self, compiled: Any, begins_after: int | None, not_reasoned: tuple[int, ...] = ()):
        self._compiled, self._begins_after, self.not_reasoned = compiled, begins_after, not_reasoned
        self._matcher: Any = None
        self._consumed: list[int] = []

    def forget(self) -> None:
        self._matcher = None

    def is_reasoning(self, output: list[int]) -> bool:
        """Whether the grammar has not begun after these tokens."""
        return self._begins_after is not None and self._begins_after not in output

    def allowed(self, output: list[int]) -> Allowed | None:
        """Tokens that may come after these; None within reasoning, and after drafts that are not allowed."""
        if self.is_reasoning(output):
            return None
        tokens = output if self._begins_after is None else output[output.index(self._begins_after) + 1 :]
        # while it moves it is not kept: an interruption then leaves no matcher of which nobody knows where it is
        matcher, self._matcher = self._matcher, None
        consumed = self._consumed if matcher is not None else []
        if consumed != tokens[: len(consumed)]:  # drafts that were rejected
            same = next((i for i, (a, b) in enumerate(zip(consumed, tokens, strict=False)) if a != b), None)
            same = min(len(consumed), len(tokens)) if same is None else same
            if matcher is None or not matcher.rollback(len(consumed) - same) or matcher.is_error():
                matcher, same = None, 0
            consumed = consumed[:same]
        if matcher is None:
            matcher, consumed = self._compiled.deep_copy(), []
        rest = tokens[len(consumed) :]
        valid = matcher.validate_tokens(rest)
        matcher.consume_tokens(rest[:valid])
        if matcher.is_error():
            raise RuntimeError(f"llguidance: {matcher.get_error().strip()[:600]}")
        found = Allowed(matcher.compute_bitmask(), matcher.is_stopped()) if valid == len(rest) else None
        self._consumed = tokens[: len(consumed) + valid]
        self._matcher = matcher
        return found


class _Vocabulary:
    """The bytes of each token, as llguidance reads them. Added tokens are special: no grammar has them as text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        if "ByteLevel" not in repr(tokenizer.backend.decoder):
            raise ValueError(
                f"structured output needs a byte-level BPE tokenizer, as DeepSeek's are; the one in "
                f"{tokenizer.directory} has the decoder {tokenizer.backend.decoder!r:.80}"
            )
        self._tokenizer, self.eos_token_id = tokenizer, eos_token_id
        byte_of, added = bytes_of_characters(), tokenizer.added_ids
        self.tokens = [b""] * vocab_size
        for token, i in tokenizer.backend.get_vocab().items():
            known = i not in added and all(character in byte_of for character in token)
            name = token if token.startswith("<") else f"<{token}>"  # by which a grammar can refer to a special token
            self.tokens[i] = bytes(byte_of[character] for character in token) if known else name.encode()
        self.special_token_ids = sorted({*added, *(i for i, token in enumerate(self.tokens) if not token)})

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode_plain(text)


def bytes_of_characters() -> dict[str, int]:
    """The byte of each character of byte-level BPE: printable ones of Latin-1 are themselves, others follow 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def import_llguidance() -> Any:
    try:
        import llguidance  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError as error:
        raise ValueError(
            f"structured output needs llguidance ({error}): pip install 'deepseek-attn[structured]'"
        ) from None
    return llguidance
