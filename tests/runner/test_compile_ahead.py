"""Kernels are known, and compiled, before steps launch them."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import DependenciesFinder, JITCallable

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.source import TensorInfo
from deepseek_attn.cli.warmup import read_headers
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.common.device import GPU
from deepseek_attn.layers.parallel import Parallel
from deepseek_attn.runner import ModelRunner
from deepseek_attn.runner.ahead import compilation as ahead, pool
from deepseek_attn.runner.ahead.compilation import Compilation, compiling_ahead, launching
from deepseek_attn.runner.ahead.recording import (
    _Target,
    before_compiling,
    compute_keys,
    device_functions,
    kernel_loads,
    recorded_launches,
    target_of,
)
from deepseek_attn.runner.ahead.request import RunnerRequest, RunnerSizes
from deepseek_attn.runner.kernel_list import SLOWEST, kernel_lists
from deepseek_attn.runner.meta_runner import MetaRunner
from deepseek_attn.runner.warm_up import WarmUp
from deepseek_attn.utils.torch_state import torch_threads
from tests.support.small_models import two_layers
from tests.support.tiers import EXHAUSTIVE
from tests.support.typed import required, untyped
from tests.support.v41_cases import tiny_for_kernels

H200 = GPU((9, 0), 132)
LIMITS = {
    "tiny": RunnerSizes(300, 2, 9, 16),
    "tiny_v32": RunnerSizes(2048, 3, 100, 16),
    "v4_flash": RunnerSizes(16384, 8, 2048, 16),
    "tiny_v41": RunnerSizes(300, 5, 19, 16),
}
SHORT = RunnerSizes(150, 1, 3, 16)


def request_of(preset, num_drafts=0, sizes=None, numerics="serving", index_keys=None, changes=None, **facts):
    """Of a preset; with ``changes``, of random weights."""
    if preset == "tiny_v41" or changes:
        config = (
            tiny_for_kernels() if preset == "tiny_v41" else ModelConfig.from_preset(preset).replace(**(changes or {}))
        )
        headers = RandomSource(config).entries()
    else:
        config, headers = read_headers(preset)
    return RunnerRequest.of(
        config,
        headers,
        **facts,
        numerics=numerics_for(config, numerics, index_keys),
        dtype=torch.bfloat16,
        attention=AttentionOptions(),
        sizes=sizes or LIMITS[preset],
        gpu=H200,
        num_drafts=num_drafts,
    )


def random_step(rng, layout):
    """Rows of `WarmUp.prefill` that a workload within the limits may lead to."""

    def size(least, most):  # as often small as large
        return round(least * (most / least) ** rng.random())

    requests = size(1, layout.max_num_seqs)
    new = [1] * requests
    for _ in range(size(requests, layout.max_num_batched_tokens) - requests):
        new[rng.randrange(requests)] += 1
    decodes = rng.randrange(requests)
    new[:decodes] = [1] * decodes
    new = [min(n, layout.max_model_len) for n in new]
    return [(n, n if rng.random() < 0.3 else size(n, layout.max_model_len)) for n in new]


def test_a_request_reaches_another_process():
    """Ranks that write into each other's memory compile ahead too: the memory stays here."""
    ranks = Parallel(1, 2, True, peers=untyped(threading.Lock()))
    assert pickle.loads(pickle.dumps(request_of("tiny", parallel=ranks))).parallel == Parallel(1, 2, True)


CASES = [
    ("tiny", 0, {}),
    ("tiny", 2, {}),
    ("tiny", 2, {"index_keys": "fp4"}),
    ("tiny_v32", 0, {}),
    ("v4_flash", 2, {"changes": {"num_hidden_layers": 4, "n_routed_experts": 32}}),
    ("tiny_v41", 2, {"sizes": SHORT}),
    ("tiny_v41", 2, {"sizes": SHORT, "numerics": "official"}),
    ("tiny_v41", 0, {}),
    ("tiny_v41", 2, {"sizes": RunnerSizes(150, 3, 7, 16), "cuda_graphs": True}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "num_drafts", "facts"), CASES)
def test_no_step_launches_what_was_not_found(preset, num_drafts, facts):
    """Whatever batch sizes and lengths come within the limits; nor does one wait for the device."""
    request = request_of(preset, num_drafts, **facts)
    rng = random.Random(1)
    with recorded_launches(request.gpu) as launches:
        steps = WarmUp(MetaRunner.build(request), num_drafts)
        for _ in steps.steps():
            pass
        found = set(launches.variants)
        assert len(found) > 50
        with steps.runner.op_settings(), torch.inference_mode():
            for rows in dict.fromkeys(tuple(random_step(rng, steps.runner.layout)) for _ in range(5)):
                steps.prefill(list(rows))
        missed = [variant.name for key, variant in launches.variants.items() if key not in found]
    assert not missed


def test_what_is_compiled_is_what_a_launch_looks_up(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with recorded_launches(H200) as launches:
        lists = kernel_lists(request_of("tiny"), launches)
        variant = next(variant for fresh in lists for variant in fresh if variant.name == "decode_rows_kernel")
    assert not variant.is_cached()
    with kernel_loads() as loads:
        for _ in range(2):
            triton.compile(variant.source, target=variant.target, options=variant.options)
    assert loads == [("decode_rows_kernel", False), ("decode_rows_kernel", True)]
    assert variant.is_cached()


def test_lists_begin_with_the_kernels_that_take_longest_to_compile():
    with recorded_launches(H200) as launches:
        lists = [
            [variant.name for variant in fresh] for fresh in kernel_lists(request_of("v4_flash", sizes=SHORT), launches)
        ]
    assert "experts_hopper_kernel" in lists[0]
    assert set(SLOWEST) <= {function.__name__ for function in device_functions()}
    for names in lists:
        slow = [name in SLOWEST for name in names]
        assert slow == sorted(slow, reverse=True)


@EXHAUSTIVE
def test_no_kernel_has_so_many_loads_that_their_layouts_take_seconds():
    """Triton's pass that chooses layouts looks at all operations for each load and store of a tensor."""
    with recorded_launches(H200) as launches:
        for _ in kernel_lists(request_of("v4_flash"), launches):
            pass
    accesses = {}
    for variant in launches.variants.values():
        if isinstance(variant.source.fn, GluonJITFunction):  # its layouts are written down
            continue
        backend: Any = make_backend(variant.target)
        options, context = backend.parse_options(variant.options), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(options), backend.get_module_map()
        module = str(variant.source.make_ir(variant.target, options, *functions, context))
        found = re.findall(r"tt\.(?:load|store|atomic_\w+) .*tensor<", module)
        accesses[variant.name] = max(len(found), accesses.get(variant.name, 0))
    assert len(accesses) > 20
    assert {name: count for name, count in accesses.items() if count > 64} == {}


def test_triton_is_not_patched_and_as_before_after_a_recording():
    kinds = (JITCallable, triton.JITFunction, DependenciesFinder)
    driver, attributes = triton.runtime.driver._active, [dict(vars(kind)) for kind in kinds]
    with recorded_launches(H200):
        assert [dict(vars(kind)) for kind in kinds] == attributes
    assert triton.runtime.driver._active is driver
    assert active_mode.get() is None


def Stub(name: str, cached: bool = False) -> Any:
    """A variant of which a launch asks whether it is cached."""
    return SimpleNamespace(name=name, key=name, is_cached=lambda: cached)


STUBS = """
import json, os, runpy, signal, sys, time
from multiprocessing import Pipe
from types import SimpleNamespace

compile_variants = runpy.run_path(sys.argv[1])["compile_variants"]  # without its package, which imports torch


def Stub(name, compile=lambda: None):
    return SimpleNamespace(name=name, key=name, compile=compile)


def tell(**event):
    print(json.dumps(event), flush=True)


"""


CONSTANT = tl.constexpr(3)


def times_constant_source(x):
    return x * CONSTANT


times_constant = triton.jit(times_constant_source)


def calling_kernel(ptr):
    tl.store(ptr, times_constant(tl.load(ptr)))


class Events(list):
    def __call__(self, **event):
        self.append(event)

    @classmethod
    def of(cls, script):
        """Events of stubs that a process without other threads compiles; warnings are errors there."""
        command = [sys.executable, "-W", "error", "-c", STUBS + textwrap.dedent(script), str(pool.__file__)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stderr) == (0, "")
        return cls(map(json.loads, result.stdout.splitlines()))

    def all(self, kind):
        """Values of one kind of event, in their order."""
        return [value for event in self for value in event.get(kind, ())]


def test_a_kernel_that_does_not_compile_is_named_and_the_others_do():
    events = Events.of("""
        def refuse():
            raise ValueError("no such layout")

        variants = [Stub("good_kernel"), Stub("bad_kernel", refuse), Stub("gone_kernel", lambda: os._exit(3))]
        compile_variants([variants[:1], [], variants[1:]], 2, tell)
    """)
    names = ["good_kernel", "bad_kernel", "gone_kernel"]
    assert events.all("found") == names
    assert sorted(events.all("running")) == sorted(events.all("done")) == sorted(names)
    assert sorted(events.all("failed")) == [
        "bad_kernel: ValueError: no such layout",
        "gone_kernel: its compiler ended with exit code 3",
    ]


def test_a_compilation_ends_at_its_time_limit():
    events = Events.of("""
        compile_variants([[Stub("endless_kernel", signal.pause), Stub("a_kernel")]], 2, tell, seconds=1)
    """)
    assert events.all("failed") == ["endless_kernel: its compiler ended with exit code -14"]
    assert sorted(events.all("done")) == ["a_kernel", "endless_kernel"]


def test_kernels_are_compiled_in_the_order_of_their_lists():
    events = Events.of("""
        lists = ["busy"], ["row_kernel", "attend_kernel"], ["topk_kernel", "insert_tokens_kernel"], []
        busy = {"busy": [lambda: time.sleep(0.3)]}
        compile_variants(([Stub(name, *busy.get(name, ())) for name in names] for names in lists), 1, tell)
    """)
    assert events.all("done") == ["busy", "row_kernel", "attend_kernel", "topk_kernel", "insert_tokens_kernel"]


def test_kernels_of_first_requests_are_listed_before_others():
    runner = MetaRunner.build(request_of("tiny", 2, RunnerSizes(300, 3, 100, 16), cuda_graphs=True))
    warm_up = WarmUp(runner, 2)
    sizes, decodes = warm_up.sizes(), warm_up.decode_sizes()
    alone = [size for size in decodes if size.requests == 1]
    longest = [[(100, length)] for length in (128, 256, 300)]
    prompts = [[(tokens, tokens)] for tokens in (16, 64, 32, 8, 4, 2, 1)]
    assert {(size.rows_per_request, size.num_drafts) for size in alone} >= {(1, 0), (3, 2)}
    assert sizes[: 11 + len(alone)] == [[(100, 100)], *alone, *longest, *prompts]
    others = [warm_up.prefill_sizes(), warm_up.mixed_sizes(), decodes, warm_up.eager_decode_sizes()]
    assert sorted(map(str, sizes)) == sorted(str(size) for part in others for size in part)


@pytest.mark.exhaustive
def test_a_process_with_threads_compiles_without_a_fork_of_its_own(tmp_path, monkeypatch):
    other = multiprocessing.get_context("forkserver").Process(target=int)
    other.start()  # the server keeps the environment of its start
    other.join()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    forks = []
    os.register_at_fork(before=lambda: forks.append(os.getpid()))
    with recorded_launches(H200) as launches:
        next(iter(kernel_lists(request_of("tiny"), launches)))
    by_kind = {type(variant.source.fn): variant for variant in launches.variants.values()}
    variants = list(by_kind.values())
    assert len(variants) == 2  # of Triton and of Gluon
    events = Events()
    pool.compile_all(variants, 2, events)
    assert len(events.all("done")) == 2
    assert [variant.is_cached() for variant in variants] == [True, True]
    assert not forks


def test_keys_do_not_depend_on_the_order_of_launches(monkeypatch):
    """Triton 3.6 has the constants of a called function in a kernel's key only if that one's key was known before."""

    def key(callee_first):
        monkeypatch.setitem(globals(), "times_constant", triton.jit(times_constant_source))
        kernel = triton.jit(calling_kernel)
        for function in (times_constant, kernel) if callee_first else (kernel,):
            function.cache_key  # noqa: B018
        compute_keys([kernel, times_constant])
        return kernel.cache_key

    assert key(True) == key(False)


def test_keys_of_all_functions_are_computed():
    functions = device_functions()
    assert len({function.__module__ for function in functions}) > 20
    keys = [function.cache_key for function in functions]
    compute_keys(reversed(functions))
    assert [function.hash for function in functions] == keys or triton.__version__ < "3.7"


@pytest.mark.parametrize(("variable", "value"), [("TRITON_DEFAULT_FP_FUSION", "0"), ("DISABLE_LLVM_OPT", "1")])
def test_the_marker_depends_on_what_changes_compilation(monkeypatch, variable, value):
    request = request_of("tiny")
    marker = request.marker()
    assert request.marker() == marker
    monkeypatch.setenv(variable, value)
    assert request.marker() != marker


@pytest.mark.exhaustive
def test_warming_up_leaves_sequences_alone():
    with ModelRunner.from_config(two_layers(), max_model_len=40, max_num_seqs=2, max_num_batched_tokens=5) as runner:
        first, tokens = runner.sequence([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5, 6]
        runner.step([(first, 5)])
        for _ in WarmUp(runner).steps():
            pass
        first.append(6)
        expected = runner.sequence(tokens)
        runner.step([(expected, 5)])
        (got,), (want,) = runner.step([(first, 1)]).rows, runner.step([(expected, 1)]).rows
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize(("preset", "drafts"), [("tiny_gpu", 0), ("tiny_v41", 2)])
def test_after_a_warm_up_nothing_is_compiled_and_no_kernel_loaded(preset, drafts, device):
    limits: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 9}
    config = tiny_for_kernels() if preset == "tiny_v41" else preset
    rng = random.Random(1)
    with (
        kernel_loads() as loads,
        ModelRunner.from_config(config, device=device, compile_ahead=True, expected_drafts=drafts, **limits) as runner,
    ):
        decoder = MTPSpeculation(runner, drafts) if drafts else None
        runner.warm_up()
        assert loads
        loads.clear()
        engine = Engine(runner, decoder=decoder)
        for _ in range(30):
            ids = [rng.randrange(2, runner.config.vocab_size) for _ in range(rng.randrange(1, 50))]
            engine.add_request(ids, SamplingParams(temperature=0, max_tokens=rng.randrange(1, 14), ignore_eos=True))
            for _ in range(rng.randrange(8)):
                engine.step()
        while engine.has_unfinished:
            engine.step()
        assert loads == []


def started(monkeypatch, tmp_path, main="", request=None, **options):
    """A compilation with an empty cache; its process runs the lines ``main`` if there are any."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if main:
        monkeypatch.setattr(ahead, "START", main)
    return Compilation(request or request_of("tiny"), **options)


@contextmanager
def told(match):
    """A compilation that is made here warns whenever its process ends: it may do so before it is waited for."""
    with pytest.warns(UserWarning, match=match):
        yield


KERNEL = """
import json, sys, time
assert sys.stdin.buffer.read()[0] == 0x80  # the request, pickled
print(json.dumps({"found": ["kernel"], "running": ["kernel"]}), flush=True)
time.sleep(%s)
print(json.dumps({"done": ["kernel"]}), flush=True)
"""


def test_a_patient_process_begins_when_a_kernel_is_missing(tmp_path, monkeypatch):
    """Where an earlier one has begun, or after a while; one that never begins leaves nothing to wait for."""
    first = started(monkeypatch, tmp_path, KERNEL % 0, patient=True)
    first.wait()
    assert first.begun.exists()
    assert first.done == {"kernel"}
    launching_one, closed = (Compilation(request_of("tiny"), patient=True) for _ in range(2))
    launching_one.before_launch(Stub("cached", cached=True))
    assert launching_one._process is None
    launching_one.before_launch(Stub("missing"))
    closed.close()
    monkeypatch.setattr(ahead, "PATIENCE", 0.01)
    alone = Compilation(request_of("tiny"), patient=True)
    alone._timer.join()
    for compilation, found in ((launching_one, {"kernel"}), (closed, set()), (alone, {"kernel"})):
        compilation.wait()
        assert compilation.ended
        assert compilation.found == found
        assert (compilation._process is None) == (compilation is closed)


def test_a_launch_waits_for_a_kernel_that_is_being_compiled_and_for_no_other(tmp_path, monkeypatch):
    compilation = started(monkeypatch, tmp_path, KERNEL % 0.3)
    while "kernel" not in compilation.running:
        assert not compilation.ended
        time.sleep(0.01)
    compilation.before_launch(Stub("other"))
    compilation.before_launch(Stub("cached", cached=True))
    assert "kernel" not in compilation.done
    compilation.before_launch(Stub("kernel"))
    assert "kernel" in compilation.done
    compilation.wait()


def test_launches_wait_inside_of_a_runners_steps_only(tmp_path, monkeypatch):
    with ModelRunner.from_config(two_layers(), max_model_len=40, max_num_seqs=1, max_num_batched_tokens=5) as runner:
        runner.compilation = started(monkeypatch, tmp_path, KERNEL % 600)
        with runner.op_settings():
            mode = active_mode.get()
            assert mode is not None
            with launching(runner.compilation):
                assert active_mode.get() is mode
        assert active_mode.get() is None
        runner.compilation.close()
        runner.compilation.wait()
        with runner.op_settings():
            assert active_mode.get() is None


def test_a_launch_tells_the_key_that_was_recorded(monkeypatch):
    kernel, x, seen = triton.jit(calling_kernel), torch.empty(16, device="meta"), []

    def refuse(variant):
        seen.append(variant)
        raise KeyError

    with recorded_launches(H200) as launches:
        kernel[(1,)](x, enable_fp_fusion=True)
        kernel[(2,)](x, enable_fp_fusion=True)
    assert [variant.name for variant in launches.latest] == 2 * ["calling_kernel"]
    monkeypatch.setattr(triton.runtime.driver, "_active", _Target(target_of(H200)))
    with pytest.raises(KeyError), before_compiling(refuse):
        kernel[(1,)](x, enable_fp_fusion=True)
    assert [variant.key for variant in seen] == list(launches.variants)


@EXHAUSTIVE
def test_closing_ends_the_process(tmp_path, monkeypatch):
    compilation = started(monkeypatch, tmp_path, workers=1)
    compilation.close()
    compilation.wait()
    assert compilation.ended
    assert not compilation.message()
    assert required(compilation._process).returncode is not None


def test_what_breaks_a_load_off_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "START", "import time; time.sleep(600)")
    threads = torch.get_num_threads()
    with pytest.raises(KeyError), compiling_ahead(request_of("tiny")) as compilation:
        raise KeyError
    assert torch.get_num_threads() == threads
    required(compilation).wait()
    assert required(required(compilation)._process).returncode == -9
    assert active_mode.get() is None
    required(compilation)._marker.touch()
    with compiling_ahead(request_of("tiny")) as nothing:
        assert nothing is None


@pytest.mark.parametrize("threads", [2, 7])
def test_few_threads_load_weights_while_kernels_are_compiled(tmp_path, monkeypatch, threads):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "START", "import time; time.sleep(600)")
    with torch_threads(threads):
        with compiling_ahead(request_of("tiny")) as compilation:
            assert torch.get_num_threads() == min(threads, ahead.LOADING_THREADS)
        assert torch.get_num_threads() == threads
        required(compilation).close()
        required(compilation)._marker.touch()
        with compiling_ahead(request_of("tiny")):  # nothing to compile
            assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("ranks", "workers"), [(None, 15), ("1", 15), ("2", 7), ("16", 1), ("40", 1), ("0", 15)])
def test_ranks_of_a_host_share_its_processors(monkeypatch, ranks, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16), raising=False)
    if ranks is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert ahead.default_workers() == workers


@pytest.mark.filterwarnings("error::UserWarning")
def test_nobody_waits_where_warnings_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    compilation = started(monkeypatch, tmp_path, 'print(\'{"found": ["x"]}\')')
    compilation.wait()
    assert compilation.ended


@EXHAUSTIVE
def test_a_process_that_dies_is_told(tmp_path, monkeypatch):
    with told("exit code -9"):
        compilation = started(monkeypatch, tmp_path, workers=1)
        required(compilation._process).kill()
        compilation.wait()
    assert "compiled as they are launched" in compilation.message()


def test_a_process_that_hangs_is_ended_and_told(tmp_path, monkeypatch):
    """Also if it never reads a request that is larger than a pipe."""
    monkeypatch.setattr(ahead, "SILENT_SECONDS", 0.1)
    request = dataclasses.replace(request_of("tiny"), headers={"x" * (1 << 20): TensorInfo("BF16", (1,), 2)})
    with pytest.warns(UserWarning, match="written nothing for 0.1 s"):
        (compilation := started(monkeypatch, tmp_path, "import time; time.sleep(600)", request)).wait()
    assert required(compilation._process).returncode == -9
    assert "compiled as they are launched" in compilation.message()


def test_a_process_that_ends_early_is_told_and_leaves_no_marker(tmp_path, monkeypatch):
    with told("exit code 0"):
        compilation = started(monkeypatch, tmp_path, 'print(\'{"found": ["x"]}\')')
        compilation.wait()
    assert not compilation._marker.exists()


@EXHAUSTIVE
def test_everything_is_compiled_once(tmp_path, monkeypatch):
    """Of a model of one layer."""
    one = {"num_hidden_layers": 1, "num_hash_layers": 0, "num_nextn_predict_layers": 0, "compress_ratios": [128]}
    request = request_of("tiny", sizes=RunnerSizes(64, 1, 2, 16), changes=one)
    compilation = started(monkeypatch, tmp_path, request=request)
    compilation.wait()
    assert not compilation.message()
    assert compilation.found == compilation.done
    assert request.marker().exists()
