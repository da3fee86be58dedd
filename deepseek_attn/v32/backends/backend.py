"""Declaration of a sparse MLA backend: its name, its classes and what it supports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from deepseek_attn.v32.backends.builder import SparseMLAMetadataBuilder
from deepseek_attn.v32.backends.config import DeviceCapability
from deepseek_attn.v32.backends.impl import SparseMLAImpl
from deepseek_attn.v32.backends.metadata import SparseMLAMetadata


class SparseMLABackend(ABC):
    """Sparse attention over the latent cache: one latent head, keys chosen by an indexer.

    Attributes:
        accept_output_buffer: the impl writes to an output tensor that the caller gives.
        supported_dtypes: of queries; supported_kv_cache_dtypes: names of cache formats.
    """

    accept_output_buffer: ClassVar[bool] = True
    supported_dtypes: ClassVar[list[torch.dtype]]
    supported_kv_cache_dtypes: ClassVar[list[str]]

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The backend's name in `BACKENDS`."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[SparseMLAImpl]:
        """The impl, of which each layer makes one."""

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[SparseMLAMetadata]:
        """A step's metadata."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        """The builder of the metadata."""

    @staticmethod
    @abstractmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        """Tokens per page."""

    @classmethod
    @abstractmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Whether the backend's own kernels run on GPUs of this capability."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Values per key, the rotated ones included."""
        return [576]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True
