"""The layer schedule of a DeepSeek-V4 ``config.json``, in both spellings: compressed branches and hash layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from deepseek_attn.config.fields import MAXIMA, REQUIRED, FieldReader

LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
# By compressed layer type: the key of its rate in older configs, and the default rate.
RATES = {LAYER_TYPES[1]: ("compress_rate_csa", 4), LAYER_TYPES[2]: ("compress_rate_hca", 128)}
MLP_LAYER_TYPES = ("hash_moe", "moe")


class Branch(NamedTuple):
    """The long-range branch of one layer: tokens per entry (0: none), overlapping windows, lightning indexer."""

    ratio: int
    overlap: bool
    has_indexer: bool


def published_branch(ratio: int) -> Branch:
    """The rule of DeepSeek's inference/model.py: ratio 4 has overlap and an indexer, no other ratio has either."""
    return Branch(ratio, ratio == 4, ratio == 4)


def read_num_hash_layers(reader: FieldReader, num_layers: int | None) -> int | None:
    """Reads ``num_hash_layers``, or counts the leading ``hash_moe`` entries of ``mlp_layer_types``."""
    spellings = {"num_hash_layers": reader.raw.get("num_hash_layers")}
    kinds = reader.as_list("mlp_layer_types", reader.raw.get("mlp_layer_types"))
    if kinds is not None:
        _check_members(reader, "mlp_layer_types", kinds, MLP_LAYER_TYPES)
        kinds = kinds[:num_layers]
        count = kinds.count("hash_moe")
        if num_layers is not None and len(kinds) < num_layers:
            reader.problem(f"mlp_layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}")
        if "hash_moe" in kinds[count:]:
            last = max(i for i, kind in enumerate(kinds) if kind == "hash_moe")
            reader.problem(f"mlp_layer_types has hash_moe at layer {last} after moe: hash layers must come first")
        spellings["hash_moe entries of mlp_layer_types"] = count
    value = reader.as_integer("num_hash_layers", reader.agreed("num_hash_layers", spellings), minimum=0)
    if value is not None and num_layers is not None and value > num_layers:
        reader.problem(f"num_hash_layers {value} is above num_hidden_layers {num_layers}")
    return value


def read_branches(reader: FieldReader, num_layers: int | None) -> list[Branch]:
    """Reads the branches of the backbone layers, with overrides; empty if the schedule has problems."""
    published = _branches_of_ratios(reader, num_layers)
    named = _branches_of_layer_types(reader, num_layers)
    branches = named if published is None else published
    if branches is None:
        if not {"compress_ratios", "layer_types"} & {k for k, v in reader.raw.items() if v is not None}:
            reader.missing("compress_ratios (or layer_types)")
        return []
    if published is not None and named is not None and published != named:
        differing = [i for i, (a, b) in enumerate(zip(published, named, strict=False)) if a != b]
        reader.problem(f"compress_ratios and layer_types disagree at layers {differing}: drop one of them")
    overlap = _read_override(reader, "compress_overlap", branches, [b.overlap for b in branches])
    indexer = _read_override(reader, "compress_indexer", branches, [b.has_indexer for b in branches])
    return [Branch(b.ratio, o, i) for b, o, i in zip(branches, overlap, indexer, strict=True)]


def _branches_of_ratios(reader: FieldReader, num_layers: int | None) -> list[Branch] | None:
    ratios = reader.as_list("compress_ratios", reader.raw.get("compress_ratios"))
    if ratios is None:
        return None
    checked = [
        reader.as_integer(f"compress_ratios[{i}]", "null" if ratio is None else ratio, minimum=0)
        for i, ratio in enumerate(ratios)
    ]
    _check_length(reader, "compress_ratios", ratios, num_layers, 0)
    if reader.raw.get("layer_types") is None:  # otherwise the branches are compared
        for name, rate in _read_rates(reader, RATES).items():
            if rate not in (None, RATES[name][1]):
                reader.problem(
                    f"compress_ratios beside a rate of {rate!r} for {name}: transformers reads the ratio "
                    f"{RATES[name][1]} as that rate, DeepSeek's code as it stands; drop one of them"
                )
    known = [ratio for ratio in checked if ratio is not None]
    return None if len(known) < len(checked) else [published_branch(ratio) for ratio in known[:num_layers]]


def _branches_of_layer_types(reader: FieldReader, num_layers: int | None) -> list[Branch] | None:
    """transformers names the branch; its rate is one number per name. The name alone decides overlap and indexer."""
    names = reader.as_list("layer_types", reader.raw.get("layer_types"))
    if names is None:
        return None
    given = {*names, *(reader.mapping("compress_rates") or {})}
    given |= {name for name, (legacy, _) in RATES.items() if reader.raw.get(legacy) is not None}
    rates = _read_rates(reader, [name for name in RATES if name in given])
    checked = {name: reader.as_integer(f"compress_rates.{name}", rate) for name, rate in rates.items()}
    known = {name: rate for name, rate in checked.items() if rate is not None}
    _check_length(reader, "layer_types", names, num_layers, "sliding_attention")
    if not _check_members(reader, "layer_types", names, LAYER_TYPES) or len(known) < len(checked):
        return None
    sparse = LAYER_TYPES[1]
    return [Branch(known.get(name, 0), name == sparse, name == sparse) for name in names[:num_layers]]


def _read_rates(reader: FieldReader, names: Iterable[str]) -> dict[str, Any]:
    """The rates of these layer types; ``compress_rate_csa`` and ``compress_rate_hca`` mean the same."""
    given = reader.mapping("compress_rates") or {}
    rates = {}
    for name in names:
        legacy, default = RATES[name]
        spellings = {f"compress_rates.{name}": given.get(name), legacy: reader.raw.get(legacy)}
        rates[name] = reader.agreed(f"compress_rates.{name}", spellings, REQUIRED if given else default)
    return rates


def _check_length(reader: FieldReader, label: str, entries: list, num_layers: int | None, mtp_entry: Any) -> None:
    """Checks the number of entries. Entries past the backbone belong to MTP layers and must be window-only.

    Some revisions have more entries than MTP layers.
    """
    if num_layers is None:
        return
    if len(entries) < num_layers:
        reader.problem(
            f"{label} has {len(entries)} entries for num_hidden_layers {num_layers}: one per layer is needed"
        )
    most = MAXIMA["num_nextn_predict_layers"]
    if len(entries) > num_layers + most:
        reader.problem(f"{label} has {len(entries)} entries for num_hidden_layers {num_layers}: at most {most} more")
        return
    for i, entry in enumerate(entries[num_layers:], start=num_layers):
        if entry != mtp_entry and not (isinstance(entry, int) and entry < 0):
            reader.problem(
                f"{label}[{i}] is {entry!r}, past the {num_layers} backbone layers: expected {mtp_entry!r}, "
                "as MTP layers have no compressed branch"
            )


def _check_members(reader: FieldReader, label: str, entries: list, supported: tuple[str, ...]) -> bool:
    bad = [i for i, entry in enumerate(entries) if entry not in supported]
    for i in bad:
        reader.as_choice(f"{label}[{i}]", "null" if entries[i] is None else entries[i], supported)
    return not bad


def _read_override(reader: FieldReader, key: str, branches: list[Branch], default: list[bool]) -> list[bool]:
    """``compress_overlap`` / ``compress_indexer``: a bool per backbone layer, or an object from ratio to bool."""
    raw = reader.raw.get(key)
    if raw is None:
        return default
    if isinstance(raw, Mapping):
        bad = [k for k, v in raw.items() if not re.fullmatch(r"0|[1-9][0-9]*", str(k)) or not isinstance(v, bool)]
        ratios = sorted({b.ratio for b in branches})
        if absent := [k for k in raw if k not in bad and int(k) not in ratios]:
            reader.problem(
                f"{key} names the ratios {', '.join(map(str, absent))}, and no layer has them: there are "
                f"{', '.join(map(str, ratios))}; correct or drop them"
            )
        by_ratio = {str(k): v for k, v in raw.items() if k not in bad}
        values = [by_ratio.get(str(b.ratio), d) for b, d in zip(branches, default, strict=True)]
    elif isinstance(raw, (list, tuple)):
        bad = [i for i, v in enumerate(raw) if not isinstance(v, bool)]
        values = list(raw)
        if len(raw) != len(branches):
            reader.problem(f"{key} has {len(raw)} entries for {len(branches)} backbone layers")
            return default
    else:
        reader.problem(f"{key} is {raw!r}: expected a list of bools per layer or an object from ratio to bool")
        return default
    for k in bad:
        reader.problem(f'{key}[{k!r}] is {raw[k]!r}: expected true or false for a layer or for a ratio such as "4"')
    if bad:
        return default
    empty = [i for i, (b, v) in enumerate(zip(branches, values, strict=True)) if v and b.ratio == 0]
    if empty:
        reader.problem(f"{key} is true for layers {empty}, whose ratio is 0: they have no compressed entries")
    return values
