"""Models whose experts are in host memory: the same bits as with all experts resident, whatever the device holds."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.moe import ExpertStack, moe_experts
from deepseek_attn.layers.expert_memory import ExpertMemory
from deepseek_attn.models import host_experts
from deepseek_attn.models.expert_rows import HOST_AREAS, ExpertFormat, cached_experts, expert_formats
from deepseek_attn.models.host_experts import ExpertRows
from deepseek_attn.models.moe import Experts, MoE
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes
from deepseek_attn.runner.host_experts import give_rows
from tests.kernels.moe.moe_cases import make_case
from tests.support.drafts import complete
from tests.support.small_models import prompt, two_layers
from tests.support.tiers import tiered
from tests.support.v41_cases import shallow, tiny_for_kernels

OPTIONS: dict[str, Any] = {"max_model_len": 300, "max_num_seqs": 4, "max_num_batched_tokens": 256}
CHUNKS = (None, 13)


def experts_of(runner: ModelRunner) -> list[Experts]:
    return [module for module in runner.model.modules() if isinstance(module, Experts)]


def budget_of(runner: ModelRunner, cached: int) -> int:
    """Bytes of rows for ``cached`` experts of each layer."""
    return bytes_of([layer.stacks() for layer in experts_of(runner)], cached)


def bytes_of(stacks, cached: int) -> int:
    """Bytes of rows for ``cached`` experts of each layer."""
    return sum(form.held(cached) for form, _ in expert_formats(stacks, HOST_AREAS))


@contextmanager
def held(runner: ModelRunner, cached: int):
    """In this context the runner's layers read experts by rows, as with ``expert_memory="host"`` on a GPU."""
    layers, budget, model = experts_of(runner), budget_of(runner, cached), runner.whole_model()
    in_turn, drafting = (
        [module for module in part.modules() if isinstance(module, MoE)] for part in (model.layers, model.mtp)
    )
    rows = ExpertRows.of([layer.stacks() for layer in layers], runner.device, budget, len(in_turn))
    assert (rows.cached, rows.nbytes) == (cached, budget)
    give_rows(in_turn, drafting, rows)
    hooks = rows.watch(runner.model, runner.config.num_experts_per_tok)
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            del layer.rows


def texts_of(runner: ModelRunner) -> list[list[int]]:
    return [prompt(runner.config, length, seed) for seed, length in enumerate((1, 33, 70))]


def generated(runner: ModelRunner, drafts: int) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=9, temperature=0.0)
    return complete(runner, [(text, params) for text in texts_of(runner)], drafts)[0]


MODELS = {
    "v4": two_layers,
    "v32": lambda: ModelConfig.from_preset("tiny_v32"),  # three layers have experts: rows of two take as much as all
    "v41": shallow,
}


@pytest.mark.parametrize("family", tiered(MODELS, ["v4"]))
def test_the_same_bits_on_a_cpu(family):
    """Prompts in one step and in chunks; text with drafts."""
    runner = ModelRunner.from_config(MODELS[family](), device="cpu", dtype="float32", numerics="exact", **OPTIONS)
    count = experts_of(runner)[0].count
    texts = texts_of(runner)
    expected = [runner.score(texts, chunk_size) for chunk_size in CHUNKS]
    drafted = generated(runner, 1)
    for cached in (1, count // 2 + 1):
        with held(runner, cached) as rows:
            for chunk_size, whole in zip(CHUNKS, expected, strict=True):
                for got, logits in zip(runner.score(texts, chunk_size), whole, strict=True):
                    assert torch.equal(got, logits)
            assert generated(runner, 1) == drafted
            assert not any(layer._is_ahead for layer in rows.layers)
            assert all(layer.has_all or layer.state.uses.any() for layer in rows.layers)
            stats = rows.stats
            assert stats.misses > 0
            assert f"{cached} of {count} per layer" in rows.describe()
            assert f"{stats.hits:,} of {stats.hits + stats.misses:,} uses were there" in rows.describe()
    runner.close()


def test_copies_run_two_layers_ahead(monkeypatch):
    """Each layer gives its area to the layer after the next; copies that no layer takes are waited for at the end."""
    runner = ModelRunner.from_config("tiny", device="cpu", dtype="float32", numerics="exact", **OPTIONS)
    with held(runner, 3) as rows:
        order = []
        for number, layer in enumerate(rows.layers):
            start, take = layer.copy_ahead, layer.finish
            monkeypatch.setattr(
                layer, "copy_ahead", lambda n=number, f=start, o=layer: (o._is_ahead or order.append(("copy", n)), f())
            )
            monkeypatch.setattr(
                layer, "finish", lambda n=number, f=take, o=layer: (o._is_ahead and order.append(("take", n)), f())
            )
        runner.score([prompt(runner.config, 40)])
        backbone = len(runner.model.layers)
        expected = [("copy", 0), ("copy", 1)]
        for number in range(backbone):
            expected += [("take", number)]
            expected += [("copy", number + 2)] if number + 2 < backbone else []
        assert order == expected
        order.clear()
        with pytest.raises(IndexError):
            runner.model(torch.full((40,), runner.config.vocab_size + 5), None, None)
        assert order == [("copy", 0), ("copy", 1), ("take", 0), ("take", 1)]
        assert not any(layer._is_ahead for layer in rows.layers)
    runner.close()


def test_hash_layers_begin_with_the_step(monkeypatch):
    """If their experts fit in rows of their own; other layers fetch in their turn, what the routers chose."""
    runner = ModelRunner.from_config("tiny", device="cpu", dtype="float32", numerics="exact", **OPTIONS)
    topk, order = runner.config.num_experts_per_tok, []
    hashed = [number for number, spec in enumerate(runner.config.layers) if spec.hash_routing]
    assert hashed
    with held(runner, 2 * topk) as rows:
        numbers = {id(layer.state.row): number for number, layer in enumerate(rows.layers)}
        fetch = host_experts.fetch_experts

        def fetched(state, experts, stream):
            order.append((numbers[id(state.row)], experts.tolist()))
            return fetch(state, experts, stream)

        monkeypatch.setattr(host_experts, "fetch_experts", fetched)
        for tokens, ahead in (([[5], [9]], True), ([[5], [9], [2]], False)):
            order.clear()
            block = runner.model.layers["0"]
            hook = block.register_forward_pre_hook(lambda *_: order.append("layer 0"))
            runner.score(tokens)
            hook.remove()
            first = order.index("layer 0")
            assert [number for number, _ in order[:first]] == (hashed if ahead else [])
            called = [entry[0] for entry in order if entry != "layer 0"]
            assert sorted(called) == list(range(len(runner.model.layers)))
            gate = runner.model.layers[str(hashed[0])].ffn.gate
            ids = gate.tid2eid[torch.tensor([token for (token,) in tokens])].tolist()
            assert (hashed[0], ids) in order
    runner.close()


def test_what_fits():
    formats = [ExpertFormat(experts=256, nbytes=10, layers=43, areas=2), ExpertFormat(8, 100, 1, 1)]
    for cached in (1, 8, 100, 255, 256):
        held_bytes = sum(form.held(cached) for form in formats)
        assert cached_experts(formats, held_bytes) == cached
        assert cached_experts(formats, held_bytes + 1) == cached
    assert formats[0].held(256) == 256 * 43 * 10
    assert formats[0].held(300) == formats[0].held(256)
    least = sum(form.held(1) for form in formats)
    with pytest.raises(ValueError, match=rf"the least is {least:,}, for one expert of each of 44 layers"):
        cached_experts(formats, least - 1)


def test_layers_of_two_formats_have_stacks_of_their_own():
    def stacks(experts, inner, dtype):
        shapes = [(experts, inner, 32), (experts, inner, 32), (experts, 32, inner)]
        first, gate, second = (ExpertStack(torch.randn(shape).to(dtype)) for shape in shapes)
        return first, gate, second

    layers = [stacks(5, 16, torch.float32), stacks(7, 16, torch.bfloat16), stacks(5, 16, torch.float32)]
    rows = ExpertRows.of(layers, torch.device("cpu"), 1 << 30)
    assert [layer.has_all for layer in rows.layers] == [True] * 3
    rows = ExpertRows.of(layers, torch.device("cpu"), None)
    assert rows.layers[0].stacks is rows.layers[2].stacks
    assert rows.layers[0].stacks is not rows.layers[1].stacks
    for host, layer in zip(layers, rows.layers, strict=True):
        for T in (1, 60):
            experts = torch.randint(len(host[0].weight), (T, 2))
            found = layer.find(experts).rows
            layer.release()
            for source, target in zip(host, layer.stacks, strict=True):
                assert torch.equal(target.weight[found[experts].long()], source.weight[experts])


def test_kernels_are_listed_ahead():
    """Those of single tokens, which fetch what they need, and of prompts, which count uses alone."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.runner.ahead.recording import recorded_launches
    from deepseek_attn.runner.kernel_list import KernelLists

    config, gpu = ModelConfig.from_preset("tiny_gpu"), GPU((9, 0), 132)
    request = RunnerRequest.of(
        config, RandomSource(config).entries(), numerics=numerics_for(config, "serving", None), dtype=torch.bfloat16,
        attention=AttentionOptions(), sizes=RunnerSizes(300, 2, 100, 16), gpu=gpu, experts=ExpertMemory("host"),
    )  # fmt: skip
    with recorded_launches(gpu) as launches:
        lists = KernelLists(request, launches)
        for rows in ([(1, 20)], [(90, 90)]):
            found = [variant.name for variant in lists.step(rows)]
            assert ("copy_experts_kernel" in found) == (rows[0][0] == 1)
            assert found.count("choose_rows_kernel") == 1


# --- on a GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda ---


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["tiny_gpu", "tiny_v32", "v41"])
def test_the_same_bits_on_a_gpu(device, preset):
    """Graphs, prompts, drafts: everything as with all experts on the GPU."""
    options: dict[str, Any] = OPTIONS | {"device": device, "numerics": "serving", "compile_ahead": True}
    preset = tiny_for_kernels() if preset == "v41" else preset
    with ModelRunner.from_config(preset, **options) as runner:
        texts = texts_of(runner)
        expected = [runner.score(texts, chunk_size) for chunk_size in CHUNKS]
        texts_expected = [generated(runner, drafts) for drafts in (0, 1)]
        budgets = {cached: budget_of(runner, cached) for cached in (1, experts_of(runner)[0].count // 2)}
    for cached, budget in budgets.items():
        with ModelRunner.from_config(preset, expert_memory="host", expert_cache_bytes=budget, **options) as runner:
            assert runner.expert_rows is not None
            assert runner.expert_rows.cached == cached
            assert not experts_of(runner)[0].w1.weight.is_cuda
            for _ in range(2):
                for chunk_size, whole in zip(CHUNKS, expected, strict=True):
                    for got, logits in zip(runner.score(texts, chunk_size), whole, strict=True):
                        assert torch.equal(got, logits)
                assert [generated(runner, drafts) for drafts in (0, 1)] == texts_expected


@pytest.mark.gpu
@pytest.mark.parametrize("T", [3, 40])
def test_layers_in_one_graph(device, T):
    """Copies run on a stream of their own inside a graph, too, and rows of an area are not overwritten in use."""
    cases = [make_case(T, 384, 128, 9, 3, "plain", device=device) for _ in range(5)]
    pinned = lambda stack: ExpertStack(stack.weight.cpu().pin_memory())  # noqa: E731
    host = [(pinned(case.w1), pinned(case.w3), pinned(case.w2)) for case in cases]
    rows = ExpertRows.of(host, device, bytes_of(host, 3))
    assert rows.cached == 3
    x, weights = cases[0].x, cases[0].weights
    experts = torch.stack([case.experts for case in cases])

    def compute():
        rows.begin(experts[0, :, 0], 3)
        outputs = []
        for ids, layer in zip(experts, rows.layers, strict=True):
            outputs.append(moe_experts(x, ids, weights, *layer.stacks, 4.0, slots=layer.find(ids)))
            layer.release()
        rows.end()
        return outputs

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = compute()
    for _ in range(10):
        experts.copy_(torch.rand(5, T, 9, device=device).topk(3).indices)
        expected = [moe_experts(x, ids, weights, *case[3:], 4.0) for ids, case in zip(experts, cases, strict=True)]
        graph.replay()
        assert all(map(torch.equal, outputs, expected))
        assert all(map(torch.equal, compute(), expected))
