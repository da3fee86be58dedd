"""The three modes of FlashMLASparseImpl against dense attention by loops, on ragged batches over poisoned caches."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import deepseek_attn.impls.flash_mla as adapter
import deepseek_attn.v32.backends.flashmla_sparse as module
from deepseek_attn.cache.records_v32 import record_of
from deepseek_attn.kernels.attention.reference import sparse_attention
from deepseek_attn.utils.workspace import Workspace
from deepseek_attn.v32.backends import FlashMLASparseBackend, FlashMLASparseImpl, SparseMLAConfig
from deepseek_attn.v32.backends.kernels import FlashMLAKernels, ReferenceKernels, describe_kernels, get_kernels
from tests.v32.backends.make import SCALE, build_impl
from tests.v32.backends.oracle import HUGE, NAN, dense_answer, make_case

BATCHES = {
    "mixed": ([1, 1, 1, 5, 33, 2], [70, 1, 200, 130, 33, 65]),
    "decodes": ([1, 1, 1], [64, 65, 128]),
    "prefills": ([40, 3, 66], [40, 67, 66]),
    "speculative": ([2, 2, 1, 9], [70, 2, 65, 9]),
    "empty_requests": ([1, 0, 7, 0], [70, 0, 9, 30]),
}
MODES = {  # kv_cache_dtype, fp8_mode
    "float32": ("auto", "auto"),
    "bf16": ("bfloat16", "auto"),
    "fp8_mixed": ("fp8_ds_mla", "mixed"),
    "fp8_separate": ("fp8_ds_mla", "separate"),
}


def run(case, mode, config=None, **changes):
    dtype, fp8_mode = MODES[mode]
    impl, meta = build_impl(
        FlashMLASparseBackend, case, dtype, config={"fp8_mode": fp8_mode} | (config or {}), **changes
    )
    out, lse = impl.forward_mqa(case.q, case.cache, meta)
    assert lse is None
    return out


def check(out, case):
    torch.testing.assert_close(out.double(), dense_answer(case, SCALE), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", BATCHES)
def test_modes_equal_dense_attention(batch, mode, heads, seed):
    spec = 1 if batch == "speculative" else 0
    case = make_case(*BATCHES[batch], heads, MODES[mode][0], seed=seed)
    check(run(case, mode, {"num_speculative_tokens": spec}), case)


@pytest.mark.parametrize("topk", [1, 7, 64, 100, 192, 513])
@pytest.mark.parametrize("mode", MODES)
def test_any_width_of_the_selection(mode, topk, seed):
    case = make_case([1, 1, 9], [600, 3, 580], 4, MODES[mode][0], topk=topk, seed=seed)
    check(run(case, mode), case)


@pytest.mark.parametrize("mode", MODES)
def test_real_dims(mode, seed):
    case = make_case([1, 3, 6], [129, 66, 6], 16, MODES[mode][0], topk=40, latent=512, seed=seed)
    check(run(case, mode), case)


@pytest.mark.parametrize("mode", ["fp8_mixed", "fp8_separate"])
def test_chunks_that_fill_the_workspace(mode, seed):
    """Requests of 60, 64, 4 and 64 tokens in 64 rows: every chunk is full or one request short of it."""
    case = make_case([1, 9, 64, 3, 8], [70, 60, 64, 4, 64], 8, "fp8_ds_mla", seed=seed)
    check(run(case, mode, {"prefill_workspace_rows": 70, "max_model_len": 70}), case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lens", [([1, 1], [70, 9]), ([2, 2], [70, 9]), ([1, 6], [70, 9])], ids=str)
def test_padding_rows_become_zero_and_change_nothing(lens, mode, seed):
    spec = {"num_speculative_tokens": 1}
    alone = run(make_case(*lens, 8, MODES[mode][0], seed=seed), mode, spec)
    case = make_case(*lens, 8, MODES[mode][0], seed=seed)
    padded = make_case(*lens, 8, MODES[mode][0], seed=seed, pad=4)
    tokens = sum(lens[0])
    padded.q = torch.cat([case.q, torch.full_like(padded.q[tokens:], NAN)])
    padded.topk[:tokens] = case.topk[:tokens]
    padded.topk[tokens:] = torch.tensor([0, 1, HUGE])[torch.arange(24) % 3]
    out = run(padded, mode, spec)
    assert torch.equal(out[:tokens], alone)
    assert not out[tokens:].any()


@pytest.mark.parametrize("mode", MODES)
def test_queries_without_the_padding_rows(mode, seed):
    case = make_case([1, 1, 6], [70, 9, 8], 8, MODES[mode][0], pad=3, seed=seed)
    expected = run(case, mode)
    case.q = case.q[:8]
    assert torch.equal(run(case, mode), expected[:8])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lens", [([], []), ([0], [0]), ([0, 0], [5, 0])], ids=str)
def test_no_tokens_no_launch(lens, mode):
    class NoKernels(ReferenceKernels):
        def flash_mla_with_kvcache(self, *args, **kwargs):
            raise AssertionError("launched")

        flash_mla_sparse_fwd = flash_mla_with_kvcache

    case = make_case(*lens, 4, MODES[mode][0])
    assert run(case, mode, kernels=NoKernels()).shape == (0, 4, 128)


def test_no_launch_for_a_chunk_without_new_tokens(seed):
    class Kernels(ReferenceKernels):
        def flash_mla_sparse_fwd(self, q, kv, *args):
            assert len(q) > 0
            assert len(kv) == 70
            return super().flash_mla_sparse_fwd(q, kv, *args)

    case = make_case([1, 0, 7, 0], [70, 60, 70, 50], 4, "fp8_ds_mla", seed=seed)
    check(run(case, "fp8_separate", {"prefill_workspace_rows": 70, "max_model_len": 70}, kernels=Kernels()), case)


def test_a_batch_of_nothing_but_padding(seed):
    for mode in MODES:
        case = make_case([0], [0], 4, MODES[mode][0], pad=3, seed=seed)
        case.topk[:] = 0
        out = run(case, mode)
        assert out.shape == (3, 4, 128)
        assert not out.any()


def test_requests_do_not_see_each_other(seed):
    """Rewriting one request's entries changes no bit of another's output, in any mode."""
    for mode, (dtype, _) in MODES.items():
        before, after = (make_case([1, 7, 9], [70, 80, 90], 8, dtype, seed=seed) for _ in range(2))
        pages = after.step.block_table[1, :2].long()
        after.cache[pages] = after.cache[after.step.block_table[2, :2].long()]
        before, after = run(before, mode), run(after, mode)
        assert torch.equal(before[:1], after[:1])
        assert torch.equal(before[8:], after[8:])
        assert not torch.equal(before[1:8], after[1:8])


def test_holes_equal_compacted_rows(seed):
    for mode, (dtype, _) in MODES.items():
        case = make_case([1, 20], [70, 90], 4, dtype, seed=seed)
        expected = run(case, mode)
        valid = case.topk >= 0
        case.topk = case.topk.gather(1, valid.int().argsort(dim=1, descending=True, stable=True))
        torch.testing.assert_close(run(case, mode), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_query_in_two_parts(mode, seed):
    case = make_case([1, 5], [70, 9], 8, MODES[mode][0], seed=seed)
    expected = run(case, mode)
    case.q = (case.q[..., :128], case.q[..., 128:])
    impl, meta = build_impl(
        FlashMLASparseBackend, SimpleNamespace(**vars(case) | {"q": torch.cat(case.q, -1)}), MODES[mode][0],
        config={"fp8_mode": MODES[mode][1]},
    )  # fmt: skip
    assert torch.equal(impl.forward_mqa(case.q, case.cache, meta)[0], expected)


@pytest.mark.parametrize("heads", [8, 16, 65, 128])
@pytest.mark.parametrize("prefill_padding", [64, 128])
@pytest.mark.parametrize("mode", MODES)
def test_heads_are_padded_for_kernels_that_want_it(mode, prefill_padding, heads, seed):
    calls = []

    class Padded(ReferenceKernels):
        pads_heads = True

        def flash_mla_with_kvcache(self, q, *args):
            calls.append(("decode", q.shape[2]))
            return super().flash_mla_with_kvcache(poison(q, 2), *args)

        def flash_mla_sparse_fwd(self, q, *args):
            calls.append(("prefill", q.shape[1]))
            return super().flash_mla_sparse_fwd(poison(q, 1), *args)

    def poison(q, dim):
        """Padding heads hold anything: NaN here."""
        q = q.clone()
        q.narrow(dim, heads, q.shape[dim] - heads).fill_(NAN)
        return q

    case = make_case([1, 5], [70, 9], heads, MODES[mode][0], seed=seed)
    dtype, fp8_mode = MODES[mode]
    impl, meta = build_impl(FlashMLASparseBackend, case, dtype, config={"fp8_mode": fp8_mode}, kernels=Padded())
    impl.prefill_padding = prefill_padding
    out, _ = impl.forward_mqa(case.q, case.cache, meta)
    check(out, case)
    decode, prefill = (64 if heads <= 64 else 128), (prefill_padding if heads <= prefill_padding else 128)
    expected = {"fp8_mixed": [("decode", decode)], "fp8_separate": [("decode", decode), ("prefill", prefill)]}
    assert calls == expected.get(mode, [("prefill", prefill)])


@pytest.mark.parametrize(("heads", "warnings"), [(6, 1), (64, 0)])
def test_head_padding_is_said_once(heads, warnings, caplog):
    module._warn_of_padding.cache_clear()
    for _ in range(3):
        case = make_case([1], [5], heads, "auto")
        build_impl(FlashMLASparseBackend, case, "auto", kernels=Padded())
    assert [record.message for record in caplog.records] == [
        "FlashMLA runs 64 heads for the 6 of this rank: the others are padding"
    ] * warnings


def test_kernel_calls_of_a_separate_batch(monkeypatch, seed):
    """One conversion for all tokens; one decode call shaped [requests, query length]; one gather per chunk."""
    calls = []

    class Kernels(ReferenceKernels):
        def flash_mla_with_kvcache(self, q, k_cache, indices, *args):
            calls.append(("decode", tuple(q.shape[:2]), tuple(k_cache.shape[1:]), k_cache.dtype, tuple(indices.shape)))
            return super().flash_mla_with_kvcache(q, k_cache, indices, *args)

        def flash_mla_sparse_fwd(self, q, kv, indices, *args):
            calls.append(("prefill", len(q), tuple(kv.shape), kv.dtype, tuple(indices.shape)))
            return super().flash_mla_sparse_fwd(q, kv, indices, *args)

    def counted(name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (calls.append(name), original(*a, **k))[1])

    counted("triton_convert_req_index_to_global_index")
    counted("cp_gather_and_upconvert_fp8_kv_cache")
    case = make_case([2, 2, 5, 6], [70, 9, 40, 50], 4, "fp8_ds_mla", seed=seed)
    workspace = Workspace()
    limits = {"num_speculative_tokens": 1, "prefill_workspace_rows": 80, "max_model_len": 80}
    impl, meta = build_impl(
        FlashMLASparseBackend, case, "fp8_ds_mla", config=limits | {"fp8_mode": "separate"}, kernels=Kernels(),
        impl={"workspace": workspace},
    )  # fmt: skip
    assert workspace.nbytes() == 80 * 192 * 2
    workspace.lock()
    check(impl.forward_mqa(case.q, case.cache, meta)[0], case)
    gather = "cp_gather_and_upconvert_fp8_kv_cache"
    assert calls == [
        "triton_convert_req_index_to_global_index",
        ("decode", (2, 2), (64, 1, 260), torch.uint8, (2, 2, 24)),
        gather,
        ("prefill", 5, (40, 1, 192), torch.bfloat16, (5, 1, 24)),
        gather,
        ("prefill", 6, (50, 1, 192), torch.bfloat16, (6, 1, 24)),
    ]


@pytest.mark.parametrize("queries", [[5, 6], [1, 1]], ids=["prefills", "decodes"])
def test_the_result_of_one_kernel_call_is_not_copied(queries, seed):
    results = []

    class Kernels(ReferenceKernels):
        def flash_mla_with_kvcache(self, *args):
            results.append(super().flash_mla_with_kvcache(*args))
            return results[-1]

        def flash_mla_sparse_fwd(self, *args):
            results.append(super().flash_mla_sparse_fwd(*args))
            return results[-1]

    case = make_case(queries, [70, 9], 4, "fp8_ds_mla", seed=seed)
    impl, meta = build_impl(
        FlashMLASparseBackend, case, "fp8_ds_mla", config={"fp8_mode": "separate"}, kernels=Kernels()
    )
    out, _ = impl.forward_mqa(case.q, case.cache, meta)
    check(out, case)
    assert [out.data_ptr()] == [result.data_ptr() for result, _ in results]


class Padded(ReferenceKernels):
    pads_heads = True


@pytest.mark.parametrize("kernels", [ReferenceKernels(), Padded()], ids=["as_they_are", "padded"])
def test_lse_of_the_kernels(kernels, seed):
    case = make_case([1, 1, 5], [70, 3, 9], 4, "fp8_ds_mla", seed=seed)
    impl, meta = build_impl(FlashMLASparseBackend, case, "fp8_ds_mla", config={"fp8_mode": "mixed"}, kernels=kernels)
    indices = impl._convert(impl._topk_indices(7, meta), meta)
    out, lse = impl._fp8_flash_mla_kernel(case.q[None], case.cache, indices[None], meta.fp8_extra_metadata)
    assert (out.shape, lse.shape) == ((1, 7, 4, 128), (1, 4, 7))
    starts = case.step.query_start_loc_cpu.tolist()
    for r, keys in enumerate(case.keys):
        for t in range(starts[r], starts[r + 1]):
            logits = case.q[t].double() @ keys[[i for i in case.topk[t].tolist() if i >= 0]].t() * SCALE
            expected = logits.logsumexp(1) if logits.numel() else torch.full((4,), float("inf")).double()
            torch.testing.assert_close(lse[0, :, t].double(), expected, rtol=1e-5, atol=1e-4)


NAIVE = {"num_heads": 5, "nope": 32, "rope": 64, "v": 48, "latent": 128}


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_forward_equals_naive_attention(mode, seed):
    """Absorbed queries over the latent cache against per-head keys and values, which are never cached."""
    heads, nope, rope, v, latent = NAIVE.values()
    case = make_case([1, 1, 6], [70, 9, 8], heads, MODES[mode][0], seed=seed, pad=2)
    linear = nn.Linear(latent, heads * (nope + v), bias=False)
    dims = {"qk_nope_head_dim": nope, "v_head_dim": v, "kv_b_proj": linear}
    impl, meta = build_impl(FlashMLASparseBackend, case, MODES[mode][0], config={"fp8_mode": MODES[mode][1]}, impl=dims)
    impl.process_weights_after_loading(torch.float32)
    starts, q = case.step.query_start_loc_cpu.tolist(), torch.randn(10, heads, nope + rope)
    new = torch.zeros(10, latent + rope)
    for r, keys in enumerate(case.keys):  # the step's own tokens are written by forward itself
        rows = slice(starts[r], starts[r + 1])
        new[rows] = keys[len(keys) - (rows.stop - rows.start) :].float()
        slots = case.step.slot_mapping[rows]
        case.cache.view(-1, case.cache.shape[2])[slots] = case.cache.new_full(
            (), 255 if case.cache.dtype == torch.uint8 else NAN
        )
    output = torch.full((10, heads * v), NAN)
    got = impl.forward(None, q, new[:, :latent], new[:, None, latent:], case.cache, meta, output)
    assert got is output
    expected = torch.zeros(10, heads, v, dtype=torch.float64)
    for r, keys in enumerate(case.keys):
        up = (keys[:, :latent] @ linear.weight.double().t()).view(-1, heads, nope + v)
        per_head = torch.cat([up[..., :nope], keys[:, None, latent:].expand(-1, heads, -1)], dim=2)
        for t in range(starts[r], starts[r + 1]):
            chosen = [i for i in case.topk[t].tolist() if i >= 0]
            if chosen:
                weights = (torch.einsum("hd,shd->hs", q[t].double(), per_head[chosen]) * SCALE).softmax(1)
                expected[t] = torch.einsum("hs,shv->hv", weights, up[chosen][..., nope:])
    # values that an FP8 cache already rounded are rounded again when they are written: not always to themselves
    tolerance = 2e-2 if mode.startswith("fp8") else 1e-4
    torch.testing.assert_close(output.view(10, heads, v).double(), expected, rtol=tolerance, atol=tolerance)
    assert not output[8:].any()


def test_warm_up_writes_zeros_only():
    case = make_case([1], [5], 4, "fp8_ds_mla")
    impl, _ = build_impl(FlashMLASparseBackend, case, "fp8_ds_mla")
    before = case.cache.clone()
    output = torch.full((3, 4 * 128), NAN)
    assert not impl.forward(None, None, None, None, case.cache, None, output).any()
    assert torch.equal(case.cache, before)


def test_without_workspace_the_impl_makes_one():
    case = make_case([5], [5], 4, "fp8_ds_mla")
    impl, meta = build_impl(
        FlashMLASparseBackend, case, "fp8_ds_mla", config={"fp8_mode": "separate"}, impl={"workspace": None}
    )
    check(impl.forward_mqa(case.q, case.cache, meta)[0], case)


REQUIRED = {"indexer": SimpleNamespace(topk_indices_buffer=torch.zeros(4, 8, dtype=torch.int32))}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"alibi_slopes": [1.0]}, NotImplementedError, "alibi_slopes"),
        ({"sliding_window": 128}, NotImplementedError, "sliding_window"),
        ({"logits_soft_cap": 30.0}, NotImplementedError, "logits_soft_cap"),
        ({"kv_sharing_target_layer_name": "x"}, NotImplementedError, "kv_sharing"),
        ({"attn_type": "encoder"}, NotImplementedError, "attn_type 'encoder'"),
        ({"indexer": None}, ValueError, "needs an indexer"),
        ({"config": None}, ValueError, "and a config"),
        ({"kv_lora_rank": 448}, ValueError, "head_size 576 is not kv_lora_rank 448"),
        ({"kv_cache_dtype": "bfloat16"}, ValueError, "kv_cache_dtype 'auto', the impl 4 and 'bfloat16'"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_an_impl_refuses(arguments, error, message):
    arguments = REQUIRED | {"config": SparseMLAConfig(4, dtype=torch.float32)} | arguments
    with pytest.raises(error, match=message):
        FlashMLASparseImpl(4, 576, SCALE, 1, **arguments)


def test_queries_and_caches_that_do_not_fit():
    case = make_case([1, 5], [70, 9], 4, "bfloat16")
    impl, meta = build_impl(FlashMLASparseBackend, case, "bfloat16")
    with pytest.raises(ValueError, match=r"queries must be \[T, 4, 192\]"):
        impl.forward_mqa(case.q[:, :2], case.cache, meta)
    with pytest.raises(ValueError, match="5 query rows, but the step has 6 tokens in 6 rows"):
        impl.forward_mqa(case.q[:5], case.cache, meta)
    with pytest.raises(ValueError, match=r"contiguous \[pages, entries, 192\]"):
        impl.forward_mqa(case.q, case.cache[:, ::2], meta)


def test_which_kernels_run():
    assert get_kernels("auto", "cpu").name == "reference"
    assert [(name, usable) for name, usable, _ in describe_kernels("cpu")] == [
        ("flashmla", False),
        ("triton", False),
        ("reference", True),
    ]
    with pytest.raises(ValueError, match="'flashmla' cannot run on cpu: FlashMLA needs an NVIDIA GPU"):
        get_kernels("flashmla", "cpu")
    with pytest.raises(ValueError, match="'triton' cannot run on cpu: its kernels need an NVIDIA GPU"):
        get_kernels("triton", "cpu")
    with pytest.raises(
        ValueError, match="unknown sparse MLA kernels 'cuda': supported are auto, flashmla, triton, ref"
    ):
        get_kernels("cuda", "cpu")


def test_flashmla_is_called_through_its_adapter(monkeypatch, seed):
    """The calls bind to the adapter's signatures and return what the reference returns."""

    def sparse_decode(*args, **kwargs):
        call = inspect.signature(adapter_decode).bind(*args, **kwargs).arguments
        (page,) = call["keys"]
        assert call["schedule"] is plan
        q, indices = call["q"].flatten(0, 1), page.indices.flatten(0, 1)
        cache = page.pool.view(len(page.pool), page.entries, -1)
        every = torch.arange(len(page.pool) * page.entries)
        keys = record_of(cache, 128, 64).gather(page.pool, page.entries, every, torch.bfloat16)
        out, lse = sparse_attention(q, keys, indices, call["scale"], d_v=128)
        return out.unflatten(0, call["q"].shape[:2]), lse.unflatten(0, call["q"].shape[:2])

    def sparse_prefill(*args, **kwargs):
        call = inspect.signature(adapter_prefill).bind(*args, **kwargs).arguments
        return sparse_attention(call["q"], call["kv"], call["indices"], call["scale"], d_v=128)

    adapter_decode, adapter_prefill, plan = adapter.sparse_decode, adapter.sparse_prefill, object()
    monkeypatch.setattr(adapter, "sparse_decode", sparse_decode)
    monkeypatch.setattr(adapter, "sparse_prefill", sparse_prefill)
    monkeypatch.setattr(adapter, "new_schedule", lambda: plan)
    for mode in MODES:
        case = make_case([2, 2, 5], [70, 9, 9], 16, MODES[mode][0], seed=seed)
        check(run(case, mode, {"num_speculative_tokens": 1}, kernels=FlashMLAKernels()), case)
    indices = case.topk[None, :3].clamp(max=60)
    arguments = (torch.randn(1, 3, 4, 192), case.cache[:, :, None], indices, 128, SCALE)
    mine = FlashMLAKernels().flash_mla_with_kvcache(*arguments, SimpleNamespace(scheduler_metadata=plan))
    for got, expected in zip(mine, ReferenceKernels().flash_mla_with_kvcache(*arguments), strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, equal_nan=True)
