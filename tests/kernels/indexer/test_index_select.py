"""`index_select` in plain torch: a prompt against the entries that its queries see, and a single token on a CPU."""

import pytest
import torch

from deepseek_attn.cache.records import PlainRecord
from deepseek_attn.kernels.indexer import (
    IndexQueries,
    PagedIndexKeys,
    index_scores,
    index_select,
    reference,
    topk_indices,
)

ENTRIES, HEADS, DIM = 5, 3, 16


@pytest.fixture
def keys():
    """Pages in no order, with entries of NaN behind those that are written."""
    record = PlainRecord(DIM, torch.float32)
    pool = record.allocate(80, ENTRIES)
    pool.view(torch.float32).fill_(float("nan"))
    table = torch.randperm(80)[:70].view(1, -1).int()
    return PagedIndexKeys(record, pool, ENTRIES, table, torch.zeros(1, dtype=torch.int32))


def fill(keys, values):
    entry = torch.arange(len(values))
    slots = keys.block_table[0].long()[entry // ENTRIES] * ENTRIES + entry % ENTRIES
    keys.record.insert(keys.pool, ENTRIES, slots, values)
    return slots


def random_queries(tokens):
    return IndexQueries(torch.randn(tokens, HEADS, DIM), torch.rand(tokens, HEADS))


def test_a_prompt_is_scored_against_what_its_queries_see(keys):
    """In blocks of queries; the first of them see fewer entries than are selected."""
    tokens, k = 2 * reference.CAUSAL_ROWS + 3, 40
    values, queries = torch.randn(tokens, DIM), random_queries(tokens)
    fill(keys, values)
    visible = torch.arange(1, tokens + 1)
    got = index_select(queries, keys._replace(token_to_req=torch.zeros(tokens, dtype=torch.int32)), visible, k)
    assert torch.equal(got, topk_indices(index_scores(queries.q, values, queries.weights), visible, k))


@pytest.mark.parametrize("case", ["distinct", "tied", "nan", "all", "fewer"])
def test_one_token(keys, case):
    """Also where entries tie for the last place, have no number, or need no selection."""
    count, k = 63, {"all": 63, "fewer": 65}.get(case, 7)
    values, queries = torch.randn(count, DIM), random_queries(1)
    best = index_scores(queries.q, values, queries.weights)[0].argsort(descending=True)
    if case == "tied":
        values[best[k - 1 :]] = 0
    if case == "nan":
        values[best[2:5]] = float("nan")
    slots = fill(keys, values)
    out_slots = torch.full((1, k), -7, dtype=torch.int32)
    got = index_select(queries, keys, torch.tensor([count]), k, out_slots=out_slots)
    scores = index_scores(queries.q, values, queries.weights)
    assert torch.equal(got, topk_indices(scores, torch.tensor([count]), k))
    chosen = got[0, got[0] >= 0].long()
    assert torch.equal(out_slots[0, : len(chosen)].long(), slots[chosen])
    assert (out_slots[0, len(chosen) :] == -1).all()
