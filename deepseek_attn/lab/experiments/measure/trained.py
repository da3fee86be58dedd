"""Quality of a variant that is trained from scratch: loss by distance, accuracy, and attention recall."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors.torch import load_file

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.lab.experiments.define.files import read_text_file
from deepseek_attn.lab.experiments.define.results import TokensResult, TrainedResult
from deepseek_attn.lab.experiments.define.settings import TaskSettings, TrainSettings
from deepseek_attn.lab.experiments.define.units import ReportProgress
from deepseek_attn.lab.experiments.measure.quality import by_position, next_token_loss
from deepseek_attn.lab.experiments.measure.recall import measure_recall
from deepseek_attn.lab.training import Task, TextTask, make_task, train
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.utils.files import write_tensors

TOKENS_FILE = "tokens.safetensors"
EVALUATION_SEED = 10_007  # of the batches that `trained` draws; training draws with another seed
RECALL_PROMPTS = 2


def write_tokens(settings: TrainSettings, vocab_size: int, folder: Path) -> TokensResult:
    """Tokenises the text of the text task once for all runs, and writes the token ids into ``folder``."""
    text = None if settings.text is None else read_text_file(settings.text, "train.text")
    task = TextTask.from_text(text, vocab_size=vocab_size, **settings.tasks["text"].options)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TOKENS_FILE, {"ids": task.ids.int()})
    return {"tokens": len(task.ids), "vocab_size": vocab_size}


def open_task(name: str, settings: TaskSettings, vocab_size: int, folder: Path) -> Task:
    """A task; the text comes from the tokens that `write_tokens` left in ``folder``."""
    if name == "text":
        return TextTask(load_file(folder / TOKENS_FILE)["ids"].tolist(), vocab_size)
    return make_task(name, **{"vocab_size": vocab_size, **settings.options})


def train_variant(
    config: ModelConfig,
    settings: TrainSettings,
    name: str,
    seed: int,
    device: torch.device,
    folder: Path,
    progress: ReportProgress,
) -> TrainedResult:
    """Trains one model on one task with one seed, and measures it on held-out data."""
    setup = settings.tasks[name]
    task = open_task(name, setup, config.vocab_size, folder)
    result = train(
        config, task, steps=setup.steps, batch=setup.batch, seq_len=setup.seq_len, seed=seed, device=device,
        lr=setup.lr, budget_s=settings.budget_s, test_batches=settings.eval_batches,
        progress=lambda step, loss: progress(0.9 * step / setup.steps),
    )  # fmt: skip
    lengths = sorted({setup.seq_len, *settings.seq_lens})
    longest = max(lengths) + 1
    runner = result.runner(
        device=device, numerics="exact", dtype="float32", max_model_len=longest, max_num_seqs=setup.batch,
        max_num_batched_tokens=max(4096, longest),
    )  # fmt: skip
    by_length, positions = [], []
    for length in lengths:
        scored = score_task(runner, task, setup.batch, length)
        loss, accuracy = (float(values.double().mean()) for values in (scored.losses, scored.correct))
        by_length.append({"seq_len": length, "loss": loss, "accuracy": accuracy})
        if length == setup.seq_len:
            positions = by_position(scored.positions, {"loss": scored.losses})
    prompts = task.batch(RECALL_PROMPTS, setup.seq_len, generator(), "test").tokens.tolist()
    found = {
        "metrics": result.metrics,
        "steps": result.steps,
        "losses": [list(point) for point in result.losses],
        "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
        "by_length": by_length,
        "by_position": positions,
        "layers": measure_recall(runner, prompts),
        "train_seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
    }
    return cast("TrainedResult", found)  # as JSON has it: pairs are lists, and metrics of an MTP layer are more


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(EVALUATION_SEED)


class Scored(NamedTuple):
    """The tokens of a task that count, ``[N]``: loss in nats, whether the argmax is right, position."""

    losses: torch.Tensor
    correct: torch.Tensor
    positions: torch.Tensor


def score_task(runner: ModelRunner, task: Task, size: int, length: int) -> Scored:
    """Scores ``size`` held-out sequences of ``length`` tokens through the caches."""
    tokens, mask = task.batch(size, length, generator(), "test")
    losses, correct, positions = [], [], []
    for row, logits in enumerate(runner.score(tokens.tolist())):
        counted = mask[row, 1:]
        losses.append(next_token_loss(logits, tokens[row])[counted])
        correct.append((logits[:-1].argmax(-1) == tokens[row, 1:])[counted])
        positions.append(torch.arange(length, device="cpu")[counted])
    return Scored(torch.cat(losses), torch.cat(correct), torch.cat(positions))
