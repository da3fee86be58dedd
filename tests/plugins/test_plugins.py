"""Plugins of other engines: asked for, attention is ours, or the engine stops; not asked for, nothing changes."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from deepseek_attn import flash_mla_api
from deepseek_attn.plugins import sglang, vllm
from deepseek_attn.plugins.engine_plugin import FUNCTIONS
from tests.plugins.engines import SGLANG, SGLANG_FILES, VLLM, VLLM_FILES, functions, write_engine
from tests.support.oracle_flash_mla import Shape, random_pool, random_sink

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
    assert (lse - natural[2] / math.log(2)).abs().max() < 1e-5  # SGLang's is to base 2
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
    }
    for group in project.values():
        module, name = group["deepseek_attn"].split(":")
        assert callable(getattr(importlib.import_module(module), name))


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.skipif(not installed("vllm"), reason="needs vllm")
def test_the_installed_vllm(monkeypatch):
    home = importlib.import_module(vllm.HOME)
    for name in FUNCTIONS:
        monkeypatch.setattr(home, name, getattr(home, name))
    monkeypatch.setenv("DEEPSEEK_ATTN_VLLM", "1")
    vllm.register()
    assert all(getattr(home, name) is getattr(flash_mla_api, name) for name in FUNCTIONS)
    # where FlashMLA does not load, vLLM has functions without parameters: look into the file that it would load
    file = Path(home.__file__).parents[3] / "third_party" / "flashmla" / "flash_mla_interface.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            ours = inspect.signature(getattr(flash_mla_api, node.name)).parameters
            assert {argument.arg for argument in node.args.args} <= set(ours), node.name


@pytest.mark.skipif(not (installed("sglang") and installed("flash_mla")), reason="needs sglang and flash_mla")
def test_the_installed_sglang(monkeypatch):
    home = importlib.import_module(sglang.HOME)
    registry = importlib.import_module(sglang.REGISTRY)
    for name in FUNCTIONS:
        monkeypatch.setattr(home, name, getattr(home, name))
    monkeypatch.setenv("DEEPSEEK_ATTN_SGLANG", "1")
    try:
        sglang.register()
        registry.HookRegistry.apply_hooks()
        assert home.get_mla_metadata(torch.ones(3).int())[1].tolist() == [0] * 4
        rows = torch.ones(3, 1, 512).bfloat16()
        assert home.flash_mla_sparse_fwd(rows, rows, torch.zeros(3, 1, 1).int(), 0.1)[0].eq(1).all()
        with pytest.raises(ValueError, match="must be what deepseek_attn"):
            home.flash_mla_with_kvcache(rows[None], rows, None, None, 512, None)
    finally:
        registry.HookRegistry.reset()
