"""One attention layer in float32: weights dequantised, keys as the caches hold them, one list of slots per query.

Nothing of a step's metadata is used: which slots a query reads follows from positions and page tables, with plain
indexing. Of the library: the codec of cache records, the weights' source and the frequencies of RoPE.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepseek_attn.cache.layout import TOKENS, WINDOW, ratio_group
from deepseek_attn.cache.pools import Pool
from deepseek_attn.checkpoint import CheckpointSource, read_float32
from deepseek_attn.config import DeepseekV32Config, ModelConfig
from deepseek_attn.layers.rope import inverse_frequencies
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.testing import relative_error
from tests.support.report import INF
from tests.support.typed import required

BLOCK_BYTES = 256 << 20


class Tokens(NamedTuple):
    """New tokens of a step; ``tables``: int64 ``[B, pages]`` by group. Tokens that are not ``valid`` see nothing."""

    positions: Tensor
    requests: Tensor
    valid: Tensor
    tables: dict[str, Tensor]

    def slots(self, group: str, pool: Pool, entries: Tensor) -> Tensor:
        """Slots of ``entries [T, K]`` of each token's request; -1 for negative ones and for tokens without keys."""
        pages = self.tables[group][self.requests[:, None], entries.clamp(min=0) // pool.entries]
        found = pages * pool.entries + entries.clamp(min=0) % pool.entries
        return torch.where((entries >= 0) & self.valid[:, None], found, -1)


class Keys(NamedTuple):
    """``slots [T, K]`` of a pool, -1 for none."""

    pool: Pool
    slots: Tensor


def softmax_over(q: Tensor, keys: list[Keys], scale: float, sink: Tensor | None = None, d_v: int | None = None):
    """Attention ``[T, H, d_v]`` of ``q [T, H, d]`` over all ``keys`` under one softmax; 0 without any."""
    width = sum(part.slots.shape[1] for part in keys)
    out = torch.zeros(*q.shape[:2], q.shape[2] if d_v is None else d_v, device=q.device)
    step = max(1, BLOCK_BYTES // (4 * width * (q.shape[2] + q.shape[1])))
    for start in range(0, len(q), step):
        rows = slice(start, start + step)
        read = torch.cat([part.pool.gather(part.slots[rows], torch.float32) for part in keys], 1)
        seen = torch.cat([part.slots[rows] >= 0 for part in keys], 1)[:, None]
        logits = torch.einsum("thd,tkd->thk", q[rows].float(), read) * scale
        logits = torch.where(seen, logits, -INF)
        if sink is not None:
            logits = torch.cat([logits, sink.expand(len(logits), -1)[..., None]], 2)
        weights = logits.softmax(2).masked_fill(~seen.any(2, keepdim=True), 0)[..., : read.shape[1]]
        out[rows] = torch.einsum("thk,tkd->thd", weights, read[..., :d_v])
    return out


class LayerOracle:
    """What both families share. ``x``: hidden states ``[T, hidden_size]``; weights are looked up below ``prefix``."""

    prefix: str

    def __init__(self, runner: ModelRunner, index: int, source: CheckpointSource):
        self.config, self.device, self.source = runner.config, runner.device, source
        self.spec, self.pools = runner.config.layers[index], runner.pools
        self.eps, self.rope_dim = runner.config.rms_norm_eps, runner.config.qk_rope_head_dim
        self.weights: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.weights:
            self.weights[name] = self.read(f"{self.prefix}.{name}").to(self.device)
        return self.weights[name]

    def read(self, name: str) -> Tensor:
        """A tensor of the source in float32."""
        return read_float32(self.source, name)

    def pool(self, kind: str) -> Pool:
        return self.pools[f"layers.{self.spec.index}", kind]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str | None = None, eps: float | None = None) -> Tensor:
        y = x * (x.square().mean(-1, keepdim=True) + (self.eps if eps is None else eps)).rsqrt()
        return y if name is None else y * self[f"{name}.weight"]

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Rotates the last channels of ``x [T, ..., d]``, pairs of neighbours. Angles are float32, as published."""
        angles = positions.cpu().float()[:, None] * inverse_frequencies(self.spec.rope)
        cos, sin = (f(angles.double()).float().to(x.device) for f in (torch.cos, torch.sin))
        cos, sin = (t.view(len(x), *[1] * (x.dim() - 2), -1) for t in (cos, -sin if inverse else sin))
        a, b = x[..., -self.rope_dim :: 2], x[..., -self.rope_dim + 1 :: 2]
        pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        return torch.cat([x[..., : -self.rope_dim], pairs], -1)


class V4LayerOracle(LayerOracle):
    """A layer of DeepSeek-V4."""

    def __init__(self, runner: ModelRunner, index: int, source: CheckpointSource):
        super().__init__(runner, index, source)
        assert isinstance(runner.config, ModelConfig)
        self.config, self.spec = runner.config, runner.config.layers[index]
        self.prefix = f"layers.{index}.attn"
        self.scale = self.config.head_dim**-0.5

    def keys(self, tokens: Tokens, selected: Tensor | None) -> list[Keys]:
        """The window, then compressed entries: those in ``selected [T, K]`` (-1 for none), or all that are closed."""
        window = tokens.positions[:, None] - torch.arange(self.config.sliding_window, device=self.device)
        pool = self.pool("window")
        found = [Keys(pool, tokens.slots(WINDOW, pool, window))]
        if ratio := self.spec.ratio:
            if selected is None:
                closed = (tokens.positions[:, None] + 1) // ratio
                entries = torch.arange(int(closed.max()), device=self.device)
                selected = torch.where(entries < closed, entries, -1)
            pool = self.pool("compressed")
            found.append(Keys(pool, tokens.slots(ratio_group(ratio), pool, selected.long())))
        return found

    def attend(self, q: Tensor, tokens: Tokens, selected: Tensor | None) -> Tensor:
        return softmax_over(q, self.keys(tokens, selected), self.scale, self["attn_sink"])

    def latent(self, x: Tensor) -> Tensor:
        return self.norm(self.linear("wq_a", x), "q_norm")

    def __call__(self, x: Tensor, tokens: Tokens, selected: Tensor | None) -> Tensor:
        """The layer's output ``[T, hidden_size]``."""
        config, x = self.config, x.float()
        q = self.norm(self.linear("wq_b", self.latent(x)).unflatten(1, (config.num_attention_heads, -1)))
        out = self.attend(self.rotate(q, tokens.positions), tokens, selected)
        out = self.rotate(out, tokens.positions, inverse=True).reshape(len(x), config.o_groups, -1)
        wo_a = self["wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
        out = self.linear("wo_b", torch.einsum("tgi,goi->tgo", out, wo_a).flatten(1))
        return out.masked_fill(~tokens.valid[:, None], 0)

    def written(self, x: Tensor, tokens: Tokens) -> dict[str, float]:
        """Errors of the keys that this step has written: the window's, and entries whose tokens are all in it."""
        x, valid, pool = x.float(), tokens.valid, self.pool("window")
        slots = tokens.slots(WINDOW, pool, tokens.positions[:, None])[valid, 0]
        kv = self.rotate(self.norm(self.linear("wkv", x), "kv_norm"), tokens.positions)[valid]
        errors = {"window keys": relative_error(pool.gather(slots, torch.float32), kv)}
        if self.spec.ratio:
            errors["entries"] = self.entries_error("compressor", "compressed", x, tokens)
        if self.spec.has_indexer:
            errors["index keys"] = self.entries_error("indexer.compressor", "index", x, tokens)
        return errors

    def entries_error(self, name: str, kind: str, x: Tensor, tokens: Tokens) -> float:
        ratio, overlap, worst = self.spec.ratio, self.spec.overlap, 0.0
        pool, group, dim = self.pool(kind), ratio_group(ratio), len(self[f"{name}.norm.weight"])
        for request in tokens.requests[tokens.valid].unique().tolist():
            mine = ((tokens.requests == request) & tokens.valid).nonzero()[:, 0]
            first, count = int(tokens.positions[mine[0]]), len(mine)
            values, scores = self.linear(f"{name}.wkv", x[mine]), self.linear(f"{name}.wgate", x[mine])
            scores = scores + self[f"{name}.ape"][tokens.positions[mine] % ratio]
            rows, wins = [], []
            for window in range(first // ratio, (first + count) // ratio):
                start = window * ratio - first
                before = start - ratio if overlap and window else start
                if before < 0:
                    continue  # begins before this step
                value, score = values[start : start + ratio, -dim:], scores[start : start + ratio, -dim:]
                if before < start:
                    value = torch.cat([values[before:start, :dim], value])
                    score = torch.cat([scores[before:start, :dim], score])
                rows.append((score.softmax(0) * value).sum(0))
                wins.append(window)
            if rows:
                wins = torch.tensor(wins, device=self.device)
                expected = self.rotate(self.norm(torch.stack(rows), f"{name}.norm"), wins * ratio)
                pages = tokens.tables[group][request, wins // pool.entries]
                got = pool.gather(pages * pool.entries + wins % pool.entries, torch.float32)
                worst = max(worst, relative_error(got, expected))
        return worst

    def regret(self, x: Tensor, tokens: Tokens, selected: Tensor) -> float:
        """How much worse the selected entries score than the best, of a few queries; infinite for a broken row."""
        pool, visible = self.pool("index"), (tokens.positions + 1) // self.spec.ratio
        x = x.float()
        q = self.linear("indexer.wq_b", self.latent(x)).unflatten(1, (self.config.index_n_heads, -1))
        q, weights = self.rotate(q, tokens.positions), self.linear("indexer.weights_proj", x)
        return selection_regret(q, weights, pool, ratio_group(self.spec.ratio), visible, tokens, selected)


class V32LayerOracle(LayerOracle):
    """A layer of DeepSeek-V3.2. Keys and values are not cached: ``W_UK`` and ``W_UV`` are folded as in a decode."""

    def __init__(self, runner: ModelRunner, index: int, source: CheckpointSource):
        super().__init__(runner, index, source)
        self.prefix = f"model.layers.{index}.self_attn"
        assert isinstance(runner.config, DeepseekV32Config)
        self.config = config = runner.config
        per_head = config.qk_nope_head_dim + config.v_head_dim
        kv_b = self["kv_b_proj.weight"].view(config.num_attention_heads, per_head, config.kv_lora_rank)
        self.k_up, self.v_up = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], 1)

    def read(self, name: str) -> Tensor:
        value, scale = self.source.read(name).float(), f"{name}_scale_inv"
        if scale not in self.source.entries():
            return value
        scale = self.source.read(scale).repeat_interleave(128, 0).repeat_interleave(128, 1)
        return value * scale[: value.shape[0], : value.shape[1]]

    def latent(self, x: Tensor) -> Tensor:
        return self.norm(self.linear("q_a_proj", x), "q_a_layernorm", 1e-6)

    def __call__(self, x: Tensor, tokens: Tokens, selected: Tensor) -> Tensor:
        """The layer's output ``[T, hidden_size]``; ``selected [T, K]``: tokens of the request, -1 for none."""
        config, x = self.config, x.float()
        q = self.linear("q_b_proj", self.latent(x)).unflatten(1, (config.num_attention_heads, -1))
        q = self.rotate(q, tokens.positions)
        q_nope, q_pe = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], 2)
        q = torch.cat([torch.einsum("thp,hpl->thl", q_nope, self.k_up), q_pe], 2)
        pool = self.pool("latent")
        keys = [Keys(pool, tokens.slots(TOKENS, pool, selected.long()))]
        out = softmax_over(q, keys, config.softmax_scale, None, config.kv_lora_rank)
        out = torch.einsum("thl,hvl->thv", out, self.v_up).flatten(1)
        return self.linear("o_proj", out).masked_fill(~tokens.valid[:, None], 0)

    def written(self, x: Tensor, tokens: Tokens) -> dict[str, float]:
        """Errors of the rows that this step has written."""
        config, x, valid, pool = self.config, x.float(), tokens.valid, self.pool("latent")
        slots = tokens.slots(TOKENS, pool, tokens.positions[:, None])[valid, 0]
        latent, k_pe = self.linear("kv_a_proj_with_mqa", x).split([config.kv_lora_rank, config.qk_rope_head_dim], 1)
        latent = self.norm(latent, "kv_a_layernorm", 1e-6)[valid]
        found = pool.gather(slots, torch.float32).split([config.kv_lora_rank, config.qk_rope_head_dim], 1)
        return {
            "latents": relative_error(found[0], latent),
            "rotated keys": relative_error(found[1], self.rotate(k_pe, tokens.positions)[valid]),
            "index keys": relative_error(
                self.pool("index").gather(slots, torch.float32), self.index_keys(x, tokens)[valid]
            ),
        }

    def index_keys(self, x: Tensor, tokens: Tokens) -> Tensor:
        k = self.linear("indexer.wk", x)
        k = torch.nn.functional.layer_norm(
            k, k.shape[1:], self["indexer.k_norm.weight"], self["indexer.k_norm.bias"], 1e-6
        )
        return self.rotate_first(k, tokens.positions)

    def rotate_first(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates the first channels, pairs ``(i, i + n)``."""
        dim = self.rope_dim
        pairs = torch.stack(x[..., :dim].chunk(2, -1), -1).flatten(-2)
        a, b = self.rotate(pairs, positions).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat([a, b, x[..., dim:]], -1)

    def regret(self, x: Tensor, tokens: Tokens, selected: Tensor) -> float:
        """As `V4LayerOracle.regret`."""
        x = x.float()
        q = self.linear("indexer.wq_b", self.latent(x)).unflatten(1, (required(self.config.index_n_heads), -1))
        q, weights = self.rotate_first(q, tokens.positions), self.linear("indexer.weights_proj", x)
        return selection_regret(q, weights, self.pool("index"), TOKENS, tokens.positions + 1, tokens, selected)


def selection_regret(
    q: Tensor, weights: Tensor, pool: Pool, group: str, visible: Tensor, tokens: Tokens, selected: Tensor, most: int = 6
) -> float:
    """Of ``most`` queries at most, the worst ``(best - got) / spread`` of the sums of selected scores.

    ``spread``: what a selection without regard to the scores would lose. Rows must hold distinct visible entries, as
    many as there are or as fit.
    """
    chosen, visible = selected.long(), visible.masked_fill(~tokens.valid, 0)
    counts = (chosen >= 0).sum(1)
    ordered = chosen.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()
    if twice or bool((counts != visible.clamp(max=chosen.shape[1])).any() | (chosen >= visible[:, None]).any()):
        return INF
    worst, rows = 0.0, (visible > chosen.shape[1]).nonzero()[:, 0]
    for t in rows[:: max(1, -(-len(rows) // most))].tolist():
        entries = torch.arange(int(visible[t]), device=q.device)
        one = Tokens(tokens.positions[t : t + 1], tokens.requests[t : t + 1], tokens.valid[t : t + 1], tokens.tables)
        keys = pool.gather(one.slots(group, pool, entries[None])[0], torch.float32)
        scores = ((q[t] @ keys.T).relu() * weights[t][:, None]).sum(0)
        best, got = scores.topk(chosen.shape[1]).values.sum(), scores[chosen[t]].sum()
        spread = best - scores.mean() * chosen.shape[1]
        worst = max(worst, float((best - got) / spread))
    return worst
