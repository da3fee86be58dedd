"""Timing a layer: it measures what it says, over caches of the stated length, and gives everything back."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from deepseek_attn.cli import main
from deepseek_attn.estimates.floors import StepShape
from deepseek_attn.lab.bench.cases.case import OpCase
from deepseek_attn.lab.bench.layer import fill_caches, past, static_metadata, time_layer
from deepseek_attn.lab.bench.model import time_model
from deepseek_attn.lab.bench.ops import num_sets, time_case
from deepseek_attn.lab.bench.stages import STAGES, stage_works
from deepseek_attn.lab.bench.timing import Timing
from deepseek_attn.lab.commands.table import PrintedTable
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.tiers import tiered
from tests.support.typed import required, untyped

OPTIONS = {"max_model_len": 700, "max_num_seqs": 3, "max_num_batched_tokens": 64, "attention_only": True}


@pytest.mark.parametrize(("preset", "layer"), [("tiny", 0), ("tiny", 1), ("tiny", 2), ("tiny_v32", 0)])
def test_time_layer(preset, layer, device):
    runner = ModelRunner.from_config(preset, layers=[layer], device=device, **OPTIONS)
    fill_caches(runner)
    before = runner.manager.available_pages()
    seen = []
    attention = runner.model.layers[str(layer)].attn
    attention.register_forward_hook(lambda module, args, out: seen.append((args[0].clone(), args[-1], out)))
    timing = time_layer(runner, layer, batch=3, tokens=1, context=601, repeats=5, warmup=2)
    assert (timing.layer, timing.mode, timing.batch, timing.context) == (f"layers.{layer}", "decode", 3, 601)
    assert 0 < timing.low <= timing.microseconds <= timing.high
    assert len(seen) == 7
    assert all((step.positions == 600).all() for _, step, _ in seen)
    assert all(out.isfinite().all() and out.abs().sum() > 0 for _, _, out in seen)
    assert not torch.equal(seen[0][0], seen[1][0])  # another input each time
    assert time_layer(runner, layer, batch=1, tokens=50, context=601, repeats=1).mode == "prefill"
    assert runner.manager.available_pages() == before


@pytest.mark.parametrize(("preset", "layers"), [("tiny", (1, 3)), ("tiny_v32", (0, 1, 2))])
def test_instances_take_turns(preset, layers, device):
    runner = ModelRunner.from_config(preset, layers=layers, device=device, **OPTIONS)
    fill_caches(runner)
    seen = []
    for layer in layers:
        attention = runner.model.layers[str(layer)].attn
        attention.register_forward_hook(lambda module, args, out: seen.append((module.prefix, args[0].clone())))
    timing = time_layer(runner, layers, batch=2, tokens=1, context=300, repeats=6, warmup=0)
    assert (timing.layer, timing.instances) == (f"layers.{layers[0]}", len(layers))
    assert [name for name, _ in seen] == [f"layers.{layers[i % len(layers)]}" for i in range(6)]
    assert not torch.equal(seen[0][1], seen[len(layers)][1])  # nor does an instance see one input twice


@pytest.mark.parametrize("preset", ["tiny", "tiny_v32"])
def test_a_verification_is_a_decode(preset, device):
    runner = ModelRunner.from_config(preset, layers=[1], device=device, **OPTIONS)
    runner.decode_query_len = 4
    fill_caches(runner)
    seen = []
    runner.model.layers["1"].attn.register_forward_hook(lambda module, args, out: seen.append(args[-1].positions))
    timing = time_layer(runner, 1, batch=2, tokens=4, context=300, repeats=2, warmup=0)
    assert (timing.mode, timing.tokens, timing.batch) == ("decode", 4, 2)
    assert [positions.tolist() for positions in seen] == [[296, 297, 298, 299] * 2] * 2
    assert timing.work.bytes["input"] == 8 * 256 * runner.dtype.itemsize
    assert time_layer(runner, 1, batch=2, tokens=5, context=300, repeats=1).mode == "prefill"


def test_metadata_of_a_graph_is_that_of_the_step(device):
    runner = ModelRunner.from_config("tiny", layers=[1], device=device, **OPTIONS)
    runner.decode_query_len = 3
    caches = [past(runner, length) for length in (297, 40)]
    runner.manager.reserve([(cache, 3) for cache in caches])
    found, expected = static_metadata(runner, caches, 3), runner.step_metadata(caches, [3, 3])
    assert found.positions.tolist() == expected.positions.tolist() == [297, 298, 299, 40, 41, 42]
    assert required(found.swa).slot_mapping.tolist() == required(expected.swa).slot_mapping.tolist()
    assert found.num_decode_tokens == expected.num_decode_tokens == 6


def test_instances_are_of_one_kind():
    runner = ModelRunner.from_config("tiny", layers=[0, 1], device="cpu", **OPTIONS)
    with pytest.raises(ValueError, match="are of the kinds C4A, SWA: one kind"):
        time_layer(runner, [0, 1], batch=1, tokens=1, context=10)


def test_a_timing_stands_beside_its_floor(device):
    runner = ModelRunner.from_config("tiny_v32", layers=[0], device=device, **OPTIONS)
    rates = {"copy": 1e9, "bf16": 1e15, "fp8": 1e15}
    timing = time_layer(runner, 0, batch=2, tokens=1, context=300, repeats=3, rates=rates)
    assert timing.floor_us == pytest.approx(sum(timing.work.bytes.values()) / 1e3)
    assert timing.over_floor == pytest.approx(timing.microseconds / required(timing.floor_us))
    assert timing.bound == "bytes"
    row = json.loads(json.dumps(timing.row()))
    assert row["work"]["bytes"]["output"] == 2 * 256 * runner.dtype.itemsize
    assert {product["name"] for product in row["work"]["products"]} == {"projections", "index scores", "attention"}
    slow = time_layer(runner, 0, batch=2, tokens=1, context=300, repeats=1, rates={"copy": 1e15, "bf16": 1e9})
    assert slow.bound == "flops"
    assert slow.floor_us == pytest.approx(slow.work.total_flops / 1e3)
    assert time_layer(runner, 0, batch=2, tokens=1, context=300, repeats=1).over_floor is None


def test_fill_caches_leaves_no_entry_empty(device):
    runner = ModelRunner.from_config("tiny", layers=[1], device=device, numerics="serving", dtype="bfloat16", **OPTIONS)
    fill_caches(runner)
    pools = [pool for pool in runner.pools if pool.spec.record is not None]
    assert {"window", "compressed"} <= {pool.spec.kind for pool in pools}
    for pool in pools:
        slots = torch.arange(pool.tensor.shape[0] * pool.entries, device=device)
        rows = pool.gather(slots, torch.float32)
        assert rows.isfinite().all()
        assert (rows != 0).any(1).all()


def test_past_holds_pages_as_a_computed_sequence_would():
    runner = ModelRunner.from_config("tiny", layers=[1], device="cpu", **OPTIONS)
    cache = past(runner, 333)
    computed = runner.manager.create()
    for n in (60, 60, 60, 60, 60, 33):
        runner.manager.reserve([(computed, n)])
        runner.manager.commit(computed, n)
    assert cache.num_tokens == 333
    for group, table in computed.tables.items():
        assert [page != 0 for page in cache.tables[group]] == [page != 0 for page in table]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 4, "tokens": 1, "context": 10}, "batch 4"),
        ({"batch": 1, "tokens": 1, "context": 701}, "context 701"),
        ({"batch": 1, "tokens": 11, "context": 10}, "11 new tokens"),
        ({"batch": 2, "tokens": 40, "context": 80}, "80 new tokens exceed"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_sizes_that_do_not_fit(sizes, message):
    runner = ModelRunner.from_config("tiny", layers=[0], device="cpu", **OPTIONS)
    with pytest.raises(ValueError, match=message):
        time_layer(runner, 0, **sizes)


@pytest.mark.parametrize(("model", "kinds"), [("tiny", ["SWA", "C4A", "C128A"]), ("tiny_v32", ["DSA"])])
def test_command(model, kinds, capsys):
    args = [
        "bench",
        "layer",
        "--model",
        model,
        "--batch",
        "2",
        "--context",
        "150,40",
        "--prefill",
        "30",
        "--repeats",
        "2",
        "--instances",
        "2",
    ]
    assert main([*args, "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["instances"] for row in report["rows"]} == {2}
    assert [row["kind"] for row in report["rows"]] == [kind for kind in kinds for _ in range(4)]
    assert {(row["mode"], row["batch"], row["context"]) for row in report["rows"]} == {
        ("decode", 2, 150), ("decode", 2, 40), ("prefill", 1, 150), ("prefill", 1, 40),
    }  # fmt: skip
    assert report["environment"]["packages"]["torch"]
    assert report["ceilings"] is None  # they are a GPU's
    assert all(row["work"]["bytes"]["weights"] > 0 and row["over_floor"] is None for row in report["rows"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--repeats", "0"], "--repeats 0"),
        (["--query-tokens", "2,0"], "--query-tokens 0: must be at least 1"),
        (["--instances", "0"], "--instances 0"),
        (["--layers", "99"], "layers [99] do not exist"),
        (["--backends", "magic"], "unknown backend 'magic'"),
        (["--model", "nothing"], "'nothing'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_command(args, message, capsys):
    assert main(["bench", "layer", "--device", "cpu", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_model_step(capsys, tmp_path):
    args = [
        "bench",
        "model",
        "--device",
        "cpu",
        "--repeats",
        "2",
        "--batch",
        "1,3",
        "--context",
        "200",
        "--experts",
        "4",
        "--layers",
        "2",
        "--prefill",
        "30",
    ]
    assert main([*args, "--plot", str(tmp_path / "times.svg")]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    rows = report["rows"]
    assert [(row["batch"], row["tokens"], row["context"], row["graph"]) for row in rows] == [
        (1, 1, 200, False),
        (3, 1, 200, False),
        (1, 30, 200, False),
    ]
    stages = ["attention", "experts", "hyper-connections and norms", "routing", "head"]
    assert [row[:27].strip() for row in table] == ["stage", *[*stages, "step"] * 3]
    for row in rows:
        assert [stage["stage"] for stage in row["stages"]] == stages
        sizes = Counter()
        for stage in row["stages"]:
            sizes.update(stage["work"]["bytes"])
        assert row["work"]["bytes"] == sizes
    assert (report["layers"], report["experts"]) == (1, 4)
    for row in rows:
        assert 0 < row["low"] <= row["microseconds"] <= row["high"]
        new = row["batch"] * row["tokens"]
        assert row["tokens_per_second"] == pytest.approx(new / row["microseconds"] * 1e6)
    assert "microseconds" in (tmp_path / "times.svg").read_text()


@pytest.mark.parametrize(
    ("preset", "layers", "tokens"),
    tiered(
        [("tiny", [2, 3], 1), ("tiny_v41", None, 1), ("tiny_v41", None, 9), ("tiny_v41", None, 40)],
        [("tiny_v41", None, 40)],
    ),
)
def test_the_floor_of_a_step(preset, layers, tokens):
    """Of 40 tokens V4.1's upper layers compute those that the last one's result needs."""
    runner = ModelRunner.from_config(preset, layers=layers, device="cpu", max_model_len=64, max_num_seqs=2)
    rates = {"copy": 1e9, "bf16": 1e9}
    timing = time_model(runner, batch=2, context=40, repeats=1, tokens=tokens, rates=rates)
    shape = StepShape(2, tokens, 40)
    assert [stage.stage for stage in timing.stages] == list(STAGES[: 6 if preset == "tiny_v41" else 5])
    for stage in timing.stages:
        works = stage_works(runner, shape)[stage.stage]
        assert len(works) == (1 if stage.stage == "head" else len(runner.backbone_layers))
        assert stage.floor_us == pytest.approx(sum(work.floor(rates).microseconds for work in works))
        assert stage.over_floor == pytest.approx(stage.microseconds / required(stage.floor_us))
    assert timing.floor_us == pytest.approx(sum(required(stage.floor_us) for stage in timing.stages))
    assert timing.over_floor == pytest.approx(timing.microseconds / required(timing.floor_us))
    assert timing.work.total_bytes == sum(stage.work.total_bytes for stage in timing.stages)
    assert timing.work.bytes.get("table rows", 0) == (preset == "tiny_v41") * 2 * 2 * tokens * (192 + 192 // 32)
    with pytest.raises(ValueError, match="3 new tokens"):
        time_model(runner, batch=1, context=2, tokens=3)
    assert runner.manager.available_pages() == {group: n - 1 for group, n in runner.layout.pages.items()}


def test_graphs_need_a_gpu(capsys):
    for what in ("layer", "model"):
        assert main(["bench", what, "--device", "cpu", "--graph", "--repeats", "1"]) == 2
        assert "GPU" in capsys.readouterr().err
    assert main(["bench", "op", "--device", "cpu"]) == 2
    assert "no op can be timed: its kernels need an NVIDIA GPU" in capsys.readouterr().err


def test_an_op_is_timed_on_sets_that_exceed_the_cache(device):
    made, calls = [], []

    def make(device, seed):
        made.append(seed)
        return torch.full((1 << 20,), float(seed), device=device), [torch.zeros(3, device=device)]

    def double(x, rest):
        calls.append(x)
        return x * 2

    case = OpCase("double", "1 MiB", make, {"ours": double, "theirs": torch.add}, bytes=8 << 20, flops=1 << 20)
    case.run["theirs"] = lambda x, rest: torch.add(x, x)
    found = list(time_case(case, device, 4, {"copy": 1e12, "bf16": 1e12}))
    assert [timing.implementation for timing in found] == ["ours", "theirs"]
    assert made == list(range(16 if device.type == "cuda" else 1))  # of 4 MiB and 12 bytes: just above 64 MiB
    assert calls
    for timing in found:
        assert timing.bytes_per_second == pytest.approx((8 << 20) / timing.microseconds * 1e6)
        assert timing.share == pytest.approx(timing.bytes_per_second / 1e12)


@pytest.mark.parametrize(("moved", "held", "expected"), [
    (1 << 20, 1 << 28, 64), (1 << 22, 1 << 28, 17), (1 << 28, 1 << 22, 17), (1 << 28, 1 << 28, 1),
])  # fmt: skip
def test_a_shared_pool_does_not_stand_for_what_a_call_reads(moved, held, expected):
    case = OpCase("read", "", lambda device, seed: (), {}, bytes=moved)
    assert num_sets(case, (torch.empty(held, dtype=torch.uint8),)) == expected


def test_percentiles():
    assert Timing.of([3.0]) == Timing(microseconds=3.0, low=3.0, high=3.0)
    assert Timing.of([1.0, 2.0]) == Timing(
        microseconds=1.5, low=untyped(pytest.approx(1.1)), high=untyped(pytest.approx(1.9))
    )
    expected = Timing(microseconds=50.0, low=untyped(pytest.approx(10.0)), high=untyped(pytest.approx(90.0)))
    assert Timing.of([float(i) for i in range(101)]) == expected


def test_a_table_keeps_its_columns(capsys):
    table = PrintedTable({"op": "<6", "us": ">8.1f", "share": ">7.0%"})
    table.add("copy", 12.34, 0.5)
    table.add("matmul", 1234.5, None)
    assert capsys.readouterr().out.splitlines() == [
        "op          us  share",
        "copy      12.3    50%",
        "matmul  1234.5       ",
    ]
