"""Checkpoints by hub id: the local copy, what is missing of it, and the message where it cannot be downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, snapshot_download

from deepseek_attn import LLM, ModelConfig, ModelRunner
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.checkpoint.hub import SMALL_FILES, PretrainedSource
from deepseek_attn.checkpoint.safetensors_source import INDEX_FILE
from deepseek_attn.checkpoint.selection import needed_tensors
from deepseek_attn.cli import main
from deepseek_attn.lab.bench.engine import cut_config
from deepseek_attn.utils.hub import HubModel
from tests.support.hub_cache import FakeHub
from tests.support.small_models import small_config
from tests.support.typed import required

OPTIONS = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 2, "progress": False}
ID, COMMIT, NEWER = "deepseek-ai/DeepSeek-Small", "a" * 40, "b" * 40
REAL_DOWNLOAD = snapshot_download  # offline in tests


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A checkpoint with a tensor of each backbone layer in another shard."""
    config = small_config([0, 4, 0], mtp=1, vocab_size=270)
    return write_checkpoint(RandomSource(config, 0), config, tmp_path_factory.mktemp("hub") / "m", num_shards=7)


@pytest.fixture
def hub(tmp_path, monkeypatch, published):
    monkeypatch.chdir(tmp_path)
    hub = FakeHub(tmp_path, monkeypatch)
    hub.publish(ID, published, COMMIT)
    return hub


def fetch(model: str, *part) -> Path:
    """The folder of a checkpoint, after all files that a load needs have been fetched."""
    with PretrainedSource(model, *part) as source:
        source.entries()
        return source.directory


def shards_of(folder, layers, attention_only=False) -> set[str]:
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    needed = needed_tensors(ModelConfig.from_pretrained(folder), layers, attention_only)
    return {shard for name, shard in weight_map.items() if needed(name)}


def test_everything_is_downloaded_once(hub, published):
    with LLM(ID, **OPTIONS) as llm, LLM(published, **OPTIONS) as local:
        assert required(llm.tokenizer).encode_prompt("abc") == required(local.tokenizer).encode_prompt("abc")
        assert llm.runner.fingerprint() == local.runner.fingerprint()
        assert llm.runner.report == local.runner.report
        assert llm.directory.name == COMMIT
    first, second = [files for _, files in hub.downloads]
    assert first == ["config.json", "generation_config.json", INDEX_FILE, "tokenizer.json", "tokenizer_config.json"]
    assert set(second) == shards_of(published, None)
    hub.downloads.clear()
    assert fetch(ID) == llm.directory
    assert not hub.downloads


@pytest.mark.parametrize(("layers", "attention_only"), [([1], True), ([1], False), ([0, 2], True)])
def test_some_layers_need_the_shards_that_hold_them(hub, published, layers, attention_only):
    runner = ModelRunner.from_pretrained(ID, layers=iter(layers), attention_only=attention_only, **OPTIONS)
    expected = ModelRunner.from_pretrained(published, layers=layers, attention_only=attention_only, **OPTIONS)
    assert set(runner.report.loaded) == set(expected.report.loaded)
    assert runner.fingerprint() == expected.fingerprint()
    files = {file for _, files in hub.downloads for file in files if file.endswith(".safetensors")}
    assert files == shards_of(published, layers, attention_only)
    assert files < shards_of(published, None)
    hub.downloads.clear()
    ModelRunner.from_pretrained(ID, **OPTIONS)  # the others follow
    assert [set(files) for _, files in hub.downloads] == [shards_of(published, None) - files]


def test_a_folder_with_some_shards_serves_their_layers(hub, published):
    fetch(ID, [1], True)
    folder = required(HubModel.parse(ID)).local_folder()
    with pytest.raises(ValueError, match=r"shard .* is missing"):
        ModelRunner.from_pretrained(required(folder), **OPTIONS)
    runner = ModelRunner.from_pretrained(required(folder), layers=[1], attention_only=True, **OPTIONS)
    assert [spec.name for spec in runner.backbone_layers] == ["layers.1"]


@pytest.mark.parametrize("preset", ["tiny", "tiny_v32"])
def test_the_layers_of_a_tensor(preset):
    config = ModelConfig.from_preset(preset)
    mtp = "mtp.0.attn.wq_b.weight" if preset == "tiny" else "model.layers.4.self_attn.q_b_proj.weight"
    attention = "layers.1.attn.wq_b.weight" if preset == "tiny" else "model.layers.1.self_attn.q_b_proj.weight"
    expert = "layers.1.ffn.experts.3.w1.weight" if preset == "tiny" else "model.layers.1.mlp.experts.3.up_proj.weight"
    names = [mtp, attention, expert, "embed.weight"]
    for layers, attention_only, expected in (
        (None, False, [True] * 4),
        ([1], False, [False, True, True, True]),
        ([1], True, [False, True, False, False]),
        (None, True, [False, True, False, False]),
        ([0], False, [False, False, False, True]),
    ):
        assert list(map(needed_tensors(config, layers, attention_only), names)) == expected


def test_a_copy_keeps_its_commit(hub, published, tmp_path):
    """Also where the hub has a newer one by now, and files are still missing."""
    fetch(ID, [1], True)
    config = cut_config(ModelConfig.from_pretrained(published), 2)
    hub.publish(ID, write_checkpoint(RandomSource(config, 1), config, tmp_path / "newer"), NEWER)
    assert fetch(ID).name == COMMIT
    assert ModelRunner.from_pretrained(ID, **OPTIONS).config == ModelConfig.from_pretrained(published)
    assert fetch(f"{ID}@{NEWER}").name == NEWER
    assert ModelConfig.from_pretrained(f"{ID}@{NEWER}") == config


def test_revisions(hub, published, tmp_path):
    config = small_config([0], vocab_size=270)
    hub.publish(ID, write_checkpoint(RandomSource(config, 1), config, tmp_path / "other"), NEWER, "refs/pr/1")
    assert ModelConfig.from_pretrained(f"{ID}@refs/pr/1") == config
    assert ModelConfig.from_pretrained(ID) == ModelConfig.from_pretrained(published)
    assert LLM(f"{ID}@refs/pr/1", **OPTIONS).runner.config == config


def test_a_single_file(hub, published, tmp_path):
    config = small_config([0], vocab_size=270)
    folder = write_checkpoint(RandomSource(config, 1), config, tmp_path / "one", num_shards=1)
    [shard] = folder.glob("*.safetensors")
    shard.rename(folder / "model.safetensors")
    (folder / INDEX_FILE).unlink()
    hub.publish("org/one", folder, COMMIT)
    assert ModelRunner.from_pretrained("org/one", **OPTIONS).config == config
    assert [files for _, files in hub.downloads][1:] == [["model.safetensors"]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-ai/DeepSeek-V4-Flash", HubModel("deepseek-ai/DeepSeek-V4-Flash")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
        *[(name, None) for name in ("tiny", "/org/name", "./org/name", "../name", "org/name/deep", "org/", "a b/c")],
        *[(name, None) for name in ("org/name@", "~/name", "org/..", "", "org\\name", "https://x/y")],
    ],
)
def test_names(name, expected):
    assert HubModel.parse(name) == expected


def test_a_local_folder_of_that_name_wins(hub, published, tmp_path):
    (tmp_path / "deepseek-ai").mkdir()
    (tmp_path / ID).symlink_to(published)
    assert required(ModelRunner.from_pretrained(ID, **OPTIONS).directory).samefile(published)
    assert ModelConfig.from_pretrained(ID) == ModelConfig.from_pretrained(published)
    assert not hub.downloads


@pytest.fixture
def offline(hub, monkeypatch):
    """``HF_HUB_OFFLINE=1``, with the library's own download."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", REAL_DOWNLOAD)
    return hub


def test_offline_without_a_copy(offline):
    """The command fetches what is needed: everything, the files with the names of the shards, or the config."""
    small = " ".join(["config.json", *SMALL_FILES])
    for use, files in (
        (lambda: LLM(ID, **OPTIONS), ""),
        (lambda: LLM(f"{ID}@v2", **OPTIONS), " --revision v2"),
        (lambda: ModelRunner.from_pretrained(ID, layers=[1], **OPTIONS), f" {small}"),
        (lambda: ModelConfig.from_pretrained(ID), " config.json"),
    ):
        with pytest.raises(ValueError, match=rf"{ID}' is not a local folder, and config\.json of it cannot") as error:
            use()
        assert "hub (HF_HUB_OFFLINE is set): run `hf download " + ID + files + "` where there is a network" in str(
            error.value
        )


def test_offline_with_a_part(hub, published, monkeypatch):
    """The command names what is missing, of the commit that is there."""
    fetch(ID, [1], True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", REAL_DOWNLOAD)
    ModelRunner.from_pretrained(ID, layers=[1], attention_only=True, **OPTIONS)
    absent = sorted(shards_of(published, None) - shards_of(published, [1], True))
    with pytest.raises(ValueError, match=rf"`hf download {ID} {' '.join(absent)} --revision {COMMIT}`"):
        LLM(ID, **OPTIONS)
    with pytest.raises(ValueError, match=r"layers .* do not exist"):
        ModelRunner.from_pretrained(ID, layers=[9], **OPTIONS)


@pytest.mark.parametrize(
    "wrong", [{"device": "gpu"}, {"layers": [9]}, {"layers": ["1"]}, {"max_num_seqs": 0}, {"backend": "none"}]
)
def test_wrong_options_are_found_before_weights_are_downloaded(hub, wrong):
    with pytest.raises(ValueError, match=r"gpu|do not exist|a list of numbers|max_num_seqs=0|'none'"):
        ModelRunner.from_pretrained(ID, **OPTIONS | wrong)
    assert not [file for _, files in hub.downloads for file in files if file.endswith(".safetensors")]


def test_no_such_repository(hub):
    message = (
        r"'org/none' is not a local folder, .*Repository Not Found for url: org/none\.\): run `hf download org/none` "
    )
    with pytest.raises(ValueError, match=message):
        LLM("org/none", **OPTIONS)


@pytest.mark.gpu_memory(5)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan --model {} --json", '"per_token"'),
        ("score --model {} --token-ids ids.json --out logits.safetensors --layers 1 --max-model-len 64", "1 sequences"),
        ("generate --model {} --prompt abc --max-tokens 2 --max-model-len 64", ""),
        pytest.param(
            "bench layer --model {} --context 64 --batch 1 --repeats 1",
            '"benchmark": "layer"',
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "bench model --model {} --context 64 --batch 1 --repeats 1",
            '"benchmark": "model"',
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "bench engine --model {} --batch 1 --drafts 1 --tokens 8 --prompt 8 --repeats 1",
            '"benchmark": "engine"',
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_every_command_takes_hub_ids(hub, tmp_path, capsys, command, said):
    (tmp_path / "ids.json").write_text("[[1, 2, 3]]")
    assert main(command.format(ID).split()) == 0
    assert said in capsys.readouterr().out
    weights = [files for _, files in hub.downloads if any(file.endswith(".safetensors") for file in files)]
    assert bool(weights) == (command.split()[0] not in ("plan", "bench") or "engine" in command)
