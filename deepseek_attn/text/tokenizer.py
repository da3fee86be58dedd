"""Text <-> token ids: a thin wrapper over transformers' fast tokenizer, and streaming detokenization."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DEFAULT_BOS = "<｜begin▁of▁sentence｜>"
DEFAULT_EOS = "<｜end▁of▁sentence｜>"
REPLACEMENT = "\ufffd"  # what incomplete or invalid UTF-8 decodes to


class Tokenizer:
    """The tokenizer of a checkpoint folder (``tokenizer.json``).

    Special tokens are never added behind the caller's back: `encode` adds none, `encode_prompt` adds BOS, and the
    chat encoding writes its own.

    Attributes:
        directory: the folder.
        bos_token, bos_token_id: begin of sentence, from ``tokenizer_config.json`` or DeepSeek's string.
        eos_token_id: end of sentence, or None. A model's config is the authority on what ends a turn.

    Raises:
        ValueError: no such folder, no ``tokenizer.json``, an unreadable one, or no BOS token.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"no tokenizer.json in {self.directory}: copy tokenizer.json and tokenizer_config.json of the "
                "checkpoint into this folder, or work with token ids"
            )
        self._tokenizer = _load(self.directory)
        self.bos_token = self._tokenizer.bos_token or DEFAULT_BOS
        self.bos_token_id = self.token_id(self.bos_token)
        self.eos_token_id = self.token_id(self._tokenizer.eos_token or DEFAULT_EOS)
        if self.bos_token_id is None:
            raise ValueError(
                f"{path} has no token {self.bos_token!r} to begin a prompt with: set bos_token in "
                "tokenizer_config.json to a token of this vocabulary"
            )

    def __len__(self) -> int:
        """Number of tokens, added tokens included."""
        return len(self._tokenizer)

    def token_id(self, token: str) -> int | None:
        """Id of the one token spelled ``token``, or None if the vocabulary has no such token."""
        return self._tokenizer.backend_tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` and nothing else; special tokens spelled out in it become their ids."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a plain completion prompt: BOS, then ``text``; a BOS that begins ``text`` is not doubled."""
        ids = self.encode(text)
        return ids if ids[:1] == [self.bos_token_id] else [self.bos_token_id] + ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``; bytes that are not valid UTF-8 become U+FFFD. Raises ValueError for a negative id."""
        ids = [int(i) for i in ids]
        if ids and min(ids) < 0:
            raise ValueError(f"token ids must not be negative, got {min(ids)}: padding must be removed before decoding")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def apply_chat_template(self, messages: list[dict], thinking: bool) -> str:
        """Render the checkpoint's Jinja chat template up to where generation starts.

        Raises:
            ValueError: there is no template, or it refuses the messages.
            RuntimeError: jinja2 is not installed.
        """
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {self.directory} has no chat template; use chat.encode_messages")
        try:
            from jinja2 import TemplateError
        except ImportError as error:
            raise RuntimeError("rendering a chat template needs jinja2: pip install jinja2") from error
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, thinking=thinking, enable_thinking=thinking
            )
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {self.directory} refused the messages: {error}; change the messages to what "
                "the template supports, or pass a plain prompt"
            ) from error


class IncrementalDecoder:
    """Turns a stream of token ids into text, complete characters only.

    The pieces of `push` and `flush` joined are the text of all ids. A character whose bytes are spread over several
    tokens is held back until its last byte arrives.

    Notes:
        Each push decodes a window: the tokens behind the previous piece (context, for decoders whose output depends
        on the preceding token) and those still pending. The window is at most ``MAX_WINDOW`` tokens for byte-level
        tokenizers, so the total cost is linear in the number of tokens.
    """

    MAX_WINDOW = 16

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._context = 0  # tokens at the start of the window whose text is out completely
        self._emitted = 0  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that is now certain (often one word, possibly empty)."""
        self._window.append(int(token_id))
        text = self._decode(self._window)
        # Decoding replaces one truncated character by exactly one U+FFFD, so all but the last character is certain.
        incomplete = text.endswith(REPLACEMENT)
        certain = len(text) - 1 if incomplete else len(text)
        piece = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if not incomplete:
            self._slide(self._context)
            self._context = len(self._window)
        elif len(self._window) > self.MAX_WINDOW:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """The text still held back, incomplete characters as U+FFFD; the decoder starts afresh."""
        piece = self._decode(self._window)[self._emitted :]
        self._window, self._context, self._emitted = [], 0, 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens) if ids else ""

    def _slide(self, count: int) -> None:
        """Forget ``count`` tokens at the start of a window whose whole text is out."""
        self._window = self._window[count:]
        self._emitted = len(self._decode(self._window))

    def _cut(self, text: str) -> None:
        """Shorten a window that ends in invalid bytes for long, where two characters meet.

        A cut inside a character would show as one U+FFFD more. A character has at most four bytes, and so at most
        three cuts inside it.
        """
        for cut in range(len(self._window) - 1, len(self._window) - 5, -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if tail and head + tail == text:
                self._window, self._context = self._window[cut:], 0
                self._emitted -= len(head)
                return


def _load(directory: Path):
    # Imported here: transformers takes seconds to import, and only text needs it.
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer: DeepSeek configs may name LlamaTokenizerFast as the class, and whether that wins over a
    # byte-level tokenizer.json depends on the transformers version. Here tokenizer.json always decides.
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot parse
        raise ValueError(
            f"cannot read the tokenizer in {directory}: {error}; fetch tokenizer.json and tokenizer_config.json again"
        ) from error
    tokenizer.model_max_length = int(1e30)  # the runner knows the limit; silence the tokenizer's own warning
    return tokenizer
