"""Text <-> token ids: the tokenizer of a checkpoint folder, and streaming detokenization."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from tokenizers import AddedToken, models
from tokenizers.decoders import DecodeStream

from deepseek_attn.text.reply import END_THINK, THINK
from deepseek_attn.text.template import plain_messages, read_template, with_reasoning
from deepseek_attn.text.template_process import render_untrusted, try_tokenizer
from deepseek_attn.text.tokenizer_bounds import MAX_TOKENIZER_BYTES, check_bounds, has_unknown_patterns
from deepseek_attn.utils.json_files import read_json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
IMAGE = "<｜deepseek_image｜>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# Keys of tokenizer_config.json that name a special token; a chat template may read each of them.
SPECIAL_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
TEXT_TOKENS = (THINK, END_THINK, "｜DSML｜")  # part of a reply's text, also for a tokenizer that has them as special
REPLACEMENT = "\ufffd"  # for incomplete or invalid UTF-8
REST = "\0"  # stands for all text between added tokens
FIRST_PIECE = 1 << 16  # characters of a long text that are tokenized first


class Tokenizer:
    """The tokenizer of a checkpoint folder: ``tokenizer.json``, and the added tokens of ``tokenizer_config.json``.

    Special tokens are never added behind the caller's back: `encode` adds none, `encode_prompt` adds BOS, and the
    chat encoding writes its own.

    Attributes:
        directory: the folder.
        backend: the tokenizer of the ``tokenizers`` library.
        bos_token, bos_token_id: begin of sentence, from ``tokenizer_config.json`` or DeepSeek's string.
        eos_token_id: end of sentence, or None. The model's config decides which tokens end a turn.

    Raises:
        ValueError: no such folder, no ``tokenizer.json``, an unreadable one, or no BOS token.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        path = self.directory / TOKENIZER_FILE
        if not path.is_file():
            raise ValueError(
                f"no tokenizer.json in {self.directory}: copy tokenizer.json and tokenizer_config.json of the "
                "checkpoint into this folder, or work with token ids"
            )
        settings = read_settings(self.directory)
        self.backend, self._needs_trial = _load(path, settings)
        self._special = {key: _added_token(settings[key]).content for key in SPECIAL_KEYS if settings.get(key)}
        self.bos_token = self._special.get("bos_token", BOS)
        bos_token_id = self.token_id(self.bos_token)
        self.eos_token_id = self.token_id(self._special.get("eos_token", EOS))
        if bos_token_id is None:
            raise ValueError(
                f"{path} has no token {self.bos_token!r} to begin a prompt with: set bos_token in "
                "tokenizer_config.json to a token of this vocabulary"
            )
        self.bos_token_id = bos_token_id
        self._chat_template = _chat_template(self.directory, settings)

    def __repr__(self) -> str:
        return (
            f"Tokenizer({str(self.directory)!r}, {len(self)} tokens, BOS {self.bos_token_id}, EOS {self.eos_token_id})"
        )

    def __len__(self) -> int:
        """Number of tokens, added tokens included."""
        return self.backend.get_vocab_size()

    def check_ids(self, vocab_size: int) -> None:
        """ValueError for a token whose id is not in a vocabulary of ``vocab_size``."""
        token, largest = max(self.backend.get_vocab().items(), key=lambda item: item[1])
        if largest >= vocab_size:
            raise ValueError(
                f"the tokenizer in {self.directory} gives {token!r} the id {largest}, and the model's vocab_size is "
                f"{vocab_size}: it is another model's tokenizer, or has tokens that were added later; take the "
                "tokenizer.json and tokenizer_config.json that were published with the model"
            )

    def check_images(self, ids: Iterable[int]) -> None:
        """ValueError if one of ``ids`` stands for an image."""
        image = self.token_id(IMAGE)
        if image is not None and any(token == image for token in ids):
            raise ValueError(
                f"token {image} ({IMAGE}) stands for an image, and of models with vision only the text part runs: "
                "leave images out of the prompt"
            )

    def token_id(self, token: str) -> int | None:
        """Id of the one token spelled ``token``, or None if the vocabulary has no such token."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of ``text`` and nothing else; added tokens spelled out in it become their ids.

        Args:
            max_tokens: a text of more than twice this number is tokenized only in part.

        Raises:
            ValueError: a lone surrogate in ``text``, which no UTF-8 text has; far more than ``max_tokens`` tokens.
        """
        return self._encode(self.backend, text, max_tokens)

    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        """`encode` without the added vocabulary: an added token spelled out in ``text`` stays text."""
        return self._encode(self._plain, text, max_tokens)

    def encode_prompt(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a plain completion prompt: BOS, then ``text``; a BOS that begins ``text`` is not doubled."""
        ids = self.encode(text, max_tokens)
        return ids if ids[:1] == [self.bos_token_id] else [self.bos_token_id] + ids

    def find_added(self, text: str, max_tokens: int | None = None) -> list[tuple[int, int, int]]:
        """Start, end and id of each added token that `encode` finds in ``text``; raises ValueError as `encode` does."""
        self._check_text(text)
        if not self._may_have_added(text):
            return []
        self._check_length(self.backend, text, max_tokens)
        self._try(self.backend, text)
        with self._panics_refused("a text"):
            found = self._finder.encode(text, add_special_tokens=False)
        added = self._finder.get_added_tokens_decoder()  # by the finder's own ids
        spans = zip(found.ids, found.offsets, strict=True)
        return [(start, end, self.added[added[i].content]) for i, (start, end) in spans if i in added]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``; bytes that are not valid UTF-8 become U+FFFD. Raises ValueError for a negative id."""
        ids = [int(i) for i in ids]
        if ids and min(ids) < 0:
            raise ValueError(f"token ids must not be negative, got {min(ids)}: padding must be removed before decoding")
        with self._panics_refused("token ids"):
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def step(self, stream: DecodeStream, token_id: int) -> str | None:
        """The text that is certain after one more token of a stream, if any."""
        with self._panics_refused("token ids"):
            return stream.step(self.backend, token_id)

    def _encode(self, backend: tokenizers.Tokenizer, text: str, max_tokens: int | None) -> list[int]:
        self._check_length(backend, text, max_tokens)
        self._check_text(text)
        self._try(backend, text)
        with self._panics_refused("a text"):
            return backend.encode(text, add_special_tokens=False).ids

    def _check_length(self, backend: tokenizers.Tokenizer, text: str, max_tokens: int | None) -> None:
        """ValueError if a beginning of ``text`` has twice ``max_tokens``: a cut inside a word adds some tokens."""
        size = FIRST_PIECE
        while max_tokens is not None and size < len(text):
            check_number(len(self._encode(backend, text[:size], None)) // 2, max_tokens)
            size *= 2

    def _try(self, backend: tokenizers.Tokenizer, text: str) -> None:
        """ValueError if a regular expression of the tokenizer takes too long on ``text``."""
        if not self._needs_trial:
            return
        trial = without_model(backend)
        trial.pre_tokenizer = backend.pre_tokenizer
        try:
            try_tokenizer(trial.to_str(), text)
        except ValueError as error:
            raise ValueError(f"the tokenizer in {self.directory} fails on a text: {error}") from error

    def _check_text(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of the text is {text[error.start]!r}, a lone surrogate, which stands "
                "for a byte that is not UTF-8: pass UTF-8 text"
            ) from None

    @contextmanager
    def _panics_refused(self, given: str) -> Iterator[None]:
        with panics_as_errors(f"the tokenizer in {self.directory} fails on {given}"):
            yield

    @cached_property
    def added(self) -> dict[str, int]:
        """Ids of the added tokens by their text."""
        return {token.content: i for i, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that `decode` can skip."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(self.added.values())

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same model without added tokens."""
        plain = tokenizers.Tokenizer(self.backend.model)
        plain.normalizer, plain.pre_tokenizer = self.backend.normalizer, self.backend.pre_tokenizer
        return plain

    def _may_have_added(self, text: str) -> bool:
        """Whether an added token is spelled in ``text``, or could be once it is normalized: found in less time."""
        if repr(self.backend.normalizer) not in ("None", "Sequence(normalizers=[])"):
            return True
        lengths = self._added_lengths
        starts = re.compile("|".join(map(re.escape, lengths))) if lengths else re.compile("(?!)")
        return any(
            text[match.start() : match.start() + length] in self.added
            for match in starts.finditer(text)
            for length in lengths[match[0]]
        )

    @cached_property
    def _added_lengths(self) -> dict[str, set[int]]:
        """Lengths of the added tokens that begin with the same two characters."""
        lengths: dict[str, set[int]] = {}
        for token in self.added:
            lengths.setdefault(token[:2], set()).add(len(token))
        return lengths

    @cached_property
    def _finder(self) -> tokenizers.Tokenizer:
        return without_model(self.backend)

    def apply_chat_template(self, messages: list[dict], thinking: bool, **variables: Any) -> str:
        """Render the checkpoint's Jinja chat template up to where generation starts.

        Args:
            variables: further names for the template, such as ``tools``.

        Raises:
            ValueError: the template is missing, fails, refuses the messages or exceeds the limits of its process.
        """
        if not self._chat_template:
            raise ValueError(f"the tokenizer in {self.directory} has no chat template; use chat.encode_messages")
        messages = [with_reasoning(message) for message in plain_messages(messages)]
        names = {**self._special, "thinking": thinking, "enable_thinking": thinking, **variables}
        try:
            return render_untrusted(self._chat_template, messages, **names)
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {self.directory} cannot render these messages: {error}; change the messages to "
                "what the template supports, or pass a plain prompt"
            ) from error


class IncrementalDecoder:
    """Turns a stream of token ids into text, complete characters only.

    The pieces of `push` and `flush` joined are the text of all ids. Text is held back while it ends inside a
    character, whose bytes may be spread over several tokens; at most ``MAX_HELD`` tokens of it, so that the cost of a
    stream without any valid character is linear too.
    """

    MAX_HELD = 16

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._restart()

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that is now certain (often one word, possibly empty)."""
        self._held.append(int(token_id))
        piece = self._tokenizer.step(self._stream, int(token_id))
        if piece is not None:
            self._held.clear()
            return piece
        return self._release() if len(self._held) > self.MAX_HELD else ""

    def flush(self) -> str:
        """The text still held back, incomplete characters as U+FFFD; the decoder starts afresh."""
        text = self._decode(self._held)
        self._restart()
        return text

    def _restart(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        self._held: list[int] = []  # tokens since the last piece

    def _release(self) -> str:
        """The text of all held tokens but the last ones, which may begin a character: they start a new stream.

        A cut inside a character would show as one U+FFFD more. A character has at most four bytes, and so at most
        three cuts inside it.
        """
        held, text = self._held, self._decode(self._held)
        self._restart()
        if not text.endswith(REPLACEMENT):
            return text
        for split in range(len(held) - 1, len(held) - 5, -1):
            head, tail = self._decode(held[:split]), self._decode(held[split:])
            if tail and head + tail == text:
                return head + "".join(self.push(token) for token in held[split:])
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)


def without_model(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same normalizer and added tokens; all other text is one token."""
    finder = tokenizers.Tokenizer(models.WordLevel({REST: 0}, unk_token=REST))
    finder.normalizer = backend.normalizer
    finder.add_tokens(list(backend.get_added_tokens_decoder().values()))
    return finder


def check_number(at_least: int, max_tokens: int) -> None:
    """ValueError for a prompt of too many tokens that was not tokenized to its end."""
    if at_least > max_tokens:
        raise ValueError(
            f"a prompt of at least {at_least} tokens exceeds max_model_len={max_tokens}; shorten it, or raise "
            "max_model_len"
        )


@contextmanager
def panics_as_errors(failed: str) -> Iterator[None]:
    """ValueError for an assertion that failed in the tokenizers library, which raises no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{failed}: {str(error)[:300]}; take the tokenizer.json published with the model") from error


def read_settings(directory: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` of a folder, {} without one; ValueError if it holds no JSON object."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return {}
    settings = read_json(path, str(path))
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(settings).__name__}; fetch the file again")
    return settings


def _load(path: Path, settings: dict[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """``tokenizer.json`` with the tokens of the settings that it lacks; it adds, cuts and pads nothing by itself.

    Returns:
        The tokenizer, and whether it `has_unknown_patterns`.
    """
    data = read_json(path, str(path), MAX_TOKENIZER_BYTES)
    check_bounds(data, settings, str(path))
    try:
        for token in data.get("added_tokens") or []:
            token["special"] = token["special"] and token["content"] not in TEXT_TOKENS
        with panics_as_errors("the tokenizers library"):
            backend = tokenizers.Tokenizer.from_str(json.dumps(data))
            backend.post_processor = None  # it could repeat a text
        named = [_added_token(settings[key], special=True) for key in SPECIAL_KEYS if settings.get(key)]
        special = {token.content for token in named}
        listed = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
        listed = [_added_token(token) for _, token in listed]
        for token in listed:
            token.special = (token.special or token.content in special) and token.content not in TEXT_TOKENS
        known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens([token for token in listed if known.get(token.content) != token])
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens([token for token in named if token.content not in known])
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot parse
        raise ValueError(
            f"cannot read the tokenizer in {path.parent}: {str(error)[:300]}; fetch tokenizer.json and "
            "tokenizer_config.json again"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend, has_unknown_patterns(data)


def _added_token(token: str | dict[str, Any], **flags: bool) -> AddedToken:
    """A token of the settings: its text, or a dict of text (``content``) and flags."""
    fields: dict[str, Any] = {"content": token} if isinstance(token, str) else token
    known: dict[str, Any] = {key: value for key, value in (fields | flags).items() if key in TOKEN_FIELDS}
    return AddedToken(**known)


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """``chat_template.jinja``, else ``chat_template`` of the settings: one template, or several with their names."""
    if (directory / TEMPLATE_FILE).is_file():
        return read_template(directory / TEMPLATE_FILE)
    given = settings.get("chat_template")
    if given is None or isinstance(given, str):
        return given
    try:
        templates = {str(entry["name"]): entry["template"] for entry in given}
        default = templates.get("default", "")
        if not isinstance(default, str):
            raise TypeError
    except (TypeError, KeyError):
        raise ValueError(
            f"{directory / CONFIG_FILE} has chat_template={given!r:.80}: supported are a string, and a list of dicts "
            "with name and template (strings)"
        ) from None
    if "default" not in templates:
        raise ValueError(
            f"{directory / CONFIG_FILE} has chat templates {sorted(templates)} and none of them is the default: put "
            f"one of them into {TEMPLATE_FILE}"
        )
    return default
