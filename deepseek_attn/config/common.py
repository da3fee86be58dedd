"""Keys that the configs of all model families share: the rotary embedding, token ids and the YaRN keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from deepseek_attn.config.fields import REQUIRED, FieldReader
from deepseek_attn.config.keys import SCALING

MAX_EXPERTS = 2**16  # experts of all layers; published: 62 * 384
DTYPES = ("bfloat16", "float16", "float32")


class IndexSizes(NamedTuple):
    """Sizes of an indexer: ``index_n_heads``, ``index_head_dim`` and ``index_topk``."""

    n_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one layer: one table for its queries, its keys and its indexer.

    Attributes:
        theta: base of the frequencies.
        dim: rotated channels (``qk_rope_head_dim``).
        factor: YaRN scaling factor; 1.0 means plain rope, and then the fields below are unused.
        original_max_position_embeddings: context length, in tokens, before YaRN.
        beta_fast: rotations over the original context above which a frequency is left as it is.
        beta_slow: rotations below which a frequency is divided by ``factor``.
    """

    YARN_KEYS: ClassVar[tuple[str, ...]] = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")

    theta: float
    dim: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32
    beta_slow: float = 1

    @classmethod
    def scaled(cls, theta: float, dim: int, scaling: Mapping[str, Any] | None) -> RopeSpec:
        """With the YaRN scaling that `read_yarn` returns; plain rope for None and for a factor of 1."""
        if scaling is None or scaling["factor"] == 1.0:
            return cls(theta, dim)
        return cls(theta, dim, **{key: scaling[key] for key in cls.YARN_KEYS})

    @property
    def yarn(self) -> bool:
        return self.factor != 1.0


def read_tokens(reader: FieldReader, vocab_size: int | None) -> dict[str, Any]:
    """``eos_token_id`` may be one id or a list; ids must be in the vocabulary."""
    bos = reader.integer("bos_token_id", 0, minimum=0)
    eos = reader.value("eos_token_id", 1)
    if isinstance(eos, (list, tuple)):
        if not eos or None in eos:
            reader.problem(f"eos_token_id is {list(eos)!r}: expected an integer or a list of integers")
        eos = tuple(reader.as_integer(f"eos_token_id[{i}]", token, minimum=0) for i, token in enumerate(eos))
    else:
        eos = reader.as_integer("eos_token_id", eos, minimum=0)
    for label, token in (
        ("bos_token_id", bos),
        *(("eos_token_id", t) for t in (eos if isinstance(eos, tuple) else (eos,))),
    ):
        if token is not None and vocab_size is not None and token >= vocab_size:
            reader.problem(f"{label} {token} is outside the vocabulary of vocab_size {vocab_size}")
    return {"bos_token_id": bos, "eos_token_id": eos}


def read_theta(reader: FieldReader, label: str, spellings: Mapping[str, Any]) -> float | None:
    """A base of rotary frequencies: above 1, as frequencies fall from channel to channel."""
    theta = reader.as_number(label, reader.agreed(label, spellings))
    if theta is not None and theta <= 1:
        reader.problem(f"{label} is {theta}: expected a number above 1")
    return theta


def read_yarn(reader: FieldReader, label: str, raw: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the YaRN scaling under DeepSeek's key names, or None for plain rope."""
    if not raw:
        return None
    for key in ("rope_theta", "partial_rotary_factor") if label == "rope_scaling" else ():
        if raw.get(key) is not None:
            reader.problem(f"rope_scaling.{key} is {raw[key]!r}: only transformers reads it there; give it beside it")
    kinds = {f"{label}.{key}": raw.get(key) for key in ("type", "rope_type")}
    kind = reader.agreed(f"{label}.type", kinds, REQUIRED if "factor" in raw else "default")
    if reader.as_choice(f"{label}.type", kind, ("yarn", "default")) != "yarn":
        return None
    scaling: dict[str, Any] = {"type": "yarn"}
    length = "original_max_position_embeddings"
    spellings = {f"{label}.{length}": raw.get(length), length: reader.raw.get(length)}
    given = {"beta_fast": 32, "beta_slow": 1} | {key: value for key, value in raw.items() if value is not None}
    given[length] = reader.agreed(length, spellings, None)
    for key in RopeSpec.YARN_KEYS:
        value = given.get(key)
        if value is None:
            reader.missing(f"{label}.{key}")
        check = reader.as_integer if key == length else reader.as_number
        scaling[key] = check(f"{label}.{key}", value)
    fast, slow = scaling["beta_fast"], scaling["beta_slow"]
    if fast is not None and slow is not None and fast < slow:
        reader.problem(f"{label}.beta_fast {fast} is below beta_slow {slow}")
    reader.as_choice(f"{label}.truncate", given.get("truncate"), (True,))
    if given.get("attention_factor", 1.0) != 1.0:
        reader.problem(
            f"{label}.attention_factor is {given['attention_factor']!r}: DeepSeek does not scale cos and sin"
        )
    return scaling


def agreed_yarn(reader: FieldReader, given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The YaRN scaling that all given spellings agree on; None for plain RoPE. Plain RoPE beside YaRN is a problem.

    Args:
        given: label -> object with the keys.
        found: label -> result of `read_yarn` for it.
    """
    plain = {"type": "default"}
    says = {label: any((raw or {}).get(key) is not None for key in SCALING) for label, raw in given.items()}
    spellings = {label: scaling or (plain if says[label] else None) for label, scaling in found.items()}
    scaling = reader.agreed("rope_scaling", spellings, None)
    return None if scaling == plain else scaling


def _check_quantiser(reader: FieldReader, quantization: Mapping[str, Any]) -> None:
    method, algorithm = (quantization.get(key) for key in ("quant_method", "quant_algo"))
    if method in (None, "fp8") and algorithm is None:
        return
    detail = "" if algorithm is None else f" with quant_algo {algorithm!r}"
    reader.problem(
        f"quantization_config.quant_method is {method!r}{detail}: supported is 'fp8', as DeepSeek publishes weights; "
        "load the original checkpoint"
    )


def read_formats(reader: FieldReader, block: int, scales: tuple[str, ...] = ("ue8m0",)) -> dict[str, Any]:
    """Returns ``dtype`` and ``quantization_config``, the latter as a copy.

    Args:
        block: rows and columns of a block of an FP8 weight.
        scales: supported values of ``scale_fmt``; it may be absent.
    """
    quantization = reader.mapping("quantization_config")
    supported = {
        "fmt": ("e4m3",),
        "activation_scheme": ("dynamic",),
        "scale_fmt": scales,
        "weight_block_size": ([block, block],),
    }
    _check_quantiser(reader, quantization or {})
    for key, values in supported.items():
        value = (quantization or {}).get(key)
        reader.as_choice(f"quantization_config.{key}", list(value) if isinstance(value, tuple) else value, values)
    kept = None if quantization is None else dict(quantization)
    return {"dtype": reader.choice("dtype", DTYPES, "bfloat16"), "quantization_config": kept}


def known(values: Mapping[str, Any], *keys: str) -> tuple[Any, ...] | None:
    """The values of ``keys``; None if a value is missing or wrong, which has been reported."""
    found = tuple(values[key] for key in keys)
    return None if None in found else found


def check_num_experts(reader: FieldReader, values: Mapping[str, Any], of_drafts: int | None = None) -> None:
    """Reports too many experts: each has its own tensors, whose names are listed before any tensor is read.

    Args:
        of_drafts: experts per draft layer; None: as in backbone layers.
    """
    keys = ("n_routed_experts", "num_hidden_layers", "num_nextn_predict_layers")
    if sizes := known(values, *keys):
        experts, layers, drafts = sizes
        of_drafts = of_drafts or experts
        if experts * layers + of_drafts * drafts > MAX_EXPERTS:
            reader.problem(
                f"n_routed_experts {experts} in {layers} layers and {of_drafts} in {drafts} draft layers: "
                f"supported are {MAX_EXPERTS} experts in all"
            )


def check_rope_dim(reader: FieldReader, dim: int | None) -> int | None:
    """Checks ``qk_rope_head_dim`` and returns it."""
    if dim is not None and dim % 2:
        reader.problem(f"qk_rope_head_dim is {dim}: rotary channels come in pairs, expected an even number")
    return dim


def check_index_head(reader: FieldReader, values: Mapping[str, Any], why: str = "", hadamard: bool = True) -> None:
    """Checks ``index_head_dim`` against RoPE and the Hadamard matrix; ``why`` ends the messages."""
    if (pair := known(values, "qk_rope_head_dim", "index_head_dim")) and pair[0] > pair[1]:
        reader.problem(f"qk_rope_head_dim {pair[0]} is above index_head_dim {pair[1]}{why}")
    if hadamard and (size := known(values, "index_head_dim")) and size[0] & (size[0] - 1):
        reader.problem(f"index_head_dim {size[0]} is not a power of two (Hadamard rotation){why}")
