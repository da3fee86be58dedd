"""Checks of a checkpoint's headers against the tensors of a model, before any tensor is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from deepseek_attn.checkpoint.names import CanonicalSource
from deepseek_attn.checkpoint.published import published_tensors
from deepseek_attn.checkpoint.recipes import ROWS
from deepseek_attn.checkpoint.selection import DRAFTER_MARK, OTHER_RANK, UNKNOWN, Selection
from deepseek_attn.checkpoint.source import FP4_DTYPES, TensorInfo, shortened
from deepseek_attn.checkpoint.stored_weights import scale_name
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.kernels.common.quant import FP4_GROUP
from deepseek_attn.kernels.engram.types import SCALE_GROUP
from deepseek_attn.layers.weights import SlotKind, WeightSlot

FLOAT_DTYPES = ("BF16", "F16", "F32")
INT_DTYPES = ("I64", "I32", "I16", "U8")
FP8_SCALE_DTYPES = ("F8_E8M0", "U8", "F32", "BF16")
FP4_SCALE_DTYPES = ("F8_E8M0", "U8", "F32")
# By kind of recipe; others are floats. A "linear" recipe may stand for a float slot too.
SLOT_KINDS = {
    "quantized": SlotKind.LINEAR,
    "expert": SlotKind.LINEAR,
    "linear": SlotKind.LINEAR,
    "table": SlotKind.INT,
    ROWS: SlotKind.ROWS,
}
ELSEWHERE = "tensors of layers or parts that the config does not have"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BRANCH = re.compile(r"layers\.\d+\.attn\.(compressor|indexer)\..+")
MISSING_TABLES = "missing Engram tables: download the shards that the published index names for them"
SHOWN = 10  # names listed per problem


def check_headers(
    config: AnyConfig, source: CanonicalSource, layers: Iterable[int] | None = None, attention_only: bool = False
) -> None:
    """Checks the headers of ``source`` against ``config`` before a model is built, so that no size is used unchecked.

    `load_model` checks them again, with the slots of the model. If a config requires far more tensors than the
    checkpoint has, only the first missing tensors are listed.

    Args:
        layers, attention_only: see `load_model`.

    Raises:
        ValueError: the stored layers have other compress ratios than the config. Otherwise one error lists every
            tensor that is missing, has another shape or does not belong to the model; of many missing ones, the first.
    """
    entries = source.entries()
    names = [f"{layer.name}.attn_norm.weight" for layer in config.all_layers]
    names += [DRAFTER_MARK] if config.dspark is not None else []
    selection = Selection.make(names, entries, layers, attention_only)
    if isinstance(config, ModelConfig):
        check_schedule(config, entries, selection)
    slots: dict[str, WeightSlot] = {}
    missing = []
    for published, recipe in published_tensors(config):
        name = source.canonical(published)
        if selection.source_rule(name) is None:
            kind = SLOT_KINDS.get(recipe.kind, SlotKind.FLOAT)
            slots[name] = WeightSlot(recipe.shape, kind, _not_loaded, block=config.FP8_GROUP)
            if name not in entries:
                missing.append(name)
        if len(missing) > len(entries):
            Problems({"missing tensors, before the others were looked for": missing}).raise_if_any()
    account(slots, source, selection)


def check_schedule(config: ModelConfig, entries: dict[str, TensorInfo], selection: Selection) -> None:
    """Compares the stored compressors and indexers with the config's compress ratios.

    Raises:
        ValueError: layers that differ, with the remedy.
    """
    stored, changed = list(config.compress_ratios), []
    for spec in config.layers:
        branch, wanted = stored_branch(entries, f"{spec.name}.attn"), (spec.ratio, spec.overlap, spec.has_indexer)
        if branch is None or branch == wanted or selection.source_rule(f"{spec.name}.attn.compressor.ape") is not None:
            continue
        stored[spec.index] = branch[0]
        changed.append(f"layer {spec.index} (stored: {describe_branch(*branch)}; config: {describe_branch(*wanted)})")
    if changed:
        raise ValueError(
            f"the weights were trained with another schedule than the config has, by the shapes of {listed(changed)}. "
            f"Restore it in config.json: compress_ratios {stored}, and compress_overlap and compress_indexer as they "
            "were. To try another schedule without training, use `deepseek-attn experiment run FILE`, which derives "
            "the weights of changed compressors: checkpoint.model in FILE is the folder, and its variants are the "
            "schedules (docs/experiments.md)"
        )


def stored_branch(entries: dict[str, TensorInfo], attn: str) -> tuple[int, bool, bool] | None:
    """(ratio, overlap, indexer) of a stored layer by the shapes of its tensors; None where unknown."""
    ape, wkv = entries.get(f"{attn}.compressor.ape"), entries.get(f"{attn}.wkv.weight")
    if wkv is None:
        return None
    if ape is None:
        return None if f"{attn}.compressor.wkv.weight" in entries else (0, False, False)
    if len(ape.shape) != 2 or not wkv.shape or ape.shape[1] not in (wkv.shape[0], 2 * wkv.shape[0]):
        return None
    return ape.shape[0], ape.shape[1] > wkv.shape[0], f"{attn}.indexer.wq_b.weight" in entries


def describe_branch(ratio: int, overlap: bool, indexer: bool) -> str:
    parts = [part for part, has in (("overlap", overlap), ("an indexer", indexer)) if has]
    return f"ratio {ratio}{' with ' if parts else ''}{' and '.join(parts)}"


def _not_loaded(weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    raise NotImplementedError


class Accounted(NamedTuple):
    """The tensors of a source, grouped by their treatment in a load.

    Attributes:
        loaded: published names of a tensor and, where it has one, of its scale, in source order.
        by_row: the same of tables, which stay in the checkpoint.
        ignored: rule -> published names of the tensors that it excludes.
    """

    loaded: list[tuple[str, ...]]
    by_row: list[tuple[str, ...]]
    ignored: dict[str, tuple[str, ...]]


def account(slots: dict[str, WeightSlot], source: CanonicalSource, selection: Selection) -> Accounted:
    """Finds for every tensor its slot or the rule that excludes it, for every slot its tensor, and checks all headers.

    Raises:
        ValueError: one error that lists all problems. Tensors of an unknown kind are listed only beside other problems.
    """
    entries = source.entries()
    scales = {scale: name for name in slots if (scale := scale_name(name))}
    problems, loaded, by_row, ignored, without_slot = Problems(), [], [], {}, []
    for name in entries:
        rule = selection.source_rule(name)
        if rule is not None:
            ignored.setdefault(rule, []).append(name)
        elif name in slots:
            pair = _check(problems, slots[name], source, name)
            if slots[name].elsewhere:
                ignored.setdefault(OTHER_RANK, []).extend(pair)
            else:
                (loaded if slots[name].attach is None else by_row).append(pair)
        elif name not in scales:
            without_slot.append(name)
    kinds = {_NUMBER.sub("N", name) for name in (*slots, *scales)} if without_slot else set()
    unknown = []
    for name in without_slot:
        if _NUMBER.sub("N", name) in kinds or _BRANCH.fullmatch(name):
            problems.add(ELSEWHERE, source.shown(name))
        else:
            unknown.append(name)
    for name in slots:
        if name not in entries and selection.rule(name) is None:
            problems.add(MISSING_TABLES if slots[name].kind is SlotKind.ROWS else "missing tensors", name)
    for name in unknown:
        if problems.found:
            problems.add(UNKNOWN, source.shown(name))
        ignored.setdefault(UNKNOWN, []).append(name)
    problems.raise_if_any()
    return Accounted(loaded, by_row, {rule: tuple(names) for rule, names in ignored.items()})


def _check(problems: Problems, slot: WeightSlot, source: CanonicalSource, name: str) -> tuple[str, ...]:
    """Checks the tensor of a slot and its scale; returns their names."""
    entries = source.entries()
    info, shown, shape = entries[name], source.shown(name), list(slot.shape)
    scale = scale_name(name) or ""
    if slot.kind is SlotKind.ROWS:
        if info.dtype != "F8_E4M3":
            problems.add("wrong dtypes", f"{shown} is {info.dtype}, supported is F8_E4M3")
        _check_shape(problems, shown, info, shape)
        _check_scale(problems, source, scale, [shape[0], shape[1] // SCALE_GROUP], ("F8_E8M0", "U8"))
        return (name, scale)
    if slot.quantizable and info.dtype == "F8_E4M3":
        grid = [-(-size // slot.block) for size in shape]
        _check_shape(problems, shown, info, shape)
        _check_scale(problems, source, scale, grid, FP8_SCALE_DTYPES)
        return (name, scale)
    if slot.quantizable and info.dtype in FP4_DTYPES:
        rows, columns = shape
        if columns % FP4_GROUP:
            problems.add(
                "wrong dtypes", f"{shown} is packed FP4, but {columns} columns are not a multiple of {FP4_GROUP}"
            )
        # The header counts values for F4 and bytes for I8 and U8.
        _check_shape(problems, shown, info, shape if info.dtype == "F4" else [rows, columns // 2])
        _check_scale(problems, source, scale, [rows, columns // FP4_GROUP], FP4_SCALE_DTYPES)
        return (name, scale)
    allowed = INT_DTYPES if slot.kind is SlotKind.INT else FLOAT_DTYPES
    if info.dtype not in allowed:
        supported = (*allowed, "F8_E4M3", *FP4_DTYPES) if slot.quantizable else allowed
        problems.add("wrong dtypes", f"{shown} is {info.dtype}, supported are {', '.join(supported)}")
    _check_shape(problems, shown, info, shape)
    if scale in entries:
        problems.add("scales beside weights that are not quantised", f"{source.shown(scale)} ({info.dtype} weight)")
    return (name,)


def _check_scale(
    problems: Problems, source: CanonicalSource, name: str, shape: list[int], dtypes: tuple[str, ...]
) -> None:
    info = source.entries().get(name)
    if info is None:
        problems.add("missing scales", name)
        return
    if info.dtype not in dtypes:
        problems.add("wrong dtypes", f"{source.shown(name)} is {info.dtype}, supported are {', '.join(dtypes)}")
    _check_shape(problems, source.shown(name), info, shape)


def _check_shape(problems: Problems, shown: str, info: TensorInfo, expected: list[int]) -> None:
    if list(info.shape) != expected:
        problems.add("wrong shapes", f"{shown} is {list(info.shape)}, expected {expected} for {info.dtype}")


@dataclass
class Problems:
    """Problems by kind, for one error that lists all of them."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        self.found.setdefault(kind, []).append(text)

    def raise_if_any(self) -> None:
        if not self.found:
            return
        lines = ["the checkpoint does not fit the model:"]
        for kind, items in self.found.items():
            lines.append(f"  - {kind} ({len(items)}): {listed(items)}")
        raise ValueError("\n".join(lines))


def listed(items: list[str]) -> str:
    """The first items, each cut to a bounded length."""
    return ", ".join(map(shortened, items[:SHOWN])) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")
