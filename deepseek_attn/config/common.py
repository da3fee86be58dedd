"""What the configs of all model families share: the rotary embedding, token ids and the YaRN keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from deepseek_attn.config.fields import REQUIRED, FieldReader

DTYPES = ("bfloat16", "float16", "float32")


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

    @property
    def yarn(self) -> bool:
        return self.factor != 1.0


def read_tokens(reader: FieldReader, vocab_size: int | None) -> dict[str, Any]:
    """``eos_token_id`` may be one id or a list; ids must be in the vocabulary."""
    bos = reader.integer("bos_token_id", 0, minimum=0)
    eos = reader.value("eos_token_id", 1)
    if isinstance(eos, (list, tuple)):
        if not eos:
            reader.problem("eos_token_id is []: expected an integer or a list of integers")
        eos = tuple(reader.as_integer(f"eos_token_id[{i}]", token, minimum=0) for i, token in enumerate(eos))
    else:
        eos = reader.as_integer("eos_token_id", eos, minimum=0)
    for label, token in (
        ("bos_token_id", bos),
        *(("eos_token_id", t) for t in (eos if type(eos) is tuple else (eos,))),
    ):
        if token is not None and vocab_size is not None and token >= vocab_size:
            reader.problem(f"{label} {token} is outside the vocabulary of vocab_size {vocab_size}")
    return {"bos_token_id": bos, "eos_token_id": eos}


def read_yarn(reader: FieldReader, label: str, raw: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the YaRN scaling under DeepSeek's key names, or None for plain rope."""
    if not raw:
        return None
    kinds = {f"{label}.{key}": raw.get(key) for key in ("type", "rope_type")}
    kind = reader.agreed(f"{label}.type", kinds, REQUIRED if "factor" in raw else "default")
    if reader.as_choice(f"{label}.type", kind, ("yarn", "default")) != "yarn":
        return None
    scaling: dict[str, Any] = {"type": "yarn"}
    for key in RopeSpec.YARN_KEYS:
        value = raw.get(key, {"beta_fast": 32, "beta_slow": 1}.get(key))
        if value is None:
            reader.missing(f"{label}.{key}")
        check = reader.as_integer if key == "original_max_position_embeddings" else reader.as_number
        scaling[key] = check(f"{label}.{key}", value)
    fast, slow = scaling["beta_fast"], scaling["beta_slow"]
    if fast is not None and slow is not None and fast < slow:
        reader.problem(f"{label}.beta_fast {fast} is below beta_slow {slow}")
    if raw.get("attention_factor", 1.0) not in (1.0, None):
        reader.problem(f"{label}.attention_factor is {raw['attention_factor']!r}: DeepSeek does not scale cos and sin")
    return scaling
