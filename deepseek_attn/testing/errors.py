"""Errors of results relative to a reference, and the tolerances for them."""

from __future__ import annotations

import torch
from torch import Tensor

from deepseek_attn.config.numerics import Numerics

# relative error of one attention layer: each linear, norm and rotation rounds its result
BY_DTYPE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
QUANTIZED_CACHE = 5e-2  # values rounded to e4m3
QUANTIZED_INPUTS = 2.5e-1  # inputs of each linear are rounded too (2.7e-2 each): worst of thousands of rows 2e-1
HEAD_TO_ROW = 2.0  # ratio of a head's error to a row's: a row averages over heads
QUANTIZED_INDEX = {"fp8": 2e-1, "fp4": 5e-1}  # allowed error of an index score by the format of index keys


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row ``[...]`` of ``[T, ...]``; infinite where zeros were expected and are not."""
    if not len(expected):
        return 0.0
    actual, expected = (rows.detach().flatten(1).double().to(expected.device) for rows in (actual, expected))
    difference, size = (actual - expected).norm(dim=1), expected.norm(dim=1)
    zeros = torch.where(difference == 0, 0.0, torch.inf)
    return float(torch.where(size > 0, difference / size, zeros + difference).max())


def tolerance(dtype: torch.dtype, numerics: Numerics) -> float:
    """The `relative_error` that an attention layer may have against `LayerReference`."""
    if numerics.fp8_activations:
        return QUANTIZED_INPUTS
    return BY_DTYPE[dtype] if numerics.kv_record == "plain" else QUANTIZED_CACHE


def selection_tolerance(dtype: torch.dtype, numerics: Numerics) -> float:
    """Bound of `LayerReference.selection_errors` for an indexer."""
    return QUANTIZED_INDEX.get(numerics.index_record, BY_DTYPE[dtype])
