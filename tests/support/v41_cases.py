"""Small models of DeepSeek-V4.1, and their oracle."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from deepseek_attn.checkpoint import CheckpointSource, read_float32
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.oracle_v41 import V41Oracle
from tests.support.small_models import NEAR_TIE, small_runner

TOLERANCE = 1e-5  # of the largest logit
KERNEL_WIDTHS: dict[str, Any] = {
    "hidden_size": 256, "q_lora_rank": 128, "num_attention_heads": 8, "o_lora_rank": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 64, "candidate_topk_blocks": 20,
    "candidate_block_size": 4, "moe_intermediate_size": 128, "engram_head_dim": 64,
}  # fmt: skip


# One layer of each way to share entries, one of them with an Engram; the draft stage after them has a window alone.
FOUR_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4, "compress_ratios": [2, 1, 1, 1, 0], "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1, 2], "candidate_source_layer_id": 1, "engram_layer_ids": [1],
    "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [0, 3],
}  # fmt: skip


def tiny(**changes: Any) -> DeepseekV41Config:
    return ModelConfig.from_preset("tiny_v41").replace(**changes)


def tiny_for_kernels() -> DeepseekV41Config:
    """A small model of widths that kernels take."""
    return tiny(**KERNEL_WIDTHS)


def with_repeated_layers() -> DeepseekV41Config:
    """The same with 12 layers, of which some are alike."""
    return tiny_for_kernels().replace(
        num_hidden_layers=12,
        compress_ratios=[0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        kv_source_layer_ids=[2, 4, 6],
        index_source_layer_ids=[2, 4, 6, 8, 10],
        candidate_source_layer_id=6,
        engram_layer_ids=[6],
        engram_num_embeddings=[660],
        dspark_target_layer_ids=[9, 11],
    )


def shallow() -> DeepseekV41Config:
    """A small model of four layers."""
    return tiny(**FOUR_LAYERS, engram_num_embeddings=[660])


def make_runner(config: DeepseekV41Config, source: CheckpointSource | None = None, **options: Any) -> ModelRunner:
    return small_runner(config, source, **{"max_model_len": 320, "max_num_batched_tokens": 2048, **options})


def oracle_of(config: DeepseekV41Config, source: CheckpointSource, official: bool = False) -> V41Oracle:
    """The oracle over a checkpoint under published names; each tensor is read once. ``official``: with quantisers."""
    read: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        if name not in read:
            read[name] = (table(source, name) if "engram.embed" in name else read_float32(source, name)).double()
        return read[name]

    numbers = None
    if config.engram is not None:
        numbers = source.token_numbers(config.engram.engram_compressed_vocab_size, config.vocab_size)
    stored = {name.replace(".scale", ".weight") for name in source.entries() if name.endswith(".scale")}
    rounds = (lambda name: name in stored and ".wo_a." not in name) if official else None
    return V41Oracle(config.to_dict(), tensor, numbers, rounds)


def table(source: CheckpointSource, name: str) -> Tensor:
    """An Engram table: a power of two per row and 32 columns."""
    exponents = source.read(name.replace("weight", "scale")).double() - 127
    return source.read(name).double() * torch.exp2(exponents).repeat_interleave(32, 1)


def closest_choice(oracle: V41Oracle) -> float:
    """The least distance between what the last prompt chose and what it rejected."""
    return min((gap for gaps in oracle.gaps.values() for gap in gaps), default=math.inf)


def assert_clear(oracle: V41Oracle) -> None:
    """A test's prompt must not leave a choice to rounding. If it does: use another seed."""
    assert closest_choice(oracle) > NEAR_TIE, f"choices {closest_choice(oracle):.1e} apart: use another seed"


def random_schedule(draw: random.Random) -> dict:
    """A schedule with all roles and ratios in any order, and other widths: changes of `tiny`."""
    ratios, kv, index, ratio = [], [], [], 0
    for layer in range(draw.randint(3, 7)):
        if not kv or draw.random() < 0.3:
            ratio = draw.choice([1, 2])
            if layer and draw.random() < 0.9:
                kv.append(layer)
                index.append(layer)
        elif draw.random() < 0.4:
            index.append(layer)
        reads = kv and (layer in index or draw.random() < 0.8)
        ratios.append(ratio_of(ratios, kv, layer, ratio) if reads else 0)
    index = [layer for layer in index if ratios[layer]]
    topk, size = draw.choice([1, 5, 60]), draw.choice([1, 3, 8])
    candidates = [i for i in index if all(ratios[j] == ratios[i] for j in index if j > i)]
    limited = draw.choice(candidates) if candidates and draw.random() < 0.7 else None
    return dict(
        num_hidden_layers=len(ratios), compress_ratios=ratios, kv_source_layer_ids=kv,
        index_source_layer_ids=index, candidate_source_layer_id=limited,
        candidate_topk_blocks=None if limited is None else -(-topk // size) + draw.choice([1, 2]),
        candidate_block_size=None if limited is None else size, index_topk=topk,
        sliding_window=draw.choice([1, 5, 70]), head_dim=draw.choice([64, 96]), index_n_heads=8,
        hc_mult=draw.choice([2, 4]), rms_norm_eps=draw.choice([1e-20, 1e-6]),
        engram_layer_ids=None, **({"quantization_config": None} if draw.random() < 0.3 else {}),
    )  # fmt: skip


def ratio_of(ratios: list[int], kv: list[int], layer: int, ratio: int) -> int:
    """Ratio of a layer: its own if it makes entries, else that of the last layer that did."""
    return ratio if kv[-1] == layer else ratios[kv[-1]]
