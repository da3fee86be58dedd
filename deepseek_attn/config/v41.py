"""DeepSeek-V4.1 (``deepseek_v41``): V4's layers, which share compressed entries, index keys and selections."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from deepseek_attn.config.common import RopeSpec, check_index_head, known
from deepseek_attn.config.dspark import DSparkConfig, drop_dspark
from deepseek_attn.config.engram import EngramConfig, read_engram
from deepseek_attn.config.fields import MAX_INTEGER, FieldReader
from deepseek_attn.config.keys import V41, ConfigReader
from deepseek_attn.config.v4 import DeepseekV4Base, LayerSpec
from deepseek_attn.config.v4_reader import read_shared

RATIOS = (0, 1, 2)
FP8_BLOCK = 32
# Keys of DeepSeek's inference code -> keys of ``rope_scaling``.
INFERENCE_SCALING = {
    "original_seq_len": "original_max_position_embeddings",
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
SOURCES = ("kv_source_layer_ids", "index_source_layer_ids")
CANDIDATES = ("candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size")
TOP_LEVEL = (
    *("architectures", "model_type", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"),
    *("quantization_config", "vision_config", "initializer_range"),
)


@dataclass(frozen=True)
class V41LayerSpec(LayerSpec):
    """Configuration of one layer. ``ratio`` names the entries that the layer reads; another layer may make them.

    Attributes:
        kv_source: number of the layer whose entries and index keys this layer reads, maybe itself; None with ratio 0.
        index_source: number of the layer whose selection this layer reads, maybe itself; None with ratio 0.
        candidate_source: number of the layer whose candidate blocks limit this layer's selection; None: no limit. The
            layer that makes the blocks has its own number, and is not limited.
        has_engram: an n-gram memory is added to the residual streams before the layer.
    """

    kv_source: int | None = None
    index_source: int | None = None
    candidate_source: int | None = None
    has_engram: bool = False

    @property
    def owns_entries(self) -> bool:
        """The layer makes entries and index keys; layers up to the next such layer read them too."""
        return self.kv_source == self.index

    @property
    def compresses(self) -> bool:
        return self.owns_entries and self.ratio > 1

    @property
    def owns_index_keys(self) -> bool:
        return self.owns_entries

    @property
    def compresses_index_keys(self) -> bool:
        return False

    @property
    def lists_entries(self) -> bool:
        return False

    @property
    def sources(self) -> frozenset[int]:
        layers = (self.kv_source, self.index_source, self.candidate_source)
        return frozenset(layer for layer in layers if layer is not None and layer != self.index)

    @property
    def entry_owner(self) -> str:
        return self.name if self.kv_source is None else f"layers.{self.kv_source}"

    def unnumbered(self) -> Self:
        """See `LayerBase.unnumbered`. Each source becomes 0 if it is the layer itself, 1 if it is another layer."""
        named = ((key, getattr(self, key)) for key in ("kv_source", "index_source", "candidate_source"))
        return replace(self, index=0, **{key: None if i is None else int(i != self.index) for key, i in named})

    @property
    def kind(self) -> str:
        """``"SWA"``, or ``"C2"`` / ``"C1"`` after the ratio with ``full``, ``reindex`` or ``reuse``."""
        if self.ratio == 0:
            return "SWA"
        role = "full" if self.owns_entries else "reindex" if self.has_indexer else "reuse"
        return f"C{self.ratio} {role}"


@dataclass(frozen=True)
class DeepseekV41Config(DeepseekV4Base):
    """A checked DeepSeek-V4.1 configuration; fields have the names of the published ``text_config``.

    ``ModelConfig.from_dict``, ``from_pretrained`` and ``from_preset`` make it. They read the published, nested
    ``config.json`` and the flat config of DeepSeek's inference code (``dim``, ``n_layers``, ...). Absent keys default
    as in V4, except ``rms_norm_eps`` 1e-20. The vision part is kept and not run.

    ``replace`` takes the keys of both levels side by side; a smaller ``num_hidden_layers`` alone keeps the first
    layers, and the draft stages if the layers that they read remain.

    Attributes:
        kv_source_layer_ids: layers that make entries and index keys.
        index_source_layer_ids: layers with an indexer.
        candidate_source_layer_id: the layer that keeps ``candidate_topk_blocks`` blocks of ``candidate_block_size``
            entries for each query, to which the selection of later layers is limited; None: no limit.
        engram: the n-gram memory; None without one.
    """

    OPTIONAL: ClassVar = (
        *("rope_scaling", "quantization_config", "expert_dtype", "pad_token_id", "image_token_id", "vision_config"),
        *(*CANDIDATES, *EngramConfig.__dataclass_fields__, *DSparkConfig.__dataclass_fields__),
    )
    DERIVED: ClassVar = ("layers", "mtp_layers", "engram", "dspark", "expert_dtype")
    FP8_GROUP: ClassVar[int] = FP8_BLOCK

    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int | None
    candidate_block_size: int | None
    engram: EngramConfig | None
    pad_token_id: int | None
    image_token_id: int | None
    vision_config: dict[str, Any] | None = field(hash=False)
    layers: tuple[V41LayerSpec, ...]
    mtp_layers: tuple[V41LayerSpec, ...]

    @property
    def memory(self) -> EngramConfig:
        """The n-gram memory.

        Raises:
            ValueError: the model lacks an n-gram memory: ``engram`` is absent.
        """
        if self.engram is None:
            raise ValueError("this deepseek_v41 config has no n-gram memory: engram_layer_ids is absent")
        return self.engram

    @property
    def candidate_entries(self) -> int:
        """Number of entries in the candidate blocks of a query.

        Raises:
            ValueError: selections are not limited: ``candidate_source_layer_id`` is absent.
        """
        if self.candidate_topk_blocks is None or self.candidate_block_size is None:
            raise ValueError("this deepseek_v41 config limits no selection: candidate_topk_blocks is absent")
        return self.candidate_topk_blocks * self.candidate_block_size

    @property
    def normalizes_weights(self) -> bool:
        """See `ConfigBase.normalizes_weights`; the weight of a single expert stays its score."""
        return self.norm_topk_prob and self.num_experts_per_tok > 1

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], origin: str = "dict") -> DeepseekV41Config:
        """Builds a config from decoded JSON in either spelling.

        Raises:
            ValueError: one error that lists every problem; ``origin`` names the config in it.
        """
        return cls(**copy.deepcopy(read_v41(raw, origin)))

    def constants(self) -> dict[str, Any]:
        return {"architectures": ["DeepseekV41ForCausalLM"], **V41.constants()}

    def schedule(self) -> dict[str, Any]:
        quantization = self.quantization_config
        return {
            "compress_ratios": list(self.compress_ratios),
            **{key: list(getattr(self, key)) for key in SOURCES},
            **(self.engram.to_dict() if self.engram else {}),
            **(self.dspark.to_dict() if self.dspark else {}),
            "quantization_config": None if quantization is None else quantization | {"expert_dtype": self.expert_dtype},
        }

    def to_dict(self) -> dict[str, Any]:
        flat = self.flat_dict()
        top = {key: flat.pop(key) for key in TOP_LEVEL if key in flat}
        return top | {"text_config": {"model_type": "deepseek_v41_text"} | flat}

    def adapt(self, raw: dict[str, Any], changes: Mapping[str, Any]) -> None:
        if "num_hidden_layers" in changes and "compress_ratios" not in changes:
            self._shorten(raw, changes)
        if "expert_dtype" in changes and raw.get("quantization_config") is not None:
            del raw["quantization_config"]["expert_dtype"]
        if self.dspark is not None:
            drop_dspark(raw, changes)
        if changes.get("engram_layer_ids", raw) in (None, []):
            for key in EngramConfig.__dataclass_fields__:
                raw.pop(key, None)
        if changes.get("candidate_source_layer_id", raw) is None:
            for key in CANDIDATES:
                raw.pop(key, None)

    def _shorten(self, raw: dict[str, Any], changes: Mapping[str, Any]) -> None:
        keep = changes["num_hidden_layers"]
        keep = keep if type(keep) is int and keep > 0 else self.num_hidden_layers
        ratios, stages = self.compress_ratios, self.num_nextn_predict_layers
        raw["compress_ratios"] = list(ratios[: self.num_hidden_layers][:keep]) + [0] * stages
        for key in (*SOURCES, "engram_layer_ids"):
            if key in raw:
                raw[key] = [layer for layer in raw[key] if layer < keep]
        if self.engram is not None:
            raw["engram_num_embeddings"] = raw["engram_num_embeddings"][: len(raw["engram_layer_ids"])]
        if (self.candidate_source_layer_id or 0) >= keep:
            for key in CANDIDATES:
                raw.pop(key, None)


def is_inference_config(raw: Mapping[str, Any]) -> bool:
    """Whether these are keys of DeepSeek's inference code for V4.1, which names no ``model_type``."""
    return raw.get("model_type") is None and "kv_source_layers" in raw


def read_v41(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns all fields of a ``DeepseekV41Config``.

    Raises:
        ValueError: one error that lists every problem; ``origin`` names the config in it.
    """
    reader = _open(raw)
    num_layers, vocab_size = (
        size if type(size) is int else None for size in map(reader.raw.get, ("num_hidden_layers", "vocab_size"))
    )
    # read first: it checks sums of primes only if no problem has been found so far
    engram = read_engram(reader, num_layers, vocab_size)
    values = {"model_type": "deepseek_v41", "engram": engram}
    values |= read_shared(reader, FP8_BLOCK, rms_norm_eps=1e-20)
    values["norm_topk_prob"] = reader.flag("norm_topk_prob", True)
    check_index_head(reader, values, hadamard=False)
    _check_formats(reader, values)
    for key in ("pad_token_id", "image_token_id"):
        values[key] = reader.integer(key, None, minimum=0)
    vision = reader.mapping("vision_config")
    values["vision_config"] = None if vision is None else dict(vision)
    ratios = _read_ratios(reader, values)
    values.update(_read_sources(reader, values["num_hidden_layers"], ratios))
    values.update(_read_candidates(reader, values, ratios))
    reader.finish(origin)
    plain = RopeSpec(values["rope_theta"], values["qk_rope_head_dim"])
    stages = tuple(
        V41LayerSpec(i, ratio=0, overlap=False, has_indexer=False, rope=plain, hash_routing=False, is_mtp=True)
        for i in range(values["num_nextn_predict_layers"] if values["dspark"] else 0)
    )
    layers = _layers(values, ratios or [])  # ratios that are wrong have been reported
    return values | {"layers": layers, "mtp_layers": stages}


def _open(raw: Mapping[str, Any]) -> ConfigReader:
    """A reader over both levels of a nested config, or over a flat config of DeepSeek's inference code."""
    text = raw.get("text_config")
    nested = text if isinstance(text, Mapping) else {}
    reader = ConfigReader(V41, {"": raw, "text_config.": nested})
    if text is not nested and text is not None:
        reader.problem(f"text_config is {text!r}: expected an object")
    reader.as_choice("text_config.model_type", nested.get("model_type"), ("deepseek_v41_text", "deepseek_v41"))
    _add_inference_defaults(reader)
    return reader


def _add_inference_defaults(reader: ConfigReader) -> None:
    """Adds keys that DeepSeek's inference code splits into several keys, or leaves to its caller."""
    flat = reader.raw
    if given := [key for key in INFERENCE_SCALING if key in flat]:
        if "rope_scaling" in flat:
            reader.problem(f"{', '.join(given)} beside rope_scaling: they mean the same, drop one of them")
        flat["rope_scaling"] = {"type": "yarn"} | {INFERENCE_SCALING[key]: flat[key] for key in given}
        length, factor = flat.get("original_seq_len"), flat.get("rope_factor")
        if (
            type(length) is int
            and (type(factor) is int or type(factor) is float)
            and 1 <= length * factor <= MAX_INTEGER
        ):
            flat.setdefault("max_position_embeddings", int(length * factor))
    if flat.get("dtype") == "fp8":
        flat["dtype"] = "bfloat16"
        quantization = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [FP8_BLOCK] * 2}
        flat.setdefault("quantization_config", quantization)


def _check_formats(reader: FieldReader, values: Mapping[str, Any]) -> None:
    if values["quantization_config"] is None or values["expert_dtype"] == "fp8":
        return
    for key in ("hidden_size", "moe_intermediate_size"):
        if (size := known(values, key)) and size[0] % 32:
            reader.problem(f"{key} is {size[0]}: FP4 experts need a multiple of 32")


def _read_ratios(reader: FieldReader, values: Mapping[str, Any]) -> list[int] | None:
    """Ratios of the backbone layers; None where they are wrong."""
    layers, stages = values["num_hidden_layers"], values["num_nextn_predict_layers"]
    given = reader.as_list("compress_ratios", reader.value("compress_ratios"))
    if given is None or layers is None:
        return None
    wrong = [i for i, ratio in enumerate(given) if type(ratio) is not int or ratio not in RATIOS]
    for i in wrong[:5]:
        reader.problem(f"compress_ratios[{i}] is {given[i]!r}: supported is {' or '.join(map(str, RATIOS))}")
    if len(given) < layers:
        reader.problem(
            f"compress_ratios has {len(given)} entries for num_hidden_layers {layers}: one per layer is needed"
        )
    elif stages is not None and len(given) not in (layers, layers + stages):
        reader.problem(
            f"compress_ratios has {len(given)} entries: expected {layers + stages}, for num_hidden_layers {layers} and "
            f"num_nextn_predict_layers {stages}"
        )
    elif any(given[layers:]):
        reader.problem(
            f"compress_ratios ends in {given[layers:]!r}: draft stages have no compressed entries, expected 0"
        )
    return None if wrong or len(given) < layers else given[:layers]


def _read_sources(reader: FieldReader, layers: int | None, ratios: list[int] | None) -> dict[str, Any]:
    """Layers that make entries, and layers that select. Both are ascending, and share a ratio with their readers."""
    found: dict[str, tuple[int, ...]] = {}
    for key in SOURCES:
        found[key] = ids = reader.as_integers(key, reader.value(key, []), minimum=0) or ()
        if list(ids) != sorted(set(ids)):
            reader.problem(f"{key} is {list(ids)}: expected ascending numbers of layers")
        if layers is not None and ids and max(ids) >= layers:
            reader.problem(f"{key} has layer {max(ids)}, and num_hidden_layers is {layers}")
    kv, index = (found[key] for key in SOURCES)
    if missing := sorted(set(kv) - set(index)):
        reader.problem(
            f"layers {missing} of kv_source_layer_ids are not in index_source_layer_ids: each has an indexer"
        )
    ratios = ratios or []
    for layer, ratio in enumerate(ratios):
        source = max((i for i in kv if i <= layer), default=None)
        if ratio and source is None:
            reader.problem(f"layer {layer} has ratio {ratio}, and no layer of kv_source_layer_ids comes before it")
        elif ratio and source is not None and ratios[source] != ratio:
            reader.problem(
                f"layer {layer} has ratio {ratio}, and layer {source}, whose entries it reads, {ratios[source]}"
            )
        elif not ratio and layer in (*kv, *index):
            reader.problem(f"layer {layer} is a source of entries or selections, and its ratio is 0")
    return found


def _read_candidates(reader: FieldReader, values: Mapping[str, Any], ratios: list[int] | None) -> dict[str, int | None]:
    """The candidate keys; a source needs both sizes."""
    source = reader.integer("candidate_source_layer_id", None, minimum=-1)
    if source is None or source == -1:  # -1: DeepSeek's inference code without candidates
        return dict.fromkeys(CANDIDATES)
    found = {"candidate_source_layer_id": source, **{key: reader.integer(key) for key in CANDIDATES[1:]}}
    index, topk = values["index_source_layer_ids"], values["index_topk"]
    if source not in index:
        reader.problem(f"candidate_source_layer_id {source} is not in index_source_layer_ids")
    elif ratios is not None:
        other = [i for i in index if source < i < len(ratios) and ratios[i] != ratios[source]]
        if source < len(ratios) and other:
            reader.problem(
                f"index sources {other} come after candidate_source_layer_id {source} and have other ratios: blocks of "
                "entries mean the same positions in one ratio only"
            )
    blocks, size = found["candidate_topk_blocks"], found["candidate_block_size"]
    if blocks is not None and size is not None and topk is not None and blocks * size < topk + size:
        reader.problem(
            f"candidate_topk_blocks {blocks} of candidate_block_size {size} hold fewer entries than index_topk {topk} "
            "and one block more: a query could find fewer than it selects"
        )
    return found


def _layers(values: Mapping[str, Any], ratios: list[int]) -> tuple[V41LayerSpec, ...]:
    """Specs of the backbone layers; each reads the latest source up to itself."""
    dim = values["qk_rope_head_dim"]
    plain = RopeSpec(values["rope_theta"], dim)
    compressed = RopeSpec.scaled(values["compress_rope_theta"], dim, values["rope_scaling"])
    kv, index = (values[key] for key in SOURCES)
    candidates, engram = values["candidate_source_layer_id"], values["engram"]

    def latest(sources: tuple[int, ...], layer: int) -> int | None:
        return max((i for i in sources if i <= layer), default=None) if ratios[layer] else None

    return tuple(
        V41LayerSpec(
            index=layer,
            ratio=ratio,
            overlap=False,
            has_indexer=layer in index,
            rope=compressed if ratio else plain,
            hash_routing=False,
            kv_source=latest(kv, layer),
            index_source=latest(index, layer),
            candidate_source=candidates if layer in index and candidates is not None and layer >= candidates else None,
            has_engram=engram is not None and layer in engram.engram_layer_ids,
        )
        for layer, ratio in enumerate(ratios)
    )
