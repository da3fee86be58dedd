"""One variant of a model: a schedule by pattern, and other changes to its attention."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

from deepseek_attn.config.fields import MAXIMA
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import Numerics, get_numerics
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.lab.experiments.define.schedule import expand_schedule
from deepseek_attn.lab.experiments.define.v41 import V41_KEYS, make_v41

MAX_SLUG = 100  # characters
KV_RECORDS = ("plain", "fp8_ds_mla")
ATTENTIONS = ("compressed", "dense")
SELECTIONS = ("learned", "oracle", "random")
LAYER_KEYS = ("ratio", "indexer")
OWN = "own"  # the schedule that a model has


@dataclass(frozen=True)
class ModelVariant:
    """Changes to a base model; None keeps the value of the base.

    Attributes:
        name: shown in the report, unique in an experiment.
        schedule: compress ratios by pattern, see `expand_schedule`: it fits models of any number of layers; or ``own``,
            the model's own ratios. Dense attention has no schedule.
        attention: ``dense``: every query of every layer reads every token before it. No layer compresses, so this is
            the upper bound of all schedules.
        window_layers: of dense attention: so many first layers keep their window, as V4's schedules begin.
        selection: how layers with an indexer select entries in training: ``learned``, or as controls that have the same
            entries and costs, by the layer's own attention over all of them (``oracle``) or by a hash (``random``).
        overlap, indexer: for all compressed layers, or by ratio such as ``{"16": true}``. Other ratios follow the
            published rule: ratio 4 has both, all others have neither.
        index_topk: entries that an indexer selects; sliding_window: tokens.
        kv_record: how caches store an entry, ``plain`` or ``fp8_ds_mla``; affects bytes and times.
        numerics: a preset such as ``serving``, for costs, times and the loaded checkpoint; training is not quantised.
        layers: changes of single layers of the base, such as ``{"2": {"ratio": 0}, "3": {"indexer": false}}``.
        v41: makes a V4.1 of the same sizes, whose layers share entries and selections: see `make_v41`.
    """

    name: str
    schedule: str = "0*"
    attention: str = "compressed"
    window_layers: int = 0
    selection: str = "learned"
    overlap: bool | Mapping[str, bool] | None = None
    indexer: bool | Mapping[str, bool] | None = None
    index_topk: int | None = None
    sliding_window: int | None = None
    kv_record: str | None = None
    numerics: str | None = None
    layers: Mapping[str, Mapping[str, Any]] | None = None
    v41: Mapping[str, Any] | None = None

    @property
    def slug(self) -> str:
        """The name as a file name: of a long one its beginning and a digest."""
        slug = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-").lower() or "variant"
        if len(slug) <= MAX_SLUG:
            return slug
        return f"{slug[:MAX_SLUG]}-{hashlib.sha256(self.name.encode('utf-8', 'backslashreplace')).hexdigest()[:8]}"

    @property
    def dense(self) -> bool:
        return self.attention == "dense"

    def dense_layers(self, base: AnyConfig) -> range:
        """Layers whose queries read every token."""
        return range(self.window_layers, base.num_hidden_layers) if self.dense else range(0)

    def windows(self, base: ModelConfig) -> dict[int, int]:
        """Windows by layer where they differ from `config`: with dense attention, of the layers that keep a window."""
        return dict.fromkeys(range(self.window_layers), base.sliding_window) if self.dense else {}

    @overload
    def config(self, base: ModelConfig) -> ModelConfig | DeepseekV41Config: ...
    @overload
    def config(self, base: AnyConfig) -> AnyConfig: ...
    def config(self, base: AnyConfig) -> AnyConfig:
        """``base`` under this variant, without MTP layers.

        Raises:
            ValueError: the schedule or a value does not fit the base.
        """
        if not isinstance(base, ModelConfig):
            return self._other_family(base)
        own = self.schedule == OWN
        ratios = [x.ratio for x in base.layers] if own else expand_schedule(self.schedule, base.num_hidden_layers)
        changed = self._changed_layers(ratios)
        sizes = {"index_topk": self.index_topk, "sliding_window": self.sliding_window}
        sizes = {key: value for key, value in sizes.items() if value is not None}
        if self.dense:
            if not self.window_layers < base.num_hidden_layers:
                raise ValueError(
                    f"window_layers is {self.window_layers}: the model has {base.num_hidden_layers} layers"
                )
            sizes["sliding_window"] = min(base.max_position_embeddings, MAXIMA["sliding_window"])
        if self.v41 is not None:
            plain: ModelConfig = base.replace(num_nextn_predict_layers=0, compress_ratios=[0] * len(ratios), **sizes)
            return make_v41(plain, ratios, self.v41)
        changes = {
            "compress_ratios": [change.get("ratio", ratio) for ratio, change in zip(ratios, changed, strict=True)],
            "num_nextn_predict_layers": 0,
        }
        for key, value in (("compress_overlap", self.overlap), ("compress_indexer", self.indexer)):
            if not own or value is not None:
                changes[key] = _by_ratio(value, ratios)
        config = base.replace(**changes, **sizes)
        if any("indexer" in change for change in changed):
            pairs = zip(config.layers, changed, strict=True)
            config = config.replace(
                compress_indexer=[change.get("indexer", layer.has_indexer) for layer, change in pairs]
            )
        return config

    def _other_family(self, base: AnyConfig) -> AnyConfig:
        """``base``, a V3.2 or V4.1, which keeps its schedule."""
        dense = isinstance(base, DeepseekV32Config) and self.indexer is False
        given = {"schedule": self.schedule != OWN, "indexer": self.indexer is not None and not dense}
        given |= {"overlap": self.overlap is not None, "layers": self.layers is not None, "v41": self.v41 is not None}
        if isinstance(base, DeepseekV32Config):
            given["sliding_window"] = self.sliding_window is not None
        if wrong := [key for key, is_given in given.items() if is_given]:
            more = "indexer false" if isinstance(base, DeepseekV32Config) else "sliding_window"
            raise ValueError(
                f"variant {self.name!r} changes {', '.join(wrong)} of a {base.model_type}: it keeps its schedule "
                f"({OWN!r}), and may change index_topk, numerics, kv_record and {more}"
            )
        sizes = {"index_topk": self.index_topk, "sliding_window": self.sliding_window}
        config = base.replace(num_nextn_predict_layers=0, **{k: v for k, v in sizes.items() if v is not None})
        return config.replace(model_type="deepseek_v3") if dense and config.has_indexer else config

    def v4_config(self, base: ModelConfig) -> ModelConfig:
        """`config`; ValueError for a V4.1."""
        config = self.config(base)
        if not isinstance(config, ModelConfig):
            raise ValueError(f"variant {self.name!r} is a V4.1: only V4's schedules are timed, and put on checkpoints")
        return config

    def _changed_layers(self, ratios: list[int]) -> list[Mapping[str, Any]]:
        """The changes of each layer."""
        changes = self.layers or {}
        wrong = [layer for layer in changes if not layer.isdigit() or int(layer) >= len(ratios)]
        if wrong:
            raise ValueError(f"layers names {', '.join(wrong)}: the model has layers 0 to {len(ratios) - 1}")
        return [changes.get(str(layer), {}) for layer in range(len(ratios))]

    def counts_for(self, base: AnyConfig, model: AnyConfig) -> bool:
        """Whether costs of ``model`` under this variant are also the costs of ``base`` under it."""
        return self.layers is None or model.num_hidden_layers == base.num_hidden_layers

    def numerics_from(self, preset: Numerics) -> Numerics:
        """``preset``, or this variant's, with the variant's cache record."""
        preset = preset if self.numerics is None else get_numerics(self.numerics)
        return preset if self.kv_record is None else replace(preset, kv_record=self.kv_record)


def variant_problems(label: str, raw: Mapping[str, Any]) -> list[str]:
    """Problems of a variant's own values, whatever the base."""
    problems = []
    dense, selection = raw.get("attention") == "dense", raw.get("selection", "learned")
    if not dense and not isinstance(raw.get("schedule"), str):
        problems.append(f"{label}.schedule is {raw.get('schedule')!r}: expected a pattern such as '0,0,(4,128)*'")
    for key, choices in (("attention", ATTENTIONS), ("selection", SELECTIONS)):
        if raw.get(key, choices[0]) not in choices:
            problems.append(f"{label}.{key} is {raw[key]!r}: expected {', '.join(choices)}")
    if dense and (given := sorted(set(raw) - {"name", "attention", "kv_record", "window_layers"})):
        problems.append(f"{label}: attention dense reads every token, so that {', '.join(given)} cannot be given")
    layers = raw.get("window_layers", 0)
    if type(layers) is not int or layers < 0 or (layers and not dense):
        problems.append(f"{label}.window_layers is {layers!r}: expected a number of layers, with attention dense")
    if selection != "learned" and raw.get("indexer") is False:
        problems.append(f"{label}.selection is {selection!r}, and indexer is false: no layer selects entries")
    for key in ("overlap", "indexer"):
        value = raw.get(key)
        by_ratio = isinstance(value, Mapping) and all(isinstance(item, bool) for item in value.values())
        if value is not None and not isinstance(value, bool) and not by_ratio:
            problems.append(f"{label}.{key} is {value!r}: expected true, false or an object from ratio to bool")
    layers = raw.get("layers")
    if layers is not None and not (isinstance(layers, Mapping) and all(map(_is_layer_change, layers.values()))):
        problems.append(
            f'{label}.layers is {layers!r}: expected changes by layer, such as {{"2": {{"ratio": 0}}}} or '
            '{"3": {"indexer": false}}'
        )
    v41 = raw.get("v41")
    if v41 is not None and not (isinstance(v41, Mapping) and set(v41) <= set(V41_KEYS)):
        problems.append(f"{label}.v41 is {v41!r}: expected an object with some of {', '.join(V41_KEYS)}")
    elif v41 is not None and (given := sorted({"overlap", "indexer", "layers"} & set(raw))):
        problems.append(f"{label}: v41 says which layers have indexers, so that {', '.join(given)} cannot be given")
    return problems


def _is_layer_change(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value or not set(value) <= set(LAYER_KEYS):
        return False
    ratio, indexer = value.get("ratio", 0), value.get("indexer", False)
    return type(ratio) is int and ratio >= 0 and isinstance(indexer, bool)


def _by_ratio(value: bool | Mapping[str, bool] | None, ratios: list[int]) -> dict[str, bool] | None:
    if isinstance(value, bool):
        return {str(ratio): value for ratio in sorted(set(ratios)) if ratio}
    return None if value is None else dict(value)


def default_name(fields: Mapping[str, object]) -> str:
    """The default name of a variant: its schedule, and every other key it sets."""
    if fields.get("attention") == "dense":
        return f"dense, {fields['window_layers']} window layers" if fields.get("window_layers") else "dense"
    rest = [f"{key} {_short(value)}" for key, value in fields.items() if key not in ("name", "schedule")]
    return ", ".join([str(fields.get("schedule")), *rest])


def _short(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{_short(item)}" for key, item in value.items())
    return str(value)
