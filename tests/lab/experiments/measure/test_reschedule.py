"""A checkpoint under another schedule: which weights it gets, and that equivalent schedules give equal models."""

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource
from deepseek_attn.checkpoint.stored_weights import read_float32
from deepseek_attn.lab.experiments.measure.reschedule import RescheduledSource
from tests.support.small_models import assert_close, prompt, small_config, small_runner


def logits(config, source):
    return small_runner(config, source).score([prompt(config, 150)])[0]


def rescheduled(own, ratios, **options):
    schedule = {"compress_ratios": ratios, "compress_overlap": {}, "compress_indexer": {}} | options
    config = own.replace(**schedule)
    return config, RescheduledSource(RandomSource(own, 0), own, config)


def test_the_own_schedule_is_the_checkpoint_itself():
    own = small_config([0, 4, 16])
    config, source = rescheduled(own, [0, 4, 16])
    assert source.entries() == RandomSource(own, 0).entries()
    assert torch.equal(logits(config, source), logits(own, RandomSource(own, 0)))


def test_new_overlap_has_no_weight():
    """Entries pool two windows, and the earlier one counts for nothing."""
    own = small_config([0, 16, 16])
    config, source = rescheduled(own, [0, 16, 16], compress_overlap={"16": True})
    assert config.layers[1].overlap
    assert_close(logits(config, source), logits(own, RandomSource(own, 0)))


def test_dropped_overlap_keeps_the_own_half():
    own = small_config([0, 4])
    config, source = rescheduled(own, [0, 4], compress_overlap={"4": False}, compress_indexer={"4": False})
    full = RandomSource(own, 0)
    for leaf in ("wkv.weight", "wgate.weight"):
        name = f"layers.1.attn.compressor.{leaf}"
        assert torch.equal(source.read(name), read_float32(full, name)[own.head_dim :])
    ape = read_float32(full, "layers.1.attn.compressor.ape")
    assert torch.equal(source.read("layers.1.attn.compressor.ape"), ape[:, own.head_dim :])
    assert not any(".indexer." in name for name in source.entries())
    assert logits(config, source).isfinite().all()


def test_a_dropped_branch_is_dropped_and_nothing_else():
    own = small_config([0, 4, 16])
    config, source = rescheduled(own, [0, 0, 0])
    gone = set(RandomSource(own, 0).entries()) - set(source.entries())
    assert gone
    assert all(".attn.compressor." in name or ".attn.indexer." in name for name in gone)
    assert logits(config, source).isfinite().all()


def test_a_new_branch_holds_means_of_window_keys():
    """No gate and no position bias: each entry is the mean of the window's latents before the norm."""
    own = small_config([0, 0])
    config, source = rescheduled(own, [0, 8])
    name = "layers.1.attn.compressor"
    assert torch.equal(
        source.read(f"{name}.wkv.weight"), read_float32(RandomSource(own, 0), "layers.1.attn.wkv.weight")
    )
    assert torch.equal(
        source.read(f"{name}.norm.weight"), read_float32(RandomSource(own, 0), "layers.1.attn.kv_norm.weight")
    )
    assert not source.read(f"{name}.wgate.weight").any()
    assert source.read(f"{name}.ape").shape == (8, config.head_dim)
    assert logits(config, source).isfinite().all()


@pytest.mark.parametrize(("ratio", "expected"), [(4, [0.5, 2.5, 4.5, 6.5]), (16, None)])
def test_ape_is_interpolated_by_position(ratio, expected):
    own = small_config([0, 8])

    class Ramp(RandomSource):
        def read(self, name):
            tensor = super().read(name)
            return torch.arange(8.0)[:, None].expand(tensor.shape).clone() if name.endswith(".ape") else tensor

    neither = {str(ratio): False}
    config = own.replace(compress_ratios=[0, ratio], compress_indexer=neither, compress_overlap=neither)
    ape = RescheduledSource(Ramp(own, 0), own, config).read("layers.1.attn.compressor.ape")
    if expected is None:  # between the rows, in order, flat beyond the outermost ones
        expected = [min(max((i + 0.5) / 2 - 0.5, 0.0), 7.0) for i in range(16)]
    assert torch.allclose(ape[:, 0], torch.tensor(expected))
    assert (ape == ape[:, :1]).all()


def test_an_indexer_cannot_be_made_up():
    own = small_config([0, 16, 4])
    with pytest.raises(ValueError, match=r"layers \[1\] have no indexer"):
        rescheduled(own, [0, 4, 4])
