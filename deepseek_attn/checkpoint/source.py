"""The protocol of sources of checkpoint tensors, and their headers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepseek_attn.layers.weights import Shard


class StoredDtype(NamedTuple):
    """A dtype of safetensors files.

    Attributes:
        torch: dtype of the tensor that `CheckpointSource.read` returns.
        bits: bits of one value.
    """

    torch: torch.dtype
    bits: int


# By the name that a header has for it. Scale bytes and packed nibbles stay bytes: converting them as numbers would turn
# an exponent byte of 120 into 120.0 instead of 2**-7.
DTYPES = {
    "F64": StoredDtype(torch.float64, 64),
    "F32": StoredDtype(torch.float32, 32),
    "F16": StoredDtype(torch.float16, 16),
    "BF16": StoredDtype(torch.bfloat16, 16),
    "F8_E4M3": StoredDtype(torch.float8_e4m3fn, 8),
    "F8_E8M0": StoredDtype(torch.uint8, 8),
    "F4": StoredDtype(torch.uint8, 4),
    "I64": StoredDtype(torch.int64, 64),
    "I32": StoredDtype(torch.int32, 32),
    "I16": StoredDtype(torch.int16, 16),
    "I8": StoredDtype(torch.uint8, 8),
    "U8": StoredDtype(torch.uint8, 8),
    "BOOL": StoredDtype(torch.bool, 8),
}
FP4_DTYPES = ("I8", "U8", "F4")


@dataclass(frozen=True)
class TensorInfo:
    """Entry of one tensor in the header of a checkpoint.

    Attributes:
        dtype: dtype as the safetensors header spells it, such as ``"F8_E4M3"``.
        shape: shape in the header. Packed FP4 counts bytes when stored as I8 or U8, values when stored as F4.
        nbytes: bytes of its data.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        """The header of a contiguous tensor; ``dtype`` is in `DTYPES`."""
        return cls(dtype, tuple(shape), math.prod(shape) * DTYPES[dtype].bits // 8)


class CheckpointSource(ABC):
    """Named tensors with their headers, read one at a time.

    Attributes:
        reads_in_threads: several threads may call `read`, `read_part` and `read_shard` at the same time.
    """

    @property
    def reads_in_threads(self) -> bool:
        return False

    @abstractmethod
    def entries(self) -> dict[str, TensorInfo]:
        """All tensors in the order in which they are cheapest to read."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU. F8_E8M0, I8 and U8 come as ``uint8``, F4 as ``uint8[..., n/2]``, others as are."""

    def view(self, name: str) -> torch.Tensor:
        """The same tensor for a short look: it may share memory with the source, so it must not be changed or kept."""
        return self.read(name)

    def read_part(self, name: str, index: int, count: int) -> torch.Tensor:
        """The ``index``-th of ``count`` equal contiguous parts of a tensor, its first two dimensions merged."""
        tensor = self.view(name).flatten(0, 1)
        size = tensor.shape[0] // count
        return tensor.narrow(0, index * size, size).clone()

    def read_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor by index, int64 ``[n]``; other rows are not read where the source can avoid it."""
        tensor = self.view(name)
        return tensor.view(torch.uint8)[rows].view(tensor.dtype) if tensor.element_size() == 1 else tensor[rows]

    def token_numbers(self, count: int, vocab_size: int) -> Sequence[int]:
        """``count`` different numbers for the tokens of a vocabulary; Engram hashes them instead of token ids.

        Raises:
            ValueError: the source has no tokenizer, or its tokenizer gives another number of values.
        """
        raise ValueError(f"a {type(self).__name__} has no tokenizer, and Engram hashes the texts of tokens")

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        """A part of a tensor, in places of the tensor that `read` returns."""
        part = self.view(name).narrow(shard.dim, shard.start, shard.size)
        return part.clone(memory_format=torch.contiguous_format)


class HeaderSource(CheckpointSource):
    """The tensors of a checkpoint without their values, on the device "meta"."""

    def __init__(self, headers: dict[str, TensorInfo]):
        self._headers = headers

    def entries(self) -> dict[str, TensorInfo]:
        return self._headers

    def read(self, name: str) -> torch.Tensor:
        info = self._headers[name]
        dtype, shape = DTYPES[info.dtype], list(info.shape)
        if dtype.bits < 8 * dtype.torch.itemsize:  # packed
            shape[-1] = shape[-1] * dtype.bits // (8 * dtype.torch.itemsize)
        return torch.empty(shape, dtype=dtype.torch, device="meta")

    def token_numbers(self, count: int, vocab_size: int) -> Sequence[int]:
        return range(vocab_size)  # no step looks tokens up


def shortened(text: str) -> str:
    """The beginning of a text from a checkpoint, of any length there, for a message that quotes it."""
    return text if len(text) <= 300 else f"{text[:300]}..."
