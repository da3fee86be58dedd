"""One attention layer alone, driven by hand, and a dense computation of every query to compare it with.

This is how to unit-test a layer: ``ModelRunner.from_config(..., attention_only=True, layers=[i])`` builds it with its
caches, a ``MetadataBuilder`` builds the metadata of a hand-made ``StepInput``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepseek_attn.attention.builder import MetadataBuilder, StepInput
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.runner.model_runner import ModelRunner

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
    """One attention layer; every byte of its caches that no step has written is NaN."""

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
        """Overwrites scratch memory, whose content must not matter between calls."""
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
        """Computes all requests together, each in chunks of these sizes; the last size repeats."""
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
