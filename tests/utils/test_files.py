"""Files and directories appear complete or not at all, or grow by whole lines, where their path leads."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from deepseek_attn.utils import files, line_files
from deepseek_attn.utils.files import UNFINISHED, appearing, check_output, write_tensors, write_text
from deepseek_attn.utils.line_files import appending
from tests.support.interruptions import InterruptBefore
from tests.support.typed import required

TENSORS = {"a": torch.arange(3)}


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with appearing(path) as partial:
        assert partial.name == path.name
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def write_half():
        with appearing(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_errors_about_the_output_are_called_so(tmp_path):
    def read_while_writing():
        with appearing(tmp_path / "a"):
            (tmp_path / "none").read_text()

    def write_in_vain():
        with appearing(tmp_path / "a"), open("/dev/full", "w") as full:
            full.write("x" * 100_000)

    with pytest.raises(FileNotFoundError, match="none"):
        read_while_writing()
    with pytest.raises(ValueError, match=r"a' cannot be written: No space left on device"):
        write_in_vain()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [lambda path: write_text(path, "x"), lambda path: write_tensors(path, TENSORS)])
def test_modes(tmp_path, umask, write):
    new, old = tmp_path / "new", tmp_path / "old"
    old.touch()
    old.chmod(0o604)
    write(new)
    write(old)
    assert (mode(new), mode(old)) == (0o640, 0o604)
    assert old.stat().st_size


def test_a_directory_has_the_permissions_of_any_other(tmp_path, umask):
    with appearing(tmp_path / "made" / "deep", directory=True) as partial:
        (partial / "a.txt").write_text("x")
    (tmp_path / "plain").mkdir()
    (tmp_path / "empty").mkdir(0o705)
    (tmp_path / "empty").chmod(0o705)
    with appearing(tmp_path / "empty", directory=True) as partial:
        (partial / "a.txt").write_text("x")
    assert (tmp_path / "made" / "deep" / "a.txt").read_text() == "x"
    assert mode(tmp_path / "made" / "deep") == mode(tmp_path / "plain") == 0o750
    assert mode(tmp_path / "empty") == 0o705
    assert list((tmp_path / "made").iterdir()) == [tmp_path / "made" / "deep"]


def test_a_directory_that_fails_leaves_no_folder_above_it(tmp_path):
    def write_half():
        with appearing(tmp_path / "made" / "deep", directory=True) as partial:
            (partial / "a.txt").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_files_appear_together_in_a_directory(tmp_path):
    """Beside others, or not at all; and an error names the final path."""
    folder = tmp_path / "made" / "deep"
    for there, names in ((False, "ab"), (True, "bc")):
        with pytest.raises(ValueError, match=rf"^'{folder}/b' cannot be written: it is a folder$"):
            write_both(folder, names, fails=True)
        assert (tmp_path / "made").exists() == there
        write_both(folder, names)
    assert sorted((path.name, path.read_text()) for path in folder.iterdir()) == [("a", "ab"), ("b", "bc"), ("c", "bc")]
    assert list((tmp_path / "made").iterdir()) == [folder]


def write_both(folder: Path, names: str, fails: bool = False) -> None:
    with appearing(folder, directory=True, into=True) as partial:
        for name in names:
            write_text(partial / name, names)
        if fails:
            (partial / "b").unlink()
            (partial / "b").mkdir()
            write_text(partial / "b", "")


def test_a_file_that_fails_leaves_no_folder_above_it(tmp_path):
    path = tmp_path / "made" / "deep" / "a"
    check_output(path, "--out", parents=True)
    assert list(tmp_path.iterdir()) == []

    def write_half():
        with appearing(path, parents=True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []
    write_text(path, "x", parents=True)
    assert path.read_text() == "x"
    for wrong, reason in ((path / "b", "File exists"), (path / "b" / "c", "Not a directory")):
        with pytest.raises(ValueError, match=rf"^--out {wrong}: the folder '{wrong.parent}' cannot be made: {reason}$"):
            check_output(wrong, "--out", parents=True)


@pytest.mark.parametrize("there", [True, False])
def test_links_are_followed(tmp_path, there):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to("folder/target")
    if there:
        target.write_text("old")
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert list((tmp_path / "folder").iterdir()) == [target]


def test_a_pipe_is_written_to(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_tensors(pipe, TENSORS)
    reader.join(timeout=60)
    assert torch.equal(load(found[0])["a"], TENSORS["a"])
    assert pipe.is_fifo()


def test_a_device_is_written_to(tmp_path):
    link = tmp_path / "device"
    link.symlink_to("/dev/full")
    with pytest.raises(ValueError, match="No space left on device"):
        write_text(link, "x")
    link.unlink()
    link.symlink_to("/dev/null")
    write_text(link, "x")
    assert stat.S_ISCHR(link.stat().st_mode)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent/a", r"the folder '.*absent' does not exist"),
        ("folder", "it is a folder"),
        ("loop", "Too many levels of symbolic links"),
        ("socket", "it is a socket"),
        ("file/a", r"the folder '.*file' does not exist"),
        ("x" * 300, "File name too long"),
    ],
)
def test_paths_that_cannot_be_written_to(tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError, match=f"--out .*: {reason}"):
            check_output(name, "--out")
        with pytest.raises(ValueError, match=f"cannot be written: {reason}"):
            write_text(tmp_path / name, "x")
        with pytest.raises(ValueError, match=f"cannot be written: {reason}"):
            appended(tmp_path / name, "x")
        assert sorted(tmp_path.iterdir()) == before


def test_a_read_only_file_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda asked, mode: asked != path)  # also where root runs the test
    with pytest.raises(ValueError, match="cannot be written"):
        write_text(path, "new")
    assert path.read_text() == "old"


def killed_within(path, directory):
    """A child process that ends, without any cleaning up, while it writes."""
    child = os.fork()
    if not child:
        try:
            with appearing(path, directory) as partial:
                (partial / "half" if directory else partial).write_text("half")
                os._exit(9)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("directory", [True, False])
def test_what_a_killed_process_leaves_goes_at_the_next_output(tmp_path, directory):
    killed_within(tmp_path / "killed", directory)
    assert [path.name.startswith(".killed.") for path in tmp_path.iterdir()] == [True]
    with appearing(tmp_path / "running") as partial:
        partial.write_text("of the running one")
        write_text(tmp_path / "other", "x")
        assert len(list(tmp_path.iterdir())) == 2, "the folder of the running output stays, the other is gone"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "running"]


def test_what_a_killed_process_leaves_before_its_lock_goes_too(tmp_path):
    (tmp_path / f".killed.0{UNFINISHED}").mkdir()
    write_text(tmp_path / "a", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def written_by(path, kind):
    """An output of each kind."""
    if kind == "lines":
        with appending(path, go_on=False, beginning=b"x") as file:
            yield
            file.append("x")
    else:
        with appearing(path, directory=kind == "directory") as partial:
            yield
            (partial / "x" if kind == "directory" else partial).write_text("x\n")


def interrupted_output(path, kind, line):
    """Interrupts before a line, also of the modules of the standard library that make files; all is freed after it.

    Returns:
        the lines that ran, and how many of them before the first byte of the output was written.
    """
    begun = None
    modules = (files, line_files, contextlib, pathlib, tempfile)
    with InterruptBefore(line, tuple(required(module.__file__) for module in modules)) as points:
        for _ in written_by(path, kind):
            begun = len(points.lines)
    return points, begun


@pytest.mark.parametrize("kind", ["file", "directory", "lines"])
def test_an_interruption_at_any_line_leaves_nothing_or_all(tmp_path, kind):
    name, content = ("new/a", "new/a/x") if kind == "directory" else ("a", "a")
    points, begun = interrupted_output(tmp_path / name, kind, None)
    assert (tmp_path / content).read_text() == "x\n"
    begun = required(begun)
    assert begun > 10
    for i, line in enumerate(points.lines):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert interrupted_output(folder / name, kind, line)[0].fired, line
        if i < begun:
            assert list(folder.iterdir()) == [], line
        assert not (folder / content).exists() or (folder / content).read_text() == "x\n", line
        write_text((folder / name).parent / "next" if (folder / name).parent.exists() else folder / "next", "x")
        assert not list(folder.rglob(f".*{UNFINISHED}")), line


def test_two_threads_write_the_same_file(tmp_path):
    path, barrier = tmp_path / "a", threading.Barrier(2, timeout=60)

    def write(text):
        with appearing(path) as partial:
            partial.write_text(text)
            barrier.wait()

    threads = [threading.Thread(target=write, args=(text,)) for text in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("one", "two")
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_and_their_metadata(tmp_path):
    write_tensors(tmp_path / "a", {"t": torch.arange(6).view(2, 3).T}, {"key": "value"})
    assert torch.equal(load_file(tmp_path / "a")["t"], torch.arange(6).view(2, 3).T)


BEGINNING = b'{"n": '


def appended(path, *lines, go_on=False):
    with appending(path, go_on, BEGINNING) as file:
        found = list(file.lines())
        for line in lines:
            file.append(line)
    return found


def test_lines_are_appended_one_by_one(tmp_path, umask):
    path = tmp_path / "a"
    with appending(path, False, BEGINNING) as file:
        for n in range(3):
            file.append(f'{{"n": {n}}}')
            assert path.read_text().endswith(f'{{"n": {n}}}\n')
    assert mode(path) == 0o640
    path.chmod(0o604)
    assert appended(path, '{"n": "Grüße \udc80"}', go_on=True) == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}']
    assert mode(path) == 0o604
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[3]) == {"n": "Grüße \udc80"}


@pytest.mark.parametrize("cut", [1, 5, 9, 70_000])
@pytest.mark.parametrize("whole", [0, 1, 3])
def test_a_line_that_a_killed_process_began_is_dropped(tmp_path, whole, cut):
    path = tmp_path / "a"
    lines, torn = ['{"n": 5}\n'] * whole, ('{"n": "' + "x" * 100_000)[:cut]
    path.write_text("".join(lines) + torn)
    assert appended(path, go_on=True) == [b'{"n": 5}'] * whole
    assert path.read_text() == "".join(lines) + torn, "nothing changes before there is a line to write"
    assert appended(path, '{"n": 6}', '{"n": 7}', go_on=True) == [b'{"n": 5}'] * whole
    assert path.read_text() == "".join(lines) + '{"n": 6}\n{"n": 7}\n'


@pytest.mark.parametrize("text", ["x", "\n", "a note\n", '{"n": 1}\nmine', '{"index": 1}\n{"n"'])
def test_a_file_of_another_kind_is_not_gone_on_from(tmp_path, text):
    (tmp_path / "a").write_text(text)
    with pytest.raises(ValueError, match="has a line that does not begin with"):
        appended(tmp_path / "a", '{"n": 1}', go_on=True)
    assert (tmp_path / "a").read_text() == text


def test_a_file_with_lines_is_not_overwritten(tmp_path):
    (tmp_path / "a").write_text('{"n": 1}\n')
    with pytest.raises(ValueError, match=r"'.*a' is not empty: go on from its lines"):
        appended(tmp_path / "a", '{"n": 1}')
    assert (tmp_path / "a").read_text() == '{"n": 1}\n'
    (tmp_path / "empty").touch()
    assert appended(tmp_path / "empty") == []
    assert (tmp_path / "empty").exists()


def test_nothing_is_left_where_no_line_was_written(tmp_path):
    with pytest.raises(KeyboardInterrupt), appending(tmp_path / "a", True, BEGINNING):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_one_process_appends_at_a_time(tmp_path):
    with appending(tmp_path / "a", False, BEGINNING) as file:
        for _ in range(2):
            with pytest.raises(ValueError, match="another process is appending to it"):
                appended(tmp_path / "a", go_on=True)
        file.append('{"n": 1}')
    assert appended(tmp_path / "a", go_on=True) == [b'{"n": 1}']


@pytest.mark.parametrize("room", [0, 4])
def test_a_full_disk_leaves_whole_lines(tmp_path, room):
    path, line = tmp_path / "a", '{"n": "' + "x" * 50 + '"}'
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with appending(path, False, BEGINNING) as file:
        file.append(line)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(line) + 1 + room, limits[1]))
        try:
            with pytest.raises(ValueError, match=r"a' cannot be written: File too large"):
                file.append(line)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_text() == f"{line}\n"
        file.append(line)
    assert path.read_text() == f"{line}\n" * 2


def test_lines_through_links_to_devices_and_pipes(tmp_path):
    (tmp_path / "link").symlink_to("target")
    assert appended(tmp_path / "link", '{"n": 1}') == []
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == '{"n": 1}\n'
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(ValueError, match="No space left on device"):
        appended(tmp_path / "full", '{"n": 1}')
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a device or a pipe, which has no lines to go on from"):
        appended(tmp_path / "pipe", go_on=True)
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    assert appended(tmp_path / "pipe", '{"n": 1}', '{"n": 2}') == []
    reader.join(timeout=60)
    assert found == ['{"n": 1}\n{"n": 2}\n']
