"""Scheduler: which requests run, how many of their tokens the next step computes, and who is preempted.

Requests run in the order of arrival, as long as there are pages for all of their tokens so far. Pages are allocated per
step, so running requests can outgrow the pools together: then snapshots are evicted from the prefix cache, and if none
is left, the request that was admitted last is preempted: it waits at the front, and computes its tokens again later.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import partial

from deepseek_attn.cache.manager import CacheManager
from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.cache.prefix import Match, PrefixCache
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.stats import StepStats
from deepseek_attn.runner.trailing import TrailingRows
from deepseek_attn.utils.tracing import traced

PATIENCE = 32  # steps between a step that ran out of memory and the next larger one


class Scheduler:
    """Requests that wait and requests that run.

    Args:
        prefixes: snapshots to start from; None: every request starts at its first token.
        trailing: which rows of prompts upper layers compute; None: all layers compute all rows.

    Attributes:
        waiting: a set in which the first request is the next to run; the time to find or remove one does not depend on
            how many there are.
        max_num_batched_tokens: the layout's limit; smaller for a while after a step ran out of memory.
    """

    def __init__(self, manager: CacheManager, prefixes: PrefixCache | None, trailing: TrailingRows | None = None):
        self.manager, self.layout, self.prefixes, self.trailing = manager, manager.layout, prefixes, trailing
        self.max_num_batched_tokens = self.layout.max_num_batched_tokens
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.running: list[Request] = []
        self._patience, self._steps, self._largest, self._planned = PATIENCE, 0, 0, 0

    def shrink(self, tokens: int) -> None:
        """Halves the size of steps after a step of ``tokens`` tokens ran out of memory; `plan` doubles it again later.

        If a step of this size has succeeded since the last failure, the shortage may pass, and a larger step is tried
        soon. Otherwise each failure doubles the number of steps before the next try, so that a prompt of any length can
        end between two failures, each of which may cost it its caches.
        """
        if tokens <= self._largest:
            self._patience = PATIENCE
        elif self._largest:  # not right after another failure
            self._patience *= 2
        self.max_num_batched_tokens = max(1, tokens // 2)
        self._steps, self._largest, self._planned = 0, 0, 0

    def _grow(self) -> None:
        """Counts a step of the planned size that did not run out of memory; after enough of them steps may grow."""
        self._steps, self._largest = self._steps + 1, max(self._largest, self._planned)
        if self._steps > self._patience:
            self._steps = 0
            self.max_num_batched_tokens = min(2 * self.max_num_batched_tokens, self.layout.max_num_batched_tokens)

    def __contains__(self, request: Request) -> bool:
        return request in self.running or request in self.waiting

    def remove(self, request: Request) -> None:
        """Drops a request that has ended."""
        if request in self.running:
            self.running.remove(request)
        else:
            del self.waiting[request]

    def restore(self) -> None:
        """After an interruption, which may have left a request on its way in both lists: it runs."""
        running = set(self.running)
        self.waiting = OrderedDict((request, None) for request in self.waiting if request not in running)
        for request in [*self.running, *self.waiting]:
            request.restore()

    def never_fits(self, request: Request) -> str | None:
        """Why the pools could not hold a request's tokens even if it were alone; None if they can."""
        tokens = len(request.sequence.token_ids)
        for group, needed in self.manager.pages_needed(tokens).items():
            if needed > self.layout.pages[group] - 1:
                return (
                    f"{tokens} tokens need {needed} pages of the {group} pool, which has {self.layout.pages[group] - 1}"
                    "; raise kv_cache_bytes"
                )
        return None

    @property
    def has_candidate(self) -> bool:
        """Whether a waiting request could start if there are pages for it."""
        return self._candidate() is not None

    def _candidate(self) -> Request | None:
        """The next request to start: the first that does not wait for a prompt that another request computes.

        Requests that do keep the places of running requests that they will need.
        """
        for place, request in enumerate(self.waiting, len(self.running)):
            if place >= self.layout.max_num_seqs:
                return None
            if not request.waits_for_prompt:
                return request
        return None

    @traced("schedule")
    def admit(self, stats: StepStats) -> None:
        """Starts waiting requests, in order, while there are enough pages."""
        while (request := self._candidate()) is not None:
            match = self._match(request)
            if self.running and not self._fits(request, match):
                return
            self.running.append(request)
            del self.waiting[request]
            stats.admitted += 1
            stats.queried_tokens += len(request.sequence.token_ids)
            self._start(request, match, stats)

    def _start(self, request: Request, match: Match, stats: StepStats) -> None:
        """Starts a request from the prefix that was found for it, and counts its cached tokens."""
        if match.snapshot is not None and self.prefixes is not None:
            try:
                request.sequence.cache = self.prefixes.start(match)
            except OutOfPages:  # sequences outside of the engine hold every state page
                match = Match(seen=match.seen)
        request.shared = match.seen
        length = request.sequence.num_computed
        request.kept_blocks = length // self.layout.snapshot_block
        if not request.preemptions:
            request.cached_tokens = length
        stats.cached_tokens += length

    def _match(self, request: Request) -> Match:
        if self.prefixes is None or not request.takes_computed or request.logprobs.missing is not None:
            return Match()
        if request.sequence.num_computed:  # of a prompt that it shares
            return Match()
        length, trailing = len(request.sequence.token_ids), self.trailing
        serves = None if trailing is None else partial(trailing.serves, end=length)
        return self.prefixes.match(request.prefix_keys(length - 1), serves)  # one token at least is computed

    def _fits(self, request: Request, match: Match) -> bool:
        """Whether there are pages for the tokens so far of all running requests and of this one."""
        needed = Counter(self._still_needed(request))
        needed.subtract({group: match.length // span for group, span in self.layout.growing.items()})
        for other in self.running:
            needed.update(self._still_needed(other))
        available = self.manager.available_pages()
        short = {group: needed[group] - free for group, free in available.items() if needed[group] > free}
        if not short or self.prefixes is None:
            return not short
        reclaimable = self.prefixes.reclaimable()
        return all(count <= reclaimable[group] for group, count in short.items())

    def _still_needed(self, request: Request) -> dict[str, int]:
        held = self.manager.held_pages(request.sequence.cache)
        needed = self.manager.pages_needed(len(request.sequence.token_ids) + 1)
        return {group: max(0, count - held[group]) for group, count in needed.items()}

    @traced("schedule")
    def plan(self, decode_tokens: int, stats: StepStats) -> list[tuple[Request, int]]:
        """(request, tokens) of the next step: every decode first, then prompts in order while the budget lasts."""
        self._grow()
        budget, work, beginnings = self.max_num_batched_tokens, [], set()
        for request in sorted(self.running, key=lambda r: r.sequence.num_pending > decode_tokens):
            pending = request.sequence.num_pending
            if pending <= decode_tokens:
                if pending > self.max_num_batched_tokens:  # smaller steps since memory ran out
                    request.drop_drafts()
                    pending = min(request.sequence.num_pending, self.max_num_batched_tokens)
                n = pending if pending <= budget else 0
            elif budget and not self._better_later(request, beginnings, stats):
                n = self._chunk(request, min(request.sequence.num_pending, budget))
            else:
                n = 0
            if n:
                work.append((request, n))
                budget -= n
        self._planned = sum(n for _, n in work)
        return work

    def _better_later(self, request: Request, beginnings: set[bytes], stats: StepStats) -> bool:
        """Whether a prompt that starts now would compute the same tokens as another one in this step.

        Requests that were admitted together are looked up again before their first chunk: the first request may
        have left a snapshot by then.

        Args:
            beginnings: first blocks of the prompts that start in this step with nothing; this one is added.
        """
        if self.prefixes is None or not request.takes_computed or request.sequence.num_computed:
            return False
        self._start(request, self._match(request), stats)
        first = request.prefix_keys(self.layout.snapshot_block)
        if request.sequence.num_computed or not first:
            return False
        known = first[0] in beginnings
        beginnings.add(first[0])
        return known and request.logprobs.missing is None

    def _chunk(self, request: Request, n: int) -> int:
        """At most ``n`` tokens of a prompt, ending where a snapshot can be taken if one is worth it.

        That is where other requests went on differently, the last block's edge in the prompt, and any block's edge if
        the step ends inside the prompt anyway.
        """
        if self.prefixes is None or self.layout.keeps_all_tokens:
            return n
        sequence, block = request.sequence, self.layout.snapshot_block
        start, length = sequence.num_computed, len(sequence.token_ids)
        end = start + n
        stops = [stop for stop in self._edges(request) if start < stop < end]
        if stops:
            end = min(stops)
        elif end < length and end // block * block > start:
            end = end // block * block
        return end - start

    def ends(self, work: list[tuple[Request, int]]) -> tuple[int, ...]:
        """`StepOptions.ends`: where results of each request are wanted next, or a snapshot that has all keys.

        Such a snapshot is left where less of the prompt follows than upper layers compute: a request that goes on like
        this one can start from it. Elsewhere a snapshot without these keys serves as well.
        """
        if self.trailing is None or all(request.sequence.num_pending == n for request, n in work):
            return ()
        return tuple(self._end(request, n, self.trailing) for request, n in work)

    def _end(self, request: Request, n: int, trailing: TrailingRows) -> int:
        sequence, length = request.sequence, len(request.sequence.token_ids)
        if self.prefixes is None or sequence.num_pending == n:
            return length
        least = max(sequence.num_computed + n, length - trailing.rows + 1)
        edges = sorted(edge for edge in self._edges(request) if edge >= least)
        return next((edge for edge in edges if trailing.serves(sequence.cache, edge)), length)

    def _edges(self, request: Request) -> tuple[int, int]:
        """Where a prompt leaves a snapshot: where others went on differently, and the last block's edge in it."""
        block = self.layout.snapshot_block
        return request.shared, (len(request.sequence.token_ids) - 1) // block * block

    def drop_drafts(self) -> bool:
        """Drops all drafts that wait to be verified, so that no request loses its caches for them; False: none."""
        lengths = [len(request.sequence.token_ids) for request in self.running]
        for request in self.running:
            request.drop_drafts()
        return lengths != [len(request.sequence.token_ids) for request in self.running]

    def free_pages(self, stats: StepStats) -> bool:
        """Frees pages of one snapshot, of shared prompts, or of one request; False if only one request is left."""
        if self.prefixes is not None and self.prefixes.evict():
            stats.evicted += 1
            return True
        if sharing := [request for request in self.waiting if request.sequence.num_computed]:
            for request in sharing:  # they will compute their prompt
                request.release()
            return True
        if len(self.running) < 2:
            return False
        self.preempt(self.running[-1], stats)
        return True

    def preempt(self, request: Request, stats: StepStats) -> None:
        """Frees a request's pages; it waits at the front, and computes its tokens again."""
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)
        request.release()
        request.preemptions += 1
        self.running.remove(request)
        stats.preempted += 1
