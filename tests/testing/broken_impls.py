"""Impls with one mistake each, as an author of kernels makes them."""

from __future__ import annotations

import torch

from deepseek_attn.impls import DeepseekV4ReferenceSparseImpl
from deepseek_attn.kernels.attention import reference
from deepseek_attn.v32.backends import ReferenceMLASparseImpl
from tests.support.typed import required

BROKEN_HEAD = 2
PAGE = 64  # tokens of a window page


class WrongHead(DeepseekV4ReferenceSparseImpl):
    """One head attends with the queries of the next."""

    @classmethod
    def attend_pages(cls, layer, q, keys, output):
        return super().attend_pages(layer, swapped(q), keys, output)

    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output):
        return super().attend_rows(layer, swapped(q), kv, indices, lens, output)


class WrongHeadV32(ReferenceMLASparseImpl):
    """The same, in decode steps of V3.2."""

    @classmethod
    def attend_pages(cls, layer, q, keys, output):
        return super().attend_pages(layer, swapped(q), keys, output)


def swapped(q):
    q = q.clone()
    q[:, BROKEN_HEAD] = q[:, BROKEN_HEAD + 1]
    return q


class LensOfPagesIgnored(DeepseekV4ReferenceSparseImpl):
    """Decode queries read every column that is not -1."""

    @classmethod
    def attend_pages(cls, layer, q, keys, output):
        return super().attend_pages(layer, q, [part._replace(lens=None) for part in keys], output)


class LensOfRowsIgnored(DeepseekV4ReferenceSparseImpl):
    """Prefill queries read every column that is not -1."""

    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output):
        return super().attend_rows(layer, q, kv, indices, torch.full_like(lens, indices.shape[1]), output)


class WindowOffByOne(DeepseekV4ReferenceSparseImpl):
    """A decode query with a full window reads one key too few."""

    @classmethod
    def attend_pages(cls, layer, q, keys, output):
        window, *others = keys
        full = window.lens == layer.window_size
        indices = window.indices.clone()
        oldest = indices.where(indices >= 0, torch.iinfo(indices.dtype).max).argmin(1)
        indices[full, oldest[full]] = -1
        return super().attend_pages(layer, q, [window._replace(indices=indices), *others], output)


class SinkDropped(DeepseekV4ReferenceSparseImpl):
    """The sinks do not join the denominator of decode queries."""

    @classmethod
    def attend_pages(cls, layer, q, keys, output):
        return reference.sparse_attention_paged(q, keys, layer.scale, None, layer.value_dim, output)[0]


class WrongScale(DeepseekV4ReferenceSparseImpl):
    """The softmax scale of prefill queries is one percent too large."""

    @classmethod
    def attend_rows(cls, layer, q, kv, indices, lens, output):
        return super().attend_rows(layer, q * 1.01, kv, indices, lens, output)


class StalePage(DeepseekV4ReferenceSparseImpl):
    """Keys of the second page of the window are read from the page that was the first."""

    @classmethod
    def attend_pages(cls, layer, q, keys, output):
        window, *others = keys
        table = required(required(layer.step).swa).block_table[
            required(layer.step).token_to_req_indices[: len(q)].long()
        ]
        first, second = table[:, :1], table[:, 1:2]
        moved = window.indices
        if second.shape[1]:
            moved = torch.where(moved // PAGE == second, moved % PAGE + first * PAGE, moved)
        return super().attend_pages(layer, q, [window._replace(indices=moved), *others], output)


class NotRotatedBack(DeepseekV4ReferenceSparseImpl):
    """Attention from projected queries, without the inverse RoPE behind it."""

    fused_records = ("fp8_v4",)

    @classmethod
    def attend_raw(cls, layer, queries):
        queries.normed()
        queries.raw = queries.raw._replace(positions=torch.zeros_like(queries.raw.positions))
        return super().attend_raw(layer, queries)
