"""Settings of a training, and their checks before anything is read or allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.lab.training.task import Task
from deepseek_attn.lab.training.weights import TrainableConfig, check_trainable

DENSE_SHARE = 0.5  # share that reads all entries with unquantised weights, see `train`
MAX_RATE = 1e6  # of learning rate and weight decay: an optimizer's float32 steps are finite below


@dataclass(frozen=True)
class MtpTraining:
    """Settings of the MTP layer's training, behind the finished backbone.

    Attributes:
        steps: optimizer steps; None: the backbone's number.
        lr, weight_decay: peak learning rate, and weight decay of the matrices; None: the backbone's.
        depth: drafts that are trained, one after the other; deeper ones work too, less well.
        greedy_share: weight of hitting the backbone's likeliest token, against matching its distribution.
    """

    steps: int | None = None
    lr: float | None = None
    weight_decay: float | None = None
    depth: int = 3
    greedy_share: float = 0.5

    def filled(self, steps: int, lr: float, weight_decay: float) -> FilledMtpTraining:
        """Replaces None by the backbone's values."""
        return FilledMtpTraining(
            steps if self.steps is None else self.steps,
            lr if self.lr is None else self.lr,
            weight_decay if self.weight_decay is None else self.weight_decay,
            self.depth,
            self.greedy_share,
        )


class FilledMtpTraining(MtpTraining):
    """`MtpTraining` without None, as `MtpTraining.filled` makes it."""

    steps: int
    lr: float
    weight_decay: float


def check(
    config: AnyConfig,
    steps: int,
    batch: int,
    seq_len: int,
    lr: float,
    weight_decay: float,
    budget_s: float | None = None,
    mtp: FilledMtpTraining | None = None,
    dense_share: float = DENSE_SHARE,
) -> TrainableConfig:
    """Checks everything that `train` can check without its task; returns the config.

    Raises:
        ValueError: listing the problems.
    """
    config = check_trainable(config)
    problems = []
    for name, value in (("steps", steps), ("batch", batch), ("seq_len", seq_len)):
        if value < 1:
            problems.append(f"{name} is {value}: at least 1 is needed")
    if seq_len > config.max_position_embeddings:
        problems.append(f"seq_len {seq_len} exceeds the model's {config.max_position_embeddings} positions")
    if not 0.0 <= dense_share <= 1.0:
        problems.append(f"dense_share is {dense_share}: it is between 0 and 1")
    if problems:
        raise ValueError("cannot train: " + "; ".join(problems))
    check_rates(lr, weight_decay, budget_s)
    if config.mtp_layers and mtp is not None:
        check_mtp(mtp, seq_len)
    return config


def check_task(config: TrainableConfig, task: Task, seq_len: int) -> None:
    """ValueError for a task whose tokens the config lacks, or that is too short for a sequence."""
    if task.vocab_size > config.vocab_size:
        raise ValueError(
            f"cannot train: task {task.name} has {task.vocab_size} tokens, vocab_size is {config.vocab_size}"
        )
    task.batch(1, seq_len, torch.Generator(), "test")  # a split that is too short must show before the training


def check_rates(lr: float, weight_decay: float, budget_s: float | None, prefix: str = "") -> None:
    """ValueError, with all problems, for values that an optimizer cannot use; ``prefix`` is of their names."""
    problems = []
    if not 0.0 < lr < MAX_RATE:
        problems.append(f"{prefix}lr is {lr}: a number above 0 and below {MAX_RATE:g} is needed")
    if not 0.0 <= weight_decay < MAX_RATE:
        problems.append(
            f"{prefix}weight_decay is {weight_decay}: a number of at least 0 and below {MAX_RATE:g} is needed"
        )
    if budget_s is not None and not budget_s > 0.0:
        problems.append(f"budget_s is {budget_s}: more than 0 seconds are needed")
    if problems:
        raise ValueError("cannot train: " + "; ".join(problems))


def check_mtp(mtp: FilledMtpTraining, seq_len: int) -> None:
    """ValueError, with all problems, for values that the MTP layer cannot be trained with."""
    problems = []
    if mtp.steps < 1:
        problems.append(
            f"mtp.steps is {mtp.steps}: at least 1 is needed; a config with num_nextn_predict_layers=0 has no MTP layer"
        )
    if not 1 <= mtp.depth < seq_len:
        problems.append(f"mtp.depth is {mtp.depth}: at least 1 is needed, and less than seq_len={seq_len}")
    if not 0.0 <= mtp.greedy_share <= 1.0:
        problems.append(f"mtp.greedy_share is {mtp.greedy_share}: it is between 0 and 1")
    if problems:
        raise ValueError("cannot train: " + "; ".join(problems))
    check_rates(mtp.lr, mtp.weight_decay, None, "mtp.")
