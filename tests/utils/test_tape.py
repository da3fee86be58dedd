"""Recorded operations are repeated with new values, and what cannot be repeated is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepseek_attn.utils import tape as module
from deepseek_attn.utils.tape import NotRepeatable, Tape, reads_values, recording, when


def on_cpu(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def assert_repeats(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> Tape:
    """A tape of the first input gives the results of the function for all of them."""
    x, results = inputs[0].clone(), []
    with torch.inference_mode():
        tape = Tape(lambda: results.append(function(x)), [x])
        for value in inputs:
            x.copy_(value)
            tape.replay()
            assert torch.equal(results[0], function(value)), value
    return tape


@reads_values
def first_ones(x: Tensor) -> Tensor:
    ones = torch.zeros_like(x)
    ones[: int(x[0])] = 1
    return ones


@reads_values
def double_first(x: Tensor) -> None:
    if x.tolist()[0] > 1:
        x.numpy()[0] *= 2


TABLE = torch.arange(12, dtype=torch.float32, device="cpu").view(4, 3)


def assigned(x: Tensor) -> Tensor:
    rows = torch.zeros(3, 3, dtype=torch.float32, device="cpu")
    rows[x[:1].long()] = x  # zeros are written again: the row of the run before must not stay
    return rows


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:].mul_(3).add_(x[:2])
    double_first(y)
    return y


def branched(x: Tensor) -> Tensor:
    y = x * 2
    when(x[0] > 0, lambda: y.index_copy_(0, x[:1].long(), x[1:2] + 5))
    return double(y)


@reads_values
def nested(x: Tensor) -> Tensor:
    y = x.clone()
    double_first(y)
    when(y[0] > 2, lambda: y.add_(1))
    return y * int(y[0])


@reads_values
def double(x: Tensor) -> Tensor:
    return x + x


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "views and a product": lambda x: F.linear(x.view(1, 3), TABLE).t()[1:].flatten() + x.double()[0],
    "indexing": lambda x: TABLE[x.long()] + TABLE.index_select(0, x.long()).masked_fill(x > 1, -1),
    "two results": lambda x: torch.cat([*x.sort(stable=True, descending=True), *x.aminmax()[:1][0].view(1, 1)]),
    "rows written": assigned,
    "in place": in_place,
    "a branch": branched,
    "values read": lambda x: first_ones(x) * x,
    "values read in a function that reads values": nested,
    "functions of nn": lambda x: F.silu(x) + F.softplus(x).softmax(-1) + F.rms_norm(x, (3,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_repeats_with_new_values(name: str) -> None:
    assert_repeats(FUNCTIONS[name], on_cpu(0, 1, 2), on_cpu(2, 0, 1), on_cpu(1, 2, 0))


def test_is_freed_with_its_last_user() -> None:
    x = on_cpu(0, 1, 2)
    tape = Tape(lambda: branched(in_place(x)), [x])
    alive = weakref.ref(tape)
    gc.disable()
    del tape
    gc.enable()
    assert alive() is None


def test_leaves_out_what_does_not_change() -> None:
    tape = assert_repeats(lambda x: x + (TABLE * 2).sum() + torch.ones_like(TABLE).sum(), on_cpu(1), on_cpu(2))
    assert len(tape.calls) == 2, "the product of a constant is computed once, and so are ones"


@pytest.mark.parametrize(
    "read",
    [lambda x: x.tolist(), lambda x: x.numpy(), lambda x: int(x[0]), lambda x: x.nonzero(), lambda x: x[x > 0]],
    ids=["tolist", "numpy", "int", "nonzero", "mask"],
)
def test_refuses_values_read_elsewhere(read: Callable[[Tensor], object]) -> None:
    x = on_cpu(1, 2)
    with pytest.raises(NotRepeatable):
        Tape(lambda: read(x), [x])
    assert not recording()
    read(x)  # no mode has stayed


def test_refuses_to_keep_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = on_cpu(1, 2)
    monkeypatch.setattr(module, "MOST_BYTES", 11)
    with pytest.raises(NotRepeatable, match="11 bytes"):
        Tape(lambda: (x + 1) * 2, [x])
