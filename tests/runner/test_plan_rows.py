"""Every row of a launch table is taken: for a problem like those of published models, or for one that is stated here.

A step of each model shows the problems of its ops. What depends on the batch, on the ranks or on the numerics is then
varied without running steps: tables are consulted with these problems at other sizes, in other formats, on other GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.names import CanonicalSource
from deepseek_attn.checkpoint.published import canonical_names
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.attention.plan import LayerCall
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import KernelRows, RowsProblem, recorded_choices
from deepseek_attn.kernels.indexer.plan import ScoresProblem
from deepseek_attn.runner.step_plans import step_plans
from tests.house.test_plans import TABLES
from tests.support.v41_cases import FOUR_LAYERS

H100 = GPU((9, 0), 132)
GPUS = [H100, GPU((8, 0), 108), GPU((8, 9), 142), GPU((10, 0), 148), GPU((12, 0), 188)]
FEWER = {"num_hidden_layers": 4, "n_routed_experts": 32}
MODELS = {
    "v4_flash": FEWER, "v32": FEWER,
    "v41_flash": FEWER | FOUR_LAYERS | {"engram_num_embeddings": [384006168]},
}  # fmt: skip
TOKENS = [1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 100, 128, 300, 600, 1024, 4096, 8192]
SIZES = {
    "tokens": TOKENS, "rows": TOKENS, "queries": TOKENS, "requests": [1, 8, 128], "width": [128, 512, 700, 8192, 65536],
    "batch_invariant": [False, True], "max_query_len": [1, 8192],
    "heads": [8, 64, 128], "key_format": ["fp8", "fp4"], "weights": ["plain", "fp8", "fp4"],
    "fp8_weight": [False, True], "quantize": [False, True], "columns": [24, 48, 256],
    "weight_dtype": [torch.float32, torch.bfloat16],
}  # fmt: skip
"""Fields of problems, with the values that are tried."""
STATED = {
    # where flash_mla is installed
    "attention.library": [
        LayerCall(queries, heads, width, record)
        for queries in (1, 2, 8, 9, 33)
        for heads in (16, 64, 128)
        for width in (128, 640)
        for record in ("", "fp8_v4", "fp8_v32")
    ],
    "collectives.exchange": [RowsProblem(4096)],  # several ranks
    # experts in host memory
    "moe.cache_rows": [RowsProblem(1, 256)],
    "moe.copies": [RowsProblem(1, 256)],
    # V4.1 at lengths from which candidate blocks limit the selection
    "indexer.candidate_scores": [ScoresProblem(4, 1, 16384, 64, 128, "fp8", exact) for exact in (False, True)],
    "indexer.blocks": [RowsProblem(4, 512)],
    "indexer.candidate_entries": [RowsProblem(4, 512)],
    "indexer.queries": [KernelRows(1, kernel="index_query_kernel")],  # training, impls
    "indices.index": [KernelRows(4, 512, kernel="entry_slots_kernel")],  # impls on FlashMLA
}
"""Problems by the name of a table, of which the steps below have none."""


def problems_of(model: str, numerics: str = "serving", dtype: torch.dtype = torch.bfloat16) -> set[tuple[str, Any]]:
    """The problems that tables were asked about in a decode step, a short and a long prompt; by name of the table.

    Of a model with a layer of each kind and fewer experts.
    """
    config = ModelConfig.from_preset(model).replace(**MODELS[model])
    headers = CanonicalSource(RandomSource(config), canonical_names(config)).entries()
    with recorded_choices() as choices:
        step_plans(
            config, headers, [4], 8192, [48, 2048], numerics=numerics_for(config, numerics), dtype=dtype, gpu=H100,
            cuda_graphs=True, attention=AttentionOptions("triton"),  # the same ones where flash_mla is installed
        )  # fmt: skip
    return {(consulted.table.name, consulted.problem) for consulted in choices}


def same_kind(problem: Any, name: str) -> bool:
    """The field has a value of the kind that is tried: two problems may use one name differently."""
    return type(getattr(problem, name)) is type(SIZES[name][0])


def at_other_sizes(problem: Any) -> Iterator[Any]:
    varied = [field.name for field in fields(problem) if field.name in SIZES and same_kind(problem, field.name)]
    for values in product(*(SIZES[name] for name in varied)):
        yield replace(problem, **dict(zip(varied, values, strict=True)))


def first_sizes(problem: Any) -> Any:
    """The problem at the first of each of the sizes; equal for problems that differ in sizes alone."""
    return next(at_other_sizes(problem))


@pytest.fixture(scope="module")
def problems():
    found = set().union(*map(problems_of, MODELS), problems_of("v4_flash", "exact", torch.float32))
    found |= problems_of("v41_flash", "official")  # weights in blocks of 32
    return {
        table.name: [problem for name, problem in found if name == table.name] + STATED.get(table.name, [])
        for table in TABLES
    }


@pytest.mark.parametrize("table", TABLES, ids=[table.name for table in TABLES])
def test_every_row_is_taken(table, problems):
    rows = {(row.when.name, row.kernel) for row in table.rows}
    taken: set[tuple[str, str]] = set()
    for problem in dict.fromkeys(map(first_sizes, problems[table.name])):
        for other, gpu in product(at_other_sizes(problem), GPUS):
            choice = table.choose(other, gpu)
            assert isinstance(getattr(choice.config, "early", True), bool)  # `Table.chosen` reads it
            taken.add((choice.when, choice.kernel))
            if taken == rows:
                return
    assert sorted(rows - taken) == [], (
        "delete these rows, or add their GPU to GPUS, or a problem that takes them to STATED"
    )
