"""The mixed impl: where it runs, its place among the impls, and which kernel serves a call."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_attn.impls import AttentionSpec, DeepseekV4MixedSparseImpl, flash_mla, get_impl, mixed
from deepseek_attn.impls.flashmla import FlashMLAKernels
from deepseek_attn.impls.triton import DeepseekV4TritonSparseImpl, TritonKernels
from deepseek_attn.kernels.attention.plan import LIBRARY, LayerCall
from deepseek_attn.kernels.common import device
from deepseek_attn.v32.backends import MixedMLASparseImpl
from tests.support.typed import untyped

GPU = torch.device("cuda")
SPEC = AttentionSpec(64, 512)
H200 = device.GPU((9, 0), 132)


@pytest.fixture
def gpu(monkeypatch):
    """Pretends a GPU of a given compute capability, with or without triton and FlashMLA."""

    def put(capability, flashmla=True, triton=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
        monkeypatch.setattr(flash_mla, "supported", lambda device, spec=None: (flashmla, "as the test says"))

    return put


def takes_flashmla(queries, heads, keys, record):
    return LIBRARY.plan(LayerCall(queries, heads, keys, record), H200).kernel == "FlashMLA"


def test_it_is_the_default_on_hopper_with_both(gpu):
    gpu((9, 0))
    assert get_impl("auto", GPU, SPEC) is DeepseekV4MixedSparseImpl
    assert get_impl("auto", GPU, AttentionSpec(64, 512, kv_record="plain")) is DeepseekV4TritonSparseImpl


@pytest.mark.parametrize(
    ("capability", "flashmla", "triton", "reason", "chosen"),
    [
        ((10, 0), True, True, "this GPU has 10.0", "flashmla"),
        ((9, 0), False, True, "needs both FlashMLA and Triton: as the test says", "triton"),
        ((9, 0), True, False, "needs both FlashMLA and Triton: the package triton is not installed", "flashmla"),
    ],
)
def test_elsewhere_it_says_why_not(gpu, capability, flashmla, triton, reason, chosen):
    gpu(capability, flashmla, triton)
    usable, why = DeepseekV4MixedSparseImpl.supported(GPU, SPEC)
    assert not usable
    assert reason in why
    assert get_impl("auto", GPU, SPEC).name == chosen


@pytest.mark.parametrize(("heads", "keys", "most"), [
    (64, 128, 512), (64, 640, 512), (64, 8320, 512), (128, 128, 8), (128, 1152, 32), (128, 8320, 8),
])  # fmt: skip
def test_small_batches_stay_in_triton(heads, keys, most):
    assert [takes_flashmla(T, heads, keys, "fp8_v4") for T in (1, most)] == [False, False]
    assert [takes_flashmla(T, heads, keys, "fp8_v4") for T in (most + 1, 512)] == [most < 512] * 2
    assert not any(takes_flashmla(T, other, keys, "fp8_v4") for T in (1, 512) for other in (8, 16, 100))


@pytest.mark.parametrize(
    ("T", "heads", "name"), [(1, 128, "triton"), (300, 128, "flashmla"), (300, 64, "triton"), (300, 8, "triton")]
)
def test_a_call_goes_to_one_kernel_with_all_its_arguments(monkeypatch, T, heads, name):
    calls = []
    for impl in (FlashMLAKernels, TritonKernels):
        for method in ("attend_pages", "attend_rows"):
            record = classmethod(lambda cls, *args, impl=impl, method=method: calls.append((impl.name, method, args)))
            monkeypatch.setattr(impl, method, record)
    monkeypatch.setattr(mixed, "gpu", lambda device: H200)
    q, output, layer = torch.zeros(T, heads, 512), torch.zeros(T, heads, 512), untyped(object())
    record = SimpleNamespace(name="fp8_v4")
    keys: list[Any] = [SimpleNamespace(record=record, indices=torch.zeros(T, width)) for width in (100, 28)]
    DeepseekV4MixedSparseImpl.attend_pages(layer, q, keys, output)
    assert calls == [(name, "attend_pages", (layer, q, keys, output))]
    indices = torch.zeros(T, 640)
    DeepseekV4MixedSparseImpl.attend_rows(layer, q, q, indices, untyped(2), output)
    assert calls[1] == (
        "flashmla" if heads in (64, 128) else "triton",
        "attend_rows",
        (layer, q, q, indices, 2, output),
    )


@pytest.mark.parametrize(("heads", "most"), [(16, 31), (64, 7), (100, 31), (128, 1)])
def test_queries_of_v32_change_over_earlier(heads, most):
    assert [takes_flashmla(T, heads, 2048, "fp8_v32") for T in (1, most, most + 1, 512)] == [False, False, True, True]


def test_v32_records_have_a_rule_of_their_own(monkeypatch):
    calls = []
    for impl in (FlashMLAKernels, TritonKernels):
        record = classmethod(lambda cls, *args, impl=impl: calls.append(impl.name))
        monkeypatch.setattr(impl, "attend_pages", record)
    monkeypatch.setattr(mixed, "gpu", lambda device: H200)
    for name in ("fp8_v4", "fp8_v32"):
        keys: list[Any] = [SimpleNamespace(record=SimpleNamespace(name=name), indices=torch.zeros(40, 2048))]
        MixedMLASparseImpl.attend_pages(untyped(object()), torch.zeros(40, 64, 576), keys, untyped(None))
    assert calls == ["triton", "flashmla"]


def test_heads_are_not_padded():
    assert [DeepseekV4MixedSparseImpl.padded_heads(heads) for heads in (8, 64, 100)] == [8, 64, 100]
