"""DSpark by brute force, in float64 and without caches: logits and greedy drafts of a block after a prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch

from tests.support.oracle_dense import DenseOracle
from tests.support.oracle_output import OracleOutput
from tests.support.oracle_v41 import V41Oracle
from tests.support.typed import required

Drafted = tuple[list[int], torch.Tensor]  # drafts, and the logits of each


def rope(x: torch.Tensor, positions: list[int], theta: float, dim: int, sign: int = 1) -> torch.Tensor:
    """Rotates the last ``dim`` channels of ``x [T, ..., d]``, in pairs (2i, 2i + 1)."""
    x, start = x.clone(), x.shape[-1] - dim
    for row, position in zip(x, positions, strict=True):
        for i in range(dim // 2):
            angle = position * theta ** (-2 * i / dim)
            a, b = row[..., start + 2 * i].clone(), row[..., start + 2 * i + 1].clone()
            row[..., start + 2 * i] = a * math.cos(angle) - b * math.sin(angle) * sign
            row[..., start + 2 * i + 1] = a * math.sin(angle) * sign + b * math.cos(angle)
    return x


class BlockReader:
    """Attention of the rows of a block over the last context keys and the whole block."""

    def __init__(self, config, tensor: Callable[[str], torch.Tensor], norm, head_norm: bool, main: torch.Tensor):
        self.config, self.tensor, self.norm, self.head_norm, self.main = config, tensor, norm, head_norm, main

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensor(f"{name}.weight").T

    def __call__(self, stage: str, x: torch.Tensor) -> torch.Tensor:
        c, name, start = self.config, f"{stage}.attn", len(self.main)
        places = list(range(start, start + len(x)))

        def rotated(rows: torch.Tensor, positions: list[int], sign: int = 1) -> torch.Tensor:
            return rope(rows, positions, c.rope_theta, c.qk_rope_head_dim, sign)

        def keys(rows: torch.Tensor, positions: list[int]) -> torch.Tensor:
            kv = self.linear(rows, f"{name}.wkv")
            return rotated(self.norm(kv) * self.tensor(f"{name}.kv_norm.weight"), positions)

        qr = self.norm(self.linear(x, f"{name}.wq_a")) * self.tensor(f"{name}.q_norm.weight")
        q = self.linear(qr, f"{name}.wq_b").unflatten(1, (c.num_attention_heads, c.head_dim))
        q = rotated(self.norm(q) if self.head_norm else q, places)
        context = keys(self.main, list(range(start)))[-c.sliding_window :]
        kv = torch.cat([context, keys(x, places)])
        logits = torch.einsum("thd,kd->thk", q, kv) * c.head_dim**-0.5
        sinks = self.tensor(f"{name}.attn_sink").view(1, -1, 1).expand(len(x), -1, 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        o = rotated(torch.einsum("thk,kd->thd", weights, kv), places, -1).unflatten(1, (c.o_groups, -1)).flatten(2)
        wo_a = self.tensor(f"{name}.wo_a.weight").unflatten(0, (c.o_groups, -1))
        return self.linear(torch.einsum("tgi,goi->tgo", o, wo_a).flatten(1), f"{name}.wo_b")


def markov_drafts(base: torch.Tensor, newest: int, embed: torch.Tensor, head: torch.Tensor) -> Drafted:
    drafts, logits = [newest], []
    for row in base:
        logits.append(row + head @ embed[drafts[-1]])
        drafts.append(int(logits[-1].argmax()))
    return drafts[1:], torch.stack(logits)


class V4Drafts(DenseOracle):
    """V4 with DSpark stages; a call also keeps what the drafter reads."""

    def block(self, spec, streams, ids, output):
        streams = super().block(spec, streams, ids, output)
        if not spec.is_mtp and spec.index in required(self.config.dspark).dspark_target_layer_ids:
            self.targets = [*getattr(self, "targets", []), streams.mean(1)]
        return streams

    def mtp(self, spec, streams, ids, output):
        return None

    def attention(self, spec, x, output):
        return self.reader(spec.name, x) if spec.is_mtp else super().attention(spec, x, output)

    def drafts(self, tokens: list[int], newest: int) -> Drafted:
        dspark, self.targets = required(self.config.dspark), []
        self(tokens)
        main = self.norm(self.linear("mtp.0.main_proj", torch.cat(self.targets, 1)), "mtp.0.main_norm")
        self.reader = BlockReader(self.config, self.__getitem__, self.norm, True, main)
        ids = torch.tensor([newest] + [dspark.dspark_noise_token_id] * (dspark.dspark_block_size - 1))
        streams = self["embed.weight"][ids].unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for spec in self.config.mtp_layers:
            streams = self.block(spec, streams, ids, OracleOutput())
        last = self.config.mtp_layers[-1].name
        markov = (self[f"{last}.markov_head.markov_{w}.weight"] for w in ("w1", "w2"))
        return markov_drafts(self.head(f"{last}.", streams), newest, *markov)


class V41Drafts(V41Oracle):
    """V4.1 with its DSpark stages, which are layers from 1000 on to the methods of `V41Oracle`."""

    def __init__(self, config, tensor, compressed_ids):
        def renamed(name: str) -> torch.Tensor:
            return tensor(re.sub(r"^layers\.100(\d)\.", r"mtp.\1.", name))

        super().__init__(config.to_dict(), renamed, compressed_ids)
        self.checked, self.targets = config, []

    def mixes(self, layer, part, streams):
        if part == "attn" and layer in self.checked.dspark.dspark_target_layer_ids:
            self.targets.append(streams.mean(1))
        return super().mixes(layer, part, streams)

    def drafts(self, tokens: list[int], newest: int) -> Drafted:
        config, dspark, self.targets = self.checked, self.checked.dspark, []
        self(tokens)
        main = self.norm(self.linear(torch.cat(self.targets, 1), "mtp.0.main_proj"), "mtp.0.main_norm.weight")
        reader = BlockReader(config, self.tensor, self.norm, False, main)
        ids = [newest] + [dspark.dspark_noise_token_id] * (dspark.dspark_block_size - 1)
        streams = self.tensor("embed.weight")[ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
        weights = torch.zeros(len(ids), config.hc_mult, dtype=torch.float64)
        weights[:, 0] = 1
        self.c = self.c | {"num_experts_per_tok": config.draft_stages.num_experts_per_tok}
        for stage in range(len(config.mtp_layers)):
            for part in ("attn", "ffn"):
                pre, post, comb = self.mixes(1000 + stage, part, streams)
                x = self.norm((weights.unsqueeze(-1) * streams).sum(1), f"mtp.{stage}.{part}_norm.weight")
                y = reader(f"mtp.{stage}", x) if part == "attn" else self.moe(1000 + stage, x)
                streams = post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tjk,tjd->tkd", comb, streams)
                weights = pre
        last = config.mtp_layers[-1].name
        x = self.norm((weights.unsqueeze(-1) * streams).sum(1), f"{last}.norm.weight")
        markov = (self.tensor(f"{last}.markov_head.{name}.weight") for name in ("embed", "head"))
        return markov_drafts(x @ self.tensor("head.weight").T, newest, *markov)
