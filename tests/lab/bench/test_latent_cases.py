"""Rows of V3.2's ops around the latent cache: arguments that the ops take, and work counted by hand."""

from __future__ import annotations

import pytest
import torch

from deepseek_attn.lab.bench import ops
from deepseek_attn.lab.bench.cases import latent

CPU = torch.device("cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("make_case", "shape"), [
    (latent._absorb, (3, 128, 576)), (latent._project, (3, 128 * 128)), (latent._insert, (3, 1536)),
])  # fmt: skip
def test_every_implementation_takes_the_arguments(make_case, shape):
    case = make_case(3)
    results = [run(*case.make(CPU, 7)) for run in case.run.values()]
    assert [result.shape for result in results] == [shape] * 2
    torch.testing.assert_close(results[0], results[1])
    assert results[0].isfinite().all()
    assert (results[0] != 0).any(-1).all()
    assert not torch.equal(results[0], case.run["torch"](*case.make(CPU, 8)))


def test_insert_writes_every_row():
    tokens, index = latent._insert(70).make(CPU, 1)
    latent.insert_latents(tokens, index)
    for cache in (tokens.cache, index.cache):
        assert (cache.record.gather(cache.pool, cache.page_entries, cache.slots, torch.float32) != 0).any(1).all()
    assert len(set(tokens.cache.slots.tolist())) == 70


def test_work_is_counted_by_hand():
    weight = 128 * 128 * 512
    absorb, project, insert = latent._absorb(8), latent._project(8), latent._insert(8)
    assert absorb.bytes == weight + 2 * 8 * 128 * (192 + 576) + 8 * (256 + 8)  # FP8 weights
    assert project.bytes == weight + 2 * 8 * 128 * (512 + 128)
    assert insert.bytes == 8 * (2 * (1536 + 576 + 128) + 256 + 24 + 2 * 1536 + 656 + 132)
    assert absorb.flops == project.flops == 2 * 8 * weight
    assert insert.flops == 0


def test_rows_need_the_kernels(monkeypatch):
    assert ops.op_cases(CPU) == []
    monkeypatch.setattr(ops, "runs_triton", lambda tensor: True)
    labels = [(case.op, case.label) for case in ops.op_cases(CPU)]
    assert len(labels) == len(set(labels)) > 300
    assert len(latent.cases(CPU)) == 15
