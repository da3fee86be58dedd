"""The DSpark drafter of DeepSeek-V4.1 and of V4's revisions: config keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_attn.config.fields import FieldReader

MAX_BLOCK = 256  # rows of a drafted block; published: 5


@dataclass(frozen=True)
class DSparkConfig:
    """The ``dspark_*`` keys of a published config.

    Attributes:
        dspark_block_size: rows of a drafted block, and so the maximum of drafts per step.
        dspark_noise_token_id: token of every row but the first.
        dspark_target_layer_ids: backbone layers whose residual streams the drafter reads.
        dspark_markov_rank: width of the embedding that ties a draft to the token before it.
        dspark_n_routed_experts, dspark_num_experts_per_tok: experts of the draft stages; None: as in the backbone.
    """

    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int | None = None
    dspark_num_experts_per_tok: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The keys as a published config has them."""
        out = {key: value for key, value in vars(self).items() if value is not None}
        return out | {"dspark_target_layer_ids": list(self.dspark_target_layer_ids)}


def read_dspark(reader: FieldReader, fields: Mapping[str, Any]) -> DSparkConfig | None:
    """Reads the ``dspark_*`` keys; None without ``dspark_block_size``, or after reporting problems to ``reader``.

    Args:
        fields: values of the config, None where they were wrong.
    """
    block = reader.integer("dspark_block_size", 0, minimum=0)
    if not block:
        return None
    if block > MAX_BLOCK:
        reader.problem(f"dspark_block_size is {block}: supported is at most {MAX_BLOCK}")
    noise = reader.integer("dspark_noise_token_id", minimum=0)
    if noise is not None and fields["vocab_size"] is not None and noise >= fields["vocab_size"]:
        reader.problem(f"dspark_noise_token_id {noise} is outside the vocabulary of vocab_size {fields['vocab_size']}")
    targets = reader.as_integers("dspark_target_layer_ids", reader.value("dspark_target_layer_ids"), 0)
    if targets and list(targets) != sorted(set(targets)):
        reader.problem(f"dspark_target_layer_ids is {list(targets)}: expected ascending numbers of layers")
    layers = fields["num_hidden_layers"]
    if targets and layers is not None and max(targets) >= layers:
        reader.problem(f"dspark_target_layer_ids has layer {max(targets)}, and num_hidden_layers is {layers}")
    if targets == ():
        reader.problem("dspark_target_layer_ids is []: the drafter reads at least one layer")
    experts = reader.integer("dspark_n_routed_experts", None)
    chosen = reader.integer("dspark_num_experts_per_tok", None)
    of_stages = experts or fields["n_routed_experts"]
    if chosen is not None and of_stages is not None and chosen > of_stages:
        reader.problem(f"dspark_num_experts_per_tok {chosen} is above the {of_stages} experts of a draft stage")
    rank = reader.integer("dspark_markov_rank")
    if noise is None or rank is None or not targets:
        return None
    return DSparkConfig(block, noise, targets, rank, experts, chosen)


def drop_dspark(raw: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Removes the drafter's keys from a config if ``changes`` remove the drafter or layers that it needs."""
    layers = changes.get("num_hidden_layers", raw["num_hidden_layers"])
    targets = changes.get("dspark_target_layer_ids", raw["dspark_target_layer_ids"])
    kept = all(changes.get(key, 1) for key in ("num_nextn_predict_layers", "dspark_block_size"))
    lost = "dspark_target_layer_ids" not in changes and type(layers) is int and max(targets) >= layers
    if lost or not kept:
        for key in DSparkConfig.__dataclass_fields__:
            raw.pop(key, None)
        raw["num_nextn_predict_layers"] = 0
        raw["compress_ratios"] = raw["compress_ratios"][:layers]
