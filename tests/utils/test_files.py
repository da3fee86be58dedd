"""Files and directories appear complete or not at all."""

import pytest

from deepseek_attn.utils.files import appearing, write_text


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with appearing(path) as partial:
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


def test_a_file_in_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(OSError, match="absent"):
        write_text(tmp_path / "absent" / "a.txt", "x")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_has_the_permissions_of_any_other(tmp_path):
    with appearing(tmp_path / "made" / "deep", directory=True) as partial:
        (partial / "a.txt").write_text("x")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "made" / "deep" / "a.txt").read_text() == "x"
    assert (tmp_path / "made" / "deep").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert list((tmp_path / "made").iterdir()) == [tmp_path / "made" / "deep"]
