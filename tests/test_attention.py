"""One attention layer alone, driven by hand, against a dense computation of every query.

This is also how to unit-test a layer: ``ModelRunner.from_config(..., attention_only=True, layers=[i])`` builds it with
its caches, a ``MetadataBuilder`` turns a hand-made ``StepInput`` into what the layer reads.
"""

from dataclasses import dataclass, field

import pytest
import torch

from deepseek_attn.config import ModelConfig
from deepseek_attn.impls import flow
from deepseek_attn.impls.flow import plan_prefill_chunks
from deepseek_attn.metadata import MetadataBuilder, StepInput
from deepseek_attn.runner import ModelRunner
from deepseek_attn.workspace import Workspace, aligned_bytes

KINDS = ["SWA", "C4A", "C128A", "C8A", "C16A_overlap"]
WINDOW, TOPK, ROLLBACK = 13, 5, 5
NAN_BYTE = 0xFF  # 0xFFFFFFFF and 0xFFFF are NaN in float32 and bfloat16


def small_config():
    """Sizes that share no factor by accident; layer i is ``KINDS[i]``."""
    return ModelConfig.from_preset("tiny").replace(
        num_hidden_layers=5, compress_ratios=[0, 4, 128, 8, 16], compress_overlap={"16": True}, num_hash_layers=0,
        num_nextn_predict_layers=0, quantization_config=None, hidden_size=48, num_attention_heads=6, head_dim=32,
        qk_rope_head_dim=8, q_lora_rank=24, o_groups=3, o_lora_rank=10, sliding_window=WINDOW, index_n_heads=8,
        index_head_dim=16, index_topk=TOPK,
    )  # fmt: skip


@dataclass
class Request:
    """Inputs ``x [length, hidden]`` of one sequence, its cache and the outputs so far."""

    x: torch.Tensor
    cache: object
    outputs: list = field(default_factory=list)
    selected: list = field(default_factory=list)

    @property
    def left(self):
        return len(self.x) - self.cache.num_tokens


class Layer:
    """One attention layer with NaN in everything that nobody has written."""

    def __init__(self, kind="SWA", device="cpu", config=None, **options):
        config = config or small_config()
        index = KINDS.index(kind)
        options = {"max_model_len": 420, "max_num_seqs": 8, "max_num_batched_tokens": 300, **options}
        self.runner = ModelRunner.from_config(
            config, attention_only=True, layers=[index], device=device, dtype="float32", backend="reference",
            **{"numerics": "exact", "max_rollback": ROLLBACK, **options},
        )  # fmt: skip
        self.config, self.device, self.kind = config, device, kind
        self.attn = self.runner.model.layers[str(index)].attn
        self.builder = MetadataBuilder((self.attn.spec,), self.runner.layout, device)
        for pool in self.runner.pools:
            pool.tensor.view(torch.uint8).fill_(NAN_BYTE)

    def request(self, length):
        x = torch.randn(length, self.config.hidden_size, device=self.device)
        return Request(x, self.runner.manager.create())

    def poison(self):
        """Scratch memory means nothing between calls."""
        (everything,) = self.runner.workspace.get(((self.runner.workspace.nbytes(),), torch.uint8))
        everything.fill_(NAN_BYTE)
        if self.attn.topk_indices_buffer is not None:
            self.attn.topk_indices_buffer.fill_(2**31 - 1)

    def step_input(self, work, threshold=1):
        """``work``: (request, new tokens). Reserves the pages."""
        manager, caches = self.runner.manager, [request.cache for request, _ in work]
        manager.reserve([(request.cache, n) for request, n in work])
        query_lens = torch.tensor([n for _, n in work])
        seq_lens = torch.tensor([cache.num_tokens for cache in caches]) + query_lens
        tables = {group: manager.block_table(caches, group) for group in self.runner.layout.pages}
        return StepInput(query_lens, seq_lens, tables, decode_threshold=threshold)

    @torch.no_grad()
    def forward(self, x, step_input):
        self.poison()
        step = self.builder.build(step_input)
        return self.attn(x, step.positions, step)

    def step(self, work, threshold=1):
        step_input = self.step_input(work, threshold)
        x = torch.cat([r.x[r.cache.num_tokens : r.cache.num_tokens + n] for r, n in work])
        parts = self.forward(x, step_input).split([n for _, n in work])
        selected = [None] * len(work)
        if self.attn.indexer is not None:
            selected = self.attn.topk_indices_buffer[: len(x)].clone().split([n for _, n in work])
        for (request, n), part, chosen in zip(work, parts, selected, strict=True):
            request.outputs.append(part)
            request.selected.append(chosen)
            self.runner.manager.commit(request.cache, n)

    def run(self, requests, chunks, threshold=1):
        """Computes all requests together, each in chunks of these sizes (the last one repeats)."""
        index = 0
        while pending := [r for r in requests if r.left]:
            size = chunks[min(index, len(chunks) - 1)]
            work = [(r, min(size, r.left)) for r in pending]
            self.step(sorted(work, key=lambda pair: pair[1] > threshold), threshold)
            index += 1

    def check(self, request):
        expected = Dense(self).attend(request)
        torch.testing.assert_close(torch.cat(request.outputs).cpu().double(), expected, rtol=1e-4, atol=1e-4)


class Dense:
    """The layer's mathematics per query, in float64 and without any cache."""

    def __init__(self, layer):
        self.attn, self.config = layer.attn, layer.config
        self.spec, self.eps = layer.attn.spec, layer.config.rms_norm_eps
        table = layer.attn.rope.cos_sin.cpu().double()
        self.phase = torch.complex(*table.chunk(2, dim=1))

    def linear(self, module, x):
        return x @ module.weight.cpu().double().T

    def norm(self, x, module=None):
        y = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return y if module is None else y * module.weight.cpu().double()

    def rotate(self, x, position, conjugate=False):
        """Last channels of ``x [..., d]`` at one position."""
        phase = self.phase[position].conj() if conjugate else self.phase[position]
        dim = 2 * len(phase)
        pairs = torch.view_as_complex(x[..., -dim:].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([x[..., :-dim], torch.view_as_real(pairs * phase).flatten(-2)], -1)

    def entries(self, compressor, x):
        """All compressed entries of a sequence: one per closed window."""
        ratio, dim = self.spec.ratio, compressor.head_dim
        ape = compressor.ape.cpu().double()
        kv, score = self.linear(compressor.wkv, x), self.linear(compressor.wgate, x)
        score = score + ape[torch.arange(len(x)) % ratio]
        out = []
        for w in range(len(x) // ratio):
            own = range(w * ratio, (w + 1) * ratio)
            slots = (
                [(p, slice(0, dim)) for p in range((w - 1) * ratio, w * ratio) if p >= 0] if self.spec.overlap else []
            )
            slots += [(p, slice(dim, None) if self.spec.overlap else slice(0, dim)) for p in own]
            scores = torch.stack([score[p, half] for p, half in slots])
            values = torch.stack([kv[p, half] for p, half in slots])
            pooled = (scores.softmax(0) * values).sum(0)
            out.append(self.rotate(self.norm(pooled, compressor.norm), w * ratio))
        return torch.stack(out) if out else torch.empty(0, dim, dtype=torch.float64)

    def chosen(self, x, qr, t, keys, selected):
        """The indexer's choice for query ``t``, after checking that no better entry was left out."""
        indexer, visible = self.attn.indexer, (t + 1) // self.spec.ratio
        picked = [e for e in selected.tolist() if e >= 0]
        assert len(set(picked)) == len(picked) == min(TOPK, visible)
        assert all(e < visible for e in picked)
        if visible > TOPK:
            q = self.linear(indexer.wq_b, qr[t]).view(indexer.heads, indexer.head_dim)
            weights = self.linear(indexer.weights_proj, x[t]) * indexer.head_dim**-0.5 * indexer.heads**-0.5
            scores = ((self.rotate(q, t) @ keys[:visible].T).relu() * weights[:, None]).sum(0)
            best = scores.topk(TOPK).values
            assert scores[picked].min() >= best.min() - 1e-5
        return picked

    def attend(self, request):
        attn, x, spec = self.attn, request.x.cpu().double(), self.spec
        qr = self.norm(self.linear(attn.wq_a, x), attn.q_norm)
        q = self.norm(self.linear(attn.wq_b, qr).unflatten(-1, (attn.num_heads, -1)))
        kv = self.norm(self.linear(attn.wkv, x), attn.kv_norm)
        kv = torch.stack([self.rotate(row, p) for p, row in enumerate(kv)])
        entries = self.entries(attn.compressor, x) if spec.ratio else kv[:0]
        if spec.has_indexer:
            keys, selected = self.entries(attn.indexer.compressor, x), torch.cat(request.selected)
        wo_a = attn.wo_a.weight.cpu().double().view(self.config.o_groups, self.config.o_lora_rank, -1)
        sink, out = attn.attn_sink.cpu().double(), []
        for t in range(len(x)):
            if spec.has_indexer:
                visible = self.chosen(x, qr, t, keys, selected[t])
            else:
                visible = list(range((t + 1) // spec.ratio)) if spec.ratio else []
            seen = torch.cat([entries[visible], kv[max(0, t - WINDOW + 1) : t + 1]])
            logits = self.rotate(q[t], t) @ seen.T * self.config.head_dim**-0.5
            weights = torch.cat([logits, sink[:, None]], 1).softmax(1)[:, :-1]
            o = self.rotate(weights @ seen, t, conjugate=True).view(self.config.o_groups, -1)
            out.append(self.linear(attn.wo_b, torch.einsum("gro,go->gr", wo_a, o).flatten()))
        return torch.stack(out)


# against the dense computation

SCHEDULES = {
    "one_prefill": [300],
    "chunks_of_awkward_sizes": [1, 2, 3, 5, 17, 64, 31, 65],
    "prefix_then_longer_than_the_window": [5, 70],
    "prefill_then_decode": [30, 1],
    "multiples_of_the_window": [WINDOW],
}


@pytest.mark.parametrize("chunks", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_request(kind, chunks, device):
    layer = Layer(kind, device)
    request = layer.request({"C128A": 263, "SWA": 77, "C16A_overlap": 133}.get(kind, 90))
    layer.run([request], chunks)
    layer.check(request)


@pytest.mark.parametrize("chunks", [[300], [7, 1, 1, 40], [2, 6, 11]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_many_lengths_together(kind, chunks, device):
    """Decodes beside prefills; lengths around the window, the ratios and page ends."""
    layer = Layer(kind, device)
    requests = [layer.request(n) for n in (1, 3, 4, 5, 14, 66, 137)]
    layer.run(requests, chunks)
    for request in requests:
        layer.check(request)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_of_several_tokens(kind, device):
    """With a threshold of 3, up to 3 tokens of a request go through the decode path."""
    layer = Layer(kind, device)
    requests = [layer.request(n) for n in (40, 29, 150)]
    layer.step([(requests[0], 3), (requests[1], 20), (requests[2], 126)], threshold=3)
    swa = layer.attn.step.swa
    assert (swa.num_decodes, swa.num_decode_tokens, swa.num_prefills) == (1, 3, 2)
    layer.run(requests, [3, 2, 1, 3], threshold=3)
    for request in requests:
        layer.check(request)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_rollback_and_in_a_fork(kind, device):
    """Tokens taken back leave no trace, in window, entries and open windows alike."""
    layer = Layer(kind, device)
    request = layer.request(150)
    layer.step([(request, 127)])
    fork = Request(request.x.clone(), layer.runner.manager.fork(request.cache))
    fork.outputs, fork.selected = list(request.outputs), list(request.selected)
    keep = len(fork.outputs)
    real, request.x = request.x, request.x.clone()
    request.x[127:132] = 50.0
    layer.step([(request, 5)])
    assert layer.runner.manager.truncate(request.cache, 127) == 127
    request.x = real
    del request.outputs[keep:], request.selected[keep:]
    fork.x[127:] = torch.randn_like(fork.x[127:])
    layer.run([request, fork], [1, 4, 30])
    layer.check(request)
    layer.check(fork)


@pytest.mark.parametrize("kind", ["SWA", "C4A", "C128A"])
def test_only_decodes_never_prefill_and_the_reverse(kind, monkeypatch):
    layer = Layer(kind)
    impl, called = layer.attn.impl, []
    for name in ("_forward_decode", "_forward_prefill"):
        original = getattr(impl, name)
        monkeypatch.setattr(impl, name, lambda *args, _n=name, _o=original: called.append(_n) or _o(*args))
    requests = [layer.request(n) for n in (20, 12)]
    layer.run(requests, [8])
    assert called == ["_forward_prefill"] * 3
    called.clear()
    more = [layer.request(3), layer.request(2)]
    layer.run(more, [1])
    assert called == ["_forward_decode"] * 3
    for request in requests + more:
        layer.check(request)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_without_new_tokens_changes_nothing(kind, device):
    layer = Layer(kind, device)
    waiting, decoding, prefilling = layer.request(30), layer.request(21), layer.request(9)
    layer.step([(waiting, 15), (decoding, 20)])
    layer.step([(waiting, 0), (decoding, 1), (prefilling, 9)])
    layer.run([waiting], [1, 14])
    for request in (waiting, decoding, prefilling):
        layer.check(request)


# isolation


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
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
        assert layer.attn.topk_indices_buffer[1:3].eq(-1).all()
    for pool in layer.runner.pools:
        null_page = before[pool.spec.layer, pool.spec.kind]
        assert torch.equal(pool.tensor[0].view(torch.uint8), null_page.view(torch.uint8))
    for owner, rows in ((request, slice(0, 1)), (late, slice(3, None))):
        owner.outputs.append(out[rows])
        if layer.attn.indexer is not None:
            owner.selected.append(layer.attn.topk_indices_buffer[: len(x)][rows].clone())
        layer.check(owner)


@pytest.mark.parametrize("kind", KINDS)
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
        assert layer.attn.topk_indices_buffer[26:30].eq(-1).all()
        request.selected.append(layer.attn.topk_indices_buffer[:26].clone())
    layer.runner.manager.commit(request.cache, 26)
    layer.run([request], [6, 1, 30])
    layer.check(request)


@pytest.mark.parametrize("kind", KINDS)
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
    layer.attn.attn_sink.fill_(float("inf"))
    layer.run([request], [20, 1])
    assert torch.cat(request.outputs).eq(0).all()
    layer = Layer("C4A")
    layer.attn.attn_sink.fill_(float("-inf"))
    request = layer.request(30)
    layer.run([request], [20, 1])
    layer.check(request)


# warm-up and workspace


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_reserves_the_workspace_and_gives_zeros(kind, device):
    layer = Layer(kind, device)
    layer.attn.workspace = Workspace(device)
    before = [pool.tensor.view(torch.uint8).clone() for pool in layer.runner.pools]
    out = layer.attn(torch.randn(3, 48, device=device), torch.tensor([0, 5, 2], device=device), None)
    assert out.eq(0).all()
    ratio = layer.attn.compress_ratio
    rows = (-(-420 // ratio) if ratio else 0) + WINDOW + 300
    assert layer.attn.workspace_rows() == rows
    assert layer.attn.workspace.nbytes() == aligned_bytes((4, rows, 32), torch.float32)
    assert layer.runner.workspace.locked
    assert layer.runner.workspace.nbytes() == layer.attn.workspace.nbytes()
    for pool, content in zip(layer.runner.pools, before, strict=True):
        assert torch.equal(pool.tensor.view(torch.uint8), content)


@pytest.mark.parametrize("kind", KINDS)
def test_prefills_that_need_several_chunks_of_the_workspace(kind, monkeypatch):
    layer = Layer(kind, max_model_len=200, max_num_batched_tokens=100, max_num_seqs=9)
    capacity = layer.attn.workspace_rows()
    monkeypatch.setattr(layer.attn.impl, "PREFILL_CHUNK_SIZE", 1)
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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("numerics", ["official", "serving"])
@pytest.mark.parametrize("kind", ["SWA", "C4A", "C128A"])
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
    assert layer.attn.swa_cache.record.name == "fp8_ds_mla"
    error = (outputs[0] - outputs[1]).abs().amax() / outputs[0].abs().mean()
    assert error < 0.05
    assert outputs[0].isfinite().all()
