"""Records on disk: one JSON file per unit, complete or not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from deepseek_attn.experiments.define.results import Record
from deepseek_attn.experiments.define.units import Unit
from deepseek_attn.utils.files import write_text
from deepseek_attn.utils.json_files import read_json


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that appears complete or not at all. Numbers must be finite: JSON has no others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1, allow_nan=False))


def record_path(folder: Path, unit: Unit) -> Path:
    return folder / "records" / f"{unit.path}.json"


def write_record(folder: Path, unit: Unit, result: Mapping[str, Any], seconds: float) -> None:
    """Keeps the result of a unit, with its inputs and how long it took."""
    record: Record = {
        "kind": unit.kind,
        "name": unit.name,
        "fingerprint": unit.fingerprint,
        "seconds": round(seconds, 3),
        "inputs": dict(unit.inputs),
        "result": result,
    }
    write_json(record_path(folder, unit), record)


def read_record(folder: Path, unit: Unit) -> Record | None:
    """The record of a unit; None if it is absent, unreadable or made from other inputs."""
    try:
        record = read_json(record_path(folder, unit), "record", max_bytes=None)
    except (OSError, ValueError):
        return None
    matches = isinstance(record, dict) and record.get("fingerprint") == unit.fingerprint
    return cast(Record, record) if matches and isinstance(record.get("result"), dict) else None
