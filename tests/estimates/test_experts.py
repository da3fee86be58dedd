"""Predictions of models whose routed experts are not all on the device, counted by hand."""

import json
from pathlib import Path

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.cli import main
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.estimates.experts import ExpertSizes, OtherWeights, cpu_prompt, cpu_steps, gpu_prompt, gpu_steps
from deepseek_attn.estimates.floors import Floor, FloorWork, ModelWork
from deepseek_attn.estimates.machines import H100, H200
from deepseek_attn.estimates.ranks import RankLayout, RankModel
from tests.support.small_models import small_config, small_runner
from tests.support.tiers import tiered
from tests.support.typed import required

FLASH = ModelConfig.from_preset("v4_flash")
DATA = Path(__file__).parents[2] / "docs" / "data"
ONE = 3 * 2048 * 4096  # values of an expert of V4-Flash
FP4 = ONE // 2 + ONE // 32


def test_sizes_of_published_experts():
    serving = ExpertSizes.of(FLASH, numerics_for(FLASH, "serving"), torch.bfloat16)
    rows = 2048 + 2048 + 4096  # each with an exponent
    assert serving == ExpertSizes(44, 43, 256, 6, ONE, FP4 + rows, FP4)
    exact = ExpertSizes.of(FLASH, numerics_for(FLASH, "exact"), torch.float32, ranks=2)
    half = required(exact)  # two ranks have half of the width of every expert
    assert (half.experts, half.values, half.nbytes, half.stored) == (256, ONE // 2, 2 * ONE, FP4 // 2)
    halves = required(ExpertSizes.of(FLASH, numerics_for(FLASH, "serving"), torch.bfloat16, ranks=2))
    assert halves.nbytes == FP4 // 2 + 1024 + 1024 + 4096
    others = required(ExpertSizes.of(FLASH, numerics_for(FLASH, "exact"), torch.float32, ranks=8))
    assert (others.experts, others.nbytes) == (32, 4 * ONE)  # 256 channels are too few
    v32 = ModelConfig.from_preset("v32")
    assert (
        required(ExpertSizes.of(v32, numerics_for(v32, "serving"), torch.bfloat16)).layers == 61 - 3 + 1
    )  # dense ones, MTP


@pytest.mark.parametrize("numerics", ["exact", "official"])
def test_weights_beside_the_experts_are_those_of_a_runner(numerics):
    config = small_config([0, 4], n_routed_experts=8)
    chosen = numerics_for(config, numerics)
    runner = small_runner(config, RandomSource(config, 0), numerics=numerics, expert_memory="disk")
    held = sum(p.nbytes for p in runner.model.parameters())
    assert OtherWeights.of(config, chosen, torch.float32).nbytes == pytest.approx(held, rel=0.02)
    one = ExpertSizes.of(config, chosen, torch.float32)
    files = runner.expert_files
    assert required(files).nbytes // required(files).slots == pytest.approx(
        required(one).stored * required(one).layers, rel=0.02
    )


def test_floors_know_the_bus():
    work = ModelWork(FLASH, numerics_for(FLASH, "serving"), torch.bfloat16)
    layer = FLASH.layers[5]
    assert work.experts(layer, 1).bus == 0
    missed = work.experts(layer, 1, hit_rate=0.75)
    assert missed.bus == pytest.approx(0.25 * 6 * FP4)
    assert (missed + missed).bus == 2 * missed.bus
    floor = missed.floor(H100.rates)
    assert floor.bus_us == pytest.approx(missed.bus / 52e9 * 1e6)
    assert (floor.bound, floor.microseconds) == ("bus", floor.bus_us)
    assert FloorWork({"weights": 4}).floor({"copy": 2.0, "bf16": 1.0}) == Floor(2e6, 0.0)


def test_steps_on_a_gpu():
    numerics = numerics_for(FLASH, "serving")
    sizes = ExpertSizes.of(FLASH, numerics, torch.bfloat16)
    model = RankModel(FLASH, numerics, torch.bfloat16, RankLayout(1), H100)
    steps = list(gpu_steps(model, required(sizes), [1], 8192, 55e9))
    assert [step.hit_rate for step in steps] == [0.3, 0.6, 0.9]
    resident = model.step(1, 1, 8192).microseconds / 1e6
    for step in steps:
        missing = (1 - step.hit_rate) * 43 * 6 * required(sizes).nbytes
        assert step.moved == pytest.approx(missing)
        assert step.tokens_per_second == pytest.approx(1 / (resident + missing / 55e9))


@pytest.mark.exhaustive
def test_prompts_on_a_gpu():
    """Copies ahead overlap with all but the first layer; short chunks and those from disk wait for what they need."""
    numerics = numerics_for(FLASH, "serving")
    sizes = required(ExpertSizes.of(FLASH, numerics, torch.bfloat16))
    model = RankModel(FLASH, numerics, torch.bfloat16, RankLayout(1), H100)
    layer = 138 * sizes.nbytes / 55e9
    found = gpu_prompt(model, sizes, 118, 12288, 8192, 55e9, ahead=True)
    assert (found.chunks, found.moved) == (2, 2 * 43 * 138 * sizes.nbytes)
    assert found.seconds == pytest.approx(2 * 44 * layer)  # slower than the products
    fast = gpu_prompt(model, sizes, 118, 8192, 8192, 1e15, ahead=True)
    computed = model.step(1, 8192, 8192).microseconds / 1e6
    assert fast.seconds == pytest.approx(computed, rel=1e-4)
    for tokens, ahead in ((8192, False), (85, True)):  # 85 tokens have fewer than 512 pairs
        copied = gpu_prompt(model, sizes, 118, tokens, 8192, 55e9, ahead)
        needed = 43 * 256 * (1 - (1 - 6 / 256) ** tokens) * 138 / 256 * sizes.nbytes
        assert copied.moved == pytest.approx(needed)
        seconds = model.step(1, tokens, tokens).microseconds / 1e6 + needed / 55e9
        assert copied.seconds == pytest.approx(seconds)


def test_prompts_on_a_cpu():
    numerics = numerics_for(FLASH, "official")
    sizes = required(ExpertSizes.of(FLASH, numerics, torch.float32))
    others = OtherWeights.of(FLASH, numerics, torch.float32)
    fast = cpu_prompt(FLASH, sizes, others, 10, 2000, 1000, 1e12)
    assert fast.moved == pytest.approx(2 * 43 * 246 * FP4, rel=1e-6)
    values = 2000 * (others.multiplied + 43 * 6 * ONE) / 28e9
    assert fast.seconds == pytest.approx(values + 2 * (others.quantized + 43 * 256 * ONE) / 420e6, rel=1e-6)
    slow = cpu_prompt(FLASH, sizes, others, 10, 2000, 1000, 1e7)
    assert slow.seconds == pytest.approx(slow.moved / 1e7)


@pytest.mark.parametrize(
    ("file", "part", "error"),
    [
        ("h200_host_model", "model", 0.07), ("h200_host_80gb", "model", 0.07), ("h200_host_experts", "experts", 0.012),
        ("h100_host_model", "model", 0.05),
    ],
)  # fmt: skip
def test_measured_steps_are_those_of_resident_experts_and_copies(file, part, error):
    """The kernel that copies reached 50.5 GB/s on one H200, and 48 to 50 on another. Predictions make steps shorter."""
    measured = json.loads((DATA / f"{file}.json").read_text())[part]
    bus = (H100 if file.startswith("h100") else H200).rates["bus"]
    steps = {name: row for name, row in measured.items() if isinstance(row, dict) and "copied" in row}
    assert sum("share" not in row for row in steps.values()) in (6, 9)
    for row in steps.values():
        there, copies = row["seconds_all_there"], row["copied"] * measured["expert_bytes"] / bus
        whole = there + copies
        if "share" in row:
            assert max(there, copies) < row["seconds"] < 1.01 * whole
        else:
            assert row["seconds"] == pytest.approx(whole, rel=error)


@pytest.mark.parametrize("file", tiered(["h200_host_model", "h200_host_80gb"], ["h200_host_80gb"]))
def test_measured_prompts_are_as_long_as_products_or_copies(file):
    measured = json.loads((DATA / f"{file}.json").read_text())["model"]
    numerics = numerics_for(FLASH, "serving")
    sizes = required(ExpertSizes.of(FLASH, numerics, torch.bfloat16))
    model = RankModel(FLASH, numerics, torch.bfloat16, RankLayout(1), H200)
    found = gpu_prompt(model, sizes, measured["cached"], 8192, 8192, H200.rates["copy_engine"], ahead=True)
    assert found.seconds == pytest.approx(measured["prompt of 8192"]["seconds"], rel=0.15)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("gpu", "rate"), [("h200", "50.5"), pytest.param("h100", "52", marks=pytest.mark.exhaustive)])
def test_plan_names_the_rate_of_the_bus(gpu, rate, capsys):
    pytest.importorskip("triton")
    limits = ["--max-num-seqs", "2", "--max-model-len", "512", "--host-memory", "1GB", "--expert-memory", "host"]
    assert main(["plan", "--model", "tiny_gpu", "--gpu", gpu, *limits]) == 0
    assert f"bus: PCI Express 5.0 x16 at {rate} GB/s," in capsys.readouterr().out


def test_steps_on_a_cpu_wait_for_the_disk_only_if_it_is_slower():
    numerics = numerics_for(FLASH, "official")
    sizes, others = ExpertSizes.of(FLASH, numerics, torch.float32), OtherWeights.of(FLASH, numerics, torch.float32)
    fast = [step.seconds for step in cpu_steps(FLASH, required(sizes), others, [1], 1e12)]
    assert fast[0] == fast[2] == pytest.approx(32, abs=2)
    slow = list(cpu_steps(FLASH, required(sizes), others, [1], 1e7))
    assert slow[0].seconds - slow[2].seconds == pytest.approx(0.6 * 43 * 6 * FP4 / 1e7)


def plan(capsys, *flags) -> dict:
    assert main(["plan", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["experts"]


def test_plan_of_a_cpu(capsys):
    """V4-Flash on a machine of 24 GB: only from disk, with a cache in half of what is free."""
    flags = ["--model", "v4_flash", "--device", "cpu", "--numerics", "official", "--max-num-seqs", "1", "--batch", "1"]
    limits = ["--max-model-len", "4096", "--host-memory", "24GB", "--prefill", "1000"]
    facts = plan(capsys, *flags, *limits)
    resident, disk = facts["settings"]
    assert (resident["memory"], resident["fits"], disk["memory"], disk["fits"]) == ("gpu", False, "disk", True)
    assert resident["host_bytes"] > 160e9
    free = 24e9 - (disk["host_bytes"] - disk["cached"] * 44 * FP4)
    assert disk["cached"] == int(free / 2 // (44 * FP4))
    assert disk["hit_rate"] == disk["cached"] / 256
    assert [step["hit_rate"] for step in disk["steps"]] == [0.3, 0.6, 0.9]
    given = ["--expert-memory", "disk", "--expert-cache-bytes", "2GB"]
    assert plan(capsys, *flags, *limits, *given)["settings"][1]["cached"] == 3
    small = plan(capsys, *flags, "--max-model-len", "4096", "--host-memory", "8GB")["settings"][1]
    assert (small["fits"], small["problem"]) == (False, "too little memory")
    assert main(["plan", *flags, *limits]) == 0
    text = capsys.readouterr().out
    assert "decode with --expert-memory disk at 3 GB/s read from disk:" in text
    assert "a prompt of 1,000 tokens with --expert-memory disk: " in text
    assert "--expert-memory host" not in text


@pytest.mark.exhaustive  # all layers of V4-Flash, twice
def test_plan_of_a_gpu(capsys):
    """The rows of the GPU, all experts in host memory, and a host that is too small."""
    pytest.importorskip("triton")
    flags = ["--model", "v4_flash", "--gpu", "h100", "--max-num-seqs", "4", "--max-model-len", "4096", "--batch", "1,4"]
    facts = plan(capsys, *flags, "--host-memory", "256GB")
    gpu, host, disk = facts["settings"]
    assert (gpu["fits"], host["fits"], disk["fits"]) == (False, True, True)
    assert host["host_bytes"] == facts["total"] == 44 * 256 * facts["expert_bytes"]
    rest = gpu["device_bytes"] - facts["total"]
    held, on_disk = (
        facts["expert_bytes"] * (44 * row["cached"] + areas * (256 - row["cached"]))
        for row, areas in ((host, 2), (disk, 1))
    )
    assert disk["device_bytes"] == rest + on_disk <= facts["device_memory"]
    assert host["device_bytes"] == rest + held <= facts["device_memory"]
    assert host["steps"][0]["tokens_per_second"] > 5 * disk["steps"][0]["tokens_per_second"]
    host = plan(capsys, *flags, "--host-memory", "64GB")["settings"][1]
    assert (host["fits"], host["problem"]) == (False, "too little memory of the host")


@pytest.mark.exhaustive  # all layers of V4-Flash
def test_a_gpu_keeps_as_many_experts_as_planned(capsys):
    """Without ``--expert-cache-bytes`` a runner leaves memory to its steps by a rule of its own."""
    pytest.importorskip("triton")
    measured = json.loads((DATA / "h200_host_model.json").read_text())["model"]
    flags = ["--model", "v4_flash", "--gpu", "h200", "--host-memory", "9TB", "--expert-memory", "host"]
    limits = ["--max-num-seqs", "16", "--max-model-len", "16384", "--max-num-batched-tokens", "8192"]
    assert plan(capsys, *flags, *limits)["settings"][1]["cached"] == measured["cached"] == 224


@pytest.mark.exhaustive
def test_the_chosen_memory_is_part_of_a_gpu(capsys):
    pytest.importorskip("triton")
    flags = [
        "--model",
        "tiny_gpu",
        "--gpu",
        "h100",
        "--max-num-seqs",
        "2",
        "--max-model-len",
        "512",
        "--host-memory",
        "1GB",
    ]
    found = {}
    for memory in ("gpu", "host"):
        assert main(["plan", *flags, "--expert-memory", memory, "--json"]) == 0
        found[memory] = json.loads(capsys.readouterr().out)
        parts = found[memory]["gpu"]["parts"]
        assert sum(parts.values()) == found[memory]["gpu"]["total"]
        assert parts["experts"] > 0
    assert found["gpu"]["gpu"]["parts"]["experts"] == found["gpu"]["experts"]["total"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "h100", "--device", "cpu"], "--gpu and --device cpu: choose one"),
        (["--ranks", "2", "--device", "cpu"], "--ranks: name the GPUs"),
        (["--approximate-prefill"], "--approximate-prefill is for DeepSeek-V4.1"),
        (["--expert-cache-bytes", "1GB"], "with expert_memory='gpu' all experts are on the device"),
    ],
)
def test_wrong_flags(flags, message, capsys):
    assert main(["plan", "--model", "tiny", *flags]) == 2
    assert message in capsys.readouterr().err
