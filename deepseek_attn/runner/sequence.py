"""What goes into a step of `ModelRunner` and comes out: sequences with their caches, and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepseek_attn.cache.files import save_cache
from deepseek_attn.cache.layout import CacheLayout
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


@dataclass
class StepOutput:
    """Results of one step, in the order of the batch.

    Attributes:
        logits: float32 ``[rows, vocab_size]`` per request: its new tokens, or only the last ones. None if ``tokens``
            are there instead.
        mtp_logits: the same from the MTP layer, for new tokens whose next token is known; None if not asked for.
        streams: what the backbone computed for the tokens of ``logits``; None if not asked for.
        tokens: waits for the device and returns the greedy token after each of these rows, `INVALID_TOKEN` where the
            largest logit is not finite. None unless it was asked for, and where the logits have to be looked at.
    """

    logits: list[torch.Tensor] | None
    mtp_logits: list[torch.Tensor] | None = None
    streams: list[torch.Tensor] | None = None
    tokens: Callable[[], list[list[int]]] | None = None


def check_batch(batch: list[tuple[Sequence, int]], layout: CacheLayout) -> None:
    """ValueError if (sequence, new tokens) pairs cannot be one step of a runner with this layout."""
    if not batch:
        raise ValueError("empty batch")
    if len({id(sequence) for sequence, _ in batch}) < len(batch):
        raise ValueError("a sequence appears twice in the batch")
    for sequence, n in batch:
        if not 1 <= n <= sequence.num_pending:
            raise ValueError(f"{n} tokens asked of a sequence with {sequence.num_pending} pending tokens")
    total, limit = sum(n for _, n in batch), layout.max_num_batched_tokens
    if total > limit or len(batch) > layout.max_num_seqs:
        raise ValueError(
            f"a step of {total} tokens in {len(batch)} sequences exceeds max_num_batched_tokens={limit} or "
            f"max_num_seqs={layout.max_num_seqs}"
        )


def tail_rows(lengths: list[int], counts: list[int]) -> list[int]:
    """Row numbers of the last ``counts[i]`` of the ``lengths[i]`` rows of each request."""
    rows, end = [], 0
    for length, count in zip(lengths, counts, strict=True):
        end += length
        rows += range(end - count, end)
    return rows
