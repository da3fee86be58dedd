"""Nothing that a caller sets in torch or NumPy changes a bit of what is computed."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepseek_attn import LLM, LayerSession, ModelRunner, SamplingParams
from deepseek_attn.cache.records import Fp8DsMlaRecord
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.flash_mla_api import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from deepseek_attn.runner import cpu_threads
from deepseek_attn.utils import torch_state
from deepseek_attn.utils.torch_state import own_torch_state
from tests.support.interruptions import InterruptBefore
from tests.support.small_models import prompt, small_config
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required, untyped
from tests.support.v32_cases import small
from tests.support.v41_cases import shallow

CPU = torch.device("cpu")


class Passed(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MATMUL = untyped(torch.backends.mkldnn).matmul  # which torch adds at run time


@contextmanager
def setting(get: Callable, change: Callable, value: object) -> Iterator[None]:
    """``change(value)``, taken back behind it. That it is still there then is tested too."""
    before = get()
    change(value)
    try:
        inside = get()
        yield
        assert get() == inside
    finally:
        change(before)


def default_device(device: str) -> AbstractContextManager[None]:
    return setting(lambda: None, torch.set_default_device, device)


def mkldnn_products(precision: str) -> AbstractContextManager[None]:
    matmul = MATMUL
    return setting(lambda: matmul.fp32_precision, partial(setattr, matmul, "fp32_precision"), precision)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
        assert sys.float_info.min / 2 == 0
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def warnings_raised() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


default_dtype = partial(setting, torch.get_default_dtype, torch.set_default_dtype)
float32_products = partial(setting, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
threads = partial(setting, torch.get_num_threads, torch.set_num_threads)
deterministic = partial(setting, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms)
CONTEXTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "default device": lambda: default_device("meta"),
    "device context": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic algorithms": lambda: deterministic(True),
    "high": lambda: float32_products("high"),
    "medium": lambda: float32_products("medium"),
    "bfloat16 products": lambda: mkldnn_products("bf16"),
    "flushed denormals": flushed_denormals,
    "NumPy raises": lambda: np.errstate(all="raise"),
    "warnings raised": warnings_raised,
    "function mode": Passed,
    "all at once": lambda: all_at_once(),
}
ALONE = ("float16", "float64", "device context", "high", "medium")  # of others that say the same otherwise


@contextmanager
def all_at_once() -> Iterator[None]:
    with ExitStack() as stack:
        for name, context in CONTEXTS.items():
            if name not in (*ALONE, "all at once"):
                stack.enter_context(context())
        yield


def tiny(family: str) -> AnyConfig:
    if family == "V4":
        return small_config([4, 128], mtp=1)
    if family == "V4.1":
        return shallow()
    return small("deepseek_v3" if family == "V3" else "deepseek_v32")


def runner_of(family: str, **options) -> ModelRunner:
    options = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 4} | options
    return ModelRunner.from_config(tiny(family), seed=0, **options)


def scored(runner: ModelRunner) -> list[Tensor]:
    """Prefill, prefill beside decodes, and decodes of few tokens."""
    prompts = [prompt(runner.config, 23), prompt(runner.config, 3, seed=1)]
    logits = runner.score(prompts) + runner.score([prompts[0][:3]], chunk_size=1)
    return logits + runner.score_mtp([prompts[0]])[1] if runner.config.model_type == "deepseek_v4" else logits


def built(family: str) -> list[Tensor]:
    with runner_of(family) as runner:
        return scored(runner)


def layers_driven(runner: ModelRunner, x: Tensor) -> list[Tensor]:
    """A layer by session, and by hand."""
    session = LayerSession(runner, layers=[1])
    a, b = session.sequence(), session.sequence()
    outputs = [session.run(x[:, 0], {a: 39, b: 2}), a.run(x[:1, 1])]
    b.free()
    a.free()
    cache = runner.manager.create()
    runner.manager.reserve([(cache, len(x))])
    step = runner.step_metadata([cache], [len(x)])
    outputs.append(session.attention[1](x[:, 0], step.positions, step).detach())
    runner.manager.commit(cache, len(x))
    runner.manager.free(cache)
    return outputs


def sparse_prefill(q: Tensor, kv: Tensor, indices: Tensor) -> list[Tensor]:
    out = [*flash_mla_sparse_fwd(q, kv, indices, 0.1), *flash_mla_sparse_fwd(q, kv, indices, 0.1, return_log2_lse=True)]
    nothing = flash_mla_sparse_fwd(q[:1], kv, torch.full_like(indices[:1], -1), 0.1)
    assert required(nothing[2]).dtype == torch.float32
    assert (nothing[2] == float("inf")).all()
    return [required(tensor) for tensor in (*out, *nothing)]


def sparse_decode(q: Tensor, cache: Tensor, indices: Tensor) -> list[Tensor]:
    return [*flash_mla_with_kvcache(q, cache, None, None, 512, get_mla_metadata()[0], None, 0.1, indices=indices)]


def dense_decode(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> list[Tensor]:
    return [*flash_mla_with_kvcache(q, cache, table, lens, 512, get_mla_metadata()[0], causal=True)]


def generated(llm: LLM) -> list[Tensor]:
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=3)
    greedy = SamplingParams(temperature=0, max_tokens=3)
    tokens = [c.token_ids for c in llm.generate(["Once upon a time", "It is"], [drawn, greedy])]
    assert all(len(ids) == 3 for ids in tokens)
    return [torch.tensor(tokens, dtype=torch.int64, device=CPU)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Bits may depend on the number of threads, which other tests of the process may have changed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def entries() -> Iterator[dict[str, Callable[[], list[Tensor]]]]:
    """Calls to compare, with models and inputs that were made without any context."""
    g = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        runners = {family: stack.enter_context(runner_of(family)) for family in ("V4", "V3.2", "V3", "V4.1")}
        entries = {family: partial(scored, runner) for family, runner in runners.items()}
        for family in ("V4", "V3.2"):
            x = torch.randn(41, 2, runners[family].config.hidden_size, generator=g)
            entries[f"layers of {family}"] = partial(layers_driven, runners[family], x)
        for family in ("V4", "V3.2", "V4.1"):
            entries[f"{family}, built"] = partial(built, family)
        q, kv = torch.randn(5, 4, 512, generator=g).bfloat16(), torch.randn(70, 1, 512, generator=g).bfloat16()
        indices = torch.randint(-1, 70, (5, 1, 30), generator=g).int()
        entries["flash_mla_sparse_fwd"] = partial(sparse_prefill, q, kv, indices)
        entries["tiny values"] = partial(sparse_prefill, q, (kv.float() * 1e-38).bfloat16(), indices)
        record, pages = Fp8DsMlaRecord(448, 64), torch.zeros(3, 64 * 584, dtype=torch.uint8)
        record.insert(pages, 64, torch.arange(150), torch.randn(150, 512, generator=g))
        query, slots = q.view(5, 1, 4, 512), torch.randint(-1, 150, (5, 1, 33), generator=g).int()
        entries["sparse decode"] = partial(sparse_decode, query, pages.view(3, 64, 1, 584), slots)
        table, lens = (
            torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0]]).int(),
            torch.tensor([70, 3, 1, 64, 65]).int(),
        )
        plain = torch.randn(2, 64, 1, 512, generator=g).bfloat16()
        entries["dense decode"] = partial(dense_decode, query, plain, table, lens)
        entries["LLM"] = partial(generated, stack.enter_context(LLM(device="cpu", max_model_len=256, max_num_seqs=2)))
        yield entries


ENTRIES = ["V4", "V3.2", "V3", "V4.1", "layers of V4", "layers of V3.2", "V4, built", "V3.2, built", "V4.1, built"]
ENTRIES += ["flash_mla_sparse_fwd", "sparse decode", "dense decode", "LLM", "tiny values"]
OFTEN = ("V3.2", "layers of V3.2", "V4, built")  # in `make test-all`: others show each part of theirs
WHILE_BUILT = ("bfloat16", "float64", "device context", "default device", "inference mode")
SINGLY = ("float64", "inference mode", "default device", "medium")
QUICK = [("V4, built" if context in WHILE_BUILT[2:] else "V4", context) for context in SINGLY]
QUICK += [("tiny values", "flushed denormals")]
QUICK += product(
    [name for name in ENTRIES if name not in ("V3", "V3.2, built", "V4.1, built", *OFTEN)], ["all at once"]
)
MORE = [("V4", context) for context in ("autocast", "flushed denormals", "function mode")]
MORE += product(OFTEN, ["all at once"])
CASES = [case for case in product(ENTRIES, CONTEXTS) if case in QUICK + MORE or case[1] not in ALONE]


def clear_caches() -> None:
    """Constants that ops keep are made again, in the context of the next call."""
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("deepseek_attn.kernels") else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@pytest.fixture(scope="module")
def plain(entries) -> dict[str, list[Tensor]]:
    return {name: [t.clone() for t in entry()] for name, entry in entries.items()}


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [str(t.dtype).encode() + t.flatten().view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.parametrize(("entry", "context"), tiered(CASES, QUICK, quick_on_gpu=MORE))
def test_a_callers_context_changes_no_bit(entry, context, entries, plain):
    clear_caches()
    with CONTEXTS[context]():
        found = entries[entry]()
    found = [t.clone() for t in found]
    clear_caches()
    assert bits(found) == bits(plain[entry])
    assert bits(entries[entry]()) == bits(plain[entry])  # what was kept in the context serves behind it


def test_an_interruption_leaves_no_thread_inside(monkeypatch):
    """Before any line of entering and leaving: later steps have float32 products, and the caller's setting behind."""

    def enter(line=None) -> InterruptBefore:
        monkeypatch.setattr(torch_state, "_float32_products", torch_state._Float32Products())
        MATMUL.fp32_precision = "bf16"
        with InterruptBefore(line, files=(str(torch_state.__file__),)) as interrupt, own_torch_state():
            pass
        return interrupt

    with mkldnn_products("bf16"):
        lines = list(enter().lines)
        assert len(lines) > 20
        for line in lines:
            assert enter(line).fired, line
            MATMUL.fp32_precision = "bf16"
            with own_torch_state():
                assert MATMUL.fp32_precision == "ieee", line
            assert MATMUL.fp32_precision == "bf16", line


@pytest.mark.parametrize("products", ["medium", "bfloat16 products"])
def test_settings_are_back_after_an_error(products):
    def failing() -> None:
        with own_torch_state(), own_torch_state():
            assert MATMUL.fp32_precision == "ieee"
            assert not torch.is_autocast_enabled("cpu")
            raise RuntimeError("within")

    with CONTEXTS[products](), CONTEXTS["autocast"]():
        with pytest.raises(RuntimeError, match="within"):
            failing()
        assert MATMUL.fp32_precision == "bf16"
        assert torch.is_autocast_enabled("cpu")


@exhaustive_on_cpu
@exhaustive_on_cpu
@pytest.mark.parametrize("family", tiered(["V4", "V3", "V4.1"], ["V4"]))
def test_deterministic_bits_do_not_depend_on_threads(family):
    scores = []
    with runner_of(family, deterministic=True) as runner:
        for count in (1, 3, 4):
            with threads(count):
                scores.append(bits(runner.score([prompt(runner.config, 19)])))
    assert scores[0] == scores[1] == scores[2]


def threads_of_steps(runner: ModelRunner, lengths: list[int]) -> list[int]:
    """Threads on which steps of a new sequence with so many tokens ran."""
    counts: list[int] = []
    hook = runner.model.register_forward_pre_hook(lambda *_: counts.append(torch.get_num_threads()))
    with threads(3):
        sequence = runner.sequence(prompt(runner.config, sum(lengths)))
        for length in lengths:
            runner.step([(sequence, length)])
        assert torch.get_num_threads() == 3
    hook.remove()
    sequence.free()
    return counts


def test_steps_take_one_thread_unless_more_are_worth_it_or_asked_for(monkeypatch):
    monkeypatch.setattr(cpu_threads, "ASKED", False)
    monkeypatch.setattr(cpu_threads, "DEFAULT", 3)
    with runner_of("V4") as runner:
        needed = runner.cpu_threads.seconds(40)
        assert runner.cpu_threads.seconds(1) < needed
        monkeypatch.setattr(cpu_threads, "WORTHWHILE", needed)
        assert threads_of_steps(runner, [40, 39, 1]) == [3, 1, 1]
        monkeypatch.setattr(cpu_threads, "DEFAULT", 2)  # so 3 were asked for
        assert threads_of_steps(runner, [40, 1]) == [3, 3]
        monkeypatch.setattr(cpu_threads, "DEFAULT", 3)
        monkeypatch.setattr(cpu_threads, "ASKED", True)  # by OMP_NUM_THREADS
        assert threads_of_steps(runner, [40, 1]) == [3, 3]


def test_a_failed_step_gives_threads_back(monkeypatch):
    monkeypatch.setattr(cpu_threads, "ASKED", False)
    monkeypatch.setattr(cpu_threads, "DEFAULT", 3)
    with runner_of("V4") as runner, threads(3):
        runner.model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.step([(runner.sequence([5]), 1)])
        assert torch.get_num_threads() == 3


@exhaustive_on_cpu
def test_the_small_model_decodes_on_one_thread_and_a_large_one_on_all():
    with LLM(device="cpu", max_model_len=256, max_num_seqs=2) as llm:
        small = llm.runner.cpu_threads
        assert small.seconds(1) < small.seconds(16) < cpu_threads.WORTHWHILE < small.seconds(256)
        small.others, small.other_bytes = 10**9, 2 * 10**9
        assert small.seconds(1) > cpu_threads.WORTHWHILE


@pytest.mark.exhaustive
def test_a_runner_made_in_inference_mode_serves_outside_of_it():
    x = torch.randn(41, 2, 128, generator=torch.Generator().manual_seed(0))
    with runner_of("V4") as runner:
        expected = bits(layers_driven(runner, x))
    with torch.inference_mode():
        runner = runner_of("V4")
    with runner:
        assert bits(layers_driven(runner, x)) == expected
        assert bits(scored(runner)) == bits(built("V4"))
