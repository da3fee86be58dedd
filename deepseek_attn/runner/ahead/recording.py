"""Launches recorded instead of made, and kernels noted before they are compiled.

Triton is not patched: its mode of asynchronous compilation hands every kernel over that is to be compiled.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import ASTSource, get_cache_invalidating_env_vars, make_backend
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITCallable

from deepseek_attn.kernels.common.device import GPU, meta_stands_for

Submit = Callable[[str, Callable[[], Any], Callable[[Any], None]], Any]
"""What Triton calls for a kernel that it has not loaded: the cache key, what compiles it, what keeps the result."""


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that its binary depends on.

    Attributes:
        source: the kernel with its signature, constants and alignments; options: warps, stages and others.
        key: name of the kernel's folder in Triton's cache.
    """

    source: ASTSource
    target: GPUTarget
    options: dict[str, Any]
    key: str

    @property
    def name(self) -> str:
        return self.source.fn.__name__

    @classmethod
    def of(cls, cache_key: str, compile_kernel: Callable[[], Any]) -> Variant:
        """The kernel that Triton's ``compile_kernel`` would compile."""
        names = inspect.getclosurevars(compile_kernel).nonlocals
        digest = hashlib.sha256(cache_key.encode()).hexdigest()
        return cls(names["src"], names["target"], dict(vars(names["options"])), digest)

    def is_cached(self) -> bool:
        """Whether Triton's cache has the kernel."""
        return get_cache_manager(self.key).get_group(f"{self.name[:150]}.json") is not None

    def compile(self) -> None:
        """Compiles the kernel into Triton's cache, unless it is there.

        Triton up to 3.6 launches by a C function per signature, which is compiled too where there is a driver.
        """
        kernel = triton.compile(self.source, target=self.target, options=self.options)
        if hasattr(nvidia, "make_launcher") and has_driver():
            nvidia.CudaUtils()
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed here, with or without a GPU that this process sees."""
    try:
        return bool(nvidia.library_dirs())
    except (AssertionError, OSError):
        return False


def target_of(gpu: GPU) -> GPUTarget:
    """A GPU as Triton names it."""
    return GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)


def compile_settings(gpu: GPU) -> str:
    """Environment variables, defaults of options and the version of ptxas, as far as they enter Triton's cache keys."""
    backend = make_backend(target_of(gpu))
    variables = sorted(get_cache_invalidating_env_vars().items())
    options: Any = backend.parse_options({"enable_fp_fusion": True})  # the value of every launch
    return f"{triton.__version__} {backend.hash()} {options.hash()} {variables}"


@cache
def prepare_keys() -> threading.Thread:
    """Makes the cache keys of kernels the same in every process. The returned thread computes their common part.

    Up to Triton 3.6 a function's key has the constants of a function that it calls only if that one's key was computed
    before, so keys would depend on the order of launches. There the keys of all our functions are computed here.
    """
    thread = threading.Thread(target=triton_key, daemon=True)  # 0.3 s: the digest of Triton's own files
    thread.start()
    if tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6):
        compute_keys(device_functions())
    return thread


def device_functions() -> list[JITCallable]:
    """All functions of our kernels that Triton compiles."""
    package = importlib.import_module("deepseek_attn.kernels")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    functions = [value for module in modules for value in vars(module).values() if isinstance(value, JITCallable)]
    return [function for function in functions if function.__module__.startswith(package.__name__)]


def compute_keys(functions: Iterable[JITCallable]) -> None:
    """Computes the cache keys of functions again, those of called functions before those of their callers."""
    functions = list(functions)
    for function in functions:
        function.hash = None
    known: set[int] = set()

    def compute(function: JITCallable) -> None:
        if id(function) in known:
            return
        known.add(id(function))
        names, scope = function.fn.__code__.co_names, function.get_capture_scope()
        values = [scope.get(name) for name in names]
        modules = [value for value in values if isinstance(value, ModuleType)]
        for value in (*values, *(getattr(module, name, None) for module in modules for name in names)):
            if isinstance(value, JITCallable):
                compute(value)
        function.cache_key  # noqa: B018

    for function in functions:
        compute(function)


@contextmanager
def compiling_by(submit: Submit) -> Iterator[None]:
    """Context in which Triton hands the kernels that this thread compiles to ``submit``."""
    mode: Any = SimpleNamespace(submit=lambda *args: submit(*args[:3]))  # the only method that Triton calls
    token = active_mode.set(mode)
    try:
        yield
    finally:
        active_mode.reset(token)


@contextmanager
def before_compiling(callback: Callable[[Variant], None]) -> Iterator[None]:
    """Calls ``callback`` before Triton compiles a kernel in this context, or loads it from its cache."""

    def submit(cache_key: str, compile_kernel: Callable[[], Any], keep: Callable[[Any], None]) -> Any:
        callback(Variant.of(cache_key, compile_kernel))
        kernel = compile_kernel()
        keep(kernel)
        return kernel

    if active_mode.get() is not None:  # the caller's own: it compiles
        yield
        return
    with compiling_by(submit):
        yield


@dataclass
class Launches:
    """Variants that were launched, by key, in the order of their first launches.

    Attributes:
        latest: one for each launch since this list was emptied.
    """

    variants: dict[str, Variant] = field(default_factory=dict)
    latest: list[Variant] = field(default_factory=list)


class _Recorded:
    """Takes the place of a compiled kernel: its launches are noted."""

    function = packed_metadata = None

    def __init__(self, variant: Variant, launches: Launches):
        self._variant, self._launches = variant, launches

    def launch_metadata(self, *args: Any) -> None:
        """No launch has any."""

    def run(self, *args: Any) -> None:
        self._launches.latest.append(self._variant)


class _Target:
    """Stands for the driver of a GPU that need not be there."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> object:
        return self  # kernels cache facts of a device: each recording is a device of its own

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def recorded_launches(gpu: GPU) -> Iterator[Launches]:
    """Context in which ops on "meta" tensors record their launches for a GPU like this one; nothing is launched.

    The whole process is affected: nothing else may launch kernels meanwhile.
    """
    prepare_keys()
    launches = Launches()

    def submit(cache_key: str, compile_kernel: Callable[[], Any], keep: Callable[[Any], None]) -> _Recorded:
        variant = Variant.of(cache_key, compile_kernel)
        recorded = _Recorded(launches.variants.setdefault(variant.key, variant), launches)
        keep(recorded)
        return recorded

    driver = triton.runtime.driver
    active = driver._active
    driver.set_active(_Target(target_of(gpu)))
    try:
        with compiling_by(submit), meta_stands_for(gpu):
            yield launches
    finally:
        driver.set_active(active)


class KernelLoad(NamedTuple):
    """A kernel that a process has loaded: from Triton's cache, or after compiling it."""

    name: str
    cached: bool


@contextmanager
def kernel_loads() -> Iterator[list[KernelLoad]]:
    """Lists the kernels that Triton loads in this context, each when it is first launched."""
    loads: list[KernelLoad] = []
    settings, listener = triton.knobs.compilation, triton.knobs.compilation.listener

    def note(*, src: Any, cache_hit: bool, **others: Any) -> None:
        loads.append(KernelLoad(src.fn.__name__, cache_hit))
        if listener is not None:
            listener(src=src, cache_hit=cache_hit, **others)

    settings.listener = note
    try:
        yield loads
    finally:
        settings.listener = listener
