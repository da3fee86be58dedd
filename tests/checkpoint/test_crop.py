"""Crops of checkpoints: what is kept has the same bytes and computes the same, by us and by transformers."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deepseek_attn import LLM, ModelConfig, ModelRunner, SamplingParams
from deepseek_attn.checkpoint import PublishedSource, RandomSource, SafetensorsSource, write_checkpoint
from deepseek_attn.checkpoint.crop import RECORD_FILE, CropSource, crop_checkpoint, crop_table
from deepseek_attn.checkpoint.crop_config import crop_config
from deepseek_attn.checkpoint.crop_plan import CropPlan
from deepseek_attn.cli import main
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.v41 import DeepseekV41Config
from tests.checkpoint.fabricate import MemorySource
from tests.support import v32_cases
from tests.support.hub_cache import FakeHub
from tests.support.oracle_transformers import TransformersOracle
from tests.support.oracle_v32 import TransformersV32Oracle
from tests.support.small_models import assert_close, prompt, small_config
from tests.support.tiers import EXHAUSTIVE, tiered
from tests.support.typed import of_type, required
from tests.support.v41_cases import tiny as tiny_v41

OPTIONS = {"device": "cpu", "progress": False, "max_model_len": 320, "max_num_batched_tokens": 512}
HEAD = {"num_nextn_predict_layers": 1}


def v4() -> AnyConfig:
    return small_config([0, 4, 128, 0, 4], mtp=1, vocab_size=280, n_routed_experts=6, num_hash_layers=2)


def v32(kind: str = "deepseek_v32") -> AnyConfig:
    groups = {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}
    sizes = {"vocab_size": 280, "num_hidden_layers": 4, "first_k_dense_replace": 1}
    return v32_cases.small(kind, **HEAD, **groups, **sizes)


CONFIGS = {"v4": v4, "v32": v32, "v3": lambda: v32("deepseek_v3"), "v41": tiny_v41}
KEPT = {"v4": [0, 1, 2, 4], "v32": [0, 1, 3], "v3": [0, 2], "v41": [0, 1, 2, 3, 4, 5]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder of a random checkpoint in the published format, by family; each is written on first use."""
    folder, written = tmp_path_factory.mktemp("models"), {}

    def model(family: str) -> Path:
        if family not in written:
            config = CONFIGS[family]()
            written[family] = write_checkpoint(RandomSource(config, 3), config, folder / family, num_shards=5)
        return written[family]

    return model


def bytes_of(source: SafetensorsSource, name: str) -> torch.Tensor:
    return source.view(name).contiguous().flatten().view(torch.uint8)


def runner_of(model: Path, **options) -> ModelRunner:
    return ModelRunner.from_pretrained(model, **OPTIONS | options)


def tokens_of(config: AnyConfig, length: int = 150) -> list[int]:
    return prompt(config, length, seed=5)


@pytest.mark.parametrize("family", tiered(CONFIGS, ["v32"]))
def test_layers_compute_what_they_did(models, tmp_path, family):
    """Logits of the crop equal those of the whole checkpoint's same layers, to the bit."""
    model, layers = models(family), KEPT[family]
    crop_checkpoint(model, tmp_path / "crop", layers=layers)
    whole, cropped = runner_of(model, layers=layers), runner_of(tmp_path / "crop")
    assert list(cropped.model.layers) == [str(i) for i in range(len(layers))]
    tokens = tokens_of(whole.config)
    assert torch.equal(whole.score([tokens])[0], cropped.score([tokens])[0])


CROPPED = [("v4", 3), ("v32", 6), ("v41", 3)]


@pytest.mark.parametrize(("family", "experts"), tiered(CROPPED, CROPPED[2:], quick_on_gpu=CROPPED))
def test_it_has_the_names_and_headers_of_a_published_checkpoint(models, tmp_path, family, experts):
    """vLLM's loader, for one, goes by names: they are those of a checkpoint that was published in this size."""
    model, layers = models(family), KEPT[family]
    layers = [*layers, 6, 7] if family == "v41" else layers  # all that the drafter reads
    crop = crop_checkpoint(model, tmp_path / "crop", layers=layers, experts=experts)
    config = ModelConfig.from_pretrained(tmp_path / "crop")
    assert (config.num_hidden_layers, config.n_routed_experts) == (len(layers), experts)
    with SafetensorsSource(tmp_path / "crop") as cropped:
        assert cropped.entries() == PublishedSource.entries(RandomSource(config))
        assert crop.nbytes == sum(info.nbytes for info in cropped.entries().values())
    text = json.loads((tmp_path / "crop" / "config.json").read_text())
    assert text.get("text_config", text)["num_hidden_layers"] == len(layers)


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_bytes_of_kept_tensors(models, tmp_path, family):
    model, layers, experts = models(family), [1, 3], [0, 1] if family == "v4" else [0, 1, 4, 5, 8, 9]
    crop_checkpoint(model, tmp_path / "crop", layers=layers, experts=len(experts))
    backbone = CONFIGS[family]().num_hidden_layers
    old_layer = {0: 1, 1: 3, 2: backbone}  # V3.2 counts its MTP layer on
    parts = 0
    with SafetensorsSource(model) as whole, SafetensorsSource(tmp_path / "crop") as cropped:
        for name in cropped.entries():
            fields = name.split(".")
            if "layers" in fields:
                at = fields.index("layers") + 1
                fields[at] = str(old_layer[int(fields[at])])
            if "experts" in fields:
                at = fields.index("experts") + 1
                fields[at] = str(experts[int(fields[at])])
            old = ".".join(fields)
            if "gate" in fields and fields[-1] != "tid2eid":
                parts += 1
                assert torch.equal(cropped.read(name), whole.read(old)[experts]), name
            elif "gate" not in fields:
                assert whole.entries()[old] == cropped.entries()[name]
                assert torch.equal(bytes_of(whole, old), bytes_of(cropped, name)), name
    assert parts >= 4
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "crop" / file).read_bytes() == (model / file).read_bytes()


def brute_table(table: list[list[int]], kept: int) -> list[list[int]]:
    """The documented rule, entry by entry."""
    out = []
    for row in table:
        new = [e if e < kept else None for e in row]
        for at, expert in enumerate(row):
            if new[at] is None:
                choice = expert % kept
                while choice in new:
                    choice = (choice + 1) % kept
                new[at] = choice
        out.append(new)
    return out


@pytest.mark.parametrize("kept", [3, 4, 7])
def test_hash_tables(kept):
    generator = random.Random(kept)
    table = [generator.sample(range(9), 3) for _ in range(5000)]
    cropped = crop_table(torch.tensor(table, dtype=torch.int32), list(range(kept)), 9, 3)
    assert cropped.dtype == torch.int32
    assert cropped.tolist() == brute_table(table, kept)


def test_hash_tables_of_fewer_experts_than_a_token_has():
    cropped = crop_table(torch.tensor([[7, 1, 5, 0], [4, 5, 6, 7], [2, 9, 1, 0]]), [0, 1, 2], 10, 3)
    assert cropped.tolist() == [[1, 0, 2], [0, 1, 2], [2, 1, 0]]
    with pytest.raises(ValueError, match="it names experts 0 to 10, and there are 0 to 9"):
        crop_table(torch.tensor([[0, 10]]), [0, 1, 2], 10, 2)


def mask_router(runner: ModelRunner, kept: list[int], per_token: int) -> None:
    """A router that never chooses other experts, with the weights of the whole model."""
    model = runner.whole_model()
    for block in [*model.layers.values(), *model.mtp.values()]:
        gate = getattr(block.ffn, "gate", None)
        if gate is None:
            continue
        gate.topk = per_token
        if gate.hash:
            gate.tid2eid.data = torch.tensor(brute_table(gate.tid2eid.tolist(), len(kept)))
        else:
            others = [expert for expert in range(len(gate.bias)) if expert not in kept]
            gate.bias.data[others] = -torch.inf


@pytest.mark.parametrize(
    ("family", "kept", "per_token"),
    [
        ("v4", [0, 1, 2], 2),
        pytest.param("v32", [0, 1, 4, 5, 8, 9], 3, marks=pytest.mark.exhaustive),
        pytest.param("v3", [0, 1, 2, 4, 5, 6, 8, 9, 10], 3, marks=pytest.mark.exhaustive),
        pytest.param("v41", [0], 1, marks=pytest.mark.exhaustive),
    ],
)
def test_fewer_experts_equal_a_masked_router(models, tmp_path, family, kept, per_token):
    model, layers = models(family), KEPT[family]
    crop_checkpoint(model, tmp_path / "crop", layers=layers, experts=len(kept))
    whole, cropped = runner_of(model, layers=layers), runner_of(tmp_path / "crop")
    tokens = tokens_of(whole.config)
    if per_token < whole.config.num_experts_per_tok:
        assert cropped.config.num_experts_per_tok == per_token
        for block in whole.model.layers.values():
            block.ffn.gate.normalize = cropped.config.normalizes_weights
    before = whole.score([tokens])[0]
    mask_router(whole, kept, per_token)
    expected = whole.score([tokens])[0]
    assert not torch.equal(expected, before)
    # a product with fewer rows of the router rounds differently
    assert_close(cropped.score([tokens])[0], expected, 3e-6)


@pytest.mark.parametrize(
    ("family", "kept"), [pytest.param("v4", [0, 1, 2], marks=pytest.mark.exhaustive), ("v32", [0, 1, 4, 5, 8, 9])]
)
def test_mtp_layers_stay(models, tmp_path, family, kept):
    model = models(family)
    crop_checkpoint(model, tmp_path / "crop", experts=len(kept))
    whole, cropped = runner_of(model), runner_of(tmp_path / "crop")
    assert cropped.has_mtp
    mask_router(whole, kept, whole.config.num_experts_per_tok)
    tokens = tokens_of(whole.config, 70)
    for ours, expected in zip(cropped.score_mtp([tokens]), whole.score_mtp([tokens]), strict=True):
        assert_close(ours[0], expected[0], 3e-6)


def test_parts_that_are_left_out(models, tmp_path):
    crop_checkpoint(models("v4"), tmp_path / "crop", layers=[0, 1], without=["mtp"])
    config = ModelConfig.from_pretrained(tmp_path / "crop")
    assert config.num_nextn_predict_layers == 0
    assert of_type(config, ModelConfig).compress_ratios == (0, 4)
    with SafetensorsSource(tmp_path / "crop") as cropped:
        assert not [name for name in cropped.entries() if name.startswith("mtp.")]
    plan = crop_checkpoint(models("v41"), tmp_path / "v41", layers=[0, 4, 5, 6, 7], without=["engram"]).plan
    config = of_type(ModelConfig.from_pretrained(tmp_path / "v41"), DeepseekV41Config)
    assert (config.engram, config.candidate_source_layer_id, config.kv_source_layer_ids) == (None, 1, (1,))
    assert required(config.dspark).dspark_target_layer_ids == (2, 3, 4)
    assert not plan.notes
    runner = runner_of(tmp_path / "v41")
    assert runner.has_mtp
    tokens = tokens_of(config)
    whole = runner_of(models("v41"), layers=[0, 4, 5, 6, 7])
    with_memory = whole.score([tokens])[0]
    for block in whole.model.layers.values():
        block.engram = None
    assert torch.equal(runner.score([tokens])[0], whole.score([tokens])[0])
    assert not torch.equal(with_memory, whole.score([tokens])[0])


@EXHAUSTIVE
def test_drafts_of_a_cropped_drafter_change_no_text(models, tmp_path):
    crop_checkpoint(models("v41"), tmp_path / "crop", experts=2)
    assert required(ModelConfig.from_pretrained(tmp_path / "crop").dspark).dspark_n_routed_experts == 2
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    texts = []
    for speculate in (0, 3):
        with LLM(tmp_path / "crop", **OPTIONS, speculate=speculate) as llm:
            texts.append(llm.generate([[7, 3, 9, 200, 41]], params)[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.exhaustive
def test_a_part_of_the_vocabulary(models, tmp_path):
    model = models("v4")
    crop_checkpoint(model, tmp_path / "crop", layers=[0, 1], vocab_size=97, without=["mtp"])
    assert not list((tmp_path / "crop").glob("tokenizer*"))
    whole, cropped = runner_of(model, layers=[0, 1]), runner_of(tmp_path / "crop")
    tokens = [token % 97 for token in tokens_of(whole.config)]
    assert torch.equal(whole.score([tokens])[0][:, :97], cropped.score([tokens])[0])
    crop_checkpoint(models("v32"), tmp_path / "v32", vocab_size=97)
    assert runner_of(tmp_path / "v32").has_mtp
    plan = crop_checkpoint(models("v41"), tmp_path / "v41", vocab_size=97, without=["engram"]).plan
    assert plan.notes == ("the DSpark drafter is left out: its noise token 510 is not kept",)
    assert runner_of(tmp_path / "v41").score([tokens])[0].shape == (150, 97)


# other programs


# The layers and experts of a crop, by family.
CROPS = {
    "v4": ([0, 1, 2, 4], list(range(4))),
    "v32": ([0, 1, 3], [0, 1, 4, 5, 8, 9]),
    "v3": ([1, 2], [0, 1, 4, 5, 8, 9]),
}


def transformers_model(family: str) -> Any:
    """A float32 model of transformers with random weights."""
    config = CONFIGS[family]()
    return (TransformersOracle if family == "v4" else TransformersV32Oracle)(config, RandomSource(config, 3)).model


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def transformers_reads(folder: Path) -> Any:
    """Its model, and what it says about loading it."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )


def cut_by_hand(model: Any, layers: list[int], kept: list[int]) -> None:
    """transformers' own model with layers taken out and routers that never choose the other experts."""
    model.model.layers = torch.nn.ModuleList([model.model.layers[layer] for layer in layers])
    model.model.config.num_hidden_layers = len(layers)
    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None and hasattr(gate, "tid2eid"):
            gate.tid2eid.data = torch.tensor(brute_table(gate.tid2eid.tolist(), len(kept)))
        elif gate is not None:
            bias = gate.e_score_correction_bias.data
            bias[[expert for expert in range(len(bias)) if expert not in kept]] = -1e30


@pytest.mark.parametrize("family", tiered(CROPS, ["v4"]))
def test_what_transformers_saves(tmp_path, family):
    """transformers reads the crop of what it saved; it, we, and its model cut by hand give the same logits."""
    model, (layers, kept) = transformers_model(family), CROPS[family]
    model.save_pretrained(tmp_path / "saved")
    crop_checkpoint(tmp_path / "saved", tmp_path / "crop", layers=layers, experts=len(kept))
    theirs, loading = transformers_reads(tmp_path / "crop")
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokens = tokens_of(CONFIGS[family]())
    cut_by_hand(model, layers, kept)
    expected = logits_of(model, tokens)
    assert_close(logits_of(theirs.eval(), tokens), expected, 1e-6)
    assert_close(runner_of(tmp_path / "crop").score([tokens])[0], expected)


@pytest.mark.parametrize("family", tiered(["v4", "v32"], ["v4"]))
def test_transformers_reads_published_names(tmp_path, family):
    """A crop of a bfloat16 checkpoint under published names."""
    config = CONFIGS[family]().replace(quantization_config=None)
    write_checkpoint(RandomSource(config, 3), config, tmp_path / "model")
    crop_checkpoint(tmp_path / "model", tmp_path / "crop", layers=KEPT[family], experts=6 if family == "v32" else 4)
    theirs, loading = transformers_reads(tmp_path / "crop")
    assert not loading["missing_keys"]
    tokens = tokens_of(config)
    assert_close(runner_of(tmp_path / "crop").score([tokens])[0], logits_of(theirs.eval(), tokens))


def test_packed_quantised_experts(models, tmp_path):
    """Experts of a layer in one tensor with one scale: rows of the kept ones."""
    config = ModelConfig.from_pretrained(models("v32"))
    plan = CropPlan.make(config, experts=6)
    shape = {"gate_up_proj": (12, 6, 4), "gate_up_proj_scale_inv": (12, 1, 1)}
    source = MemorySource({})
    for name, size in shape.items():
        values = torch.arange(12 * size[1] * size[2]).view(size).to(torch.uint8)
        source.put(f"model.layers.2.mlp.experts.{name}", "U8", values)
    cropped = CropSource(source, plan)
    assert [cropped.entries()[name].shape for name in cropped.entries()] == [(6, 6, 4), (6, 1, 1)]
    for name in cropped.entries():
        assert torch.equal(cropped.read(name), source.read(name)[[0, 1, 4, 5, 8, 9]])


# the config


def test_overrides_by_ratio_keep_the_ratios_of_the_kept_layers():
    raw = v4().to_dict() | {"compress_overlap": {"4": False, "128": True}, "compress_indexer": {"128": False}}
    config = ModelConfig.from_dict(raw)
    [layer] = [layer.index for layer in config.layers if layer.ratio == 4][:1]
    changed = crop_config(raw, CropPlan.make(config, [layer], 3))
    assert (changed["compress_overlap"], changed["compress_indexer"]) == ({"4": False}, {})


def test_the_spelling_of_a_config_stays():
    """Lists by layer, names of modules, and a key that nobody knows."""
    raw = v4().to_dict() | {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "compress_overlap": [False, True, True, False, True],
        "quantization_config": required(v4().quantization_config)
        | {
            "modules_to_not_convert": [
                *("lm_head", "model.layers.1.mlp.gate", "model.layers.4.mlp.gate", "layers.2", "layers.12x"),
                *("model.layers.3.self_attn", "layers.0.ffn.experts.5.w1", "layers.0.ffn.experts.2.w1", "mtp.0.head"),
            ]
        },
    }
    del raw["n_routed_experts"]
    plan = CropPlan.make(ModelConfig.from_dict(raw), [1, 2, 4], 3)
    changed = crop_config(raw, plan)
    assert changed["num_local_experts"] == 3
    assert "n_routed_experts" not in changed
    assert changed["compress_ratios"] == [4, 128, 4, 0]
    assert changed["compress_overlap"] == [True, True, True]
    assert changed["num_hash_layers"] == 1
    assert changed["quantization_config"]["modules_to_not_convert"] == [
        *("lm_head", "model.layers.0.mlp.gate", "model.layers.2.mlp.gate", "layers.1", "layers.12x", "mtp.0.head")
    ]
    same = {key: value for key, value in changed.items() if value == raw.get(key)}
    assert changed.keys() == raw.keys()
    assert len(same) == len(raw) - 6


def test_sources_of_shared_entries():
    config = tiny_v41()
    with pytest.raises(ValueError, match=r"read entries or selections of layers \[4\]; take layers=\[0, 4, 6\]"):
        CropPlan.make(config, [0, 6], without=["engram"])
    with pytest.raises(
        ValueError, match=r"memory \(Engram\) of layers \[4\] are .* or take layers=\[0, 1, 2, 3, 4, 5\]"
    ):
        CropPlan.make(config, [0, 1, 4, 5])
    plan = CropPlan.make(config, [0, 1, 2])
    assert plan.without == {"mtp"}
    assert plan.notes[0].startswith("the DSpark drafter is left out: it reads layers [5, 6, 7]")
    changed = crop_config(config.to_dict(), plan)["text_config"]
    assert changed["engram_num_embeddings"] == [660]
    assert not {key for key in changed if key.startswith(("dspark", "candidate"))}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("v4", {"layers": [5]}, r"layers=\[5\]: deepseek_v4 has layers 0 to 4 here"),
        ("v4", {"layers": []}, "name at least one"),
        ("v4", {"experts": 7}, "the model has 6 routed experts in a layer; keep 1 to 6"),
        ("v32", {"experts": 3}, r"keep a multiple of 3 from 6 on, up to 12"),
        ("v4", {"vocab_size": 1}, "expected 2, which keeps the tokens of beginning and end, to 280"),
        ("v41", {"vocab_size": 99}, "leave it out"),
        ("v4", {"without": ["attention"]}, "without attention: supported are mtp, engram, vision"),
    ],
)
def test_refusals(models, tmp_path, family, options, message):
    with pytest.raises(ValueError, match=message):
        crop_checkpoint(models(family), tmp_path / "crop", **options)
    assert not list(tmp_path.iterdir())


# the output


def test_a_folder_that_holds_something(models, tmp_path):
    model, out = models("v4"), tmp_path / "crop"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(ValueError, match="choose another one, or remove it"):
        crop_checkpoint(model, out, layers=[0])
    with pytest.raises(ValueError, match="only what `deepseek-attn crop` wrote is overwritten"):
        crop_checkpoint(model, out, layers=[0], overwrite=True)
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    crop_checkpoint(model, out, layers=[0])
    with pytest.raises(ValueError, match="--overwrite"):
        crop_checkpoint(model, out, layers=[1])
    crop_checkpoint(model, out, layers=[1], overwrite=True)
    assert json.loads((out / RECORD_FILE).read_text())["layers"] == [1]
    assert of_type(ModelConfig.from_pretrained(out), ModelConfig).compress_ratios == (4, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["crop"]


@pytest.mark.parametrize("again", [False, True])
def test_a_full_disk_leaves_nothing(models, tmp_path, again):
    model, out = models("v4"), tmp_path / "crop"
    if again:
        crop_checkpoint(model, out, layers=[1])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ValueError, match="cannot be written: File too large"):
            crop_checkpoint(model, out, layers=[0], overwrite=again)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_crop_that_cannot_be_replaced_stays(models, tmp_path, monkeypatch):
    out, real, calls = tmp_path / "crop", os.replace, []

    def fails_once(source, target):
        calls.append(target)
        if len(calls) == 2:  # the old folder has been moved away
            raise OSError(5, "Input/output error")
        real(source, target)

    crop_checkpoint(models("v4"), out, layers=[1])
    monkeypatch.setattr(os, "replace", fails_once)
    with pytest.raises(ValueError, match="cannot be written: Input/output error"):
        crop_checkpoint(models("v4"), out, layers=[0], overwrite=True)
    assert json.loads((out / RECORD_FILE).read_text())["layers"] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["crop"]


SLOW = """
import sys, time
from deepseek_attn.checkpoint import write
from deepseek_attn.cli import main
real = write._write_shard
def slow(*args):
    real(*args)
    print("written", flush=True)
    time.sleep(60)
write._write_shard = slow
sys.exit(main())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_while_it_writes(models, tmp_path, number):
    """Nothing is left by a request to end; what SIGKILL leaves is hidden, and gone after the next crop."""
    command = ["crop", "--model", str(models("v4")), "--out", str(tmp_path / "crop"), "--layers", "0-1"]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *command], stdout=subprocess.PIPE, env=dict(os.environ))
    assert required(process.stdout).readline() == b"written\n"
    process.send_signal(number)
    assert process.wait(30) in (128 + number, -number)
    required(process.stdout).close()
    assert not (tmp_path / "crop").exists()
    assert len(list(tmp_path.iterdir())) == (number == signal.SIGKILL)
    assert main(command) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["crop"]


def test_tensors_are_not_copied_in_memory(models):
    with SafetensorsSource(models("v4")) as source:
        cropped = CropSource(source, CropPlan.make(v4(), [1, 2], 3))
        for new, old in {
            "layers.0.attn.wq_a.weight": "layers.1.attn.wq_a.weight",
            "embed.weight": "embed.weight",
        }.items():
            assert cropped.view(new).data_ptr() == source.view(old).data_ptr()
        gate = "layers.{}.ffn.gate.weight"
        assert cropped.view(gate.format(1)).data_ptr() == source.view(gate.format(2)).data_ptr()


def test_shards_by_size(models, tmp_path):
    crop = crop_checkpoint(models("v4"), tmp_path / "crop", layers=[1, 2], shard_bytes=400_000)
    shards = list((tmp_path / "crop").glob("*.safetensors"))
    assert len(shards) == -(-crop.nbytes // 400_000) > 2
    assert runner_of(tmp_path / "crop").config.num_hidden_layers == 2


def test_by_hub_id(models, tmp_path, monkeypatch, capsys):
    """Shards without a kept tensor are not downloaded."""
    hub = FakeHub(tmp_path, monkeypatch)
    hub.publish("deepseek-ai/Small", models("v4"), "a" * 40)
    out = tmp_path / "crop"
    command = ["crop", "--model", "deepseek-ai/Small", "--out", str(out), "--layers", "0", "--without", "mtp"]
    assert main(command) == 0
    assert "1 of 5 layers, 6 of 6 experts" in capsys.readouterr().out
    fetched = {file for _, files in hub.downloads for file in files if file.endswith(".safetensors")}
    assert 0 < len(fetched) < 5
    assert (out / "tokenizer.json").is_file()
    assert runner_of(out).config.num_hidden_layers == 1


def test_the_command(models, tmp_path, capsys):
    assert main(["crop", "--model", str(models("v41")), "--out", str(tmp_path / "crop"), "--layers", "0-2,1"]) == 0
    out = capsys.readouterr().out
    assert "3 of 8 layers" in out
    assert "the DSpark drafter is left out" in out
    assert main(["crop", "--model", str(models("v4")), "--out", str(tmp_path / "b")]) == 2
    assert "nothing to crop: give --layers, --experts" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["crop", "--model", "x", "--out", "y", "--layers", "3-1"])
    assert "a range goes from its smaller number on" in capsys.readouterr().err
