"""Numerics presets: each difference between them is one named switch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Numerics:
    """What is quantised, and where.

    Attributes:
        name: preset name.
        quantized_weights: keep FP8 / FP4 weights as stored; otherwise they are dequantised to the model dtype at load.
        fp8_activations: inputs of linears with quantised weights are rounded to FP8 per token and 128 channels.
        fp8_wo_a_input: the same for the grouped output projection ``wo_a``, which DeepSeek's own code runs in bf16.
        kv_record: ``"plain"`` rows in the model dtype, or ``"fp8_ds_mla"`` records (584 bytes for head_dim 512).
        index_hadamard: rotate indexer queries and keys by a Hadamard matrix before they are quantised.
        index_record: ``"plain"``, ``"fp4"`` (groups of 32, 68 bytes) or ``"fp8"`` (one scale per key, 132 bytes).
    """

    name: str
    quantized_weights: bool
    fp8_activations: bool
    fp8_wo_a_input: bool
    kv_record: str
    index_hadamard: bool
    index_record: str


PRESETS = {
    "exact": Numerics(
        name="exact",
        quantized_weights=False,
        fp8_activations=False,
        fp8_wo_a_input=False,
        kv_record="plain",
        index_hadamard=False,
        index_record="plain",
    ),
    "official": Numerics(
        name="official",
        quantized_weights=True,
        fp8_activations=True,
        fp8_wo_a_input=False,
        kv_record="fp8_ds_mla",
        index_hadamard=True,
        index_record="fp4",
    ),
    "serving": Numerics(
        name="serving",
        quantized_weights=True,
        fp8_activations=True,
        fp8_wo_a_input=True,
        kv_record="fp8_ds_mla",
        index_hadamard=False,
        index_record="fp8",
    ),
}


def get_numerics(name: str | Numerics) -> Numerics:
    """Returns a preset by name; a ``Numerics`` (for instance one made by ``dataclasses.replace``) passes through."""
    if isinstance(name, Numerics):
        return name
    if name not in PRESETS:
        raise ValueError(f"unknown numerics {name!r}: supported are {', '.join(PRESETS)}")
    return PRESETS[name]
