"""Records of requests: of every computed token once, whatever computed it; and replays of them.

Runners are deterministic, so that a token's records are the same to the bit however it was computed.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from deepseek_attn import LLM
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.llm import IndexedPrompt
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.runner.record_store import RecordStore
from deepseek_attn.runner.token_records import TokenRecords
from tests.support import v32_cases, v41_cases
from tests.support.drafts import DraftedSource
from tests.support.predictable import PredictableSource
from tests.support.requests import greedy, prompt
from tests.support.small_models import assert_close, small_config
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required

SIZES: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_rollback": 8}
CONFIGS = {
    "v4": lambda: small_config([0, 4, 16], mtp=1, vocab_size=320),
    "v3.2": lambda: v32_cases.small(num_nextn_predict_layers=1, vocab_size=320),
    "v4.1": v41_cases.shallow,
}


@lru_cache(maxsize=3)
def runner_of(family: str) -> ModelRunner:
    config = CONFIGS[family]()
    source = PredictableSource(config) if config.dspark is None else DraftedSource(config)
    options: dict[str, Any] = SIZES | {"deterministic": True, "max_snapshots": 4, "progress": False, "device": "cpu"}
    return ModelRunner.from_source(config, source, **options)


@pytest.fixture(params=tiered(CONFIGS, ["v4"]))
def runner(request) -> ModelRunner:
    return runner_of(request.param)


def options_of(runner: ModelRunner):
    return runner.record_options(routes=True, selections=True, hidden_states=[1])


def assert_same(found: TokenRecords, expected: TokenRecords) -> None:
    assert found.layers == expected.layers
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in found.arrays.items():
        assert array.dtype == expected.arrays[name].dtype
        assert torch.equal(array, expected.arrays[name]), name


def alone(runner: ModelRunner, tokens: list[int]) -> TokenRecords:
    """Records of a text without its last token, computed by itself."""
    return required(runner.score_records([tokens[:-1]], options_of(runner))[1][0])


def assert_whole(runner: ModelRunner, request: Request) -> None:
    assert request.error is None
    text = request.prompt_token_ids + request.completion().token_ids
    assert required(required(request.records).token_ids).tolist() == text[:-1]
    assert_same(required(request.records), alone(runner, text))


def submit(engine: Engine, tokens: list[int], count: int, **options) -> Request:
    request = Request.create(engine.runner, None, tokens, replace(greedy(count), **options))
    for each in request.group:
        each.store = engine.runner.record_store(options_of(engine.runner))
    return engine.submit(request)


def finish(engine: Engine, preempt_every: int = 0) -> None:
    for step in itertools.count(1):
        if not engine.has_unfinished:
            return
        engine.step()
        if preempt_every and step % preempt_every == 0 and engine.scheduler.running:
            running = engine.scheduler.running
            engine.scheduler.preempt(running[step // preempt_every % len(running)], engine.last_step)


WAYS = list(itertools.product(CONFIGS, [0, 2], [0, 3]))


@exhaustive_on_cpu
@pytest.mark.parametrize(("family", "drafts", "preempt_every"), tiered(WAYS, [("v4", 2, 3)]))
def test_each_computed_token_has_one_row(family, drafts, preempt_every):
    """Prompts in chunks of a step that others share, decodes, drafts that are rejected, and tokens computed again."""
    runner = runner_of(family)
    required(runner.prefixes).clear()
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)
    requests = [submit(engine, prompt(n, seed), 6) for seed, n in enumerate((41, 9, 1))]
    plain = engine.add_request(prompt(5, 9), greedy(6))
    finish(engine, preempt_every)
    assert bool(drafts) == bool(engine.stats.verifications)
    for request in requests:
        assert_whole(runner, request)
    assert plain.completion().records is None
    assert any(request.preemptions for request in requests) == bool(preempt_every)


@exhaustive_on_cpu
@exhaustive_on_cpu
@pytest.mark.parametrize("drafts", tiered([0, 2], [2], quick_on_gpu=[0]))
def test_recorded_steps_run_eagerly_and_others_do_not(runner, monkeypatch, drafts):
    """Where decode steps run over persistent tensors: steps of the plain request do once it is alone."""
    if runner.config.dspark is not None:
        drafts = 0  # which are not drafted in such steps
    graphs = DecodeGraphs(runner.whole_model(), runner.layout, runner.device, batches=[2, 4], engram=runner.tables)
    runs = []
    monkeypatch.setattr(graphs, "run", lambda *call, run=graphs.run: runs.append(call) or run(*call))
    monkeypatch.setattr(runner, "graphs", graphs)
    engine = Engine(runner, decoder=MTPSpeculation(runner, drafts) if drafts else None)
    request, plain = submit(engine, prompt(9, 1), 3), engine.add_request(prompt(5, 9), greedy(12))
    while not request.finished:
        engine.step()
        assert not runs
        assert not runner.next_step_launched
    finish(engine)
    assert runs
    monkeypatch.undo()
    assert_whole(runner, request)
    assert len(plain.completion().token_ids) == 12


@pytest.mark.exhaustive
def test_tokens_of_kept_prefixes_are_computed(runner):
    """A recorded prompt takes nothing from the prefix cache, and leaves its prefix there for others."""
    runner.prefixes.clear()
    block, engine = runner.layout.snapshot_block, Engine(runner)
    if block + 8 > runner.layout.max_model_len:
        block = runner.layout.max_model_len - 8
    tokens = prompt(block + 3, 1)
    first, again = submit(engine, tokens, 2), None
    finish(engine)
    again, plain = submit(engine, tokens, 2), engine.add_request(tokens, greedy(2))
    finish(engine)
    assert again.cached_tokens == 0
    assert plain.cached_tokens > 0
    assert_same(required(again.records), required(first.records))
    assert len(required(again.records)) == len(tokens) + 1


@pytest.mark.exhaustive
def test_each_completion_of_a_prompt_has_its_rows(runner):
    engine = Engine(runner)
    request = submit(engine, prompt(11), 4, n=2, temperature=1.0, seed=3)
    finish(engine)
    for each in request.group:
        assert_whole(runner, each)
    assert request.completion().outputs[1].records is request.others[0].records


@pytest.mark.exhaustive
def test_an_interrupted_step_leaves_no_gap(runner, monkeypatch):
    """The rows of a step that was broke off before they were stored: its tokens are computed again."""
    put, calls = RecordStore.put, itertools.count()

    def interrupted(self, start, rows):
        if next(calls) in (1, 4):
            raise KeyboardInterrupt
        put(self, start, rows)

    monkeypatch.setattr(RecordStore, "put", interrupted)
    engine = Engine(runner)
    requests = [submit(engine, prompt(n, seed), 4) for seed, n in enumerate((41, 9))]
    breaks = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except KeyboardInterrupt:
            breaks += 1
    assert breaks == 2
    monkeypatch.undo()
    for request in requests:
        assert_whole(runner, request)


def test_a_full_disk_fails_one_request(monkeypatch):
    runner, put = runner_of("v3.2"), RecordStore.put
    engine = Engine(runner)
    requests = [submit(engine, prompt(n, seed), 4) for seed, n in enumerate((41, 9))]

    def failing(self, start, rows):
        if self is requests[0].store and start:
            raise ValueError("records cannot be written in 'x': No space left on device")
        put(self, start, rows)

    monkeypatch.setattr(RecordStore, "put", failing)
    finish(engine)
    assert requests[0].completion().error == "records cannot be written in 'x': No space left on device"
    assert requests[0].completion().records is None
    monkeypatch.undo()
    assert_whole(runner, requests[1])


# through LLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    config = small_config([0, 4, 16], vocab_size=320)
    folder = write_checkpoint(RandomSource(config, 3), config, tmp_path_factory.mktemp("model") / "small")
    return LLM(folder, device="cpu", progress=False, max_snapshots=4, numerics="official", **SIZES)


PROMPTS = [prompt(37, 1), prompt(4, 2), prompt(1, 3)]
ALL = {"return_routes": True, "return_selections": True, "return_hidden_states": [0, 2]}


def test_a_replay_of_its_own_records_gives_the_same_bits(llm):
    first = llm.generate(PROMPTS, greedy(3), **ALL)
    again = llm.generate(PROMPTS, greedy(3), replay=[done.records for done in first], **ALL)
    mixed = llm.generate(PROMPTS, greedy(3), replay=[None, first[1].records, None], **ALL)
    plain = llm.generate(PROMPTS, greedy(3))
    for one, two, three, four in zip(first, again, mixed, plain, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids == four.token_ids
        assert_same(two.records, one.records)
        assert_same(three.records, one.records)
        assert four.records is None
    shapes = {name: (str(array.dtype)[6:], *array.shape) for name, array in first[0].records.arrays.items()}
    assert shapes == {
        "token_ids": ("int32", 39),
        "experts": ("int16", 39, 3, 2),
        "expert_weights": ("float32", 39, 3, 2),
        "selections": ("int16", 39, 1, 6),
        "hidden_states": ("float32", 39, 2, 2, 128),
    }
    assert first[0].records.layers == {
        "route_layers": (0, 1, 2), "selection_layers": (1,), "candidate_layers": (), "hidden_layers": (0, 2),
    }  # fmt: skip
    assert first[0].records.bytes_per_token == 4 + 3 * 2 * (2 + 4) + 6 * 2 + 2 * 2 * 128 * 4


def test_each_request_has_what_it_asked_for(llm):
    """Requests of one step that record different things, or nothing."""
    every = llm.generate(PROMPTS, greedy(3), **ALL)
    engine, requests = llm.engine, []
    asked = [{"routes": True}, {"hidden_states": [2]}, None]
    for tokens, wanted in zip(PROMPTS, asked, strict=True):
        requests.append(Request.create(llm.runner, llm.tokenizer, tokens, greedy(3)))
        if wanted is not None:
            requests[-1].store = llm.runner.record_store(llm.runner.record_options(**wanted))
    for _ in engine.run(requests):
        pass
    routes, states, nothing = [request.records for request in requests]
    assert set(routes.arrays) == {"token_ids", "experts", "expert_weights"}
    assert torch.equal(routes.experts, every[0].records.experts)
    assert set(states.arrays) == {"token_ids", "hidden_states"}
    assert torch.equal(states.hidden_states, every[1].records.hidden_states[:, 1:])
    assert nothing is None


def test_files_hold_what_memory_would(llm, tmp_path):
    expected = llm.generate(PROMPTS, greedy(3), **ALL)
    found = llm.generate(PROMPTS, greedy(3), record_dir=tmp_path / "new", **ALL)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"{i}.safetensors" for i in range(3)]
    for i, (one, two) in enumerate(zip(found, expected, strict=True)):
        assert_same(one.records, two.records)
        assert_same(TokenRecords.load(tmp_path / "new" / f"{i}.safetensors"), two.records)
    replayed = llm.generate(PROMPTS, greedy(3), replay=[tmp_path / "new" / f"{i}.safetensors" for i in range(3)], **ALL)
    for one, two in zip(replayed, expected, strict=True):
        assert_same(one.records, two.records)
    saved = tmp_path / "saved.safetensors"
    expected[0].records.save(saved)
    assert saved.read_bytes() == (tmp_path / "new" / "0.safetensors").read_bytes()
    header = json.loads(saved.read_bytes()[8:][: int.from_bytes(saved.read_bytes()[:8], "little")])
    assert header["__metadata__"] == {
        "format": "deepseek-attn token records 1",
        "route_layers": "[0, 1, 2]", "selection_layers": "[1]", "hidden_layers": "[0, 2]",
    }  # fmt: skip


def test_cancelled_requests_leave_no_file(llm, tmp_path):
    stream = llm.stream(PROMPTS[0], greedy(50), record_dir=tmp_path, **ALL)
    steps = llm.engine.run([stream._request])
    next(steps)
    next(steps)
    steps.close()
    assert stream.completion.finish_reason == "abort"
    assert stream.completion.records is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_iterations_record_and_replay(llm, tmp_path):
    expected = llm.generate(PROMPTS, greedy(5), **ALL)
    jobs = [
        IndexedPrompt(7 + i, tokens, None, done.records)
        for i, (tokens, done) in enumerate(zip(PROMPTS, expected, strict=True))
    ]
    jobs.append(IndexedPrompt(3, PROMPTS[0], None, expected[1].records))
    found = dict(llm.generate_iter(jobs, greedy(5), record_dir=tmp_path, **ALL))
    for i, done in enumerate(expected):
        assert_same(found[7 + i].records, done.records)
    assert "replay: experts of 8 tokens, and the prompt has 37" in found[3].error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7.safetensors", "8.safetensors", "9.safetensors"]


@pytest.mark.exhaustive
def test_replayed_caches_are_not_shared(llm):
    """What other choices left in the caches is no prefix for anyone."""
    tokens = prompt(140, 5)
    before = llm.generate([tokens], greedy(4), **ALL)[0]
    llm.engine.prefixes.clear()
    flipped = replace(before.records, experts=(before.records.experts + 1) % 4, selections=None, token_ids=None)
    other = llm.generate([tokens], greedy(4), replay=flipped, **ALL)[0]
    assert not torch.equal(other.records.hidden_states, before.records.hidden_states[: len(other.records)])
    assert not len(llm.engine.prefixes)
    assert llm.generate([tokens], greedy(4))[0].token_ids == before.token_ids


@pytest.mark.exhaustive
def test_rows_of_other_tokens_are_not_replayed(llm):
    """Behind the prompt, rows count as long as the same tokens are generated."""
    plain = llm.generate([PROMPTS[0]], greedy(6), **ALL)[0]
    length = len(PROMPTS[0])
    other = plain.records.token_ids.clone()
    other[length + 1] += 1  # as if another token had been sampled there
    experts = plain.records.experts.clone()
    experts[length + 1 :] = torch.tensor([0, 3], dtype=torch.int16)
    given = replace(plain.records, token_ids=other, experts=experts)
    again = llm.generate([PROMPTS[0]], greedy(6), replay=given, **ALL)[0]
    assert_same(again.records, plain.records)
    used = llm.generate([PROMPTS[0]], greedy(6), replay=replace(given, token_ids=None), **ALL)[0]
    assert torch.equal(used.records.experts[length + 1 :], experts[length + 1 :][: len(used.records) - length - 1])


def test_rows_of_minus_one_are_left_to_the_model(llm):
    plain = llm.generate([PROMPTS[0]], greedy(6), **ALL)[0]
    experts, selections = plain.records.experts.clone(), plain.records.selections.clone()
    experts[5:9], selections[2:30] = -1, -1
    given = replace(plain.records, experts=experts, selections=selections)
    assert_same(llm.generate([PROMPTS[0]], greedy(6), replay=given, **ALL)[0].records, plain.records)


def test_numpy_arrays_and_some_layers_are_enough(llm):
    """As a trainer has them: routes of scored layers alone, without token ids, in int64."""
    plain = llm.generate([PROMPTS[0]], greedy(2), **ALL)[0]
    experts = plain.records.experts[:, 1:].numpy().astype(np.int64)
    given = TokenRecords(experts=experts, route_layers=(1, 2))
    assert_same(llm.generate([PROMPTS[0]], greedy(2), replay=given, **ALL)[0].records, plain.records)


@pytest.mark.exhaustive
def test_the_last_row_of_a_text_may_be_missing(llm):
    """A trainer scores the whole text of a request, whose last token was never computed."""
    done = llm.generate([PROMPTS[0]], greedy(6), **ALL)[0]
    text = PROMPTS[0] + done.token_ids
    with pytest.raises(ValueError, match=r"experts of 42 tokens, and the prompt has 43: .*add rows of -1"):
        llm.runner.score([text], replay=[done.records])
    [logits] = llm.runner.score([text[:-1]], replay=[done.records])
    assert len(logits) == 42
    [logprobs] = llm.runner.score_logprobs([text[:-1]], replay=[done.records])
    expected = logits.double().log_softmax(1)[:-1].gather(1, torch.tensor(text[1:-1]).unsqueeze(1))[:, 0]
    assert_close(torch.as_tensor(logprobs.logprobs).double()[:, None], expected[:, None])


def change(records: TokenRecords, name: str, place: tuple, value: int) -> TokenRecords:
    array = getattr(records, name).clone()
    array[place] = value
    return replace(records, **{name: array})


WRONG = {
    "fewer tokens": (lambda r: replace(r, experts=r.experts[:30]), "experts of 30 tokens, and the prompt has 37"),
    "other tokens": (lambda r: change(r, "token_ids", (3,), 9), r"token 3 of the prompt is \d+, and that of the rec"),
    "no such expert": (lambda r: change(r, "experts", (4, 1, 0), 4), "layer 1 has, for token 4, an id outside of 0"),
    "expert twice": (lambda r: change(r, "experts", (4, 2), 1), "layer 2 has, for token 4, an expert twice"),
    "part of a row": (lambda r: change(r, "experts", (4, 0, 1), -1), "layer 0 has, for token 4, ids and -1"),
    "other k": (lambda r: replace(r, experts=r.experts[:, :, :1]), "1 columns per layer, and a token of layer 0 has 2"),
    "other layers": (lambda r: replace(r, route_layers=(0, 1, 7)), r"route_layers=\[0, 1, 7\]: the la.*\[0, 1, 2\]"),
    "more layers": (lambda r: replace(r, route_layers=(0, 1)), r"columns for 3 layers, and route_layers has \[0, 1\]"),
    "not an indexer": (lambda r: replace(r, selection_layers=(2,)), r"selection_layers=\[2\]: the layers .* are \[1\]"),
    "the future": (lambda r: change(r, "selections", (30, 0, 5), 7), "layer 1 has, for token 30, an entry of 4 tokens"),
    "entry twice": (lambda r: change(r, "selections", (30, 0, 5), 0), "layer 1 has, for token 30, an entry twice"),
    "too few": (lambda r: change(r, "selections", (30, 0, 5), -1), "for token 30, not as many entries .*: all, or 6"),
    "floats": (lambda r: replace(r, experts=r.experts.float()), "experts is torch.float32 .*: must be integers"),
    "flat": (lambda r: replace(r, selections=r.selections[:, 0]), r"selections is torch.int16 \[38, 6\] .* \[tokens"),
    "nothing": (lambda r: replace(r, experts=None, selections=None), "has neither experts nor selections"),
    "no records": (lambda r: [[1]], "replay is a list: pass TokenRecords or the path of their file"),
    "no file": (lambda r: "absent.safetensors", "'absent.safetensors' cannot be read as records"),
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(llm) -> TokenRecords:
    """Records of the first prompt."""
    return required(llm.generate([PROMPTS[0]], greedy(2), **ALL)[0].records)


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_replays_are_refused_before_anything_runs(llm, recorded, case):
    steps = llm.engine.stats.steps
    wrong, message = WRONG[case]
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        llm.generate([PROMPTS[1], PROMPTS[0]], greedy(2), replay=[None, wrong(recorded)])
    assert llm.engine.stats.steps == steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_hidden_states": [1, 5]}, r"hidden_states=\[1, 5\]: there are layers \[0, 1, 2\]"),
        ({"return_routes": 1}, "routes=1: must be True or False"),
        ({"record_dir": "x"}, "record_dir or record_file without anything to record"),
        ({"return_logits": True}, "no such arguments: return_logits"),
        ({"replay": [None]}, "replay of 1 prompts, and there are 3"),
    ],
)
def test_wrong_options_are_refused(llm, options, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS, greedy(2), **options)


def test_models_without_an_indexer_have_no_selections():
    config = v32_cases.small("deepseek_v3")
    runner = v32_cases.make_runner(config, max_model_len=64)
    with pytest.raises(ValueError, match=r"selections: the layers .* lack an indexer"):
        runner.record_options(selections=True)
    [_], [records] = runner.score_records([range(9)], runner.record_options(routes=True))
    assert required(records).route_layers == (1,)


def test_a_store_holds_no_more_than_a_block(tmp_path):
    """Rows go to the disk as they come; what is kept in memory does not grow."""
    runner = runner_of("v3.2")
    options = options_of(runner)
    store = runner.record_store(options, tmp_path / "r.safetensors")
    rows = runner.score_records([prompt(9)], options)[1][0]
    for start in range(0, 900, 9):
        store.put(start, required(rows))
    assert store._memory
    assert all(not len(array) for array in store._memory.values())
    found = store.finish(895)
    assert len(required(found)) == 895
    assert torch.equal(required(required(found).experts), required(required(rows).experts).repeat(100, 1, 1)[:895])
    assert [path.name for path in tmp_path.iterdir()] == ["r.safetensors"]
