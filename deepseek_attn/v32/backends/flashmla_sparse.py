"""The FlashMLA backend of sparse MLA, over a BF16 cache or a cache of 656-byte FP8 entries, and its other kernels."""

from __future__ import annotations

from deepseek_attn.impls.flashmla import FlashMLAKernels
from deepseek_attn.impls.mixed import MixedKernels
from deepseek_attn.impls.reference import ReferenceKernels
from deepseek_attn.impls.triton import TritonKernels
from deepseek_attn.v32.backends.sparse_mla import LatentBackend, SparseMLAImpl


class FlashMLASparseBackend(LatentBackend):
    """FlashMLA's formats and shapes. The impls below `FlashMLASparseImpl` read the same caches."""

    supported_kv_records = ("plain", "fp8_v32")

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"

    @classmethod
    def get_impl_cls(cls) -> type[SparseMLAImpl]:
        return FlashMLASparseImpl


class FlashMLASparseImpl(FlashMLAKernels, SparseMLAImpl):
    """Sparse MLA on FlashMLA."""

    backend_cls = FlashMLASparseBackend


class MixedMLASparseImpl(MixedKernels, SparseMLAImpl):
    """Sparse MLA by the faster of FlashMLA and Triton, by the shapes of a call."""

    backend_cls = FlashMLASparseBackend


class TritonMLASparseImpl(TritonKernels, SparseMLAImpl):
    """Sparse MLA in Triton."""

    backend_cls = FlashMLASparseBackend


class ReferenceMLASparseImpl(ReferenceKernels, SparseMLAImpl):
    """Sparse MLA in plain torch."""

    backend_cls = FlashMLASparseBackend
