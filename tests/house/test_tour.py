"""The notebook docs/tour.ipynb: its cells run, and it shows what they print."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "docs" / "tour.ipynb"


def code_cells() -> list[tuple[str, str]]:
    """Source and printed output of each code cell."""
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), "".join(cell["outputs"][0]["text"])) for cell in code]


def test_the_notebook_is_small_and_has_its_output():
    assert TOUR.stat().st_size < 20_000
    assert len(code_cells()) == 3
    assert all(shown for _, shown in code_cells())


@pytest.mark.exhaustive
def test_the_cells_run_and_print_what_is_shown():
    """One after the other, as in a notebook; the experiment's times differ from run to run."""
    pytest.importorskip("transformers")
    names: dict[str, object] = {"__name__": "tour"}
    for number, (source, shown) in enumerate(code_cells()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"docs/tour.ipynb, cell {number}", "exec"), names)
        if number < 2:
            assert printed.getvalue() == shown
        else:
            done = re.search(r"(\d+) of \1 pieces of work done", shown)
            assert done is not None
            assert done[0] in printed.getvalue()
            assert "'report.html'" in printed.getvalue()
