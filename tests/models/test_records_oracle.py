"""Records and replays against programs that share no code with the library.

Records: experts, weights, entries, candidates and hidden states are those of the oracle. Replays: the oracle is made to
use experts and entries that no model would choose, and the library, which is given them, has its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.token_records import TokenRecords
from tests.support import v41_cases
from tests.support.oracle_transformers import TransformersOracle
from tests.support.oracle_v32 import TransformersV32Oracle
from tests.support.oracle_v41 import V41Oracle
from tests.support.small_models import assert_close, prompt, small_config, small_runner
from tests.support.tiers import tiered
from tests.support.typed import required
from tests.support.v32_cases import small

LENGTH, CHUNK = 61, 23
ROUTERS = (v4.DeepseekV4TopKRouter, v4.DeepseekV4HashRouter, v32.DeepseekV32TopkRouter)
INDEXERS = (v4.DeepseekV4Indexer, v32.DeepseekV32Indexer)


class Case:
    """A small model, its runner, and its oracle: transformers' model for V4 and V3.2, `V41Oracle` for V4.1."""

    def __init__(self, name: str):
        self.name = name
        self.oracle: Any  # of the family
        if name == "v4":
            self.config = small_config([0, 4, 4, 128], n_routed_experts=8, num_experts_per_tok=3)
            source = RandomSource(self.config, 1)
            self.oracle = TransformersOracle(self.config, source)
        elif name == "v3.2":
            self.config = small(n_group=4, topk_group=2)
            source = RandomSource(self.config, 1)
            self.oracle = TransformersV32Oracle(self.config, source)
        else:
            self.config = v41_cases.shallow()
            source = RandomSource(self.config, 1)
            self.oracle = v41_cases.oracle_of(self.config, source)
        self.runner = small_runner(self.config, source, max_model_len=LENGTH, max_num_seqs=2)
        self.tokens = prompt(self.config, LENGTH, 5)


@cache
def case_of(name: str) -> Case:
    return Case(name)


@pytest.fixture(params=tiered(["v4", "v3.2", "v4.1"], ["v4.1"]))
def case(request) -> Case:
    return case_of(request.param)


@contextmanager
def hooks(model: Any, kinds: tuple[type, ...], hook: Callable) -> Iterator[None]:
    """``hook(layer, module, args, result)`` as a forward hook of each module of these kinds, by layer number."""
    handles = [
        module.register_forward_hook(lambda *call, layer=layer: hook(layer, *call))
        for layer, block in enumerate(model.model.layers)
        for module in block.modules()
        if isinstance(module, kinds)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record(runner: ModelRunner, tokens: list[int], **options) -> tuple[Tensor, TokenRecords]:
    logits, records = runner.score_records([tokens], runner.record_options(**options), CHUNK)
    return logits[0], required(records[0])


def one_hot(ids: Tensor, count: int) -> Tensor:
    """Bool ``[n, count]`` of ids ``[n, k]``; -1 is none."""
    return torch.nn.functional.one_hot(ids.long() + 1, count + 1).sum(1)[:, 1:].bool()


@pytest.mark.parametrize("case", ["v4", "v3.2"], indirect=True)
def test_records_are_what_transformers_chooses(case):
    routes: dict[int, tuple[Tensor, Tensor]] = {}
    entries: dict[int, Tensor] = {}
    model = case.oracle.model
    with (
        hooks(model, ROUTERS, lambda layer, module, args, result: routes.update({layer: (result[2], result[1])})),
        hooks(model, INDEXERS, lambda layer, module, args, result: entries.update({layer: result[0]})),
        torch.no_grad(),
    ):
        output = model(torch.tensor([case.tokens]), use_cache=False, output_hidden_states=True)
    layers = list(range(len(model.model.layers)))
    logits, found = record(case.runner, case.tokens, routes=True, selections=True, hidden_states=layers)
    assert_close(logits, output.logits[0])
    assert required(found.token_ids).tolist() == case.tokens
    assert found.route_layers == tuple(routes)
    assert found.selection_layers == tuple(entries)
    experts, count = case.config.n_routed_experts, LENGTH // case.config.layers[found.selection_layers[0]].ratio
    for column, (ids, weights) in enumerate(routes.values()):
        assert torch.equal(one_hot(required(found.experts)[:, column], experts), one_hot(ids, experts))
        mine = torch.zeros(LENGTH, experts).scatter_(
            1, required(found.experts)[:, column].long(), required(found.expert_weights)[:, column]
        )
        assert_close(mine, torch.zeros(LENGTH, experts).scatter_(1, ids, weights))
    for column, ids in enumerate(entries.values()):
        visible = torch.arange(1, LENGTH + 1).unsqueeze(1) * count // LENGTH if case.name == "v3.2" else None
        ids = ids if visible is None else torch.where(ids < visible, ids, -1)  # V3.2's causal mask comes after it
        assert torch.equal(one_hot(required(found.selections)[:, column], count), one_hot(ids, count))
    for column in range(len(layers) - 1):  # the last of transformers' is normed
        states = output.hidden_states[column + 1][0]
        assert_close(required(found.hidden_states)[:, column].flatten(1), states.flatten(1), what=f"layer {column}")


def test_records_are_what_the_oracle_of_v41_chooses():
    case = case_of("v4.1")
    case.oracle(case.tokens)
    _, found = record(case.runner, case.tokens, selections=True)
    assert [f"layers.{layer}" for layer in found.selection_layers] == list(case.oracle.chosen)
    for column, rows in enumerate(case.oracle.chosen.values()):
        assert [[e for e in row if e >= 0] for row in required(found.selections)[:, column].tolist()] == rows
    assert found.candidate_layers == (1,)
    assert [{b for b in row if b >= 0} for row in required(found.candidates)[:, 0].tolist()] == case.oracle.kept_blocks


def other_choices(case: Case, records: TokenRecords, seed: int) -> TokenRecords:
    """Random experts and complete entries in the place of the model's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, k: int) -> list[int]:
        return torch.randperm(count, generator=generator)[:k].tolist()

    k = required(records.experts).shape[2]
    experts = [[draw(case.config.n_routed_experts, k) for _ in records.route_layers] for _ in range(LENGTH)]
    selections = torch.full_like(required(records.selections), -1)
    for column, layer in enumerate(records.selection_layers):
        for t in range(LENGTH):
            chosen = draw((t + 1) // case.config.layers[layer].ratio, required(records.selections).shape[2])
            selections[t, column, : len(chosen)] = torch.tensor(chosen, dtype=selections.dtype)
    return replace(records, experts=torch.tensor(experts), selections=selections)


def forced_transformers(case: Case, given: TokenRecords) -> Tensor:
    """transformers' logits with given experts and entries."""

    def route(layer: int, module: torch.nn.Module, args: tuple, result: tuple) -> tuple:
        ids = required(given.experts)[:, given.route_layers.index(layer)].long()
        activation = torch.sigmoid if case.name == "v3.2" else lambda x: torch.nn.functional.softplus(x).sqrt()
        weights = activation(result[0].float()).gather(1, ids)
        weights = weights / weights.sum(1, keepdim=True) * case.config.routed_scaling_factor
        return result[0], weights, ids

    def select(layer: int, module: torch.nn.Module, args: tuple, result: Tensor) -> Tensor:
        ids = required(given.selections)[:, given.selection_layers.index(layer)].long()
        if case.name == "v3.2":  # without a sentinel: padding names a token behind the query, which is masked later
            return torch.where(ids < 0, LENGTH - 1, ids).unsqueeze(0)
        return ids.unsqueeze(0)

    model = case.oracle.model
    with hooks(model, ROUTERS, route), hooks(model, INDEXERS, select), torch.no_grad():
        return model(torch.tensor([case.tokens]), use_cache=False).logits[0]


class ForcedV41(V41Oracle):
    """The oracle of V4.1 with given experts and entries."""

    def __init__(self, oracle: V41Oracle, given: TokenRecords):
        super().__init__({"text_config": oracle.c}, oracle.tensor, oracle.ids)
        self.given, self.published = given, oracle.tensor

    def select(self, layer: int, *arguments) -> list[list[int]]:
        super().select(layer, *arguments)
        rows = required(self.given.selections)[:, self.given.selection_layers.index(layer)].tolist()
        return [sorted(e for e in row if e >= 0) for row in rows]

    def moe(self, layer: int, x: Tensor) -> Tensor:
        rows = []
        for t, ids in enumerate(required(self.given.experts)[:, self.given.route_layers.index(layer)].tolist()):
            bias = torch.zeros(self.c["n_routed_experts"], dtype=torch.float64)
            bias[ids] = 1e6  # it chooses, and does not weigh
            self.tensor = lambda name, bias=bias: bias if name.endswith("gate.bias") else self.published(name)
            rows.append(super().moe(layer, x[t : t + 1]))
        self.tensor = self.published
        return torch.cat(rows)


def test_other_choices_give_the_oracles_logits(case):
    plain, found = record(case.runner, case.tokens, routes=True, selections=True)
    given = other_choices(case, found, 3)
    if case.name == "v4.1":
        expected = ForcedV41(case.oracle, given)(case.tokens).float()
    else:
        expected = forced_transformers(case, given)
    options = case.runner.record_options(routes=True, selections=True)
    [logits], [again] = case.runner.score_records([case.tokens], options, CHUNK, replay=[given])
    assert_close(logits, expected)
    assert float((logits - plain).abs().max()) > 0.01 * float(plain.abs().max())
    # what was computed with is recorded: routes in the given order, entries in ascending order
    assert torch.equal(again.experts.long(), required(given.experts))
    selections = required(given.selections)
    ascending = torch.where(selections < 0, 9999, selections).sort(2).values
    assert torch.equal(again.selections, torch.where(ascending == 9999, -1, ascending))


@pytest.mark.parametrize("part", tiered(["experts", "selections"], ["selections"], quick_on_gpu=["experts"]))
def test_experts_and_entries_are_replayed_independently(case, part):
    plain, found = record(case.runner, case.tokens, routes=True, selections=True)
    given = other_choices(case, found, 4)
    alone = TokenRecords(
        **{part: getattr(given, part)}, route_layers=given.route_layers, selection_layers=given.selection_layers
    )
    options = case.runner.record_options(routes=True, selections=True)
    [logits], [used] = case.runner.score_records([case.tokens], options, CHUNK, replay=[alone])
    assert not torch.equal(logits, plain)
    whole = case.runner.score([case.tokens], CHUNK, replay=[used])[0]
    assert torch.equal(whole, logits)  # what the other part chose, given too, changes nothing
    if part == "experts":
        assert torch.equal(used.experts.long(), required(given.experts))
        assert torch.equal(used.selections[:, 0], required(found.selections)[:, 0]) or case.name != "v3.2"
