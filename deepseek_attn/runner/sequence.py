"""A sequence: the tokens of one request, and the pages that hold those computed so far."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_attn.cache.files import save_cache
from deepseek_attn.cache.manager import SequenceCache

if TYPE_CHECKING:
    from deepseek_attn.runner.model_runner import ModelRunner


@dataclass(eq=False)
class Sequence:
    """Tokens of one request and what of them is in the caches.

    Attributes:
        token_ids: all tokens so far, prompt and generated.
        cache: pages of the first ``num_computed`` tokens.
    """

    runner: ModelRunner
    token_ids: list[int]
    cache: SequenceCache

    @property
    def num_computed(self) -> int:
        return self.cache.num_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that a step still has to compute."""
        return len(self.token_ids) - self.cache.num_tokens

    def append(self, token_id: int) -> None:
        """Adds one token, to be computed by a later step."""
        self.runner.check_length(len(self.token_ids) + 1)
        self.token_ids.append(self.runner.check_token(token_id))

    def truncate(self, length: int) -> None:
        """Goes back to the first ``length`` tokens, exactly as if the others had never been.

        Up to ``max_rollback`` tokens back the caches are kept; further back the window's entries are gone, and the next
        step computes the sequence again from its first token.
        """
        if not 0 <= length <= len(self.token_ids):
            raise ValueError(f"truncate({length}) of a sequence of {len(self.token_ids)} tokens")
        if length < self.num_computed:
            self.runner.manager.truncate(self.cache, length)
        del self.token_ids[length:]

    def fork(self) -> Sequence:
        """A second sequence with the same tokens; pages are shared until one of the two writes to them."""
        return Sequence(self.runner, list(self.token_ids), self.runner.manager.fork(self.cache))

    def save(self, path: str | Path) -> None:
        """Writes tokens and caches to a safetensors file, for `ModelRunner.load_sequence`."""
        runner = self.runner
        save_cache(path, runner.pools, self.cache, self.token_ids, runner.fingerprint())

    def free(self) -> None:
        """Returns all pages. The tokens stay; computing them again starts from the first."""
        self.runner.manager.free(self.cache)
