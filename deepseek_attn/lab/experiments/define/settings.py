"""Settings of an experiment: one dataclass per section of its JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from deepseek_attn.config.fields import MAX_INTEGER, FieldReader
from deepseek_attn.config.model import AnyConfig, ModelConfig, preset_names
from deepseek_attn.config.numerics import INDEX_KEYS, PRESETS, Numerics, numerics_for
from deepseek_attn.data import SMALL_CHECKPOINT
from deepseek_attn.lab.experiments.define.sizes import SIZES, sized_model

MAX_LENGTHS = 100  # number of measured contexts, or other lengths
MAX_PATH, MAX_FILE_NAME = 4000, 255  # limits of file systems: characters, and bytes of each part
SYNTHETIC = ("vocab_size", "gap", "symbols")
TASK_OPTIONS = {
    "text": ("characters",),
    "recall": (*SYNTHETIC, "pairs", "questions"),
    "needle": SYNTHETIC,
    "copy": (*SYNTHETIC, "length"),
    "variables": (*SYNTHETIC, "chains", "hops"),
    "common_words": (*SYNTHETIC, "common", "often", "seldom"),
    "frequent_words": (*SYNTHETIC, "words"),
}
TASKS = tuple(TASK_OPTIONS)
TRAINING_KEYS = ("steps", "batch", "seq_len", "lr", "weight_decay", "curriculum", "eval_batches")
RUN_KEYS = ("task", "size", "seeds", "variants")
LENGTHS = (1, 2, 4, 8)
LM_EVAL = "pip install 'deepseek-attn[lm-eval]'"


@dataclass(frozen=True)
class CostSettings:
    """Bytes, FLOPs and layer times of every variant.

    Attributes:
        name, model: whose shape is counted and timed. Schedules are patterns, so that it may be larger than the base.
        numerics: of the caches and of the timed layers.
        contexts: tokens per sequence. Lengths whose caches do not fit the device are counted, not timed.
        time_up_to: the longest context that is timed; 0 times nothing.
        batch: sequences of a timed decode step; prefill: new tokens of a timed prefill step of one sequence.
        repeats: runs of each, of which the median counts.
    """

    name: str
    model: ModelConfig
    numerics: Numerics
    contexts: tuple[int, ...]
    time_up_to: int
    batch: int
    prefill: int
    repeats: int

    @property
    def timed(self) -> tuple[int, ...]:
        """Contexts that are timed where they fit."""
        return tuple(context for context in self.contexts if context <= self.time_up_to)


@dataclass(frozen=True)
class ModelTimeSettings:
    """Times of whole steps of the base model: ``batch`` decodes, and a prefill of ``prefill`` new tokens."""

    contexts: tuple[int, ...]
    batch: int
    prefill: int
    repeats: int


@dataclass(frozen=True)
class TaskSettings:
    """Models that are trained on one task, and their training.

    Attributes:
        task: of `TASKS`; options: its options, such as ``gap``.
        steps, batch, seq_len, lr, weight_decay, curriculum: see `deepseek_attn.training.train`.
        eval_batches: batches of the held-out split that quality is measured on.
        size: a name of `SIZES` for the models; None: the experiment's base.
        seeds: of these models; None: all of the experiment.
        variants: names of the variants that are trained; None: all.
    """

    task: str
    options: dict[str, Any]
    steps: int
    batch: int
    seq_len: int
    lr: float
    weight_decay: float
    curriculum: float
    eval_batches: int
    size: str | None
    seeds: tuple[int, ...] | None
    variants: tuple[str, ...] | None

    @property
    def training(self) -> dict[str, Any]:
        """Settings that change a result, besides variant, seed and base."""
        chosen = ("eval_batches", "size", "seeds", "variants")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in chosen}


@dataclass(frozen=True)
class TrainSettings:
    """Training the base from scratch under every variant.

    Attributes:
        tasks: by a label for the report, in the order in which they run.
        text: a text file; None: the text that comes with the library.
        lengths: multiples of the training's ``seq_len`` at which models are evaluated.
        lanes: models that one process trains at the same time on a GPU, each on a stream of its own.
        deterministic: one seed gives one result on a GPU too.
        together: the seeds of a variant that are left to do are trained as one model on a GPU, as far as they fit the
            lanes; see `deepseek_attn.training`'s `SeedsStep`.
    """

    tasks: dict[str, TaskSettings]
    text: str | None
    lengths: tuple[int, ...]
    lanes: int
    deterministic: bool
    together: bool


@dataclass(frozen=True)
class QualitySettings:
    """More measures of models that were trained on a text.

    Attributes:
        lm_eval: tasks of lm-evaluation-harness; limit: documents of each, None for all.
        include_path: a folder with task files of one's own; None: the harness's tasks alone.
    """

    lm_eval: tuple[str, ...]
    limit: int | None
    include_path: str | None


@dataclass(frozen=True)
class CheckpointSettings:
    """Quality of a loaded checkpoint whose schedule is changed without training.

    Attributes:
        model: a checkpoint directory, by default the library's checkpoint; or a preset for random weights.
        text: a text file; None: the part of the library's sample text that no training reads. Tokenised by the
            checkpoint's tokenizer.
        max_tokens: how much of the text.
        seq_len: length of the sequences that the text is split into.
        layers: how many of the model's first layers are computed, 0 for all. The norm and the head follow the last one.
        layers_at_once: how many of them are in memory at a time, 0 for all; hidden states between them are in files.
    """

    model: str
    text: str | None
    max_tokens: int
    seq_len: int
    layers: int = 0
    layers_at_once: int = 0

    def read_config(self) -> AnyConfig:
        """The checkpoint's config, of any family.

        Raises:
            ValueError: the model is neither a directory nor a preset, or its config is wrong.
        """
        if not Path(self.model).is_dir() and self.model not in preset_names():
            raise ValueError(
                f"checkpoint.model: {self.model!r} is neither a directory nor a preset ({', '.join(preset_names())})"
            )
        return ModelConfig.from_pretrained(self.model)


def read_sections(reader: FieldReader, folder: Path) -> dict[str, Any]:
    """The sections of an experiment by name; None for absent sections. Problems go to ``reader``."""
    parsers = {
        **{"cost": _cost, "model_time": _model_time, "train": _train, "quality": _quality},
        **{"checkpoint": _checkpoint},
    }
    found = {}
    for name, parse in parsers.items():
        raw = reader.mapping(name)
        section = None if raw is None else _Section(reader, name, raw, folder)
        found[name] = section and parse(section)
        if section:
            section.finish()
    return found


class _Section:
    """Typed reads of one section; keys that no read names are problems."""

    def __init__(self, reader: FieldReader, name: str, raw: Mapping[str, Any], folder: Path):
        self.reader, self.name, self.raw, self.folder, self.read_keys = reader, name, raw, folder, []

    def value(self, key: str, default: Any = None, required: bool = False) -> Any:
        self.read_keys.append(key)
        if required and self.raw.get(key) is None:
            self.reader.missing(f"{self.name}.{key}")
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least ``minimum``; 0 stands for a wrong value, whose problem the reader has."""
        value = self.value(key, default, required=default is None)
        return self.reader.as_integer(f"{self.name}.{key}", value, minimum) or 0

    def integers(self, key: str, required: bool = True) -> tuple[int, ...]:
        values = self.value(key, [], required)
        if not isinstance(values, list) or any(type(v) is not int or not 0 < v <= MAX_INTEGER for v in values):
            self.reader.problem(f"{self.name}.{key} is {values!r}: expected a list of integers from 1 to {MAX_INTEGER}")
            return ()
        if len(values) > MAX_LENGTHS or (required and not values):
            self.reader.problem(f"{self.name}.{key} has {len(values)} values: supported are 1 to {MAX_LENGTHS}")
            return ()
        return tuple(sorted(set(values)))

    def path(self, key: str) -> str | None:
        """A path, relative to the experiment's folder where that exists."""
        value = self.value(key)
        if value is None:
            return None
        try:
            return find_file(self.folder, value)
        except ValueError as error:
            self.reader.problem(f"{self.name}.{key}: {error}")
            return None

    def finish(self) -> None:
        for key in sorted(set(self.raw) - set(self.read_keys)):
            self.reader.problem(f"unknown key {self.name}.{key}: there are {', '.join(self.read_keys)}")


def find_file(folder: Path, name: Any) -> str:
    """A path, relative to ``folder`` where that exists.

    Raises:
        ValueError: ``name`` is not the name of a file or model.
    """
    named = isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_PATH
    if not named or any(len(part.encode()) > MAX_FILE_NAME for part in Path(name).parts):
        raise ValueError(f"{name!r:.200} is not a path or name that a file can have")
    return str(folder / name) if os.path.lexists(folder / name) else name  # unlike `Path.exists`, takes any length


def read_model(folder: Path, name: Any) -> ModelConfig:
    """The config of a preset, of one of `SIZES`, or of a checkpoint by path or hub id; ValueError unless it is a V4."""
    if isinstance(name, str) and name in SIZES:
        return sized_model(name)
    model = ModelConfig.from_pretrained(find_file(folder, name))
    if not isinstance(model, ModelConfig):
        raise ValueError(f"{name} is {model.model_type}; schedules are DeepSeek-V4's")
    return model


def _cost(section: _Section) -> CostSettings | None:
    name, contexts = section.value("model", "v4_flash"), section.integers("contexts")
    preset = section.reader.as_choice("cost.numerics", section.value("numerics", "serving"), tuple(PRESETS))
    index_keys = section.reader.as_choice("cost.index_keys", section.value("index_keys"), INDEX_KEYS)
    time_up_to = section.integer("time_up_to", max(contexts, default=1), minimum=0)
    sizes = section.integer("batch", 8), section.integer("prefill", 1024), section.integer("repeats", 10)
    try:
        model = read_model(section.folder, name)
        limit = max([model.max_position_embeddings, *contexts])
        model = model.replace(max_position_embeddings=limit)
        numerics = numerics_for(model, preset or "serving", index_keys)
    except ValueError as error:
        section.reader.problem(f"cost.model: {error}")
        return None
    return CostSettings(str(name), model, numerics, contexts, time_up_to, *sizes)


def _model_time(section: _Section) -> ModelTimeSettings:
    contexts = section.integers("contexts")
    return ModelTimeSettings(
        contexts, section.integer("batch", 8), section.integer("prefill", 256), section.integer("repeats", 10)
    )


def _train(section: _Section) -> TrainSettings:
    reader, tasks = section.reader, section.value("tasks", required=True) or {}
    if not isinstance(tasks, Mapping) or not tasks:
        reader.problem(f"train.tasks is {tasks!r}: expected an object from task to its options")
        tasks = {}
    shared = {key: section.value(key) for key in TRAINING_KEYS}
    parsed = {str(name): _task(section, str(name), options, shared) for name, options in tasks.items()}
    found = {name: task for name, task in parsed.items() if task is not None}
    lengths = section.integers("lengths", required=False) or LENGTHS
    chosen = {"deterministic": section.value("deterministic", True), "together": section.value("together", False)}
    for key, value in chosen.items():
        if not isinstance(value, bool):
            reader.problem(f"train.{key} is {value!r}: expected true or false")
    return TrainSettings(
        found, section.path("text"), tuple(sorted({1, *lengths})), section.integer("lanes", 1),
        bool(chosen["deterministic"]), bool(chosen["together"]),
    )  # fmt: skip


def _task(section: _Section, name: str, options: Any, shared: Mapping[str, Any]) -> TaskSettings | None:
    """One task: its sizes, by default the section's, and its options."""
    reader, label = section.reader, f"train.tasks.{name}"
    kind = options.get("task", name) if isinstance(options, Mapping) else None
    if kind not in TASKS or not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name):
        reader.problem(
            f"{label} is {options!r}: expected a label without spaces and an object of options; `task`, or else the "
            f"label, is one of {', '.join(TASKS)}"
        )
        return None
    defaults = {"lr": 1e-3, "weight_decay": 0.1, "curriculum": 0.0, "eval_batches": 4}
    values = {key: options.get(key, shared[key]) for key in TRAINING_KEYS}
    values |= {key: default for key, default in defaults.items() if values[key] is None}
    for key in ("steps", "batch", "seq_len", "eval_batches"):
        if values[key] is None:
            reader.missing(f"{label}.{key} (or train.{key})")
        reader.as_integer(f"{label}.{key}", values[key])
    reader.as_number(f"{label}.lr", values["lr"])
    for key, most in (("weight_decay", 1e6), ("curriculum", 1.0)):
        if type(values[key]) not in (int, float) or not 0 <= values[key] <= most:
            reader.problem(f"{label}.{key} is {values[key]!r}: expected a number from 0 to {most:g}")
    task_options = {key: value for key, value in options.items() if key not in (*TRAINING_KEYS, *RUN_KEYS)}
    for key, value in task_options.items():
        if key not in TASK_OPTIONS[kind]:
            known = (*RUN_KEYS, *TRAINING_KEYS, *TASK_OPTIONS[kind])
            reader.problem(f"unknown key {label}.{key}: there are {', '.join(known)}")
        reader.as_integer(f"{label}.{key}", value, 0)
    size = reader.as_choice(f"{label}.size", options.get("size"), tuple(SIZES))
    lists = {}
    for key, kind_of in (("seeds", int), ("variants", str)):
        value = options.get(key)
        if value is not None and not (isinstance(value, list) and value and all(type(x) is kind_of for x in value)):
            reader.problem(f"{label}.{key} is {value!r}: expected a list of {key}")
            value = None
        lists[key] = None if value is None else tuple(value)
    return TaskSettings(kind, task_options, **values, size=size, **lists)


def _quality(section: _Section) -> QualitySettings:
    tasks, limit = section.value("lm_eval", required=True) or [], section.value("limit")
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) and task for task in tasks):
        section.reader.problem(f"quality.lm_eval is {tasks!r}: expected a list of tasks of lm-evaluation-harness")
        tasks = []
    if limit is not None:
        section.reader.as_integer("quality.limit", limit)
    return QualitySettings(tuple(tasks), limit, section.path("include_path"))


def _checkpoint(section: _Section) -> CheckpointSettings:
    model, text = section.path("model"), section.path("text")
    model = model or str(SMALL_CHECKPOINT)
    tokens, length = section.integer("max_tokens", 2048), section.integer("seq_len", 1024)
    layers = section.integer("layers", 0, minimum=0), section.integer("layers_at_once", 0, minimum=0)
    return CheckpointSettings(model, text, tokens, length, *layers)
