"""Engine: requests in, tokens out, step by step; a request that fails does so alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from deepseek_attn.cache.manager import OutOfPages
from deepseek_attn.cache.prefix import BlockKeys
from deepseek_attn.engine.decoding import Accepted, NextToken, Work
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.scheduler import Scheduler
from deepseek_attn.engine.stats import EngineStats, StepStats
from deepseek_attn.runner import ModelRunner, StepOutput
from deepseek_attn.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RequestOutput:
    """Result of one step for one request.

    Attributes:
        computed: its tokens that went through the model, rejected drafts left out.
        token_ids, text: new tokens, and the text that is now certain.
    """

    request: Request
    computed: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""


class Engine:
    """Runs requests on a model, as many at a time as its caches hold.

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
        self.scheduler = Scheduler(runner.manager, self.prefixes)
        self.stats, self.last_step = EngineStats(), StepStats()
        self.on_step: Callable[[StepStats], None] | None = None
        self._ended: list[RequestOutput] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has something to do or to report."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._ended)

    def add_request(self, prompt: Iterable[int], params: SamplingParams | None = None, *, index: int = 0) -> Request:
        """Queues a prompt of token ids. One that cannot be run comes back with an error, and `step` reports it.

        Args:
            index: with a seed in ``params``, requests of different index draw different random numbers.
        """
        params = params or SamplingParams()
        try:
            request = Request.create(self.runner, self.tokenizer, prompt, params, index)
        except (ValueError, TypeError) as error:
            request = Request.refused(prompt, params, str(error))
            self._report(RequestOutput(request))
            return request
        return self.submit(request)

    def submit(self, request: Request) -> Request:
        """Queues a request that `Request.create` has made."""
        request.keys = BlockKeys(self.runner.layout.snapshot_block, lookahead=int(self.decoder.mtp))
        self.scheduler.waiting.append(request)
        if reason := self.scheduler.never_fits(request):
            self._fail(request, reason)
        return request

    def cancel(self, request: Request) -> bool:
        """Ends a request between two steps and frees all it holds; False if it had ended already."""
        if request.finished:
            return False
        self.scheduler.remove(request)
        request.end("abort")
        self._report(RequestOutput(request))
        return True

    def run(self, requests: Iterable[Request]) -> Iterator[list[RequestOutput]]:
        """Steps until these requests have ended. Closing the generator early cancels those that have not."""
        requests = list(requests)
        try:
            while any(not request.finished for request in requests) or self._ended:
                yield self.step()
        finally:
            for request in requests:
                self.cancel(request)

    def step(self) -> list[RequestOutput]:
        """Computes one batch: every decode, and as many prompt tokens as the budget leaves.

        Returns:
            What happened to each request that took part, failed, or was cancelled since the last step.
        """
        started, stats = time.perf_counter(), StepStats()
        self.last_step = stats
        # A decode step that is launched already comes first: waiting requests are admitted after it. Then no further
        # step is launched early while one of them could start, so that it waits for one step, not for many.
        next_step_launched = bool(self.scheduler.running) and self.runner.next_step_launched
        if not next_step_launched:
            self.scheduler.admit(stats)
        async_allowed = not (next_step_launched and self.scheduler.has_candidate)
        work, output = self._compute(stats, async_allowed)
        count_tokens(stats, work, self.decoder.decode_tokens)
        accepted = self.decoder.accept(work, output) if work else Accepted()
        count_drafts(stats, accepted)
        outputs = self._finish(work, accepted)
        outputs, self._ended = [*outputs, *self._ended], []
        stats.generated = sum(len(output.token_ids) for output in outputs)
        stats.finished = sum(output.request.finished for output in outputs)
        stats.running, stats.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        free, pages = self.runner.manager.available_pages(), self.runner.layout.pages
        stats.pages = {group: (pages[group] - 1 - free[group], pages[group] - 1) for group in pages}
        stats.seconds = time.perf_counter() - started
        self.stats.add(stats)
        if self.on_step is not None:
            self.on_step(stats)
        return outputs

    def _compute(self, stats: StepStats, async_allowed: bool) -> tuple[Work, StepOutput]:
        """Runs the next batch that there are pages for; requests that can never run fail."""
        self.decoder.propose(self.scheduler.running)
        while self.scheduler.running:
            work = self.scheduler.plan(self.decoder.decode_tokens, stats)
            try:
                return work, self._run(work, async_allowed)
            except OutOfPages as error:
                if not (self.scheduler.drop_drafts() or self.scheduler.free_pages(stats)):
                    self._fail(work[0][0], str(error))
            except (torch.OutOfMemoryError, MemoryError) as error:
                self._shrink(work, error)
            except Exception as error:
                return self._run_each(work, error)
        return [], StepOutput([])

    def _run(self, work: Work, async_allowed: bool) -> StepOutput:
        batch = [(request.sequence, n) for request, n in work]
        return self.runner.step(batch, self.decoder.options(work, self.runner, async_allowed))

    def _run_alone(self, request: Request, n: int) -> StepOutput:
        """The same for one request, always with logits."""
        return self.runner.step([(request.sequence, n)], self.decoder.options_with_logits([(request, n)]))

    def _shrink(self, work: Work, error: Exception) -> None:
        """After a step ran out of memory: smaller steps from now on, until a single token is too much."""
        for request, n in work:
            self._rewind(request, n)
        total = sum(n for _, n in work)
        if total == 1:
            self._fail(work[0][0], f"out of memory for a single token: {error}")
        self.scheduler.max_num_batched_tokens = max(1, total // 2)

    def _run_each(self, work: Work, error: Exception) -> tuple[Work, StepOutput]:
        """After a step failed: every request again, alone, up to where the step would have computed it."""
        if len(work) == 1:
            self._fail(work[0][0], describe(error))
            return [], StepOutput([])
        targets = [(request, n, request.sequence.num_computed + n) for request, n in work]
        for request, n in work:
            self._rewind(request, n)
        done: Work = []
        merged = StepOutput([])
        for request, n, target in targets:
            try:
                while (left := target - request.sequence.num_computed) > 0:
                    output = self._run_alone(request, min(left, self.scheduler.max_num_batched_tokens))
            except Exception as request_error:
                self._fail(request, describe(request_error))
                continue
            done.append((request, n))
            merged.logits += output.logits
            if output.hidden_states is not None:
                merged.hidden_states = [*(merged.hidden_states or []), *output.hidden_states]
        return done, merged

    def _rewind(self, request: Request, n: int) -> None:
        """Undoes a step that broke off: some layers may have written the state rows of ``n`` tokens, others not.

        Up to ``max_rollback`` of them overwrite nothing that is read again; beyond that the caches are computed anew.
        """
        if n > self.runner.layout.max_rollback:
            request.sequence.free()

    def _finish(self, work: Work, accepted: Accepted) -> list[RequestOutput]:
        outputs = []
        for request, n in work:
            if request in accepted.failures:
                self._fail(request, accepted.failures[request])
                continue
            self._remember(request)
            tokens, texts = accepted.tokens.get(request, []), []
            for token in tokens:
                texts.append(request.push(token))
                if request.finished:
                    self.scheduler.remove(request)
                    self.stats.finished[request.finish_reason] += 1
                    break
            drafts, num_accepted = accepted.verified.get(request, (0, 0))
            outputs.append(
                RequestOutput(request, n - drafts + num_accepted, tuple(tokens[: len(texts)]), "".join(texts))
            )
        return outputs

    def _remember(self, request: Request) -> None:
        """Offers the computed tokens of a request to the prefix cache, where its length allows that."""
        if self.prefixes is None:
            return
        layout, sequence = self.runner.layout, request.sequence
        blocks, beyond = divmod(sequence.num_computed, layout.snapshot_block)
        if blocks <= request.kept_blocks or (beyond and not layout.keeps_all_tokens):
            return
        keys = request.keys.upto(sequence.token_ids, blocks * layout.snapshot_block)
        if len(keys) == blocks or layout.keeps_all_tokens:
            self.prefixes.keep(sequence.cache, keys)
            request.kept_blocks = len(keys)

    def _fail(self, request: Request, error: str) -> None:
        self.scheduler.remove(request)
        request.end("error", error)
        self._report(RequestOutput(request))

    def _report(self, output: RequestOutput) -> None:
        """Keeps a request that ended outside of a step's batch, for the step's outputs."""
        self.stats.finished[output.request.finish_reason] += 1
        self._ended.append(output)


def count_tokens(stats: StepStats, work: Work, decode_tokens: int) -> None:
    for _, n in work:
        if n <= decode_tokens:
            stats.decodes, stats.decode_tokens = stats.decodes + 1, stats.decode_tokens + n
        else:
            stats.prefills, stats.prefill_tokens = stats.prefills + 1, stats.prefill_tokens + n


def count_drafts(stats: StepStats, accepted: Accepted) -> None:
    counts = accepted.verified.values()
    stats.verified, stats.drafted = len(counts), sum(drafts for drafts, _ in counts)
    stats.accepted = sum(num_accepted for _, num_accepted in counts)
    stats.verifications.update(counts)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
