"""Plugins of other engines: asked for, attention is ours, or the engine stops; not asked for, nothing changes."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import math
import sys
import tomllib
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deepseek_attn import flash_mla_api
from deepseek_attn.plugins import sglang, vllm
from deepseek_attn.plugins.engine_plugin import FUNCTIONS
from tests.plugins.engines import SGLANG, SGLANG_FILES, VLLM, VLLM_FILES, functions, write_engine
from tests.support.oracle_flash_mla import Shape, random_pool, random_sink
from tests.support.typed import required

ROOT = Path(__file__).parents[2]
PLUGINS = {"vllm": vllm, "sglang": sglang}
SHAPE = Shape(70, 65, topk_length=True)


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """Puts a stand-in of an engine on the import path and asks for its plugin; returns an importer of its modules."""

    def engine(package: str, version: str = "", asked: str = "1", **changed: str):
        default, files = {"vllm": (VLLM, VLLM_FILES), "sglang": (SGLANG, SGLANG_FILES)}[package]
        files = {name: changed.get(Path(name).stem, text) for name, text in files.items()}
        write_engine(tmp_path, package, version or default, files)
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv(PLUGINS[package].PLUGIN.variable, asked)
        return importlib.import_module

    yield engine
    for name in [name for name in sys.modules if name.split(".")[0] in PLUGINS]:
        del sys.modules[name]


def pools(device, d_qk=512):
    return [random_pool(3, 1, d_qk, shape, device) for shape in (SHAPE, SHAPE._replace(block_size=2))]


def test_vllm_decodes_and_prefills_over_our_kernels(engine, device):
    load = engine("vllm")
    model = load("vllm.models.deepseek_v4.nvidia.flashmla")  # imported before the plugin is
    vllm.register()
    builder = load("vllm.v1.attention.backends.mla.sparse_swa")
    q, sink = torch.randn(3, 64, 512).bfloat16().to(device), random_sink(64, device)
    swa, compressed = pools(device)
    output, schedule = torch.empty_like(q), builder.build()
    for _ in range(2):  # layers share a schedule
        model.forward_decode(q, swa, compressed, schedule, 0.1, sink, output)
    expected, _ = flash_mla_api.flash_mla_with_kvcache(
        q[:, None], swa.k_cache, None, None, 512, *flash_mla_api.get_mla_metadata(), 0.1, False, True, swa.indices,
        sink, compressed.k_cache, compressed.indices, swa.topk_length, compressed.topk_length,
    )  # fmt: skip
    assert torch.equal(output, expected[:, 0])
    kv, rows = torch.randn(9, 1, 512).bfloat16().to(device), torch.randint(9, (3, 7), device=device).int()
    lens = torch.tensor([7, 0, 3], device=device).int()
    model.forward_prefill(q, kv, rows, 0.1, sink, lens, output)
    expected = flash_mla_api.flash_mla_sparse_fwd(q, kv, rows[:, None], 0.1, 512, sink, lens)[0]
    assert torch.equal(output, expected)


def test_sglang_decodes_and_prefills_over_our_kernels(engine, device):
    load = engine("sglang")
    sglang.register()
    load("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    v32 = load("sglang.srt.layers.attention.dsa_backend")
    q = torch.randn(3, 1, 64, 576).bfloat16().to(device)
    pool = random_pool(3, 1, 576, Shape(70, 65), device)
    lens = torch.tensor([5, 9, 70], device=device).int()
    schedule, num_splits = v32.metadata(lens, 64)
    assert (schedule.dtype, num_splits.dtype, len(num_splits)) == (torch.int32, torch.int32, 4)
    out, lse = v32.forward_flashmla_kv(q, pool, lens, schedule, num_splits, 0.1)
    expected, expected_lse = flash_mla_api.flash_mla_with_kvcache(
        q, pool.k_cache, None, None, 512, *flash_mla_api.get_mla_metadata(), 0.1, False, True, pool.indices
    )
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    kv, rows = torch.randn(9, 1, 576).bfloat16().to(device), torch.randint(9, (3, 7), device=device).int()
    counts = torch.tensor([7, 1, 3], device=device).int()
    out, _, lse = v32.forward_flashmla_sparse(q[:, 0], kv, rows, 0.1, counts)
    natural = flash_mla_api.flash_mla_sparse_fwd(q[:, 0], kv, rows[:, None], 0.1, topk_length=counts)
    assert torch.equal(out, natural[0])
    assert (lse - required(natural[2]) / math.log(2)).abs().max() < 1e-5  # SGLang's is to base 2
    v4 = load("sglang.srt.layers.attention.deepseek_v4_backend")
    q, sink = torch.randn(3, 1, 64, 512).bfloat16().to(device), random_sink(64, device)
    swa, compressed = pools(device)
    out, _ = v4.forward(q, swa, compressed, 0.1, sink)
    expected, _ = flash_mla_api.flash_mla_with_kvcache(
        q, swa.k_cache, None, None, 512, *flash_mla_api.get_mla_metadata(), 0.1, False, True, swa.indices, sink,
        compressed.k_cache, compressed.indices, swa.topk_length, compressed.topk_length,
    )  # fmt: skip
    assert torch.equal(out, expected)


@pytest.mark.parametrize("package", PLUGINS)
@pytest.mark.parametrize("asked", ["", "0"])
def test_nothing_changes_unless_it_is_asked_for(engine, package, asked):
    load = engine(package, version="0.1.0", asked=asked)
    before = {name: getattr(load(PLUGINS[package].HOME), name) for name in FUNCTIONS}
    PLUGINS[package].register()
    assert {name: getattr(load(PLUGINS[package].HOME), name) for name in FUNCTIONS} == before
    if package == "sglang":
        assert load(sglang.REGISTRY).HookRegistry.hooks == {}


def test_loading_twice_changes_nothing_more(engine, caplog):
    load = engine("vllm")
    vllm.register()
    vllm.register()
    assert load(vllm.HOME).flash_mla_with_kvcache is flash_mla_api.flash_mla_with_kvcache
    assert "vLLM 0.33.0: get_mla_metadata, flash_mla_with_kvcache" in caplog.text


OTHER = functions("*args", "q, k_cache, *, page_table", "q, kv, indices, sm_scale")
MORE = functions("*args", "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, fast=0", "*q")
TURNED = functions("*args", "k_cache, q, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata", "*q")
REFUSALS = {
    "other version": ({"version": "0.4.9"}, "0.4.9 is installed"),
    "only looks like a known one": ({"version": "0.330.0"}, "0.330.0 is installed"),
    "neither 0 nor 1": ({"asked": "yes"}, "is 'yes': 1 asks for"),
    "other parameters": ({"flashmla": OTHER, "flash_mla_interface": OTHER}, "page_table"),
    "one parameter more": ({"flashmla": MORE, "flash_mla_interface": MORE}, "fast"),
    "parameters in another order": ({"flashmla": TURNED, "flash_mla_interface": TURNED}, r"\(k_cache, q"),
    "no such functions": ({"flashmla": "", "flash_mla_interface": ""}, "has no"),
    "does not import": ({"flashmla": "import flash_mla_x", "flash_mla_interface": "import flash_mla_x"}, "flash_mla_x"),
}


@pytest.mark.parametrize("package", PLUGINS)
@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_honoured_stops_the_engine(engine, package, case):
    """vLLM stops at any exception of a plugin; SGLang, which logs exceptions, only where the process is to exit."""
    changed, message = REFUSALS[case]
    load = engine(package, **changed)
    plugin = PLUGINS[package]
    with pytest.raises(SystemExit if package == "sglang" else RuntimeError, match=message) as error:
        plugin.register()
    assert plugin.PLUGIN.variable in str(error.value)
    if case not in ("no such functions", "does not import"):
        home = load(plugin.HOME)
        assert home.flash_mla_sparse_fwd.__module__ == plugin.HOME, "half a replacement"


def test_batch_invariance_is_refused(engine):
    engine("vllm", envs="VLLM_BATCH_INVARIANT = True\n")
    with pytest.raises(RuntimeError, match="VLLM_BATCH_INVARIANT is set"):
        vllm.register()


@pytest.mark.parametrize("package", PLUGINS)
def test_an_engine_that_is_not_installed(monkeypatch, package):
    """Nobody loads the plugin then; who calls it by hand is told."""
    monkeypatch.setenv(PLUGINS[package].PLUGIN.variable, "1")

    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    with pytest.raises((RuntimeError, SystemExit), match="is installed"):
        PLUGINS[package].register()


def test_entry_points():
    """Of the project; tests of the packages look into the wheel's metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert project == {
        "vllm.general_plugins": {"deepseek_attn": "deepseek_attn.plugins.vllm:register"},
        "sglang.srt.plugins": {"deepseek_attn": "deepseek_attn.plugins.sglang:register"},
        "lm_eval.models": {"deepseek_attn": "deepseek_attn.lab.lm_eval.model:DeepseekAttnLM"},
    }
    for group in (project["vllm.general_plugins"], project["sglang.srt.plugins"]):  # the extra lm-eval may be missing
        module, name = group["deepseek_attn"].split(":")
        assert callable(getattr(importlib.import_module(module), name))


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


VLLM_USERS = {
    "v4": "vllm.models.deepseek_v4.nvidia.flashmla",
    "v32": "vllm.v1.attention.backends.mla.flashmla_sparse",
    "hy_v4": "vllm.models.hy_v4.nvidia.flashmla_sparse",
}
"""Modules of vLLM that call FlashMLA's functions."""


@pytest.fixture
def replaced_vllm(monkeypatch):
    """The installed vLLM's home of the functions and `VLLM_USERS`, once the plugin has replaced them."""
    modules = {name: importlib.import_module(path) for name, path in {"home": vllm.HOME, **VLLM_USERS}.items()}
    for module, name in itertools.product(modules.values(), FUNCTIONS):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setenv("DEEPSEEK_ATTN_VLLM", "1")
    vllm.register()
    return modules


@pytest.mark.skipif(not installed("vllm"), reason="needs vllm")
def test_the_installed_vllm(replaced_vllm):
    home = replaced_vllm["home"]
    for module, name in itertools.product(replaced_vllm.values(), FUNCTIONS):
        assert getattr(module, name, None) in (None, getattr(flash_mla_api, name))
    # where FlashMLA does not load, vLLM has functions without parameters: look into the file that it would load
    file = Path(home.__file__).parents[3] / "third_party" / "flashmla" / "flash_mla_interface.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            ours = inspect.signature(getattr(flash_mla_api, node.name)).parameters
            assert {argument.arg for argument in node.args.args} <= set(ours), node.name


@pytest.mark.skipif(not installed("vllm"), reason="needs vllm")
@pytest.mark.parametrize("ratio", [1, 128])
def test_v4_of_the_installed_vllm_decodes_over_our_kernels(replaced_vllm, device, ratio):
    """Its code as it is, in place of a layer the attributes that it reads."""
    q, sink = torch.randn(3, 64, 512).bfloat16().to(device), random_sink(64, device)
    swa, compressed = pools(device)
    output, schedule = torch.empty_like(q), replaced_vllm["home"].get_mla_metadata()[0]
    window = SimpleNamespace(
        num_decodes=3, num_decode_tokens=3, decode_swa_indices=swa.indices, decode_swa_lens=swa.topk_length,
        is_valid_token=torch.ones(3).bool(), tile_sched_swaonly=schedule, tile_sched_c128a=schedule,
    )  # fmt: skip
    entries = SimpleNamespace(
        block_size=256, c128a_global_decode_topk_indices=compressed.indices,
        c128a_decode_topk_lens=compressed.topk_length,
    )  # fmt: skip
    layer = SimpleNamespace(
        compress_ratio=ratio, scale=0.1, attn_sink=sink, swa_cache_layer=SimpleNamespace(kv_cache=swa.k_cache[:, :, 0])
    )
    decode = replaced_vllm["v4"].DeepseekV4FlashMLAAttention._forward_decode
    cache = None if ratio == 1 else compressed.k_cache[:, :, 0]
    decode(layer, q, cache, window, None if ratio == 1 else entries, ratio == 1, output)
    extra: dict[str, Any] = {}
    if ratio != 1:
        extra: dict[str, Any] = {"extra_k_cache": compressed.k_cache, "extra_indices_in_kvcache": compressed.indices}
        extra["extra_topk_length"] = compressed.topk_length
    expected, _ = flash_mla_api.flash_mla_with_kvcache(
        q[:, None], swa.k_cache, None, None, 512, *flash_mla_api.get_mla_metadata(), 0.1, False, True, swa.indices,
        sink, topk_length=swa.topk_length, **extra,
    )  # fmt: skip
    assert torch.equal(output, expected[:, 0])


@pytest.mark.skipif(not installed("vllm"), reason="needs vllm")
@pytest.mark.parametrize(("model", "impl"), [("v32", "FlashMLASparseImpl"), ("hy_v4", "HYV4FlashMLASparseImpl")])
def test_other_models_of_the_installed_vllm_attend_over_our_kernels(replaced_vllm, device, model, impl):
    """V3.2's and HY-V4's code, which pads 16 heads to 64."""
    impl, sink = getattr(replaced_vllm[model], impl), random_sink(16, device)
    layer = SimpleNamespace(fp8_decode_padded_heads=64, prefill_padding=64, softmax_scale=0.1, sinks=sink)
    if model == "v32":
        sink = None
    else:
        layer._sinks_for_query = MethodType(impl._sinks_for_query, layer)
    q, pool = torch.randn(3, 16, 576).bfloat16().to(device), random_pool(1, 3, 576, Shape(70, 65), device)
    metadata = SimpleNamespace(
        scheduler_metadata=replaced_vllm["home"].get_mla_metadata()[0], dummy_block_table=None, cache_lens=None
    )
    got = impl._fp8_flash_mla_kernel(layer, q[None], pool.k_cache[:, :, 0], pool.indices, metadata)
    schedule = flash_mla_api.get_mla_metadata()
    expected = flash_mla_api.flash_mla_with_kvcache(
        required(padded(q))[None],
        pool.k_cache,
        None,
        None,
        512,
        *schedule,
        0.1,
        False,
        True,
        pool.indices,
        padded(sink),
    )
    assert torch.equal(got[0], expected[0][:, :, :16])
    assert torch.equal(got[1], expected[1][:, :16])
    kv, rows = torch.randn(2, 9, 576).bfloat16().to(device), torch.randint(18, (3, 7), device=device).int()
    lens = torch.tensor([7, 0, 3], device=device).int()
    got = impl._bf16_flash_mla_kernel(layer, q, kv, rows, lens)
    out, _, lse = flash_mla_api.flash_mla_sparse_fwd(
        required(padded(q)), kv.view(18, 1, 576), rows[:, None], 0.1, 512, padded(sink), lens
    )
    assert torch.equal(got[0], out[:, :16])
    assert torch.equal(got[1], required(lse)[:, :16])


def padded(heads: torch.Tensor | None) -> torch.Tensor | None:
    """``[16]`` or ``[T, 16, d]`` with 48 heads of zeros behind."""
    if heads is None:
        return None
    return F.pad(heads, (0, 48) if heads.dim() == 1 else (0, 0, 0, 48))


@pytest.mark.skipif(not (installed("sglang") and installed("flash_mla")), reason="needs sglang and flash_mla")
def test_the_installed_sglang(monkeypatch, device):
    home = importlib.import_module(sglang.HOME)
    registry = importlib.import_module(sglang.REGISTRY)
    backend = importlib.import_module("sglang.srt.layers.attention.dsa_backend").DeepseekSparseAttnBackend
    for name in FUNCTIONS:
        monkeypatch.setattr(home, name, getattr(home, name))
    monkeypatch.setenv("DEEPSEEK_ATTN_SGLANG", "1")
    try:
        sglang.register()
        registry.HookRegistry.apply_hooks()
        assert home.get_mla_metadata(torch.ones(3).int())[1].tolist() == [0] * 4
        with pytest.raises(ValueError, match="must be the result of deepseek_attn"):
            home.flash_mla_with_kvcache(torch.ones(1, 3, 1, 512).bfloat16(), None, None, None, 512, None)
        # V3.2's code, which pads 16 heads to 64
        model = SimpleNamespace(
            flashmla_kv_num_q_heads=64, dsa_index_topk=65, physical_page_size=64, kv_cache_dim=656,
            dsa_kv_cache_store_fp8=True, flashmla_kv_format=None, device_sm_major=9, _sink_pad_cache={},
        )  # fmt: skip
        q, pool = torch.randn(3, 1, 16, 576).bfloat16().to(device), random_pool(3, 1, 576, Shape(70, 65), device)
        lens = torch.tensor([7, 1, 3], device=device).int()
        schedule = backend._compute_flashmla_metadata(model, lens, 1)
        metadata = SimpleNamespace(dsa_cache_seqlens_int32=lens, flashmla_metadata=schedule.slice(slice(0, 4)))
        shape = SimpleNamespace(tp_q_head_num=16, head_dim=576)
        got = backend._forward_flashmla_kv(model, q, pool.k_cache, 512, 0.1, shape, metadata, pool.indices[:, 0])
        expected, _ = flash_mla_api.flash_mla_with_kvcache(
            required(padded(q[:, 0]))[:, None], pool.k_cache, None, None, 512, *flash_mla_api.get_mla_metadata(), 0.1,
            False, True, pool.indices,
        )  # fmt: skip
        assert torch.equal(got, expected[:, :, :16])
        kv, rows = torch.randn(9, 1, 576).bfloat16().to(device), torch.randint(9, (3, 7), device=device).int()
        got = backend._forward_flashmla_sparse(model, q[:, 0], kv, 512, rows, 0.1, lens)
        expected, _, _ = flash_mla_api.flash_mla_sparse_fwd(
            required(padded(q[:, 0])), kv, rows[:, None], 0.1, topk_length=lens
        )
        assert torch.equal(got, expected[:, :16])
    finally:
        registry.HookRegistry.reset()
