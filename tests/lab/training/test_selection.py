"""What queries read in training: dense attention, and entries by an oracle, by an indexer or at random."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.kernels.indexer import index_scores
from deepseek_attn.lab.training.attention import batched_index_scores
from deepseek_attn.lab.training.forward import DenseModel
from deepseek_attn.lab.training.weights import FreshSource, build_model
from tests.support.small_models import small_config

CPU, LENGTH, TOPK = torch.device("cpu"), 37, 3


def dense_model(selection="learned", ratios=(0, 4, 4), seed=0, **changes):
    config = small_config(list(ratios), index_topk=TOPK, sliding_window=8, num_hash_layers=0, hc_sinkhorn_iters=2,
                          **changes)  # fmt: skip
    model = build_model(config, FreshSource(config, 0), CPU, 256)
    return DenseModel(model, selection=selection, seed=seed), config


def tokens(config, size=2, length=LENGTH):
    return torch.randint(config.vocab_size, (size, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def readings(selection, ids=None, **changes):
    found = []
    dense, config = dense_model(selection, **changes)
    dense(tokens(config) if ids is None else ids, observer=found.append)
    return found


@pytest.mark.parametrize("selection", ["learned", "oracle", "random"])
def test_every_query_reads_top_k_entries_that_it_sees(selection):
    for reading in readings(selection)[1:]:
        visible, read = reading.visible.sum(-1), reading.read.sum(-1)
        assert torch.equal(read, visible.clamp(max=TOPK))
        assert not (reading.read & ~reading.visible).any()
        assert visible[0].tolist() == [(position + 1) // 4 for position in range(LENGTH)]


def test_the_oracle_reads_the_most_attended_entries():
    """Against a sort, query by query, of attention over the window and all visible entries."""
    for reading in readings("oracle")[1:]:
        for row in range(LENGTH):
            count = int(reading.visible[0, row].sum())
            order = reading.mass[0, row, :count].argsort(descending=True)[:TOPK]
            assert set(order.tolist()) == set(reading.read[0, row].nonzero().flatten().tolist())


def test_attention_of_the_oracle_sums_to_what_a_plain_softmax_gives():
    """In float64, of the first compressed layer: its own queries, window and entries."""
    first, second = (readings(selection)[1] for selection in ("oracle", "learned"))
    assert torch.equal(first.mass, second.mass), "whatever is selected"
    dense = first.dense
    assert dense.shape == (2, LENGTH, LENGTH)
    assert not dense.triu(1).any()
    assert (dense.sum(-1) <= 2 + 1e-5).all(), "two heads, and the sink"
    assert (dense.sum(-1) > 0.5).all()


def test_a_random_selection_depends_on_seed_layer_and_prefix_alone():
    _, config = dense_model()
    ids = tokens(config)
    base = readings("random", ids)
    assert all(torch.equal(a.read, b.read) for a, b in zip(base, readings("random", ids), strict=True))
    assert not torch.equal(base[1].read, base[2].read)
    assert not torch.equal(base[1].read[0], base[1].read[1])
    assert not torch.equal(base[1].read, readings("random", ids, seed=1)[1].read)
    changed = ids.clone()
    changed[:, 30] += 1
    other = readings("random", changed % config.vocab_size)[1].read
    assert torch.equal(other[:, :30], base[1].read[:, :30])
    assert not torch.equal(other[:, 30:], base[1].read[:, 30:])


@pytest.mark.exhaustive
def test_random_entries_are_read_equally_often():
    _, config = dense_model()
    [_, reading, _] = readings("random", tokens(config, size=200))
    shares = reading.read[:, -1].float().mean(0)
    assert shares.shape == (9,)
    assert (shares - TOPK / 9).abs().max() < 0.12


def test_controls_train_no_indexer():
    for selection, trains in (("learned", True), ("oracle", False), ("random", False)):
        dense, config = dense_model(selection)
        result = dense(tokens(config))
        (result.logits.square().mean() + result.index_loss).backward()
        gradient = dense.model.layers["1"].attn.indexer.wq_b.weight.grad
        assert (gradient is not None and bool(gradient.any())) == trains, selection


def test_a_window_of_everything_is_dense_attention():
    """The same logits as with any other window that holds the sequence, and the last token reads the first."""
    logits = []
    for window in (LENGTH, 100, 4096):
        config = small_config([0, 0], sliding_window=window, num_hash_layers=0, hc_sinkhorn_iters=2)
        dense = DenseModel(build_model(config, FreshSource(config, 0), CPU, 256))
        with torch.no_grad():
            logits.append(dense(tokens(config)).logits)
            changed = tokens(config)
            changed[:, 0] = (changed[:, 0] + 1) % config.vocab_size
            assert not torch.equal(dense(changed).logits[:, -1], logits[-1][:, -1])
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_index_scores_of_a_batch_are_those_of_the_op():
    generator = torch.Generator().manual_seed(0)
    q, keys, weights = (torch.randn(shape, generator=generator) for shape in ((3, 7, 2, 16), (3, 5, 16), (3, 7, 2)))
    found = batched_index_scores(q, keys, weights)
    for row in range(3):
        torch.testing.assert_close(found[row], index_scores(q[row], keys[row], weights[row]), rtol=1e-5, atol=1e-5)
