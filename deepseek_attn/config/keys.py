"""The keys of a ``config.json`` by family: keys that are read, keys with one supported value, keys without effect.

`ConfigReader` reads by these tables: it cannot read a key outside of ``read`` and ``fixed``, and names every key
outside of the table in a warning. ``a.b`` is the key ``b`` of the object ``a``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from deepseek_attn.config.fields import FieldReader

MAX_NAMED = 10  # unknown keys that the warning names


@dataclass(frozen=True)
class FamilyKeys:
    """The treatment of each key in one family.

    Attributes:
        read: keys that determine sizes, formats or results.
        fixed: keys with one supported value: every spelling of that value; the first is written.
        aliases: other names of keys in ``read``.
        unused: keys that change no logit and no text; ``*`` stands for any characters.
    """

    read: tuple[str, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    aliases: Mapping[str, str]
    unused: tuple[str, ...]

    def constants(self) -> dict[str, Any]:
        """The fixed keys that published configs have, with their values."""
        return {key: values[0] for key, values in self.fixed.items() if key not in UNPUBLISHED}

    def unknown(self, raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        """The keys of ``raw`` that are not in the table."""
        known = (*self.read, *self.fixed, *self.aliases)
        for key, value in raw.items():
            path = f"{prefix}{key}"
            if value is None or path in known or any(fnmatchcase(path, pattern) for pattern in self.unused):
                continue
            if any(name.startswith(f"{path}.") for name in known):  # an object; a wrong type is reported elsewhere
                yield from self.unknown(value, f"{path}.") if isinstance(value, Mapping) else ()
            else:
                yield path


class ConfigReader(FieldReader):
    """Reads the keys of one model config under their published names, and checks keys with only one supported value.

    Args:
        keys: the table of the family.
        levels: decoded JSON objects that describe one model, by the prefix of their keys: ``""`` for the top level,
            ``"text_config."``.
    """

    def __init__(self, keys: FamilyKeys, levels: Mapping[str, Mapping[str, Any]]):
        super().__init__({})
        self._unknown: list[str] = []
        readable = {name.split(".")[0] for name in (*keys.read, *keys.fixed)}
        flat: dict[str, Any] = {}
        given: dict[str, str] = {}
        for prefix, level in levels.items():
            self._unknown += [prefix + key for key in keys.unknown(level)]
            for key, value in level.items():
                name = keys.aliases.get(key, key)
                if value is None or name not in readable:
                    continue
                if name in flat and flat[name] != value:
                    self.problem(
                        f"{given[name]} is {flat[name]!r} but {prefix}{key} is {value!r}: they mean the same, drop one "
                        "of them"
                    )
                else:
                    flat[name], given[name] = value, prefix + key
        self.raw = flat
        for key, values in keys.fixed.items():
            self._check_fixed(key, values)

    def _check_fixed(self, key: str, values: tuple[Any, ...]) -> None:
        before = len(self.problems)
        self.choice(key, values, values[0])
        if len(self.problems) > before and key in REASONS:
            self.problems[-1] += f" ({REASONS[key]})"

    def finish(self, origin: str) -> None:
        """Raises if there are problems, otherwise warns of unknown keys. ``origin`` names the source of the config."""
        self.raise_if_problems(origin)
        if self._unknown:
            more = len(self._unknown) - MAX_NAMED
            named = ", ".join(key[:100] for key in self._unknown[:MAX_NAMED])
            warnings.warn(
                f"config ({origin}): unknown keys are not read: {named}"
                + (f" and {more} more" if more > 0 else "")
                + "; if one of them changes the model, results are wrong",
                stacklevel=4,
            )


def _inside(key: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{key}.{name}" for name in names)


# reason why a fixed key's value is refused, where the name does not show it
REASONS = {
    "norm_topk_prob": "DeepSeek's code for this model always divides the weights of a token's experts by their sum",
    "quantization": "weights quantised by MLX: load the original checkpoint",
    "compression_config": "weights in compressed-tensors format: load the original checkpoint",
}
FIXED = {
    "topk_method": ("noaux_tc",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    # formats of other libraries
    "quantization": (None,),
    "compression_config": (None,),
}
# Fixed keys that published configs do not have.
UNPUBLISHED = (
    *("mlp_bias", "rope_interleave", "indexer_rope_interleave", "partial_rotary_factor", "num_hash_layers"),
    *("gate_temp", "scale_fmt", "scale_dtype", "quantization", "compression_config"),
)
ALIASES = {
    "torch_dtype": "dtype",
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
UNUSED = (
    # origin and target program of the config
    *("architectures", "model_type", "auto_map", "transformers_version", "_*", "attn_implementation", "use_cache"),
    *("return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "problem_type", "id2label", "label2id", "tokenizer_class", "decoder_start_token_id"),
    # training
    *("attention_dropout", "initializer_range", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha"),
    *("seq_aux", "pretraining_tp", "ep_size"),
    # no token is padded
    *("pad_token_id", "sep_token_id"),
    # the dtype of a tensor shows whether it is quantised
    *("quantization_config.modules_to_not_convert", "quantization_config.modules_to_convert"),
    *("quantization_config.ignored_layers", "quantization_config.dequantize"),
)
TOKENS = ("bos_token_id", "eos_token_id")
FORMATS = (
    "dtype",
    *_inside("quantization_config", ("quant_method", "quant_algo", "fmt", "activation_scheme", "scale_fmt")),
)
FORMATS += _inside("quantization_config", ("weight_block_size", "expert_dtype"))
SCALING = (
    *("type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("attention_factor", "truncate", "mscale", "mscale_all_dim"),
)
PARAMETERS = (*SCALING, "rope_theta", "partial_rotary_factor")
ROPE = (
    *("rope_theta", "qk_rope_head_dim", "original_max_position_embeddings", "max_position_embeddings"),
    *_inside("rope_scaling", PARAMETERS),
    *_inside("rope_parameters", PARAMETERS),
)

V4_SHARED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank"),
    *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
    *("scoring_func", "routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "compress_ratios"),
    *("num_nextn_predict_layers", "expert_dtype"),
    *("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank"),
    *("dspark_n_routed_experts", "dspark_num_experts_per_tok"),
    *("compress_rope_theta", "partial_rotary_factor"),
    *_inside("rope_parameters.main", PARAMETERS),
    *_inside("rope_parameters.compress", PARAMETERS),
    *(*ROPE, *TOKENS, *FORMATS),
)
V4_FIXED = {"num_key_value_heads": (1,), "n_shared_experts": (1,), **FIXED}
V4 = FamilyKeys(
    read=(
        *V4_SHARED,
        *("num_hash_layers", "mlp_layer_types", "layer_types", "compress_overlap", "compress_indexer"),
        *_inside("compress_rates", ("compressed_sparse_attention", "heavily_compressed_attention")),
        *("compress_rate_csa", "compress_rate_hca"),
    ),
    fixed={**V4_FIXED, "norm_topk_prob": (True,)},
    aliases={**ALIASES, "intermediate_size": "moe_intermediate_size"},
    unused=(*UNUSED, "vision_*", "image_*"),
)
# Names in DeepSeek's inference code -> names in the published config.json.
INFERENCE_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_layers": "engram_layer_ids",
    "engram_pad_id": "engram_pad_token_id",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
V41 = FamilyKeys(
    read=(
        *V4_SHARED,
        *("norm_topk_prob", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id"),
        *("candidate_topk_blocks", "candidate_block_size", "engram_layer_ids", "engram_num_embeddings"),
        *("engram_max_ngram_size", "engram_n_heads", "engram_head_dim", "engram_vocab_size"),
        *("engram_pad_token_id", "engram_compressed_vocab_size"),
        *("pad_token_id", "image_token_id", "vision_config"),
        *("original_seq_len", "rope_factor", "beta_fast", "beta_slow"),  # of the inference code
    ),
    fixed={
        **V4_FIXED,
        "num_hash_layers": (0,),
        "gate_temp": (1, 1.0),
        "scale_fmt": ("ue8m0",),
        "scale_dtype": ("fp8",),
    },
    aliases={**ALIASES, **INFERENCE_NAMES},
    unused=(*UNUSED, "text_config", "vision_*", "max_batch_size", "max_seq_len"),
)

V32 = FamilyKeys(
    read=(
        *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
        *("v_head_dim", "head_dim", "qk_head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
        *("n_group", "topk_group", "index_n_heads", "index_head_dim", "index_topk", "layer_types"),
        *("first_k_dense_replace", "mlp_layer_types", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps"),
        *("num_nextn_predict_layers", *ROPE, *TOKENS, *FORMATS),
    ),
    fixed={
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        **FIXED,
        "rope_interleave": (True,),
        "indexer_rope_interleave": (False,),
        "partial_rotary_factor": (1.0, 1),
    },
    aliases=ALIASES,
    unused=UNUSED,
)
