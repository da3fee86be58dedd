"""A sequence: the tokens of one request, and the pages that hold those computed so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepseek_attn.cache.files import load_cache, save_cache
from deepseek_attn.cache.manager import CacheManager, SequenceCache
from deepseek_attn.config.defaults import DEFAULT_MAX_MODEL_LEN
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.options import is_integer
from deepseek_attn.runner.prompts import TokenIds, shown, token_list
from deepseek_attn.utils.turns import Turns, in_turn


@dataclass(frozen=True)
class TokenLimits:
    """Which tokens a sequence may hold, and how many.

    Attributes:
        max_model_len: longest sequence that the caches were made for.
        max_position_embeddings: the model's own limit, named in the error message.
    """

    vocab_size: int
    max_model_len: int
    max_position_embeddings: int

    @classmethod
    def of(cls, config: AnyConfig, max_model_len: int | None) -> TokenLimits:
        """The limits of a runner with this option."""
        limit = config.max_position_embeddings
        return cls(
            config.vocab_size, min(limit, DEFAULT_MAX_MODEL_LEN) if max_model_len is None else max_model_len, limit
        )

    def checked(self, token_ids: TokenIds) -> list[int]:
        """The tokens of a prompt; ValueError for none, for one outside the vocabulary, or for too many."""
        ids = [self.check_token(token) for token in token_list(token_ids)]
        if not ids:
            raise ValueError("empty prompt: at least one token is needed (a plain prompt begins with the BOS token)")
        self.check_length(len(ids))
        return ids

    def check_token(self, token: int) -> int:
        """The token as an int; ValueError if it is not in the vocabulary."""
        if not is_integer(token) or not 0 <= token < self.vocab_size:
            raise ValueError(
                f"token id {shown(token)} is not in the vocabulary: ids are integers in [0, {self.vocab_size})"
            )
        return int(token)

    def check_length(self, length: int) -> None:
        """ValueError if ``length`` tokens are too many."""
        if length > self.max_model_len:
            raise ValueError(
                f"a sequence of {length} tokens exceeds max_model_len={self.max_model_len}; raise max_model_len "
                f"(the model's limit is {self.max_position_embeddings})"
            )


@dataclass(eq=False)
class Sequence:
    """Tokens of one request, and how many of them are in the caches.

    Attributes:
        token_ids: all tokens so far, prompt and generated.
        cache: pages of the first ``num_computed`` tokens, which ``manager`` gave.
        fingerprint: digests of all that cached bytes depend on (`make_fingerprint`); called when the sequence is saved.
    """

    token_ids: list[int]
    cache: SequenceCache
    manager: CacheManager
    limits: TokenLimits
    fingerprint: Callable[[], dict[str, str]]

    @classmethod
    def create(
        cls,
        token_ids: TokenIds,
        manager: CacheManager,
        limits: TokenLimits,
        fingerprint: Callable[[], dict[str, str]],
        cache: SequenceCache | None = None,
    ) -> Sequence:
        """A checked sequence; ``cache``: pages of tokens that are computed already, default: none.

        Raises:
            ValueError: no tokens, a token outside the vocabulary, or more than ``max_model_len``.
        """
        ids = limits.checked(token_ids)
        if not isinstance(cache, SequenceCache | None):
            raise ValueError(f"cache is {shown(cache)}: pass the SequenceCache of a sequence, or None")
        return cls(ids, manager.create() if cache is None else cache, manager, limits, fingerprint)

    @classmethod
    def load(
        cls, path: str | Path, manager: CacheManager, limits: TokenLimits, fingerprint: Callable[[], dict[str, str]]
    ) -> Sequence:
        """Reads a file that `save` wrote; see `ModelRunner.load_sequence`."""
        token_ids, cache = load_cache(path, manager, fingerprint(), limits.vocab_size)
        return cls(token_ids, cache, manager, limits, fingerprint)

    @property
    def turns(self) -> Turns:
        return self.manager.turns

    @property
    def num_computed(self) -> int:
        return self.cache.num_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that a step still has to compute."""
        return len(self.token_ids) - self.cache.num_tokens

    @in_turn
    def append(self, token_id: int) -> None:
        """Adds one token, to be computed by a later step."""
        self.limits.check_length(len(self.token_ids) + 1)
        self.token_ids.append(self.limits.check_token(token_id))

    @in_turn
    def truncate(self, length: int, keep_pages: bool = False) -> None:
        """Goes back to the first ``length`` tokens, exactly as if the later tokens had never been computed.

        Up to ``max_rollback`` tokens back the caches are kept; further back the window's entries are gone, and the next
        step computes the sequence again from its first token.

        Args:
            keep_pages: pages of the dropped tokens stay reserved for the tokens that will replace them.
        """
        if not is_integer(length) or not 0 <= length <= len(self.token_ids):
            tokens = len(self.token_ids)
            raise ValueError(
                f"truncate({shown(length)}) of a sequence of {tokens} tokens: an integer from 0 to {tokens}"
            )
        if length < self.num_computed:
            self.manager.truncate(self.cache, length, keep_pages)
        del self.token_ids[length:]

    @in_turn
    def fork(self) -> Sequence:
        """A second sequence with the same tokens; pages are shared until one of the two writes to them."""
        cache = self.manager.fork(self.cache)
        return Sequence(list(self.token_ids), cache, self.manager, self.limits, self.fingerprint)

    @in_turn
    def save(self, path: str | Path) -> None:
        """Writes tokens and caches to a safetensors file, for `ModelRunner.load_sequence` on the same rank.

        Raises:
            ValueError: the file cannot be written; an existing file is unchanged.
        """
        save_cache(path, self.manager, self.cache, self.token_ids, self.fingerprint())

    def free(self) -> None:
        """Returns all pages. The tokens stay; computing them again starts from the first."""
        self.manager.free(self.cache)
