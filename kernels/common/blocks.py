"""Row blocks: how the references bound their scratch memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

SCRATCH_BYTES = 64 << 20
"""Upper bound of the scratch of one reference call, in bytes; at least one row is always processed at a time."""


def rows_per_block(bytes_per_row: int, budget: int = SCRATCH_BYTES) -> int:
    """Returns how many rows fit in ``budget`` bytes, at least one."""
    return max(1, budget // max(1, bytes_per_row))


def row_blocks(total: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yields ``(start, end)`` ranges of at most ``rows`` rows that cover ``total`` rows; none when ``total`` is 0."""
    for start in range(0, total, rows):
        yield start, min(start + rows, total)


def value_range(values: Tensor) -> tuple[int, int]:
    """Smallest and largest value of an integer tensor on the CPU; (0, -1) of an empty one."""
    if not values.numel():
        return 0, -1
    least, most = values.aminmax()
    return int(least), int(most)
