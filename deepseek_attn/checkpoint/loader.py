"""Checkpoint tensors -> weight slots, with every tensor and every slot accounted for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod

from torch import nn
from tqdm.auto import tqdm

from deepseek_attn.checkpoint.headers import account, listed
from deepseek_attn.checkpoint.names import CanonicalSource
from deepseek_attn.checkpoint.selection import ASKED_FOR, UNKNOWN, Selection
from deepseek_attn.checkpoint.source import CheckpointSource, TensorInfo
from deepseek_attn.checkpoint.stored_weights import holds_nan, read_table_rows, read_weight
from deepseek_attn.checkpoint.unread import CheckpointWeight
from deepseek_attn.layers.weights import SlotKind, WeightSlot, checkpoint_slots
from deepseek_attn.utils.sizes import show_bytes


@dataclass(frozen=True, repr=False)
class LoadReport:
    """The outcome of a load.

    Attributes:
        loaded: published names of the tensors that were loaded, scales included.
        ignored: rule -> published names of the tensors that it excluded.
        bytes: stored bytes of the loaded tensors; of a sharded tensor, those of this rank's shard.
        by_row: tensors and scales that stay in the checkpoint and are read while the model runs: rows of tables, and
            routed experts with ``expert_memory="disk"``.
        mtp_loaded: the MTP layers of the model have weights. False if the model or the checkpoint has no MTP layers
            (transformers drops them), if the checkpoint has a DSpark drafter instead, and for partial loads.
    """

    loaded: tuple[str, ...]
    ignored: dict[str, tuple[str, ...]]
    bytes: int
    mtp_loaded: bool
    by_row: tuple[str, ...] = ()

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """Entries of ``ignored`` left out by a rule, not because the caller loads only a part of the model."""
        return {rule: names for rule, names in self.ignored.items() if rule not in ASKED_FOR}

    def __repr__(self) -> str:
        ignored = ", ".join(f"{len(names)} {rule}" for rule, names in self.ignored.items())
        return (
            f"LoadReport({len(self.loaded)} tensors, {show_bytes(self.bytes)}, ignored: {ignored or 'none'}, "
            f"mtp_loaded={self.mtp_loaded}{f', {len(self.by_row)} left in the checkpoint' if self.by_row else ''})"
        )


def load_model(
    model: nn.Module,
    source: CheckpointSource,
    layers: Iterable[int] | None = None,
    attention_only: bool = False,
    progress: bool = True,
    memory: int | None = None,
    host_memory: int | None = None,
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
        memory: bytes of the memory of the model's device; None: not checked.
        host_memory: bytes of host memory for weights that are kept there instead; None: not checked.

    Raises:
        ValueError: one error that lists every problem found in the headers; more bytes than a memory has; or values
            that a slot refuses (scales or router biases that are not finite, experts that do not exist), with their
            tensor.

    Warns:
        UserWarning: weights hold NaN, or there are tensors of a kind that no model here has; they are named.
    """
    return load_slots(checkpoint_slots(model), source, layers, attention_only, progress, memory, host_memory)


def load_slots(
    slots: dict[str, WeightSlot],
    source: CheckpointSource,
    layers: Iterable[int] | None = None,
    attention_only: bool = False,
    progress: bool = True,
    memory: int | None = None,
    host_memory: int | None = None,
) -> LoadReport:
    """`load_model` for any slots by published name."""
    source = source if isinstance(source, CanonicalSource) else CanonicalSource(source)
    entries = source.entries()
    selection = Selection.make(slots, entries, layers, attention_only)
    found = account(slots, source, selection)
    sizes = {pair: _loaded_bytes(slots[pair[0]], pair, entries) for pair in found.loaded}
    total, with_nan = sum(sizes.values()), []
    _check_memory(slots, found.loaded, entries, memory, host_memory)
    shown = None if progress else True  # None: tqdm shows the bar on a terminal only
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=shown) as bar:
        for pair, size in sizes.items():
            if _load(slots[pair[0]], source, pair[0]):
                with_nan.append(source.shown(pair[0]))
            bar.update(size)
    if unknown := [source.shown(name) for name in found.ignored.get(UNKNOWN, ())]:
        warnings.warn(
            f"{UNKNOWN} in the checkpoint ({len(unknown)}): {listed(unknown)}; the model computes without them",
            stacklevel=2,
        )
    if with_nan:
        warnings.warn(
            f"NaN in the checkpoint ({len(with_nan)}): {listed(with_nan)}; logits that depend on them are NaN",
            stacklevel=2,
        )
    for name, *_ in found.by_row:
        if (attach := slots[name].attach) is not None:
            slot = slots[name]
            if slot.kind is SlotKind.ROWS:
                attach(partial(read_table_rows, source, name))
            else:
                attach(CheckpointWeight(source, name, slot.shard, slot.block))
    loaded, by_row = tuple(chain(*found.loaded)), tuple(chain(*found.by_row))
    return LoadReport(loaded, found.ignored, total, any(name.startswith("mtp.") for name in loaded), by_row)


def _check_memory(
    slots: dict[str, WeightSlot],
    loaded: list[tuple[str, ...]],
    entries: dict[str, TensorInfo],
    memory: int | None,
    host_memory: int | None,
) -> None:
    """ValueError if the weights do not fit in the device's memory, or the host part does not fit in host memory."""
    in_host = in_device = 0
    for pair in loaded:
        size = _held_bytes(slots[pair[0]], pair, entries)
        if slots[pair[0]].in_host:
            in_host += size
        else:
            in_device += size
    if memory is not None and in_device > memory:
        raise ValueError(
            f"the weights have {in_device:,} bytes, and there is memory for {memory:,}: keep routed experts elsewhere "
            "(expert_memory='disk', or 'host' for a GPU), use more ranks, some of the layers (layers=[...]), or "
            "another device"
        )
    if host_memory is not None and in_host > host_memory:
        raise ValueError(
            f"expert_memory='host': the routed experts have {in_host:,} bytes, and {host_memory:,} bytes of host "
            "memory are available: use expert_memory='disk', more ranks on more hosts, or end other programs"
        )


def _held_bytes(slot: WeightSlot, pair: tuple[str, ...], entries: dict[str, TensorInfo]) -> int:
    """Bytes of a loaded tensor with its scale, or of this rank's shard of them."""
    if slot.dense is None or (len(pair) > 1 and slot.keeps_quantized):
        return _loaded_bytes(slot, pair, entries)
    return slot.dense * prod(slot.shape if slot.shard is None else slot.shard.of(slot.shape))


def _loaded_bytes(slot: WeightSlot, pair: tuple[str, ...], entries: dict[str, TensorInfo]) -> int:
    """Stored bytes of a tensor and its scale, or of this rank's shard of them."""
    total = sum(entries[name].nbytes for name in pair)
    return total if slot.shard is None else total * slot.shard.size // slot.shape[slot.shard.dim]


def _load(slot: WeightSlot, source: CanonicalSource, name: str) -> bool:
    """Fills a slot; returns whether the tensor holds a NaN."""
    # a separate function: the tensor is released before the next one is read
    try:
        weight, scale = read_weight(source, name, slot.shard, slot.block)
        slot.load(weight, scale)
    except ValueError as error:
        raise ValueError(f"cannot load {source.shown(name)}: {error}") from error
    return holds_nan(weight)
