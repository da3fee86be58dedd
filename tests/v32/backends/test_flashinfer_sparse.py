"""FlashInferMLASparseImpl: its results against dense attention, and its call against FlashInfer's signature."""

import re
from types import SimpleNamespace

import pytest
import torch

from deepseek_attn.impls.base import AttentionSpec
from deepseek_attn.impls.triton import DeepseekV4TritonSparseImpl
from deepseek_attn.v32.backends import DeviceCapability, FlashInferMLASparseBackend
from deepseek_attn.v32.backends import flashinfer_adapter as flashinfer_adapter
from deepseek_attn.v32.backends.flashinfer_adapter import (
    FUNCTION,
    MODULE,
    reference_trtllm_decode,
    triton_trtllm_decode,
)
from tests.v32.backends.flashinfer_signature import installed, recorded, signature_from
from tests.v32.backends.make import SCALE, build_impl
from tests.v32.backends.oracle import NAN, dense_answer, make_case

BATCHES = [([1, 1, 1, 5, 33], [70, 1, 200, 130, 33]), ([2, 2], [70, 9]), ([40], [40]), ([1, 0, 7], [70, 0, 9])]


class Recorder:
    """Stands in for FlashInfer: records the arguments and returns what the reference returns."""

    def __init__(self):
        self.calls = []

    def __call__(self, **kwargs):
        self.calls.append(kwargs)
        return reference_trtllm_decode(**kwargs)


def run(case, dtype="auto", layer=None, **changes):
    impl, meta = build_impl(FlashInferMLASparseBackend, case, dtype, impl=changes)
    out, lse = impl.forward_mqa(case.q, case.cache, meta, layer)
    assert lse is None
    return out


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_equals_dense_attention(batch, dtype, heads, seed):
    case = make_case(*batch, heads, dtype, seed=seed)
    torch.testing.assert_close(run(case, dtype).double(), dense_answer(case, SCALE), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("topk", [1, 7, 64, 100, 513])
def test_any_width_of_the_selection(topk, seed):
    case = make_case([1, 9], [600, 80], 4, "auto", topk=topk, seed=seed)
    recorder = Recorder()
    torch.testing.assert_close(run(case, run=recorder).double(), dense_answer(case, SCALE), rtol=1e-4, atol=1e-4)
    (call,) = recorder.calls
    assert call["sparse_mla_top_k"] == call["max_seq_len"] == call["block_tables"].shape[2] == -(-topk // 4) * 4


def test_what_the_kernel_is_given(seed):
    case = make_case([1, 9], [70, 80], 8, "bfloat16", latent=512, seed=seed, q_dtype=torch.bfloat16)
    case.topk[4] = -1
    recorder, layer = Recorder(), SimpleNamespace(_q_scale_float=2.0, _k_scale_float=0.25, _v_scale_float=3.0)
    impl, meta = build_impl(FlashInferMLASparseBackend, case, "bfloat16", impl={"run": recorder})
    out, _ = impl.forward_mqa(case.q, case.cache, meta, layer)
    (call,) = recorder.calls
    assert call["query"].shape == (10, 1, 8, 576)
    assert call["kv_cache"].shape == (len(case.cache), 1, 64, 576)
    assert call["block_tables"].shape == (10, 1, 24)
    assert (call["bmm1_scale"], call["bmm2_scale"]) == (2.0 * 0.25 * SCALE, 3.0)
    assert (impl.bmm1_scale, impl.bmm2_scale) == (2.0 * 0.25 * SCALE, 3.0)
    assert (call["qk_nope_head_dim"], call["kv_lora_rank"], call["qk_rope_head_dim"]) == (128, 512, 64)
    assert call["workspace_buffer"].dtype == torch.uint8
    counts = (case.topk[:10] >= 0).sum(1)
    assert call["seq_lens"].tolist() == counts.clamp(min=1).tolist()
    assert call["seq_lens"].dtype == call["block_tables"].dtype == torch.int32
    for row, count in zip(call["block_tables"][:, 0].tolist(), counts.tolist(), strict=True):
        assert all(slot >= 0 for slot in row[: max(count, 1)])
        assert set(row[max(count, 1) :]) <= {-1}
    case.q = case.q.float()
    expected = dense_answer(SimpleNamespace(**vars(case) | {"q": case.q * 0.5}), SCALE) * 3
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=5e-2)


def test_the_call_binds_to_the_recorded_signature(seed):
    record, recorder = recorded(), Recorder()
    assert (record["function"], record["import_from"]) == (FUNCTION, MODULE)
    run(make_case([1, 5], [70, 9], 8, "auto", seed=seed), run=recorder)
    bound = signature_from(record["parameters"]).bind(**recorder.calls[0])
    required = [name for name, default in record["parameters"] if default is None]
    assert set(required) <= set(bound.arguments)


def test_the_call_binds_to_the_installed_package(seed):
    parameters = installed(FUNCTION)
    if parameters is None:
        pytest.skip("flashinfer-python is not installed")
    recorder = Recorder()
    run(make_case([1, 5], [70, 9], 8, "auto", seed=seed), run=recorder)
    signature_from(parameters).bind(**recorder.calls[0])
    known = dict(map(tuple, parameters))
    for name, default in recorded()["parameters"]:
        if name in recorder.calls[0]:
            assert known[name] == default, f"the default of {name} changed"


def test_empty_and_padding_rows_are_zero_even_if_slot_zero_is_nan(seed):
    case = make_case([1, 9], [70, 80], 4, "auto", pad=3, seed=seed)
    case.cache[0] = NAN
    case.topk[10:] = 0
    case.topk[3] = -1
    out = run(case)
    assert not out[3].any()
    assert not out[10:].any()
    torch.testing.assert_close(out.double(), dense_answer(case, SCALE), rtol=1e-4, atol=1e-4)


def test_zero_rows():
    recorder = Recorder()
    assert run(make_case([0], [0], 4, "auto"), run=recorder).shape == (0, 4, 128)
    assert recorder.calls == []


def test_fp8_caches_are_refused():
    case = make_case([1], [5], 4, "fp8_ds_mla")
    with pytest.raises(NotImplementedError, match="reads BF16 caches"):
        build_impl(FlashInferMLASparseBackend, case, "fp8_ds_mla")


def test_where_it_runs(monkeypatch):
    assert FlashInferMLASparseBackend.supported("cpu") == (
        False,
        "FlashInfer's sparse MLA needs an NVIDIA GPU; the device is cpu",
    )
    assert flashinfer_adapter.pick(torch.device("cpu")) is reference_trtllm_decode
    assert flashinfer_adapter.workspace_buffer("cpu").numel() == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert flashinfer_adapter.supported("cuda")[1].endswith("needs compute capability 10.x; this GPU has 9.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    function = object()
    monkeypatch.setattr(flashinfer_adapter, "_load", lambda: (function, ""))
    assert flashinfer_adapter.supported("cuda") == (True, "flashinfer on compute capability 10.0")
    assert flashinfer_adapter.pick(torch.device("cuda")) is function
    tiny = AttentionSpec(4, 192, 64)
    assert flashinfer_adapter.supported("cuda", tiny)[1].endswith("this model has 192, 64")
    for triton, other in ((True, triton_trtllm_decode), (False, reference_trtllm_decode)):
        answer = classmethod(lambda cls, device, spec=None, triton=triton: (triton, "as this test has it"))
        monkeypatch.setattr(DeepseekV4TritonSparseImpl, "supported", answer)
        assert flashinfer_adapter.pick(torch.device("cuda"), tiny) is other
    exact = AttentionSpec(4, 576, 64, "plain", torch.float32)
    assert "not torch.float32" in flashinfer_adapter.supported("cuda", exact)[1]
    monkeypatch.setattr(flashinfer_adapter, "_load", lambda: (None, "the package flashinfer is not installed"))
    assert flashinfer_adapter.supported("cuda") == (False, "the package flashinfer is not installed")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer"), "flashinfer is not installed: pip"),
        (ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi"), "broken .No module named 'tvm_ffi'"),
        (OSError("libcuda.so"), "importing flashinfer fails .OSError: libcuda.so"),
    ],
    ids=["absent", "dependency", "library"],
)
def test_why_flashinfer_cannot_be_imported(error, message, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr(flashinfer_adapter.importlib, "import_module", fail)
    function, reason = flashinfer_adapter._load.__wrapped__()
    assert function is None
    assert re.search(message, reason)


def test_a_flashinfer_without_the_function(monkeypatch):
    monkeypatch.setattr(flashinfer_adapter.importlib, "import_module", lambda name: SimpleNamespace())
    assert f"has no {FUNCTION}" in flashinfer_adapter._load.__wrapped__()[1]


def test_reference_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"need query \[T, 1, heads, dim\]"):
        reference_trtllm_decode(
            torch.zeros(2, 2, 4, 192), torch.zeros(1, 1, 64, 192), torch.zeros(0), 64, 128, 64,
            torch.zeros(2, 2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 8, 8,
        )  # fmt: skip


COMBINATION = (576, torch.bfloat16, "auto", 64, True, False, True, DeviceCapability(10, 0))


def test_supported_combinations():
    supports = FlashInferMLASparseBackend.supports_combination
    assert supports(*COMBINATION) is None
    assert supports(*COMBINATION, SimpleNamespace(qk_nope_head_dim=128, index_topk=2048)) is None
    assert "has 192" in supports(*COMBINATION, SimpleNamespace(qk_nope_head_dim=192, index_topk=2048))
    assert "has 1" in supports(*COMBINATION, SimpleNamespace(index_topk=2048))
    assert "index_topk" in supports(*COMBINATION, SimpleNamespace(qk_nope_head_dim=128))


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("topk", [4, 100, 2048])
def test_triton_takes_flashinfers_place(heads, topk, device):
    """Same arguments, same result as plain torch: ragged lengths, empty rows, NaN in everything unused."""
    usable, reason = DeepseekV4TritonSparseImpl.supported(device)
    if not usable:
        pytest.skip(reason)
    if not flashinfer_adapter.supported(device)[0]:
        assert flashinfer_adapter.pick(device) is triton_trtllm_decode
    tokens, pages = 37, 50
    cache = torch.full((pages * 64, 576), float("nan"), device=device)
    live = torch.randperm(pages * 64, device=device)[:2200]
    cache[live] = torch.randn(len(live), 576, device=device)
    picks = torch.stack([live[torch.randperm(len(live), device=device)[:topk]] for _ in range(tokens)])
    lens = torch.randint(1, topk + 1, (tokens,), device=device, dtype=torch.int32)
    lens[0], lens[1], lens[2] = 0, 1, topk
    unused = torch.arange(topk, device=device) >= lens[:, None]
    picks = picks.masked_fill(unused, 2**31 - 1).int()
    arguments = {
        "query": torch.randn(tokens, 1, heads, 576, device=device).bfloat16(),
        "kv_cache": cache.bfloat16().view(pages, 1, 64, 576),
        "workspace_buffer": torch.empty(0, device=device), "qk_nope_head_dim": 128, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "block_tables": picks[:, None], "seq_lens": lens, "max_seq_len": topk,
        "sparse_mla_top_k": topk, "bmm1_scale": 0.07, "bmm2_scale": 0.5,
    }  # fmt: skip
    got = triton_trtllm_decode(**arguments)
    expected = reference_trtllm_decode(**{**arguments, "query": arguments["query"].float()})
    assert got.shape == (tokens, 1, heads, 512)
    assert got.isfinite().all()
    assert (got[0] == 0).all()
    assert (got.float() - expected).norm() <= 4e-3 * expected.norm()
