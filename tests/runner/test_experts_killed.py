"""Processes with experts elsewhere that are killed, or find no memory: what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from deepseek_attn.checkpoint import write_checkpoint
from deepseek_attn.checkpoint.random import RepeatingSource
from tests.support.small_models import small_config
from tests.support.tiers import exhaustive_on_cpu, tiered

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")

PROCESS = """
    import sys, time
    import torch
    from deepseek_attn import ModelRunner
    from deepseek_attn.checkpoint import loader

    folder, memory, stage = sys.argv[1:]
    load, loaded = loader._load, []

    def load_or_stop(*args):
        loaded.append(args)
        if stage == "loading" and len(loaded) == 20:
            print("ready", flush=True)
            time.sleep(600)
        return load(*args)

    loader._load = load_or_stop
    sizes = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, progress=False)
    options = dict(sizes, device="cpu", numerics="official", expert_memory=memory)
    with ModelRunner.from_pretrained(folder, **options) as runner:
        runner.score([[1, 2, 3]])
        print("ready", flush=True)
        while True:
            runner.score([[1, 2, 3]], chunk_size=1)
"""
LIMITED = r"""
    import re, resource, sys
    from pathlib import Path
    import torch
    from deepseek_attn.cli import main
    from deepseek_attn.runner import model_runner

    size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + (16 << 20), size + (16 << 20)))
    flags = ["--numerics", "official", "--device", "cpu", "--max-model-len", "64", "--expert-memory", sys.argv[2]]
    sys.exit(main(["generate", "--model", sys.argv[1], "--token-ids", "1,2", "--max-tokens", "2", *flags]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = small_config([0, 4], n_routed_experts=8, vocab_size=300, hidden_size=512, moe_intermediate_size=1024)
    return write_checkpoint(RepeatingSource(config), config, tmp_path_factory.mktemp("killed") / "ckpt", num_shards=2)


def start(code: str, folder: Path, rooms: Path, *args: str) -> subprocess.Popen:
    """A process whose temporary files, home and working directory are in ``rooms``."""
    for name in ("tmp", "home", "work"):
        (rooms / name).mkdir()
    places = {"TMPDIR": str(rooms / "tmp"), "HOME": str(rooms / "home"), "XDG_CACHE_HOME": str(rooms / "home")}
    environment = {**os.environ, **places, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder), *args]
    return subprocess.Popen(
        command, cwd=rooms / "work", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def files_below(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())


def shared_memory(pid: int) -> set[str]:
    """Segments of shared memory that a process has mapped and that have a name, so that they would outlive it."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm" in line and not line.endswith("(deleted)")}


STAGES = [(memory, stage) for memory in ("disk", "host") for stage in ("loading", "generating")]


@exhaustive_on_cpu
@pytest.mark.parametrize(("memory", "stage"), tiered(STAGES, [("disk", "loading"), ("host", "generating")]))
def test_kill_leaves_nothing_behind(memory, stage, checkpoint, tmp_path):
    """No file, no shared memory, no process."""
    before = [(path, path.stat().st_mtime_ns) for path in files_below(checkpoint)]
    process = start(PROCESS, checkpoint, tmp_path, memory, stage)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    held = shared_memory(process.pid)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate(timeout=60)
    assert not held
    assert not children
    assert files_below(tmp_path) == []
    assert [(path, path.stat().st_mtime_ns) for path in files_below(checkpoint)] == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("memory", tiered(["disk", "host"], ["disk"]))
def test_full_memory_is_one_message(memory, checkpoint, tmp_path):
    """The system refuses memory that was free when the run began."""
    process = start(LIMITED, checkpoint, tmp_path, memory)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 2, error
    assert out == ""
    assert error.startswith("deepseek-attn generate: error: out of memory: ")
    assert error.count("\n") == 1
    assert files_below(tmp_path) == []
