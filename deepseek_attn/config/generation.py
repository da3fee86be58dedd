"""``generation_config.json``: sampling defaults of a checkpoint, and the tokens that end its texts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_attn.config.common import read_tokens
from deepseek_attn.config.defaults import REPETITION_PENALTIES
from deepseek_attn.config.fields import FieldReader
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.utils.json_files import read_json

GENERATION_FILE = "generation_config.json"
# Keys of transformers' GenerationConfig that change generated tokens and are not supported -> values without effect.
NOT_APPLIED = {
    "typical_p": (1,),
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "stop_strings": ([], ""),
}


@dataclass(frozen=True)
class GenerationConfig:
    """Defaults of a checkpoint, with transformers' meaning; None: not in the file.

    Attributes:
        eos_token_ids: tokens that end a text; they replace the ``eos_token_id`` of ``config.json``.
        temperature: 0 where the file has ``do_sample: false``.
        max_tokens: the file's ``max_new_tokens``.
    """

    eos_token_ids: tuple[int, ...] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_pretrained(cls, directory: Path, config: AnyConfig) -> GenerationConfig:
        """Reads ``generation_config.json`` of a checkpoint folder; without the file no default is set.

        Raises:
            ValueError: all wrong values, or broken JSON.

        Warns:
            UserWarning: a value of `NOT_APPLIED` would change the tokens.
        """
        file = directory / GENERATION_FILE
        if not file.is_file():
            return cls()
        origin = f"invalid config ({file})"
        raw = read_json(file, origin)
        if not isinstance(raw, Mapping):
            raise ValueError(f"{origin}: expected a JSON object, got {type(raw).__name__}")
        reader = FieldReader({**raw, "bos_token_id": None})
        found = cls(
            read_eos(reader, config),
            read_temperature(reader),
            reader.integer("top_k", None, minimum=0),
            reader.number("top_p", None),
            reader.integer("max_new_tokens", None),
            read_min_p(reader),
            reader.number("repetition_penalty", None),
        )
        if found.top_p is not None and found.top_p > 1:
            reader.problem(f"top_p is {found.top_p}: expected a number in (0, 1]")
        penalty, (least, most) = found.repetition_penalty, REPETITION_PENALTIES
        if penalty is not None and not least <= penalty <= most:
            reader.problem(f"repetition_penalty is {penalty}: expected a number in [{least:g}, {most:g}]")
        reader.raise_if_problems(str(file))
        ignored = [key for key, values in NOT_APPLIED.items() if raw.get(key) is not None and raw[key] not in values]
        if ignored:
            given = ", ".join(f"{key} {raw[key]!r:.60}" for key in ignored)
            warnings.warn(f"{file}: {given}: not supported, and not applied", stacklevel=2)
        return found

    def eos_of(self, config: AnyConfig) -> tuple[int, ...]:
        """Tokens that end a text of this model."""
        return config.eos_token_ids if self.eos_token_ids is None else self.eos_token_ids

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that the file sets."""
        return {name: value for name, value in vars(self).items() if name != "eos_token_ids" and value is not None}


def read_eos(reader: FieldReader, config: AnyConfig) -> tuple[int, ...] | None:
    if reader.raw.get("eos_token_id") is None:
        return None
    eos = read_tokens(reader, config.vocab_size)["eos_token_id"]
    return eos if isinstance(eos, tuple) else (eos,)


def read_min_p(reader: FieldReader) -> float | None:
    value = reader.value("min_p", None)
    if value is None or (type(value) in (int, float) and 0 <= value <= 1):
        return value
    reader.problem(f"min_p is {value!r:.60}: expected a number in [0, 1]")
    return None


def read_temperature(reader: FieldReader) -> float | None:
    sampled, temperature = reader.flag("do_sample", True), reader.value("temperature", None)
    if type(temperature) not in (int, float) or temperature != 0:
        temperature = reader.as_number("temperature", temperature)
    return temperature if sampled else 0.0
