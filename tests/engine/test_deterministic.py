"""``deterministic=True``: the bits of a row's logits follow from the tokens up to it, whatever else a step computes.

Every way to compute a text records the logits that its steps return; each row must be, to the bit, that of the text
computed alone in one step. On a GPU the models have the heads, records and top-k of published ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner import ModelRunner, StepOptions
from deepseek_attn.runner.model_runner import DEFAULT_OPTIONS
from tests.engine.test_full_size_fuzz import large
from tests.support import v32_cases
from tests.support.predictable import PredictableSource
from tests.support.small_models import prompt, small_config
from tests.support.tiers import tiered

RATIOS = [4, 16, 128, 0]
NUMERICS = {
    "exact": ("exact", torch.float32),
    "exact_bf16": ("exact", torch.bfloat16),
    "official": ("official", torch.bfloat16),
    "serving": ("serving", torch.bfloat16),
}
Rows = list[tuple[tuple[int, ...], torch.Tensor]]  # tokens of a sequence up to a row, and its logits


def config_of(device: torch.device, family: str) -> ModelConfig:
    if device.type == "cpu":
        return small_config(RATIOS, mtp=1) if family == "v4" else v32_cases.small(num_nextn_predict_layers=1)
    config = large().configs[family]
    return config.replace(num_hidden_layers=4, compress_ratios=[*RATIOS, 0]) if family == "v4" else config


@lru_cache(maxsize=2)
def runner_of(device: torch.device, family: str, numerics: str, deterministic: bool = True) -> ModelRunner:
    config, (numerics, dtype) = config_of(device, family), NUMERICS[numerics]
    dtype = torch.float32 if device.type == "cpu" else dtype
    return ModelRunner.from_source(
        config, PredictableSource(config), device=device, numerics=numerics, dtype=dtype, deterministic=deterministic,
        max_model_len=1280, max_num_seqs=10, max_num_batched_tokens=2048, max_snapshots=6, progress=False,
    )  # fmt: skip


def prompts_of(runner: ModelRunner, longest: int = 34) -> list[list[int]]:
    """Nine prompts; ``longest`` is for a CPU."""
    lengths = (longest, 7, 2, 1, 1, 5, 3, 1, 4) if runner.device.type == "cpu" else (700, 130, 61, 33, 9, 7, 3, 2, 1)
    return [prompt(runner.config, n, seed) for seed, n in enumerate(lengths)]


@contextmanager
def recorded(runner: ModelRunner) -> Iterator[Rows]:
    """The rows of logits that steps inside return."""
    rows, step = [], runner.step

    def recording(batch, options=DEFAULT_OPTIONS):
        starts = [sequence.num_computed for sequence, _ in batch]
        output = step(batch, options)
        for (sequence, n), start, logits in zip(batch, starts, output.logits or [[]] * len(batch), strict=True):
            for i, row in enumerate(logits):
                rows.append((tuple(sequence.token_ids[: start + n - len(logits) + i + 1]), row.cpu()))
        return output

    runner.step = recording
    try:
        yield rows
    finally:
        del runner.step


def in_batches(runner: ModelRunner, sizes: Iterable[int]) -> None:
    prompts = prompts_of(runner)
    for size in sizes:
        runner.score(prompts[:size])
        runner.score(prompts[::-1][:size])


def in_chunks(runner: ModelRunner, sizes: Iterable[int], longest: int = 131) -> None:
    for size in sizes:
        runner.score(prompts_of(runner, longest)[:2], size)


def in_company(runner: ModelRunner, seed: int = 0) -> None:
    """Prompts in chunks and decodes mixed, in another order and company in each step."""
    rng = random.Random(seed)
    sequences = [runner.sequence(tokens) for tokens in prompts_of(runner)]
    while pending := [sequence for sequence in sequences if sequence.num_pending]:
        chosen = rng.sample(pending, rng.randint(1, len(pending)))
        batch = [(s, rng.choice([1, min(5, s.num_pending), rng.randint(1, s.num_pending)])) for s in chosen]
        runner.step(batch, StepOptions(all_logits=True))
    for sequence in sequences:
        sequence.free()


def through_engine(runner: ModelRunner, drafts: int, budget: int, tokens: int, temperature: float = 0.5) -> None:
    """Requests that share a beginning, in turn: the later ones start from its snapshot; all lose their caches."""
    shared = prompt(runner.config, runner.layout.snapshot_block + 3, seed=50)
    ends, others = ((2, 1, 3), 3) if runner.device.type == "cpu" else ((9, 2, 40), 5)
    prompts = [shared + prompt(runner.config, n, seed=n) for n in ends] + prompts_of(runner)[1:others]
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)
    engine.scheduler.max_num_batched_tokens = budget
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=3, ignore_eos=True)
    steps, rng = 0, random.Random(drafts)
    for group in (prompts[:1], prompts[1:2], prompts[2:]):
        requests = [engine.add_request(tokens, params, index=i) for i, tokens in enumerate(group)]
        while engine.has_unfinished:
            engine.step()
            steps += 1
            if len(group) > 1 and steps % 3 == 0 and engine.scheduler.running:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running), engine.last_step)
        assert [request.error for request in requests] == [None] * len(requests)
    assert engine.stats.cached_tokens > 0
    assert not drafts or engine.stats.accepted > 0
    engine.prefixes.clear()
    runner.decode_query_len = 1


WAYS = {
    "batches": lambda runner: in_batches(runner, range(2, 10)),
    "batch_of_9": lambda runner: in_batches(runner, [9]),
    "chunks": lambda runner: in_chunks(runner, [1, 7, 61]),
    "chunks_of_7": lambda runner: in_chunks(runner, [7], longest=25),
    "company": in_company,
    "preempted": lambda runner: through_engine(runner, drafts=0, budget=50, tokens=8),
    "drafts": lambda runner: through_engine(runner, drafts=2, budget=90, tokens=12),
}


def differences(runner: ModelRunner, rows: Rows) -> list[str]:
    """Rows that are not those of their text computed alone, in one step."""
    texts = []
    for tokens in sorted({tokens for tokens, _ in rows}, key=len, reverse=True):
        if not any(text[: len(tokens)] == tokens for text in texts):
            texts.append(tokens)
    expected = {}
    for text in texts:
        (logits,) = runner.score([list(text)])
        expected |= {text[: i + 1]: row for i, row in enumerate(logits)}
    return [
        f"token {len(tokens) - 1} of a text: {(row - expected[tokens]).abs().max():.1e}"
        for tokens, row in rows
        if not torch.equal(row, expected[tokens])
    ]


CASES = [(f, n, way) for f in ("v4", "v32") for n in NUMERICS for way in WAYS]
QUICK = [("v4", "exact", "batch_of_9"), ("v4", "serving", "chunks_of_7"), ("v32", "serving", "drafts")]


@pytest.mark.parametrize(("family", "numerics", "way"), tiered(CASES, QUICK))
def test_a_rows_logits_follow_from_its_tokens(device, family, numerics, way):
    runner = runner_of(device, family, numerics)
    with recorded(runner) as rows:
        WAYS[way](runner)
    wrong = differences(runner, rows)
    assert rows
    assert not wrong, f"{len(wrong)} of {len(rows)} rows differ: {', '.join(wrong[:5])}"
