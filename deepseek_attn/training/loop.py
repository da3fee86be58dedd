"""The training loop: AdamW on a task's batches, by steps or by time, on a CPU or as a captured graph on a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.options import pick_device
from deepseek_attn.models.deepseek_v4 import DeepseekV4
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.training.forward import DenseModel
from deepseek_attn.training.save import TrainedSource
from deepseek_attn.training.step import TrainingStep
from deepseek_attn.training.task import Task
from deepseek_attn.training.weights import FreshSource, build_model

WARMUP = 0.05  # share of the training in which the learning rate rises
DENSE_SHARE = 0.5  # share that reads all entries with unquantised weights, see `train`
REPORT_EVERY = 20
EVALUATION_SEED = 20_000  # far from the seeds of training batches


@dataclass
class TrainResult:
    """A trained model with the record of its training.

    Attributes:
        model: float32 weights, not yet quantised.
        losses: (step, loss of that step's batch), every 20 steps and at the end.
        metrics: ``loss`` and ``accuracy`` on the task's test split, with weights as a checkpoint stores them and
            entries as the indexers select them, as in a runner.
        seconds: time of the optimizer steps, without initialisation and evaluation.
    """

    config: ModelConfig
    model: DeepseekV4 = field(repr=False)
    losses: list[tuple[int, float]] = field(repr=False)
    metrics: dict[str, float]
    steps: int
    seconds: float
    tokens_per_second: float

    def source(self) -> TrainedSource:
        """The weights as a checkpoint source, without files."""
        return TrainedSource(self.model, self.config)

    def runner(self, **options) -> ModelRunner:
        """A runner with these weights; ``options`` are those of `ModelRunner.from_source`."""
        return ModelRunner.from_source(self.config, self.source(), progress=False, **options)


def train(
    config: ModelConfig,
    task: Task,
    *,
    steps: int,
    batch: int = 32,
    seq_len: int = 256,
    seed: int = 0,
    device: torch.device | str | None = None,
    lr: float = 2e-3,
    weight_decay: float = 0.1,
    budget_s: float | None = None,
    dense_share: float = DENSE_SHARE,
    test_batches: int = 8,
    progress: Callable[[int, float], None] | None = None,
) -> TrainResult:
    """Trains a model from scratch.

    In the first part every query reads all visible entries, and indexers learn the distribution of attention over them.
    In the second part entries come from the indexers' top-k, and weights are quantised as the checkpoint stores them
    (FP8, FP4, BF16), with straight-through gradients. The learning rate rises, then falls linearly to 0.

    Args:
        config: without an MTP layer; ``vocab_size`` at least the task's.
        steps: optimizer steps, fewer if ``budget_s`` ends first.
        batch, seq_len: sequences of a step, and predictions of each.
        seed: of weights and batches. On a CPU the same seed gives the same model; a GPU adds rounding noise.
        device: default: the first GPU if there is one. On a GPU matrix products are bfloat16.
        lr: peak learning rate.
        weight_decay: of the matrices; a text that is read many times wants more (1.0) than fresh data.
        budget_s: seconds that the steps may take; the schedule follows the clock where that is ahead of the steps.
        dense_share: share of the training that is its first part.
        test_batches: batches of the evaluation at the end.
        progress: called with (steps done, loss) every 20 steps.

    Raises:
        ValueError: sizes that do not fit each other, or a config with an MTP layer.
    """
    check(config, task, steps, batch, seq_len, dense_share)
    check_rates(lr, weight_decay, budget_s)
    device = pick_device(device)
    model = build_model(config, FreshSource(config, seed), device, max_positions=seq_len)
    dense = DenseModel(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
    step = TrainingStep(dense, TrainedSource(model, config), batch, seq_len, weight_decay, device)
    generator = torch.Generator().manual_seed(seed)
    losses, done, share = [], 0, 0.0
    start = time.monotonic()
    while done < steps and share < 1.0:
        step.set_stage(served=share >= dense_share)
        rate = lr * min(1.0, (share + 1 / steps) / WARMUP) * (1.0 - share)
        loss = step.run(task.batch(batch, seq_len, generator), rate)
        done += 1
        if done % REPORT_EVERY == 0 or done == steps:
            losses.append((done, float(loss)))
            if progress is not None:
                progress(*losses[-1])
        share = max(done / steps, (time.monotonic() - start) / budget_s if budget_s else 0.0)
    seconds = time.monotonic() - start
    metrics = evaluate(dense, config, task, test_batches, batch, seq_len)
    return TrainResult(config, model, losses, metrics, done, seconds, done * batch * seq_len / seconds)


def check(config: ModelConfig, task: Task, steps: int, batch: int, seq_len: int, dense_share: float) -> None:
    """ValueError, with all problems, for sizes that `train` cannot use."""
    if not isinstance(config, ModelConfig):
        raise ValueError(f"cannot train a {config.model_type}: only DeepSeek-V4 has a differentiable path here")
    problems = []
    for name, value in (("steps", steps), ("batch", batch), ("seq_len", seq_len)):
        if value < 1:
            problems.append(f"{name} is {value}: at least 1 is needed")
    if task.vocab_size > config.vocab_size:
        problems.append(f"task {task.name} has {task.vocab_size} tokens, vocab_size is {config.vocab_size}")
    if seq_len > config.max_position_embeddings:
        problems.append(f"seq_len {seq_len} exceeds the model's {config.max_position_embeddings} positions")
    if not 0.0 <= dense_share <= 1.0:
        problems.append(f"dense_share is {dense_share}: it is between 0 and 1")
    if problems:
        raise ValueError("cannot train: " + "; ".join(problems))
    task.batch(1, seq_len, torch.Generator(), "test")  # a split that is too short must show before the training


def check_rates(lr: float, weight_decay: float, budget_s: float | None) -> None:
    """ValueError, with all problems, for values that an optimizer cannot use."""
    problems = []
    if not 0.0 < lr < math.inf:
        problems.append(f"lr is {lr}: a finite number above 0 is needed")
    if not 0.0 <= weight_decay < math.inf:
        problems.append(f"weight_decay is {weight_decay}: a finite number of at least 0 is needed")
    if budget_s is not None and not budget_s > 0.0:
        problems.append(f"budget_s is {budget_s}: more than 0 seconds are needed")
    if problems:
        raise ValueError("cannot train: " + "; ".join(problems))


@torch.no_grad()
def evaluate(
    dense: DenseModel, config: ModelConfig, task: Task, batches: int, batch: int, seq_len: int, split: str = "test"
) -> dict[str, float]:
    """``loss`` (nats per counted token) and ``accuracy`` of a model as it will be stored and run."""
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    names = {f"model.{name}": value for name, value in TrainedSource(dense.model, config).rounded_parameters().items()}
    device = dense.model.embed.weight.device
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for _ in range(batches):
        tokens, mask = (part.to(device) for part in task.batch(batch, seq_len, generator, split))
        logits = torch.func.functional_call(dense, names, (tokens[:, :-1],)).logits
        targets, counted = tokens[:, 1:], mask[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        right = logits.argmax(-1) == targets
        total += torch.stack([loss[counted.flatten()].sum(), right[counted].sum(), counted.sum()]).double()
    loss, right, count = total.tolist()
    return {"loss": loss / count, "accuracy": right / count}
