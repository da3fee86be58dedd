"""Prefix cache: finds the snapshot that a new prompt starts from, and evicts snapshots when slots run out.

Tokens are hashed in blocks of `CacheLayout.snapshot_block`, each block with all tokens before it, so one look-up finds
the longest prefix that is kept. Where caches keep all tokens (DeepSeek-V3.2), a snapshot serves every block it covers.
Elsewhere it serves exactly its length, and the cache also reports the length of the longest prefix seen before: a
prompt that stops there once leaves a snapshot for all later prompts with that prefix.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from deepseek_attn.cache.manager import CacheManager, SequenceCache
from deepseek_attn.cache.pages import NULL_PAGE
from deepseek_attn.cache.snapshots import Snapshot, SnapshotStore
from deepseek_attn.utils.turns import in_turn


class BlockKeys:
    """Keys of the prefixes of one growing list of tokens: ``keys[i]`` stands for its first ``i + 1`` blocks.

    Args:
        block: tokens of a block.
        lookahead: tokens after a prefix that belong to its key: 1 where an MTP layer's cache was filled too, because
            its row of a token also depends on the next token.
    """

    def __init__(self, block: int, lookahead: int = 0):
        self.block, self.lookahead = block, lookahead
        self._chain: list[bytes] = []
        self._keys: list[bytes] = []

    def upto(self, token_ids: list[int], length: int) -> list[bytes]:
        """Keys of all whole blocks within the first ``length`` tokens, as far as their lookahead is known.

        Tokens for which keys were made must not change afterwards.
        """
        length = min(length, len(token_ids) - self.lookahead)
        for end in range((len(self._keys) + 1) * self.block, length + 1, self.block):
            known = len(self._keys)
            before = self._chain[known - 1] if known else b""
            self._chain[known:] = [_digest(before, token_ids[end - self.block : end])]
            self._keys.append(_digest(self._chain[-1], token_ids[end : end + self.lookahead]))
        return self._keys[: max(length, 0) // self.block]


def _digest(before: bytes, tokens: list[int]) -> bytes:
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass
class Match:
    """The part of a prompt that is in the prefix cache.

    Attributes:
        snapshot: the snapshot to start from; None: compute the prompt from its first token.
        length: prompt tokens that need not be computed.
        seen: leading prompt tokens, at least ``length``, that another sequence had too: worth a snapshot.
    """

    snapshot: Snapshot | None = None
    length: int = 0
    seen: int = 0


@dataclass(eq=False)
class _Entry:
    snapshot: Snapshot
    keys: list[bytes]  # of its blocks that no earlier snapshot had


class PrefixCache:
    """Snapshots by the tokens of their prefix; eviction is least recently used first."""

    def __init__(self, manager: CacheManager):
        self.manager, self.layout, self.turns = manager, manager.layout, manager.turns
        self.store = SnapshotStore(manager)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._seen: dict[bytes, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @in_turn
    def match(self, keys: list[bytes], serves: Callable[[SequenceCache], bool] | None = None) -> Match:
        """The longest kept prefix of a prompt.

        Args:
            keys: of the prompt's prefixes, shortest first.
            serves: whether the prompt can continue from a given snapshot's cache; None: from every snapshot.
        """
        block, found = self.layout.snapshot_block, Match()
        for count in range(len(keys), 0, -1):
            key = keys[count - 1]
            if key not in self._seen:
                continue
            found.seen = found.seen or count * block
            entry = self._seen[key] if self.layout.keeps_all_tokens else self._entries.get(key)
            if entry is not None and (serves is None or serves(entry.snapshot.cache)):
                self._entries.move_to_end(entry.keys[-1])
                return Match(entry.snapshot, count * block, found.seen)
        return found

    @in_turn
    def start(self, match: Match) -> SequenceCache:
        """A new sequence's cache with the matched prefix in it.

        Raises:
            OutOfPages: nothing was changed. ValueError: nothing of the prompt is kept.
        """
        if match.snapshot is None:
            raise ValueError("the match has no snapshot: compute the prompt from its first token")
        return self.store.restore(match.snapshot, match.length)

    @in_turn
    def keep(self, cache: SequenceCache, keys: list[bytes]) -> bool:
        """Takes a snapshot of the first ``len(keys)`` blocks of a sequence; returns whether it was new.

        No snapshot is taken if the caches have moved too far past these blocks (`SnapshotStore.holds`).
        It replaces a snapshot of the same tokens with fewer keys of upper layers (`SequenceCache.exact_from`).
        """
        length = len(keys) * self.layout.snapshot_block
        if not self.layout.max_snapshots or not self.store.holds(cache, length):
            return False
        if (known := self._entries.get(keys[-1])) is not None:
            if known.snapshot.cache.exact_from <= cache.exact_from:
                self._entries.move_to_end(keys[-1])
                return False
            self._remove(keys[-1])
        if self.layout.keeps_all_tokens:
            if keys[-1] in self._seen:
                return False
            for key in keys[:-1]:  # shorter ones are part of this one
                if key in self._entries:
                    self._remove(key)
        if self.store.full and not self.evict():
            return False
        snapshot = self.store.take(cache, length)
        fresh = [key for key in keys[:-1] if key not in self._seen] + keys[-1:]
        entry = self._entries[keys[-1]] = _Entry(snapshot, fresh)
        self._seen |= dict.fromkeys(fresh, entry)
        return True

    @in_turn
    def evict(self) -> bool:
        """Drops the least recently used snapshot; returns False without snapshots."""
        if not self._entries:
            return False
        self._remove(next(iter(self._entries)))
        return True

    @in_turn
    def clear(self) -> None:
        while self.evict():
            pass

    @in_turn
    def reclaimable(self) -> dict[str, int]:
        """Pages by group that are free once every snapshot has gone."""
        holders = Counter(
            (group, page)
            for entry in self._entries.values()
            for group, table in entry.snapshot.cache.tables.items()
            for page in table
            if page != NULL_PAGE
        )
        alone = Counter(
            group for (group, page), count in holders.items() if self.manager.references(group, page) == count
        )
        return {group: alone[group] for group in self.layout.pages}

    def _remove(self, key: bytes) -> None:
        # in this order, nothing finds an entry that is partly removed
        entry = self._entries[key]
        for known in entry.keys:
            if self._seen.get(known) is entry:
                del self._seen[known]
        del self._entries[key]
        self.store.drop(entry.snapshot)
