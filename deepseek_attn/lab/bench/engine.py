"""Timing the engine side by side in one process: with drafts, log-probabilities, structured output, without graphs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.engine.stats import EngineStats
from deepseek_attn.kernels.sampling import accept_drafts
from deepseek_attn.kernels.sampling.types import AcceptedDrafts
from deepseek_attn.lab.bench.layer import past
from deepseek_attn.lab.bench.structured import RECORDS
from deepseek_attn.lab.bench.timing import GraphReplays
from deepseek_attn.lab.training.text import TEST_SHARE, sample_text
from deepseek_attn.runner import graph_steps
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.text.tokenizer_files import MIN_VOCAB

SETTLED = 8  # warm-up: these first steps in which all requests decode are not timed, if there are more


@dataclass(frozen=True)
class DecodingVariant:
    """A way to decode.

    Attributes:
        drafts: draft tokens of the MTP layer per step.
        graphs: replay the runner's CUDA graphs, if it has any.
        logprobs: number of alternatives listed with each token's log-probability; None: no log-probabilities.
        structured: the text has the structure of `RECORDS`.
        acceptance: probability that a draft counts as right if the drafts before it are (`SetAcceptance`); None: the
            model's own drafts are compared with its tokens.
    """

    drafts: int = 0
    graphs: bool = True
    logprobs: int | None = None
    structured: bool = False
    acceptance: float | None = None

    def params(self, num_tokens: int) -> SamplingParams:
        """Greedy sampling parameters for exactly ``num_tokens`` tokens."""
        return SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            logprobs=self.logprobs,
            json_schema=RECORDS if self.structured else None,
            ignore_eos=not self.structured,
        )


@dataclass
class Pass:
    """One run of all prompts.

    Attributes:
        seconds, generated: duration and generated tokens of all steps after the prompts.
        step_seconds: times of steady steps, in which every request decoded and none ended.
        device_seconds: time of the CUDA graphs of the steady steps, replayed back to back; None without graphs.
        verifications: as in `EngineStats`.
        tokens: generated tokens of each request.
        prompt_seconds: time of the steps with prompts.
        prompt_tokens: prompt tokens that these steps computed.
    """

    seconds: float = 0.0
    generated: int = 0
    step_seconds: list[float] = field(default_factory=list)
    device_seconds: float | None = None
    verifications: Counter[tuple[int, int]] = field(default_factory=Counter)
    tokens: list[list[int]] = field(default_factory=list)
    prompt_seconds: float = 0.0
    prompt_tokens: int = 0

    @property
    def step_us(self) -> float:
        return sum(self.step_seconds) / len(self.step_seconds) * 1e6


@dataclass(frozen=True, kw_only=True)
class EngineTiming:
    """Decoding of one batch by one variant, compared with the first variant (the baseline: no drafts).

    Attributes:
        batch: requests at a time; drafts: per step and request; graphs: steps were CUDA graphs.
        logprobs, structured, acceptance: as in `DecodingVariant`.
        rounds: runs, whose median counts.
        tokens_per_second: new tokens after the prompts, all requests together; speedup: divided by the baseline's.
        step_us: time of a step in which all requests decode.
        tokens_per_step: new tokens per request and step that verified drafts; 1 without drafts.
        acceptance_rate, acceptance_by_position: fraction of the drafts that were accepted: of all, and of the first,
            second, ... after a confirmed token.
        break_even_tokens_per_step: ``step_us`` over the baseline's: the tokens per step at which drafts neither cost
            nor save time. None without drafts.
        break_even_acceptance: the acceptance probability per draft that gives this number; None without drafts, or if
            even full acceptance does not reach it.
        device_us: device time of a step's CUDA graphs; None for steps without graphs.
        host_share: share of ``step_us`` beyond ``device_us``; None for steps without graphs.
        same_text: number of requests with the baseline's text.
        prompt_tokens_per_second: of the steps that computed the prompts.
    """

    batch: int
    drafts: int
    graphs: bool
    logprobs: int | None
    structured: bool
    acceptance: float | None
    rounds: int
    tokens_per_second: float
    speedup: float
    step_us: float
    tokens_per_step: float
    acceptance_rate: float | None
    acceptance_by_position: list[float]
    break_even_tokens_per_step: float | None
    break_even_acceptance: float | None
    device_us: float | None
    host_share: float | None
    same_text: int
    prompt_tokens_per_second: float | None

    def row(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def time_engine(
    runner: ModelRunner,
    prompts: list[list[int]],
    variants: list[DecodingVariant],
    num_tokens: int,
    rounds: int = 3,
    tokenizer: Tokenizer | None = None,
    acceptance: SetAcceptance | None = None,
    computed: bool = False,
) -> list[EngineTiming]:
    """Times greedy decoding of ``num_tokens`` tokens after each prompt, all prompts at once, the variants alternately.

    Every variant runs once before, which compiles kernels and captures graphs.

    Args:
        variants: the first variant is the baseline.
        tokenizer: needed by structured output; generated tokens are then decoded to text.
        acceptance: an installed `SetAcceptance`, if variants set ``acceptance``. Then every variant with drafts must.
            A run ends with its first request: the others end later, by lot, and each smaller batch would be captured.
        computed: compute only the last token of each prompt; the entries of the others are whatever the caches hold.

    Raises:
        ValueError: drafts without an MTP layer, or more than a step can verify, or too few tokens to time.
        RuntimeError: a request failed.
    """
    passes: dict[DecodingVariant, list[Pass]] = {variant: [] for variant in variants}
    for number in range(1 + rounds):
        for variant in variants:
            if acceptance and variant.drafts:
                acceptance.set(variant.acceptance)
            found = run_variant(runner, variant, prompts, num_tokens, tokenizer, computed, acceptance is not None)
            passes[variant] += [found] if number else []
    baseline = passes[variants[0]]
    return [summary(variant, passes[variant], baseline, len(prompts)) for variant in variants]


class SetAcceptance:
    """Accepts drafts at random with a given probability, to time speculation at a known acceptance with any weights.

    While it is installed, the token chosen before each draft is replaced: by the draft to accept it, by another token
    to reject it. Everything else is computed as usual; a step has seven more small launches. The random numbers depend
    on the request's place in the batch and the draft's position only, so all runs and all ranks draw the same.

    CUDA graphs captured meanwhile keep this behaviour: do not use the runner for anything else afterwards.

    Raises:
        ValueError: steps of the runner are not CUDA graphs.
    """

    def __init__(self, runner: ModelRunner, drafts: int, seed: int = 0):
        if runner.graphs is None:
            raise ValueError(f"a set acceptance needs steps that are CUDA graphs: {runner.graph_problem}")
        generator = torch.Generator().manual_seed(seed)
        shape = (max(runner.graphs.batches), runner.layout.max_model_len + 1, drafts)
        self._lots = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        self._wrong = torch.zeros(shape, dtype=torch.int64, device=runner.device)
        self._numbers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def set(self, probability: float | None) -> None:
        """Sets the acceptance probability of the next steps."""
        if probability is None:
            raise ValueError("some variants with drafts lack an acceptance: give it to all of them, or to none")
        self._wrong.copy_(self._lots >= probability)

    @contextmanager
    def installed(self) -> Iterator[None]:
        graph_steps.accept_drafts = self.accept_drafts
        try:
            yield
        finally:
            graph_steps.accept_drafts = accept_drafts

    def accept_drafts(
        self, token_ids: Tensor, chosen: Tensor, starts: Tensor, ends: Tensor, verify: bool
    ) -> AcceptedDrafts:
        """`kernels.sampling.accept_drafts`, with ``chosen`` replaced in place."""
        requests = len(starts)
        drafts = len(chosen) // requests - 1
        if drafts:
            following, tokens = token_ids.view(requests, -1)[:, 1:], chosen.view(requests, -1)[:, :-1]
            if (requests, drafts) not in self._numbers:  # before a capture: constants must not be made during it
                options = {"dtype": torch.int64, "device": starts.device}
                self._numbers[requests, drafts] = torch.arange(requests, **options), torch.arange(drafts, **options)
            places, numbers = self._numbers[requests, drafts]
            is_draft = numbers < (ends - starts - 1)[:, None]
            wrong = self._wrong[:, :, :drafts][places, starts]
            tokens.copy_(torch.where(is_draft, (following - wrong).abs(), tokens))
        return accept_drafts(token_ids, chosen, starts, ends, verify)


def run_variant(
    runner: ModelRunner,
    variant: DecodingVariant,
    prompts: list[list[int]],
    num_tokens: int,
    tokenizer: Tokenizer | None = None,
    computed: bool = False,
    to_first_end: bool = False,
) -> Pass:
    """Runs the prompts once, in a new engine. The runner's settings are restored afterwards."""
    before = runner.graphs, runner.decode_query_len
    runner.graphs, runner.decode_query_len = runner.graphs if variant.graphs else None, 1
    try:
        decoder = MTPSpeculation(runner, variant.drafts) if variant.drafts else None
        engine = Engine(runner, tokenizer, decoder)
        return run_engine(engine, prompts, variant.params(num_tokens), computed, to_first_end)
    finally:
        runner.graphs, runner.decode_query_len = before


@torch.inference_mode()
def run_engine(
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams,
    computed: bool = False,
    to_first_end: bool = False,
) -> Pass:
    """Runs all prompts to their end, or until one has ended; ``computed``: see `time_engine`."""
    requests, runner = [engine.add_request(prompt, params) for prompt in prompts], engine.runner
    for request in requests if computed else ():
        runner.manager.free(request.sequence.cache)
        request.sequence.cache = past(runner, len(request.sequence.token_ids) - 1)
    found, steady, prompt_seconds, prompt_tokens = Pass(), [], 0.0, 0
    with GraphReplays() as replays:
        while engine.has_unfinished:
            engine.step()
            stats = engine.last_step
            if stats.prefills:
                prompt_seconds, prompt_tokens = prompt_seconds + stats.seconds, prompt_tokens + stats.prefill_tokens
            if stats.prefills or stats.waiting:
                found, steady = Pass(), []
                continue
            found.seconds, found.generated = found.seconds + stats.seconds, found.generated + stats.generated
            if stats.decodes == len(prompts) and not stats.finished:
                steady.append((stats.seconds, len(replays.graphs)))
            if stats.finished and to_first_end:
                break
        for request in requests:
            engine.cancel(request)
    broken = [request.error for request in requests if request.error]
    if broken:
        raise RuntimeError(f"{len(broken)} requests failed, the first with: {broken[0]}")
    found.verifications, found.tokens = engine.stats.verifications, [r.completion().token_ids for r in requests]
    if len(steady) < 2:
        raise ValueError(
            f"{params.max_tokens} new tokens per request: {len(steady)} steps in which all {len(prompts)} requests "
            "decode and continue, 2 are needed; time more tokens"
        )
    found.prompt_seconds, found.prompt_tokens = prompt_seconds, prompt_tokens
    (_, begin), *steady = steady[SETTLED if len(steady) > SETTLED + 4 else 0 :]
    found.step_seconds, end = [seconds for seconds, _ in steady], steady[-1][1]
    found.device_seconds = replays.device_seconds(begin, end) if end > begin else None
    return found


def summary(variant: DecodingVariant, passes: list[Pass], baseline: list[Pass], batch: int) -> EngineTiming:
    """The row of a variant: medians over its passes, and ratios of medians."""
    stats = EngineStats()
    for one in passes:
        stats.verifications.update(one.verifications)
    rate, step_us = tokens_per_second(passes), median_step_us(passes)
    device = [one.device_seconds / len(one.step_seconds) * 1e6 for one in passes if one.device_seconds is not None]
    device_us = statistics.median(device) if device else None
    cost = step_us / median_step_us(baseline) if variant.drafts else None
    return EngineTiming(
        batch=batch,
        drafts=variant.drafts,
        graphs=bool(device),
        logprobs=variant.logprobs,
        structured=variant.structured,
        acceptance=variant.acceptance,
        rounds=len(passes),
        tokens_per_second=rate,
        speedup=rate / tokens_per_second(baseline),
        step_us=step_us,
        tokens_per_step=stats.tokens_per_step,
        acceptance_rate=stats.acceptance_rate if variant.drafts else None,
        acceptance_by_position=stats.acceptance_by_position,
        break_even_tokens_per_step=cost,
        break_even_acceptance=None if cost is None else break_even_acceptance(cost, variant.drafts),
        device_us=device_us,
        host_share=None if device_us is None else 1 - device_us / step_us,
        same_text=sum(a == b for a, b in zip(passes[-1].tokens, baseline[-1].tokens, strict=True)),
        prompt_tokens_per_second=prompt_rate(passes),
    )


def tokens_per_second(passes: Iterable[Pass]) -> float:
    return statistics.median(one.generated / one.seconds for one in passes)


def prompt_rate(passes: Iterable[Pass]) -> float | None:
    rates = [one.prompt_tokens / one.prompt_seconds for one in passes if one.prompt_seconds]
    return statistics.median(rates) if rates else None


def median_step_us(passes: Iterable[Pass]) -> float:
    return statistics.median(one.step_us for one in passes)


def break_even_acceptance(cost: float, drafts: int) -> float | None:
    """Acceptance probability ``a`` at which drafts break even: ``1 + a + a^2 + ... + a^drafts = cost``.

    0 if a step with drafts costs no more than a step without; None if even full acceptance is not enough.

    Args:
        cost: time of a step with drafts, divided by the time of a step without.
    """
    if cost > 1 + drafts:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafts + 1)) < cost else (low, middle)
    return high if cost > 1 else 0.0


def text_prompts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens: BOS and a piece of the sample text's held-out end.

    Raises:
        ValueError: the held-out text is shorter than a piece.
    """
    text = sample_text()
    ids = tokenizer.encode(text[-int(len(text) * TEST_SHARE) :])
    own = length - 1
    if own < 1 or len(ids) < own:
        raise ValueError(f"prompts of {length} tokens: the held-out text has {len(ids)}; supported are 2 to that many")
    starts = [(len(ids) - own) * i // count for i in range(count)]
    return [[tokenizer.bos_token_id, *ids[start : start + own]] for start in starts]


def random_prompts(vocab_size: int, count: int, length: int, seed: int = 0) -> Iterator[list[int]]:
    """``count`` prompts of ``length`` random tokens, without the special tokens of the chat format."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(MIN_VOCAB - 256, vocab_size, (length,), generator=generator).tolist()


def cut_config(config: AnyConfig, layers: int | None = None, experts: int | None = None) -> AnyConfig:
    """The model with its first ``layers`` layers, its MTP layers, and ``experts`` routed experts per layer.

    Raises:
        ValueError: more layers than the model has, or a config that is invalid with these numbers.
    """
    if layers is not None and not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"{layers} layers: the model has 1 to {config.num_hidden_layers} to keep")
    changes = {"num_hidden_layers": layers, "n_routed_experts": experts}
    changes = {key: value for key, value in changes.items() if value is not None}
    return config.replace(**changes) if changes else config
