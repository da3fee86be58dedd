"""Descriptions of wrong results of a layer, for error messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where a token was computed.

    Attributes:
        step: number of the step; row: row of the token in the step's input.
        new_tokens: number of new tokens of its request in this step.
        decode: the layer treated the request as a decode.
    """

    step: int
    row: int
    new_tokens: int
    decode: bool

    def __str__(self) -> str:
        phase = "decode" if self.decode else "prefill"
        return f"row {self.row} of step {self.step}, in a {phase} of {self.new_tokens} token(s)"


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative error of each row of ``[T, d]``; infinite where zeros were expected, or where NaN was found."""
    difference, size = (actual - expected).norm(dim=-1), expected.norm(dim=-1)
    return _relative(difference, size)


def head_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Error of each head ``[T, H]`` of ``[T, H, d]``, relative to the larger of itself and the heads' mean size."""
    size = expected.norm(dim=-1)
    return _relative((actual - expected).norm(dim=-1), size.maximum(size.square().mean(1, keepdim=True).sqrt()))


def _relative(difference: Tensor, size: Tensor) -> Tensor:
    zeros = torch.where(difference == 0, 0.0, torch.inf).to(difference.dtype)
    return torch.where(size > 0, difference / size, zeros).nan_to_num(torch.inf)


def channels_in_words(actual: Tensor, expected: Tensor, limit: float) -> str:
    """Names the wrong channels of one row ``[d]``, and the values in the worst channel."""
    difference = (actual - expected).abs().nan_to_num(torch.inf)
    wrong = (difference > limit * expected.square().mean().sqrt()).nonzero().flatten()
    wrong = wrong if len(wrong) else difference.argmax()[None]
    worst = int(difference.argmax())
    numbers = f"expected {float(expected[worst]):.6g}, got {float(actual[worst]):.6g} in channel {worst}"
    return f"channels {int(wrong[0])} to {int(wrong[-1])} of {len(expected)}, {numbers}"


def rows_in_words(wrong: Tensor) -> str:
    """Names the number and positions of the true values of ``wrong [T]``."""
    positions = wrong.nonzero().flatten().tolist()
    return f"{len(positions)} of {len(wrong)} rows are wrong, at positions {positions[0]} to {positions[-1]}"
