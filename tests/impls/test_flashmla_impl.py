"""The FlashMLA impl, its kernels replaced by stand-ins, against the reference impl: whole models and single layers."""

import inspect
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepseek_attn.config.numerics import PRESETS, Numerics
from deepseek_attn.impls import (
    AttentionSpec,
    DeepseekV4FlashMLASparseImpl,
    DeepseekV4MixedSparseImpl,
    SparseMLAAttentionImpl,
    describe_impls,
    flash_mla,
    get_impl,
    prefill,
)
from deepseek_attn.impls.reference import DeepseekV4ReferenceSparseImpl
from deepseek_attn.impls.triton import DeepseekV4TritonSparseImpl
from deepseek_attn.models.block import attention_layers
from tests.support import fake_flash_mla
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required

FP8_CACHE = replace(PRESETS["exact"], kv_record="fp8_ds_mla")  # weights stay plain, so that only attention differs
TOLERANCE = 3e-3  # relative, of one attention call: one bf16 rounding of the output
SIZES = {"head_dim": 512, "qk_rope_head_dim": 64, "num_attention_heads": 4}
GPU, CPU = torch.device("cuda"), torch.device("cpu")
SPEC = AttentionSpec(64, 512)


@pytest.fixture(params=tiered(fake_flash_mla.FLAVOURS, ["upstream"]))
def fake(request, monkeypatch):
    """A machine on which the stand-in runs: its GPU is the CPU."""
    module = fake_flash_mla.make(request.param)
    flash_mla.flavour.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    monkeypatch.setattr(flash_mla, "supported", lambda device, spec=None: (True, "stand-in"))
    yield module
    flash_mla.flavour.cache_clear()


def runner(ratios, backend, mtp=0, numerics: str | Numerics = FP8_CACHE, config=None, **options):
    config = small_config(ratios, mtp, **SIZES | (config or {}))
    return small_runner(config, backend=backend, dtype="bfloat16", numerics=numerics, **options)


class Beside:
    """An impl that also runs the reference, in float32, on the same arguments.

    Logits of two bf16 runs cannot be compared strictly: a rounding can change an expert or a selected entry.
    """

    def __init__(self, machine):
        self.impl, self.differences = DeepseekV4FlashMLASparseImpl, []
        layers: Any = attention_layers(machine.model)
        for layer in layers:
            assert layer.impl is self.impl
            layer.impl = self

    def attend(self, layer, queries, kv, positions):
        q = queries.normed()
        output = torch.full_like(q, float("nan"))
        assert self.impl.forward_mqa(layer, q, kv, positions, output) is output
        own = self.impl.forward_mqa(layer, q, kv, positions)
        assert torch.equal(own, output)
        real = q[:, : layer.num_heads].float()
        expected = torch.full_like(real, float("nan"))
        workspace, layer.workspace = layer.workspace, type(layer.workspace)()
        DeepseekV4ReferenceSparseImpl.forward_mqa(layer, real, kv, positions, expected)
        layer.workspace = workspace
        actual = output[:, : layer.num_heads].float()
        self.differences.append(float((actual - expected).norm() / expected.norm().clamp(min=1e-9)))
        return own[:, : layer.num_heads]


def typical_difference(actual, expected):
    """Of the logits of a token, relative, in the median: most tokens meet no tie."""
    a, e = torch.cat(actual), torch.cat(expected)
    return float(((a - e).norm(dim=1) / e.norm(dim=1)).median())


def test_public_names_come_without_a_gpu():
    assert issubclass(DeepseekV4FlashMLASparseImpl, SparseMLAAttentionImpl)
    for method in ("forward_mqa", "attend_pages", "attend_rows"):
        assert getattr(DeepseekV4FlashMLASparseImpl, method).__self__ is DeepseekV4FlashMLASparseImpl


def test_a_cpu_gets_the_reference_and_says_why_not_flashmla():
    assert get_impl("auto", CPU) is DeepseekV4ReferenceSparseImpl
    described = {name: (usable, reason) for name, _, usable, reason in describe_impls(CPU)}
    assert described["flashmla"] == (False, "FlashMLA needs an NVIDIA GPU; the device is cpu")
    assert described["reference"][0]
    with pytest.raises(ValueError, match="backend 'flashmla' cannot run on cpu: FlashMLA needs an NVIDIA GPU"):
        get_impl("flashmla", CPU)


@pytest.mark.parametrize(
    ("spec", "chosen", "reason"),
    [
        (SPEC, "flashmla", "compute capability 9.0"),
        (replace(SPEC, kv_record="plain"), "reference", "numerics 'serving' and 'official' store fp8_ds_mla"),
        (replace(SPEC, dtype=torch.float32), "reference", "use dtype='bfloat16'"),
        (replace(SPEC, head_dim=256), "reference", "256"),
    ],
    ids=["serving", "plain-record", "float32", "head_dim"],
)
def test_auto_picks_flashmla_where_its_kernels_fit_the_layer(monkeypatch, spec, chosen, reason):
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla.make("sgl"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash_mla, "compute_capability", lambda device: (9, 0))
    # the rest of the list, whether or not this machine has Triton
    refuse = classmethod(lambda cls, device, spec=None: (False, "not part of this test"))
    for impl in (DeepseekV4TritonSparseImpl, DeepseekV4MixedSparseImpl):
        monkeypatch.setattr(impl, "supported", refuse)
    flash_mla.flavour.cache_clear()
    assert get_impl("auto", GPU, spec).name == chosen
    described = {name: (usable, why) for name, _, usable, why in describe_impls(GPU, spec)}
    assert described["flashmla"][0] == (chosen == "flashmla")
    assert reason in described["flashmla"][1]
    flash_mla.flavour.cache_clear()


def test_a_runner_refuses_flashmla_for_plain_records(fake):
    with pytest.raises(ValueError, match="the KV record here is 'plain'"):
        runner([0], "flashmla", numerics="exact")


@exhaustive_on_cpu
@pytest.mark.parametrize(
    ("fake", "ratio"),
    tiered([("sgl", 0), ("upstream", 4), ("vllm", 128), ("sgl", 16)], [("sgl", 16)]),
    indirect=["fake"],
)
def test_score_in_chunks_of_awkward_sizes(fake, ratio):
    """Chunks of 1 are decodes, the rest prefills; a mixed step has both."""
    reference, flashmla = runner([0, ratio], "reference"), runner([0, ratio], "flashmla")
    beside = Beside(flashmla)
    for lengths, chunk in (((5, 131, 1), None), ((9, 23), 7), ((7,), 1)):
        prompts = [prompt(flashmla.config, n, seed) for seed, n in enumerate(lengths)]
        assert typical_difference(flashmla.score(prompts, chunk), reference.score(prompts, chunk)) < 1e-2
    assert max(beside.differences) < TOLERANCE
    assert fake.calls.decode
    assert fake.calls.prefill


@exhaustive_on_cpu
def test_score_with_serving_numerics_and_an_mtp_layer(fake):
    machine = runner([0, 4, 16], "flashmla", mtp=1, numerics="serving")
    beside = Beside(machine)
    logits, drafts = machine.score_mtp([prompt(machine.config, n, seed) for seed, n in enumerate((40, 3))], 11)
    assert max(beside.differences) < TOLERANCE
    assert len(beside.differences) == 4 * 4
    assert all(bool(x.isfinite().all()) for x in logits + drafts)


def steps(machine, lengths):
    """Prefills prompts of ``lengths``, then decodes twice; yields the attention inputs' owner after each step."""
    sequences = [machine.sequence(prompt(machine.config, n + 2, seed)) for seed, n in enumerate(lengths)]
    machine.step([(s, n) for s, n in zip(sequences, lengths, strict=True)])
    for _ in range(2):
        machine.step([(s, 1) for s in sequences])


@exhaustive_on_cpu
def test_one_schedule_per_layer_kind_and_step(fake):
    machine = runner([0, 0, 4, 4, 128, 128, 16], "flashmla", config={"num_hash_layers": 1})
    steps(machine, (150, 20))
    assert len(fake.calls.decode) == 2 * 7
    assert fake.calls.schedules == 2 * 4
    assert {call["q"] for call in fake.calls.decode} == {(2, 1, 64, 512)}
    assert [call["widths"] for call in fake.calls.decode[:7]] == [[64], [64], *[[64, 64]] * 2, *[[64, 128]] * 3]


def test_layers_of_one_ratio_with_and_without_indexer_have_schedules_of_their_own(fake):
    machine = runner([4, 4], "flashmla", config={"compress_indexer": [True, False]})
    steps(machine, (50,))
    assert fake.calls.schedules == 2 * 2


@pytest.mark.parametrize(
    ("fake", "heads"),
    tiered([("sgl", 4), ("upstream", 4), ("vllm", 4), ("sgl", 64)], [("vllm", 4)]),
    indirect=["fake"],
)
def test_every_attention_call_equals_the_reference(fake, heads):
    machine = runner([0, 4, 16], "flashmla", config={"num_attention_heads": heads}, max_num_seqs=4)
    beside = Beside(machine)
    steps(machine, (70, 33, 129))
    assert len(beside.differences) == 3 * 3
    assert max(beside.differences) < TOLERANCE


def test_rows_of_padding_tokens_become_zero(fake):
    machine = runner([0, 4, 16], "flashmla")
    layers = attention_layers(machine.model)
    assert len(layers) == 3
    for pool in machine.pools:
        if pool.spec.record is not None:
            slots = torch.arange(pool.tensor.shape[0] * pool.entries)
            pool.insert(slots, torch.randn(len(slots), pool.record.dim))
    sequences = [machine.sequence(prompt(machine.config, 40, seed)) for seed in range(3)]
    for lengths in ((1, 1, 1), (1, 30, 5)):
        rows = list(zip(sequences, lengths, strict=True))
        machine.manager.reserve([(s.cache, n) for s, n in rows])
        valid = torch.ones(sum(lengths), dtype=torch.bool)
        valid[0] = valid[-1] = False
        meta = machine.step_metadata([s.cache for s, _ in rows], list(lengths), valid)
        for layer in layers:
            layer.step = meta
            q = torch.randn(len(valid), layer.padded_heads, 512).bfloat16()
            if layer.indexer is not None:
                required(layer.topk_indices_buffer).fill_(-1)
            out = torch.full_like(q, float("nan"))
            required(layer.impl).forward_mqa(layer, q, q[:, 0], meta.positions, out)
            empty = (out[:, : layer.num_heads] == 0).all(2).all(1)
            assert torch.equal(empty, ~valid)


@pytest.mark.parametrize(
    ("lengths", "calls"), [((70, 33), 1), ((1, 1), 1), ((1, 30), 2)], ids=["prefills", "decodes", "both"]
)
def test_the_result_of_one_kernel_call_is_not_copied(fake, monkeypatch, lengths, calls):
    machine = runner([4], "flashmla", config={"num_attention_heads": 64})
    (layer,) = attention_layers(machine.model)
    sequences = [machine.sequence(prompt(machine.config, 80, seed)) for seed in range(2)]
    rows = list(zip(sequences, lengths, strict=True))
    machine.manager.reserve([(s.cache, n) for s, n in rows])
    layer.step = meta = machine.step_metadata([s.cache for s, _ in rows], list(lengths))
    required(layer.topk_indices_buffer).fill_(-1)
    results = []
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        kernel = getattr(fake, name)

        def called(*args, kernel=kernel, **kwargs):
            results.append(kernel(*args, **kwargs)[0])
            return results[-1], *kernel(*args, **kwargs)[1:]

        called.__signature__ = inspect.signature(kernel)
        monkeypatch.setattr(fake, name, called)
    q = torch.randn(sum(lengths), 64, 512).bfloat16()
    out = required(layer.impl).forward_mqa(layer, q, q[:, 0], meta.positions)
    assert (out.shape, out.dtype, len(results)) == (q.shape, q.dtype, calls)
    assert (out.data_ptr() == results[0].data_ptr()) == (calls == 1)


@pytest.mark.exhaustive
def test_requests_that_share_no_workspace_write_to_one_tensor(fake):
    machine = runner([0, 4, 16], "flashmla", max_num_seqs=4)
    for layer in attention_layers(machine.model):
        layer.prefill_workspace_rows = 0  # each request is a chunk of its own
    beside = Beside(machine)
    steps(machine, (70, 33, 129))
    assert len(fake.calls.prefill) == 3 * 2 * 3
    assert max(beside.differences) < TOLERANCE


@pytest.mark.exhaustive
def test_window_layers_merge_their_indices_once_a_step(fake, monkeypatch):
    machine = runner([0, 0, 4, 4, 128, 128], "flashmla", config={"num_hash_layers": 1})
    merged = []
    merge = prefill.combine_topk_swa_indices
    monkeypatch.setattr(prefill, "combine_topk_swa_indices", lambda *args: merged.append(args[5]) or merge(*args))
    machine.score([prompt(machine.config, 150, 0)])
    assert merged == [0, 4, 4, 128]


def test_output_must_have_the_shape_and_dtype_of_the_result(fake):
    machine = runner([0], "flashmla")
    (layer,) = attention_layers(machine.model)
    q = torch.zeros(2, 64, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"output must be \(2, 64, 512\)"):
        required(layer.impl).forward_mqa(layer, q, q[:, 0], torch.zeros(2), torch.zeros(2, 64, 512))
