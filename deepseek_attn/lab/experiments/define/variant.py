"""One variant of a model: a schedule by pattern, and other changes to its long-range branch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import Numerics, get_numerics
from deepseek_attn.lab.experiments.define.schedule import expand_schedule

MAX_SLUG = 100  # characters
KV_RECORDS = ("plain", "fp8_ds_mla")


@dataclass(frozen=True)
class ModelVariant:
    """Changes to a base model; None keeps the value of the base.

    Attributes:
        name: shown in the report, unique in an experiment.
        schedule: compress ratios by pattern, see `expand_schedule`: it fits models of any number of layers.
        overlap, indexer: for all compressed layers, or by ratio such as ``{"16": true}``. Other ratios follow the
            published rule: ratio 4 has both, all others have neither.
        index_topk: entries that an indexer selects; sliding_window: tokens.
        kv_record: how caches store an entry, ``plain`` or ``fp8_ds_mla``; affects bytes and times.
        numerics: a preset such as ``serving``, for costs, times and the loaded checkpoint; training is not quantised.
    """

    name: str
    schedule: str
    overlap: bool | Mapping[str, bool] | None = None
    indexer: bool | Mapping[str, bool] | None = None
    index_topk: int | None = None
    sliding_window: int | None = None
    kv_record: str | None = None
    numerics: str | None = None

    @property
    def slug(self) -> str:
        """The name as a file name: of a long one its beginning and a digest."""
        slug = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-").lower() or "variant"
        if len(slug) <= MAX_SLUG:
            return slug
        return f"{slug[:MAX_SLUG]}-{hashlib.sha256(self.name.encode('utf-8', 'backslashreplace')).hexdigest()[:8]}"

    def config(self, base: ModelConfig) -> ModelConfig:
        """``base`` under this variant, without MTP layers.

        Raises:
            ValueError: the schedule or a value does not fit the base.
        """
        ratios = expand_schedule(self.schedule, base.num_hidden_layers)
        changes = {
            "compress_ratios": ratios,
            "num_nextn_predict_layers": 0,
            "compress_overlap": _by_ratio(self.overlap, ratios),
            "compress_indexer": _by_ratio(self.indexer, ratios),
        }
        sizes = {"index_topk": self.index_topk, "sliding_window": self.sliding_window}
        return base.replace(**changes, **{key: value for key, value in sizes.items() if value is not None})

    def numerics_from(self, preset: Numerics) -> Numerics:
        """``preset``, or this variant's, with the variant's cache record."""
        preset = preset if self.numerics is None else get_numerics(self.numerics)
        return preset if self.kv_record is None else replace(preset, kv_record=self.kv_record)


def _by_ratio(value: bool | Mapping[str, bool] | None, ratios: list[int]) -> dict[str, bool] | None:
    if isinstance(value, bool):
        return {str(ratio): value for ratio in sorted(set(ratios)) if ratio}
    return None if value is None else dict(value)


def default_name(fields: Mapping[str, object]) -> str:
    """The default name of a variant: its schedule, and every other key it sets."""
    rest = [f"{key} {_short(value)}" for key, value in fields.items() if key not in ("name", "schedule")]
    return ", ".join([str(fields.get("schedule")), *rest])


def _short(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{_short(item)}" for key, item in value.items())
    return str(value)
