"""Experts in the checkpoint's files, with a bounded cache of them in host memory."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from deepseek_attn.layers.expert_memory import ExpertStats, UnreadWeight

READERS = 8  # threads: a single one reads at a fraction of the rate of an NVMe disk
READ_AHEAD = 2 * READERS  # reads of a projection that are begun before their experts are used

StoredPair = tuple[torch.Tensor, torch.Tensor | None]


class ExpertReaders:
    """Threads that read experts, for all layers of a model, and counters of their reads.

    Args:
        weights: every weight that may be read. If one of them does not allow concurrent reads, a single thread is used.
    """

    def __init__(self, weights: Iterable[UnreadWeight]):
        self._threads = ThreadPoolExecutor(READERS if all(w.in_threads for w in weights) else 1, "experts")
        self.stats = ExpertStats()

    def read(self, weight: UnreadWeight) -> Future[StoredPair]:
        self.stats.bytes_read += weight.nbytes
        return self._threads.submit(weight)

    def close(self) -> None:
        """Ends the threads. Reads that have not begun are left out."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def count_uses(uses: dict[int, int], tokens: Mapping[int, int]) -> None:
    """Updates decayed counts of use with the tokens of a step that use each expert, as `count_expert_uses` does."""
    for expert, count in uses.items():
        uses[expert] = count - (count >> 6)
    for expert, count in tokens.items():
        uses[expert] += 4096 * min(count, 255)


class ExpertFileCache:
    """At most ``slots`` experts of one projection in host memory, as the checkpoint stores them.

    A step calls `begin` with the experts that it needs, `get` in their order, and `end`. Reads are begun ahead of their
    use, as far as there are slots. Experts that the step does not need, or has used, are evicted by the
    smallest decayed count of uses, then by the lowest number. If the step needs every cached expert, up to half of the
    slots are freed for reads, from the highest expert number down. Which experts are held follows from
    the routing alone, not from the time that reads take.

    Args:
        weights: of this rank's experts, by number.
    """

    def __init__(self, weights: Mapping[int, UnreadWeight], slots: int, readers: ExpertReaders):
        self.slots, self._weights, self._readers = slots, weights, readers
        self._held: dict[int, Future[StoredPair]] = {}
        self._uses = dict.fromkeys(weights, 0)
        self._unused: set[int] = set()  # experts that the step has yet to use, the one in use included
        self._unread: list[int] = []  # experts of the step that are not held, in increasing order
        self._coming: set[int] = set()  # experts that the step reads and has yet to use
        self._current: int | None = None
        self._value: StoredPair | None = None

    @property
    def experts(self) -> int:
        """Number of experts, in memory or not."""
        return len(self._weights)

    @property
    def stats(self) -> ExpertStats:
        """Counts of all layers."""
        return self._readers.stats

    @property
    def held(self) -> list[int]:
        """Numbers of the experts in memory, in increasing order."""
        return sorted(self._held)

    def begin(self, tokens: Mapping[int, int]) -> int:
        """Begins a step; returns how many of the experts that it needs are in memory.

        Args:
            tokens: number of tokens that use an expert, by its number, in increasing order.
        """
        self.end()  # of a step whose end was interrupted
        count_uses(self._uses, tokens)
        needed = list(tokens)
        self._unused = set(needed)
        self._unread = [expert for expert in needed if expert not in self._held]
        hits = len(needed) - len(self._unread)
        self._read_ahead()
        return hits

    def get(self, expert: int, convert: Callable[[torch.Tensor, torch.Tensor | None], StoredPair]) -> StoredPair:
        """The weight of an expert and its scale, converted; valid until the next call.

        Args:
            convert: a stored weight and its scale -> the tensors that the product reads; called once an expert.
        """
        if self._value is None or expert != self._current:
            self._value = None
            self._unused.discard(self._current if self._current is not None else -1)
            self._current = expert
            self._coming.discard(expert)
            self._read_ahead()
            self._coming.discard(expert)
            self._value = convert(*self._held[expert].result())
        return self._value

    def end(self) -> None:
        """Ends a step, also one that failed: reads that failed, or have not begun, are forgotten."""
        self._value, self._current = None, None
        self._unused.clear()
        self._unread.clear()
        self._coming.clear()
        for expert, future in list(self._held.items()):
            if future.cancel() or (future.done() and future.exception() is not None):
                del self._held[expert]

    def _read_ahead(self) -> None:
        """Begins the next reads, as far as there are slots for them."""
        while self._unread and len(self._coming) < READ_AHEAD:
            if len(self._held) >= self.slots and not self._evict(self._unread[0]):
                return
            expert = self._unread.pop(0)
            self._held[expert] = self._readers.read(self._weights[expert])
            self._coming.add(expert)

    def _evict(self, expert: int) -> bool:
        """Frees a slot for ``expert``; returns whether there was one."""
        done = [number for number in self._held if number not in self._unused]
        if done:
            del self._held[min(done, key=lambda number: (self._uses[number], number))]
            return True
        later = [number for number in self._held if number not in self._coming and number > expert]
        in_use = len(self._coming) + (self._current in self._held)
        if not later or in_use >= max(1, self.slots // 2):
            return False
        del self._held[max(later)]
        insort(self._unread, max(later))
        return True
