"""One attention layer alone (`tests.support.one_layer`) against `deepseek_attn.testing`'s reference."""

from itertools import product
from typing import Any

import pytest
import torch

from deepseek_attn.config.model import ModelConfig
from deepseek_attn.impls import flow
from deepseek_attn.impls.prefill import plan_prefill_chunks
from deepseek_attn.utils.workspace import Workspace, aligned_bytes
from tests.support.one_layer import KINDS, WINDOW, Layer
from tests.support.tiers import tiered
from tests.support.typed import required

# A window alone, overlapping windows with an indexer, and without; C128A, in the first test, has closed few windows.
EACH_KIND = tiered(KINDS, ["SWA", "C4A", "C16A_overlap"])

# against the dense computation

SCHEDULES = {
    "one_prefill": [300],
    "chunks_of_awkward_sizes": [1, 2, 3, 5, 17, 64, 31, 65],
    "prefix_then_longer_than_the_window": [5, 70],
    "prefill_then_decode": [30, 1],
    "multiples_of_the_window": [WINDOW],
}


QUICK = [
    ("SWA", "prefix_then_longer_than_the_window"), ("SWA", "prefill_then_decode"), ("C4A", "chunks_of_awkward_sizes"),
    ("C4A", "prefill_then_decode"), ("C128A", "chunks_of_awkward_sizes"), ("C8A", "multiples_of_the_window"),
    ("C16A_overlap", "one_prefill"), ("C16A_overlap", "chunks_of_awkward_sizes"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "schedule"), tiered(product(KINDS, SCHEDULES), QUICK))
def test_one_request(kind, schedule, device):
    layer, chunks = Layer(kind, device), SCHEDULES[schedule]
    request = layer.request({"C128A": 263, "SWA": 77, "C16A_overlap": 133}.get(kind, 90))
    layer.run([request], chunks)
    layer.check(request)


@pytest.mark.parametrize("chunks", tiered([[300], [7, 1, 1, 40], [2, 6, 11]], [[7, 1, 1, 40]]), ids=str)
@pytest.mark.parametrize("kind", EACH_KIND)
def test_requests_of_many_lengths_together(kind, chunks, device):
    """Decodes beside prefills; lengths around the window, the ratios and page ends."""
    layer = Layer(kind, device)
    requests = [layer.request(n) for n in (1, 3, 4, 5, 14, 66, 137)]
    layer.run(requests, chunks)
    for request in requests:
        layer.check(request)


@pytest.mark.parametrize("kind", tiered(KINDS, ["C4A"], quick_on_gpu=KINDS))
def test_decode_steps_of_several_tokens(kind, device):
    """With a threshold of 3, up to 3 tokens of a request go through the decode path."""
    layer = Layer(kind, device)
    layer.session.decode_query_len = 3
    requests = [layer.request(n) for n in (40, 29, 150)]
    layer.step([(requests[0], 3), (requests[1], 20), (requests[2], 126)])
    step = layer.session.step
    assert (required(step).num_decodes, required(step).num_decode_tokens, required(step).num_prefills) == (1, 3, 2)
    layer.run(requests, [3, 2, 1, 3])
    for request in requests:
        layer.check(request)


@pytest.mark.parametrize("kind", EACH_KIND)
def test_after_a_rollback_and_in_a_fork(kind, device):
    """Tokens taken back leave no trace, in window, entries and open windows alike."""
    layer = Layer(kind, device)
    request = layer.request(150)
    layer.step([(request, 127)])
    fork = layer.fork(request)
    real, request.x = request.x, request.x.clone()
    request.x[127:132] = 50.0
    layer.step([(request, 5)])
    layer.truncate(request, 127)
    request.x = real
    fork.x[127:] = torch.randn_like(fork.x[127:])
    layer.run([request, fork], [1, 4, 30])
    layer.check(request)
    layer.check(fork)


@pytest.mark.parametrize("kind", ["SWA", "C4A", "C128A"])
def test_only_decodes_never_prefill_and_the_reverse(kind, monkeypatch):
    layer = Layer(kind)
    impl, called = layer.attn.impl, []
    for name in ("attend_pages", "attend_rows"):
        original = getattr(impl, name)
        monkeypatch.setattr(impl, name, lambda *args, _n=name, _o=original: called.append(_n) or _o(*args))
    requests = [layer.request(n) for n in (20, 12)]
    layer.run(requests, [8])
    assert called == ["attend_rows"] * 3
    called.clear()
    more = [layer.request(3), layer.request(2)]
    layer.run(more, [1])
    assert called == ["attend_pages"] * 3
    for request in requests + more:
        layer.check(request)


@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_request_without_new_tokens_changes_nothing(kind, device):
    layer = Layer(kind, device)
    waiting, decoding, prefilling = layer.request(30), layer.request(21), layer.request(9)
    layer.step([(waiting, 15), (decoding, 20)])
    layer.step([(waiting, 0), (decoding, 1), (prefilling, 9)])
    layer.run([waiting], [1, 14])
    for request in (waiting, decoding, prefilling):
        layer.check(request)


# isolation


@pytest.mark.parametrize("kind", tiered(KINDS, ["C4A"], quick_on_gpu=KINDS))
def test_requests_of_one_chunk_never_see_each_other(kind, device):
    """Replacing one request leaves every bit of the others, in prefill and in decode."""
    outputs = []
    for neighbour_scale in (1.0, 1000.0):
        torch.manual_seed(3)
        layer = Layer(kind, device)
        first, second, third = (layer.request(n) for n in (40, 33, 140))
        second.x *= neighbour_scale
        layer.run([first, second, third], [30, 1, 1, 5])
        outputs.append((torch.cat(first.outputs), torch.cat(second.outputs), torch.cat(third.outputs)))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][2], outputs[1][2])
    assert not torch.equal(outputs[0][1], outputs[1][1])


@pytest.mark.parametrize("kind", tiered(KINDS, ["C4A"], quick_on_gpu=KINDS))
def test_later_tokens_never_change_earlier_ones(kind, device):
    """Bit for bit, for positions around the ends of compression windows."""
    outputs = []
    for changed in (None, 128, 63, 16, 15, 8, 3):
        torch.manual_seed(5)
        layer = Layer(kind, device)
        request = layer.request(140)
        if changed is not None:
            request.x[changed:] = 7.0
        layer.run([request], [140])
        outputs.append((changed, torch.cat(request.outputs)))
    for changed, out in outputs[1:]:
        assert torch.equal(out[:changed], outputs[0][1][:changed])
        assert not torch.equal(out[changed], outputs[0][1][changed])


@pytest.mark.parametrize("kind", ["SWA", "C4A", "C16A_overlap"])
def test_a_key_leaves_the_window_after_exactly_window_tokens(kind):
    """Token 0 is read through the window up to position 12; what remains later is its compressed entry."""
    outputs = []
    for scale in (1.0, 3.0):
        torch.manual_seed(1)
        layer = Layer(kind)
        request = layer.request(15)
        request.x[0] = -request.x[0] if scale == 3.0 else request.x[0]
        layer.run([request], [15])
        outputs.append(torch.cat(request.outputs))
    differs = (outputs[0] != outputs[1]).any(-1).tolist()
    assert all(differs[:WINDOW])
    assert differs[WINDOW:] == [kind == "C4A"] * 2


# padding


@pytest.mark.parametrize("kind", EACH_KIND)
def test_padding_requests_give_zeros_and_touch_nothing(kind, device):
    """A decode row that only fills up a batch: null tables, not valid, NaN inputs."""
    layer = Layer(kind, device)
    request, late = layer.request(20), layer.request(11)
    layer.step([(request, 19)])
    step = layer.step_input([(request, 1), (late, 11)])
    step.query_lens = torch.tensor([1, 1, 1, 11])
    step.seq_lens = torch.tensor([20, 1, 4, 11])
    row = torch.tensor([0, 0, 0, 1])
    step.block_tables = {group: table[row] for group, table in step.block_tables.items()}
    for table in step.block_tables.values():
        table[1:3] = 0
    step.token_valid = torch.tensor([True, False, False, *[True] * 11])
    x = torch.cat([request.x[19:], torch.full((2, 48), float("nan"), device=device), late.x])
    before = {(p.spec.layer, p.spec.kind): p.tensor[0].clone() for p in layer.runner.pools}
    out = layer.forward(x, step)
    assert out[1:3].eq(0).all()
    if layer.attn.indexer is not None:
        assert required(layer.attn.topk_indices_buffer)[1:3].eq(-1).all()
    for pool in layer.runner.pools:
        null_page = before[pool.spec.layer, pool.spec.kind]
        assert torch.equal(pool.tensor[0].view(torch.uint8), null_page.view(torch.uint8))
    for owner, rows in ((request, slice(0, 1)), (late, slice(3, None))):
        owner.outputs.append(out[rows])
        if layer.attn.indexer is not None:
            owner.selected.append(required(layer.attn.topk_indices_buffer)[: len(x)][rows].clone())
        layer.check(owner)


@pytest.mark.parametrize("kind", EACH_KIND)
def test_padding_tokens_at_the_end_of_a_prefill(kind, device):
    """Rows 26..29 are not valid: zeros, and computed again in the next step as if they had never been."""
    layer = Layer(kind, device)
    request = layer.request(45)
    step = layer.step_input([(request, 30)])
    step.token_valid = torch.arange(30) < 26
    x = request.x[:30].clone()
    x[26:] = float("nan")
    out = layer.forward(x, step)
    assert out[26:].eq(0).all()
    request.outputs.append(out[:26])
    if layer.attn.indexer is not None:
        assert required(layer.attn.topk_indices_buffer)[26:30].eq(-1).all()
        request.selected.append(required(layer.attn.topk_indices_buffer)[:26].clone())
    layer.runner.manager.commit(request.sequence.cache, 26)
    layer.run([request], [6, 1, 30])
    layer.check(request)


@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_step_of_padding_only(kind, device):
    layer = Layer(kind, device)
    request = layer.request(8)
    step = layer.step_input([(request, 8)])
    step.token_valid = torch.zeros(8, dtype=torch.bool)
    assert layer.forward(request.x, step).eq(0).all()
    layer.run([request], [8])
    layer.check(request)


# sinks


def test_an_infinite_sink_takes_all_the_weight_and_none():
    layer = Layer("C4A")
    request = layer.request(30)
    required(layer.attn.attn_sink).fill_(float("inf"))
    layer.run([request], [20, 1])
    assert torch.cat(request.outputs).eq(0).all()
    layer = Layer("C4A")
    required(layer.attn.attn_sink).fill_(float("-inf"))
    layer.reference.weights["attn_sink"] = required(layer.attn.attn_sink).double()
    request = layer.request(30)
    layer.run([request], [20, 1])
    layer.check(request)


# warm-up and workspace


@pytest.mark.parametrize("kind", EACH_KIND)
def test_warm_up_reserves_the_workspace_and_gives_zeros(kind, device):
    layer = Layer(kind, device)
    layer.attn.workspace = Workspace(device)
    before = [pool.tensor.view(torch.uint8).clone() for pool in layer.runner.pools]
    out = layer.attn(torch.randn(3, 48, device=device), torch.tensor([0, 5, 2], device=device), None)
    assert out.eq(0).all()
    ratio = layer.attn.compress_ratio
    rows = (-(-420 // ratio) if ratio else 0) + WINDOW + 300
    assert layer.attn.prefill_workspace_rows == 4 * rows
    assert layer.attn.workspace.nbytes() == aligned_bytes((4, rows, 32), torch.float32)
    assert layer.runner.workspace.locked
    assert layer.runner.workspace.nbytes() == layer.attn.workspace.nbytes()
    for pool, content in zip(layer.runner.pools, before, strict=True):
        assert torch.equal(pool.tensor.view(torch.uint8), content)


@pytest.mark.parametrize("kind", tiered(KINDS, ["C4A"], quick_on_gpu=KINDS))
def test_prefills_that_need_several_chunks_of_the_workspace(kind, monkeypatch):
    ratio = Layer(kind).attn.compress_ratio
    capacity = (-(-200 // ratio) if ratio else 0) + WINDOW + 100
    sizes: dict[str, Any] = {"max_model_len": 200, "max_num_batched_tokens": 100, "max_num_seqs": 9}
    layer = Layer(kind, prefill_workspace_rows=capacity, **sizes)
    plans = []
    monkeypatch.setattr(
        flow, "plan_prefill_chunks", lambda *args: plans.append(plan_prefill_chunks(*args)) or plans[-1]
    )
    requests = [layer.request(n) for n in (90, 60, 5, 130, 17, 64)]
    layer.run(requests, [16])
    layer.run(more := [layer.request(n) for n in (60, 7, 30)], [100])
    assert len(plans[-1]) == 2
    assert all((c.last - c.first) * (c.N + c.window_rows) <= capacity for plan in plans for c in plan)
    for request in requests + more:
        layer.check(request)


@pytest.mark.parametrize("kind", EACH_KIND)
def test_the_longest_request_in_the_largest_step_fits(kind):
    """Full length, and a last step that takes the whole token budget; the workspace is locked."""
    layer = Layer(kind, max_model_len=200, max_num_batched_tokens=150, max_num_seqs=1)
    request = layer.request(200)
    layer.run([request], [50, 150])
    layer.check(request)


def chunks_of(seq_lens, gather_lens, ratio, capacity):
    plan = plan_prefill_chunks(torch.tensor(seq_lens), torch.tensor(gather_lens), ratio, capacity)
    return [(c.first, c.last, c.N, c.window_rows) for c in plan]


@pytest.mark.parametrize(
    ("seq_lens", "gather_lens", "ratio", "capacity", "expected"),
    [
        ([], [], 4, 100, []),
        ([40], [40], 4, 50, [(0, 1, 10, 40)]),
        ([40, 40], [40, 40], 4, 100, [(0, 2, 10, 40)]),
        ([40, 40], [40, 40], 4, 99, [(0, 1, 10, 40), (1, 2, 10, 40)]),
        ([40, 40], [40, 40], 0, 80, [(0, 2, 0, 40)]),
        ([8] * 9, [8] * 9, 4, 100, [(0, 9, 2, 8)]),
        ([4, 400], [4, 20], 4, 240, [(0, 2, 100, 20)]),
        ([4, 400], [4, 20], 4, 239, [(0, 1, 1, 4), (1, 2, 100, 20)]),
        ([400, 4, 4], [20, 4, 4], 4, 240, [(0, 2, 100, 20), (2, 3, 1, 4)]),
        ([127, 128], [5, 5], 128, 12, [(0, 2, 1, 5)]),
    ],
    ids=str,
)
def test_plan_prefill_chunks(seq_lens, gather_lens, ratio, capacity, expected):
    assert chunks_of(seq_lens, gather_lens, ratio, capacity) == expected


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_plan_takes_every_request_once_in_order_and_stays_within_capacity(ratio):
    generator = torch.Generator().manual_seed(ratio)
    longest, budget, window = 1000, 200, 13
    capacity = 4 * ((-(-longest // ratio) if ratio else 0) + window + budget)
    for _ in range(200):
        count = int(torch.randint(1, 30, (1,), generator=generator))
        query = torch.randint(1, budget + 1, (count,), generator=generator)
        prefix = torch.randint(0, longest - budget + 1, (count,), generator=generator)
        gather = query + prefix.clamp(max=window - 1)
        plan = plan_prefill_chunks(prefix + query, gather, ratio, capacity)
        assert [i for chunk in plan for i in range(chunk.first, chunk.last)] == list(range(count))
        for chunk in plan:
            own = slice(chunk.first, chunk.last)
            assert (chunk.last - chunk.first) * (chunk.N + chunk.window_rows) <= capacity
            entries = int((prefix + query)[own].max()) // ratio if ratio else 0
            assert (chunk.N, chunk.window_rows) == (entries, int(gather[own].max()))


# quantised caches


@pytest.mark.parametrize(
    ("kind", "numerics"),
    tiered(product(["SWA", "C4A", "C128A"], ["official", "serving"]), [("C4A", "serving")], (), [("SWA", "official")]),
)
def test_decode_and_prefill_read_the_same_quantised_keys(kind, numerics, device):
    """The same tokens through the gathered workspace and through the pages, with FP8 entries."""
    config = ModelConfig.from_preset("tiny")
    outputs = []
    for chunks in ([150], [40, 1]):
        torch.manual_seed(2)
        layer = Layer(kind, device, config, numerics=numerics)
        request = layer.request(60 if kind != "C128A" else 134)
        layer.run([request], chunks)
        outputs.append(torch.cat(request.outputs))
    assert required(layer.attn.swa_cache).record.name == "fp8_v4"
    error = (outputs[0] - outputs[1]).abs().amax() / outputs[0].abs().mean()
    assert error < 0.05
    assert outputs[0].isfinite().all()
