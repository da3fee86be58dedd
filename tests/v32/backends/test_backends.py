"""What the backends declare, and that importing them needs no optional package."""

import subprocess
import sys

import pytest
import torch

import deepseek_attn.v32.backends as v32
from deepseek_attn.v32.backends import DeviceCapability, FlashInferMLASparseBackend, FlashMLASparseBackend, get_backend


def test_flashmla_backend():
    backend = FlashMLASparseBackend
    assert backend.get_name() == "FLASHMLA_SPARSE"
    assert backend.accept_output_buffer is True
    assert backend.supported_dtypes == [torch.bfloat16]
    assert backend.supported_kv_cache_dtypes == ["auto", "bfloat16", "fp8_ds_mla"]
    assert backend.get_supported_kernel_block_sizes() == [64]
    assert backend.get_supported_head_sizes() == [576]
    assert backend.is_mla()
    assert backend.is_sparse()
    assert [major for major in range(7, 13) if backend.supports_compute_capability(DeviceCapability(major))] == [9, 10]
    classes = backend.get_impl_cls(), backend.get_metadata_cls(), backend.get_builder_cls()
    assert classes == (v32.FlashMLASparseImpl, v32.FlashMLASparseMetadata, v32.FlashMLASparseMetadataBuilder)
    assert v32.FlashMLASparseImpl._compute_fp8_decode_padded_heads(8) == 64


def test_flashinfer_backend():
    backend = FlashInferMLASparseBackend
    assert backend.get_name() == "FLASHINFER_MLA_SPARSE"
    assert backend.supported_dtypes == [torch.float16, torch.bfloat16]
    assert backend.supported_kv_cache_dtypes == ["auto", "bfloat16"]
    assert backend.get_supported_kernel_block_sizes() == [32, 64]
    assert backend.get_supported_head_sizes() == [576]
    assert backend.is_mla()
    assert backend.is_sparse()
    assert backend.get_required_kv_cache_layout() == "HND"
    assert [major for major in range(7, 13) if backend.supports_compute_capability(DeviceCapability(major))] == [10]
    assert backend.get_kv_cache_shape(5, 32, 1, 576) == (5, 32, 576)
    classes = backend.get_impl_cls(), backend.get_metadata_cls(), backend.get_builder_cls()
    assert classes == (
        v32.FlashInferMLASparseImpl,
        v32.FlashInferMLASparseMetadata,
        v32.FlashInferMLASparseMetadataBuilder,
    )


@pytest.mark.parametrize(
    ("head_size", "dtype", "width"),
    [(576, "fp8_ds_mla", 656), (576, "auto", 576), (576, "bfloat16", 576), (192, "fp8_ds_mla", 260)],
)
def test_cache_shape(head_size, dtype, width):
    assert FlashMLASparseBackend.get_kv_cache_shape(7, 64, 9, head_size, dtype) == (7, 64, width)


def test_lookup_by_name():
    assert get_backend("FLASHMLA_SPARSE") is FlashMLASparseBackend
    assert get_backend("FLASHINFER_MLA_SPARSE") is FlashInferMLASparseBackend
    with pytest.raises(ValueError, match="unknown sparse MLA backend 'FLASHMLA': supported are FLASHMLA_SPARSE, FLASH"):
        get_backend("FLASHMLA")


def test_every_public_name_is_there():
    assert all(hasattr(v32, name) for name in v32.__all__)


def test_import_needs_no_kernel_package():
    code = (
        "import sys\n"
        "for name in ('triton', 'flash_mla', 'flashinfer', 'vllm'): sys.modules[name] = None\n"
        "import deepseek_attn.v32.backends\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
