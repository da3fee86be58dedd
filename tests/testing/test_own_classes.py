"""An impl, a record and a model family of a package outside the tree: used by name, tested, and refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_attn.cache.record import OWN_RECORDS, Record, register_record
from deepseek_attn.checkpoint import CanonicalSource, RandomSource, SafetensorsSource, write_checkpoint
from deepseek_attn.checkpoint.published import STYLES, canonical_names
from deepseek_attn.checkpoint.recipes import Recipe
from deepseek_attn.checkpoint.recipes_v32 import published_tensors_v32
from deepseek_attn.cli import main
from deepseek_attn.config.model import MODEL_TYPES, MODELS, ModelConfig
from deepseek_attn.config.numerics import get_numerics
from deepseek_attn.config.v32 import DeepseekV32Config
from deepseek_attn.impls import OWN_IMPLS, DeepseekV4TritonSparseImpl, find_impl, get_impl, register_impl
from deepseek_attn.layers.linear import Linear
from deepseek_attn.models.deepseek_v32 import DeepseekV32, DeepseekV32Block, DeepseekV32MTPLayer
from deepseek_attn.models.families import FAMILIES, DeepseekV4Family, DeepseekV32Family, Family, register_family
from deepseek_attn.runner.model_runner import ModelRunner
from deepseek_attn.testing.random_layer import RandomLayer
from deepseek_attn.utils.registry import load_extensions
from deepseek_attn.v32.attention import DeepseekV32MLAAttention
from tests.support.small_models import two_layers
from tests.support.typed import untyped
from tests.testing.own_package import SOURCE, WRONG

TABLES = (OWN_IMPLS.classes, OWN_RECORDS.classes, MODEL_TYPES, MODELS, FAMILIES, STYLES)
PROMPT = [[t % 96 for t in range(3, 60)]]
SIZES = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 40, "progress": False}


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder on the path with the modules ``own_classes`` and ``wrong_classes``, which are forgotten afterwards."""
    (tmp_path / "own_classes.py").write_text(SOURCE)
    (tmp_path / "wrong_classes.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    before: list[Any] = [dict(table) for table in TABLES]
    load_extensions.cache_clear()
    yield tmp_path
    load_extensions.cache_clear()
    for table, content in zip(TABLES, before, strict=True):
        table.clear()
        table.update(content)
    for name in ("own_classes", "wrong_classes"):
        sys.modules.pop(name, None)


def scores(config, **options):
    return ModelRunner.from_config(config, **SIZES, **options).score(PROMPT)


def test_an_impl_by_module_and_by_name(package):
    config = ModelConfig.from_preset("tiny").replace(num_hidden_layers=1, num_nextn_predict_layers=0, num_hash_layers=0)
    expected = scores(config, backend="reference")
    for backend in ("own_classes:Impl", "own_impl"):  # the first imports the module, which registers the name
        assert all(torch.equal(a, b) for a, b in zip(scores(config, backend=backend), expected, strict=True))
    assert scores(config, decode_backend="own_impl", prefill_backend="reference")
    assert scores(config, backend="own_impl", deterministic=True)
    assert get_impl("auto", "cpu").name == "reference"
    with pytest.raises(ValueError, match="backend 'own_classes:Impl' cannot run on cpu: it is for DeepSeek-V4"):
        scores("tiny_v32", backend="own_classes:Impl")


@pytest.mark.parametrize(("preset", "layer"), [("tiny", 1), ("tiny_v32", 0)])
def test_a_record_by_module_and_by_name(package, preset, layer):
    """Keys and index keys in a format of 16 bits: as exact as the tolerance of bfloat16, not of FP8."""
    exact = get_numerics("exact")
    for name in ("own_classes:Int16", "int16"):
        numerics = replace(exact, name="own", kv_record=name, index_record=name)
        one = RandomLayer(preset, layer, numerics=numerics, device="cpu")
        assert {pool.spec.record.name for pool in one.runner.pools if pool.spec.record} == {"int16"}
        one.tolerance = one.head_tolerance = 1e-3
        one.selection_tolerance = 1e-3
        request = one.request(100)
        one.run([request], [60, 1, 1, 30])
        one.check(request)
    numerics = replace(exact, name="own", kv_record="int16")
    assert RandomLayer("tiny", 1, numerics=numerics, backend="own_classes:Impl", device="cpu").attention.swa_cache
    with pytest.raises(ValueError, match=r"unknown .*'int8'.*a registered record, or module:Class"):
        RandomLayer(preset, layer, numerics=replace(exact, name="own", kv_record="int8"), device="cpu")


def test_a_record_that_an_impl_does_not_read(package):
    numerics = replace(get_numerics("exact"), name="own", kv_record="own_classes:Int16")
    usable, reason = DeepseekV4TritonSparseImpl.supported(torch.device("cpu"), spec_of("tiny", numerics))
    assert not usable
    assert reason == "it reads plain and fp8_v4 records, and the KV record here is 'int16'"
    assert find_impl("own_classes:Impl", ()).supported(torch.device("cpu"), spec_of("tiny", numerics))[0]
    fp8 = get_numerics("serving")
    assert not find_impl("own_classes:Impl", ()).supported(torch.device("cpu"), spec_of("tiny", fp8))[0]


def test_kernels_for_a_gpu_do_not_write_it(package, monkeypatch):
    monkeypatch.setattr("deepseek_attn.models.families.problem_on", lambda device: "")
    numerics = replace(get_numerics("exact"), name="own", kv_record="own_classes:Int16")
    with pytest.raises(ValueError, match=r"records own_classes:Int16 on cpu: kernels write .* plain torch"):
        ModelRunner.from_config("tiny", **SIZES, numerics=numerics, backend="own_classes:Impl")
    ModelRunner.from_config("tiny", **SIZES, numerics=numerics, backend="reference")


def spec_of(preset, numerics):
    from deepseek_attn.impls import AttentionSpec

    return AttentionSpec.of(ModelConfig.from_preset(preset), numerics, torch.float32)


def test_a_family(package, tmp_path):
    own = import_module("own_classes")
    small = two_layers()
    raw = small.to_dict() | {"model_type": "own_family"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(tmp_path)
    assert type(config) is own.Config
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert type(config.replace(sliding_window=8)) is own.Config
    runner = ModelRunner.from_config(config, **SIZES)
    assert type(runner.model) is own.Model
    plain = ModelRunner.from_config(small, **SIZES)
    assert not torch.equal(plain.score(PROMPT)[0], runner.score(PROMPT)[0])
    for block in plain.model.layers.values():
        block.attn.scale *= 2
    assert torch.equal(plain.score(PROMPT)[0], runner.score(PROMPT)[0])
    stack = ModelRunner.from_config(config, **SIZES, layers=[1], attention_only=True)
    assert type(stack.model.layers["1"].attn) is own.Attention


def test_classes_of_an_installed_package(package):
    """Its entry point is imported when a name is not known without it."""
    info = package / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deepseek_attn.extensions]\nown = own_classes\n")
    assert get_impl("reference", "cpu").name == "reference"
    assert "own_classes" not in sys.modules
    assert get_impl("own_impl", "cpu").__name__ == "Impl"
    raw = ModelConfig.from_preset("tiny").to_dict() | {"model_type": "own_family"}
    assert type(ModelConfig.from_dict(raw)).__name__ == "Config"


WRONG_IMPLS = {
    "no_such_module:Impl": "'no_such_module' cannot be imported.*install its package or add its folder to PYTHONPATH",
    "wrong_classes:Absent": "module 'wrong_classes' has no 'Absent'",
    "wrong_classes:": "must name an attention impl as module:Class",
    "wrong_classes:number": "is int 3, and must be a class derived from .*SparseMLAAttentionImpl",
    "wrong_classes:Nothing": "does not derive from deepseek_attn.impls.base.SparseMLAAttentionImpl",
    "wrong_classes:NoMethods": "lacks attend_pages, attend_rows, kernels_supported",
    "wrong_classes:Methods": "(?s)lacks name.*lacks backend_cls.*kernels_supported must be a classm.*attend_pages must",
    "wrong_classes:Arguments": r"(?s)attend_pages must take \(layer, q, keys, output\).*attend_rows must take \(",
    "wrong_classes:Nowhere": "cannot run on cpu: it needs a toaster",
    "no_such_name": "unknown backend 'no_such_name': supported are auto, mixed, .*your own as module:Class",
}


@pytest.mark.parametrize("backend", WRONG_IMPLS)
def test_a_wrong_impl_is_refused_in_words(package, backend):
    with pytest.raises(ValueError, match=WRONG_IMPLS[backend]):
        ModelRunner.from_config("tiny", **SIZES, backend=backend)


WRONG_RECORDS = {
    "wrong_classes:Nothing": "does not derive from deepseek_attn.cache.record.Record",
    "wrong_classes:HalfARecord": "lacks decode, encode",
    "wrong_classes:Floats": r"encode of ones \[3, 128\] gives .*float32.*and row_bytes \(512,\) ask for .*uint8",
    "wrong_classes:NoArguments": r"must be made by cls\(nope_dim, rope_dim, dtype\)",
}


@pytest.mark.parametrize("record", WRONG_RECORDS)
def test_a_wrong_record_is_refused_in_words(package, record):
    numerics = replace(get_numerics("exact"), name="own", kv_record=record)
    with pytest.raises(ValueError, match=WRONG_RECORDS[record]):
        ModelRunner.from_config("tiny", **SIZES, numerics=numerics)


def test_a_wrong_registration_changes_nothing(package):
    own, wrong = import_module("own_classes"), import_module("wrong_classes")
    before = [dict(table) for table in TABLES]
    for register, cls, message in (
        (register_impl, wrong.NoMethods, "wrong_classes:NoMethods cannot serve as an attention impl"),
        (register_impl, wrong.Taken, "its name 'triton' is taken"),
        (register_impl, type("Other", (own.Impl,), {}), "its name 'own_impl' is taken"),
        (register_record, wrong.HalfARecord, "wrong_classes:HalfARecord cannot serve as a cache record"),
        (register_record, type("Plain", (own.Int16,), {"name": "plain"}), "its name 'plain' is taken"),
    ):
        with pytest.raises(ValueError, match=message):
            register(cls)
    for arguments, message in (
        (("deepseek_v4", own.Config, own.Family), "the package has this model_type itself"),
        (("mine", ModelConfig, own.Family), "the config is the package's own ModelConfig"),
        (("mine", type("Bare", (ModelConfig,), {}), own.Family), "the config Bare lacks from_dict"),
        (("mine", dict, DeepseekV4Family), "the config does not derive from .*ModelConfig or "),
        (("mine", own.Config, Family), "the family Family lacks model_class"),
        (("mine", own.Config, type("F", (own.Family,), {"model_class": dict})), "model_class does not derive from"),
        (("mine", own.Config, type("F", (own.Family,), {"impls": ()})), "the family F lacks impls"),
    ):
        with pytest.raises(ValueError, match=message):
            register_family(*untyped(arguments))
    assert before == [dict(table) for table in TABLES]
    register_impl(own.Impl)  # once more: the same class
    register_family("mine", own.Config, own.Family)
    raw = ModelConfig.from_preset("tiny").to_dict() | {"model_type": "mine"}
    with pytest.raises(ValueError, match="must make a Config of model_type 'mine', and made a Config of 'own_family'"):
        ModelConfig.from_dict(raw)


@dataclass(frozen=True)
class GatedConfig(DeepseekV32Config):
    """V3.2 whose attention output is multiplied by ``2 sigmoid(gate_scale * gate(x))``."""

    gate_scale: float

    @classmethod
    def from_dict(cls, raw, origin="dict"):
        base = {key: value for key, value in raw.items() if key != "gate_scale"} | {"model_type": "deepseek_v32"}
        config = DeepseekV32Config.from_dict(base, origin)
        return cls(**vars(config) | {"model_type": "gated", "gate_scale": raw["gate_scale"]})


class GatedAttention(DeepseekV32MLAAttention):
    def __init__(self, config, spec, rope, numerics, dtype, device, *args):
        super().__init__(config, spec, rope, numerics, dtype, device, *args)
        self.gate_scale = config.gate_scale
        self.wg = Linear(config.hidden_size, config.hidden_size, numerics, dtype, device)

    def forward(self, x, positions, step):
        return super().forward(x, positions, step) * (2 * torch.sigmoid(self.gate_scale * self.wg(x)))


class GatedBlock(DeepseekV32Block):
    attention_class = GatedAttention


class GatedMTPLayer(DeepseekV32MTPLayer):
    attention_class = GatedAttention


class GatedModel(DeepseekV32):
    block_class, mtp_class = GatedBlock, GatedMTPLayer


class GatedFamily(DeepseekV32Family):
    model_class = GatedModel


def gated_tensors(config):
    yield from published_tensors_v32(config)
    for layer in config.all_layers:  # perhaps some of the model's
        number = layer.index + layer.is_mtp * config.num_hidden_layers
        yield f"model.layers.{number}.self_attn.o_gate.weight", Recipe("quantized", (config.hidden_size,) * 2)


def gated_names(config):
    of_v32 = STYLES[DeepseekV32Config].names(config)
    return lambda name: of_v32(name).replace(".attn.o_gate.", ".attn.wg.")


def test_a_family_with_tensors_and_names_of_its_own(package):
    """A gate of V3.2's attention. With ``gate_scale`` 0 it is 1: the logits are V3.2's, to the bit."""
    register_family("gated", GatedConfig, GatedFamily)
    STYLES[GatedConfig] = replace(STYLES[DeepseekV32Config], tensors=gated_tensors, names=gated_names)
    base = ModelConfig.from_preset("tiny_v32").replace(num_hidden_layers=2, first_k_dense_replace=1)
    checkpoint = package / "checkpoint"
    raw = base.to_dict() | {"model_type": "gated", "gate_scale": 0.0}
    config = ModelConfig.from_dict(raw)
    assert isinstance(config, GatedConfig)
    assert ModelConfig.from_dict(config.to_dict()) == config
    write_checkpoint(RandomSource(config), config, checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a tensor that no layer takes, an unknown key
        closed, expected = scores(config), scores(base)
        opened = scores(config.replace(gate_scale=1.0))
    assert all(torch.equal(a, b) for a, b in zip(closed, expected, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(opened, expected, strict=True))
    name = canonical_names(config)("model.layers.2.self_attn.o_gate.weight")  # the MTP layer's
    assert name == "mtp.0.attn.wg.weight"
    assert main(["plan", "--model", str(checkpoint), "--gpu", "h200", "--json"]) == 0
    assert main(["crop", "--model", str(checkpoint), "--layers", "1", "--out", str(package / "crop")]) == 0
    cropped = CanonicalSource(SafetensorsSource(package / "crop"), canonical_names(config.replace(num_hidden_layers=1)))
    assert {name for name in cropped.entries() if ".wg.weight" in name} == {
        "layers.0.attn.wg.weight", "mtp.0.attn.wg.weight"
    }  # fmt: skip


def test_no_impl_runs():
    with pytest.raises(ValueError, match="no backend runs on cpu:\n  - triton: "):
        get_impl("auto", "cpu", None, [DeepseekV4TritonSparseImpl])


def test_the_command_line_refuses_a_wrong_impl(package, capsys):
    assert main(["generate", "--backend", "wrong_classes:NoMethods", "--device", "cpu", "--prompt", "a"]) == 2
    assert "wrong_classes:NoMethods cannot serve as an attention impl" in capsys.readouterr().err


def run_suite(package: Path, *options: str) -> subprocess.CompletedProcess:
    """The layer suite in a process of its own, as an author runs it."""
    command = [sys.executable, "-m", "pytest", "-p", "deepseek_attn.testing.plugin", "-p", "no:cacheprovider", *options]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), root]), "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "name"), [("impl", "Impl"), ("record", "Int16")])
def test_the_layer_suite_passes(package, kind, name):
    done = run_suite(package, f"--deepseek-attn-{kind}", f"own_classes:{name}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("34 passed, 53 skipped" if kind == "impl" else "87 passed") in done.stdout


@pytest.mark.exhaustive  # `test_testing` finds the same mistakes in this process
def test_the_layer_suite_finds_a_mistake(package):
    """Of an impl that rounds decodes to 16 bits: of two tests the one with decodes fails, and says where."""
    selected = ("-k", "SWA and exact-float32 and chunks or SWA and exact-float32 and beside")
    done = run_suite(package, "--deepseek-attn-impl", "own_classes:Rounding", *selected)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "request 0, position 20: row 0 of step 1, in a decode of 1 token(s)" in done.stdout


def test_records_are_those_of_the_table():
    """Names of the package's records are taken."""
    import deepseek_attn.cache.records_v41

    assert deepseek_attn.cache.records_v41
    names = {cls.name for cls in Record.__subclasses__() if cls.__module__.startswith("deepseek_attn.")}
    assert names - {"index_fp8", "index_fp4"} <= OWN_RECORDS.taken
