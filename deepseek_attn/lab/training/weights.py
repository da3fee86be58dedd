"""Weights of models in training: initial values, and the round trip through a checkpoint's storage formats."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F

from deepseek_attn.checkpoint.loader import load_model
from deepseek_attn.checkpoint.published import published_tensors
from deepseek_attn.checkpoint.recipes import DRAW, ROWS, Recipe
from deepseek_attn.checkpoint.source import DTYPES, CheckpointSource, TensorInfo
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.config.v41 import DeepseekV41Config
from deepseek_attn.impls.reference import DeepseekV4ReferenceSparseImpl
from deepseek_attn.kernels.common.quant import (
    dequantize_fp4,
    dequantize_fp8,
    dequantize_fp8_block,
    quantize_fp4,
    quantize_fp8,
    quantize_fp8_block,
)
from deepseek_attn.kernels.engram.types import SCALE_GROUP
from deepseek_attn.lab.training.forward import TrainedModel
from deepseek_attn.lab.training.v41 import TrainedV41
from deepseek_attn.models.block import BuildContext

TrainableConfig = ModelConfig | DeepseekV41Config

FP8_BLOCK = 128
EMBED_STD, HEAD_STD, STREAM_STD = 0.3, 0.02, 0.02
# Streams start as plain residuals: each sublayer reads mostly one of them, writes to all, and barely mixes them.
PICK, KEEP, MIX = 2.0, 3.0, 0.1
# These write into the streams; smaller by the number of sublayers, so that the streams do not grow with depth.
OUTPUTS = ("wo_b.weight", "w2.weight")


def check_trainable(config: AnyConfig) -> TrainableConfig:
    """The config; ValueError for another family than V4 and V4.1, several MTP layers or a DSpark drafter."""
    if not isinstance(config, ModelConfig | DeepseekV41Config):
        raise ValueError(
            f"cannot train a {config.model_type}: only DeepSeek-V4 and V4.1 have a differentiable path here"
        )
    if config.dspark is not None:
        raise ValueError("DSpark drafters are not trained: use a config with dspark_block_size 0")
    if len(config.mtp_layers) > 1:
        raise ValueError(
            f"num_nextn_predict_layers is {len(config.mtp_layers)}: only one MTP layer is trained, and it makes all "
            "drafts; use config.replace(num_nextn_predict_layers=1)"
        )
    return config


def build_model(
    config: TrainableConfig, source: CheckpointSource, device: torch.device, max_positions: int
) -> TrainedModel | TrainedV41:
    """The model in float32, loaded from any checkpoint; its float parameters require gradients.

    The router's bias does not: it steers the choice of experts only, and `balance` sets it.

    Raises:
        ValueError: `check_trainable` refuses the config, or ``source`` does not fit, or lacks the MTP layer.
    """
    check_trainable(config)
    numerics, impl = get_numerics("exact"), DeepseekV4ReferenceSparseImpl
    if isinstance(config, DeepseekV41Config):
        model = TrainedV41(BuildContext(config, numerics, torch.float32, device, impl, max_positions))
    else:
        model = TrainedModel(BuildContext(config, numerics, torch.float32, device, impl, max_positions))
    report = load_model(model, source, progress=False)
    if config.mtp_layers and not report.mtp_loaded:
        raise ValueError(
            "num_nextn_predict_layers is 1, but the checkpoint has no MTP layer; use "
            "config.replace(num_nextn_predict_layers=0)"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point() and not name.endswith("gate.bias"))
    return model


class FreshSource(CheckpointSource):
    """Initial values: float32, drawn tensor by tensor from ``(seed, name)``."""

    def __init__(self, config: TrainableConfig, seed: int = 0):
        self.config, self.seed = config, seed
        self._recipes = dict(published_tensors(config))

    def entries(self) -> dict[str, TensorInfo]:
        return {name: self._info(recipe) for name, recipe in self._recipes.items()}

    def read(self, name: str) -> torch.Tensor:
        recipe = self._recipes[name]
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        if recipe.kind == "table":
            return DRAW["table"].values(recipe, generator, self.config)
        if recipe.kind == "hc_base":
            return self._stream_base(name, recipe.shape[0])
        if name.endswith("h_proj.weight"):  # an MTP layer starts on the backbone's own streams: it learns faster
            return torch.eye(recipe.shape[0], dtype=torch.float32, device="cpu")
        constant = {"norm": 1.0, "ape": 0.0, "sink": 0.0, "bias": 0.0, "hc_scale": MIX}.get(recipe.kind)
        if constant is not None:
            return torch.full(recipe.shape, constant, dtype=torch.float32, device="cpu")
        return torch.randn(recipe.shape, generator=generator, dtype=torch.float32, device="cpu") * self._std(
            name, recipe
        )

    def _info(self, recipe: Recipe) -> TensorInfo:
        dtype = DRAW[recipe.kind].dtype if recipe.kind == "table" else "F32"
        return TensorInfo.of(dtype, recipe.shape)

    def _std(self, name: str, recipe: Recipe) -> float:
        if recipe.kind in ("embed", "hc_fn") or name == "head.weight":
            return {"embed": EMBED_STD, "hc_fn": STREAM_STD}.get(recipe.kind, HEAD_STD)
        depth = 2 * self.config.num_hidden_layers if name.endswith(OUTPUTS) else 1
        return (recipe.shape[-1] * depth) ** -0.5

    def _stream_base(self, name: str, rows: int) -> torch.Tensor:
        m = self.config.hc_mult
        if rows == m:  # the end of the model reads all streams alike
            return torch.zeros(m, dtype=torch.float32, device="cpu")
        part, layer = name.split(".")[:2]
        layer = int(layer) + (self.config.num_hidden_layers if part == "mtp" else 0)
        pre = torch.full((m,), -PICK, dtype=torch.float32, device="cpu")
        later = isinstance(self.config, DeepseekV41Config)  # a sublayer has the weights of the next one's input
        pre[(2 * layer + ("ffn" in name) + later) % m] = PICK
        return torch.cat(
            [
                pre,
                torch.zeros(m, dtype=torch.float32, device="cpu"),
                (KEEP * torch.eye(m, dtype=torch.float32, device="cpu")).flatten(),
            ]
        )


def rounded(values: torch.Tensor, form: str, group: int = FP8_BLOCK) -> torch.Tensor:
    """``values`` after a round trip through storage (see `PublishedSource.stored_as`); the gradient passes unchanged.

    Args:
        values: float32 ``[..., out, in]``, such as stacked experts, or any shape for unquantised forms.
        form: see `PublishedSource.stored_as`, or ``rows`` for a table whose groups of 32 columns have a scale each.
        group: rows and columns of an FP8 block.
    """
    plain = values.detach()
    if form == "fp4":
        stored = dequantize_fp4(*quantize_fp4(plain))
    elif form == ROWS:
        stored = dequantize_fp8(*quantize_fp8(plain, SCALE_GROUP), SCALE_GROUP)
    elif form == "fp8":
        *_, rows, columns = plain.shape
        padded = F.pad(plain, (0, 0, 0, -rows % group))  # no block spans two matrices
        stored = dequantize_fp8_block(*quantize_fp8_block(padded.view(-1, columns), (group, group)), (group, group))
        stored = stored.view_as(padded)[..., :rows, :]
    else:
        stored = plain.to(DTYPES[form].torch).float()
    return values + (stored - plain)
