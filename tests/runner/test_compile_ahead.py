"""Kernels are known, and compiled, before steps launch them."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

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
from deepseek_attn.kernels.common.launches import (
    Asks,
    compile_variants,
    fix_cache_keys,
    kernel_loads,
    recorded_launches,
)
from deepseek_attn.runner import ModelRunner, compile_ahead
from deepseek_attn.runner.compile_ahead import (
    Compilation,
    RunnerRequest,
    RunnerSizes,
    compiling_ahead,
    forked_compiler,
)
from deepseek_attn.runner.stand_in import StandIn, finding, serve
from deepseek_attn.runner.step import coming_steps
from deepseek_attn.runner.warm_up import WarmUp
from deepseek_attn.utils.processes import Fork
from tests.support.tiers import EXHAUSTIVE, tiered
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
        config = tiny_for_kernels() if preset == "tiny_v41" else ModelConfig.from_preset(preset).replace(**changes)
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


CASES = [
    ("tiny", 0, {}),
    ("tiny", 2, {}),
    ("tiny", 2, {"index_keys": "fp4"}),
    ("tiny_v32", 0, {}),
    ("v4_flash", 2, {}),
    ("tiny_v41", 2, {"sizes": SHORT}),
    ("tiny_v41", 2, {"sizes": SHORT, "numerics": "official"}),
    ("tiny_v41", 0, {}),
    ("tiny_v41", 2, {"sizes": RunnerSizes(150, 3, 7, 16), "cuda_graphs": True}),
]


@pytest.mark.parametrize(("preset", "num_drafts", "facts"), tiered(CASES, [CASES[0], CASES[5]]))
def test_no_step_launches_what_was_not_found(preset, num_drafts, facts):
    """Whatever batch sizes and lengths come within the limits; nor does one wait for the device."""
    request = request_of(preset, num_drafts, **facts)
    rng = random.Random(1)
    with recorded_launches(request.gpu) as launches:
        steps = WarmUp(StandIn.build(request), num_drafts)
        for _ in steps.steps():
            pass
        found = set(launches.variants)
        assert len(found) > 50
        with steps.runner.op_settings(), torch.inference_mode():
            for rows in dict.fromkeys(tuple(random_step(rng, steps.runner.layout)) for _ in range(60)):
                steps.prefill(list(rows))
        missed = [variant.name for key, variant in launches.variants.items() if key not in found]
    assert not missed


def test_what_is_compiled_is_what_a_launch_looks_up(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with finding(request_of("tiny")) as finder:
        found = (variant for fresh in finder.all() for variant in fresh)
        variant = next(variant for variant in found if variant.name == "decode_rows_kernel")
        found.close()
    assert not variant.is_cached()
    with kernel_loads() as loads:
        for _ in range(2):
            triton.compile(variant.source, target=variant.target, options=variant.options)
    assert loads == [("decode_rows_kernel", False), ("decode_rows_kernel", True)]
    assert variant.is_cached()


def test_a_launch_does_not_wait_for_a_kernel_that_an_earlier_process_compiled(tmp_path, monkeypatch):
    """A process that ends early leaves kernels but no marker; the next one looks for all of them again meanwhile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    waited, callbacks = [], []
    monkeypatch.setattr("deepseek_attn.kernels.common.launches.call_before_compiling", callbacks.append)
    monkeypatch.setattr(Compilation, "wait", lambda self, wanted, progress: waited.append(wanted))
    compilation = compile_ahead.compile_ahead(request_of("tiny"), False, fork=Fork(lambda *files: time.sleep(60)))
    try:
        for name, cached in (("cached", True), ("missing", False)):
            callbacks[0](SimpleNamespace(is_cached=lambda cached=cached: cached, cached_hash=lambda name=name: name))
    finally:
        compilation.close()
    assert waited == ["missing"]


class Stub:
    """A variant whose compilation does something else."""

    def __init__(self, name, compile):
        self.name, self.compile = name, compile

    def cached_hash(self):
        return self.name


CONSTANT = tl.constexpr(3)


def times_constant_source(x):
    return x * CONSTANT


times_constant = triton.jit(times_constant_source)


def calling_kernel(ptr):
    tl.store(ptr, times_constant(tl.load(ptr)))


class Events:
    def __init__(self):
        self.seen, self.ends, self.errors = [], 0, {}

    def found(self, hashes):
        self.seen += hashes

    def all_found(self):
        self.ends += 1

    def compiled(self, cached_hash, error):
        self.errors[cached_hash] = error


def test_a_kernel_that_does_not_compile_is_named_and_the_others_do():
    def refuse():
        raise ValueError("no such layout")

    variants = [Stub("good_kernel", lambda: None), Stub("bad_kernel", refuse), Stub("gone_kernel", lambda: os._exit(3))]
    events = Events()
    compile_variants([variants[:1], [], variants[1:]], 2, events)
    assert events.seen == [variant.name for variant in variants]
    assert events.ends == 1
    assert events.errors == {
        "good_kernel": "",
        "bad_kernel": "bad_kernel: ValueError: no such layout",
        "gone_kernel": "gone_kernel: its compiler ended with exit code 3",
    }


def test_kernels_of_the_first_steps_come_first_and_with_half_of_the_workers(tmp_path):
    """The slowest of a step before its others; later steps' kernels wait for an urgent one where two would run."""
    log = tmp_path / "log"

    def stub(name, seconds=0.0):
        def compile():
            time.sleep(seconds)
            with log.open("a") as file:
                file.write(name + "\n")

        return Stub(name, compile)

    names = [["row_kernel", "attend_kernel"], ["topk_kernel", "insert_tokens_kernel"], [], ["experts_hopper_kernel"]]
    compile_variants([[stub(name) for name in step] for step in names], 1, Events())
    found = ["attend_kernel", "row_kernel", "insert_tokens_kernel", "topk_kernel", "experts_hopper_kernel"]
    assert log.read_text().split() == found
    log.unlink()
    compile_variants([[stub("urgent", 0.2)], [], [], [stub("late")]], 2, Events())
    assert log.read_text().split() == ["urgent", "late"]


def logged(log, name, before=lambda: None):
    """A kernel whose compilation writes its name to a file."""

    def compile():
        before()
        with log.open("a") as file:
            file.write(name + "\n")

    return Stub(name, compile)


def test_what_is_asked_for_is_compiled_first(tmp_path):
    """A kernel alone; then one with those of two steps, the first one's before the second's, found or not."""
    log = tmp_path / "log"
    asked, ask = multiprocessing.Pipe(duplex=False)

    def launches():  # while the first kernel is compiled, so that the next one is chosen afterwards
        ask.send(("d", []))
        ask.send(("c", ["prompt", "decode"]))

    kernels = {name: logged(log, name) for name in "bcdefgh"} | {"a": logged(log, "a", launches)}
    steps = {"prompt": [kernels["a"], kernels["g"], kernels["c"]], "decode": [kernels["h"], kernels["f"]]}
    events = Events()
    compile_variants([[kernels[name] for name in "abcdef"]], 1, events, Asks(asked, steps.get))
    assert log.read_text().split() == [*"acgfhdbe"]
    assert sorted(events.seen) == [*"abcdefgh"]
    assert sorted(events.errors) == [*"abcdefgh"]


def test_a_kernel_that_is_found_after_it_was_asked_for_is_compiled_first(tmp_path):
    """The process that asked may be gone by then."""
    log = tmp_path / "log"
    asked, ask = multiprocessing.Pipe(duplex=False)
    ask.send(("late", []))
    ask.close()
    compile_variants([[], [logged(log, name) for name in ("early", "late")]], 1, Events(), Asks(asked, list))
    assert log.read_text().split() == ["late", "early"]


STEPS = [[(9, 200)], [(1, 40)], [(1, 30), (1, 299)], [(1, 7), (6, 120)]]


@pytest.mark.parametrize("rows", tiered(STEPS, [STEPS[1], STEPS[3]]), ids=str)
def test_the_kernels_of_a_step_are_found_again(rows):
    """Those that it launches where none of them is known yet, some of which are for weights and run once."""
    request = request_of("tiny")
    with finding(request) as finder:
        alone = {variant.key: variant.name for variant in finder.step(rows)}
    with finding(request) as finder:
        for _ in finder.all():
            pass
        known = {variant.key for variant in finder.step(rows)}
        assert finder.step([(1, 1)])
    assert known <= set(alone)
    assert {alone[key] for key in set(alone) - known} <= {"split_weight_kernel"}


def test_coming_steps_take_a_prompt_to_its_first_decode():
    with ModelRunner.from_config("tiny", max_model_len=40, max_num_seqs=3, max_num_batched_tokens=9) as runner:

        def steps(*batch):
            return coming_steps([(runner.sequence([1] * length), n) for length, n in batch], 9, 40)

        assert steps((5, 5)) == [[(5, 5)], [(1, 6)]]
        assert steps((35, 9)) == [[(9, 9)], [(9, 18)], [(8, 35)], [(1, 36)]]
        assert steps((40, 8)) == [[(8, 8)], [(9, 17)], [(5, 40)], [(1, 40)]]
        assert steps((1, 1), (20, 8)) == [[(1, 1), (8, 8)], [(1, 2), (8, 16)], [(1, 3), (4, 20)], [(1, 4), (1, 21)]]


def test_a_launch_that_waits_asks_for_its_kernel_and_for_the_steps_to_come(tmp_path, monkeypatch):
    """The steps once; then it waits until the kernel is compiled, or is none of those that will be."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def main(requests, told):
        messages = Connection(os.dup(requests.fileno()), writable=False)
        messages.recv()
        for name in ("first", "second"):
            asked = messages.recv()
            told.write(json.dumps({"found": [name], "done": [name], "failed": [str(asked)]}) + "\n")
            told.flush()
        told.write(json.dumps({"all_found": True}) + "\n")

    compilation = Compilation(request_of("tiny"), fork=Fork(main))
    compilation.coming = [[(9, 9)], [(1, 10)]]
    compilation.wait("first")
    compilation.wait("first")  # compiled: nothing is asked for
    compilation.coming = [[(1, 10)], [(1, 11)]]
    compilation.wait("second")
    compilation.wait("neither")
    with pytest.warns(UserWarning, match="do not compile"):
        compilation.wait()
    assert compilation.failed == [str(("first", [[(9, 9)], [(1, 10)]])), str(("second", [[(1, 11)]]))]


def test_keys_do_not_depend_on_the_order_of_launches(monkeypatch):
    """Triton 3.6 has the constants of a called function in a kernel's key only if that one's key was known before."""
    fix_cache_keys()

    def key(callee_first):
        monkeypatch.setitem(globals(), "times_constant", triton.jit(times_constant_source))
        if callee_first:
            times_constant.cache_key  # noqa: B018
        return triton.jit(calling_kernel).cache_key

    assert key(True) == key(False)


@pytest.mark.parametrize(("variable", "value"), [("TRITON_DEFAULT_FP_FUSION", "0"), ("DISABLE_LLVM_OPT", "1")])
def test_the_marker_depends_on_what_changes_compilation(monkeypatch, variable, value):
    request = request_of("tiny")
    marker = request.marker()
    assert request.marker() == marker
    monkeypatch.setenv(variable, value)
    assert request.marker() != marker


def test_warming_up_leaves_sequences_alone():
    with ModelRunner.from_config("tiny", max_model_len=40, max_num_seqs=2, max_num_batched_tokens=5) as runner:
        first, tokens = runner.sequence([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5, 6]
        runner.step([(first, 5)])
        for _ in WarmUp(runner).steps():
            pass
        first.append(6)
        expected = runner.sequence(tokens)
        runner.step([(expected, 5)])
        (got,), (want,) = runner.step([(first, 1)]).logits, runner.step([(expected, 1)]).logits
        assert torch.equal(got, want)


@pytest.mark.parametrize(("preset", "drafts"), [("tiny_gpu", 0), ("tiny_v41", 2)])
def test_after_a_warm_up_nothing_is_compiled_and_no_kernel_loaded(preset, drafts, device):
    """And before it, this process waits for those that compile ahead."""
    if device.type == "cpu":
        pytest.skip("kernels are compiled and loaded on a GPU only (DEEPSEEK_ATTN_TEST_DEVICE)")
    limits = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 9}
    config = tiny_for_kernels() if preset == "tiny_v41" else preset
    rng = random.Random(1)
    with (
        kernel_loads() as loads,
        ModelRunner.from_config(config, device=device, compile_ahead=True, expected_drafts=drafts, **limits) as runner,
    ):
        decoder = MTPSpeculation(runner, drafts) if drafts else None
        runner.warm_up()
        assert [load.name for load in loads if not load.cached] == []
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


PROCESSES = pytest.mark.parametrize("fork", [False, True], ids=["interpreter", "fork"])


def test_a_patient_process_begins_when_a_kernel_is_missing(tmp_path, monkeypatch):
    """Where an earlier one has begun, or after a while; one that never begins leaves nothing to wait for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def main(requests, told):
        Connection(os.dup(requests.fileno()), writable=False).recv()
        told.write(json.dumps({"found": ["kernel"], "done": ["kernel"]}) + "\n" + json.dumps({"all_found": True}))
        told.write("\n")

    first = Compilation(request_of("tiny"), fork=Fork(main), patient=True)
    first.wait()
    assert first.begun.exists()
    assert first.done == {"kernel"}
    waiting, closed = (Compilation(request_of("tiny"), fork=Fork(main), patient=True) for _ in range(2))
    assert not waiting.found
    waiting.wait("kernel")
    closed.close()
    monkeypatch.setattr(compile_ahead, "PATIENCE", 0.01)
    alone = Compilation(request_of("tiny"), fork=Fork(main), patient=True)
    alone._later.join()
    for compilation, found in ((waiting, {"kernel"}), (closed, set()), (alone, {"kernel"})):
        compilation.wait()
        assert compilation.ended
        assert compilation.found == found
        assert compilation._process.returncode is not None


@EXHAUSTIVE
@PROCESSES
def test_closing_ends_the_process(fork, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compilation = Compilation(request_of("tiny"), workers=1, fork=Fork(serve) if fork else None)
    compilation.close()
    compilation.wait()
    assert compilation.ended
    assert not compilation.message()
    assert compilation._process.returncode is not None


@EXHAUSTIVE
@PROCESSES
def test_a_process_that_dies_is_told(fork, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compilation = Compilation(request_of("tiny"), workers=1, fork=Fork(serve) if fork else None)
    compilation._process.kill()
    with pytest.warns(UserWarning, match="exit code -9"):
        compilation.wait()
    assert "compiled as they are launched" in compilation.message()


def ended(request, main):
    """A compilation whose process did something else."""
    compilation = Compilation(request, fork=Fork(main))
    compilation.wait()
    return compilation


def test_a_process_that_hangs_is_ended_and_told(monkeypatch):
    """Also if it never reads a request that is larger than a pipe."""
    monkeypatch.setattr(compile_ahead, "SILENT_SECONDS", 0.1)
    request = dataclasses.replace(request_of("tiny"), headers={"x" * (1 << 20): TensorInfo("BF16", (1,), 2)})
    with pytest.warns(UserWarning, match="told nothing for 0.1 s"):
        compilation = ended(request, lambda requests, told: time.sleep(600))
    assert compilation._process.returncode == -9
    assert "compiled as they are launched" in compilation.message()


def test_a_process_that_ends_early_is_told_and_leaves_no_marker(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    request = request_of("tiny")
    with pytest.warns(UserWarning, match="exit code 0"):
        ended(request, lambda requests, told: told.write(json.dumps({"found": ["x"], "all_found": True}) + "\n"))
    assert not request.marker().exists()


def test_a_fork_is_made_where_no_thread_can_hold_a_lock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    fork = forked_compiler()
    assert fork is not None
    with compiling_ahead(None, progress=False, fork=fork) as compilation:  # nothing is to be compiled
        assert compilation is None
        assert fork.wait() == -9
    for module, name, value in ((torch.cuda, "is_initialized", True), (threading, "active_count", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda value=value: value)
            assert forked_compiler() is None


@EXHAUSTIVE
def test_everything_is_compiled_once(tmp_path, monkeypatch):
    """By a fork, as where no GPU is in use yet; other tests have both kinds of process. Of a model of one layer."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    one = {"num_hidden_layers": 1, "num_hash_layers": 0, "num_nextn_predict_layers": 0, "compress_ratios": [128]}
    request = request_of("tiny", sizes=RunnerSizes(64, 1, 2, 16), changes=one)
    compilation = Compilation(request, fork=Fork(serve))
    compilation.wait()
    assert not compilation.message()
    assert compilation.found == compilation.done
    assert request.marker().exists()
