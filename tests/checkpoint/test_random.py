"""Random checkpoints: the published inventory, values that exercise the model, one tensor at a time."""

from collections import Counter

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource, random, read_float32
from deepseek_attn.checkpoint.random import DRAWN_ROWS, RepeatingSource
from deepseek_attn.checkpoint.recipes import DRAW, Recipe
from deepseek_attn.config.model import ModelConfig
from tests.checkpoint.fabricate import same_bits, tiny
from tests.support.tiers import exhaustive_on_cpu


@exhaustive_on_cpu
def test_flash_inventory():
    entries = RandomSource(ModelConfig.from_preset("v4_flash")).entries()
    parts = Counter(
        ".".join(name.split(".")[:2]) if name.startswith(("layers.", "mtp.")) else "top" for name in entries
    )
    expected = {"top": 6, "mtp.0": 1575, "layers.0": 1565, "layers.1": 1565}
    expected |= {f"layers.{i}": 1576 if i % 2 == 0 else 1569 for i in range(2, 43)}
    # Layer 2 is the last hash layer: a table in place of the bias, so the count stays that of C4A.
    assert dict(parts) == expected
    assert len(entries) == 69187
    described = {name: (info.dtype, info.shape) for name, info in entries.items()}
    assert described["embed.weight"] == ("BF16", (129280, 4096))
    assert described["layers.2.attn.wo_a.weight"] == ("F8_E4M3", (8192, 4096))
    assert described["layers.2.attn.wo_a.scale"] == ("F8_E8M0", (64, 32))
    assert described["layers.2.attn.compressor.ape"] == ("F32", (4, 1024))
    assert described["layers.3.attn.compressor.ape"] == ("F32", (128, 512))
    assert described["layers.2.attn.indexer.compressor.wkv.weight"] == ("BF16", (256, 4096))
    assert described["layers.2.ffn.gate.tid2eid"] == ("I64", (129280, 6))
    assert described["layers.3.ffn.gate.bias"] == ("F32", (256,))
    assert described["layers.3.ffn.experts.255.w2.weight"] == ("I8", (4096, 1024))
    assert described["layers.3.ffn.experts.255.w2.scale"] == ("F8_E8M0", (4096, 64))
    assert described["mtp.0.h_proj.scale"] == ("F8_E8M0", (32, 32))
    assert described["hc_head_fn"] == ("F32", (4, 16384))
    assert described["mtp.0.hc_ffn_fn"] == ("F32", (24, 16384))


@exhaustive_on_cpu
def test_one_tensor_alone_is_the_tensor_of_a_sweep():
    sweep = RandomSource(tiny(), seed=5)
    assert len(sweep.entries()) > 100
    for name in sweep.entries():
        assert same_bits(RandomSource(tiny(), seed=5).read(name), sweep.read(name)), name


def test_reading_backwards_changes_nothing():
    forwards, backwards = RandomSource(tiny(), seed=5), RandomSource(tiny(), seed=5)
    expected = {name: forwards.read(name) for name in forwards.entries()}
    assert len(expected) > 100
    for name in reversed(list(expected)):
        assert same_bits(backwards.read(name), expected[name]), name


def test_tensors_and_seeds_differ():
    source, other = RandomSource(tiny(), seed=5), RandomSource(tiny(), seed=6)
    names = ["layers.0.attn.wq_a.weight", "mtp.0.attn.wq_a.weight", "layers.2.attn.wq_a.weight"]
    values = [source.read(name).float() for name in names] + [other.read(names[0]).float()]
    for i, a in enumerate(values):
        for b in values[i + 1 :]:
            assert not torch.equal(a, b)


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", "bf16"])
def test_read_gives_what_entries_announce(expert_dtype):
    source = RandomSource(tiny(), expert_dtype=expert_dtype)
    dtypes = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, "I8": torch.uint8, "BF16": torch.bfloat16}
    dtypes |= {"F32": torch.float32, "I64": torch.int64}
    for name, info in source.entries().items():
        tensor = source.read(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (dtypes[info.dtype], info.shape), name
        assert tensor.numel() * tensor.element_size() == info.nbytes, name
    weight = source.entries()["layers.1.ffn.experts.0.w1.weight"].dtype
    assert weight == {"fp4": "I8", "fp8": "F8_E4M3", "bf16": "BF16"}[expert_dtype]
    assert source.entries()["layers.1.ffn.shared_experts.w1.weight"].dtype == "F8_E4M3"


def test_config_follows_the_experts():
    assert RandomSource(tiny(), expert_dtype="fp8").config.expert_dtype == "fp8"
    assert RandomSource(tiny(expert_dtype="fp8")).entries()["layers.1.ffn.experts.0.w1.weight"].dtype == "F8_E4M3"


def test_plain_checkpoint():
    source = RandomSource(tiny(quantization_config=None))
    assert {info.dtype for info in source.entries().values()} == {"BF16", "F32", "I64"}
    assert not any(name.endswith(".scale") for name in source.entries())


def test_quantised_values_are_near_the_plain_ones():
    quantised, plain = RandomSource(tiny()), RandomSource(tiny(quantization_config=None))
    for name, limit in (("layers.0.attn.wq_b.weight", 0.04), ("layers.1.ffn.experts.1.w1.weight", 0.16)):
        a, b = read_float32(quantised, name), read_float32(plain, name)
        assert (a - b).norm() < limit * b.norm()


def test_values_exercise_the_model():
    source = RandomSource(tiny())
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for expert, clamps in (("experts.0", False), ("experts.1", True), ("shared_experts", True)):
        gate = x @ read_float32(source, f"layers.1.ffn.{expert}.w1.weight").T
        assert bool((gate.abs() > 10).any()) == clamps, expert
        assert (gate.abs() > 10).float().mean() < 0.05
        down = read_float32(source, f"layers.1.ffn.{expert}.w2.weight")
        assert down.std() < 0.01 if clamps else down.std() > 0.05, expert
    table = source.read("layers.0.ffn.gate.tid2eid")
    assert (table[:, 0] != table[:, 1]).all()
    assert set(table.flatten().tolist()) == {0, 1, 2}
    for name in ("layers.0.attn.attn_sink", "layers.1.hc_attn_base", "layers.1.attn.compressor.ape"):
        assert source.read(name).std() > 0.05, name
    scale = source.read("layers.2.hc_ffn_scale")
    assert ((scale > 0.5) & (scale < 1.5)).all()


def test_without_mtp():
    config = tiny(num_nextn_predict_layers=0, compress_ratios=[0, 4, 128])
    assert not any(name.startswith("mtp.") for name in RandomSource(config).entries())


def test_other_ratios_have_a_compressor_of_their_ratio():
    config = tiny(compress_ratios=[16, 1, 4, 0])
    entries = RandomSource(config).entries()
    assert entries["layers.0.attn.compressor.ape"].shape == (16, 128)
    assert entries["layers.1.attn.compressor.ape"].shape == (1, 128)
    assert entries["layers.2.attn.compressor.wkv.weight"].shape == (256, 256)
    assert "layers.0.attn.indexer.wq_b.weight" not in entries


def test_unknown_expert_dtype():
    with pytest.raises(ValueError, match="expert_dtype is 'int4': supported is"):
        RandomSource(tiny(), expert_dtype="int4")
    with pytest.raises(ValueError, match="expert_dtype is 'fp4': supported is bf16"):
        RandomSource(tiny(quantization_config=None), expert_dtype="fp4")


def test_unknown_tensor():
    with pytest.raises(ValueError, match=r"no tensor layers\.9"):
        RandomSource(tiny()).read("layers.9.attn.wq_a.weight")


def test_a_source_for_benchmarks_repeats_itself():
    """The same inventory; tensors of one shape share their values, and no two rows of one are the same."""
    config = tiny().replace(vocab_size=2 * DRAWN_ROWS + 100)
    source = RepeatingSource(config)
    assert source.entries() == RandomSource(config).entries()
    embed = source.read("embed.weight")
    assert embed.shape == (config.vocab_size, config.hidden_size)
    assert len(embed.unique(dim=0)) == len(embed)
    drawn = embed[:DRAWN_ROWS]
    repeated = torch.cat([drawn, drawn.roll(1, dims=-1), drawn[:100].roll(2, dims=-1)])
    assert torch.equal(embed, repeated)
    values = source.values("embed.weight", source._recipes["embed.weight"])  # before they are stored
    assert torch.equal(values.to(embed.dtype), embed)
    assert embed[DRAWN_ROWS:].float().std() == pytest.approx(1, abs=0.01)
    norms = [source.read(f"layers.{i}.attn_norm.weight") for i in (0, 1)]
    assert torch.equal(*norms)


def test_a_source_for_benchmarks_does_not_repeat_rows_of_a_table(monkeypatch):
    """An Engram table, read as a whole: every row is a hash of its number."""
    monkeypatch.setattr(random, "DRAWN_ROWS", 64)
    config = ModelConfig.from_preset("tiny_v41")
    for name in ("layers.1.engram.embed.weight", "layers.1.engram.embed.scale"):
        assert same_bits(RepeatingSource(config).read(name), RandomSource(config).read(name))


@pytest.mark.parametrize("kind", DRAW)
def test_tensors_are_drawn_on_the_device_of_the_generator(device, kind):
    recipe = Recipe(kind, (3, 2), gain=2.0)
    drawn = DRAW[kind].values(recipe, torch.Generator(device).manual_seed(7), tiny())
    assert (drawn.device.type, drawn.shape) == (device.type, (3, 2))
    assert torch.equal(drawn, DRAW[kind].values(recipe, torch.Generator(device).manual_seed(7), tiny()))
