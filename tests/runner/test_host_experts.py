"""Models whose experts are in host memory: the same bits as with all experts resident, whatever the device holds."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.hyper_connection import DelayedInput, SublayerOutput
from deepseek_attn.kernels.hyper_connection.types import DelayedOutput
from deepseek_attn.kernels.moe import fetch_experts, moe_experts, prefetch_experts
from deepseek_attn.kernels.moe.types import ExpertsCall, ExpertStack
from deepseek_attn.layers.expert_memory import ExpertMemory
from deepseek_attn.models import host_experts
from deepseek_attn.models.expert_rows import ExpertFormat, cached_experts
from deepseek_attn.models.host_experts import AHEAD_COPIES, NextLayer
from deepseek_attn.models.host_rows import ExpertRows
from deepseek_attn.models.moe import Gate, MoE
from deepseek_attn.runner import ModelRunner, host_experts as held_rows
from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes
from tests.kernels.moe.moe_cases import make_case
from tests.support.drafts import complete
from tests.support.held_experts import budget_of, bytes_of, experts_of, held
from tests.support.small_models import prompt, two_layers
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import untyped
from tests.support.v41_cases import shallow, tiny_for_kernels

OPTIONS: dict[str, Any] = {"max_model_len": 300, "max_num_seqs": 4, "max_num_batched_tokens": 256}
CHUNKS = (None, 13)


def texts_of(runner: ModelRunner) -> list[list[int]]:
    return [prompt(runner.config, length, seed) for seed, length in enumerate((1, 33, 66))]


def generated(runner: ModelRunner, drafts: int) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=5, temperature=0.0)
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

        def fetched(state, experts, *options):
            order.append((numbers[id(state.row)], experts.tolist()))
            return fetch(state, experts, *options)

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


GUESSES = {
    "right": lambda ids, E, again: ids,
    "partly right": lambda ids, E, again: torch.where(torch.arange(ids.shape[1]) % 2 == 0, ids, (ids + 1) % E),
    "right the second time": lambda ids, E, again: ids if again else (ids + 1) % E,
    "wrong the second time": lambda ids, E, again: (ids + 1) % E if again else ids,
    "one for all tokens": lambda ids, E, again: ids[:1].expand_as(ids).contiguous(),
    "of other ranks": lambda ids, E, again: torch.full_like(ids, -1),
}


@contextmanager
def recorded_routings(monkeypatch, guess=None):
    """Routings of each router, in the order of its calls. With ``guess``, predictions are made of those recorded."""
    calls: dict[int, list[torch.Tensor]] = {}
    guessed = set()
    forward = Gate.forward

    def record(self, x, token_ids):
        experts, weights = forward(self, x, token_ids)
        calls.setdefault(id(self), []).append(experts)
        return experts, weights

    with monkeypatch.context() as patch:
        patch.setattr(Gate, "forward", record)

        def predict(self, x):
            if guess is None:
                return forward(self, x, x)[0]
            change, known = guess
            call = id(self), len(calls.get(id(self), []))  # it comes before the call that it is for
            again = call in guessed
            guessed.add(call)
            return change(known[call[0]][call[1]], again)

        patch.setattr(Gate, "predict", predict)
        yield calls


@exhaustive_on_cpu
@pytest.mark.parametrize("family", tiered(MODELS, ["v32"]))
def test_predictions_change_no_bits(monkeypatch, family):
    """Whatever is predicted; what is held afterwards follows from routings and predictions, not from time."""
    runner = ModelRunner.from_config(MODELS[family](), device="cpu", dtype="float32", numerics="exact", **OPTIONS)
    E, texts = experts_of(runner)[0].count, texts_of(runner)

    def compute():
        return *runner.score([texts[1][:9]], 1), *map(torch.tensor, generated(runner, 1))

    with held(runner, E // 2), recorded_routings(monkeypatch) as known:
        expected = compute()
    for name, guess in GUESSES.items():
        tables = []
        change = lambda ids, again, guess=guess: guess(ids, E, again)  # noqa: E731
        for _ in range(2 if name == "partly right" else 1):
            with held(runner, E // 2) as rows, recorded_routings(monkeypatch, (change, known)):
                assert all(map(torch.equal, compute(), expected)), name
                assert not any(layer._guessed for layer in rows.layers)
                tables.append(rows.table.clone())
                stats = rows.stats
        assert torch.equal(tables[0], tables[-1])
        assert (stats.ahead > 0) == (name != "of other ranks")
        if name != "wrong the second time":  # of few experts, that guess may be needed by chance
            assert (stats.dropped > 0) == (name in ("partly right", "right the second time")), name
    runner.close()


def test_a_prompt_behind_wrong_predictions():
    """Rows whose experts were not needed are free: the experts that lack one are more than the area holds."""
    runner = ModelRunner.from_config("tiny", device="cpu", dtype="float32", numerics="exact", **OPTIONS)
    E, texts = experts_of(runner)[0].count, texts_of(runner)
    expected = runner.score(texts)
    with held(runner, E - 3) as rows:
        for number, layer in enumerate(rows.layers):
            state = layer.state
            prefetch_experts(state, (state.row < 0).nonzero().T[:, :AHEAD_COPIES], None)
            kept = [expert for expert in state.owner.tolist() if expert not in state.ahead[0]]
            fetch_experts(state, torch.tensor([kept[number % 2 :]]), None, True)
            assert (state.owner < 0).sum() == AHEAD_COPIES
        assert all(map(torch.equal, runner.score(texts), expected))
    runner.close()


def unchanged(block, hidden):
    """The experts' input of a block whose attention, and whose predecessor's experts, add nothing to ``hidden``."""
    if isinstance(hidden, torch.Tensor):
        return block.ffn_input((torch.zeros_like(hidden), hidden))[0]
    T, m, D = hidden.streams.shape
    same = SublayerOutput(torch.zeros(T, D), hidden.streams, torch.zeros(T, m), torch.eye(m).repeat(T, 1, 1))
    if not isinstance(hidden, DelayedInput):
        return block.ffn_input(same).x
    attention = block.attn_input(DelayedOutput(same, hidden.pre))
    return block.ffn_input(DelayedOutput(same, attention.pre)).x


def ahead(blocks, number, distance):
    """Whether the layer ``distance`` behind ``blocks[number]`` is predicted there: it and all between have routers."""
    following = blocks[number + 1 : number + 1 + distance]
    return len(following) == distance and not any(block.ffn.gate.hash for block in following)


@pytest.mark.parametrize("family", tiered(MODELS, MODELS))
def test_the_next_router_predicts(monkeypatch, family):
    """From the state before a layer's experts, its own choice if the state stayed; not in layers with hash routing.

    So does the router after it, where the next one does.
    """
    runner = ModelRunner.from_config(MODELS[family](), device="cpu", dtype="float32", numerics="exact", **OPTIONS)
    blocks = [block for block in runner.model.layers.values() if isinstance(block.ffn, MoE)]
    seen = []
    for block in blocks:

        def expect(hidden, block=block, own=block.expect_experts):
            seen.append((block, hidden, own(hidden)))
            return seen[-1][2]

        monkeypatch.setattr(block, "expect_experts", expect)
    with held(runner, 3):
        runner.score([[5]])
        scored = [block for block in blocks[1:] if not block.ffn.gate.hash]
        numbers = [blocks.index(block) for block, *_ in seen]
        assert numbers == [number + i for number in range(len(blocks)) for i in (1, 2) if ahead(blocks, number, i)]
        assert {blocks[number] for number in numbers} == set(scored)
        for block, hidden, predicted in seen:
            assert torch.equal(predicted, block.ffn.gate(unchanged(block, hidden), torch.zeros(1))[0])
    runner.close()


def test_a_rank_without_tokens_predicts_nothing():
    """With data-parallel attention, experts see the tokens of all ranks, and hidden states are those of one's own."""
    runner = ModelRunner.from_config("tiny", device="cpu", dtype="float32", numerics="exact", **OPTIONS)
    config = untyped(runner.config)
    with held(runner, 4) as rows:
        blocks = [block for block in runner.model.layers.values() if block.ffn.experts.rows.next_layer is not None]
        block = blocks[-1]
        assert not block.ffn.gate.hash
        for T in (1, 0):
            x, streams = torch.randn(1, config.hidden_size), torch.randn(T, config.hc_mult, config.hidden_size)
            block.ffn.parallel = SimpleNamespace(
                gather_tokens=lambda part, x=x: x,
                sum_experts=lambda y, T: y[:T],
                own_tokens=lambda y: torch.cat([y, y.new_zeros(1 - len(y), y.shape[1])]),
            )
            hidden = block.collapse(streams)
            assert len(block.ffn(x[:T], torch.zeros(T, dtype=torch.int64), hidden)) == T
            assert any(layer._guessed for layer in rows.layers) == (T > 0)
            rows.end()
    runner.close()


def test_a_step_that_fails_behind_a_prediction():
    """Experts that it copied ahead stay; the next step has the same bits."""
    runner = ModelRunner.from_config("tiny", device="cpu", dtype="float32", numerics="exact", **OPTIONS)
    expected = runner.score([[5, 9]], 1)
    with held(runner, 4) as rows:
        last = runner.model.layers[str(len(runner.model.layers) - 1)]

        def fail(*_):
            if not any(layer._guessed for layer in rows.layers):
                return  # a prediction calls the router, too
            raise RuntimeError("on purpose")

        hook = last.ffn.gate.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            runner.score([[5, 9]], 1)
        hook.remove()
        assert all(map(torch.equal, runner.score([[5, 9]], 1), expected))
    runner.close()


@pytest.mark.parametrize("leave", ["find", "finish"])
def test_an_early_prediction_that_no_other_follows(leave):
    """A step fails, or leaves a layer out: no row holds an expert whose copy may have paused."""
    stack = lambda: ExpertStack(torch.randn(6, 8, 8))  # noqa: E731
    layers = [(stack(), stack(), stack()) for _ in range(3)]
    rows = ExpertRows.of(layers, torch.device("cpu"), bytes_of(layers, 3))
    first, second, third = rows.layers
    first.next_layer = NextLayer(second, lambda hidden: torch.tensor([[0]]), 9)
    second.next_layer = NextLayer(third, lambda hidden: torch.tensor([[5, 4]]), 9)
    assert first.look_ahead(None, torch.tensor([[0]]))
    assert (third.state.ahead[0].tolist(), int(third.state.row[4])) == ([5, -1, -1], -1)
    assert int(third.state.row[5]) >= 0
    if leave == "find":
        third.find(torch.tensor([[0, 1]]))
    rows.end()
    assert (third.state.ahead[0].tolist(), int(third.state.row[5])) == ([-1, -1, -1], -1)
    assert not any(layer._guessed for layer in rows.layers)
    assert rows.stats.dropped == 1


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
    from deepseek_attn.runner.meta_runner import MetaRunner
    from deepseek_attn.runner.warm_up import WarmUp

    config, gpu = ModelConfig.from_preset("tiny_gpu"), GPU((9, 0), 132)
    request = RunnerRequest.of(
        config, RandomSource(config).entries(), numerics=numerics_for(config, "serving", None), dtype=torch.bfloat16,
        attention=AttentionOptions(), sizes=RunnerSizes(300, 2, 100, 16), gpu=gpu, experts=ExpertMemory("host"),
    )  # fmt: skip
    with recorded_launches(gpu) as launches:
        warm_up = WarmUp(runner := MetaRunner.build(request))
        for rows in ([(1, 20)], [(90, 90)]):
            launches.latest.clear()
            with runner.op_settings(), torch.inference_mode():
                warm_up.prefill(rows)
            found = [variant.name for variant in {variant.key: variant for variant in launches.latest}.values()]
            assert ("copy_experts_kernel" in found) == (rows[0][0] == 1)
            # two with and without copies ahead
            assert found.count("choose_rows_kernel") == (2 if rows[0][0] == 1 else 1)
            # of the next layer, and an early one of the one after it
            assert found.count("choose_ahead_kernel") == (2 if rows[0][0] == 1 else 0)


# --- on a GPU: DEEPSEEK_ATTN_TEST_DEVICE=cuda ---


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["tiny_gpu", "tiny_v32", "v41"])
@pytest.mark.parametrize("load", [0.0, 1.0])
def test_the_same_bits_on_a_gpu(monkeypatch, device, preset, load):
    """Graphs, prompts, drafts: everything as with all experts on the GPU, with copies ahead and without."""
    monkeypatch.setattr(held_rows, "AHEAD_LOAD", load)
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
            stats = runner.expert_rows.stats
            assert stats.ahead + stats.dropped > 0 or not load or preset != "tiny_gpu"


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
            outputs.append(moe_experts(ExpertsCall(x, ids, weights, *layer.stacks, 4.0, slots=layer.find(ids))))
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
        calls = [ExpertsCall(x, ids, weights, *case[3:], 4.0) for ids, case in zip(experts, cases, strict=True)]
        expected = list(map(moe_experts, calls))
        graph.replay()
        assert all(map(torch.equal, outputs, expected))
        assert all(map(torch.equal, compute(), expected))
