"""Ties that oracles report."""

import math

import pytest
import torch

from tests.support.oracle_output import OracleOutput
from tests.support.oracle_v41 import gap_after

ROWS = [([3.0, 1.0, -4.0], 1, 0.5), ([2.0, 0.0, 0.0], 2, 0.0), ([0.0, 0.0], 1, 0.0), ([0.0, 0.0], 2, math.inf)]


@pytest.mark.parametrize(("scores", "kept", "expected"), ROWS)
def test_a_tie_at_0_is_a_tie(scores, kept, expected):
    """A product of a key that no head likes may be rounded to either side of 0."""
    output = OracleOutput()
    output.choose_entries(0, torch.tensor([scores], dtype=torch.float64), torch.tensor([len(scores)]), kept)
    assert output.index_gap == gap_after(sorted(scores, reverse=True), kept) == expected
