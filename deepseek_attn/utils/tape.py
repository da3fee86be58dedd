"""Tapes: torch's operations on a CPU, recorded once and repeated on the same tensors, as CUDA graphs do on a GPU.

Most of the time of a decode step of a small model goes to Python, dispatch, checks and views. A `Tape` repeats the
operations alone: each writes its result to the tensor that it returned when it was recorded. The bits stay the same.

An operation that depends on a value which Python has read cannot be repeated. `reads_values` marks functions with such
operations: the tape calls them again. A value that is read elsewhere ends the recording (`NotRepeatable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepseek_attn.utils.context import holding

P = ParamSpec("P")
R = TypeVar("R")
MOST_BYTES = 64 << 20  # of results that a tape keeps; a step that dequantises its weights has more
READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)  # values that no operation returns
NUMPY = {  # of real numbers, rounded once at most; torch's division and square root are not, for some shapes
    **{"mul": np.multiply, "add": np.add, "sub": np.subtract, "copy": np.positive},
    **{"ge": np.greater_equal, "lt": np.less, "eq": np.equal, "bitwise_and": np.bitwise_and, "bitwise_not": np.invert},
    **{"floor_divide": np.floor_divide, "remainder": np.remainder},
}
DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_recording: ContextVar[Tape | None] = ContextVar("recording", default=None)


class NotRepeatable(Exception):
    """The operations of a function may be others in its next call, or keep too much memory."""


def recording() -> bool:
    """Whether a tape records here: values must not be read, and no token is padding."""
    return _recording.get() is not None


def _adding() -> Tape | None:
    """The tape that adds the operations made here; None inside of a function that it calls again as a whole."""
    tape = _recording.get()
    return None if tape is None or tape.paused else tape


def reads_values(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that reads values of tensors: a tape calls it again, with the same arguments.

    The function returns None, or tensors whose shapes do not depend on values.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        tape = _adding()
        return function(*args, **kwargs) if tape is None else tape.add_call(function, args, kwargs)

    return call


def when(condition: Tensor, function: Callable[[], object]) -> None:
    """Calls ``function`` if the value is true. A tape records its operations when a replay first calls it.

    Of the operations outside of ``function``, only those in functions that read values may read what it writes.
    """
    if (tape := _adding()) is not None:
        tape.add_branch(condition, function)
    elif condition:
        function()


def once(function: Callable[P, R]) -> Callable[P, R]:
    """A function of tensors that nothing writes to: a tape has its operations once for the same tensors."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if (tape := _adding()) is None:
            return function(*args, **kwargs)
        key = function, *map(id, args), *map(id, kwargs.values())
        if key not in tape.known:
            tape.known[key] = args, kwargs, function(*args, **kwargs)  # arguments stay, and so do their ids
        return tape.known[key][-1]

    return call


class _Step(NamedTuple):
    """An operation: tensors that it reads and returns, and the call that repeats it; None for views."""

    tensors: list[Tensor]
    results: list[Tensor]
    call: Callable[[], object] | None
    always: bool = False


class Tape:
    """The operations of ``function``, which is called once, here.

    Args:
        inputs: tensors that the caller changes between runs; changing: storages that another tape does.

    Raises:
        NotRepeatable: ``function`` reads a value outside of `reads_values`, or its results take more than `MOST_BYTES`.
            The operations until then were computed: what they wrote stays.
    """

    def __init__(self, function: Callable[[], object], inputs: Iterable[Tensor], changing: Iterable[int] = ()):
        self.steps: list[_Step] = []
        self.paused, self.nbytes = False, 0
        self.known: dict[tuple, tuple] = {}  # results of functions that are called `once`
        self.changing = {*map(_memory, inputs), *changing}  # storages that are not the same in each run
        with holding(_recording, self), _Reads(self), _Operations(self):
            function()
        self.calls = self._calls()
        self.steps.clear()
        self.known.clear()

    def replay(self) -> None:
        """Repeats the operations."""
        for call in self.calls:
            call()

    def add_call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls a function that reads values, now and in each replay."""
        call = partial(function, *args, **kwargs)
        result = self._call(call)
        tensors, results = _tensors((args, kwargs)), _as_tuple(result)

        def copied() -> None:
            for old, new in zip(results, _as_tuple(call()), strict=True):
                if new is not old:
                    old.copy_(new)

        self.changing.update(map(_memory, (*tensors, *results)))  # it may write its arguments
        self.steps.append(_Step(tensors, list(results), copied if results else call, always=True))
        return result

    def add_branch(self, condition: Tensor, function: Callable[[], object]) -> None:
        """Calls a function if the value is true, now and in each replay."""
        branch, changing = [], self.changing

        def call() -> None:
            if condition and branch:
                branch[0].replay()
            elif condition:
                branch.append(Tape(function, (), changing))

        if self._call(condition.item):
            self._call(function)
        self.steps.append(_Step([condition], [], call, always=True))

    def _call(self, function: Callable[[], R]) -> R:
        """Calls a function that may read values."""
        self.paused = True
        try:
            return function()
        finally:
            self.paused = False

    def add(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Calls an operation of torch, and records it."""
        if not DEPENDS_ON_VALUES.isdisjoint(op.tags) and not _indexes_by_number(op, args):
            raise NotRepeatable(f"{op} depends on values")
        result = op(*args, **kwargs)
        tensors, results, schema = _tensors((args, kwargs)), _tensors(result), op._schema
        call, name = None, _name(op)
        if schema.is_mutable:
            written = [value for value, a in zip(args, schema.arguments, strict=False) if a.alias_info is not None]
            self.changing.update(map(_memory, _tensors((written, kwargs.get("out")))))
            call = partial(getattr(torch if "out" in kwargs else Tensor, name, op), *args, **kwargs)
        elif "empty" not in name and not any(value.alias_info is not None for value in schema.returns):
            self.nbytes += sum(tensor.nbytes for tensor in results)
            if self.nbytes > MOST_BYTES:
                raise NotRepeatable(f"the results take more than {MOST_BYTES:,} bytes")
            call = _writing_to(result, op, args, kwargs)
        self.steps.append(_Step(tensors, results, call))
        return result

    def _calls(self) -> list[Callable[[], object]]:
        """The calls, without those whose results are the same in each run."""
        calls = []
        for step in self.steps:
            if step.always or not self.changing.isdisjoint(map(_memory, (*step.tensors, *step.results))):
                self.changing.update(map(_memory, step.results))
                calls += [] if step.call is None else [step.call]
        return calls


class _Operations(TorchDispatchMode):
    """Passes each operation to a tape."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.tape.paused:
            return func(*args, **kwargs)
        with self:  # in inference mode, operations that consist of others arrive whole
            result = func.decompose(*args, **kwargs)
        return self.tape.add(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second


class _Reads(TorchFunctionMode):
    """Raises `NotRepeatable` for values that are read without an operation."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in READS and not self.tape.paused:
            raise NotRepeatable(f"{func.__name__} reads values")
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> list[Tensor]:
    """The tensors in nested sequences and dicts."""
    if isinstance(values, (tuple, list, dict)):
        parts = values.values() if isinstance(values, dict) else values
        return [tensor for part in parts for tensor in _tensors(part)]
    return [values] if isinstance(values, Tensor) else []


def _as_tuple(result: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


def _name(op: Any) -> str:
    return op._schema.name.split("::")[1]


def _indexes_by_number(op: Any, args: tuple) -> bool:
    """Whether an operation is ``x[i]`` with numbers, whose result has the same shape for all values."""
    return op is torch.ops.aten.index.Tensor and all(
        i.dtype not in (torch.bool, torch.uint8) for i in _tensors(args[1])
    )


def _writing_to(result: Any, op: Any, args: tuple, kwargs: dict) -> Callable[[], object]:
    """A call that computes ``op`` into the tensors that it returned, with the same bits."""
    name, nn, packet = _name(op), vars(torch._C)["_nn"], op.overloadpacket
    if name in ("_to_copy", "clone"):
        name, args, kwargs = "copy", args[:1], {}
    if isinstance(result, Tensor) and not kwargs and (call := _in_numpy(name, args, result)) is not None:
        return call
    if name == "copy":
        return partial(result.copy_, *args)
    for owner, attribute in ((torch, name), (nn, name), (packet, f"{op._overloadname}_out"), (packet, "out")):
        if (function := getattr(owner, attribute, None)) is None:
            continue
        outs = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in _tensors(result)]
        try:
            function(*args, **kwargs, out=outs[0] if isinstance(result, Tensor) else tuple(outs))
        except (TypeError, RuntimeError):  # it takes no ``out``
            continue
        if all(map(torch.equal, outs, _tensors(result))):
            return partial(function, *args, **kwargs, out=result)

    def copied() -> None:
        for old, new in zip(_as_tuple(result), _as_tuple(op(*args, **kwargs)), strict=True):
            old.copy_(new)

    return copied


def _in_numpy(name: str, args: tuple, result: Tensor) -> Callable[[], object] | None:
    """A call of NumPy, in a third of torch's time, that writes to ``result``; None where none has the same bits."""
    if (function := NUMPY.get(name)) is None or result.is_complex():
        return None
    try:
        arrays = [value.numpy() if isinstance(value, Tensor) else value for value in args]
        out = result.numpy()
        if not np.array_equal(function(*arrays, np.empty_like(out)), out):
            return None
    except (TypeError, RuntimeError, ValueError):  # a dtype that NumPy lacks, a conjugate view
        return None
    return partial(function, *arrays, out)
