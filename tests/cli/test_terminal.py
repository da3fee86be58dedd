"""Text from elsewhere on a terminal: shown, and without power over it. Files and pipes get it as it is."""

import io
import logging
import sys
import warnings

import pytest

from deepseek_attn.cli import main
from deepseek_attn.cli.log import logged
from deepseek_attn.cli.terminal import say, show, write_above_bars
from deepseek_attn.utils.terminal import visible

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31mred\r\x08\x7f\x00"
SHOWN = r"\x1b[2J\x1b]0;title\x07\x9b31mred\x0d\x08\x7f\x00"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_all_controls_but_newline_and_tab_are_escaped():
    controls = [*range(32), *range(127, 160)]
    for code in controls:
        assert visible(chr(code)) == (chr(code) if chr(code) in "\n\t" else f"\\x{code:02x}")
    text = "".join(map(chr, [*range(32, 127), *range(160, 0x3000), 0x1F600]))
    assert visible(text) == text


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_commands_print_escapes_on_a_terminal_alone(monkeypatch, stream):
    out, err = stream(), stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    show(HOSTILE, end="")
    say(HOSTILE)
    write_above_bars(HOSTILE, err)
    with logged(logging.INFO):
        logging.getLogger("deepseek_attn").info("%s", HOSTILE)
    expected = SHOWN if stream is Terminal else HOSTILE
    assert out.getvalue() == expected
    assert err.getvalue() == f"{expected}\n" * 3


def test_errors_and_warnings_are_escaped(monkeypatch, tmp_path):
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    assert main(["experiment", "report", str(tmp_path / HOSTILE.replace("\x00", ""))]) == 2
    assert main(["plan", "--model", HOSTILE]) == 2
    with pytest.raises(SystemExit):
        main(["plan", HOSTILE])
    with logged(logging.INFO):
        assert HOSTILE not in warnings.formatwarning(HOSTILE, UserWarning, "file.py", 1)
    assert r"\x1b[2J" in err.getvalue()
    assert visible(err.getvalue()) == err.getvalue()


def test_a_closed_standard_error_takes_nothing_to_standard_output(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    say("a note")
    assert capsys.readouterr().out == ""
