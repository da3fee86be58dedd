"""An experiment as a JSON file: a base model, variants, and their measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from deepseek_attn.cache.layout import check_records
from deepseek_attn.config.fields import MAX_INTEGER, FieldReader
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import PRESETS, get_numerics
from deepseek_attn.lab.experiments.define.settings import (
    CheckpointSettings,
    CostSettings,
    ModelTimeSettings,
    TrainSettings,
    read_model,
    read_sections,
)
from deepseek_attn.lab.experiments.define.variant import KV_RECORDS, ModelVariant, default_name
from deepseek_attn.utils.json_files import read_json

KEYS = (
    *("name", "title", "base", "base_changes", "variants", "grid", "seeds", "device", "jobs", "limit_s"),
    *("cost", "model_time", "train", "checkpoint"),
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
        name: file name of the results; title: heading of the report.
        base: the model that variants change.
        seeds: of weights and data, for everything that is trained.
        device: None: the first GPU if there is one, else the CPU.
        jobs: worker processes that train at the same time; timings always run alone.
        limit_s: seconds after which a piece of work is given up; None never.
    """

    name: str
    title: str
    base: ModelConfig
    variants: tuple[ModelVariant, ...]
    seeds: tuple[int, ...]
    device: str | None
    jobs: int
    limit_s: float | None
    cost: CostSettings | None
    model_time: ModelTimeSettings | None
    train: TrainSettings | None
    checkpoint: CheckpointSettings | None

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
    base = _read_base(reader, folder)
    variants = _read_variants(reader)
    sections = read_sections(reader, folder)
    for variant in variants:
        _check_fit(reader, variant, base, sections["cost"], sections["model_time"] is not None)
    seeds = reader.as_list("seeds", raw.get("seeds", [0])) or []
    if not seeds or not all(type(seed) is int and 0 <= seed <= MAX_INTEGER for seed in seeds) or _repeat(seeds):
        reader.problem(f"seeds is {raw.get('seeds')!r}: expected a list of different integers from 0 to {MAX_INTEGER}")
    name = _read_name(reader, raw.get("name", Path(origin).stem))
    title = read_label(reader, "title", raw.get("title", name))
    jobs = reader.integer("jobs", 1)
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
    return Experiment(name, title, base, tuple(variants), tuple(seeds), device, jobs, limit_s, **sections)


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


def _read_base(reader: FieldReader, folder: Path) -> ModelConfig | None:
    name, changes = reader.value("base"), reader.mapping("base_changes") or {}
    if name is None:
        return None
    try:
        base = read_model(folder, name)
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
    if not isinstance(raw.get("schedule"), str):
        reader.problem(f"{label}.schedule is {raw.get('schedule')!r}: expected a pattern such as '0,0,(4,128)*'")
    for key in ("overlap", "indexer"):
        value = raw.get(key)
        by_ratio = isinstance(value, Mapping) and all(isinstance(item, bool) for item in value.values())
        if value is not None and not isinstance(value, bool) and not by_ratio:
            reader.problem(f"{label}.{key} is {value!r}: expected true, false or an object from ratio to bool")
    for key in ("index_topk", "sliding_window"):
        reader.as_integer(f"{label}.{key}", raw.get(key))
    reader.as_choice(f"{label}.kv_record", raw.get("kv_record"), KV_RECORDS)
    reader.as_choice(f"{label}.numerics", raw.get("numerics"), tuple(PRESETS))
    if len(reader.problems) == before:
        name = read_label(reader, f"{label}.name", default_name(raw) if raw.get("name") is None else raw["name"])
        return None if name is None else ModelVariant(**{**raw, "name": name})
    return None


def _check_fit(
    reader: FieldReader, variant: ModelVariant, base: ModelConfig | None, cost: CostSettings | None, base_runs: bool
) -> None:
    """Every variant must fit the base and, where costs are counted for another model, that one.

    Args:
        base_runs: the base is timed, so that its caches must support the variant's record too.
    """
    models = {"base": (base, get_numerics("exact") if base_runs else None)}
    if cost is not None:
        models["cost.model"] = (cost.model, cost.numerics)
    for where, (model, numerics) in models.items():
        if model is None:
            continue
        try:
            config = variant.config(model)
            if numerics is not None:
                check_records(config, variant.numerics_from(numerics))
        except ValueError as error:
            reader.problem(f"variant {variant.name!r} does not fit {where}: {error}")
