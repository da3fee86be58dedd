"""Engine: requests in, tokens out, step by step; a request that fails does so alone.

Any exception in a step, a `KeyboardInterrupt` at any point included, rolls it back to the tokens that requests have by
then; all other state follows from these tokens (`Engine._whole`). So the next step continues with the same tokens.

Several threads can use an engine: every method that changes anything waits for its turn (`utils.turns`). A step
computes the requests of all threads, whichever thread calls it; each caller gets the outputs of its own requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident
from weakref import WeakKeyDictionary, WeakSet

import torch

from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.cache.prefix import BlockKeys
from deepseek_attn.config.options import is_integer
from deepseek_attn.engine.decoding import Accepted, NextToken, Work
from deepseek_attn.engine.logprobs import keep_scored, with_logprobs
from deepseek_attn.engine.outputs import RequestOutput
from deepseek_attn.engine.records import keep_records, with_records
from deepseek_attn.engine.request import Caller, Request, Unreported
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.scheduler import Scheduler
from deepseek_attn.engine.stats import EngineStats, StepStats
from deepseek_attn.runner import ModelRunner, StepOptions, StepOutput
from deepseek_attn.runner.prompts import TokenIds, shown
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.utils.clock import seconds_since
from deepseek_attn.utils.turns import in_turn

logger = logging.getLogger(__name__)
IDLE_SECONDS = 0.01  # between two looks for a request where none is in flight
END = object()


class Engine:
    """Runs requests on a model; its caches bound the number of requests that run at a time.

    Args:
        tokenizer: makes text of tokens; None: token ids only.
        decoder: how requests decode: one token per step, or speculation.

    Attributes:
        last_step: statistics of the last step; stats: the sums over all steps.
        on_step: called with ``last_step`` after every step; None: no callback.
        prefixes: the runner's snapshots, which requests start from; None without ``max_snapshots``.
    """

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer | None = None, decoder: NextToken | None = None):
        self.runner, self.tokenizer, self.decoder = runner, tokenizer, decoder or NextToken()
        self.prefixes = runner.prefixes
        self.scheduler = Scheduler(runner.manager, self.prefixes, runner.trailing)
        self.stats, self.last_step = EngineStats(), StepStats()
        self.on_step: Callable[[StepStats], None] | None = None
        self.turns = runner.manager.turns
        self._steppers = Caller()  # all callers of `step`: they get the outputs of requests outside of any `run`
        self._callers: WeakKeyDictionary[Request, Caller] = WeakKeyDictionary()  # requests do not refer to theirs
        self._runs: WeakSet[Caller] = WeakSet()  # of ranks that share a model
        self._step_in: int | None = None  # number of the turn in which a step is computed
        self._ended = 0
        self._broke_off = False

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has something to do or to report."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._steppers.unreported)

    def add_request(self, prompt: TokenIds, params: SamplingParams | None = None, *, index: int = 0) -> Request:
        """Queues a prompt of token ids. An invalid prompt comes back as a request with an error, and `step` reports it.

        Args:
            index: with a seed in ``params``, requests of different index draw different random numbers.

        Returns:
            The request. With ``params.n`` above 1, `Request.others` has the requests of the prompt's other completions;
            each has outputs of its own.
        """
        try:
            request = Request.create(self.runner, self.tokenizer, prompt, params, index)
        except (ValueError, TypeError) as error:
            return self._refuse(prompt, str(error))
        return self.submit(request)

    @in_turn
    def _refuse(self, prompt: TokenIds, error: str) -> Request:
        request = Request.refused(prompt, error)
        self._count_ended(request)
        return request

    def submit(self, request: Request) -> Request:
        """Queues a request that `Request.create` has made for this engine's runner.

        Raises:
            ValueError: a request that was submitted before, has ended, or belongs to another runner.
        """
        return self._submit(request, self._steppers)

    @in_turn
    def _submit(self, request: Request, caller: Caller) -> Request:
        self._refuse_within_step()
        request = checked_request(request)
        if request.finished:
            raise ValueError(f"the request has ended ({request.finish_reason}): make a new one with Request.create")
        if request.keys is not None:
            raise ValueError(
                "the request was submitted before, here or to another engine: make another with Request.create"
            )
        if request.sequence.manager is not self.runner.manager:
            raise ValueError("the request was made for another runner: make it with this engine's (Engine.runner)")
        with self._whole():
            for each in request.group:
                each.keys = BlockKeys(self.runner.layout.snapshot_block, lookahead=int(self.decoder.mtp))
                self._callers[each] = caller
                self.scheduler.waiting[each] = None
                if reason := self.scheduler.never_fits(each):
                    self._fail(each, reason)
        return request

    @in_turn
    def cancel(self, request: Request) -> bool:
        """Ends a request and frees all it holds, between two steps; False if it had ended already.

        With the first of ``n`` completions of a prompt all of them end. A request that was never submitted also ends,
        and cannot be submitted any more. A call from within a step (by a hook or a signal handler) takes effect
        when the step has ended.

        Raises:
            ValueError: a request of another engine.
        """
        request = checked_request(request)
        ended = [self._cancel(each) for each in request.group]
        return any(ended)

    def _cancel(self, request: Request) -> bool:
        if request.finished:
            return False
        submitted = request.keys is not None
        if request.sequence.manager is not self.scheduler.manager or (submitted and request not in self.scheduler):
            raise ValueError("the request is of another engine: only its engine can cancel it")
        if self._step_in == self.turns.number:
            self.turns.after_this_turn(partial(self.cancel, request))
            return True
        with self._whole():
            self._end(request, "abort")
        return True

    def run(
        self, requests: Iterable[Request | None], max_in_flight: int | None = None
    ) -> Generator[list[RequestOutput]]:
        """Submits the requests that were not submitted yet, and steps until all have ended. Yields their outputs.

        Several threads can each have a run at the same time: a step of one computes the requests of all. Closing the
        generator early, or an exception, cancels the unfinished requests of this run. If another thread is computing a
        step, they are cancelled after it.

        Args:
            requests: None instead of a request means "not there yet": running ones continue, and `next` is called
                again later.
            max_in_flight: upper bound of unfinished requests of this run; None: all are taken before the first step.

        Raises:
            ValueError: a request belongs to another engine or another run, or cannot be submitted; ``max_in_flight`` is
                not a positive integer.
            RuntimeError: ranks share the model, and another thread has a run: the order of their steps would differ
                from rank to rank.
        """
        if isinstance(requests, Request) or not isinstance(requests, Iterable):
            raise ValueError(f"an iterable of requests is needed, got {requests!r:.80}")
        if max_in_flight is not None and (not is_integer(max_in_flight) or max_in_flight < 1):
            raise ValueError(f"max_in_flight={max_in_flight!r:.80}: must be an integer of at least 1, or None")
        source, more = iter(requests), True
        caller, held = Caller(get_ident()), dict[Request, None]()
        try:
            self._begin(caller)
            while True:
                while more and (max_in_flight is None or len(held) < max_in_flight):
                    request = next(source, END)
                    more = request is not END
                    if request is None or request is END:
                        break
                    request = checked_request(request)
                    held |= dict.fromkeys(request.group)
                    self._take_over(request, caller)
                if held:
                    outputs = self._take_outputs(caller)
                    for output in outputs:
                        if output.finished:
                            del held[output.request]
                    yield outputs
                elif more:
                    time.sleep(IDLE_SECONDS)
                else:
                    return
        finally:
            self.turns.after_this_turn(partial(self._leave, caller, held))

    @in_turn
    def _begin(self, caller: Caller) -> None:
        """Refuses a second `run` in another thread if ranks share the model."""
        if self.runner.parallel.world == 1:
            return
        if any(run.thread != caller.thread for run in self._runs):
            raise RuntimeError(
                "another thread generates with this model, which several ranks share: all ranks make the same calls in "
                "the same order, so make them in one thread"
            )
        self._runs.add(caller)

    @in_turn
    def _leave(self, caller: Caller, held: Iterable[Request]) -> None:
        """Ends a `run`: cancels its requests that have not ended."""
        for request in held:
            if self._callers.get(request) is caller and request in self.scheduler:
                self.cancel(request)
        self._runs.discard(caller)

    @in_turn
    def _take_over(self, request: Request, caller: Caller) -> None:
        """Assigns a request to a `run`, which gets its outputs from now on; submits it if that is still to be done."""
        if not request.finished and request not in self.scheduler:
            self._submit(request, caller)
            return
        for each in request.group:
            if not each.finished and self._callers.get(each) is not self._steppers:
                raise ValueError("the request is part of another run, which gets its outputs")
            self._callers[each] = caller
            known = self._steppers.unreported.pop(each, None)
            if known is not None or each.finished:
                caller.unreported[each] = known or Unreported(each.num_generated)

    def step(self) -> list[RequestOutput]:
        """Computes one batch: every decode, and prompt tokens up to the token budget.

        A step that raises, because it was interrupted or ``on_step`` failed, loses nothing: the next step continues
        with the same tokens, and also returns the outputs of this one.

        Returns:
            The outputs of each request that took part, failed, or was cancelled since the last step; requests of a
            `run` are left out, because the `run` yields their outputs.
        """
        taken = Caller()
        try:
            return self._take_outputs(self._steppers, taken)
        except BaseException:
            self._put_back(taken)
            raise

    @in_turn
    def _take_outputs(self, caller: Caller, taken: Caller | None = None) -> list[RequestOutput]:
        """Outputs that a caller has not received. A `run` steps first, unless another thread's step left it outputs.

        Args:
            taken: of callers of `step`: receives a copy of their outputs, in case these do not reach them.
        """
        if taken is not None or not caller.unreported:
            self._compute_step()
        outputs = [
            RequestOutput(
                request,
                unreported.computed,
                tuple(request.generated(unreported.start)),
                "".join(request.text[unreported.start :]),
                request.finished,
                request.logprobs.of_generated(unreported.start, request.num_generated),
            )
            for request, unreported in caller.unreported.items()
        ]
        if taken is None:
            caller.unreported = {}
        else:
            taken.unreported, caller.unreported = caller.unreported, {}
        return outputs

    @in_turn
    def _put_back(self, taken: Caller) -> None:
        """Reports outputs again that did not reach the caller of `step`."""
        unreported = dict(taken.unreported)
        for request, newer in self._steppers.unreported.items():
            older = unreported.get(request, Unreported(newer.start))
            unreported[request] = Unreported(older.start, older.computed + newer.computed)
        self._steppers.unreported, taken.unreported = unreported, {}

    def _refuse_within_step(self) -> None:
        if self._step_in == self.turns.number:
            raise RuntimeError("called from within a step of this engine: wait until it has ended (Engine.on_step)")

    def _compute_step(self) -> None:
        """Computes one step; its results are reported later."""
        self._refuse_within_step()
        with self._whole():
            self._step_in = self.turns.number
            try:
                self._step()
            finally:
                self._step_in = None
        if self.on_step is not None:
            self.on_step(self.last_step)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Context of a change to requests: after any exception, `_restore` makes the state consistent again."""
        if self._broke_off:  # `_restore` was interrupted
            self._restore()
        self._broke_off = True
        try:
            yield
        except BaseException:
            self._restore()
            raise
        self._broke_off = False

    def _restore(self) -> None:
        """Brings everything in line with the tokens that requests have by now. May be interrupted and repeated."""
        if not self.runner.closed and self.runner.graphs is not None:
            self.runner.graphs.prelaunched = None
        self.decoder.forget()
        self.scheduler.restore()
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.finished:
                self._count_ended(request)
        self._broke_off = False

    def _step(self) -> None:
        """Admits requests, computes a batch, hands out its tokens, and counts."""
        started, stats = time.perf_counter(), StepStats()
        self.last_step = stats
        # A prelaunched decode step comes first; waiting requests are admitted after it. While a request could start, no
        # further step is launched early, so that the request waits for one step, not for many.
        next_step_launched = bool(self.scheduler.running) and self.runner.next_step_launched
        if not next_step_launched:
            self.scheduler.admit(stats)
        async_allowed = not (next_step_launched and self.scheduler.has_candidate)
        work, output = self._compute(stats, async_allowed)
        stats.count([n for _, n in work], self.decoder.decode_tokens)
        accepted = self.decoder.accept(work, output) if work else Accepted()
        stats.verifications.update(accepted.verified.values())
        self._take_tokens(work, accepted, stats)
        ended = self.stats.finished.total()
        stats.finished, self._ended = ended - self._ended, ended
        stats.running, stats.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        free, pages = self.runner.manager.available_pages(), self.runner.layout.pages
        stats.pages = {group: (pages[group] - 1 - free[group], pages[group] - 1) for group in pages}
        stats.seconds = seconds_since(started)
        self.stats.add(stats)

    def _compute(self, stats: StepStats, async_allowed: bool) -> tuple[Work, StepOutput]:
        """Runs the next batch that there are pages for; requests that can never run fail."""
        self.decoder.propose(self.scheduler.running)
        while self.scheduler.running:
            work = self.scheduler.plan(self.decoder.decode_tokens, stats)
            ends = [request.sequence.num_computed + n for request, n in work]
            try:
                return work, self._run(work, async_allowed)
            except OutOfPages as error:
                if not (self.scheduler.drop_drafts() or self.scheduler.free_pages(stats)):
                    self._fail(work[0][0], str(error), error)
            except (torch.OutOfMemoryError, MemoryError) as error:
                self._shrink(work, error)
            except Exception as error:
                return self._run_each(work, ends, error)
        return [], StepOutput([])

    def _run(self, work: Work, async_allowed: bool) -> StepOutput:
        return self._run_step(work, self.decoder.options(work, self.runner, async_allowed))

    def _run_alone(self, request: Request, n: int) -> StepOutput:
        """The same for one request, always with logits."""
        work = [(request, n)]
        return self._run_step(work, self.decoder.options_with_logits(work))

    def _run_step(self, work: Work, options: StepOptions) -> StepOutput:
        batch, options = [(request.sequence, n) for request, n in work], with_logprobs(options, work)
        options = replace(options, ends=self.scheduler.ends(work))
        output = self.runner.step(batch, with_records(options, work))
        keep_scored(work, output)
        keep_records(work, output)
        return output

    def _shrink(self, work: Work, error: Exception) -> None:
        """After a step ran out of memory: smaller steps for a while, until a single token is too much."""
        total = sum(n for _, n in work)
        if total == 1:
            self._fail(work[0][0], f"out of memory for a single token: {error}", error)
        self.scheduler.shrink(total)
        smaller = self.scheduler.max_num_batched_tokens
        logger.warning("out of memory in a step of %d tokens: at most %d per step for a while", total, smaller)

    def _run_each(self, work: Work, ends: list[int], error: Exception) -> tuple[Work, StepOutput]:
        """After a step failed: every request again, alone, up to where the step would have computed it.

        A request without enough pages or memory is left to the next step, which can take them from other requests: it
        may need more than in the failed step, because it now computes pages again that it shared there.
        """
        if len(work) == 1:
            self._fail(work[0][0], describe(error), error)
            return [], StepOutput([])
        logger.warning("a step of %d requests failed, each runs alone now", len(work), exc_info=error)
        done: Work = []
        merged = StepOutput([])
        for (request, n), end in zip(work, ends, strict=True):
            try:
                while (left := end - request.sequence.num_computed) > 0:
                    output = self._run_alone(request, min(left, self.scheduler.max_num_batched_tokens))
            except (OutOfPages, torch.OutOfMemoryError, MemoryError) as shortage:
                logger.warning("a request waits for the next step: %s", describe(shortage))
                continue
            except Exception as request_error:
                self._fail(request, describe(request_error), request_error)
                continue
            done.append((request, n))
            merged.logits = [*merged.rows, *output.rows]
            if output.hidden_states is not None:
                merged.hidden_states = [*(merged.hidden_states or []), *output.hidden_states]
        return done, merged

    def _take_tokens(self, work: Work, accepted: Accepted, stats: StepStats) -> None:
        """Gives requests their new tokens, which from then on no interruption takes back."""
        for request, n in work:
            failure = accepted.failures.get(request, request.store_failure)
            if failure is not None:
                self._fail(request, failure)
                continue
            drafts, num_accepted = accepted.verified.get(request, (0, 0))
            self._report(request).computed += n - drafts + num_accepted
            if request.others and not request.num_generated and request in accepted.tokens:
                request.share_prompt()
            logprobs = accepted.logprobs.get(request)
            for i, token in enumerate(accepted.tokens.get(request, [])):
                if logprobs is not None:
                    request.logprobs.record(request.num_generated, logprobs[i : i + 1])
                request.push(token)
                stats.generated += 1
                if request.finished:
                    break
            self._remember(request)
            if request.finished:
                request.release()
                self._count_ended(request)

    def _remember(self, request: Request) -> None:
        """Offers the computed tokens of a request to the prefix cache, up to the last edge of a block among them."""
        if self.prefixes is None or request.replay is not None:
            return
        computed, block = request.sequence.num_computed, self.runner.layout.snapshot_block
        if computed // block <= request.kept_blocks:
            return
        keys = request.prefix_keys(computed)
        if len(keys) > request.kept_blocks:
            self.prefixes.keep(request.sequence.cache, keys)
            request.kept_blocks = len(keys)

    def _fail(self, request: Request, message: str, error: Exception | None = None) -> None:
        logger.error("a request failed: %s", message, exc_info=error)
        self._end(request, "error", message)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request from outside."""
        request.end(reason, error)
        self._count_ended(request)

    def _count_ended(self, request: Request) -> None:
        """Removes a request that has ended; the next outputs report its end."""
        request.finish_records()
        self._report(request)
        if request.finish_reason is not None:
            self.stats.finished[request.finish_reason] += 1
        if request in self.scheduler:
            self.scheduler.remove(request)

    def _report(self, request: Request) -> Unreported:
        """Registers a request: the next outputs report its progress from here on."""
        caller = self._callers.get(request, self._steppers)
        return caller.unreported.setdefault(request, Unreported(request.num_generated))


def checked_request(request: object) -> Request:
    """``request``; ValueError for another type."""
    if not isinstance(request, Request):
        raise ValueError(f"a Request is needed, got {shown(request)}: add_request takes token ids")
    return request


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
