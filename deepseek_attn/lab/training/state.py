"""The state that an interrupted training resumes from: one safetensors file, removed at the end of the training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from deepseek_attn.utils.clock import seconds_since
from deepseek_attn.utils.files import check_replaceable, write_tensors

if TYPE_CHECKING:
    from deepseek_attn.lab.training.step import TrainingStep

MADE_BY = "deepseek-attn train"
"""The only key of the file's metadata: the header begins with it, so the file is known to be replaceable."""
SAVE_SECONDS = 60.0  # between two states


@dataclass(frozen=True)
class Steps:
    """The record of some optimizer steps.

    Attributes:
        losses: (step, loss of that step's batch), every 20 steps and at the end; the loss of each seed, where several
            are trained together.
        seconds: without initialisation and evaluation.
    """

    done: int
    losses: list[tuple[int, *tuple[float, ...]]]
    seconds: float


class TrainingState:
    """The file of a training's state. On a CPU, a resumed training gives the same bits as an uninterrupted one.

    Args:
        settings: every option that the training depends on, as JSON values.
        resume: go on from the file if it exists; without it the file must not exist.

    Raises:
        ValueError: the file is there and ``resume`` is off, or it is not the state of a training with these settings.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], *, resume: bool = False):
        self.path, self.settings = Path(path), json.dumps(settings, sort_keys=True)
        self.saved = time.perf_counter()
        self._tensors: dict[str, torch.Tensor] = {}
        check_replaceable(self.path, MADE_BY)
        if os.path.lexists(self.path):
            if not resume:
                found = f"{str(self.path)!r} is the state of an interrupted training"
                raise ValueError(f"{found}: go on with it (--resume), or remove it")
            self._read(settings)

    def _read(self, settings: Mapping[str, Any]) -> None:
        try:
            with safe_open(self.path, framework="pt") as file:
                made_of = json.loads(file.metadata()[MADE_BY])
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(self.path)!r} cannot be read ({error}): remove it and train anew") from error
        for name, value in json.loads(json.dumps(settings)).items():
            if made_of.get(name) != value:
                raise ValueError(
                    f"{str(self.path)!r} is of a training with {name} {made_of.get(name)!r:.80}, not {value!r:.80}: "
                    "give the same options, or remove it and train anew"
                )

    def restore(self, stage: str, step: TrainingStep) -> Steps:
        """Restores the weights and the optimizer of a stage; returns the number of steps done.

        Batches follow from the number of steps (`task.generator_of`), so that the data needs no state of its own.
        """
        own = f"{stage}."
        if f"{own}progress" not in self._tensors:
            return Steps(0, [], 0.0)
        model = {n.removeprefix("model."): t for n, t in self._tensors.items() if n.startswith("model.")}
        step.load(model)
        optimizer = step.optimizer.state_dict()
        for name, tensor in self._tensors.items():
            if name.startswith(f"{own}optimizer."):
                _, _, number, key = name.split(".")
                optimizer["state"].setdefault(int(number), {})[key] = tensor
        step.optimizer.load_state_dict(optimizer)
        done, seconds = self._tensors[f"{own}progress"].tolist()
        losses = [(int(number), *loss) for number, *loss in self._tensors[f"{own}losses"].tolist()]
        return Steps(int(done), losses, seconds)

    def save(self, stage: str, step: TrainingStep, steps: Steps, *, last: bool, now: bool = False) -> None:
        """Writes the state if the last one is old enough, or ``now``.

        Args:
            last: the stage ends, and its optimizer is not kept.
        """
        if not last and not now and seconds_since(self.saved) < SAVE_SECONDS:
            return
        own = f"{stage}."
        tensors = {n: t for n, t in self._tensors.items() if not n.startswith(("model.", own))}
        tensors |= {f"model.{name}": value for name, value in step.tensors().items()}
        for number, values in ({} if last else step.optimizer.state_dict()["state"]).items():
            tensors |= {f"{own}optimizer.{number}.{key}": value for key, value in values.items()}
        tensors |= {
            f"{own}progress": torch.tensor([steps.done, steps.seconds], dtype=torch.float64, device="cpu"),
            f"{own}losses": torch.tensor(steps.losses, dtype=torch.float64, device="cpu"),
        }
        self._tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        write_tensors(self.path, self._tensors, {MADE_BY: self.settings}, parents=True)
        self.saved = time.perf_counter()

    def remove(self) -> None:
        """Removes the file; called when the checkpoint is complete."""
        self.path.unlink(missing_ok=True)
