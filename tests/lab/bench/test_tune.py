"""Which rows are timed beside the one that a table takes, and who loses; on a GPU the timing itself."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from deepseek_attn.cli import main
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import ANY, Row, Table, condition, recorded_choices
from deepseek_attn.lab.bench.tune import FAMILIES, RowTiming, TableTiming, json_lines, rivals, tables_of
from tests.support.typed import untyped

HERE = GPU((9, 0), 132)


@condition
def even(problem: int, gpu: GPU) -> bool:
    return problem % 2 == 0


@condition
def large(problem: int, gpu: GPU) -> bool:
    return problem > 100


ROWS = [
    Row(large, "a_kernel", 1),
    Row(~large & even, "a_kernel", lambda problem, gpu: problem),
    Row(large | even, "a_kernel", 8),  # the configuration that the row above has for 8
    Row(ANY, "b_kernel", 2),
    Row(~even, "even_kernel", 3),
]
NUMBERS: Table[int] = Table("test.numbers", {"a_kernel": ANY, "b_kernel": ANY, "even_kernel": even}, ROWS)


@pytest.mark.parametrize(
    ("problem", "nearest", "expected"),
    [(8, None, [0, 3, 4]), (8, 1, [0, 3]), (7, None, [0, 1, 2]), (7, 1, [2]), (102, 1, [1])],
)
def test_rivals_are_the_other_rows_whose_kernel_supports_the_problem(problem, nearest, expected):
    with recorded_choices() as choices:
        NUMBERS.choose(problem, HERE)
    assert [ROWS.index(row) for row in rivals(choices[0], HERE, nearest)] == expected


def test_a_row_loses_by_more_than_two_percent():
    def timing(*microseconds: float) -> TableTiming:
        taken, *others = (RowTiming("kernel", "config", "when", "source", us) for us in microseconds)
        return TableTiming("t", {}, "attention", launches, count, 8, 1, 8192, taken, tuple(others))

    launches, count = 1, 1
    assert timing(10.3, 12, 10).loses
    assert timing(10.3, 12, 10).best.microseconds == 10
    assert not timing(10.1, 12, 10).loses
    assert not timing(10).loses
    launches, count = 1, 2  # one of two calls has the kernel
    assert timing(10.15, 12, 10).loses
    assert timing(10, 12, 11).ratio(timing(12).taken) == pytest.approx(1.4)
    launches, count = 2, 2
    assert not timing(10.15, 12, 10).loses


def test_data_has_a_line_per_row():
    data = {"model": "tiny", "numbers": [{"a": 1}, {"a": 2}], "none": []}
    text = json_lines(data)
    assert json.loads(text) == data
    assert text.splitlines() == [
        "{",
        ' "model": "tiny",',
        ' "numbers": [',
        '  {"a": 1},',
        '  {"a": 2}',
        " ],",
        ' "none": []',
        "}",
    ]


def test_rows_are_recorded_once_and_compiled_together(monkeypatch):
    """Problems of an earlier step are not recorded again, and no kernel is compiled twice."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.norm import rms_norm
    from deepseek_attn.lab.bench.tune import compile_missing, recorded_rows
    from deepseek_attn.runner.ahead import pool, recording

    x = torch.empty(3, 256, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(256, dtype=torch.float32, device="meta")
    tables, seen, compiled = tables_of("norm"), set(), []
    monkeypatch.setattr(pool, "compile_all", lambda variants, workers, tell, seconds: compiled.extend(variants))
    monkeypatch.setattr(recording.Variant, "is_cached", lambda variant: variant.key in [one.key for one in compiled])
    calls = [lambda: rms_norm(x, 1e-6, weight)] * 2
    found, again = (recorded_rows(calls, tables, HERE, None, seen) for _ in range(2))
    assert again == {}
    (((name, _), (lookups, rows)),) = found.items()
    assert ([one.table for one in lookups], name, rows) == ([tables[0]] * 2, tables[0].name, [])
    with recording.recorded_launches(HERE) as launches:
        calls[0]()
    given_up = set()
    compile_missing([launches.latest, launches.latest], given_up)
    assert ([variant.name for variant in compiled], given_up) == (["rms_norm_kernel"], set())


def test_a_kernel_that_does_not_compile_is_reported_and_not_tried_again(monkeypatch, caplog):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.lab.bench.tune import compile_missing
    from deepseek_attn.runner.ahead import pool

    class Unfit(SimpleNamespace):
        def is_cached(self):
            return False

    tried = []

    def compile_all(variants, workers, tell, seconds):
        assert seconds > 0
        for variant in variants:
            tried.append(variant.key)
            tell(done=[variant.key], failed=["large_kernel: its compiler ended"] if variant.key == "a" else [])

    monkeypatch.setattr(pool, "compile_all", compile_all)
    given_up = set()
    for _ in range(2):
        compile_missing([[untyped(Unfit(key="a")), untyped(Unfit(key="b"))]], given_up)
    assert (tried, given_up) == (["a", "b", "b"], {"a"})
    assert caplog.messages == ["rows are left out: large_kernel: its compiler ended"]


def test_a_problem_is_timed_in_the_first_step_that_has_it(monkeypatch):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from deepseek_attn.kernels.linear import quantize_input
    from deepseek_attn.kernels.linear.plan import QUANTIZERS
    from deepseek_attn.lab.bench import tune
    from deepseek_attn.runner.ahead import pool, recording

    @contextmanager
    def stages(runner, batch, tokens, context):
        sizes, device = [batch * tokens, 4096], torch.device("meta")
        rows = [torch.empty(n, 256, dtype=torch.bfloat16, device=device) for n in sizes]
        yield [("attention", [lambda: None, *(lambda x=x: quantize_input(x) for x in rows)])]

    def timings(calls, consulted, rows, repeats):
        yield from (RowTiming(row.kernel, "", row.when.name, row.source, 1.0) for row in (ROWS[0], *rows))

    monkeypatch.setattr(tune, "_stages", stages)
    monkeypatch.setattr(tune, "_time_rows", timings)
    monkeypatch.setattr(tune, "gpu", lambda device: HERE)
    compiled: list[recording.Variant] = []
    monkeypatch.setattr(pool, "compile_all", lambda variants, workers, tell, seconds: compiled.extend(variants))
    monkeypatch.setattr(recording.Variant, "is_cached", lambda variant: variant.key in [one.key for one in compiled])
    runner = untyped(SimpleNamespace(device=torch.device("meta")))
    found = list(tune.time_tables(runner, tables_of("linear"), [(1, 1, 512), (8, 1, 512), (1, 1, 512)]))
    assert [(one.problem["rows"], one.batch, one.launches, one.calls) for one in found] == [
        (1, 1, 1, 2), (4096, 1, 1, 2), (8, 8, 1, 2),
    ]  # fmt: skip
    assert {len(one.others) for one in found} == {len(QUANTIZERS.rows) - 1}
    assert {variant.name for variant in compiled} == {"quantize_input_kernel"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_tables(family):
    assert tables_of(family)
    assert [table.name for table in tables_of(f"{family}.{tables_of(family)[-1].name.partition('.')[2]}")]


def test_wrong_names_and_a_machine_without_a_gpu(capsys, device):
    assert main(["bench", "tune", "no_family"]) == 2
    assert "choose from attention, common, engram" in capsys.readouterr().err
    assert main(["bench", "tune", "moe.no_table"]) == 2
    assert "choose from moe.products, moe.grouping" in capsys.readouterr().err
    assert main(["bench", "tune", "norm", "--out", "/no/such/folder/file.json"]) == 2
    assert "--out" in capsys.readouterr().err
    if device.type == "cpu":
        assert main(["bench", "tune", "norm"]) == 2
        assert "info --plans" in capsys.readouterr().err


@pytest.mark.gpu
def test_times_every_row_that_can_serve_a_step(device, capsys):
    """A model small enough to be made in seconds, whose linears have more than one candidate."""
    sizes = ["--batch", "1,8", "--context", "512", "--prefill", "64", "--repeats", "2"]
    assert main(["bench", "tune", "linear", "--model", "small", *sizes]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    timed = [row for name, rows in found.items() if name.startswith("linear.") for row in rows]
    assert timed
    for row in timed:
        assert row["others"]
        assert all(one["microseconds"] > 0 for one in (row["taken"], *row["others"]))
    assert {row["batch"] for row in timed} == {1, 8}
