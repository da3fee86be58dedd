"""Launches recorded instead of made, and their kernels compiled: by processes that need no GPU, into Triton's cache."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import ASTSource, get_cache_invalidating_env_vars, get_cache_key, make_backend
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import DependenciesFinder, JITFunction

from deepseek_attn.kernels.common.device import GPU, meta_stands_for
from deepseek_attn.utils.processes import end_with_parent

SLOWEST = ("experts_hopper", "compress", "insert_tokens", "linear_hopper", "topk", "collapse", "attend", "multi_linear")
"""Kernels that take longest to compile, the slowest first; they begin first, so that nothing waits for the last one."""
URGENT = 3
"""Lists of `compile_variants`: kernels of the first ones are compiled before all others."""


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that its binary depends on: what a launch looks up in Triton's caches.

    Attributes:
        source: the kernel with its signature, constants and alignments; options: warps, stages and the like.
    """

    source: ASTSource
    target: GPUTarget
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.source.fn.__name__

    @property
    def key(self) -> str:
        return f"{self.name} {self.source.hash()} {sorted(self.options.items())}"

    def cached_hash(self) -> str:
        """Name of the kernel's folder in Triton's cache."""
        backend = make_backend(self.target)
        options = backend.parse_options(self.options | self.source.parse_options())
        key = get_cache_key(self.source, backend, options, env_vars=get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode()).hexdigest()

    def is_cached(self) -> bool:
        """Whether Triton's cache has the kernel."""
        return get_cache_manager(self.cached_hash()).get_group(f"{self.name[:150]}.json") is not None

    def compile(self) -> None:
        """Compiles the kernel into Triton's cache, unless it is there; and what launches it, if that is compiled too.

        Triton up to 3.6 has a function in C for each signature, which can be made where there is a driver.
        """
        kernel = triton.compile(self.source, target=self.target, options=self.options)
        if hasattr(nvidia, "make_launcher") and has_driver():
            nvidia.CudaUtils()
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


def target_of(gpu: GPU) -> GPUTarget:
    """A GPU as Triton names it."""
    return GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)


def compile_settings(gpu: GPU) -> str:
    """Environment variables, defaults of options and the version of ptxas, as far as they enter Triton's cache keys."""
    backend = make_backend(target_of(gpu))
    variables = sorted(get_cache_invalidating_env_vars().items())
    options = backend.parse_options({"enable_fp_fusion": True})  # as every launch says
    return f"{triton.__version__} {backend.hash()} {options.hash()} {variables}"


@cache
def digest_triton() -> threading.Thread:
    """Computes Triton's digest of its own files, which every cache key has, in a thread beside other work: 0.3 s."""
    thread = threading.Thread(target=triton_key, daemon=True)
    thread.start()
    return thread


@cache
def fix_cache_keys() -> None:
    """Makes Triton's cache keys independent of the order of launches. Up to 3.6 they are not.

    There, the key of a function has the constants of one that it calls only if that one's key was computed before.
    """
    update = DependenciesFinder._update_hash

    def update_hash(self: DependenciesFinder, function: Any) -> None:
        function.cache_key  # noqa: B018
        update(self, function)

    DependenciesFinder._update_hash = update_hash


@dataclass
class Launches:
    """Variants that were launched, by key, in the order of their first launches.

    Attributes:
        latest: one for each launch since this list was emptied.
    """

    target: GPUTarget
    variants: dict[str, Variant] = field(default_factory=dict)
    latest: list[Variant] = field(default_factory=list)


class _Target:
    """Stands for the driver of a GPU that need not be there."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> object:
        return self  # kernels keep what they know of a device: each recording is one of its own

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def recorded_launches(gpu: GPU) -> Iterator[Launches]:
    """In this context ops on "meta" tensors record what they would launch on a GPU like this one; nothing is launched.

    The whole process is affected: nothing else may launch kernels meanwhile.
    """
    fix_cache_keys()
    launches = Launches(target := target_of(gpu))
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.latest.append(run(self, *args, grid=grid, warmup=True, **keywords))

    def note(
        self: JITFunction, key: str, signature: Any, device: Any, constants: Any, options: Any, attrs: Any, warmup: bool
    ) -> Variant:
        variant = Variant(self.ASTSource(self, signature, constants, attrs), target, dict(vars(options)))
        kernels, *_ = self.device_caches[device]
        kernels[key] = launches.variants.setdefault(variant.key, variant)
        return variant

    driver = triton.runtime.driver
    active = driver._active
    driver.set_active(_Target(target))
    JITFunction.run, JITFunction._do_compile = record, note
    try:
        with meta_stands_for(gpu):
            yield launches
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile
        driver.set_active(active)


@contextmanager
def ignored_launches(gpu: GPU) -> Iterator[None]:
    """In this context ops on "meta" tensors allocate what they would on a GPU like this one, and launch nothing.

    The whole process is affected: nothing else may launch kernels meanwhile.
    """
    run = JITFunction.run
    JITFunction.run = lambda *_, **__: None
    try:
        with meta_stands_for(gpu):
            yield
    finally:
        JITFunction.run = run


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed here, with or without a GPU that this process sees."""
    try:
        return bool(nvidia.library_dirs())
    except (AssertionError, OSError):
        return False


def call_before_compiling(callback: Callable[[Variant], None]) -> Callable[[], None]:
    """Calls ``callback`` before Triton compiles a kernel or loads it from its cache; returns what ends this."""
    do_compile = JITFunction._do_compile

    def call(self: JITFunction, key: str, signature: Any, device: Any, constants: Any, options: Any, *rest: Any) -> Any:
        _, _, target, *_ = self.device_caches[device]
        callback(Variant(self.ASTSource(self, signature, constants, rest[0]), target, dict(vars(options))))
        return do_compile(self, key, signature, device, constants, options, *rest)

    def end() -> None:
        if JITFunction._do_compile is call:
            JITFunction._do_compile = do_compile

    JITFunction._do_compile = call
    return end


class KernelLoad(NamedTuple):
    """A kernel that a process has loaded: from Triton's cache, or after compiling it."""

    name: str
    cached: bool


@contextmanager
def kernel_loads() -> Iterator[list[KernelLoad]]:
    """Lists the kernels that Triton loads in this context, each when it is first launched."""
    loads: list[KernelLoad] = []
    settings, before = triton.knobs.compilation, triton.knobs.compilation.listener

    def note(*, src: Any, cache_hit: bool, **others: Any) -> None:
        loads.append(KernelLoad(src.fn.__name__, cache_hit))
        if before is not None:
            before(src=src, cache_hit=cache_hit, **others)

    settings.listener = note
    try:
        yield loads
    finally:
        settings.listener = before


class CompileEvents(Protocol):
    """What `compile_variants` tells of kernels, which it names by `Variant.cached_hash`."""

    def found(self, hashes: list[str]) -> None: ...

    def all_found(self) -> None: ...

    def compiled(self, cached_hash: str, error: str) -> None:
        """A kernel is in Triton's cache, or is not because of ``error``, which names it."""


@dataclass
class Asks:
    """Requests of the process that launches the kernels, while they are being compiled here.

    Attributes:
        connection: receives pairs: `Variant.cached_hash` of the kernel that it waits for, and steps that it will run.
        find: gives the kernels of such a step.
        closed: the other end is closed.
    """

    connection: Connection
    find: Callable[[Any], list[Variant]]
    closed: bool = False

    def take(self) -> Iterator[tuple[str, list[list[Variant]]]]:
        """Everything asked for since the last call: a kernel, and those of each step to come."""
        while not self.closed and self.connection.poll():
            try:
                wanted, steps = self.connection.recv()
            except EOFError:  # the process is gone
                self.closed = True
            else:
                yield wanted, [self.find(step) for step in steps]


class _Job(NamedTuple):
    """A kernel to compile: ``number`` of the list of variants that it came with, at most `URGENT`."""

    number: int
    cached_hash: str
    variant: Variant


class _Queue:
    """Kernels to compile: those asked for, then those of the `URGENT` first lists, then the others; the slowest first.

    The latest request comes first: the kernel that a launch waits for, then those of its step, then later steps'.
    """

    def __init__(self, events: CompileEvents):
        self._events = events
        self._known: set[str] = set()
        self._asked: dict[str, int] = {}  # places below 0, the latest the lowest; of kernels not found yet, too
        self._jobs: list[_Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, variants: list[Variant], number: int = URGENT) -> list[str]:
        """Adds variants of list ``number`` that are new; returns the hashes of all."""
        jobs = [_Job(min(number, URGENT), variant.cached_hash(), variant) for variant in variants]
        new = [job for job in jobs if job.cached_hash not in self._known]
        self._known.update(job.cached_hash for job in new)
        self._events.found([job.cached_hash for job in new])
        self._jobs = sorted([*self._jobs, *new], key=self._order)
        return [job.cached_hash for job in jobs]

    def ask(self, wanted: str, steps: list[list[Variant]]) -> None:
        """Puts the kernels of steps in front, those of the first step before the others, and ``wanted`` before all."""
        for hashes in [*(self.add(step) for step in reversed(steps)), [wanted]]:
            place = min(self._asked.values(), default=0) - 1
            self._asked.update(dict.fromkeys(hashes, place))
        self._jobs.sort(key=self._order)

    def is_urgent(self, job: _Job) -> bool:
        """Whether it was asked for, or is one of the first lists."""
        place, _ = self._order(job)
        return place < URGENT

    def next_is_urgent(self) -> bool:
        return self.is_urgent(self._jobs[0])

    def pop(self) -> _Job:
        return self._jobs.pop(0)

    def _order(self, job: _Job) -> tuple[int, int]:
        """Place of a kernel, and its rank among those of one place; the lowest comes first."""
        ranks = [rank for rank, kernel in enumerate(SLOWEST) if job.variant.name.startswith(kernel)]
        return self._asked.get(job.cached_hash, job.number), min(ranks, default=len(SLOWEST))


def compile_variants(
    variants: Iterable[list[Variant]], workers: int, events: CompileEvents, asks: Asks | None = None
) -> None:
    """Compiles variants while more are being found, each in a forked process, ``workers`` of them at a time.

    Kernels that are asked for come first, then those of the `URGENT` first lists. While one of these is being compiled,
    the others get half of the workers: two processors often share a core, and the slowest kernel takes longer beside
    another process.
    """
    queue = _Queue(events)
    running: dict[Connection, tuple[BaseProcess, _Job]] = {}

    def limit() -> int:
        urgent = any(queue.is_urgent(job) for _, job in running.values())
        return -(-workers // 2) if urgent and not queue.next_is_urgent() else workers

    def advance(timeout: float | None) -> None:
        for wanted, steps in asks.take() if asks else ():
            queue.ask(wanted, steps)
        while queue and len(running) < limit():
            job = queue.pop()
            receive, send = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(
                target=_compile, args=(job.variant, send), daemon=True
            )
            process.start()
            send.close()
            running[receive] = process, job
        asked = [asks.connection] if asks and not asks.closed else []
        for receive in wait([*running, *asked], timeout):
            if receive not in running:
                continue
            process, job = running.pop(receive)
            try:
                error = receive.recv()
            except EOFError:
                process.join()
                error = f"its compiler ended with exit code {process.exitcode}"
            process.join()
            receive.close()
            events.compiled(job.cached_hash, f"{job.variant.name}: {error}" if error else "")

    digest = digest_triton()  # forked processes inherit it
    for number, fresh in enumerate(variants):
        digest.join()
        queue.add(fresh, number)
        advance(0)
    events.all_found()
    while queue or running:
        advance(None)


def _compile(variant: Variant, connection: Connection) -> None:
    """Compiles a variant; sends why it failed, or ""."""
    end_with_parent()
    os.nice(5)  # the process that loads the model goes first
    try:
        variant.compile()
        connection.send("")
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}"[:1000])
