"""Pages of sequences: reserve before a step, commit after it, truncate, fork, free."""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from deepseek_attn.cache.layout import STATE, WINDOW, WINDOW_PAGE, window_pages_per_sequence
from deepseek_attn.cache.pages import NULL_PAGE, OutOfPages, PageAllocator
from deepseek_attn.cache.pools import CachePools
from deepseek_attn.utils.turns import Turns, in_turn


@dataclass
class SequenceCache:
    """The pages that one sequence holds, and how far they are filled.

    Attributes:
        num_tokens: tokens whose entries are in the caches.
        low_water: smallest length that `truncate` can go back to in place. Above ``num_tokens`` within a step that may
            overwrite more than it could take back.
        exact_from: first token whose results the caches determine: V4.1's upper layers hold only the keys that tokens
            from this one on need (`config.trailing`). 0 where all layers have all keys.
        tables: physical page of each logical page, by group; 0 where a window page was freed.
        manager: the manager whose pages these are.
        uncommitted: of a sequence that is driven by `ModelRunner.step_metadata`: tokens that layers have computed and
            `CacheManager.commit` has not counted. None for others, whose runner does both.
        version: counts the changes of ``tables``, for copies of them that are kept elsewhere.
        owned_from, owned_to: lengths for which pages are already allocated and exclusive; lets `CacheManager.reserve`
            return early.
        carried: the row of each `Pool.carried` that a snapshot keeps; None for a sequence.
    """

    num_tokens: int = 0
    low_water: int = 0
    exact_from: int = field(default=0, kw_only=True)
    tables: dict[str, list[int]] = field(default_factory=dict)
    manager: CacheManager | None = field(default=None, compare=False, repr=False)
    uncommitted: int | None = None
    version: int = field(default=0, compare=False)
    owned_from: int = field(default=0, compare=False)
    owned_to: int = field(default=0, compare=False)
    carried: int | None = field(default=None, compare=False)


class _Change:
    """Context of a change to who holds which page. ``broke_off`` stays True if an exception ends it, at any point."""

    broke_off = False

    def __enter__(self) -> None:
        self.broke_off = True

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.broke_off = kind is not None


class CacheManager:
    """Hands pages of all groups to sequences. A page shared by forks is copied when a fork writes to it.

    The tables of all living `SequenceCache` objects are the source of truth: they list the pages of each. Free lists
    and
    reference counts are derived: they are recomputed after an exception (`KeyboardInterrupt` included) in a change, and
    after a cache that held pages was garbage-collected.

    Attributes:
        turns: of the threads that use these caches and the model over them.
    """

    def __init__(self, pools: CachePools):
        self.pools, self.layout = pools, pools.layout
        self.turns = Turns(next(iter(pools)).tensor.device)
        self._allocators = {group: PageAllocator(pages) for group, pages in self.layout.pages.items()}
        self._spans = self.layout.spans
        self._free_snapshots = list(range(self.layout.max_snapshots))
        self._change = _Change()
        self._holders: dict[int, weakref.ref[SequenceCache]] = {}  # by id
        self._collected: list[weakref.ref[SequenceCache]] = []

    @in_turn
    def available_pages(self) -> dict[str, int]:
        self._settle()
        return {group: allocator.available for group, allocator in self._allocators.items()}

    @property
    @in_turn
    def free_snapshots(self) -> list[int]:
        """Rows of each `Pool.carried` that no snapshot uses."""
        self._settle()
        return self._free_snapshots

    def pages_needed(self, tokens: int) -> dict[str, int]:
        """Pages by group that a sequence of ``tokens`` tokens holds between steps, when it shares none."""
        needed = {group: self._end(tokens, group) for group in self._spans}
        if WINDOW in needed:
            live = window_pages_per_sequence(self.layout.window, self.layout.max_rollback)
            needed[WINDOW] = min(needed[WINDOW], live)
        return needed | {group: 1 for group in self.layout.pages if group == STATE}

    def held_pages(self, cache: SequenceCache) -> dict[str, int]:
        """Pages by group that a sequence holds, shared ones included."""
        return {group: sum(page != NULL_PAGE for page in table) for group, table in cache.tables.items()}

    @in_turn
    def references(self, group: str, page: int) -> int:
        """Sequences and snapshots that hold a page."""
        self._settle()
        return self._allocators[group].references(page)

    @in_turn
    def allocate_table(self, cache: SequenceCache, group: str, held: list[bool]) -> None:
        """Gives an empty table of a sequence a new page wherever ``held``, and the null page elsewhere.

        Raises:
            OutOfPages: nothing was changed.
        """
        self._settle()
        allocator = self._allocators[group]
        if sum(held) > allocator.available:
            raise OutOfPages(
                f"the {group} pool has {allocator.available} free pages and the sequence needs {sum(held)}; free other "
                "sequences first, or raise kv_cache_bytes"
            )
        with self._change:
            self._register(cache)
            cache.tables[group] = [allocator.allocate() if wanted else NULL_PAGE for wanted in held]
            cache.version += 1
            cache.owned_to = 0

    @in_turn
    def release_table(self, cache: SequenceCache, group: str) -> None:
        """Returns a sequence's pages of one group."""
        self._settle()
        with self._change:
            self._release(group, cache.tables[group])
            cache.tables[group] = []
            cache.version += 1
            cache.owned_to = 0

    @in_turn
    def carry(self, cache: SequenceCache) -> int:
        """Takes a free row of each `Pool.carried` for a snapshot's cache, and returns its number; there must be one."""
        self._settle()
        with self._change:
            cache.carried = self._free_snapshots.pop()
        return cache.carried

    def create(self) -> SequenceCache:
        return SequenceCache(tables={group: [] for group in self.layout.pages}, manager=self)

    def live_pages(self, num_tokens: int, low_water: int) -> dict[str, range]:
        """Logical pages by group that a sequence needs; others of its tables are freed, or reserved for later tokens.

        Args:
            num_tokens, low_water: as in `SequenceCache`.
        """
        live = {group: range(self._end(num_tokens, group)) for group in self._spans}
        if WINDOW in live:
            live[WINDOW] = live[WINDOW][self._freed_window_pages(low_water) :]
        return live | {group: range(min(num_tokens, 1)) for group in self.layout.pages if group == STATE}

    @in_turn
    def allocate_sequence(self, num_tokens: int, low_water: int) -> SequenceCache:
        """A sequence with new pages for tokens whose entries the caller writes.

        Raises:
            OutOfPages: nothing was changed.
        """
        cache = self.create()
        try:
            for group, pages in self.live_pages(num_tokens, low_water).items():
                self.allocate_table(cache, group, [page in pages for page in range(pages.stop)])
        except BaseException:
            self.free(cache)
            raise
        cache.num_tokens, cache.low_water = num_tokens, low_water
        return cache

    @in_turn
    def reserve(self, batch: list[tuple[SequenceCache, int]]) -> None:
        """Gives each sequence the pages of its next ``n`` tokens: new ones, and copies of shared ones.

        Raises:
            ValueError: a negative ``n``, more than ``max_model_len`` tokens, or a sequence of another manager.
            OutOfPages: names the pool with its needed and its free pages. Either way nothing was changed.
        """
        self._settle()
        batch = [(cache, n) for cache, n in batch if not 0 <= n <= cache.owned_to - cache.num_tokens]
        for cache, n in batch:
            self._check_owner(cache)
            if n < 0 or cache.num_tokens + n > self.layout.max_model_len:
                raise ValueError(
                    f"reserve of {n} new tokens after {cache.num_tokens}: a sequence has 0 to "
                    f"max_model_len={self.layout.max_model_len} tokens"
                )
        leaving: Counter[tuple[str, int]] = Counter()
        plans = [
            (cache, group, *self._pages_to_write(cache, group, n, leaving))
            for cache, n in batch
            for group in cache.tables
        ]
        for group, allocator in self._allocators.items():
            needed = sum(len(copies) + new for _, g, copies, new in plans if g == group)
            if needed > allocator.available:
                raise OutOfPages(
                    f"the {group} pool has {allocator.available} free pages and this step needs {needed}; "
                    "run fewer sequences at once, or raise kv_cache_bytes, max_num_seqs or max_model_len"
                )
        with self._change:
            for cache, group, copies, new in plans:
                self._register(cache)
                table, allocator = cache.tables[group], self._allocators[group]
                for index in copies:
                    page = allocator.allocate()
                    self.pools.copy_page(group, table[index], page)
                    allocator.release(table[index])
                    table[index] = page
                table.extend(allocator.allocate() for _ in range(new))
                cache.version += bool(copies or new)
            for cache, n in batch:
                if cache.num_tokens > cache.owned_to:
                    cache.owned_from = cache.num_tokens
                cache.owned_to = min(
                    self._end(cache.num_tokens + n, group) * span + ratio - 1
                    for group, (span, ratio) in self._spans.items()
                )

    def _end(self, tokens: int, group: str) -> int:
        """Number of pages of a group that a sequence of ``tokens`` tokens has written to."""
        # an entry is written by the last token of its window, so only closed windows need pages
        span, ratio = self._spans[group]
        return -(-(tokens // ratio * ratio) // span)

    def _pages_to_write(
        self, cache: SequenceCache, group: str, n: int, leaving: Counter[tuple[str, int]]
    ) -> tuple[list[int], int]:
        """(logical pages to copy because a fork shares them, number of new pages) for the next ``n`` tokens.

        ``leaving`` counts the sequences of the batch that get a copy of a (group, page). The last holder of a page
        writes in place: forks that fill the pools can then all write in one step.
        """
        table, allocator = cache.tables[group], self._allocators[group]
        start, end = cache.num_tokens, cache.num_tokens + n
        if group == STATE:
            first, last = 0, 1
        else:
            first, last = start // self._spans[group].page_tokens, self._end(end, group)
        copies = []
        for index in range(first, min(last, len(table))):
            page = table[index]
            if page != NULL_PAGE and allocator.references(page) - leaving[group, page] > 1:
                leaving[group, page] += 1
                copies.append(index)
        return copies, max(0, last - len(table))

    @contextmanager
    def all_or_nothing(self, batch: list[tuple[SequenceCache, int]]) -> Iterator[None]:
        """Context in which the next ``n`` tokens of each sequence are computed and committed, or else none of them.

        After an exception, the sequences have their previous lengths. A sequence with more new tokens than `truncate`
        can roll back has lost its caches and is empty.
        """
        lengths = [cache.num_tokens for cache, _ in batch]
        try:
            for cache, n in batch:
                if WINDOW in cache.tables:
                    cache.low_water = max(cache.low_water, cache.num_tokens + n - self.layout.max_rollback)
            yield
        except BaseException:
            for (cache, _), length in zip(batch, lengths, strict=True):
                self.truncate(cache, length)
            raise

    def check_reserved(self, batch: list[tuple[SequenceCache, int]]) -> None:
        """Checks that the next ``n`` tokens of each sequence can be computed.

        Raises:
            RuntimeError: pages are not reserved, the previous step was not committed, or keys of upper layers are
                missing.
            ValueError: a sequence of another manager.
        """
        for cache, n in batch:
            self._check_owner(cache)
            self._check_committed(cache)
            if cache.exact_from > cache.num_tokens:
                raise RuntimeError(
                    f"upper layers of this sequence lack keys of its {cache.num_tokens} tokens, which were computed "
                    "for results further on (StepOptions.ends): step to there, or free it and begin again"
                )
            if cache.num_tokens + n > cache.owned_to:
                raise RuntimeError(
                    f"no pages for {n} new tokens after {cache.num_tokens}: call manager.reserve([(cache, {n})]) first"
                )

    def _check_owner(self, cache: SequenceCache) -> None:
        if cache.manager is not self:
            raise ValueError("this sequence belongs to another runner's caches: use the manager that created it")

    def _check_committed(self, cache: SequenceCache) -> None:
        if cache.uncommitted:
            raise RuntimeError(
                f"{cache.uncommitted} new tokens of this sequence were computed after {cache.num_tokens} and not "
                f"committed: call manager.commit(cache, {cache.uncommitted}) after each step, or drop them with "
                f"manager.truncate(cache, {cache.num_tokens})"
            )

    @in_turn
    def commit(self, cache: SequenceCache, n: int, exact_from: int | None = None) -> None:
        """Counts ``n`` computed tokens and frees window pages that no query and no rollback can reach any more.

        Args:
            exact_from: `SequenceCache.exact_from` from now on; None: as before.

        Raises:
            RuntimeError: tokens without pages, or another number of tokens than the layers have computed.
            ValueError: a sequence of another manager. After either error nothing has changed.
        """
        if not 0 <= n <= cache.owned_to - cache.num_tokens or cache.manager is not self:
            self._check_owner(cache)
            raise RuntimeError(
                f"commit of {n} tokens after {cache.num_tokens}, with pages reserved for "
                f"{max(0, cache.owned_to - cache.num_tokens)}: reserve, compute and commit the same tokens, once"
            )
        if cache.uncommitted is not None:
            if cache.uncommitted != n:
                raise RuntimeError(
                    f"commit of {n} tokens, of which layers have computed {cache.uncommitted} with the metadata of "
                    "step_metadata: compute a step, then commit all its tokens; truncate drops some"
                )
            cache.uncommitted = 0
        cache.num_tokens += n
        cache.exact_from = cache.exact_from if exact_from is None else exact_from
        oldest = max(cache.num_tokens - self.layout.max_rollback, min(cache.exact_from, cache.num_tokens))
        self.raise_low_water(cache, oldest)

    @in_turn
    def raise_low_water(self, cache: SequenceCache, length: int) -> None:
        """Rules out truncation to fewer than ``length`` tokens, and frees the window pages that only it needs."""
        if WINDOW not in cache.tables:
            return
        self._settle()
        cache.low_water = max(cache.low_water, length)
        dead, table = self._freed_window_pages(cache.low_water), cache.tables[WINDOW]
        with self._change:
            for index in reversed(range(min(dead, len(table)))):
                if table[index] == NULL_PAGE:
                    break  # and so are all before it
                self._allocators[WINDOW].release(table[index])
                table[index] = NULL_PAGE
                cache.version += 1

    def _freed_window_pages(self, low_water: int) -> int:
        """Number of window pages that no query from token ``low_water`` on can reach."""
        return max(0, low_water - self.layout.window + 1) // WINDOW_PAGE

    @in_turn
    def truncate(self, cache: SequenceCache, n: int, keep_pages: bool = False) -> int:
        """Forgets all tokens from ``n`` on. Returns how many stay computed: ``n``, or 0 if that was too far back.

        Within ``max_rollback`` tokens of the longest length reached, everything a later token can read is still there.
        Further back the window entries are gone, and the caller computes the sequence again from its tokens. Caches
        without a window (DeepSeek-V3.2) go back any number of tokens.

        Args:
            keep_pages: pages past ``n`` stay reserved.
        """
        self._check_owner(cache)
        if not 0 <= n <= cache.num_tokens:
            raise ValueError(f"truncate({n}) of a sequence with {cache.num_tokens} computed tokens")
        if cache.uncommitted:  # uncommitted tokens overwrite entries as committed ones do
            self.raise_low_water(cache, cache.num_tokens + cache.uncommitted - self.layout.max_rollback)
        cache.uncommitted = None
        if n < cache.low_water:
            self.free(cache)
            return 0
        self._settle()
        with self._change:
            cache.num_tokens = n
            if n < cache.owned_from:
                cache.owned_to = 0
            for group, (span, _) in self._spans.items():
                table, keep = cache.tables[group], -(-n // span)
                if len(table) <= keep or keep_pages:
                    continue
                self._release(group, table[keep:])
                del table[keep:]
                cache.version += 1
                cache.owned_to = 0
        return n

    @in_turn
    def fork(self, cache: SequenceCache) -> SequenceCache:
        """A second sequence with the same tokens. Both share every page until one of them writes to it."""
        self._check_owner(cache)
        self._check_committed(cache)
        self._settle()
        with self._change:
            tables = {group: list(table) for group, table in cache.tables.items()}
            fork = SequenceCache(cache.num_tokens, cache.low_water, tables, self, exact_from=cache.exact_from)
            self._register(fork)
            for group, table in tables.items():
                for page in table:
                    if page != NULL_PAGE:
                        self._allocators[group].share(page)
            cache.owned_to = 0
        return fork

    @in_turn
    def free(self, cache: SequenceCache) -> None:
        """Returns all pages; the sequence is empty afterwards and can be used again."""
        self._check_owner(cache)
        self._settle()
        with self._change:
            tables, carried, empty = cache.tables, cache.carried, {group: [] for group in cache.tables}
            # at once: with some of its tables a cache could not go on
            cache.tables, cache.num_tokens, cache.low_water, cache.carried = empty, 0, 0, None
            cache.exact_from = 0
            cache.owned_from = cache.owned_to = 0
            cache.uncommitted = None
            cache.version += 1
            for group, table in tables.items():
                self._release(group, table)
            if carried is not None:
                self._free_snapshots.append(carried)
            self._holders.pop(id(cache), None)

    def _release(self, group: str, pages: list[int]) -> None:
        for page in pages:
            if page != NULL_PAGE:
                self._allocators[group].release(page)

    def _register(self, cache: SequenceCache) -> None:
        """Registers a cache as a holder of pages."""
        known = self._holders.get(id(cache))
        if known is None or known() is None:
            # the callback runs no bytecode, in which an interruption would be lost
            self._holders[id(cache)] = weakref.ref(cache, self._collected.append)

    def _settle(self) -> None:
        """Called before a change or a query of free pages: recounts the holders after a change that broke off."""
        if self._change.broke_off or self._collected:
            self._recount()

    def _recount(self) -> None:
        self._collected.clear()
        caches = [cache for holder in self._holders.values() if (cache := holder()) is not None]
        self._holders = {id(cache): self._holders[id(cache)] for cache in caches}
        for group, allocator in self._allocators.items():
            allocator.recount(page for cache in caches for page in cache.tables[group] if page != NULL_PAGE)
        carried = {cache.carried for cache in caches}
        self._free_snapshots = [row for row in range(self.layout.max_snapshots) if row not in carried]
        if self._change.broke_off:  # the change may have completed before the exception
            for cache in caches:
                cache.version += 1
                cache.owned_to = 0
        self._change.broke_off = False

    def block_table(self, caches: list[SequenceCache], group: str) -> torch.Tensor:
        """int32 ``[len(caches), widest]``, padded with the null page."""
        tables = [cache.tables[group] for cache in caches]
        width = max([1, *map(len, tables)])
        pages = array("i")
        for table in tables:
            pages.extend(table)
            pages.extend([NULL_PAGE] * (width - len(table)))
        if not tables:
            return torch.empty(0, width, dtype=torch.int32, device="cpu")
        return torch.frombuffer(pages, dtype=torch.int32).view(len(tables), width)  # a third of torch.tensor's time
