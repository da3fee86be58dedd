"""An experiment as a JSON file: a base model, variants, and their measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from importlib.util import find_spec
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from deepseek_attn.cache.layout import check_records
from deepseek_attn.config.fields import MAX_INTEGER, FieldReader
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import PRESETS, Numerics, get_numerics
from deepseek_attn.lab.experiments.define.settings import (
    LM_EVAL,
    CheckpointSettings,
    CostSettings,
    ModelTimeSettings,
    QualitySettings,
    TaskSettings,
    TrainSettings,
    read_model,
    read_sections,
)
from deepseek_attn.lab.experiments.define.sizes import sized_model
from deepseek_attn.lab.experiments.define.variant import KV_RECORDS, ModelVariant, default_name, variant_problems
from deepseek_attn.utils.json_files import read_json

KEYS = (
    *("name", "title", "question", "base", "base_changes", "variants", "grid", "seeds", "device", "jobs", "limit_s"),
    *("cost", "model_time", "train", "quality", "checkpoint", "ablate"),
)
MAX_VARIANTS = 10_000
MAX_RUNS = 100_000  # trainings
MAX_LABEL = 500  # characters of a name or title
MAX_FILE_NAME = 150  # bytes of an experiment's name: file systems take 255
VARIANT_KEYS = tuple(field.name for field in fields(ModelVariant))


@dataclass(frozen=True)
class Experiment:
    """A checked experiment. Sections that are None are not measured.

    Attributes:
        name: file name of the results; title: heading of the report; question: the question it answers.
        origin: the file, or the name of a shipped experiment.
        base: the model that variants change, after the ``base_changes``; the checkpoint, if nothing else is measured.
        seeds: of weights and data, for everything that is trained.
        device: None: the first GPU if there is one, else the CPU.
        jobs: worker processes that train at the same time; timings always run alone.
        limit_s: seconds after which a unit of work has failed; None: no limit.
    """

    name: str
    title: str
    question: str | None
    origin: str
    base: AnyConfig
    base_changes: Mapping[str, Any]
    variants: tuple[ModelVariant, ...]
    seeds: tuple[int, ...]
    device: str | None
    jobs: int
    limit_s: float | None
    cost: CostSettings | None
    model_time: ModelTimeSettings | None
    train: TrainSettings | None
    quality: QualitySettings | None
    checkpoint: CheckpointSettings | None

    def base_of(self, task: TaskSettings) -> ModelConfig:
        """The model trained on a task, before variants; ``base_changes`` also apply to other sizes."""
        if task.size is not None:
            return sized_model(task.size).replace(**self.base_changes)
        return self.v4_base

    @property
    def v4_base(self) -> ModelConfig:
        """The base of everything that is trained or timed."""
        assert isinstance(self.base, ModelConfig)  # checked when the experiment was read
        return self.base

    def variant(self, name: str) -> ModelVariant:
        return next(variant for variant in self.variants if variant.name == name)


def shipped_experiments() -> list[str]:
    """Names of the experiments that come with the library."""
    folder = resources.files("deepseek_attn.configs").joinpath("experiments")
    return sorted(entry.name[: -len(".json")] for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_experiment(path: str | Path) -> Experiment:
    """Reads an experiment from a JSON file, or a shipped one by name such as ``"smoke"``.

    Relative paths in the file are relative to its folder.

    Raises:
        ValueError: no such file, broken JSON, or one error that lists everything that is wrong with the experiment.
    """
    file = Path(path)
    if not file.is_file() and str(path) in shipped_experiments():
        file = Path(str(resources.files("deepseek_attn.configs").joinpath("experiments", f"{path}.json")))
    elif not file.is_file():
        raise ValueError(
            f"{str(path)!r} is neither a file nor a shipped experiment ({', '.join(shipped_experiments())})"
        )
    return read_experiment(read_json(file, f"experiment {path}"), str(path), file.parent)


def read_experiment(raw: Any, origin: str, folder: Path) -> Experiment:
    """Checks a decoded experiment.

    Args:
        origin: names the experiment in errors; folder: where relative paths start.

    Raises:
        ValueError: one error that lists every problem.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"invalid config ({origin}): expected a JSON object, got {type(raw).__name__}")
    reader = FieldReader(raw)
    for key in sorted(set(raw) - set(KEYS)):
        reader.problem(f"unknown key {key!r}: there are {', '.join(KEYS)}")
    sections = read_sections(reader, folder)
    base = _read_base(reader, folder, sections)
    variants = _read_variants(reader)
    variants += _read_ablations(reader, variants, base)
    for variant in variants:
        _check_fit(reader, variant, base, sections["cost"], sections["model_time"] is not None)
    seeds = reader.as_list("seeds", raw.get("seeds", [0])) or []
    if not seeds or not all(type(seed) is int and 0 <= seed <= MAX_INTEGER for seed in seeds) or _repeat(seeds):
        reader.problem(f"seeds is {raw.get('seeds')!r}: expected a list of different integers from 0 to {MAX_INTEGER}")
    name = _read_name(reader, raw.get("name", Path(origin).stem))
    title = read_label(reader, "title", raw.get("title", name))
    question, changes = raw.get("question"), reader.mapping("base_changes") or {}
    question = None if question is None else read_label(reader, "question", question)
    jobs = reader.integer("jobs", 1)
    if sections["train"] is not None:
        _check_train(reader, sections["train"], variants, seeds, base)
    if sections["quality"] is not None:
        _check_quality(reader, sections["train"])
    if sections["train"] and (runs := len(variants) * len(seeds) * len(sections["train"].tasks)) > MAX_RUNS:
        reader.problem(f"variants, seeds and train.tasks make {runs} runs: supported are {MAX_RUNS}")
    limit_s = reader.as_number("limit_s", raw.get("limit_s"))
    device = raw.get("device")
    if device is not None and not isinstance(device, str):
        reader.problem(f"device is {device!r}: expected a name such as cpu or cuda, or null")
    if not any(sections.values()):
        reader.problem("nothing to measure: at least one of cost, model_time, train, checkpoint is needed")
    reader.raise_if_problems(origin)
    assert base is not None
    assert jobs is not None
    assert name is not None
    assert title is not None
    return Experiment(
        name,
        title,
        question,
        Path(origin).name,
        base,
        changes,
        tuple(variants),
        tuple(seeds),
        device,
        jobs,
        limit_s,
        **sections,
    )


def _repeat(values: list[int]) -> bool:
    return len(set(values)) < len(values)


def _read_name(reader: FieldReader, value: Any) -> str | None:
    """The name of a folder in ``results``, which cannot lead anywhere else."""
    name = read_label(reader, "name", value)
    if name is not None and (name.startswith(".") or re.search(r'[/\\:*?"<>|]', name) or name != name.strip()):
        reader.problem(f"name is {name!r}: expected the plain name of a folder, without / and not beginning with a dot")
        return None
    if name is not None and len(name.encode()) > MAX_FILE_NAME:
        reader.problem(f"name is {name!r}: it has {len(name.encode())} bytes, supported are {MAX_FILE_NAME}")
        return None
    return name


def read_label(reader: FieldReader, label: str, value: Any) -> str | None:
    """A text that people read: one line, without control characters."""
    if isinstance(value, str) and value.strip() and value.isprintable() and len(value) <= MAX_LABEL:
        return value
    reader.problem(f"{label} is {value!r}: expected a text of 1 to {MAX_LABEL} printable characters")
    return None


def _read_base(reader: FieldReader, folder: Path, sections: Mapping[str, Any]) -> AnyConfig | None:
    """The base; of an experiment that measures a checkpoint alone, by default its config."""
    checkpoint, changes = sections["checkpoint"], reader.mapping("base_changes") or {}
    alone = checkpoint is not None and not any(sections[key] for key in ("cost", "model_time", "train", "quality"))
    name = reader.raw.get("base") if alone else reader.value("base")
    if name is None and not alone:
        return None
    try:
        if name is not None:
            base: AnyConfig = read_model(folder, name)
        else:
            assert checkpoint is not None
            base = checkpoint.read_config()
        return base.replace(**changes) if changes else base
    except (ValueError, TypeError) as error:
        reader.problem(f"base {name!r:.200}: {error}")
        return None


def _read_variants(reader: FieldReader) -> list[ModelVariant]:
    """The listed variants, then the product of the grid's lists."""
    listed = reader.as_list("variants", reader.raw.get("variants", [])) or []
    grid = reader.mapping("grid") or {}
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            reader.problem(f"grid.{key} is {values!r}: expected a list of values")
    axes = {key: values for key, values in grid.items() if isinstance(values, list) and values}
    if (count := prod(map(len, axes.values()))) > MAX_VARIANTS:
        reader.problem(f"grid has {count} cells: supported are {MAX_VARIANTS}")
        axes = {}
    cells = [dict(zip(axes, cell, strict=True)) for cell in product(*axes.values())] if axes else []
    if len(listed) + len(cells) > MAX_VARIANTS:
        reader.problem(f"there are {len(listed) + len(cells)} variants: supported are {MAX_VARIANTS}")
        return []
    variants = [_read_variant(reader, f"variants[{i}]", fields) for i, fields in enumerate(listed)]
    variants += [_read_variant(reader, f"grid[{i}]", cell) for i, cell in enumerate(cells)]
    found = [variant for variant in variants if variant is not None]
    if not listed and not cells:
        reader.problem("no variants: list some in `variants`, or give lists of values in `grid`")
    slugs: dict[str, str] = {}
    for variant in found:
        if variant.slug in slugs:
            reader.problem(f"variants {slugs[variant.slug]!r} and {variant.name!r} have the same name for a file")
        slugs[variant.slug] = variant.name
    return found


def _read_variant(reader: FieldReader, label: str, raw: Any) -> ModelVariant | None:
    if not isinstance(raw, Mapping):
        reader.problem(f"{label} is {raw!r}: expected an object")
        return None
    before = len(reader.problems)
    for key in sorted(set(raw) - set(VARIANT_KEYS)):
        reader.problem(f"{label}: unknown key {key!r}, there are {', '.join(VARIANT_KEYS)}")
    for problem in variant_problems(label, raw):
        reader.problem(problem)
    for key in ("index_topk", "sliding_window"):
        reader.as_integer(f"{label}.{key}", raw.get(key))
    reader.as_choice(f"{label}.kv_record", raw.get("kv_record"), KV_RECORDS)
    reader.as_choice(f"{label}.numerics", raw.get("numerics"), tuple(PRESETS))
    if len(reader.problems) == before:
        name = read_label(reader, f"{label}.name", default_name(raw) if raw.get("name") is None else raw["name"])
        return None if name is None else ModelVariant(**{**raw, "name": name})
    return None


def _read_ablations(reader: FieldReader, variants: list[ModelVariant], base: AnyConfig | None) -> list[ModelVariant]:
    """Single-layer ablations of the variant ``ablate.of``: each changes one layer and keeps all others.

    With ``ablate.indexer``, one variant per layer with an indexer, without it. For each of ``ablate.ratios``, one
    variant per compressed layer of another ratio.
    """
    raw = reader.mapping("ablate")
    if raw is None or not isinstance(base, ModelConfig):
        return []
    for key in sorted(set(raw) - {"of", "indexer", "ratios"}):
        reader.problem(f"unknown key ablate.{key}: there are of, indexer, ratios")
    of = next((variant for variant in variants if variant.name == raw.get("of")), None)
    ratios, indexer = raw.get("ratios", []), raw.get("indexer", False)
    if not isinstance(ratios, list) or not all(type(x) is int and x >= 0 for x in ratios) or type(indexer) is not bool:
        reader.problem(f"ablate is {raw!r}: expected a list of ratios, and indexer true or false")
        return []
    if of is None or of.layers is not None or of.v41 is not None:
        reader.problem(f"ablate.of is {raw.get('of')!r}: expected the name of a V4 variant without `layers`")
        return []
    try:
        specs = of.config(base).layers
    except ValueError:
        return []  # reported with the variant
    found = []
    for spec in specs:
        changes = [("no indexer", {"indexer": False})] if indexer and spec.has_indexer else []
        changes += [(f"ratio {ratio}", {"ratio": ratio}) for ratio in ratios if spec.ratio and ratio != spec.ratio]
        found += [
            replace(of, name=f"{of.name}; layer {spec.index} {what}", layers={str(spec.index): change})
            for what, change in changes
        ]
    return found


def _check_train(
    reader: FieldReader,
    train: TrainSettings,
    variants: list[ModelVariant],
    seeds: list[int],
    base: AnyConfig | None,
) -> None:
    """Tasks name variants and seeds of the experiment, and their longest sequences fit the model."""
    names = [variant.name for variant in variants]
    for label, task in train.tasks.items():
        if unknown := [name for name in task.variants or () if name not in names]:
            reader.problem(f"train.tasks.{label}.variants names {', '.join(unknown)}: there are {', '.join(names)}")
        if unknown := [str(seed) for seed in task.seeds or () if seed not in seeds]:
            reader.problem(f"train.tasks.{label}.seeds names {', '.join(unknown)}: seeds are {seeds}")
        model = base
        if task.size is not None:
            try:
                model = sized_model(task.size).replace(**(reader.mapping("base_changes") or {}))
            except (ValueError, TypeError) as error:
                reader.problem(f"train.tasks.{label}: base_changes do not fit size {task.size}: {error}")
                continue
        if model is None or type(task.seq_len) is not int:
            continue
        longest = task.seq_len * max(train.lengths)
        if longest > model.max_position_embeddings:
            reader.problem(
                f"train.tasks.{label}: sequences of {longest} tokens ({max(train.lengths)} times seq_len) exceed the "
                f"model's {model.max_position_embeddings} positions: give `lengths`, or a shorter seq_len"
            )
        if task.size is not None:
            for variant in variants:
                if task.variants is None or variant.name in task.variants:
                    _check_variant(reader, variant, f"train.tasks.{label}.size", model, None)


def _check_quality(reader: FieldReader, train: TrainSettings | None) -> None:
    if train is None or not any(task.task == "text" for task in train.tasks.values()):
        reader.problem("quality.lm_eval needs models that read texts: train.tasks has no task `text`")
    if find_spec("lm_eval") is None:
        reader.problem(f"quality.lm_eval: the package lm-eval is not installed: {LM_EVAL}")


def _check_fit(
    reader: FieldReader, variant: ModelVariant, base: AnyConfig | None, cost: CostSettings | None, base_runs: bool
) -> None:
    """Every variant must fit the base and, where costs are counted for another model, that one.

    Args:
        base_runs: the base is timed, so that its caches must support the variant's record too.
    """
    models = {"base": (base, get_numerics("exact") if base_runs else None)}
    if cost is not None:
        models["cost.model"] = (cost.model, cost.numerics)
    for where, (model, numerics) in models.items():
        if model is not None and base is not None and variant.counts_for(base, model):
            _check_variant(reader, variant, where, model, numerics)


def _check_variant(
    reader: FieldReader, variant: ModelVariant, where: str, model: AnyConfig, numerics: Numerics | None
) -> None:
    try:
        config = variant.config(model)
        if numerics is not None:
            check_records(config, variant.numerics_from(numerics))
    except ValueError as error:
        reader.problem(f"variant {variant.name!r} does not fit {where}: {error}")
