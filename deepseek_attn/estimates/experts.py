"""Predictions for models whose routed experts are partly off the device: experts that fit, and time steps wait."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from deepseek_attn.checkpoint.published import canonical_names, published_tensors
from deepseek_attn.checkpoint.recipes import ROWS, Recipe
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.estimates.floors import expected_experts, stored_bytes
from deepseek_attn.estimates.machines import CPU
from deepseek_attn.estimates.ranks import RankModel
from deepseek_attn.layers.split import splits_widths
from deepseek_attn.models.expert_rows import ExpertFormat
from deepseek_attn.models.host_experts import STREAM_LOAD
from deepseek_attn.utils.sizes import largest

HIT_RATES = (0.3, 0.6, 0.9)
EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class ExpertSizes:
    """The routed experts of a model.

    Attributes:
        layers: layers with experts, drafters included; backbone: without drafters.
        experts: of each layer, on one rank; topk: of a token, on all ranks.
        values: of one expert, or of a rank's part of it; nbytes: of these on the device; stored: in the checkpoint.
    """

    layers: int
    backbone: int
    experts: int
    topk: int
    values: int
    nbytes: int
    stored: int

    @classmethod
    def of(cls, config: AnyConfig, numerics: Numerics, dtype: torch.dtype, ranks: int = 1) -> ExpertSizes | None:
        """The sizes of a config whose checkpoint is published; None for a model without experts."""
        if parts := splits_widths(config, ranks):
            config = replace(config, moe_intermediate_size=config.moe_intermediate_size // ranks)
        first = [(name, recipe) for name, recipe in _tensors(config, experts="0") if ".experts." in name]
        if not first:
            return None
        layers = {name.partition(".ffn.")[0] for name, _ in first}
        shapes = [recipe.shape for name, recipe in first if name.startswith(min(layers))]
        quantized = config.quantization_config is not None
        form = (getattr(config, "expert_dtype", None) or "fp8") if quantized else "bf16"
        values = sum(map(prod, shapes))
        stored = sum(stored_bytes(shape, form, config.FP8_GROUP) for shape in shapes) if quantized else 2 * values
        kept = quantized and numerics.quantized_weights
        exponents = sum(shape[0] for shape in shapes) * (kept and form == "fp4" and numerics.fp8_activations)
        nbytes = stored + exponents if kept else values * dtype.itemsize
        backbone = sum(name.startswith("layers.") for name in layers)
        experts = config.n_routed_experts if parts else -(-config.n_routed_experts // ranks)
        return cls(len(layers), backbone, experts, config.num_experts_per_tok, values, nbytes, stored)

    def on_gpu(self, budget: int, areas: int) -> tuple[int, int]:
        """Experts that each layer keeps on a GPU within ``budget`` bytes, and bytes of all rows; (0, 0) for none.

        ``areas``: see `ExpertFormat`.
        """
        form = ExpertFormat(self.experts, self.nbytes, self.layers, min(areas, self.layers))
        cached = largest(lambda count: form.held(max(count, 1)) <= budget, 0, self.experts)
        return (cached, form.held(cached)) if cached else (0, 0)

    @property
    def total(self) -> int:
        """Bytes of all experts of one rank on the device."""
        return self.layers * self.experts * self.nbytes


def _tensors(config: AnyConfig, experts: str) -> Iterator[tuple[str, Recipe]]:
    """All tensors under their canonical names; of routed experts those with this number alone, if any."""
    rename = canonical_names(config)
    for name, recipe in published_tensors(config):
        routed = EXPERT_NUMBER.search(name)
        if routed is None or routed[1] == experts:
            yield rename(name), recipe


@dataclass(frozen=True)
class ExpertSteps:
    """Steps of a batch at one hit rate.

    Attributes:
        moved: bytes that a device takes over its bus in a step, or that are read from disk.
    """

    requests: int
    hit_rate: float
    moved: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.requests / self.seconds


def gpu_steps(
    model: RankModel, sizes: ExpertSizes, batches: Iterable[int], context: int, rate: float
) -> Iterator[ExpertSteps]:
    """Time of decode steps on GPUs that lack experts: with all experts resident, plus copies at ``rate`` bytes/s.

    Copies follow from the routing of a layer and precede its products, so nothing overlaps.
    """
    for batch in batches:
        resident = model.step(batch, 1, context)
        total = resident.shape.rows * (model.layout.ranks if model.layout.dp_attention else 1)
        for hit_rate in HIT_RATES:
            moved = round((1 - hit_rate) * sizes.backbone * model.chosen_experts(total) * sizes.nbytes)
            yield ExpertSteps(total, hit_rate, moved, resident.microseconds / 1e6 + moved / rate)


@dataclass(frozen=True)
class ExpertPrompt:
    """A prompt computed in steps.

    Attributes:
        chunks: number of steps.
        moved: bytes that a device takes over its bus, or that are read from disk.
    """

    tokens: int
    chunks: int
    moved: int
    seconds: float


def gpu_prompt(
    model: RankModel, sizes: ExpertSizes, cached: int, tokens: int, chunk: int, rate: float, ahead: bool
) -> ExpertPrompt:
    """A prompt on GPUs that keep ``cached`` experts of each layer, in steps of ``chunk`` tokens.

    Args:
        rate: of copies, bytes/s.
        ahead: all missing experts of a layer are copied while earlier layers compute, those of the first layer before
            the step (``host``); otherwise the chosen experts are copied between the routing of a layer and its
            products.
    """
    seconds = moved = 0.0
    starts = range(0, tokens, chunk)
    for start in starts:
        new = min(chunk, tokens - start)
        computed = model.step(1, new, start + new).microseconds / 1e6
        ahead = ahead and new * sizes.topk >= STREAM_LOAD * sizes.experts
        lacking = sizes.experts - cached if ahead else (1 - cached / sizes.experts) * model.chosen_experts(new)
        copies = lacking * sizes.nbytes / rate  # of a layer
        moved += sizes.backbone * lacking * sizes.nbytes
        both = sizes.backbone * copies
        seconds += max(computed, both) + copies if ahead else computed + both
    return ExpertPrompt(tokens, len(starts), round(moved), seconds)


@dataclass(frozen=True)
class OtherWeights:
    """Everything but routed experts, on a CPU.

    Attributes:
        nbytes: in memory; quantized: values that are dequantised in each step; multiplied: values of all matrices.
    """

    nbytes: int
    quantized: int
    multiplied: int

    @classmethod
    def of(cls, config: AnyConfig, numerics: Numerics, dtype: torch.dtype) -> OtherWeights:
        nbytes = quantized = multiplied = 0
        for name, recipe in _tensors(config, experts=""):
            if recipe.kind == ROWS:  # tables stay in the checkpoint
                continue
            count, matrix = prod(recipe.shape), recipe.kind in ("quantized", "linear")
            multiplied += count * (matrix and not name.startswith("mtp."))
            if recipe.kind == "quantized" and config.quantization_config is not None and numerics.quantized_weights:
                quantized += count * (not name.startswith("mtp."))
                nbytes += stored_bytes(recipe.shape, "fp8", config.FP8_GROUP)
            else:
                nbytes += count * (dtype.itemsize if matrix or recipe.kind == "embed" else 4)
        return cls(nbytes, quantized, multiplied)


def cpu_steps(
    config: AnyConfig, sizes: ExpertSizes, others: OtherWeights, batches: Iterable[int], rate: float
) -> Iterator[ExpertSteps]:
    """Decode steps on one thread of a CPU; reads at ``rate`` bytes/s overlap with the products of experts."""
    fixed = others.quantized / CPU.dequantized + others.multiplied / CPU.multiplied
    one = 1 / CPU.multiplied + (1 / CPU.dequantized if config.quantization_config is not None else 0)
    for batch in batches:
        needed = sizes.backbone * expected_experts(config.n_routed_experts, sizes.topk, batch)
        for hit_rate in HIT_RATES:
            moved = round((1 - hit_rate) * needed * sizes.stored)
            yield ExpertSteps(batch, hit_rate, moved, fixed + max(needed * sizes.values * one, moved / rate))


def cpu_prompt(
    config: AnyConfig, sizes: ExpertSizes, others: OtherWeights, cached: int, tokens: int, chunk: int, rate: float
) -> ExpertPrompt:
    """A prompt on one thread of a CPU that keeps ``cached`` experts of each layer, in steps of ``chunk`` tokens.

    A step reads and dequantises each expert that its tokens chose once; reads overlap with the products.
    """
    seconds = moved = 0.0
    starts = range(0, tokens, chunk)
    for start in starts:
        new = min(chunk, tokens - start)
        needed = sizes.backbone * expected_experts(config.n_routed_experts, sizes.topk, new)
        read = (1 - cached / sizes.experts) * needed * sizes.stored
        chosen = sizes.backbone * sizes.topk * sizes.values
        dequantized = needed * sizes.values if config.quantization_config is not None else 0
        products = new * (others.multiplied + chosen) / CPU.products
        computed = products + (others.quantized + dequantized) / CPU.dequantized
        seconds, moved = seconds + max(computed, read / rate), moved + read
    return ExpertPrompt(tokens, len(starts), round(moved), seconds)
