"""The training loop: AdamW on a task's batches, by steps or by time, on a CPU or as a captured graph on a GPU."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.options import pick_device
from deepseek_attn.lab.training.drafts import DraftModel, count_accepted, draft_losses
from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.lab.training.save import TrainedSource
from deepseek_attn.lab.training.seeds import SeedsStep
from deepseek_attn.lab.training.settings import DENSE_SHARE, FilledMtpTraining, MtpTraining, check, check_task
from deepseek_attn.lab.training.state import Steps, TrainingState
from deepseek_attn.lab.training.step import BackboneStep, MtpStep, TrainingStep
from deepseek_attn.lab.training.task import Batch, Task, generator_of
from deepseek_attn.lab.training.weights import FreshSource, TrainableConfig, build_model
from deepseek_attn.models.block import Backbone
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.utils.clock import seconds_since

WARMUP = 0.05  # share of the training in which the learning rate rises
REPORT_EVERY = 20
WORKSPACES = ":4096:8"  # of cuBLAS, for `deterministic_ops`
MTP_SEED = 10_000  # added to the seed of the backbone's batches
EVALUATION_SEED = 20_000  # far from the seeds of training batches


@dataclass
class TrainResult:
    """A trained model with the record of its training.

    Attributes:
        model: float32 weights, not yet quantised.
        losses: (step, loss of that step's batch), every 20 steps and at the end.
        metrics: ``loss`` and ``accuracy`` on the task's test split, with weights as a checkpoint stores them and
            entries as the indexers select them, as in a runner; with an MTP layer also those of `evaluate`.
        seconds: time of the optimizer steps of the backbone, without initialisation and evaluation.
        mtp: steps of the MTP layer, whose losses are divergences from the backbone (see `evaluate`); None without one.
        dense: the model over whole sequences, with gradients.
    """

    config: TrainableConfig
    model: Backbone = field(repr=False)
    losses: list[tuple[int, float]] = field(repr=False)
    metrics: dict[str, float]
    steps: int
    seconds: float
    tokens_per_second: float
    mtp: Steps | None
    dense: DenseModel = field(repr=False)

    def source(self) -> TrainedSource:
        """The weights as a checkpoint source, without files."""
        return TrainedSource(self.model, self.config)

    def runner(self, **options) -> ModelRunner:
        """A runner with these weights; ``options`` as of `ModelRunner.from_source`."""
        return ModelRunner.from_source(self.config, self.source(), progress=False, **options)


def train(
    config: TrainableConfig,
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
    mtp: MtpTraining | None = None,
    progress: Callable[[int, float], None] | None = None,
    state: TrainingState | None = None,
    selection: str = "learned",
    curriculum: float = 0.0,
    deterministic: bool = False,
    stop: Callable[[], bool] | None = None,
) -> TrainResult:
    """Trains a model from scratch.

    In the first part every query reads all visible entries, and indexers learn the distribution of attention over them.
    In the second part entries come from the indexers' top-k, and weights are quantised as the checkpoint stores them
    (FP8, FP4, BF16), with straight-through gradients. The learning rate rises, then falls linearly to 0.

    If the config has an MTP layer, it is trained afterwards, see `train_mtp`; it does not change the backbone.

    Args:
        config: with one MTP layer or none; ``vocab_size`` at least the task's.
        steps: optimizer steps, fewer if ``budget_s`` ends first.
        batch, seq_len: sequences of a step, and predictions of each.
        seed: of weights and batches. On a CPU the same seed gives the same model; a GPU adds rounding noise, unless the
            training is ``deterministic``.
        device: default: the first GPU if there is one. On a GPU matrix products are bfloat16.
        lr: peak learning rate.
        weight_decay: of the matrices; a text that is read many times wants more (1.0) than fresh data.
        budget_s: seconds that the steps may take; the schedule follows the clock where that is ahead of the steps. The
            MTP layer's steps get their share by number.
        dense_share: share of the training that is its first part.
        test_batches: batches of the evaluation at the end; 0: without one.
        mtp: how the MTP layer is trained; None: `MtpTraining`'s defaults. Without an MTP layer it is not used.
        progress: called with (steps done, loss) every 20 steps; steps of the MTP layer count on.
        state: where the training's state is kept and, if it was interrupted, goes on from; see `TrainingState`.
        selection: how entries are selected in the second part: ``learned``, or instead of the indexers by the layer's
            own attention (``oracle``) or a hash of the sequence (``random``); see `WholeSequences`. Indexers are
            trained only if it is ``learned``.
        curriculum: share of the training in which a synthetic task becomes as hard as it is (`Task.batch`).
        deterministic: one seed gives one result on a GPU too; see `deterministic_ops`.
        stop: called after each step; on True the state is written and the training ends with `Paused`.

    Raises:
        ValueError: sizes that do not fit each other, or a config with several MTP layers.
        Paused: ``stop`` returned True.
    """
    with deterministic_ops(deterministic, pick_device(device)):
        stepping = train_stepwise(
            config, task, steps=steps, batch=batch, seq_len=seq_len, seeds=[seed], device=device, lr=lr,
            weight_decay=weight_decay, budget_s=budget_s, dense_share=dense_share, test_batches=test_batches, mtp=mtp,
            progress=progress, state=state, selection=selection, curriculum=curriculum, stop=stop,
        )  # fmt: skip
        while True:
            try:
                next(stepping)
            except StopIteration as end:
                return end.value[0]


def train_stepwise(
    config: TrainableConfig,
    task: Task,
    *,
    steps: int,
    batch: int,
    seq_len: int,
    seeds: Sequence[int],
    device: torch.device | str | None,
    lr: float,
    weight_decay: float = 0.1,
    budget_s: float | None = None,
    dense_share: float = DENSE_SHARE,
    test_batches: int = 8,
    mtp: MtpTraining | None = None,
    progress: Callable[[int, float], None] | None = None,
    state: TrainingState | None = None,
    selection: str = "learned",
    curriculum: float = 0.0,
    stop: Callable[[], bool] | None = None,
    windows: Mapping[int, int] | None = None,
) -> Generator[None, None, list[TrainResult]]:
    """`train`, step by step, so that one process can train several models in turn; returns the result of each seed.

    On a GPU everything runs on the stream that is current in each `next`: give each training a stream of its own.

    Args:
        seeds: several are trained together (`SeedsStep`), without an MTP layer. Each seed's weights and batches are
            those of a training alone; its result also depends on the seeds beside it, as sums are rounded otherwise.
        windows: sliding windows of layers that have another than the config's.
    """
    drafter = (mtp or MtpTraining()).filled(steps, lr, weight_decay)
    check(config, steps, batch, seq_len, lr, weight_decay, budget_s, drafter, dense_share)
    check_task(config, task, seq_len)
    several = len(seeds) > 1
    if several and config.mtp_layers:
        raise ValueError("seeds are trained together without an MTP layer: set num_nextn_predict_layers to 0")
    if config.mtp_layers:
        budget_s = budget_s * steps / (steps + drafter.steps) if budget_s else None
    members = [fresh_model(config, seed, pick_device(device), selection, windows) for seed in seeds]
    together = SeedsStep(members, batch, seq_len, weight_decay) if several else None
    step = together or BackboneStep(members[0], batch, seq_len, weight_decay)

    def run(done: int, share: float, rate: float) -> torch.Tensor:
        step.set_stage(served=share >= dense_share)
        hardness = difficulty(share, curriculum)
        drawn = [task.batch(batch, seq_len, generator_of(seed, done), difficulty=hardness) for seed in seeds]
        return step.run(Batch(*map(torch.stack, zip(*drawn, strict=True))) if several else drawn[0], rate)

    trained = yield from run_steps(run, steps, lr, budget_s, progress, kept(state, "backbone", step), stop)
    if together is not None:
        together.write_models()
    drafts = None
    if config.mtp_layers:
        later = None if progress is None else lambda done, loss: progress(trained.done + done, loss)
        budget_s = budget_s * drafter.steps / steps if budget_s else None
        drafts = yield from train_mtp(members[0], task, drafter, batch, seq_len, seed=seeds[0], budget_s=budget_s,
                                      progress=later, state=state, stop=stop)  # fmt: skip
    speed = trained.done * batch * seq_len * len(seeds) / trained.seconds
    found = []
    for number, member in enumerate(members):
        losses, metrics = [(row[0], row[1 + number]) for row in trained.losses], {}
        if test_batches:
            metrics = evaluate(member, config, task, test_batches, batch, seq_len, depth=drafter.depth)
        sizes = trained.done, trained.seconds, speed
        found.append(TrainResult(config, member.model, losses, metrics, *sizes, drafts, member))
    return found


def fresh_model(
    config: TrainableConfig, seed: int, device: torch.device, selection: str, windows: Mapping[int, int] | None
) -> DenseModel:
    """An untrained model; the arguments are those of `train_stepwise`."""
    model = build_model(config, FreshSource(config, seed), device, max_positions=config.max_position_embeddings)
    for layer, window in (windows or {}).items():
        model.layers[str(layer)].attn.window_size = window
    return DenseModel(model, torch.bfloat16 if device.type == "cuda" else torch.float32, selection, seed)


def difficulty(share: float, curriculum: float) -> float:
    """`Task.batch`'s difficulty after ``share`` of a training; see ``curriculum`` of `train`."""
    return max(min(1.0, share / curriculum), 1e-3) if curriculum else 1.0


def train_mtp(
    dense: DenseModel,
    task: Task,
    mtp: FilledMtpTraining,
    batch: int,
    seq_len: int,
    *,
    seed: int = 0,
    budget_s: float | None = None,
    progress: Callable[[int, float], None] | None = None,
    state: TrainingState | None = None,
    stop: Callable[[], bool] | None = None,
) -> Generator[None, None, Steps]:
    """Trains the MTP layer of a model whose backbone is finished and stays as it is, step by step.

    Its drafts imitate the backbone: a draft is accepted if the backbone chooses the same token. See `draft_losses`.
    Weights are quantised as the checkpoint stores them, and entries selected, from the first step on.

    Args:
        mtp: with no value None, see `MtpTraining.filled`.
        seed, budget_s, progress, state, stop: see `train`.
    """
    step = MtpStep(dense, batch, seq_len, mtp.weight_decay, mtp.depth, mtp.greedy_share)

    def run(done: int, share: float, rate: float) -> torch.Tensor:
        return step.run(task.batch(batch, seq_len, generator_of(MTP_SEED + seed, done)), rate)

    return (yield from run_steps(run, mtp.steps, mtp.lr, budget_s, progress, kept(state, "mtp", step), stop))


class Paused(Exception):
    """The training was stopped on request; its state is written if it keeps one."""


@contextmanager
def deterministic_ops(enabled: bool, device: torch.device) -> Iterator[None]:
    """With ``enabled``, every operation in this context has one result, on a GPU too.

    There `torch.use_deterministic_algorithms` replaces sums by atomic additions: gradients of gathers, of indexing and
    of `index_select`. cuBLAS keeps a workspace per stream, which ``CUBLAS_WORKSPACE_CONFIG`` must configure before the
    first matrix product of the process. An operation without a deterministic form raises a RuntimeError that names it.
    """
    if not enabled or device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES)
    memory: Any = torch.utils.deterministic  # its setting is a property of the module, which no checker sees
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


class Kept(NamedTuple):
    """Where a stage of a training begins, and its state's `TrainingState.save` with (steps, ended, now)."""

    start: Steps = Steps(0, [], 0.0)
    save: Callable[[Steps, bool, bool], None] | None = None


def kept(state: TrainingState | None, stage: str, step: TrainingStep) -> Kept:
    """The stage as ``state`` has it; from its beginning, and not kept, without one."""
    if state is None:
        return Kept()
    start = state.restore(stage, step)
    return Kept(start, lambda steps, last, now: state.save(stage, step, steps, last=last, now=now))


def run_steps(
    run: Callable[[int, float, float], torch.Tensor],
    steps: int,
    lr: float,
    budget_s: float | None,
    progress: Callable[[int, float], None] | None,
    kept: Kept,
    stop: Callable[[], bool] | None,
) -> Generator[None, None, Steps]:
    """Calls ``run(steps done, share of the training that is done, learning rate)``, which returns the loss, in turn.

    Raises:
        ValueError: the loss is not finite.
        Paused: ``stop`` returned True.
    """
    losses, done, start = [*kept.start.losses], kept.start.done, time.perf_counter()

    def seconds() -> float:
        return kept.start.seconds + seconds_since(start)

    share = max(done / steps, kept.start.seconds / budget_s if budget_s else 0.0)
    while done < steps and share < 1.0:
        loss = run(done, share, lr * min(1.0, (share + 1 / steps) / WARMUP) * (1.0 - share))
        done += 1
        if done % REPORT_EVERY == 0 or done == steps:
            values = loss.flatten().tolist()
            losses.append((done, *values))
            for value in values:
                if not math.isfinite(value):
                    raise ValueError(f"the loss is {value} after {done} steps: lower the learning rate")
            if progress is not None:
                progress(done, sum(values) / len(values))
        share = max(done / steps, seconds() / budget_s if budget_s else 0.0)
        ended, stopped = share >= 1.0, stop is not None and stop()
        if kept.save is not None:
            kept.save(Steps(done, losses, seconds()), ended, stopped)
        if stopped and not ended:
            raise Paused(f"stopped after {done} of {steps} steps")
        yield
    return Steps(done, losses, seconds())


def served_weights(model: Backbone, config: AnyConfig) -> dict[str, torch.Tensor]:
    """Parameters by name as a runner loads them from a checkpoint."""
    return TrainedSource(model, config).rounded_parameters()


@torch.no_grad()
def evaluate(
    dense: DenseModel,
    config: TrainableConfig,
    task: Task,
    batches: int,
    batch: int,
    seq_len: int,
    split: str = "test",
    depth: int = 3,
) -> dict[str, float]:
    """``loss`` (nats per counted token) and ``accuracy`` of a model as it will be stored and run.

    With an MTP layer also ``mtp_loss``, the divergence of ``depth`` drafts from the backbone's distribution (nats, mean
    of the drafts), and ``acceptance_1``, ``acceptance_2``, ...: how often that draft equals the backbone's greedy
    token, where all drafts before it did. The next input is always the token of the text.
    """
    device = dense.model.embed.weight.device
    weights = served_weights(dense.model, config)
    drafting = DraftModel(dense)
    total = torch.zeros(3, dtype=torch.float64, device=device)
    divergence = torch.zeros((), dtype=torch.float64, device=device)
    accepted = torch.zeros(depth, 2, dtype=torch.float64, device=device)
    for number in range(batches):
        drawn = task.batch(batch, seq_len, generator_of(EVALUATION_SEED, number), split)
        tokens, mask, expected = (part.to(device) for part in drawn[:3])
        if config.mtp_layers:
            names = {f"dense.model.{name}": value for name, value in weights.items()}
            drafts = torch.func.functional_call(drafting, names, (tokens[:, :-1], depth))
            logits = drafts.backbone
            divergence += draft_losses(drafts, mask[:, 2:], 0.0)[1]
            accepted += count_accepted(drafts, mask[:, 2:])
        else:
            names = {f"model.{name}": value for name, value in weights.items()}
            logits = torch.func.functional_call(dense, names, (tokens[:, :-1],)).logits
        targets, counted = expected[:, 1:], mask[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        right = logits.argmax(-1) == targets
        total += torch.stack([loss[counted.flatten()].sum(), right[counted].sum(), counted.sum()]).double()
    loss, right, count = total.tolist()
    metrics = {"loss": loss / count, "accuracy": right / count}
    if config.mtp_layers:
        metrics["mtp_loss"] = divergence.item() / batches
        for draft, (right, tried) in enumerate(accepted.tolist(), 1):
            metrics[f"acceptance_{draft}"] = right / max(tried, 1.0)
    return metrics
