"""Reads a DeepSeek-V4 ``config.json`` in either spelling and checks it.

The published spelling has ``compress_ratios``, ``rope_scaling``, ``qk_rope_head_dim`` and ``num_hash_layers``;
transformers rewrites them to ``layer_types`` + ``compress_rates``, ``rope_parameters``, ``partial_rotary_factor`` and
``mlp_layer_types``. Both lead to the same values here, and a config that has both must not contradict itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deepseek_attn.config.common import (
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
from deepseek_attn.config.dspark import read_dspark
from deepseek_attn.config.fields import FieldReader
from deepseek_attn.config.keys import V4, ConfigReader
from deepseek_attn.config.schedule import Branch, read_branches, read_num_hash_layers

SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank"),
    *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "hc_mult", "max_position_embeddings"),
)

SCORING = ("sqrtsoftplus", "sigmoid", "softmax")


def read_v4(raw: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], list[Branch]]:
    """Returns the ``ModelConfig`` fields (all but the layers) and one ``Branch`` per backbone layer.

    Raises:
        ValueError: one error that lists every problem; ``origin`` names the config in it.
    """
    reader = ConfigReader(V4, {"": raw})
    fields = read_shared(reader, block=128) | {"norm_topk_prob": True}
    fields["num_hash_layers"] = read_num_hash_layers(reader, fields["num_hidden_layers"])
    branches = read_branches(reader, fields["num_hidden_layers"])
    indexed = [i for i, branch in enumerate(branches) if branch.has_indexer]
    if indexed:
        where = f"layer {indexed[0]} has" if len(indexed) == 1 else f"{len(indexed)} layers (first: {indexed[0]}) have"
        check_index_head(reader, fields, f", and {where} an indexer")
    # with softmax scores DeepSeek's code does not normalise a token's expert weights to sum 1; transformers does
    reader.as_choice("scoring_func", fields["scoring_func"], SCORING[:2])
    reader.finish(origin)
    return {"model_type": "deepseek_v4"} | fields, branches


def read_shared(reader: FieldReader, block: int, rms_norm_eps: float = 1e-6) -> dict[str, Any]:
    """Fields of `config.v4.DeepseekV4Base` from flat keys, all but the layers and ``norm_topk_prob``.

    Args:
        block: rows and columns of a block of an FP8 weight.
        rms_norm_eps: the default.
    """
    fields: dict[str, Any] = {key: reader.integer(key) for key in SIZES}
    fields.update(_read_moe(reader), **_read_numbers(reader, rms_norm_eps))
    fields.update(_read_rope(reader, fields["head_dim"]), **read_tokens(reader, fields["vocab_size"]))
    fields.update(_read_formats(reader, block))
    fields["num_nextn_predict_layers"] = reader.integer("num_nextn_predict_layers", 0, minimum=0)
    _check_relations(reader, fields)
    fields["dspark"] = read_dspark(reader, fields)
    check_num_experts(reader, fields, fields["dspark"] and fields["dspark"].dspark_n_routed_experts)
    return fields


def _read_moe(reader: FieldReader) -> dict[str, Any]:
    return {
        "n_shared_experts": 1,
        "scoring_func": reader.choice("scoring_func", SCORING, "sqrtsoftplus"),
        "routed_scaling_factor": reader.number("routed_scaling_factor"),
        "swiglu_limit": reader.number("swiglu_limit"),
    }


def _read_numbers(reader: FieldReader, rms_norm_eps: float) -> dict[str, Any]:
    return {
        "hc_sinkhorn_iters": reader.integer("hc_sinkhorn_iters", 20),
        "hc_eps": reader.number("hc_eps", 1e-6),
        "rms_norm_eps": reader.number("rms_norm_eps", rms_norm_eps),
    }


def _read_formats(reader: FieldReader, block: int) -> dict[str, Any]:
    """Storage formats. ``expert_dtype`` absent means FP4 in a quantised checkpoint, as in the first published ones."""
    formats = read_formats(reader, block)
    quantization = formats["quantization_config"]
    spellings = {
        "expert_dtype": reader.raw.get("expert_dtype"),
        "quantization_config.expert_dtype": (quantization or {}).pop("expert_dtype", None),
    }
    expert_dtype = reader.agreed("expert_dtype", spellings, None if quantization is None else "fp4")
    return formats | {"expert_dtype": reader.as_choice("expert_dtype", expert_dtype, ("fp4", "fp8"))}


# rotary embedding


def _read_rope(reader: FieldReader, head_dim: int | None) -> dict[str, Any]:
    """Reads both rope bases, the YaRN scaling of compressed layers and the rotary width.

    ``rope_parameters`` may be nested (``main`` / ``compress``), or flat and equivalent to ``rope_scaling``. Both forms
    have transformers' meaning.
    """
    raw = reader.raw
    parameters = reader.mapping("rope_parameters") or {}
    main, compress = (_read_nested(reader, name, parameters) for name in ("main", "compress"))
    nested = main is not None or compress is not None
    if nested and None in (main, compress):
        reader.problem("rope_parameters has only one of main and compress: transformers reads neither; give both")
    main, compress = main or {}, compress or {}
    if read_yarn(reader, "rope_parameters.main", main) is not None:
        reader.problem("rope_parameters.main has type yarn: layers without compression use plain rope only")
    label = "rope_parameters" + ".compress" * nested
    spellings = {"rope_scaling": reader.mapping("rope_scaling"), label: compress if nested else parameters}
    scalings = {name: read_yarn(reader, name, spelling) for name, spelling in spellings.items()}
    if nested:
        _check_attention_factor(reader, scalings[label], compress)
    if not nested and raw.get("rope_theta") is None and parameters.get("rope_theta") is not None:
        reader.problem("rope_parameters.rope_theta without rope_theta: transformers does not read it; give rope_theta")
    thetas = {
        "rope_theta": raw.get("rope_theta"),
        "rope_parameters.rope_theta": None if nested else parameters.get("rope_theta"),
        "rope_parameters.main.rope_theta": main.get("rope_theta"),
    }
    compress_thetas = {
        "compress_rope_theta": raw.get("compress_rope_theta"),
        "rope_parameters.compress.rope_theta": compress.get("rope_theta"),
    }
    fractions = {
        "partial_rotary_factor": raw.get("partial_rotary_factor"),
        "rope_parameters.main.partial_rotary_factor": main.get("partial_rotary_factor"),
        "rope_parameters.compress.partial_rotary_factor": compress.get("partial_rotary_factor"),
    }
    return {
        "rope_theta": read_theta(reader, "rope_theta", thetas),
        "compress_rope_theta": read_theta(reader, "compress_rope_theta", compress_thetas),
        "rope_scaling": agreed_yarn(reader, spellings, scalings),
        "qk_rope_head_dim": _read_rope_dim(reader, fractions, head_dim),
    }


def _read_nested(reader: FieldReader, name: str, parameters: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``rope_parameters.main`` or ``.compress`` as transformers completes it; None if it is absent."""
    label = f"rope_parameters.{name}"
    found = reader.as_mapping(label, parameters.get(name))
    if found is None:
        return None
    for key, top in (("rope_theta", "rope_theta"), ("partial_rotary_factor", "partial_rotary_factor")):
        if found.get(key) is None:
            found = {**found, key: reader.raw.get(top, 1.0 if key == "partial_rotary_factor" else None)}
    return found


def _check_attention_factor(
    reader: FieldReader, scaling: Mapping[str, Any] | None, compress: Mapping[str, Any]
) -> None:
    """Refuses ``compress`` where transformers would scale cos and sin, which DeepSeek's code does not."""
    factor = (scaling or {}).get("factor")
    scales = [compress.get(key) for key in ("mscale", "mscale_all_dim")]
    given = compress.get("attention_factor") is not None or (scales[0] and scales[0] == scales[1])
    if factor is None or factor <= 1 or given:
        return
    reader.problem(
        "rope_parameters.compress has type yarn without attention_factor: transformers then scales cos and sin, by "
        f"{0.1 * math.log(factor) + 1:.3f} for factor {factor}, and DeepSeek's code does not; give attention_factor 1.0"
    )


def _read_rope_dim(reader: FieldReader, fractions: Mapping[str, Any], head_dim: int | None) -> int | None:
    """``qk_rope_head_dim``, or ``partial_rotary_factor`` times ``head_dim``."""
    fraction = reader.as_number("partial_rotary_factor", reader.agreed("partial_rotary_factor", fractions, None))
    from_fraction = None
    if fraction is not None and head_dim is not None:
        from_fraction = round(fraction * head_dim)
        if abs(from_fraction - fraction * head_dim) > 1e-3:
            reader.problem(f"partial_rotary_factor {fraction} of head_dim {head_dim} is not a whole number of channels")
    dim = reader.raw.get("qk_rope_head_dim")
    if dim is None and fraction is not None and head_dim is None:
        return None  # head_dim is absent or wrong, which has been reported
    spellings = {"qk_rope_head_dim": dim, f"partial_rotary_factor {fraction} * head_dim {head_dim}": from_fraction}
    dim = reader.as_integer("qk_rope_head_dim", reader.agreed("qk_rope_head_dim", spellings))
    return check_rope_dim(reader, dim)


# rules between fields


def _check_relations(reader: FieldReader, fields: Mapping[str, Any]) -> None:
    if (pair := known(fields, "num_attention_heads", "o_groups")) and pair[0] % pair[1]:
        reader.problem(f"num_attention_heads {pair[0]} is not a multiple of o_groups {pair[1]}")
    if (pair := known(fields, "num_experts_per_tok", "n_routed_experts")) and pair[0] > pair[1]:
        reader.problem(f"num_experts_per_tok {pair[0]} is above n_routed_experts {pair[1]}")
    if (pair := known(fields, "qk_rope_head_dim", "head_dim")) and pair[0] > pair[1]:
        reader.problem(f"qk_rope_head_dim {pair[0]} is above head_dim {pair[1]}")
