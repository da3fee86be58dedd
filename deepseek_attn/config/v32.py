"""DeepSeek-V3.2 (``deepseek_v32``) and DeepSeek-V3 / V3.1 (``deepseek_v3``, the same model without an indexer)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from deepseek_attn.config.base import ConfigBase, LayerBase
from deepseek_attn.config.common import (
    IndexSizes,
    RopeSpec,
    agreed_yarn,
    check_index_head,
    check_num_experts,
    check_rope_dim,
    known,
    read_formats,
    read_theta,
    read_tokens,
    read_yarn,
)
from deepseek_attn.config.fields import FieldReader
from deepseek_attn.config.keys import V32, ConfigReader

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "max_position_embeddings"),
)
ARCHITECTURES = {"deepseek_v32": "DeepseekV32ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
INDEX_SIZES = ("index_n_heads", "index_head_dim", "index_topk")
LAYER_TYPES = {  # transformers 5.17 writes the second name
    "deepseek_v32": ("indexed_attention", "deepseek_sparse_attention"),
    "deepseek_v3": ("full_attention",),
}


@dataclass(frozen=True)
class V32LayerSpec(LayerBase):
    """Configuration of one layer.

    Attributes:
        index: position among the backbone layers, or among the MTP layers when ``is_mtp``.
        dense_ffn: one wide MLP instead of experts.
        has_indexer: queries read the ``index_topk`` tokens that a lightning indexer selects, otherwise all tokens.
        rope: the rotary embedding, the same for all layers.
        is_mtp: a multi-token-prediction layer (``model.layers.{num_hidden_layers + index}`` in a checkpoint).
        ratio: one entry per token, in step metadata; compresses, overlap: no entry pools several tokens.
        lists_entries: without an indexer, keys are gathered whole and no index rows are made.
    """

    index: int
    dense_ffn: bool
    has_indexer: bool
    rope: RopeSpec
    is_mtp: bool = False
    hash_routing: ClassVar[bool] = False
    ratio: ClassVar[int] = 1
    compresses: ClassVar[bool] = False
    overlap: ClassVar[bool] = False
    lists_entries: ClassVar[bool] = False

    def unnumbered(self) -> Self:
        return replace(self, index=0)

    @property
    def kind(self) -> str:
        """``"DSA"`` (sparse attention behind an indexer) or ``"MLA"`` (dense)."""
        return "DSA" if self.has_indexer else "MLA"


@dataclass(frozen=True)
class DeepseekV32Config(ConfigBase):
    """A checked configuration of the V3 family; fields have the names of the published ``config.json``.

    Made by ``ModelConfig.from_dict``, ``from_pretrained`` and ``from_preset``, depending on ``model_type``; ``replace``
    makes variants. The spelling of transformers (``rope_parameters``, ``mlp_layer_types``) is read too.
    Absent keys default to ``num_nextn_predict_layers`` 0, ``rms_norm_eps`` 1e-6, ``norm_topk_prob`` true,
    ``n_shared_experts`` 1, ``bos_token_id`` 0, ``eos_token_id`` 1, ``torch_dtype`` bfloat16 and no rope scaling; all
    others are required. `config.keys.V32` lists all keys. ``replace(model_type="deepseek_v3")`` drops
    the indexer's keys.

    Attributes:
        index_n_heads, index_head_dim, index_topk: the indexer's; None for ``deepseek_v3``.
        layers, mtp_layers: one spec per layer.
    """

    OPTIONAL: ClassVar = ("rope_scaling", "quantization_config", *INDEX_SIZES)

    dspark: ClassVar[None] = None

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int | None
    index_head_dim: int | None
    index_topk: int | None
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(hash=False)
    max_position_embeddings: int
    num_nextn_predict_layers: int
    bos_token_id: int
    eos_token_id: int | tuple[int, ...]
    dtype: str
    quantization_config: dict[str, Any] | None = field(hash=False)
    layers: tuple[V32LayerSpec, ...]
    mtp_layers: tuple[V32LayerSpec, ...]

    scoring_func: ClassVar[str] = "sigmoid"
    swiglu_limit: ClassVar[float] = 0.0  # SwiGLU is not clamped

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_dim(self) -> int:
        """Channels of a cached row, and of an absorbed query: latent and rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``qk_head_dim ** -0.5``, times the square of YaRN's ``0.1 mscale ln(factor) + 1``."""
        scaling, scale = self.rope_scaling, self.qk_head_dim**-0.5
        if scaling is None or scaling["factor"] <= 1:
            return scale
        return scale * (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2

    @property
    def has_indexer(self) -> bool:
        return self.index_topk is not None

    @property
    def index_sizes(self) -> IndexSizes:
        """Sizes of the indexer.

        Raises:
            ValueError: the model (``deepseek_v3``) lacks an indexer.
        """
        heads, dim, topk = self.index_n_heads, self.index_head_dim, self.index_topk
        if heads is None or dim is None or topk is None:
            raise ValueError(f"a {self.model_type} config has no indexer: index_n_heads is absent")
        return IndexSizes(heads, dim, topk)

    @property
    def expert_dtype(self) -> str | None:
        """How experts are stored: ``"fp8"``, or None without a ``quantization_config``."""
        return None if self.quantization_config is None else "fp8"

    @property
    def power_of_two_scales(self) -> bool:
        """FP8 scales of activations are powers of two (V3.1 and V3.2: ``scale_fmt`` ue8m0; absent in V3)."""
        return (self.quantization_config or {}).get("scale_fmt") == "ue8m0"

    @property
    def all_layers(self) -> tuple[V32LayerSpec, ...]:
        return self.layers + self.mtp_layers

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], origin: str = "dict") -> DeepseekV32Config:
        """Builds a config from decoded JSON whose ``model_type`` belongs to this family.

        Raises:
            ValueError: one error that lists every problem; ``origin`` names the config in it.
        """
        return cls(**copy.deepcopy(read_v32(raw, origin)))

    def constants(self) -> dict[str, Any]:
        return {
            "architectures": [ARCHITECTURES["deepseek_v32" if self.has_indexer else "deepseek_v3"]],
            **V32.constants(),
            "num_key_value_heads": self.num_attention_heads,
        }

    def adapt(self, raw: dict[str, Any], changes: Mapping[str, Any]) -> None:
        if "num_attention_heads" in changes:
            del raw["num_key_value_heads"]
        if changes.get("model_type") == "deepseek_v3":
            for key in INDEX_SIZES:
                raw.pop(key, None)


def read_v32(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns all fields of a ``DeepseekV32Config``.

    Raises:
        ValueError: one error that lists every problem; ``origin`` names the config in it.
    """
    reader = ConfigReader(V32, {"": raw})
    values: dict[str, Any] = {"model_type": reader.as_choice("model_type", raw.get("model_type"), tuple(ARCHITECTURES))}
    values.update({key: reader.integer(key) for key in SIZES})
    if values["num_attention_heads"] is not None:
        heads = values["num_attention_heads"]
        reader.choice("num_key_value_heads", (heads,), heads)
    values.update(_read_indexer(reader, values["model_type"]))
    values["first_k_dense_replace"] = _read_dense_layers(reader, values["num_hidden_layers"])
    values["n_shared_experts"] = reader.integer("n_shared_experts", 1)
    values["norm_topk_prob"] = reader.flag("norm_topk_prob", True)
    values["routed_scaling_factor"] = reader.number("routed_scaling_factor")
    values["rms_norm_eps"] = reader.number("rms_norm_eps", 1e-6)
    values["num_nextn_predict_layers"] = reader.integer("num_nextn_predict_layers", 0, minimum=0)
    values.update(_read_rope(reader), **read_tokens(reader, values["vocab_size"]))
    values.update(read_formats(reader, block=128, scales=("ue8m0", "float")))
    _check_relations(reader, values)
    reader.finish(origin)
    return values | _layers(values)


def _read_indexer(reader: FieldReader, model_type: str | None) -> dict[str, Any]:
    if model_type == "deepseek_v32":
        return {key: reader.integer(key) for key in INDEX_SIZES}
    given = [key for key in INDEX_SIZES if reader.raw.get(key) is not None]
    if given and model_type is not None:
        reader.problem(f"{', '.join(given)} in a {model_type} config: only deepseek_v32 has an indexer")
    return dict.fromkeys(INDEX_SIZES)


def _read_dense_layers(reader: FieldReader, num_layers: int | None) -> int | None:
    """``first_k_dense_replace``, or the leading ``dense`` entries of transformers' ``mlp_layer_types``.

    The key has no default here: DeepSeek's inference code has 1, transformers 3.
    """
    spellings = {"first_k_dense_replace": reader.raw.get("first_k_dense_replace")}
    kinds = reader.as_list("mlp_layer_types", reader.raw.get("mlp_layer_types"))
    if kinds is not None:
        count = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if any(kind != "sparse" for kind in kinds[count:]) or len(kinds) != (num_layers or len(kinds)):
            reader.problem(f"mlp_layer_types is {kinds!r}: expected {num_layers} entries, dense before sparse")
        elif spellings["first_k_dense_replace"] is None:
            spellings["first_k_dense_replace"] = count
        elif min(spellings["first_k_dense_replace"], len(kinds)) != count:
            reader.agreed("dense layers", spellings | {"dense entries of mlp_layer_types": count})
    value = reader.agreed("first_k_dense_replace", spellings)
    return reader.as_integer("first_k_dense_replace", value, minimum=0)


def _read_rope(reader: FieldReader) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``, or transformers' ``rope_parameters``, which holds both."""
    parameters = reader.mapping("rope_parameters") or {}
    thetas = {
        "rope_theta": reader.raw.get("rope_theta"),
        "rope_parameters.rope_theta": parameters.get("rope_theta"),
    }
    reader.as_choice("rope_parameters.partial_rotary_factor", parameters.get("partial_rotary_factor"), (1.0, 1))
    spellings = {"rope_scaling": reader.mapping("rope_scaling"), "rope_parameters": parameters}
    scalings = {name: _read_scaling(reader, name, spelling) for name, spelling in spellings.items()}
    return {
        "rope_theta": read_theta(reader, "rope_theta", thetas),
        "rope_scaling": agreed_yarn(reader, spellings, scalings),
    }


def _read_scaling(reader: FieldReader, label: str, raw: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """YaRN whose attention factor scales the logits, not cos and sin.

    This requires equal ``mscale`` and ``mscale_all_dim``. If they are absent or differ, libraries scale cos and sin
    instead, which is another model.
    """
    scaling = read_yarn(reader, label, raw)
    if scaling is None or raw is None:
        return None
    for key in ("mscale", "mscale_all_dim"):
        if raw.get(key) is None:
            reader.missing(f"{label}.{key}")
        scaling[key] = reader.as_number(f"{label}.{key}", raw.get(key))
    given = scaling["mscale"], scaling["mscale_all_dim"]
    if None not in given and given[0] != given[1]:
        reader.problem(f"{label}.mscale is {given[0]} and mscale_all_dim {given[1]}: supported are equal values only")
    return scaling


def _check_relations(reader: FieldReader, values: Mapping[str, Any]) -> None:
    check_num_experts(reader, values)
    check_rope_dim(reader, values["qk_rope_head_dim"])
    check_index_head(reader, values)
    reader.as_choice(
        "quantization_config.expert_dtype", (values["quantization_config"] or {}).get("expert_dtype"), ("fp8",)
    )
    _check_derived(reader, values)
    _check_groups(reader, known(values, "n_routed_experts", "n_group", "topk_group", "num_experts_per_tok"))


def _check_derived(reader: FieldReader, values: Mapping[str, Any]) -> None:
    """Checks keys that transformers writes although other keys determine them."""
    if sizes := known(values, "qk_nope_head_dim", "qk_rope_head_dim"):
        for key, size in (("qk_head_dim", sum(sizes)), ("head_dim", sizes[1])):
            reader.choice(key, (size,), size)
    if sizes := known(values, "model_type", "num_hidden_layers"):
        names, layers = LAYER_TYPES[sizes[0]], sizes[1]
        given = reader.as_list("layer_types", reader.value("layer_types", None))
        if given is not None and given not in [[name] * layers for name in names]:
            supported = " or ".join(map(repr, names))
            reader.problem(f"layer_types is {given!r}: supported is {supported} for each of {layers} layers")


def _check_groups(reader: FieldReader, sizes: tuple[int, ...] | None) -> None:
    """Checks expert groups: a group's score needs two experts, and the chosen groups must hold enough experts."""
    if sizes is None:
        return
    experts, groups, kept, chosen = sizes
    if kept > groups:
        reader.problem(f"topk_group {kept} is above n_group {groups}")
    if experts % groups or experts // groups < 2:
        reader.problem(f"n_routed_experts {experts} in n_group {groups}: expected equal groups of two or more")
    elif chosen > min(kept, groups) * (experts // groups):
        reader.problem(
            f"num_experts_per_tok {chosen} is above the {min(kept, groups) * (experts // groups)} experts of "
            f"topk_group {kept} groups"
        )


def _layers(values: Mapping[str, Any]) -> dict[str, tuple[V32LayerSpec, ...]]:
    rope = RopeSpec.scaled(values["rope_theta"], values["qk_rope_head_dim"], values["rope_scaling"])
    indexer = values["index_topk"] is not None
    return {
        "layers": tuple(
            V32LayerSpec(i, i < values["first_k_dense_replace"], indexer, rope)
            for i in range(values["num_hidden_layers"])
        ),
        "mtp_layers": tuple(
            V32LayerSpec(i, False, indexer, rope, is_mtp=True) for i in range(values["num_nextn_predict_layers"])
        ),
    }
