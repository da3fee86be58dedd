"""``deterministic=True``: the bits of a row's logits follow from the tokens up to it, whatever else a step computes.

Every way to compute a text records the logits that its steps return; each row must be, to the bit, that of the text
computed alone in one step. On a GPU the models have the heads, records and top-k of published ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner import ModelRunner, StepOptions
from deepseek_attn.runner.model_runner import DEFAULT_OPTIONS
from tests.engine.test_full_size_fuzz import large
from tests.gpu.test_drafts import v41_config
from tests.support import v32_cases
from tests.support.drafts import DraftedSource
from tests.support.predictable import PredictableSource
from tests.support.small_models import prompt, small_config
from tests.support.tiers import EXHAUSTIVE, tiered
from tests.support.typed import required

RATIOS = [4, 16, 128, 0]
NUMERICS = {
    "exact": ("exact", torch.float32),
    "exact_bf16": ("exact", torch.bfloat16),
    "official": ("official", torch.bfloat16),
    "serving": ("serving", torch.bfloat16),
}
Rows = list[tuple[tuple[int, ...], torch.Tensor]]  # tokens of a sequence up to a row, and its logits
Texts = list[tuple[int, ...]]


def config_of(device: torch.device, family: str, numerics: str = "exact") -> Any:
    if family == "v3":
        return v32_cases.small("deepseek_v3")
    if family == "v41":
        return ModelConfig.from_preset("tiny_v41") if device.type == "cpu" else v41_config()
    if device.type == "cpu":
        return small_config(RATIOS[:2], mtp=1) if family == "v4" else v32_cases.small(num_nextn_predict_layers=1)
    config = large().configs[family]
    return config.replace(num_hidden_layers=4, compress_ratios=[*RATIOS, 0]) if family == "v4" else config


@lru_cache(maxsize=2)
def runner_of(device: torch.device, family: str, numerics: str, deterministic: bool = True) -> ModelRunner:
    config, (numerics, dtype) = config_of(device, family, numerics), NUMERICS[numerics]
    dtype = torch.float32 if device.type == "cpu" else dtype
    source = PredictableSource(config) if config.dspark is None else DraftedSource(config)
    return ModelRunner.from_source(
        config, source, device=device, numerics=numerics, dtype=dtype, deterministic=deterministic,
        max_model_len=1280, max_num_seqs=10, max_num_batched_tokens=2048, max_snapshots=6, progress=False,
    )  # fmt: skip


def prompts_of(runner: ModelRunner, longest: int = 34) -> list[list[int]]:
    """Nine prompts; the first of ``longest`` tokens where they are computed one by one."""
    lengths = (longest, 7, 2, 1, 1, 5, 3, 1, 4) if runner.graph_problem else (300, 130, 61, 33, 9, 7, 3, 2, 1)
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


def in_batches(runner: ModelRunner, sizes: Iterable[int], longest: int = 34) -> None:
    prompts = prompts_of(runner, longest)
    for size in sizes:
        runner.score(prompts[:size])
        runner.score(prompts[::-1][:size])


def in_chunks(runner: ModelRunner, sizes: Iterable[int], longest: int) -> None:
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


def through_engine(runner: ModelRunner, drafts: int = 0, prefixes: bool = False, temperature: float = 0.5) -> Texts:
    """Requests in steps of few tokens, which lose their caches now and then. Returns their texts.

    Args:
        prefixes: they share a beginning and come in turn, so that the later ones start from its snapshot.
    """
    groups = [prompts_of(runner)[1:5]]
    if prefixes:
        shared = prompt(runner.config, runner.layout.snapshot_block + 3, seed=50)
        groups = [[shared + prompt(runner.config, n, seed=n)] for n in (2, 1, 3)] + groups
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)
    engine.scheduler.max_num_batched_tokens = 50
    params = SamplingParams(temperature=temperature, max_tokens=9, seed=3, ignore_eos=True)
    rng, steps, requests = random.Random(drafts), itertools.count(1), []
    for group in groups:
        requests += [engine.add_request(tokens, params, index=i) for i, tokens in enumerate(group)]
        while engine.has_unfinished:
            engine.step()
            if next(steps) % 4 == 0 and engine.scheduler.running:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running), engine.last_step)
                engine.stats.preempted += 1
    assert [request.error for request in requests] == [None] * len(requests)
    assert engine.stats.preempted > 0
    assert engine.stats.cached_tokens > 0 or not prefixes
    assert engine.stats.accepted > 0 or not drafts
    required(engine.prefixes).clear()
    runner.decode_query_len = 1
    return [tuple(request.sequence.token_ids) for request in requests]


WAYS = {
    "batches": lambda runner: in_batches(runner, [2, 5, 9] if runner.graph_problem else range(2, 10)),
    "batch_of_9": lambda runner: in_batches(runner, [9], longest=18),
    "chunks": lambda runner: in_chunks(runner, [1, 7, 61], longest=67 if runner.graph_problem else 131),
    "chunks_of_7": lambda runner: in_chunks(runner, [7], longest=20),
    "company": in_company,
    "preempted": through_engine,
    "prefixes": lambda runner: through_engine(runner, prefixes=True),
    "drafts": lambda runner: through_engine(runner, drafts=2),
    "everything": lambda runner: through_engine(runner, drafts=1, prefixes=True),
}


def differences(runner: ModelRunner, rows: Rows, texts: Texts | None) -> list[str]:
    """Rows that are not those of their text computed alone, in one step.

    Args:
        texts: rows of no other text are compared; None: all rows are.
    """
    if texts is None:
        texts = []
        for tokens in sorted({tokens for tokens, _ in rows}, key=len, reverse=True):
            if not any(text[: len(tokens)] == tokens for text in texts):
                texts.append(tokens)
    expected = {}
    for text in texts:
        (logits,) = runner.score([list(text)])
        expected |= {text[: i + 1]: row for i, row in enumerate(logits)}
    assert len(texts) < sum(tokens in expected for tokens, _ in rows)
    return [
        f"token {len(tokens) - 1} of a text: {(row - expected[tokens]).abs().max():.1e}"
        for tokens, row in rows
        if tokens in expected and not torch.equal(row, expected[tokens])
    ]


PARTS = ("batch_of_9", "chunks_of_7")  # of batches and of chunks, small enough for make test
MORE = ("preempted", "prefixes", "drafts")  # everything has each of them: alone with two numerics
QUICK = [("v4", "exact", "batch_of_9"), ("v4", "serving", "chunks_of_7"), ("v32", "serving", "chunks_of_7")]
CASES = [(f, n, way) for f in ("v4", "v32") for n in NUMERICS for way in WAYS if way not in PARTS]
CASES = [case for case in CASES if case[1] != "official" or case[2] not in MORE] + QUICK[:2]
CASES += QUICK[2:]
CASES += [("v41", "exact", way) for way in ("company", "everything")]
CASES += [("v3", "exact", way) for way in ("batches", "chunks", "company")]
# left to a GPU, where each case has kernels of its own: on a CPU the ways are those of the other cases
ON_A_GPU = {("v4", "official", "batches"), ("v4", "official", "chunks"), ("v4", "official", "everything")}
ON_A_GPU |= {case for case in CASES if case[1] == "exact_bf16"}  # float32 on a CPU
ON_A_GPU |= {("v32", "official", "batches"), ("v32", "serving", "everything")}
ON_A_GPU |= {(f, "serving", way) for f in ("v4", "v32") for way in MORE} - set(QUICK)
WITHOUT = [(f, n, "batch_of_9") for f in ("v4", "v32") for n in NUMERICS]
WITHOUT += [("v4", "exact", way) for way in WAYS if way not in ("batch_of_9", "chunks_of_7")]  # 7: too few rows


@pytest.mark.parametrize(("family", "numerics", "way"), tiered(CASES, QUICK[1:2], ON_A_GPU, QUICK))
def test_a_rows_logits_follow_from_its_tokens(device, family, numerics, way):
    runner = runner_of(device, family, numerics)
    with recorded(runner) as rows:
        texts = WAYS[way](runner)
    wrong = differences(runner, rows, texts)
    assert not wrong, f"{len(wrong)} of {len(rows)} rows differ: {', '.join(wrong[:5])}"


@pytest.mark.parametrize(
    ("family", "numerics", "way"),
    tiered(WITHOUT, [("v4", "exact", "batch_of_9")], gpu=[case for case in WITHOUT if case[1] == "exact_bf16"]),
)
def test_without_the_switch_they_do_not(device, family, numerics, way):
    runner = runner_of(device, family, numerics, deterministic=False)
    with recorded(runner) as rows:
        texts = WAYS[way](runner)
    assert differences(runner, rows, texts)


@EXHAUSTIVE
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("family", ["v4", "v32"])
def test_greedy_texts_are_those_of_the_logits_alone(device, family, drafts):
    """Steps that return tokens, of which on a GPU the next one is launched early."""
    runner = runner_of(device, family, "serving")
    texts = list(through_engine(runner, drafts=drafts, temperature=0))
    assert texts
    for text in texts:
        (logits,) = runner.score([list(text)])
        assert text[-9:] == tuple(logits[-10:-1].argmax(1).tolist())


def test_runners_with_and_without_it_do_not_disturb_each_other(device):
    one, other = (runner_of(device, "v4", "exact", deterministic) for deterministic in (True, False))
    tokens = prompts_of(one, 9)[0]
    tokens = tokens[: len(tokens) // 3 * 3]
    (expected,), (fastest,) = one.score([tokens]), other.score([tokens])
    a, b, rows = one.sequence(tokens), other.sequence(tokens), []
    while a.num_pending:
        rows += [runner.step([(sequence, 3)]).rows[0] for runner, sequence in ((one, a), (other, b))]
    a.free()
    b.free()
    assert torch.equal(torch.cat(rows[::2]).cpu(), expected[2::3])
    assert not torch.equal(torch.cat(rows[1::2]).cpu(), fastest[2::3])


REFUSED = {
    "flashmla": ({"backend": "flashmla"}, "backend 'flashmla': FlashMLA splits the keys of a query"),
    "mixed": ({"prefill_backend": "mixed"}, "backend 'mixed': it calls FlashMLA's or the Triton kernel by the number"),
    "gathered": ({"fp8_mode": "separate"}, "fp8_mode='separate': other kernels attend to a prompt than to a decode"),
    "ranks": ({"parallel": Parallel(0, 2)}, "2 ranks: the order in which an all-reduce adds depends on the number of"),
}


def test_an_observer_sees_each_token():
    runner = runner_of(torch.device("cpu"), "v4", "exact")
    text, calls = prompt(runner.config, 60, 0), []
    sequence = runner.sequence(text)
    for new in (55, 3, 1):  # the recorded operations of earlier tokens call nobody
        runner.step([(sequence, new)], StepOptions(observer=lambda call: calls.append((call.layer, len(call.output)))))
    assert calls == 59 * [(f"layers.{spec.index}", 1) for spec in runner.backbone_layers]
    sequence.free()


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_keep_it_is_refused(what):
    options, reason = REFUSED[what]
    config = config_of(torch.device("cpu"), "v4")
    with pytest.raises(ValueError, match=f"^deterministic=True cannot be kept with\n  - {reason}"):
        ModelRunner.from_config(config, device="cpu", deterministic=True, **options)


def test_all_reasons_come_in_one_message():
    config = v32_cases.small()
    with pytest.raises(ValueError, match=r"(?s)'flashinfer': FlashInfer plans.*fp8_mode='separate'"):
        ModelRunner.from_config(config, device="cpu", deterministic=True, backend="flashinfer", fp8_mode="separate")


def test_sequences_of_other_runners_are_not_loaded(tmp_path):
    one, other = (runner_of(torch.device("cpu"), "v32", "exact", deterministic) for deterministic in (True, False))
    sequence = other.sequence(prompts_of(other, 9)[0])
    other.step([(sequence, 9)])
    sequence.save(tmp_path / "saved")
    sequence.free()
    with pytest.raises(ValueError, match="saved with another numerics"):
        one.load_sequence(tmp_path / "saved")
