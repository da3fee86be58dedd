"""Tensor names: the published spelling, and other spellings of the same tensors in checkpoints.

The published checkpoints call a tensor ``layers.3.attn.wq_a.weight``; transformers calls it
``model.layers.3.self_attn.q_a_proj.weight`` and packs the experts of a layer into two tensors. Everything past this
file knows the published names only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from deepseek_attn.checkpoint.source import CheckpointSource, TensorInfo
from deepseek_attn.checkpoint.stored_weights import read_float32, scale_name
from deepseek_attn.layers.weights import Shard

Rules = tuple[tuple[str, str], ...]

# (transformers, published), as whole dotted segments. Read downwards to get published names, upwards to get
# transformers' names; the order matters where one rule produces the input of another.
BLOCK_RULES: Rules = (
    (".embed_tokens.", ".embed."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
)
EXPERT_RULES: Rules = (
    (".gate.e_score_correction_bias.", ".gate.bias."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)
RULES: Rules = (
    (".lm_head.", ".head."),
    (".hc_head.hc_fn.", ".hc_head_fn."),
    (".hc_head.hc_base.", ".hc_head_base."),
    (".hc_head.hc_scale.", ".hc_head_scale."),
    (".attn_hc.fn.", ".hc_attn_fn."),
    (".attn_hc.base.", ".hc_attn_base."),
    (".attn_hc.scale.", ".hc_attn_scale."),
    (".ffn_hc.fn.", ".hc_ffn_fn."),
    (".ffn_hc.base.", ".hc_ffn_base."),
    (".ffn_hc.scale.", ".hc_ffn_scale."),
    *BLOCK_RULES,
    (".sinks.", ".attn_sink."),
    (".q_a_proj.", ".wq_a."),
    (".q_a_norm.", ".q_norm."),
    (".q_b_proj.", ".wq_b."),
    (".kv_proj.", ".wkv."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".position_bias.", ".ape."),
    (".compressor.indexer.", ".indexer.compressor."),
    (".indexer.compressor.wq_b.", ".indexer.wq_b."),
    (".indexer.compressor.scorer.weights_proj.", ".indexer.weights_proj."),
    (".compressor.gate_proj.", ".compressor.wgate."),
    (".compressor.kv_norm.", ".compressor.norm."),
    *EXPERT_RULES,
)
# Of packed experts and of scales, which are written one way only.
READ_ONLY_RULES: Rules = (
    (".gate_up_proj_scale_inv.", ".gate_up_proj.scale."),
    (".down_proj_scale_inv.", ".w2.scale."),
    (".weight_scale_inv.", ".scale."),
)
# transformers 5.23 writes the layer's kv_norm by the rule that is meant for the compressor's.
SAVED_KV_NORM = (".attn.norm.", ".attn.kv_norm.")
EXPERT = re.compile(r"(?P<layer>.+)\.experts\.(?P<expert>\d+)\.(?P<projection>w[123])\.weight")
# Packed experts under `canonical_name`: a projection without an expert number.
PACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<projection>gate_up_proj|w2)(?:\.(?P<leaf>weight|scale))?")


def canonical_name(name: str) -> str:
    """Published name of a tensor in any known spelling; a name that is published or unknown comes back unchanged.

    Accepts the names of transformers, a ``model.`` prefix, and ``self_attn``, ``mlp``, ``weight_scale_inv`` and
    ``e_score_correction_bias`` in otherwise published names. Packed experts stay packed (see ``CanonicalSource``).
    """
    return _canonical(name.removeprefix("model."))


def renaming(rules: Rules) -> Callable[[str], str]:
    """A function that gives a name after all rules that fit, from the first to the last."""
    any_rule = re.compile("|".join(re.escape(stored) for stored, _ in rules))

    def rename(name: str) -> str:
        dotted = f".{name}."
        if any_rule.search(dotted) is None:  # as for most names of published checkpoints
            return name
        for stored, published in rules:
            dotted = dotted.replace(stored, published)
        return dotted[1:-1]

    return rename


def renaming_back(rules: Rules) -> Callable[[str], str]:
    """The inverse of `renaming`; a scale gets the name that transformers gives it."""
    rename = renaming(tuple((ours, stored) for stored, ours in reversed(rules)))

    def rename_back(published: str) -> str:
        name = rename(published)
        return name.removesuffix("scale") + "weight_scale_inv" if published.endswith(".scale") else name

    return rename_back


_canonical = renaming((*RULES, *READ_ONLY_RULES, SAVED_KV_NORM))
_back = renaming_back(RULES)


def hf_name(published: str) -> str:
    """The name that transformers gives a published tensor.

    Experts get one name each (``…mlp.experts.3.gate_proj.weight``); a transformers module has them packed, see
    ``hf_state_dict``.
    """
    name = _back(published)
    return name if name.startswith("lm_head.") else f"model.{name}"


class Origin(NamedTuple):
    """The tensor of a source that holds a tensor: as part ``index`` of ``count`` equal ones."""

    name: str
    index: int
    count: int


class CanonicalSource(CheckpointSource):
    """Any source under published names, with one tensor per expert.

    Packed experts (``gate_up_proj [E, 2I, D]``, rows of w1 first, and ``down_proj [E, D, I]``) appear as ``E * 2`` and
    ``E`` tensors; each is read as its own part of the packed one.

    Args:
        canonical: gives the published name of a source's name; an attribute too.

    Raises:
        ValueError: two tensors of the source have one published name, or packed experts do not split evenly.
    """

    def __init__(self, source: CheckpointSource, canonical: Callable[[str], str] = canonical_name):
        self.source, self.canonical = source, canonical
        self._entries: dict[str, TensorInfo] = {}
        self._origins: dict[str, Origin] = {}
        for name, info in source.entries().items():
            for published, part_info, origin in _expand(name, canonical(name), info):
                if published in self._origins:
                    raise ValueError(
                        f"{self.source_name(published)} and {name} are both {published}: remove one of them"
                    )
                self._entries[published] = part_info
                self._origins[published] = origin

    @property
    def reads_in_threads(self) -> bool:
        return self.source.reads_in_threads

    def entries(self) -> dict[str, TensorInfo]:
        return self._entries

    def read(self, name: str) -> torch.Tensor:
        if name not in self._origins:
            raise ValueError(f"no tensor {name} in the checkpoint")
        origin = self._origins[name]
        return self.source.read(origin.name) if origin.count == 1 else self.source.read_part(*origin)

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        if name in self._origins and self._origins[name].count == 1:
            return self.source.read_shard(self._origins[name].name, shard)
        return super().read_shard(name, shard)

    def read_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if name in self._origins and self._origins[name].count == 1:
            return self.source.read_rows(self._origins[name].name, rows)
        return super().read_rows(name, rows)

    def token_numbers(self, count: int, vocab_size: int) -> Sequence[int]:
        return self.source.token_numbers(count, vocab_size)

    def source_name(self, name: str) -> str:
        """Name of the tensor in the wrapped source."""
        return self._origins[name].name

    def shown(self, name: str) -> str:
        """The published name for a message, with the stored one where it differs."""
        stored = self.source_name(name)
        return name if stored == name else f"{name} (stored as {stored})"


def _expand(name: str, published: str, info: TensorInfo) -> list[tuple[str, TensorInfo, Origin]]:
    """(published name, info, origin) of everything the source tensor ``name`` holds."""
    packed = PACKED.fullmatch(published)
    if packed is None:
        return [(published, info, Origin(name, 0, 1))]
    projections = ("w1", "w3") if packed["projection"] == "gate_up_proj" else ("w2",)
    if len(info.shape) != 3 or info.shape[1] % len(projections):
        raise ValueError(
            f"{name} has shape {list(info.shape)}: packed experts are [experts, rows, columns]"
            + (" with an equal number of rows for w1 and w3" if len(projections) > 1 else "")
        )
    experts, rows, columns = info.shape
    count = experts * len(projections)
    if not 0 < count <= info.nbytes:
        raise ValueError(f"{name} has shape {list(info.shape)}, and {info.nbytes} bytes: packed experts are not empty")
    part = TensorInfo(info.dtype, (rows // len(projections), columns), info.nbytes // count)
    parts = [f"{packed['experts']}.{e}.{p}.{packed['leaf'] or 'weight'}" for e in range(experts) for p in projections]
    return [(part_name, part, Origin(name, index, count)) for index, part_name in enumerate(parts)]


def hf_state_dict(source: CheckpointSource, to_hf: Callable[[str], str] = hf_name) -> dict[str, torch.Tensor]:
    """A state dict for transformers' model: dequantised float32, experts packed, no MTP.

    Holds the whole model in float32; meant for comparisons on small models.

    Args:
        source: DeepSeek-V4 under any spelling, or a ``CanonicalSource``.
        to_hf: gives transformers' name of a published name.
    """
    source = source if isinstance(source, CanonicalSource) else CanonicalSource(source)
    state: dict[str, torch.Tensor] = {}
    experts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    entries = source.entries()
    scales = {scale_name(name) for name in entries}
    for name in entries:
        if name.startswith("mtp.") or name in scales:
            continue
        expert = EXPERT.fullmatch(name)
        if expert:
            stack = experts.setdefault((expert["layer"], expert["projection"]), {})
            stack[int(expert["expert"])] = read_float32(source, name)
        else:
            state[to_hf(name)] = source.read(name) if name.endswith("tid2eid") else read_float32(source, name)
    for layer in sorted({layer for layer, _ in experts}):
        w1, w2, w3 = (_stack(experts.pop((layer, projection))) for projection in ("w1", "w2", "w3"))
        packed = to_hf(f"{layer}.experts")
        state[f"{packed}.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        state[f"{packed}.down_proj"] = w2
    return state


def _stack(tensors: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensors[index] for index in range(len(tensors))])
