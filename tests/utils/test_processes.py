"""Functions that run in a fork of this process."""

from __future__ import annotations

import gc
import os
import threading
import time

from deepseek_attn.utils.processes import Fork


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_fork_reads_and_writes_and_touches_no_file_of_its_parent(tmp_path, capfd):
    log = (tmp_path / "log").open("w")

    def shout(requests, told):
        print("not here")
        log.write("nor here\n")
        log.flush()
        told.write(requests.read().decode().upper())

    fork = Fork(shout)
    with fork.stdin as pipe:
        pipe.write(b"first line\nsecond")
    with fork.stdout as pipe:
        assert pipe.read() == b"FIRST LINE\nSECOND"
    assert fork.wait() == 0
    assert fork.wait() == 0  # again, of what is gone
    fork.kill()
    log.close()
    assert (tmp_path / "log").read_text() == ""
    assert capfd.readouterr() == ("", "")


def test_exit_codes():
    def fail(requests, told):
        raise ValueError("no")

    failed, killed = Fork(fail), Fork(lambda requests, told: time.sleep(600))
    killed.kill()
    assert failed.wait() == 1
    assert killed.wait() == -9


def test_a_fork_that_nothing_refers_to_is_ended():
    fork = Fork(lambda requests, told: time.sleep(600))
    pid = fork._pid
    assert exists(pid)
    del fork
    gc.collect()
    assert not exists(pid)


def test_a_fork_that_others_have_waited_for():
    fork = Fork(lambda requests, told: None)
    os.waitpid(fork._pid, 0)
    assert fork.wait() == 0


def test_a_process_with_a_second_thread_is_not_forked():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert not Fork.possible()
    end.set()
    thread.join()
