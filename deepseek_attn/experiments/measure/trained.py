"""Quality of a variant that is trained from scratch: what it learned, at which distance, and what its layers recall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.experiments.define.settings import TaskSettings, TrainSettings
from deepseek_attn.experiments.define.units import ReportProgress
from deepseek_attn.experiments.measure.quality import by_position, next_token_loss
from deepseek_attn.experiments.measure.recall import measure_recall
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.training import Task, TextTask, make_task, train
from deepseek_attn.utils.files import write_tensors

TOKENS_FILE = "tokens.safetensors"
EVALUATION_SEED = 10_007  # of the batches that `trained` draws; training draws with its own seed
RECALL_PROMPTS = 2


def write_tokens(settings: TrainSettings, vocab_size: int, folder: Path) -> dict[str, Any]:
    """Reads the text of the text task once for all runs: token ids into ``folder``."""
    text = None if settings.text is None else Path(settings.text).read_text(encoding="utf-8")
    task = make_task("text", vocab_size, text=text, **settings.tasks["text"].options)
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
) -> dict[str, Any]:
    """Trains one model on one task and measures it.

    Returns:
        ``losses`` of the training; ``metrics`` on held-out data; ``by_length`` the same at other lengths, through the
        paged caches; ``by_position`` the loss of tokens by their position; ``layers``: see `measure_recall`.
    """
    own = settings.tasks[name]
    task = open_task(name, own, config.vocab_size, folder)
    result = train(
        config, task, steps=own.steps, batch=own.batch, seq_len=own.seq_len, seed=seed, device=device, lr=own.lr,
        budget_s=settings.budget_s, test_batches=settings.eval_batches,
        progress=lambda step, loss: progress(0.9 * step / own.steps),
    )  # fmt: skip
    lengths = sorted({own.seq_len, *settings.seq_lens})
    longest = max(lengths) + 1
    runner = result.runner(
        device=device, numerics="exact", dtype="float32", max_model_len=longest, max_num_seqs=own.batch,
        max_num_batched_tokens=max(4096, longest),
    )  # fmt: skip
    by_length, positions = [], []
    for length in lengths:
        scored = score_task(runner, task, own.batch, length)
        by_length.append({"seq_len": length, **scored.pop("metrics")})
        if length == own.seq_len:
            positions = by_position(scored["positions"], {"loss": scored["losses"]})
    prompts = task.batch(RECALL_PROMPTS, own.seq_len, generator(), "test").tokens.tolist()
    return {
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


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(EVALUATION_SEED)


def score_task(runner: ModelRunner, task: Task, size: int, length: int) -> dict[str, Any]:
    """Held-out sequences through the caches: ``metrics`` over what counts, and loss and position of what does."""
    tokens, mask = task.batch(size, length, generator(), "test")
    losses, right, positions = [], [], []
    for row, logits in enumerate(runner.score(tokens.tolist())):
        counted = mask[row, 1:]
        losses.append(next_token_loss(logits, tokens[row])[counted])
        right.append((logits[:-1].argmax(-1) == tokens[row, 1:])[counted])
        positions.append(torch.arange(length)[counted])
    losses, right = torch.cat(losses), torch.cat(right)
    metrics = {"loss": float(losses.double().mean()), "accuracy": float(right.double().mean())}
    return {"metrics": metrics, "losses": losses, "positions": torch.cat(positions)}
