"""Quality of variants that are trained from scratch: by length, distance and position, and the recall of their layers.

Everything is measured over whole sequences in the differentiable path, with weights as a checkpoint stores them and
entries as the variant selects them: a runner has neither an oracle nor a random selection.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from deepseek_attn.lab.experiments.define.files import read_text_file
from deepseek_attn.lab.experiments.define.results import (
    DepthRow,
    DistanceRow,
    LengthRow,
    RecallRow,
    TokensResult,
    TrainedResult,
)
from deepseek_attn.lab.experiments.define.settings import LM_EVAL, QualitySettings, TaskSettings
from deepseek_attn.lab.experiments.define.units import TokensJob, TrainJob
from deepseek_attn.lab.experiments.measure.quality import by_position
from deepseek_attn.lab.experiments.measure.recall import covered_tokens
from deepseek_attn.lab.training import Task, TextTask, TrainResult, make_task, save_checkpoint
from deepseek_attn.lab.training.attention import Reading
from deepseek_attn.lab.training.loop import served_weights
from deepseek_attn.lab.training.task import Batch, generator_of
from deepseek_attn.utils.files import write_tensors

TOKENS_FILE = "{}.safetensors"
EVALUATION_SEED = 10_007  # of the batches that are measured; training draws with other seeds
READING_PROMPTS = 4
MAX_TOKENS = 8_192  # of a forward pass, or one sequence
DEPTHS = 10  # bins of a needle's depth
TRAILING = 8  # the last part of the positions is one in so many
CACHED = 16


def write_tokens(job: TokensJob, folder: Path) -> TokensResult:
    """Tokenises the text of a text task once for all runs, and writes the token ids into ``folder``."""
    task = TextTask.from_text(
        _text(job.settings.text), vocab_size=job.vocab_size, **job.settings.tasks[job.task].options
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TOKENS_FILE.format(job.task), {"ids": task.ids.int()})
    return {"tokens": len(task.ids), "vocab_size": job.vocab_size}


def _text(path: str | None) -> str | None:
    return None if path is None else read_text_file(path, "train.text")


def open_task(job: TrainJob, folder: Path) -> Task:
    """The task of a job; the text comes from the tokens that `write_tokens` left in ``folder``."""
    if job.setup.task == "text":
        return TextTask(load_file(folder / TOKENS_FILE.format(job.task))["ids"].tolist(), job.base.vocab_size)
    return open_synthetic(job.setup, job.base.vocab_size)


def open_synthetic(setup: TaskSettings, vocab_size: int) -> Task:
    """A task that needs no text."""
    return make_task(setup.task, **{"vocab_size": vocab_size, **setup.options})


class SharedBatches(Task):
    """A task whose last batches are kept, for models that are trained on the same ones in turn."""

    def __init__(self, task: Task):
        self.task, self.name, self.vocab_size = task, task.name, task.vocab_size
        self._kept: OrderedDict[tuple, Batch] = OrderedDict()
        self._chances: dict[int, float | None] = {}

    def batch(
        self, size: int, seq_len: int, generator: torch.Generator, split: str = "train", difficulty: float = 1.0
    ) -> Batch:
        key = (generator.initial_seed(), size, seq_len, split, difficulty)
        if key not in self._kept:
            self._kept[key] = self.task.batch(size, seq_len, generator, split, difficulty)
            if len(self._kept) > CACHED:
                self._kept.popitem(last=False)
        return self._kept[key]

    def chance(self, seq_len: int) -> float | None:
        if seq_len not in self._chances:
            self._chances[seq_len] = self.task.chance(seq_len)
        return self._chances[seq_len]


class Scored(NamedTuple):
    """The tokens of a task that count, ``[N]``: loss in nats, whether the argmax is right, position, and its source."""

    losses: torch.Tensor
    correct: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor


def measure_trained(result: TrainResult, job: TrainJob, task: Task) -> TrainedResult:
    """Measures a trained model on held-out data."""
    setup, settings = job.setup, job.settings
    count = setup.batch * setup.eval_batches
    lengths, distances, depths, positions = [], [], [], []
    answers = 0
    with torch.no_grad():
        weights = {f"model.{name}": value for name, value in served_weights(result.model, result.config).items()}
        for length in (setup.seq_len * times for times in settings.lengths):
            scored = score_task(result, weights, task, count, length)
            lengths.append(length_row(scored, length, task))
            distances += by_distance(scored, length)
            depths += by_depth(scored, length) if task.name == "needle" else []
            positions = by_position(scored.positions, {"loss": scored.losses})
            answers = len(scored.losses) if length == setup.seq_len else answers
        layers = read_layers(result, weights, task, setup.seq_len)
    found = {
        "metrics": {"loss": lengths[0]["loss"], "accuracy": lengths[0]["accuracy"]},
        "steps": result.steps,
        "losses": [list(point) for point in result.losses],
        "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
        "answers": answers,
        "by_length": lengths,
        "by_distance": distances,
        "by_depth": depths,
        "by_position": positions,
        "layers": layers,
        "train_seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
    }
    served = job.variant.selection == "learned" and job.variant.v41 is None
    if job.quality is not None and setup.task == "text" and served:
        found["lm_eval"] = measure_lm_eval(result, job, job.quality)
    return cast("TrainedResult", found)  # as JSON has it: pairs are lists


def batches(task: Task, count: int, length: int) -> Iterator[Batch]:
    """Held-out batches of ``count`` sequences in all, within `MAX_TOKENS`."""
    size = max(1, min(count, MAX_TOKENS // length))
    for number, start in enumerate(range(0, count, size)):
        yield task.batch(min(size, count - start), length, generator_of(EVALUATION_SEED, number), "test")


def score_task(result: TrainResult, weights: dict[str, torch.Tensor], task: Task, count: int, length: int) -> Scored:
    """Scores ``count`` held-out sequences of ``length`` tokens."""
    parts = []
    device = result.model.embed.weight.device
    for batch in batches(task, count, length):
        tokens, mask, targets = (part.to(device) for part in batch[:3])
        logits = torch.func.functional_call(result.dense, weights, (tokens[:, :-1],)).logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="none").view_as(mask[:, 1:])
        counted, right = mask[:, 1:], logits.argmax(-1) == targets[:, 1:]
        where = batch.mask[:, 1:].nonzero()[:, 1]
        parts.append((losses[counted].cpu(), right[counted].cpu(), where, batch.sources[:, 1:][batch.mask[:, 1:]]))
    return Scored(*(torch.cat(part) for part in zip(*parts, strict=True)))


def length_row(scored: Scored, length: int, task: Task) -> LengthRow:
    last = scored.positions >= length - length // TRAILING
    return {
        "seq_len": length,
        "loss": float(scored.losses.double().mean()),
        "accuracy": float(scored.correct.double().mean()),
        "trailing": float(scored.losses[last].double().mean()) if last.any() else None,
        "chance": task.chance(length),
    }


def by_distance(scored: Scored, length: int) -> list[DistanceRow]:
    """Accuracy of answers whose fact is 0 to 15 tokens back, 16 to 31, 32 to 63, ..."""
    known = scored.sources >= 0
    distance = scored.positions[known] + 1 - scored.sources[known]
    right, rows, start, end = scored.correct[known], [], 0, 16
    while len(distance) and start <= int(distance.max()):
        chosen = (distance >= start) & (distance < end)
        if chosen.any():
            accuracy = float(right[chosen].double().mean())
            rows.append(
                {"seq_len": length, "start": start, "end": end, "answers": int(chosen.sum()), "accuracy": accuracy}
            )
        start, end = end, 2 * end
    return rows


def by_depth(scored: Scored, length: int) -> list[DepthRow]:
    """Accuracy by the place of the fact in the sequence: 0 is its beginning."""
    bins = (scored.sources * DEPTHS // (length + 1)).clamp(0, DEPTHS - 1)
    rows = []
    for place in range(DEPTHS):
        chosen = bins == place
        if chosen.any():
            accuracy = float(scored.correct[chosen].double().mean())
            rows.append(
                {"seq_len": length, "depth": place / DEPTHS, "answers": int(chosen.sum()), "accuracy": accuracy}
            )
    return rows


def read_layers(result: TrainResult, weights: dict[str, torch.Tensor], task: Task, length: int) -> list[RecallRow]:
    """Recall of each layer over a few held-out sequences, see `RecallRow`."""
    readings: list[Reading] = []
    tokens = task.batch(READING_PROMPTS, length, generator_of(EVALUATION_SEED, 0), "test").tokens
    tokens = tokens[:, :-1].to(result.model.embed.weight.device)
    torch.func.functional_call(result.dense, weights, (tokens,), {"observer": readings.append})
    return [reading_row(reading, result) for reading in readings]


def reading_row(reading: Reading, result: TrainResult) -> RecallRow:
    """Means over the queries; None where none of them has a choice."""
    spec, config = result.config.layers[reading.layer], result.config
    length, topk = reading.dense.shape[1], config.index_topk
    position = torch.arange(length, device=reading.dense.device)
    read = reading.read.flatten(0, 1)
    near = position.unsqueeze(1) - position < result.model.layers[str(spec.index)].attn.window_size
    covered = covered_tokens(read, max(spec.ratio, 1), spec.overlap, length)
    seen = near.repeat(len(reading.dense), 1) | covered
    dense = reading.dense.flatten(0, 1)
    row: RecallRow = {
        "layer": spec.index,
        "kind": spec.kind,
        "token_mass": float(((dense * seen).sum(1) / dense.sum(1)).double().mean()),
        "entry_mass": None,
        "index_recall": None,
        "index_recall_of_chance": None,
    }
    visible = reading.visible.flatten(0, 1)
    choosing = visible.sum(1) > topk
    if (read.sum(1) < visible.sum(1)).any() and choosing.any():
        mass, read, visible = reading.mass.flatten(0, 1)[choosing], read[choosing], visible[choosing]
        best = mass.masked_fill(~visible, -1.0).topk(topk, dim=1).indices
        best = torch.zeros_like(read).scatter_(1, best, True)
        row["entry_mass"] = float(((mass * read).sum(1) / mass.sum(1).clamp_min(1e-30)).double().mean())
        row["index_recall"] = float(((best & read).sum(1) / topk).double().mean())
        row["index_recall_of_chance"] = float((topk / visible.sum(1)).double().mean())
    return row


def measure_lm_eval(result: TrainResult, job: TrainJob, quality: QualitySettings) -> dict[str, float]:
    """Numbers of tasks of lm-evaluation-harness, by ``task metric``: of the model's checkpoint, run by `LLM`.

    Raises:
        ValueError: the package lm-eval is not installed.
    """
    try:
        from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]  # the extra lm-eval
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  # the extra lm-eval

        from deepseek_attn.lab.lm_eval.model import DeepseekAttnLM
    except ModuleNotFoundError as error:
        raise ValueError(f"quality.lm_eval: the package lm-eval is not installed: {LM_EVAL}") from error
    text = _text(job.settings.text)
    tokenizer = TextTask.from_text(text, vocab_size=job.base.vocab_size, **job.setup.options).tokenizer
    with tempfile.TemporaryDirectory() as folder:
        directory = save_checkpoint(result.model, result.config, Path(folder) / "model", tokenizer)
        device = str(result.model.embed.weight.device)
        model = DeepseekAttnLM(str(directory), device=device, max_model_len=result.config.max_position_embeddings)
        found = simple_evaluate(
            model=model, tasks=list(quality.lm_eval), limit=quality.limit, bootstrap_iters=0,
            task_manager=TaskManager(include_path=quality.include_path),
        )  # fmt: skip
    numbers = {}
    for task, metrics in (found or {"results": {}})["results"].items():
        for name, value in metrics.items():
            metric, comma, _ = name.partition(",")  # and behind it the filter of answers
            if comma and isinstance(value, (int, float)) and not metric.endswith("_stderr"):
                numbers[f"{task} {name.removesuffix(',none')}"] = float(value)
    return numbers
