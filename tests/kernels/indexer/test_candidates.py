"""Candidate blocks of `index_select`: those kept for a query, and the selection within them, against loops."""

import random

import pytest
import torch

from deepseek_attn.cache.records import PlainRecord
from deepseek_attn.kernels.indexer import CandidateBlocks, IndexQueries, PagedIndexKeys, index_scores, index_select

PAGE, DIM, HEADS = 8, 16, 3


def case(seed: int, lens: list[int]):
    """Queries of requests with ``lens`` entries, of which each query sees some, in shuffled pages."""
    draw, record = random.Random(seed), PlainRecord(DIM, torch.float32)
    pages = [-(-n // PAGE) for n in lens]
    order = draw.sample(range(1, 1 + sum(pages)), sum(pages))
    table = torch.zeros(len(lens), max(1, *pages), dtype=torch.int32)
    pool = record.allocate(1 + sum(pages), PAGE)
    keys = []
    for request, n in enumerate(lens):
        table[request, : pages[request]] = torch.tensor([order.pop() for _ in range(pages[request])])
        keys.append(torch.randn(n, DIM))
        slots = table[request].long().repeat_interleave(PAGE) * PAGE + torch.arange(PAGE).repeat(table.shape[1])
        record.insert(pool, PAGE, slots[:n], keys[-1])
    requests = torch.tensor([request for request, n in enumerate(lens) for _ in range(4)], dtype=torch.int32)
    visible = torch.tensor([draw.randint(0, n) for n in lens for _ in range(3)] + [0] * len(lens))
    visible = visible[: 3 * len(lens)].view(-1, 3)
    visible = torch.cat([visible, torch.tensor(lens)[:, None]], 1).flatten()
    queries = IndexQueries(torch.randn(len(requests), HEADS, DIM), torch.randn(len(requests), HEADS))
    scores = [
        index_scores(queries.q[t : t + 1], keys[r], queries.weights[t : t + 1])[0] for t, r in enumerate(requests)
    ]
    return queries, PagedIndexKeys(record, pool, PAGE, table, requests), visible, scores


@pytest.mark.parametrize(("size", "count"), [(1, 6), (3, 3), (8, 2)])
def test_blocks_are_kept_and_limit_the_selection(size, count):
    k = 5 if size < 8 else 8
    queries, keys, visible, scores = case(size, [70, 3, 0, 41])
    kept = torch.full((len(visible), count), -1, dtype=torch.int32)
    chosen = index_select(queries, keys, visible, k, candidates=CandidateBlocks(size, kept, fill=True))
    assert torch.equal(chosen, index_select(queries, keys, visible, k))
    other = IndexQueries(queries.q.flip(0), queries.weights.flip(0))
    limited = index_select(other, keys, visible, k, candidates=CandidateBlocks(size, kept, fill=False))
    for t, n in enumerate(visible.tolist()):
        blocks = range(-(-n // size))
        best = {b: float(scores[t][b * size : min(n, (b + 1) * size)].max()) for b in blocks}
        order = sorted(blocks, key=lambda b: (b != (n - 1) // size, -best[b], b))
        expected = set(order[:count])
        if n > k:
            assert {b for b in kept[t].tolist() if b >= 0} == expected
        request = keys.token_to_req[t]
        table = keys.block_table[request].long()
        rows = keys.record.gather(keys.pool, PAGE, table.repeat_interleave(PAGE)[:n] * PAGE + torch.arange(n) % PAGE,
                                  torch.float32)  # fmt: skip
        again = index_scores(other.q[t : t + 1], rows, other.weights[t : t + 1])[0].tolist()
        allowed = [e for e in range(n) if e // size in expected]
        assert len(allowed) >= min(n, k)
        best_entries = sorted(sorted(allowed, key=lambda e: (-again[e], e))[:k])
        assert [e for e in limited[t].tolist() if e >= 0] == best_entries
