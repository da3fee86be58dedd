"""Small models, prompts and comparisons that the tests of the whole model share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deepseek_attn.attention.layer import DeepseekV4MLAAttention
from deepseek_attn.checkpoint import CheckpointSource, RandomSource
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.kernels.moe import ExpertsCall, reference
from deepseek_attn.models.moe import Gate
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.oracle_output import OracleOutput
from tests.support.typed import required

TOLERANCE = 1e-4  # of the largest logit; float32 programs that agree differ by about 2e-6
NEAR_TIE = 4e-6  # closer choices than this may fall differently: scores of two float32 programs differ by up to 6e-7

# The widths of FP8 linears (multiples of 128) and records (64 channels without rotation), and little else.
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "o_groups": 2,
    "o_lora_rank": 64,
    "n_routed_experts": 4,
    "index_topk": 6,
    "sliding_window": 20,
    "hc_mult": 2,
    "num_hash_layers": 1,
    "max_position_embeddings": 4096,
}

SMALL_RUNNER: dict[str, Any] = {"max_model_len": 640, "max_num_seqs": 16, "max_num_batched_tokens": 4096}


def small_config(ratios: list[int], mtp: int = 0, **changes: Any) -> ModelConfig:
    """A small model with one backbone layer per entry of ``ratios``."""
    schedule = {"compress_ratios": [*ratios, *[0] * mtp], "num_nextn_predict_layers": mtp}
    hashed = {"num_hash_layers": min(SMALL["num_hash_layers"], len(ratios) - 1)}
    changes = SMALL | hashed | {"num_hidden_layers": len(ratios)} | schedule | changes
    return ModelConfig.from_preset("tiny").replace(**changes)


def two_layers() -> ModelConfig:
    """``tiny`` with one layer of each compressed kind, and its MTP layer, which has a window alone.

    A third of the work of a step of ``tiny``.
    """
    return ModelConfig.from_preset("tiny").replace(num_hidden_layers=2, compress_ratios=[4, 128, 0], num_hash_layers=1)


def small_runner(config: AnyConfig, source: CheckpointSource | None = None, **options: Any) -> ModelRunner:
    options = SMALL_RUNNER | options
    return ModelRunner.from_source(config, source or RandomSource(config, 0), progress=False, device="cpu", **options)


def prompt(config: AnyConfig, length: int, seed: int = 0) -> list[int]:
    """Random tokens; prompts of one seed are prefixes of each other."""
    generator = random.Random(seed)
    return [generator.randrange(config.vocab_size) for _ in range(length)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE, what: str = "") -> None:
    """The largest difference is at most ``tolerance`` times the largest expected magnitude."""
    assert actual.shape == expected.shape, f"{what} {tuple(actual.shape)} != {tuple(expected.shape)}"
    if not expected.numel():
        return
    difference, scale = (actual - expected).abs(), float(expected.abs().max())
    worst = float(difference.max()) / scale
    assert worst <= tolerance, (
        f"{what} differs by {worst:.1e} of the largest value, at row {int(difference.amax(1).argmax())}"
    )


def assert_same_codes(
    actual: torch.Tensor, expected: torch.Tensor, largest: float, same: float = 1e-4, share: float = 0.7, what: str = ""
) -> None:
    """Rows of two quantised computations: ``share`` of them are within ``same`` of each other, all within ``largest``.

    Sums in another order, as on another processor, move a value next to the boundary between two codes across it.
    Errors are relative, by norm.
    """
    actual, expected = (rows.double().cpu().flatten(1) for rows in (actual, expected))
    assert actual.shape == expected.shape, f"{what} {tuple(actual.shape)} != {tuple(expected.shape)}"
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert float((errors < same).double().mean()) >= share, (what, errors.tolist())
    assert float(errors.max()) < largest, (what, errors.tolist())


@contextmanager
def experts_by_token() -> Iterator[None]:
    """In plain torch, experts inside compute one token at a time.

    Otherwise the products of an expert round a token by the number and order of the tokens that chose it.
    """
    compute = reference.moe_experts

    def one_by_one(call: ExpertsCall) -> torch.Tensor:
        by_token = [call.x.split(1), call.experts.split(1), call.weights.split(1)]
        parts = [compute(call._replace(x=x, experts=e, weights=w, add=None)) for x, e, w in zip(*by_token, strict=True)]
        out = torch.cat(parts) if parts else compute(call._replace(add=None))
        return out if call.add is None else (out + call.add).to(call.x.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "moe_experts", one_by_one)
        yield


def assert_no_near_tie(output: OracleOutput) -> None:
    """A test's prompt must not leave a choice to rounding. If it does: use another seed."""
    assert output.router_gap > NEAR_TIE, f"experts {output.router_gap:.1e} apart: use another seed"
    assert output.index_gap > NEAR_TIE, f"entries {output.index_gap:.1e} apart: use another seed"


@contextmanager
def recorded_choices(runner: ModelRunner) -> Iterator[OracleOutput]:
    """Experts of all steps inside, and compressed entries of the last one, by layer."""
    found = OracleOutput()

    def gate_hook(layer: int):
        def hook(module, args, result):
            experts = result[0].sort(-1).values
            before = found.experts.get(layer)
            found.experts[layer] = experts if before is None else torch.cat([before, experts])

        return hook

    def attention_hook(layer: int):
        def hook(module: DeepseekV4MLAAttention, args, result):
            if module.indexer is not None:
                rows = required(module.topk_indices_buffer)[: len(args[0])]
                entries = torch.arange(int(required(module.step).positions.max() + 1) // module.spec.ratio)
                found.entries[layer] = (rows.unsqueeze(2) == entries).any(1)

        return hook

    hooks = []
    for index, block in runner.model.layers.items():
        for module in block.modules():
            hook = {Gate: gate_hook, DeepseekV4MLAAttention: attention_hook}.get(type(module))
            if hook:
                hooks.append(module.register_forward_hook(hook(int(index))))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
