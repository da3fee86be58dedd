"""`deepseek_attn.testing`: its example and fixture, the reference beside transformers, mistakes that it finds."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.testing import __file__ as testing_file, layer_reference, relative_error
from deepseek_attn.testing.random_layer import NAN_BYTE
from deepseek_attn.testing.transformers_layer import TransformersLayer
from tests.house.test_imports import MODULES, imported_with
from tests.support.tiers import tiered
from tests.support.typed import required, untyped

ROOT = Path(__file__).parents[2]
EXAMPLE = Path(testing_file).with_name("__main__.py")  # a program: importing it runs it
V32 = ModelConfig.from_preset("tiny_v32")
LAYERS = {
    "SWA": (ModelConfig.from_preset("tiny"), 0),
    "C4A": (ModelConfig.from_preset("tiny"), 1),
    "C128A": (ModelConfig.from_preset("tiny"), 2),
    "V3.2": (V32, 0),
    "V3": (V32.replace(model_type="deepseek_v3"), 1),
}
EXACT = [(kind, "float32", "exact") for kind in LAYERS]
OTHERS = [(kind, dtype, name) for kind in LAYERS for dtype, name in (("bfloat16", "exact"), ("bfloat16", "serving"))]
OTHERS += [(kind, "float32", "official") for kind in LAYERS]


@pytest.mark.exhaustive
def test_the_example(capsys):
    """``python -m deepseek_attn.testing``, which README shows."""
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    found = [
        required(re.fullmatch(r"(\w+): largest difference to transformers (\S+)", line)).groups() for line in lines
    ]
    assert [kind for kind, _ in found] == ["SWA", "C4A", "C128A"]
    assert all(0 < float(difference) < 1e-5 for _, difference in found)


def test_the_example_is_that_of_the_page():
    code = EXAMPLE.read_text(encoding="utf-8").split('"""')[-1].strip()
    assert f"```python\n{code}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("kind", "dtype", "numerics"), tiered(EXACT + OTHERS, [*EXACT, OTHERS[3]]))
def test_random_layers(random_layer, kind, dtype, numerics):
    """Prompts, chunks and decodes of two sequences through the fixture, within the tolerances of every dtype."""
    layer = random_layer(*LAYERS[kind], device="cpu", dtype=dtype, numerics=numerics)
    requests = [layer.request(n) for n in (141, 66)]
    layer.run(requests, [60, 5, 1, 63])
    for request in requests:
        layer.check(request)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_reference_computes_what_transformers_does(kind):
    config, index = LAYERS[kind]
    source, x = RandomSource(config, 0), torch.randn(137, config.hidden_size)
    expected = layer_reference(config, source, index)(x)
    assert relative_error(TransformersLayer(config, source, index)(x), expected) < 2e-5


@pytest.mark.parametrize("kind", ["C4A", "V3.2"])
def test_a_wrong_result_and_a_wrong_selection_are_found(random_layer, kind):
    layer = random_layer(*LAYERS[kind], device="cpu")
    request = layer.request(120)
    layer.run([request], [100, 20])
    layer.check(request)
    last, right = request.outputs[1], request.selected[1].clone()
    request.outputs[1] = torch.cat([last[:-1], last[-1:] * 1.001])
    with pytest.raises(AssertionError, match=r"relative error of a row is .*every head, so look behind it") as wrong:
        layer.check(request)
    assert "request 0, position 119: row 19 of step 1, in a prefill of 20 token(s)" in str(wrong.value)
    assert "1 of 120 rows are wrong, at positions 119 to 119" in str(wrong.value)
    request.outputs[1] = last
    unread = next(e for e in range(25) if e not in right[-1])
    for entry in (unread, int(right[-1, 1]), 10**6):  # a worse entry, one twice, one that does not exist
        request.selected[1] = right.clone()
        request.selected[1][-1, 0] = entry
        with pytest.raises(AssertionError, match="selected entries score") as wrong:
            layer.check(request)
        assert "request 0, position 119: row 19 of step 1" in str(wrong.value)
        assert f"not selected: [{int(right[-1, 0])}]" in str(wrong.value)


# mistake: kind of layer, tokens, chunks, parts of the message
ALL = "channels 0 to 127 of 128"
MISTAKES = {
    "WrongHead": (
        "SWA",
        40,
        [30, 1],
        "position 0: row 0 of step 0, in a prefill of 30",
        f"head 2: {ALL}",
        "1 of 4 heads",
    ),
    "WrongHeadV32": ("V3.2", 40, [30, 1], "position 1: row 1 of step 0", "head 2: channels 0 to 63", "39 of 40 rows"),
    "LensOfPagesIgnored": (
        "C4A",
        22,
        [5, 1],
        "position 5: row 0 of step 1, in a decode of 1",
        "got nan",
        "4 of 4 heads",
    ),
    "LensOfRowsIgnored": (
        "C128A",
        40,
        [30, 1],
        "position 0: row 0 of step 0, in a prefill",
        "got nan",
        "30 of 40 rows",
    ),
    "WindowOffByOne": ("SWA", 22, [5, 1], "position 15: row 0 of step 11", ALL, "7 of 22 rows", "positions 0 to 15"),
    "SinkDropped": (
        "C4A",
        40,
        [37, 1],
        "position 37: row 0 of step 1, in a decode",
        ALL,
        "3 of 40 rows",
        "8 of 9 entries",
    ),
    "WrongScale": ("C4A", 33, [30, 1], "position 0: row 0 of step 0", "30 of 33 rows are wrong, at positions 0 to 29"),
    "StalePage": (
        "SWA",
        70,
        [60, 1],
        "position 64: row 0 of step 5, in a decode",
        "at positions 64 to 69",
        "positions 49 to 64",
    ),
    "NotRotatedBack": (
        "SWA",
        145,
        [140, 1],
        "position 140: row 0 of step 1",
        "channels 64 to ",
        "at positions 140 to 144",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_place_of_a_mistake_is_named(random_layer, mistake):
    kind, tokens, chunks, *expected = MISTAKES[mistake]
    options = {"dtype": "bfloat16", "numerics": "serving"} if mistake == "NotRotatedBack" else {}
    layer = random_layer(*LAYERS[kind], device="cpu", backend=f"tests.testing.broken_impls:{mistake}", **options)
    requests = [layer.request(n) for n in (tokens, 17)]
    layer.run(requests, chunks)
    with pytest.raises(AssertionError, match="attention is wrong: the relative error of a head is") as wrong:
        layer.check(requests[0])
    for part in (f"request 0, {expected[0]}", *expected[1:]):
        assert part in str(wrong.value)
    assert layer.attention.impl.__name__ == mistake


def test_a_row_of_the_second_request_in_another_order(random_layer):
    """Rows are numbered in the order of the step's input, decodes or not; a fork is a request of its own."""
    layer = random_layer(*LAYERS["SWA"], device="cpu", backend="tests.testing.broken_impls:SinkDropped")
    long, short = layer.request(30), layer.request(20)
    layer.step([(long, 10), (short, 5)])
    layer.step([(long, 4), (short, 1)])  # the layer computes the decode first
    with pytest.raises(AssertionError, match=re.escape("request 1, position 5: row 4 of step 1, in a decode of 1")):
        layer.check(short)
    layer.check(long)
    copy = layer.fork(short)
    layer.step([(copy, 3)])
    with pytest.raises(AssertionError, match="request 2, position 5"):
        layer.check(copy)


def test_what_nothing_has_written_is_poison(random_layer):
    layer = random_layer(*LAYERS["C128A"], device="cpu")
    assert all(pool.tensor.view(torch.uint8).eq(NAN_BYTE).all() for pool in layer.runner.pools)
    request = layer.request(40)
    layer.step([(request, 39)])
    page = request.sequence.cache.tables["window"][0]
    layer.runner.pools.get("layers.2", "window").tensor[page].fill_(NAN_BYTE)  # as if they had not been written
    layer.step([(request, 1)])
    assert request.outputs[-1].isnan().all()
    with pytest.raises(AssertionError, match=r"position 39: .*\n.*got nan"):
        layer.check(request)


def test_a_layer_that_does_not_exist():
    with pytest.raises(ValueError, match="layer 9 does not exist: the model has layers 0 to"):
        layer_reference(V32, RandomSource(V32, 0), 9)


@pytest.mark.exhaustive
def test_importing_it_needs_no_pytest_and_no_transformers():
    def reached(start: str) -> set[str]:
        """Read file by file: of the library's files it needs about a third."""
        found, left = set(), [start]
        while left:
            module = left.pop()
            new = imported_with(module) - found if module in MODULES else set()
            found |= new
            left += new
        return found

    packages = {name.split(".")[0] for name in reached("deepseek_attn.testing")}
    assert not packages & {"pytest", "transformers"}
    assert "torch" in packages
    assert "pytest" in reached("deepseek_attn.testing.fixtures")


def test_wrong_lengths_of_a_random_layer_are_refused(random_layer):
    layer = random_layer("tiny", 1)
    for length in (0, -1, 1.5, None, "x"):
        with pytest.raises(ValueError, match=r"length=.*positive integers are needed"):
            layer.request(untyped(length))
    request = layer.request(5)
    for chunks in ([], [0], ["x"], [1.5], None, 5):
        with pytest.raises(ValueError, match=r"chunks.*positive integers"):
            layer.run([request], untyped(chunks))
    with pytest.raises(ValueError, match="no token of the request is computed yet"):
        layer.check(request)
    layer.run([request], [2])
    layer.check(request)
