"""Launch plans: one file of a family chooses, every row says why, and every choice can be read without a launch."""

from __future__ import annotations

import ast
import importlib
import json
import re
from functools import cache
from pathlib import Path

import pytest

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.plans import (
    ANY,
    NOT_MEASURED,
    Row,
    Table,
    choices_of,
    condition,
    forced_row,
    planner,
    recorded_choices,
    recorded_plans,
    tables_in,
)
from tests.house.test_imports import MODULES, nodes_of

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
DATA = ROOT / "docs" / "data"
FAMILIES = sorted(path.parent.name for path in KERNELS.glob("*/plan.py"))
LIBRARIES = {"cuBLAS", "FlashMLA", "torch"}
MOST_PARAMETERS = 12


def tables(module: str) -> list[Table]:
    return tables_in(importlib.import_module(f"deepseek_attn.kernels.{module}"))


@cache
def device_functions() -> dict[str, ast.FunctionDef]:
    """Kernels by name, from the device files of all families."""
    found = {}
    for module in MODULES:
        if module.startswith("deepseek_attn.kernels."):
            for node in nodes_of(module):
                if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and is_compiled(node):
                    found[node.name] = node
    return found


def is_compiled(function: ast.FunctionDef) -> bool:
    """Triton or Gluon compiles it."""
    return any(".jit" in ast.unparse(decorator) for decorator in function.decorator_list)


TABLES = [table for family in FAMILIES for table in tables(f"{family}.plan")]
TABLES += tables("common.float32_product_plan")
IDS = [table.name for table in TABLES]


def test_families_have_plans():
    launched = {path.parent.name for kind in ("triton", "hopper") for path in KERNELS.glob(f"*/*_{kind}.py")}
    assert launched - {"common"} <= set(FAMILIES)
    assert len(TABLES) >= len(FAMILIES)
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize("table", TABLES, ids=IDS)
def test_rows_of_a_table(table):
    """Kernels exist, conditions differ, and sources are data that is there."""
    assert table.rows
    assert {row.kernel for row in table.rows} == set(table.kernels)
    assert set(table.kernels) <= set(device_functions()) | LIBRARIES
    conditions = [(row.when.name, row.kernel) for row in table.rows]
    assert len(set(conditions)) == len(conditions)
    for row in table.rows:
        if row.source != NOT_MEASURED:
            file, _, key = row.source.partition(": ")
            data = json.loads((DATA / file).read_text(encoding="utf-8"))
            assert key in data, row


@pytest.mark.parametrize("path", sorted(DATA.glob("*_tune_*.json")), ids=lambda path: path.stem)
def test_tuned_data_names_tables_and_kernels(path):
    """Conditions in it are those of the day: changing a threshold does not change what was measured."""
    data = json.loads(path.read_text(encoding="utf-8"))
    kernels = {table.name: set(table.kernels) for table in TABLES}
    for name in [name for name in data if "." in name]:
        for timing in data[name]:
            assert {row["kernel"] for row in (timing["taken"], *timing["others"])} <= kernels[name]


def test_plan_files_import_no_triton():
    for family in [*FAMILIES, "common"]:
        path = KERNELS / family / ("plans.py" if family == "common" else "plan.py")
        assert not re.search(r"^\s*(import|from) triton", path.read_text(encoding="utf-8"), re.MULTILINE), path


def test_only_plans_know_capabilities():
    """Other files ask for properties of a `GPU`, or for a plan."""
    allowed = {"common/device.py", "common/dispatch.py", *(f"{family}/plan.py" for family in FAMILIES)}
    files = list(KERNELS.glob("*/*.py"))
    assert len(files) > 60
    for path in files:
        name = path.relative_to(KERNELS).as_posix()
        if name not in allowed:
            assert "capability" not in re.sub(
                r'""".*?"""|#.*', "", path.read_text(encoding="utf-8"), flags=re.DOTALL
            ), name


def test_kernels_have_few_parameters():
    """Tensor descriptors apart: Triton's launcher takes them as parameters of their own alone."""
    functions = device_functions()
    assert len(functions) > 40
    parameters = {name: [arg.arg for arg in function.args.args] for name, function in functions.items()}
    counts = {name: sum(not arg.endswith("_desc") for arg in args) for name, args in parameters.items()}
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}


@condition
def small(problem: int, gpu: GPU) -> bool:
    return problem < 4


@condition
def even(problem: int, gpu: GPU) -> bool:
    return problem % 2 == 0


HALVES = Row(even, "halves_kernel", lambda problem, gpu: problem // 2, "data.json: halves")
NUMBERS: Table[int] = Table(
    "test.numbers", {"small_kernel": small, "halves_kernel": even, "any_kernel": ANY},
    [Row(ANY, "small_kernel", 1), HALVES, Row(ANY, "any_kernel", 3)],
)  # fmt: skip
HERE = GPU((9, 0), 132)


@planner("test.numbers")
def plan(problem: int, gpu: GPU) -> list:
    return [NUMBERS.choose(problem, gpu)]


def test_the_first_row_that_applies_is_taken():
    assert [NUMBERS.choose(n, HERE).kernel for n in (3, 4, 5)] == ["small_kernel", "halves_kernel", "any_kernel"]
    assert NUMBERS.choose(8, HERE)[:4] == ("halves_kernel", 4, "even", "data.json: halves")
    with pytest.raises(ValueError, match="no kernel supports 5"):
        Table("test.none", {"halves_kernel": even}, [HALVES]).choose(5, HERE)
    assert (small & ~even | even).name == "(small & ~even | even)"
    assert [(small & ~even)(n, HERE) for n in (1, 2, 5)] == [True, False, False]


def test_a_row_can_be_forced_for_one_problem():
    with forced_row(NUMBERS, NUMBERS.rows[2], 2):
        assert [NUMBERS.choose(n, HERE).kernel for n in (2, 3)] == ["any_kernel", "small_kernel"]
    with forced_row(NUMBERS, HALVES):
        assert [NUMBERS.choose(n, HERE).kernel for n in (2, 5)] == ["halves_kernel", "any_kernel"]
        assert plan(2, HERE)[0].kernel == "halves_kernel"
    assert plan(2, HERE)[0].kernel == "small_kernel"
    assert NUMBERS.candidates(2, HERE) == list(NUMBERS.rows)
    assert NUMBERS.candidates(5, HERE) == [NUMBERS.rows[2]]


def test_plans_and_choices_are_recorded():
    with recorded_plans() as plans:
        plan(6, HERE)
        plan(6, HERE)
    assert [(planned.op, planned.problem) for planned in plans] == [("test.numbers", 6)] * 2
    assert plans[0].plan is plans[1].plan
    assert [choice.kernel for choice in choices_of(plans[0].plan)] == ["halves_kernel"]
    with recorded_choices() as choices:
        plan(6, HERE)
    assert [(consulted.table, consulted.problem) for consulted in choices] == [(NUMBERS, 6)]
