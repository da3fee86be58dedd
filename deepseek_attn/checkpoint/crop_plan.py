"""The parts of a checkpoint that a crop keeps, checked against its config before anything is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from deepseek_attn.checkpoint.selection import VISION_NAME
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.options import is_integer
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.config.v41 import DeepseekV41Config

PARTS = ("mtp", "engram", "vision")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.)?ffn\.experts\.(\d+)\..+")


@dataclass(frozen=True)
class CropPlan:
    """The layers, experts and tokens of a model that a crop keeps. Numbers count in the model.

    Attributes:
        config: the model's config.
        layers: kept backbone layers, ascending: layer ``layers[i]`` becomes layer i.
        experts: kept routed experts of each layer, ascending: expert ``experts[i]`` becomes expert i. The first
            experts, or the first of each group (V3).
        draft_experts: kept experts of the MTP layers or DSpark stages.
        experts_per_token, draft_experts_per_token: the config's, or fewer where fewer are kept.
        vocab_size: tokens 0 to ``vocab_size - 1`` are kept.
        without: parts that are left out, of `PARTS`.
        notes: parts and values that were dropped or lowered although the caller did not name them.
    """

    config: AnyConfig
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    draft_experts: tuple[int, ...]
    experts_per_token: int
    draft_experts_per_token: int
    vocab_size: int
    without: frozenset[str]
    notes: tuple[str, ...]

    @classmethod
    def make(
        cls,
        config: AnyConfig,
        layers: Iterable[int] | None = None,
        experts: int | None = None,
        vocab_size: int | None = None,
        without: Iterable[str] = (),
    ) -> Self:
        """The plan for these arguments of `crop_checkpoint`.

        Raises:
            ValueError: they name layers, experts, tokens or parts that the model does not have, or leave out a layer
                that a kept one reads; with the remedy.
        """
        parts, notes = frozenset(without), []
        if unknown := sorted(parts - set(PARTS)):
            raise ValueError(f"without {', '.join(unknown)}: supported are {', '.join(PARTS)}")
        chosen = _check_layers(config, layers)
        if isinstance(config, DeepseekV41Config) and config.engram is not None and "engram" not in parts:
            _check_engram(config.engram.engram_layer_ids, chosen, vocab_size)
        tokens = _check_vocab(config, vocab_size)
        if config.dspark is not None and "mtp" not in parts:
            targets, noise = config.dspark.dspark_target_layer_ids, config.dspark.dspark_noise_token_id
            if lost := sorted(set(targets) - set(chosen)):
                notes.append(
                    f"the DSpark drafter is left out: it reads layers {list(targets)}, and {lost} are not kept"
                )
                parts |= {"mtp"}
            elif noise >= tokens:
                notes.append(f"the DSpark drafter is left out: its noise token {noise} is not kept")
                parts |= {"mtp"}
        kept, count = _check_experts(config, experts)
        per_token = min(config.num_experts_per_tok, count)
        stages = config.num_experts_per_tok if config.dspark is None else config.draft_stages.num_experts_per_tok
        of_drafts = kept
        if config.dspark is not None:
            of_drafts = tuple(range(min(len(kept), config.draft_stages.n_routed_experts)))
        if per_token < config.num_experts_per_tok:
            notes.append(f"each token has {per_token} experts instead of {config.num_experts_per_tok}")
        drafts_per_token = min(stages, count if config.dspark is None else len(of_drafts))
        return cls(config, chosen, kept, of_drafts, per_token, drafts_per_token, tokens, parts, tuple(notes))

    @cached_property
    def new_layer(self) -> dict[int, int]:
        """Number of each kept layer in the crop."""
        return {old: new for new, old in enumerate(self.layers)}

    @cached_property
    def new_expert(self) -> dict[int, int]:
        """Number of each kept expert in the crop."""
        return {old: new for new, old in enumerate(self.experts)}

    @cached_property
    def new_draft_expert(self) -> dict[int, int]:
        """The same of the MTP layers or DSpark stages."""
        return {old: new for new, old in enumerate(self.draft_experts)}

    def experts_of(self, canonical: str) -> dict[int, int]:
        """`new_expert` of the layer that has the tensor of this canonical name."""
        return self.new_draft_expert if canonical.startswith("mtp.") else self.new_expert

    def keeps(self, canonical: str) -> bool:
        """Whether the crop has the tensor of this canonical name."""
        if canonical.startswith("mtp.") and "mtp" in self.without:
            return False
        if VISION_NAME.fullmatch(canonical) and "vision" in self.without:
            return False
        layer = _LAYER.fullmatch(canonical)
        if layer and int(layer[1]) not in self.new_layer:
            return False
        if layer and layer[2].startswith("engram.") and "engram" in self.without:
            return False
        expert = _EXPERT.fullmatch(canonical)
        return expert is None or int(expert[2]) in self.experts_of(canonical)


def _check_layers(config: AnyConfig, layers: Iterable[int] | None) -> tuple[int, ...]:
    """The layers in the model's order, each once."""
    count = config.num_hidden_layers
    if layers is None:
        return tuple(range(count))
    given = list(layers)
    wrong = [layer for layer in given if not is_integer(layer) or not 0 <= layer < count]
    if wrong or not given:
        raise ValueError(
            f"layers={given!s:.80}: {config.model_type} has layers 0 to {count - 1} here; name at least one"
        )
    chosen, needed = sorted(set(given)), config.with_sources(given)
    if missing := sorted(set(needed) - set(chosen)):
        raise ValueError(
            f"layers={chosen}: they read entries or selections of layers {missing}; take layers={needed}, written "
            f"{','.join(map(str, needed))}"
        )
    return tuple(chosen)


def _check_engram(tables: tuple[int, ...], layers: tuple[int, ...], vocab_size: int | None) -> None:
    """The hash of a table is made of its layer's number and of its place among the tables: both must stay."""
    kept = [layer for layer in tables if layer in layers]
    moved = [layer for place, layer in enumerate(kept) if tables[place] != layer or layers.index(layer) != layer]
    if moved:
        needed = sorted({*layers, *range(max(moved) + 1)})
        raise ValueError(
            f"layers={list(layers)}: rows of the n-gram memory (Engram) of layers {moved} are found by a hash of the "
            "layer's number, which changes unless all layers before are kept; leave the memory out (--without engram), "
            f"or take layers={needed}"
        )
    if kept and vocab_size is not None:
        raise ValueError(
            f"vocab_size={vocab_size}: the n-gram memory (Engram) of layers {kept} is addressed by the texts of all "
            "tokens; leave it out (--without engram), or keep the vocabulary"
        )


def _check_vocab(config: AnyConfig, vocab_size: int | None) -> int:
    if vocab_size is None:
        return config.vocab_size
    special = max(config.bos_token_id, *config.eos_token_ids)
    if not is_integer(vocab_size) or not special < vocab_size <= config.vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: expected {special + 1}, which keeps the tokens of beginning and end, to "
            f"{config.vocab_size}"
        )
    return vocab_size


def _check_experts(config: AnyConfig, experts: int | None) -> tuple[tuple[int, ...], int]:
    """The kept experts, and the most that one token can have of them."""
    total = config.n_routed_experts
    count = total if experts is None else experts
    if not is_integer(count) or not 1 <= count <= total:
        raise ValueError(f"experts={experts}: the model has {total} routed experts in a layer; keep 1 to {total}")
    if not isinstance(config, DeepseekV32Config):
        return tuple(range(count)), count
    groups = config.n_group
    size, rest = divmod(count, groups)
    if rest or size < 2:
        raise ValueError(
            f"experts={experts}: the router chooses among {groups} groups (n_group) by the two best experts of each: "
            "each group must keep the same number, two at least; keep a multiple of "
            f"{groups} from {2 * groups} on, up to {total}"
        )
    kept = tuple(group * (total // groups) + place for group in range(groups) for place in range(size))
    return kept, config.topk_group * size
