"""Standard output while C++ libraries may write to it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os
from deepseek_attn.utils.processes import output_to_stderr

{before}
with output_to_stderr():
    os.system("echo inside")
os.system("echo outside")
"""


@pytest.mark.parametrize(
    ("before", "out", "err"),
    [("", "outside\n", "inside\n"), ("os.close(2)", "inside\noutside\n", ""), ("os.close(1)", "", None)],
    ids=["both", "no stderr", "no stdout"],
)
def test_output_to_stderr(before, out, err):
    """A stream that is closed is no error."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(before=before)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, out)
    assert err is None or ended.stderr == err
