"""Records on disk: one JSON file per unit, complete or not there."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from deepseek_attn.lab.experiments.define.config import Experiment
from deepseek_attn.lab.experiments.define.results import UnitRecord, find_mistake
from deepseek_attn.lab.experiments.define.units import Unit
from deepseek_attn.utils.files import write_text
from deepseek_attn.utils.json_files import read_json
from deepseek_attn.utils.typed_json import find_problem

OWNER = "experiment.json"  # in a folder of results: whose they are
MADE_BY = "deepseek-attn experiment"  # the mark of everything that is written there
logger = logging.getLogger(__name__)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that appears complete or not at all. Numbers must be finite: JSON has no others."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False), parents=True)


def make_folder(folder: Path, name: str) -> None:
    """Makes a folder of results with nothing but the file that names its experiment."""
    write_json(folder / OWNER, {"made_by": MADE_BY, "name": name})


def check_folder(folder: Path, experiment: Experiment, units: Sequence[Unit]) -> None:
    """Refuses a folder whose contents are not this experiment's results: nothing in it is replaced or removed.

    A folder without the file that names its experiment counts if it has a record of one of the ``units``.

    Raises:
        ValueError: why it is not this experiment's.
    """
    there = next((folder / "records").rglob("*.json"), None) is not None
    owner = read_owner(folder)
    if owner not in (None, experiment.name):
        raise ValueError(
            f"{str(folder)!r} holds the results of experiment {owner!r}, not of {experiment.name!r}: "
            "name another folder with --out"
        )
    if there and not any(read_record(folder, unit) for unit in units):
        raise ValueError(
            f"the results in {str(folder)!r} are of another version of experiment {experiment.name!r}: "
            "name another folder with --out, or `run` it into a new one"
        )
    if not there and owner is None:
        raise ValueError(f"{str(folder)!r} holds no results of experiment {experiment.name!r}: name their folder")


def read_owner(folder: Path) -> str | None:
    """The name of the experiment whose results a folder holds; None if unknown."""
    try:
        owner = read_json(folder / OWNER, "results")
    except (OSError, ValueError):
        return None
    ours = isinstance(owner, dict) and owner.get("made_by") == MADE_BY and isinstance(owner.get("name"), str)
    return owner["name"] if ours else None


def record_path(folder: Path, unit: Unit) -> Path:
    return folder / "records" / f"{unit.path}.json"


def write_record(folder: Path, unit: Unit, result: Mapping[str, Any], seconds: float) -> None:
    """Keeps the result of a unit, with its inputs and how long it took."""
    record: UnitRecord = {
        "kind": unit.kind,
        "name": unit.name,
        "fingerprint": unit.fingerprint,
        "seconds": round(seconds, 3),
        "inputs": dict(unit.inputs),
        "result": result,
    }
    if unit.files:
        record["files"] = dict(unit.files)
    write_json(record_path(folder, unit), record)


def read_record(folder: Path, unit: Unit) -> UnitRecord | None:
    """The record of a unit; None if it is absent, unreadable, altered (which is logged) or made from other inputs.

    A file that is missing on this machine counts as unchanged since the record.
    """
    try:
        record = read_json(record_path(folder, unit), "record", max_bytes=None)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("result"), dict):
        return None
    files = record.get("files", {})
    same = isinstance(files, dict) and files.keys() == unit.files.keys()
    same = same and all(digest in (None, files[key]) for key, digest in unit.files.items())
    if not same or record.get("fingerprint") != unit.fingerprint:
        return None
    if mistake := find_problem(record, UnitRecord, "record") or find_mistake(unit.kind, record["result"], unit.sizes):
        logger.warning("%s does not count: %s", record_path(folder, unit), mistake)
        return None
    return cast(UnitRecord, record)


def recorded_device(folder: Path) -> str | None:
    """The device that most records of a folder were measured on; None without any."""
    devices: Counter[str | None] = Counter()
    for path in (folder / "records").rglob("*.json"):
        with suppress(OSError, ValueError, AttributeError, TypeError):
            devices[read_json(path, "record", max_bytes=None)["inputs"].get("device")] += 1
    del devices[None]
    return max(devices, key=devices.__getitem__, default=None)
