"""Checkpoint tensors -> weight slots, with every tensor and every slot accounted for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from tqdm import tqdm

from deepseek_attn.checkpoint.names import CanonicalSource
from deepseek_attn.checkpoint.names_v32 import canonical_names
from deepseek_attn.checkpoint.published import published_tensors
from deepseek_attn.checkpoint.recipes import ROWS
from deepseek_attn.checkpoint.source import (
    FP4_DTYPES,
    CheckpointSource,
    TensorInfo,
    holds_nan,
    read_table_rows,
    read_weight,
    scale_name,
)
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.options import is_integer
from deepseek_attn.kernels.engram import SCALE_GROUP
from deepseek_attn.kernels.linear import FP4_GROUP
from deepseek_attn.layers.weights import SlotKind, WeightSlot, checkpoint_slots
from deepseek_attn.utils.sizes import show_bytes

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
MISSING_TABLES = "missing Engram tables: download the shards that the published index names for them"
DRAFTER_MARK = "mtp.0.main_proj.weight"
SHOWN = 10  # names listed per problem

INV_FREQ = "rotary inv_freq buffers"
CONFIDENCE = "confidence of DSpark drafts, by which none is left out"
MTP_COPIES = "mtp.*emb* / mtp.*head.weight copies"
DRAFTER = "DSpark drafter"
VISION = "vision tensors, of which text needs none"
MTP_UNUSED = "MTP layers not in the model"
OTHER_LAYERS = "layers not requested"
ATTENTION_ONLY = "attention only"
OTHER_RANK = "on another rank"
_INV_FREQ = re.compile(r"(.+\.)?(\w+_)?inv_freq")
_MTP_COPY = re.compile(r"mtp\.(?!\d+\.markov_head\.)(.*emb.*|(.+\.)?head\.(weight|scale))")
_CONFIDENCE = re.compile(r"mtp\.\d+\.confidence_head\..+")
_VISION = re.compile(
    r"((vision|aligner)\..+|image_(start|end|newline|pad)(\.weight)?|(layers|mtp)\.\d+\.ffn\.gate\.bias_vl)"
)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_ATTENTION = re.compile(r"attn\..+|attn_norm\.weight")


@dataclass(frozen=True, repr=False)
class LoadReport:
    """The outcome of a load.

    Attributes:
        loaded: published names of the tensors that were loaded, scales included.
        ignored: rule -> published names of the tensors that it excluded.
        bytes: stored bytes of the loaded tensors; of a sharded tensor, those of this rank's shard.
        by_row: tables and their scales that stay in the checkpoint, and are read by row while the model runs.
        mtp_loaded: the MTP layers of the model have weights. False when the model has none, when the checkpoint has
            none (transformers drops them) or has a DSpark drafter in their place, and for partial loads.
    """

    loaded: tuple[str, ...]
    ignored: dict[str, tuple[str, ...]]
    bytes: int
    mtp_loaded: bool
    by_row: tuple[str, ...] = ()

    def __repr__(self) -> str:
        ignored = ", ".join(f"{len(names)} {rule}" for rule, names in self.ignored.items())
        return (
            f"LoadReport({len(self.loaded)} tensors, {show_bytes(self.bytes)}, ignored: {ignored or 'none'}, "
            f"mtp_loaded={self.mtp_loaded}{f', {len(self.by_row)} read by row' if self.by_row else ''})"
        )


def check_headers(
    config: AnyConfig, source: CanonicalSource, layers: Iterable[int] | None = None, attention_only: bool = False
) -> None:
    """Checks the headers of ``source`` against ``config`` before a model is built, so that no size is merely believed.

    `load_model` checks them again, with the slots of the model. Where a config asks for far more tensors than there
    are, most of them are not even listed.

    Args:
        layers, attention_only: see `load_model`.

    Raises:
        ValueError: one error that lists every tensor that is missing, unknown, or of another shape; or the first ones
            that are missing.
    """
    entries = source.entries()
    names = [f"{layer.name}.attn_norm.weight" for layer in config.all_layers]
    names += [DRAFTER_MARK] if config.dspark is not None else []
    selection = Selection.make(names, entries, layers, attention_only)
    slots: dict[str, WeightSlot] = {}
    missing = []
    for published, recipe in published_tensors(config):
        name = source.canonical(published)
        if _source_rule(name, selection) is None:
            kind = SLOT_KINDS.get(recipe.kind, SlotKind.FLOAT)
            slots[name] = WeightSlot(recipe.shape, kind, _not_loaded, block=config.FP8_GROUP)
            if name not in entries:
                missing.append(name)
        if len(missing) > len(entries):
            Problems({"missing tensors, before the others were looked for": missing}).raise_if_any()
    _account(slots, source, selection)


def _not_loaded(weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    raise NotImplementedError


def load_model(
    model: nn.Module,
    source: CheckpointSource,
    layers: Iterable[int] | None = None,
    attention_only: bool = False,
    progress: bool = True,
    memory: int | None = None,
) -> LoadReport:
    """Fills the weight slots of ``model`` from ``source``, one tensor (with its scale) at a time.

    All names, dtypes and shapes are checked before the first tensor is read. Each tensor of the source is loaded,
    ignored by a named rule, or an error; each slot is filled, excluded by the arguments, or an error. MTP slots stay
    empty when the checkpoint has no MTP layer at all, see ``LoadReport.mtp_loaded``.

    Args:
        model: made of ``CheckpointModule``; its slots are named as in the published checkpoint.
        source: tensors under any spelling that ``canonical_name`` knows.
        layers: load only these backbone layers, and the tensors outside layers; no MTP.
        attention_only: load only ``layers.N.attn.*`` and ``layers.N.attn_norm.weight``.
        progress: show a bar of bytes, if standard error is a terminal.
        memory: bytes of the memory that the weights go to; None: not checked.

    Raises:
        ValueError: one error that lists every problem found in the headers; more bytes than ``memory``; or values that
            a slot refuses (scales or router biases that are not finite, experts that do not exist), with their tensor.

    Warns:
        UserWarning: weights hold NaN; their tensors are named.
    """
    return load_slots(checkpoint_slots(model), source, layers, attention_only, progress, memory)


def load_slots(
    slots: dict[str, WeightSlot],
    source: CheckpointSource,
    layers: Iterable[int] | None = None,
    attention_only: bool = False,
    progress: bool = True,
    memory: int | None = None,
) -> LoadReport:
    """`load_model` for any slots by published name."""
    source = source if isinstance(source, CanonicalSource) else CanonicalSource(source)
    entries = source.entries()
    selection = Selection.make(slots, entries, layers, attention_only)
    names, ignored = _account(slots, source, selection)
    by_row = [pair for pair in names if slots[pair[0]].attach is not None]
    names = [pair for pair in names if slots[pair[0]].attach is None]
    sizes = {pair: _loaded_bytes(slots[pair[0]], pair, entries) for pair in names}
    total, with_nan = sum(sizes.values()), []
    if memory is not None and total > memory:
        raise ValueError(
            f"the weights have {total:,} bytes, and there is memory for {memory:,}: use more ranks, some of the layers "
            "(layers=[...]), or another device"
        )
    shown = None if progress else True  # None: tqdm shows the bar on a terminal only
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=shown) as bar:
        for pair in names:
            if _load(slots[pair[0]], source, pair[0]):
                with_nan.append(_shown(source, pair[0]))
            bar.update(sizes[pair])
    if with_nan:
        warnings.warn(
            f"NaN in the checkpoint ({len(with_nan)}): {_listed(with_nan)}; logits that depend on them are NaN",
            stacklevel=2,
        )
    for name, _ in by_row:
        slots[name].attach(partial(read_table_rows, source, name))
    loaded, tables = (tuple(name for pair in pairs for name in pair) for pairs in (names, by_row))
    return LoadReport(loaded, ignored, total, any(name.startswith("mtp.") for name in loaded), tables)


@dataclass(frozen=True)
class Selection:
    """The rules by which a load excludes tensors.

    Attributes:
        layers: backbone layers to load; None means all.
        attention_only: leave out everything but attention.
        mtp_rule: why MTP tensors are left out; None if they are loaded.
    """

    layers: frozenset[int] | None
    attention_only: bool
    mtp_rule: str | None

    @classmethod
    def make(
        cls,
        names: Collection[str],
        entries: dict[str, TensorInfo],
        layers: Iterable[int] | None,
        attention_only: bool,
    ) -> Selection:
        """The rules for a model whose slots have these ``names``; one name of each layer is enough.

        Raises:
            ValueError: the model does not have all of ``layers``.
        """
        if layers is not None:
            layers = frozenset(layers)
            present = {int(match[1]) for match in map(_LAYER.fullmatch, names) if match}
            if not layers <= present:
                raise ValueError(f"layers {sorted(layers - present)} are not in the model: it has {sorted(present)}")
        has_layer = any(name.startswith("mtp.") and not _is_copy(name) for name in entries)
        has_layer &= DRAFTER_MARK in entries or DRAFTER_MARK not in names
        if DRAFTER_MARK in entries and DRAFTER_MARK not in names:
            mtp_rule = DRAFTER
        elif attention_only:
            mtp_rule = ATTENTION_ONLY
        elif layers is not None:
            mtp_rule = OTHER_LAYERS
        else:
            mtp_rule = None if has_layer and any(name.startswith("mtp.") for name in names) else MTP_UNUSED
        return cls(layers, attention_only, mtp_rule)

    def rule(self, name: str) -> str | None:
        """The rule that excludes a tensor or slot of this published name; None if it is to be loaded."""
        if name.startswith("mtp.") and self.mtp_rule is not None:
            return self.mtp_rule
        if _VISION.fullmatch(name):
            return VISION
        if _CONFIDENCE.fullmatch(name):
            return CONFIDENCE
        layer = _LAYER.fullmatch(name)
        if layer and self.layers is not None and int(layer[1]) not in self.layers:
            return OTHER_LAYERS
        if self.attention_only and not (layer and _ATTENTION.fullmatch(layer[2])):
            return ATTENTION_ONLY
        return None


def needed_tensors(config: AnyConfig, layers: Iterable[int] | None, attention_only: bool) -> Callable[[str], bool]:
    """Whether a load of these layers reads a tensor, judged by its stored name: others need not be there."""
    chosen = None if layers is None else frozenset(layer for layer in layers if is_integer(layer))
    partial = chosen is not None or attention_only
    selection = Selection(chosen, attention_only, OTHER_LAYERS if partial else None)
    published = canonical_names(config)
    return lambda name: selection.rule(published(name)) is None


def _is_copy(name: str) -> bool:
    return bool(_INV_FREQ.fullmatch(name) or _MTP_COPY.fullmatch(name))


def _source_rule(name: str, selection: Selection) -> str | None:
    if _INV_FREQ.fullmatch(name):
        return INV_FREQ
    if _MTP_COPY.fullmatch(name) and selection.mtp_rule != DRAFTER:
        return MTP_COPIES
    return selection.rule(name)


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
            lines.append(f"  - {kind} ({len(items)}): {_listed(items)}")
        raise ValueError("\n".join(lines))


def _listed(items: list[str]) -> str:
    """The first items, each cut to a bounded length."""
    shown = [item if len(item) <= 300 else f"{item[:300]}..." for item in items[:SHOWN]]
    return ", ".join(shown) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


def _account(
    slots: dict[str, WeightSlot], source: CanonicalSource, selection: Selection
) -> tuple[list[tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Checks all headers; returns what to load, in source order, and the ignored names by rule."""
    entries = source.entries()
    scales = {scale_name(name): name for name in slots if scale_name(name)}
    problems, ignored, names = Problems(), {}, []
    for name in entries:
        rule = _source_rule(name, selection)
        if rule is not None:
            ignored.setdefault(rule, []).append(name)
        elif name in slots:
            pair = _check(problems, slots[name], source, name)
            if slots[name].elsewhere:
                ignored.setdefault(OTHER_RANK, []).extend(pair)
            else:
                names.append(pair)
        elif name not in scales:
            problems.add("unknown tensors", _shown(source, name))
    for name in slots:
        if name not in entries and selection.rule(name) is None:
            problems.add(MISSING_TABLES if slots[name].kind is SlotKind.ROWS else "missing tensors", name)
    problems.raise_if_any()
    return names, {rule: tuple(left) for rule, left in ignored.items()}


def _check(problems: Problems, slot: WeightSlot, source: CanonicalSource, name: str) -> tuple[str, ...]:
    """Checks the tensor of a slot and its scale; returns their names."""
    entries = source.entries()
    info, shown, shape = entries[name], _shown(source, name), list(slot.shape)
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
        problems.add("scales beside weights that are not quantised", f"{_shown(source, scale)} ({info.dtype} weight)")
    return (name,)


def _check_scale(
    problems: Problems, source: CanonicalSource, name: str, shape: list[int], dtypes: tuple[str, ...]
) -> None:
    info = source.entries().get(name)
    if info is None:
        problems.add("missing scales", name)
        return
    if info.dtype not in dtypes:
        problems.add("wrong dtypes", f"{_shown(source, name)} is {info.dtype}, supported are {', '.join(dtypes)}")
    _check_shape(problems, _shown(source, name), info, shape)


def _check_shape(problems: Problems, shown: str, info: TensorInfo, expected: list[int]) -> None:
    if list(info.shape) != expected:
        problems.add("wrong shapes", f"{shown} is {list(info.shape)}, expected {expected} for {info.dtype}")


def _shown(source: CanonicalSource, name: str) -> str:
    stored = source.source_name(name)
    return name if stored == name else f"{name} (stored as {stored})"


def _loaded_bytes(slot: WeightSlot, pair: tuple[str, ...], entries: dict[str, TensorInfo]) -> int:
    """Stored bytes of a tensor and its scale, or of this rank's shard of them."""
    total = sum(entries[name].nbytes for name in pair)
    return total if slot.shard is None else total * slot.shard.size // slot.shape[slot.shard.dim]


def _load(slot: WeightSlot, source: CanonicalSource, name: str) -> bool:
    """Fills a slot; returns whether the tensor holds a NaN."""
    # A function of its own, so that a tensor is released before the next one is read.
    try:
        weight, scale = read_weight(source, name, slot.shard, slot.block)
        slot.load(weight, scale)
    except ValueError as error:
        raise ValueError(f"cannot load {_shown(source, name)}: {error}") from error
    return holds_nan(weight)
