"""Snapshots: the cache contents that a later sequence needs to continue from a prefix.

A snapshot is taken at a multiple of ``layout.snapshot_block`` tokens, which the window's page divides. Kept are:
- of the state ring (in `Pool.carried`), the rows of the compression window that is open there, if the ratio does not
  divide the block; where windows overlap, also the rows of the window before it;
- of the sliding window, the pages with its last ``window - 1`` tokens.
Compressed entries, index keys and latent rows are shared by reference count, as between forks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_attn.cache.layout import STATE
from deepseek_attn.cache.manager import CacheManager, SequenceCache
from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.cache.pools import Pool


@dataclass(eq=False)
class Snapshot:
    """A kept prefix.

    Attributes:
        cache: its pages, and instead of a state page the row of each `Pool.carried` with its state rows.
    """

    cache: SequenceCache

    @property
    def num_tokens(self) -> int:
        return self.cache.num_tokens


class SnapshotStore:
    """Takes snapshots of sequences, at most ``layout.max_snapshots`` of a manager's, and starts sequences from them."""

    def __init__(self, manager: CacheManager):
        self.manager, self.layout = manager, manager.layout

    @property
    def _carrying(self) -> list[Pool]:
        return [pool for pool in self.manager.pools if pool.spec.carry]

    @property
    def full(self) -> bool:
        return not self.manager.free_snapshots

    def take(self, cache: SequenceCache, length: int | None = None) -> Snapshot:
        """Keeps the first ``length`` tokens of a sequence (default: all of them), which stays usable.

        Raises:
            ValueError: the length is not a multiple of ``snapshot_block``, the caches have moved too far past it
                (`holds`), or all snapshot slots are taken.
        """
        length = cache.num_tokens if length is None else length
        if length % self.layout.snapshot_block or not self.holds(cache, length):
            raise ValueError(
                f"no snapshot at {length} tokens of a sequence of {cache.num_tokens}: it is taken at a multiple of "
                f"{self.layout.snapshot_block}, from {max(1, cache.low_water)} tokens on"
            )
        if self.full:
            raise ValueError(f"all of max_snapshots={self.layout.max_snapshots} are in use; drop one first")
        kept = self.manager.fork(cache)
        row = self.manager.carry(kept)
        if STATE in kept.tables:
            [page] = kept.tables[STATE]
            for pool in self._carrying:
                pool.carried[row].copy_(pool.tensor[page, self._rows(pool, length)])
            self.manager.release_table(kept, STATE)
        self.manager.truncate(kept, length)  # also drops pages that were reserved for more
        if not self.layout.keeps_all_tokens:
            self.manager.raise_low_water(kept, length)
        return Snapshot(kept)

    def holds(self, cache: SequenceCache, length: int) -> bool:
        """Whether the caches still have all that a sequence needs to go on from its first ``length`` tokens."""
        return max(1, cache.low_water) <= length <= cache.num_tokens

    def restore(self, snapshot: Snapshot, length: int | None = None) -> SequenceCache:
        """A new sequence with the first ``length`` tokens of a snapshot (default: all of them) in its caches.

        Raises:
            OutOfPages: no state page is free; nothing was changed.
        """
        if STATE in self.layout.pages and not self.manager.available_pages()[STATE]:
            raise OutOfPages("the state pool has 0 free pages and a sequence needs 1; run fewer sequences at once")
        cache = self.manager.fork(snapshot.cache)
        if length is not None:
            self.manager.truncate(cache, length)
        if STATE in cache.tables:
            self.manager.allocate_table(cache, STATE, [True])
            [page] = cache.tables[STATE]
            for pool in self._carrying:
                pool.tensor[page, self._rows(pool, cache.num_tokens)] = pool.carried[snapshot.cache.carried]
        return cache

    def drop(self, snapshot: Snapshot) -> None:
        """Returns a snapshot's pages and its row of each `Pool.carried`."""
        self.manager.free(snapshot.cache)

    def _rows(self, pool: Pool, length: int) -> torch.Tensor:
        """Ring rows of the last ``carry`` tokens before ``length``."""
        tokens = torch.arange(length - pool.spec.carry, length, device=pool.tensor.device)
        return tokens % pool.entries
