"""Kernels of a runner compiled while its weights are loaded, or before it is made (``deepseek-attn warmup``)."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import pickle
import select
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from deepseek_attn.cache.layout import CacheLayout
from deepseek_attn.checkpoint.source import TensorInfo
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import Numerics
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.kernels.common.dispatch import need_triton
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner.step import Rows
from deepseek_attn.utils.processes import Fork

FINDER = "deepseek_attn.runner.stand_in"
"""What the process of a `Compilation` runs. It is imported there: it builds a runner, and building one starts it."""
# without collections: they take a tenth of its short life, and forks copy the pages that they write
START = f"import gc, sys; gc.disable(); sys.path[:] = sys.argv[1:]; import {FINDER} as finder; finder.main()"
PACKAGES = ("deepseek_attn", "deepseek_attn.kernels", "deepseek_attn.models")  # their code decides what is launched
SHOWN = 3  # failed kernels that are named
PATIENCE = 10.0
"""Seconds until a `Compilation` whose kernels are mostly cached begins by itself."""
SILENT_SECONDS = 120
"""A compiling process that tells nothing for so long is taken to hang; one kernel takes less than 10 s."""


class RunnerSizes(NamedTuple):
    """Limits of a runner, as `RunnerOptions` has them."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_rollback: int

    @classmethod
    def of(cls, layout: CacheLayout) -> RunnerSizes:
        """The limits that caches of this layout were made for."""
        return cls(*(getattr(layout, name) for name in cls._fields))


@dataclass(frozen=True)
class RunnerRequest:
    """Everything that the launches of a runner depend on; it can be pickled.

    Attributes:
        config: of the model, reduced to one layer of each kind and those that they read.
        headers: of the tensors of those layers, and of those outside layers, under their published names.
        gpu: the GPU that kernels are for.
        num_drafts: tokens that the MTP layer drafts per step; 0 without speculation.
        parallel: the rank; its collectives are left out.
    """

    config: AnyConfig
    headers: dict[str, TensorInfo]
    numerics: Numerics
    dtype: torch.dtype
    attention: AttentionOptions
    sizes: RunnerSizes
    gpu: GPU
    cuda_graphs: bool | None = None
    num_drafts: int = 0
    parallel: Parallel = dataclasses.field(default_factory=Parallel.single)

    @classmethod
    def of(
        cls, config: AnyConfig, headers: dict[str, TensorInfo], layers: list[int] | None = None, **facts: Any
    ) -> RunnerRequest:
        """The request of a runner of this config.

        Args:
            headers: of all tensors, under their published names; layers: those that are loaded, None for all of them.
            facts: the other attributes.
        """
        if layers is not None:
            present = tuple(layer for layer in config.layers if layer.index in layers)
            config = dataclasses.replace(config, layers=present, mtp_layers=())
        kept = representatives(config, headers)
        config = dataclasses.replace(config, layers=tuple(layer for layer in config.layers if layer.index in kept))
        headers = {name: info for name, info in headers.items() if (layer_of(name) in kept or layer_of(name) is None)}
        return cls(config, headers, **facts)

    def marker(self) -> Path:
        """A file in Triton's cache that is there once all kernels of this request are.

        Raises:
            ValueError: Triton is not installed.
        """
        need_triton("compiling kernels")
        import triton

        from deepseek_attn.kernels.common.launches import compile_settings

        found = hashlib.sha256(f"{self!r} {compile_settings(self.gpu)} {torch.__version__}".encode())
        for package in PACKAGES:
            for folder in importlib.import_module(package).__path__:
                for path in sorted(Path(folder).rglob("*.py")):
                    found.update(path.read_bytes())
        return Path(triton.knobs.cache.dir) / f"deepseek-attn-{found.hexdigest()[:32]}"


def layer_of(name: str) -> int | None:
    """The backbone layer that a tensor of this published name belongs to."""
    parts = name.split(".", 2)
    return int(parts[1]) if parts[0] == "layers" else None


def representatives(config: AnyConfig, headers: dict[str, TensorInfo]) -> dict[int, int]:
    """Layers that stand for all of a model: by number, how many each stands for, itself included.

    Of each kind it is the first, and every layer that one of these reads. Layers are of a kind if they are equal in
    configuration and in the dtypes of their tensors, and if those that they read are of a kind. A layer whose streams a
    drafter reads stands for itself alone.
    """
    dtypes: dict[int | None, set[tuple[str, str]]] = {}
    for name, info in headers.items():
        tensor = name.split(".experts.")[0].partition(".")[2].partition(".")[2]
        dtypes.setdefault(layer_of(name), set()).add((tensor, info.dtype))
    targets = () if config.dspark is None or not config.mtp_layers else config.dspark.dspark_target_layer_ids
    kinds: dict[int, Any] = {}
    groups: dict[Any, list[int]] = {}
    for layer in config.layers:  # those that a layer reads come before it
        number, sources = layer.index, frozenset(kinds.get(source) for source in layer.sources)
        target = number if number in targets else None
        kinds[number] = layer.unnumbered(), frozenset(dtypes.get(number, ())), sources, target
        groups.setdefault(kinds[number], []).append(number)
    kept = config.with_sources(group[0] for group in groups.values())
    counts = dict.fromkeys(kept, 1)
    for group in groups.values():
        counts[group[0]] += sum(number not in counts for number in group)
    return counts


class Compilation:
    """Kernels that a process of its own compiles with workers; it needs no GPU.

    Attributes:
        found: hashes of the kernels found so far; done: of those that are compiled, or have failed.
        failed: why kernels could not be compiled; each begins with a kernel's name.
        problem: why kernels could not be found; empty where they could.
        ended: nothing more will be compiled.
        begun: a file in Triton's cache that is there once a process has begun to compile the kernels of this request.
        coming: the step that the runner runs and some of those after it, as `WarmUp.step` takes them; a launch that
            waits has their kernels compiled before others.
    """

    def __init__(
        self, request: RunnerRequest, workers: int | None = None, fork: Fork | None = None, patient: bool = False
    ):
        """With ``patient``, begins when a kernel is missing, or after `PATIENCE`, if another process has begun before.

        The earlier process may have ended before all kernels were compiled. Most are in the cache then, and a process
        that answers one short prompt should not share its processors with a search for the rest.
        """
        self.found: set[str] = set()
        self.done: set[str] = set()
        self.failed: list[str] = []
        self.problem, self.ended, self._closed = "", False, False
        self._all_found, self._changed = False, threading.Condition()
        self.coming: list[Rows] = []
        self._asked: list[Rows] = []
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._marker = request.marker()
        self.begun = self._marker.with_suffix(".begun")
        path = [*sys.path, str(Path(__file__).parents[2])]  # an editable installation may be on no path
        self._process: Fork | subprocess.Popen[bytes] = fork or subprocess.Popen(
            [sys.executable, "-c", START, *path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,  # a session of its own gets no Ctrl-C
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if workers is None:
            processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            workers = max(1, processors - 1)
        self._request: bytes | None = pickle.dumps((request, workers))
        if patient and self.begun.exists():
            self._later = threading.Timer(PATIENCE, self._begin)
            self._later.daemon = True
            self._later.start()
        else:
            self._later = None
            self._begin()

    def _begin(self) -> None:
        """Sends the request, unless it was sent or will not be."""
        with self._changed:
            request, self._request = self._request, None
        if request is None:
            return
        if self._later is not None:
            self._later.cancel()
        self.begun.parent.mkdir(parents=True, exist_ok=True)
        self.begun.touch()
        self._messages.put(request)
        threading.Thread(target=self._send, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self, wanted: str | None = None, progress: bool = False) -> None:
        """Waits until a kernel is compiled if it is one of those that will be; without one, for all of them.

        It is compiled before all others, and those of the steps that are `coming` after it.

        Args:
            wanted: `Variant.cached_hash` of the kernel.
            progress: show a bar over all kernels, on a terminal.
        """

        def ready() -> bool:
            if wanted is None:
                return self.ended
            return self.ended or wanted in self.done or (self._all_found and wanted not in self.found)

        self._begin()
        with (
            tqdm(desc="compiling kernels", unit="", delay=0.5, leave=False, disable=None if progress else True) as bar,
            self._changed,
        ):
            if wanted is not None and not ready():
                self._ask(wanted)
            while not ready():
                self._changed.wait()
                bar.total = len(self.found)
                bar.update(len(self.done) - bar.n)

    def close(self) -> None:
        """Ends the process and its workers, if they still run."""
        self._closed = True
        self._process.kill()
        with self._changed:
            request, self._request = self._request, None
            if request is None:
                return
            self.ended = True
            self._changed.notify_all()
        self._later.cancel()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _ask(self, wanted: str) -> None:
        """Asks for a kernel, and for those of the `coming` steps, but not for a step of the last call once more."""
        steps, self._asked = [rows for rows in self.coming if rows not in self._asked], self.coming
        self._messages.put(pickle.dumps((wanted, steps)))

    def _send(self) -> None:
        """Sends the request, which the process reads once it has imported torch, then what is asked for."""
        with (
            suppress(OSError),
            self._process.stdin as pipe,
            Connection(os.dup(pipe.fileno()), readable=False) as process,
        ):
            while (message := self._messages.get()) is not None:
                process.send_bytes(message)

    def _listen(self) -> None:
        """Takes in what the process tells, to its end."""
        for line in self._lines():
            event = json.loads(line)
            with self._changed:
                self.found.update(event.get("found", ()))
                self.done.update(event.get("done", ()))
                self.failed += event.get("failed", ())
                self._all_found |= "all_found" in event
                self.problem = event.get("problem", "")
                self._changed.notify_all()
        self._messages.put(None)
        code = self._process.wait()
        complete = self._all_found and self.found <= self.done
        if not (complete or self._closed or self.problem):
            self.problem = f"the process that looks for them has ended with exit code {code}"
        if message := self.message():
            warnings.warn(message, stacklevel=1)
        elif complete:
            self._marker.parent.mkdir(parents=True, exist_ok=True)
            self._marker.touch()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _lines(self) -> Iterator[bytes]:
        """What the process writes, line by line, until it ends; one that hangs is ended."""
        rest = b""
        with self._process.stdout as pipe:
            while select.select([pipe], [], [], SILENT_SECONDS)[0]:
                if not (data := os.read(pipe.fileno(), 1 << 16)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
        self.problem = f"the process that looks for them has told nothing for {SILENT_SECONDS} s"
        self._process.kill()

    def message(self) -> str:
        """One message about kernels that could not be compiled; empty if all were."""
        if self.problem:
            return f"kernels are compiled as they are launched, because they could not be found before: {self.problem}"
        if not self.failed:
            return ""
        more = f"; and {len(self.failed) - SHOWN} more" if len(self.failed) > SHOWN else ""
        return f"{len(self.failed)} of {len(self.found)} kernels do not compile: {'; '.join(self.failed[:SHOWN])}{more}"


def forked_compiler() -> Fork | None:
    """A process for a `Compilation`, in which torch is imported; None where this one cannot be forked safely.

    That is where it has threads that may hold locks: of Python, of CUDA once that is initialised, of collectives.
    """
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ranks or torch.cuda.is_initialized() or not Fork.possible():
        return None
    with suppress(OSError):
        return Fork(lambda *files: importlib.import_module(FINDER).serve(*files))
    return None


def compile_ahead(request: RunnerRequest, progress: bool, fork: Fork | None = None) -> Compilation | None:
    """Starts to compile the kernels of a runner; None if all are in Triton's cache. Launches wait for missing ones.

    Args:
        fork: of `forked_compiler`; without one, the process that compiles is a new interpreter, which imports torch.
    """
    from deepseek_attn.kernels.common.launches import Variant, call_before_compiling

    if request.marker().exists():
        return None
    compilation = Compilation(request, fork=fork, patient=True)

    def wait(variant: Variant) -> None:
        if compilation.ended:
            end()
        elif not variant.is_cached():  # earlier processes may have ended before all kernels were compiled
            compilation.wait(variant.cached_hash(), progress)

    end = call_before_compiling(wait)
    return compilation


@contextmanager
def compiling_ahead(
    request: RunnerRequest | None, progress: bool, fork: Fork | None = None
) -> Iterator[Compilation | None]:
    """`compile_ahead` while a runner is built; what breaks that off ends the compilation too."""
    compilation = None if request is None else compile_ahead(request, progress, fork)
    if compilation is None and fork is not None:
        fork.kill()
    try:
        yield compilation
    except BaseException:
        if compilation is not None:
            compilation.close()
        raise
