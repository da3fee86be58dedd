"""Which tensors of a checkpoint a load reads, and the rules by which it leaves others out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from deepseek_attn.checkpoint.published import canonical_names
from deepseek_attn.checkpoint.source import TensorInfo
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.options import is_integer

DRAFTER_MARK = "mtp.0.main_proj.weight"

INV_FREQ = "rotary inv_freq buffers"
CONFIDENCE = "confidence of DSpark drafts, by which none is left out"
MTP_COPIES = "mtp.*emb* / mtp.*head.weight copies"
DRAFTER = "DSpark drafter"
VISION = "vision tensors, of which text needs none"
MTP_UNUSED = "MTP layers not in the model"
OTHER_LAYERS = "layers not requested"
ATTENTION_ONLY = "attention only"
OTHER_RANK = "on another rank"
UNKNOWN = "unknown tensors"
ASKED_FOR = (OTHER_LAYERS, ATTENTION_ONLY, OTHER_RANK)  # left out because the caller wants a part of the model
_INV_FREQ = re.compile(r"(.+\.)?(\w+_)?inv_freq")
_MTP_COPY = re.compile(r"mtp\.(?!\d+\.markov_head\.)(.*emb.*|(.+\.)?head\.(weight|scale))")
_CONFIDENCE = re.compile(r"mtp\.\d+\.confidence_head\..+")
VISION_NAME = re.compile(
    r"((vision|aligner)\..+|image_(start|end|newline|pad)(\.weight)?|(layers|mtp)\.\d+\.ffn\.gate\.bias_vl)"
)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_ATTENTION = re.compile(r"attn\..+|attn_norm\.weight")


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
        drafter_stored, drafter_wanted = DRAFTER_MARK in entries, DRAFTER_MARK in names
        if drafter_stored and not drafter_wanted:
            mtp_rule = DRAFTER
        elif attention_only:
            mtp_rule = ATTENTION_ONLY
        elif layers is not None:
            mtp_rule = OTHER_LAYERS
        else:
            wanted = any(name.startswith("mtp.") for name in names)
            stored = any(name.startswith("mtp.") and not _is_copy(name) for name in entries)
            mtp_rule = None if wanted and stored and drafter_stored == drafter_wanted else MTP_UNUSED
        return cls(layers, attention_only, mtp_rule)

    def rule(self, name: str) -> str | None:
        """The rule that excludes a tensor or slot of this published name; None if it is to be loaded."""
        if name.startswith("mtp.") and self.mtp_rule is not None:
            return self.mtp_rule
        if VISION_NAME.fullmatch(name):
            return VISION
        if _CONFIDENCE.fullmatch(name):
            return CONFIDENCE
        layer = _LAYER.fullmatch(name)
        if layer and self.layers is not None and int(layer[1]) not in self.layers:
            return OTHER_LAYERS
        if self.attention_only and not (layer and _ATTENTION.fullmatch(layer[2])):
            return ATTENTION_ONLY
        return None

    def source_rule(self, name: str) -> str | None:
        """The rule that excludes a tensor of a source; also names tensors that no model loads."""
        if _INV_FREQ.fullmatch(name):
            return INV_FREQ
        if _MTP_COPY.fullmatch(name) and self.mtp_rule != DRAFTER:
            return MTP_COPIES
        return self.rule(name)


def needed_tensors(config: AnyConfig, layers: Iterable[int] | None, attention_only: bool) -> Callable[[str], bool]:
    """Whether a load of these layers reads a tensor, judged by its stored name: others need not be there."""
    chosen = None if layers is None else frozenset(layer for layer in layers if is_integer(layer))
    partial = chosen is not None or attention_only
    selection = Selection(chosen, attention_only, OTHER_LAYERS if partial else None)
    published = canonical_names(config)
    return lambda name: selection.rule(published(name)) is None


def _is_copy(name: str) -> bool:
    return bool(_INV_FREQ.fullmatch(name) or _MTP_COPY.fullmatch(name))
