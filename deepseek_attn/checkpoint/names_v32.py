"""Tensor names of DeepSeek-V3 and V3.2 checkpoints.

The model uses the short names of DeepSeek's inference code, as DeepSeek-V4's checkpoints do; V3's checkpoints use
transformers' names. A multi-token-prediction layer, which they number on from the backbone's layers, becomes ``mtp.N``.
"""

from __future__ import annotations

import re

from deepseek_attn.checkpoint.names import (
    BLOCK_RULES,
    EXPERT_RULES,
    READ_ONLY_RULES,
    Rules,
    renaming,
    renaming_back,
)

# (checkpoint, model), as whole dotted segments. The indexer's own ``wq_b`` has that name in both.
RULES: Rules = (
    *BLOCK_RULES,
    (".attn.q_a_proj.", ".attn.wq_a."),
    (".attn.q_a_layernorm.", ".attn.q_norm."),
    (".attn.q_b_proj.", ".attn.wq_b."),
    (".attn.kv_a_proj_with_mqa.", ".attn.wkv_a."),
    (".attn.kv_a_layernorm.", ".attn.kv_norm."),
    (".attn.kv_b_proj.", ".attn.wkv_b."),
    (".attn.o_proj.", ".attn.wo."),
    *EXPERT_RULES,
)
_canonical = renaming((*RULES, *READ_ONLY_RULES))
_back = renaming_back(RULES)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_MTP = re.compile(r"mtp\.(\d+)\.(.+)")


def canonical_name_v32(name: str, num_hidden_layers: int) -> str:
    """The model's name of a checkpoint tensor; unknown names come back with the rules applied that fit."""
    name = _canonical(name.removeprefix("model."))
    if name == "lm_head.weight":
        return "head.weight"
    layer = _LAYER.fullmatch(name)
    if layer is None or int(layer[1]) < num_hidden_layers:
        return name
    rest = "norm.weight" if layer[2] == "shared_head.norm.weight" else layer[2]
    return f"mtp.{int(layer[1]) - num_hidden_layers}.{rest}"


def published_name_v32(name: str, num_hidden_layers: int) -> str:
    """Name of a model tensor in published checkpoints and in transformers: the inverse of the above."""
    if name == "head.weight":
        return "lm_head.weight"
    mtp = _MTP.fullmatch(name)
    if mtp is not None:
        rest = "shared_head.norm.weight" if mtp[2] == "norm.weight" else mtp[2]
        name = f"layers.{num_hidden_layers + int(mtp[1])}.{rest}"
    return f"model.{_back(name)}"
