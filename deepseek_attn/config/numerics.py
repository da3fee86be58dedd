"""Numerics presets: each difference between them is one named switch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.config.v41 import DeepseekV41Config


@dataclass(frozen=True)
class Numerics:
    """Which tensors are quantised, and to which format.

    Attributes:
        name: preset name, followed by the format of index keys if it differs from the preset's.
        quantized_weights: keep FP8 / FP4 weights as stored; otherwise they are dequantised to the model dtype at load.
        fp8_activations: inputs of linears with quantised weights are rounded to FP8 per token and 128 channels.
        fp8_wo_a_input: the same for the grouped output projection ``wo_a``, which DeepSeek's own code runs in bf16.
        kv_record: ``"plain"`` rows in the model dtype; ``"fp8_ds_mla"`` records, which are ``fp8_v4`` (584 bytes for
            512 channels) or ``fp8_v32`` (656 bytes for 576) by the model family; or V4.1's ``"fp8_fp4"``: ``fp8_v41``
            in the window (528 bytes for 512 channels) and ``fp4_v41`` for compressed entries (288 bytes). A record
                from outside the package: its registered name, or ``module:Class`` (`cache.record.register_record`).
        index_hadamard: rotate indexer queries and keys by a Hadamard matrix before they are quantised.
        index_record: ``"plain"``, ``"fp4"`` (groups of 32, 68 bytes), ``"fp8"`` (one scale per key, 132 bytes), or a
            record from outside the package.
        rounded_scores: index scores and their head weights are rounded to the model dtype, and so are softmax weights
            before their product with the values, as in DeepSeek's program. Without it they are float32; kernels on
            tensor cores round softmax weights in any case.
        pow2_activation_scales: FP8 scales of linear inputs are powers of two (``scale_fmt`` ue8m0). A model decides
            this, not a preset: DeepSeek-V3 has raw scales, all later ones powers of two.
        fp8_group: channels of a linear's input, and rows and columns of its weight, that share an FP8 scale: 128, or
            32, official for DeepSeek-V4.1.
        weight_block: rows and columns of a block of an FP8 weight as it is stored: 128, or 32 in DeepSeek-V4.1, whose
            blocks are merged where ``fp8_group`` is 128. A model decides this too.
    """

    name: str
    quantized_weights: bool
    fp8_activations: bool
    fp8_wo_a_input: bool
    kv_record: str
    index_hadamard: bool
    index_record: str
    rounded_scores: bool = False
    pow2_activation_scales: bool = True
    fp8_group: int = 128
    weight_block: int = 128


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


INDEX_KEYS = ("fp8", "fp4")  # formats of index keys that can be chosen beside a preset


def usual_preset(on_gpu: bool) -> str:
    """The preset of a runner for which none was chosen."""
    return "serving" if on_gpu else "exact"


def numerics_for(config: AnyConfig, name: str | Numerics, index_keys: str | None = None) -> Numerics:
    """The numerics of a preset for one model. A given ``Numerics`` is changed only in ``weight_block`` and index keys.

    Models differ: official index keys are FP8 in DeepSeek-V3.2 and FP4 in V4; V3 lacks ``scale_fmt``; V4.1 has no
    Hadamard matrix, and has its own official records.

    Args:
        index_keys: the format of index keys, one of `INDEX_KEYS`, instead of the preset's. ``fp4``: the format of
            DeepSeek's own code, in V4 after multiplication by a Hadamard matrix; not available for V3.2. ``fp8``: the
            format of serving engines on Hopper, in V4 without that matrix.

    Raises:
        ValueError: an unknown preset or format, or a format of index keys that the model does not support.
    """
    numerics = _preset_for(config, name)
    if index_keys is None:
        return numerics
    remedy = "leave it out for the keys of the numerics"
    if index_keys not in INDEX_KEYS:
        raise ValueError(f"unknown index_keys {index_keys!r}: supported are {', '.join(INDEX_KEYS)}; or {remedy}")
    if not any(layer.has_indexer for layer in config.layers):
        raise ValueError(f"index_keys={index_keys!r}: no layer of this model has an indexer; {remedy}")
    hadamard = numerics.index_hadamard
    if isinstance(config, DeepseekV32Config):
        if index_keys == "fp4":
            raise ValueError(f"index_keys='fp4': {config.model_type} has no FP4 index keys; give 'fp8', or {remedy}")
    elif not isinstance(config, DeepseekV41Config):
        hadamard = index_keys == "fp4"
    base = numerics.name
    for chosen_before in INDEX_KEYS:
        base = base.removesuffix(f" ({chosen_before} index keys)")
    chosen = replace(numerics, name=base, index_record=index_keys, index_hadamard=hadamard)
    usual = _preset_for(config, base) if base in PRESETS else replace(numerics, name=base)
    return chosen if chosen == usual else replace(chosen, name=f"{base} ({index_keys} index keys)")


def _preset_for(config: AnyConfig, name: str | Numerics) -> Numerics:
    """`numerics_for` without ``index_keys``."""
    preset = get_numerics(name)
    if preset.weight_block != config.FP8_GROUP:
        preset = replace(preset, weight_block=config.FP8_GROUP)
    if isinstance(config, DeepseekV41Config) and name == "official":
        return replace(
            preset, kv_record="fp8_fp4", index_hadamard=False, rounded_scores=True, fp8_group=config.FP8_GROUP
        )
    if isinstance(name, Numerics) or not isinstance(config, DeepseekV32Config):
        return preset
    index_record = "plain" if preset.index_record == "plain" else "fp8"
    return replace(preset, index_record=index_record, pow2_activation_scales=config.power_of_two_scales)


def get_numerics(name: str | Numerics) -> Numerics:
    """Returns a preset by name; a ``Numerics`` (for instance one made by ``dataclasses.replace``) passes through."""
    if isinstance(name, Numerics):
        return name
    if name not in PRESETS:
        raise ValueError(f"unknown numerics {name!r}: supported are {', '.join(PRESETS)}")
    return PRESETS[name]
