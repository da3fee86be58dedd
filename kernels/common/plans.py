"""Launch plans: how every kernel family chooses kernels and tiles, and how callers inspect the choice.

A family has three parts. Its contract (``__init__.py``) defines the result of each op. ``plan(problem, gpu)`` in its
``plan.py`` chooses kernels, tiles and splits. ``launch(plan, arguments)`` in its ``launch.py`` packs the arguments and
launches the kernels.

* A **problem** is a frozen dataclass of shapes, dtypes, formats and alignment: all that a choice may depend on. It is
  made without tensors.
* A **table** lists the kernels of an op with the problems that each supports, and rows: the first row whose kernel
  supports the problem and whose condition holds is taken.
* A **source** names the data behind a row: ``"h100_linear.json: products"``, a file in ``docs/data`` and a key of it;
  `NOT_MEASURED` where nobody measured.

Imports no Triton: plans can be made on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from functools import cached_property, lru_cache
from itertools import chain
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.invariance import MANY_ROWS
from deepseek_attn.utils.context import holding

NOT_MEASURED = "not measured"

P = TypeVar("P")
ProblemT = TypeVar("ProblemT", contravariant=True)  # a condition on any problem applies to each problem type
PlanT = TypeVar("PlanT")


@dataclass(frozen=True)
class Condition(Generic[ProblemT]):
    """A named test of a problem on a GPU; ``&``, ``|`` and ``~`` combine conditions and their names."""

    name: str
    test: Callable[[ProblemT, GPU], bool]

    def __call__(self, problem: ProblemT, gpu: GPU) -> bool:
        return self.test(problem, gpu)

    def __and__(self: Condition[P], other: Condition[P]) -> Condition[P]:
        return Condition(f"{self.name} & {other.name}", lambda problem, gpu: self(problem, gpu) and other(problem, gpu))

    def __or__(self: Condition[P], other: Condition[P]) -> Condition[P]:
        name = f"({self.name} | {other.name})"
        return Condition(name, lambda problem, gpu: self(problem, gpu) or other(problem, gpu))

    def __invert__(self) -> Condition[ProblemT]:
        return Condition(f"~{self.name}", lambda problem, gpu: not self(problem, gpu))


def condition(test: Callable[[P, GPU], bool]) -> Condition[P]:
    """Decorator: the condition of a function's name, without leading underscores."""
    return Condition(test.__name__.lstrip("_"), test)


ANY: Condition[Any] = Condition("any", lambda problem, gpu: True)


def has(field: str) -> Condition[Any]:
    """A field of the problem is set."""
    return Condition(field, lambda problem, gpu: bool(getattr(problem, field)))


def equals(field: str, value: Any) -> Condition[Any]:
    return Condition(f"{field} == {value!r}", lambda problem, gpu: getattr(problem, field) == value)


def at_least(field: str, value: float) -> Condition[Any]:
    return Condition(f"{field} >= {value}", lambda problem, gpu: getattr(problem, field) >= value)


def up_to(field: str, value: float) -> Condition[Any]:
    return Condition(f"{field} <= {value}", lambda problem, gpu: getattr(problem, field) <= value)


HOPPER: Condition[Any] = Condition("hopper", lambda problem, gpu: gpu.hopper)
DATACENTER: Condition[Any] = Condition("datacenter", lambda problem, gpu: gpu.capability[0] in (9, 10))
"""227 KiB of shared memory, wide tensor cores and early launches, which other generations lack."""


@dataclass(frozen=True)
class Row(Generic[P]):
    """One line of a table.

    Attributes:
        when: where this row is the fastest, among the problems that ``kernel`` supports.
        kernel: name of the device function, or of the library that computes (``cuBLAS``, ``FlashMLA``).
        config: tiles, warps and stages; or a function of the problem and the GPU, where they follow from the number of
            multiprocessors.
        source: a file of ``docs/data`` and a key of it, or `NOT_MEASURED`.
    """

    when: Condition[P]
    kernel: str
    config: Any = None
    source: str = NOT_MEASURED


@dataclass(frozen=True)
class RowsProblem:
    """Rows of values that programs compute each by itself.

    Attributes:
        rows: of the call; channels: values of a row.
        batch_invariant: the choice must not depend on the number of rows.
    """

    rows: int
    channels: int = 1
    batch_invariant: bool = False

    @property
    def planned_rows(self) -> int:
        """Rows that the launch is configured for."""
        return MANY_ROWS if self.batch_invariant else self.rows

    @property
    def values(self) -> int:
        """Values of all rows."""
        return self.rows * self.channels


@dataclass(frozen=True, kw_only=True)
class KernelRows(RowsProblem):
    """Rows of a launch of the given ``kernel``, or of a launch that prepares the input of that kernel."""

    kernel: str


class LaunchBlock(NamedTuple):
    """Launch configuration of a kernel whose programs each compute ``size`` values, with ``warps``."""

    size: int
    warps: int = 4


def channel_block(most: int, warps: int = 4) -> Callable[[RowsProblem, GPU], LaunchBlock]:
    """Blocks of a power of two of a row's channels, at most ``most``."""
    return lambda problem, gpu: LaunchBlock(min(most, next_power_of_2(problem.channels)), warps)


class Choice(NamedTuple):
    """The row that was taken for a problem on a GPU: the plan of one launch.

    Attributes:
        kernel, source: of the row; config: of the row, for this problem.
        when: name of the row's condition.
        native_fp8, pdl: as in `GPU`; ``early=False`` in the configuration turns early launch off.
    """

    kernel: str
    config: Any
    when: str
    source: str
    native_fp8: bool = False
    pdl: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of the launch, if the configuration sets the warps of a program."""
        return pdl_options(self.config.warps, self.pdl)


class SharedLaunch(NamedTuple):
    """A prepared launch of one op: its own kernel runs it, or a kernel that computes two ops in one launch.

    Attributes:
        plan: of the op, which names the kernel.
        arguments, shape: runtime arguments and constants of the device code.
        out: the result; grid: programs that compute it.
    """

    plan: Any
    arguments: Any
    shape: Any
    out: Any
    grid: tuple[int, ...]


def launch_options(warps: int = 4, pdl: bool = False) -> dict[str, Any]:
    """Options of every launch, besides its arguments: a product and a sum are one instruction, rounded once.

    Args:
        warps: of a program.
        pdl: the kernel may start before the previous one has ended.
    """
    return {"enable_fp_fusion": True, "num_warps": warps, "launch_pdl": pdl}


def pdl_options(warps: int, pdl: bool) -> dict[str, Any]:
    """`launch_options` of a kernel with a constant ``PDL``."""
    return {"PDL": pdl, **launch_options(warps, pdl)}


@dataclass(frozen=True)
class Table(Generic[P]):
    """Kernels of an op, and the rows that choose among them.

    Attributes:
        name: ``family.op``, unique.
        kernels: by name, the condition for a problem that the kernel supports. The kernel is never launched for any
            other problem.
        rows: the first row that applies is chosen.
    """

    name: str
    kernels: dict[str, Condition[P]]
    rows: Sequence[Row[P]]

    def choose(self, problem: P, gpu: GPU) -> Choice:
        """The first row that applies, or the row of `forced_row` if its kernel supports the problem.

        Raises:
            ValueError: no kernel supports the problem.
        """
        forced, rows = _forced.get(), (row for row in self.rows if row.when(problem, gpu))
        if forced is not None and forced.table is self and forced.problem in (None, problem):
            rows = chain([forced.row], rows)
        row = next((row for row in rows if self.supports(row, problem, gpu)), None)
        if row is None:
            raise ValueError(f"{self.name}: no kernel supports {problem} on {gpu}")
        choice = self.chosen(row, problem, gpu)
        if (consulted := _consulted.get()) is not None:
            consulted.append(Consulted(self, problem, choice))
        return choice

    @cached_property
    def plan(self) -> Callable[[P, GPU], Choice]:
        """The `Planner` of an op that takes one row of this table, which gives the op its name."""
        return Planner(self.name, self.choose)

    def supports(self, row: Row[P], problem: P, gpu: GPU) -> bool:
        """Whether the kernel of a row can compute a problem."""
        supported = self.kernels[row.kernel]
        return supported(problem, gpu)

    def candidates(self, problem: P, gpu: GPU) -> list[Row[P]]:
        """Rows whose kernel supports the problem, whatever their condition; each configuration once."""
        found: dict[Any, Row[P]] = {}
        for row in self.rows:
            if self.supports(row, problem, gpu):
                choice = self.chosen(row, problem, gpu)
                found.setdefault((choice.kernel, repr(choice.config)), row)
        return list(found.values())

    def chosen(self, row: Row[P], problem: P, gpu: GPU) -> Choice:
        """The `Choice` of a row for a problem."""
        config = row.config(problem, gpu) if callable(row.config) else row.config
        pdl = gpu.pdl and getattr(config, "early", True)
        return Choice(row.kernel, config, row.when.name, row.source, gpu.native_fp8, pdl)


def one_kernel(name: str, kernel: str, *rows: tuple[Any, ...]) -> Table[Any]:
    """A table of a single kernel that supports every problem; rows: condition, configuration and source."""
    return Table(name, {kernel: ANY}, [Row(when, kernel, *rest) for when, *rest in rows])


def given_kernels(name: str, *rows: tuple[Any, ...]) -> Table[KernelRows]:
    """A table whose problems name the kernel; rows: kernel, configuration and source."""
    return Table(name, {row[0]: equals("kernel", row[0]) for row in rows}, [Row(ANY, *row) for row in rows])


def tables_in(module: ModuleType) -> list[Table]:
    """The tables of a family's ``plan.py``, in its order."""
    return [value for value in vars(module).values() if isinstance(value, Table)]


class Forced(NamedTuple):
    """A row forced on a table, for one ``problem`` or, with None, for every problem."""

    table: Table
    row: Row
    problem: Any


_forced: ContextVar[Forced | None] = ContextVar("forced", default=None)


def forced_row(table: Table[P], row: Row[P], problem: P | None = None) -> AbstractContextManager[Forced]:
    """Context in which a table chooses ``row`` if its kernel supports the problem (``bench tune``, tests).

    Args:
        problem: choose the row for this problem alone; None: for every problem.
    """
    return holding(_forced, Forced(table, row, problem))


class Consulted(NamedTuple):
    """A choice that a table has made for a problem."""

    table: Table
    problem: Any
    choice: Choice


_consulted: ContextVar[list[Consulted] | None] = ContextVar("consulted", default=None)


def recorded_choices() -> AbstractContextManager[list[Consulted]]:
    """Lists the choices of all tables in this context, in order; plans are made anew for it."""
    return holding(_consulted, [])


class Planned(NamedTuple):
    """A plan that an op has made: ``op`` is ``family.op``."""

    op: str
    problem: Any
    plan: Any


_recorded: ContextVar[list[Planned] | None] = ContextVar("recorded", default=None)


class Planner(Generic[P, PlanT]):
    """A ``plan(problem, gpu)`` that remembers plans, and notes them in `recorded_plans` under the name ``op``.

    A plan depends on its problem and the GPU alone, so equal problems share one.
    """

    def __init__(self, op: str, plan: Callable[[P, GPU], PlanT]):
        self._op, self._plan, self._cached = op, plan, lru_cache(maxsize=4096)(plan)

    def __call__(self, problem: P, gpu: GPU) -> PlanT:
        anew = _forced.get() is not None or _consulted.get() is not None
        made = (self._plan if anew else self._cached)(problem, gpu)
        if (noted := _recorded.get()) is not None:
            noted.append(Planned(self._op, problem, made))
        return made


def planner(op: str) -> Callable[[Callable[[P, GPU], PlanT]], Planner[P, PlanT]]:
    """Decorator: the `Planner` of a function."""
    return lambda plan: Planner(op, plan)


def recorded_plans() -> AbstractContextManager[list[Planned]]:
    """Lists the plans that ops make in this context, in order."""
    return holding(_recorded, [])


def unlisted_plans() -> AbstractContextManager[None]:
    """Plans made in this context are not in `recorded_plans`: the kernel of another op computes their part."""
    return holding(_recorded, None)


def choices_of(plan: Any) -> list[Choice]:
    """The choices in a plan, in the order of its fields."""
    if isinstance(plan, Choice):
        return [plan]
    parts = vars(plan).values() if is_dataclass(plan) else plan if isinstance(plan, tuple | list) else ()
    return [choice for part in parts for choice in choices_of(part)]


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()
