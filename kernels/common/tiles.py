"""Tensors whose tiles Hopper loads to shared memory by itself (TMA)."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def tiled(tensor: Tensor, rows: int, columns: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """``tensor [R, C]`` as a kernel's argument for loads of tiles ``[rows, columns]``, in shared memory of this layout.

    Its rows are contiguous; it begins at a multiple of 16 bytes, as does each row.
    """
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)
