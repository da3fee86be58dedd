"""The Triton impl: where it can run, and its place among the impls. Its kernels have a test of their own."""

import importlib.util

import pytest
import torch

from deepseek_attn.impls import AttentionSpec, DeepseekV4TritonSparseImpl, flash_mla, get_impl

GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Pretends a GPU of a given compute capability, with triton and without FlashMLA."""

    def put(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(flash_mla, "supported", lambda device, spec=None: (False, "not installed"))

    return put


def test_the_cpu_is_refused():
    usable, reason = DeepseekV4TritonSparseImpl.supported(torch.device("cpu"))
    assert not usable
    assert "the device is cpu" in reason
    with pytest.raises(ValueError, match="backend 'triton' cannot run on cpu: its kernels need an NVIDIA GPU"):
        get_impl("triton", "cpu")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_it_is_the_default_where_flashmla_is_not(gpu, capability):
    gpu(*capability)
    assert get_impl("auto", "cuda", AttentionSpec(64, 512)) is DeepseekV4TritonSparseImpl
    assert get_impl("auto", "cpu").name == "reference"


def test_older_gpus_are_refused(gpu):
    gpu(7, 5)
    assert DeepseekV4TritonSparseImpl.supported(GPU) == (
        False,
        "its kernels need compute capability 8.0 or later; this GPU has 7.5",
    )


def test_without_triton_it_says_so(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert DeepseekV4TritonSparseImpl.supported(GPU) == (
        False,
        "the package triton is not installed: pip install triton",
    )


def test_records_that_the_kernels_cannot_read_are_refused(gpu):
    gpu(9, 0)
    usable, reason = DeepseekV4TritonSparseImpl.supported(GPU, AttentionSpec(4, 640 + 8, rope_dim=8))
    assert not usable
    assert "this model has 640 and 8" in reason
    for spec in (AttentionSpec(4, 640 + 8, 8, "plain"), AttentionSpec(1, 128), AttentionSpec(100, 512)):
        assert DeepseekV4TritonSparseImpl.supported(GPU, spec)[0]


def test_heads_are_not_padded():
    assert [DeepseekV4TritonSparseImpl.padded_heads(heads) for heads in (1, 8, 100, 128)] == [1, 8, 100, 128]
