"""Written checkpoints: readable by others, complete or absent."""

import json

import pytest
import torch
from safetensors import safe_open

from deepseek_attn.checkpoint import RandomSource, SafetensorsSource, write_checkpoint
from deepseek_attn.checkpoint.write import plan_shards
from deepseek_attn.config.model import ModelConfig
from tests.checkpoint.fabricate import MemorySource, same_bits, tiny


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    source = RandomSource(tiny(), seed=2)
    return source, write_checkpoint(source, source.config, tmp_path_factory.mktemp("out") / "ckpt", num_shards=3)


def test_reads_back_bit_for_bit(written):
    source, path = written
    read = SafetensorsSource(path)
    assert read.entries() == source.entries()
    assert all(same_bits(read.read(name), source.read(name)) for name in source.entries())


def test_the_safetensors_library_reads_it(written):
    source, path = written
    seen = 0
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensor, expected = file.get_tensor(name), source.read(name)
                assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), name
                assert file.get_slice(name).get_dtype() == source.entries()[name].dtype
                seen += 1
    assert seen == len(source.entries())


def test_files(written):
    source, path = written
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in source.entries().values())
    assert set(index["weight_map"]) == set(source.entries())
    assert ModelConfig.from_pretrained(path) == source.config
    generation = json.loads((path / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (0, 1)


def test_permissions_are_ordinary(written):
    _, path = written
    (path.parent / "plain").mkdir()
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode


def test_two_shards_at_least_and_more_for_smaller_ones(tmp_path):
    source = RandomSource(tiny())
    total = sum(info.nbytes for info in source.entries().values())
    assert len(plan_shards(source.entries())) == 2
    plan = plan_shards(source.entries(), shard_bytes=total // 5)
    assert [name for shard in plan for name in shard] == list(source.entries())
    sizes = [sum(source.entries()[name].nbytes for name in shard) for shard in plan]
    largest = max(info.nbytes for info in source.entries().values())
    assert len(plan) == 6
    assert max(sizes) <= total / 6 + largest


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_each_shard_holds_something(count):
    source = MemorySource({})
    for i, size in enumerate((1000, 1, 1, 1, 1, 1)):
        source.put(f"t{i}", "U8", torch.zeros(size, dtype=torch.uint8))
    plan = plan_shards(source.entries(), num_shards=count)
    assert len(plan) == count
    assert all(plan)
    assert [name for shard in plan for name in shard] == list(source.entries())


@pytest.mark.parametrize("count", [0, 7])
def test_impossible_shards(count):
    source = MemorySource({})
    for i in range(6):
        source.put(f"t{i}", "U8", torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"num_shards is {count}: 6 tensors make between 1 and 6 shards"):
        plan_shards(source.entries(), num_shards=count)


def test_odd_sizes_leave_wide_tensors_aligned(tmp_path):
    source = MemorySource({})
    source.put("bytes", "U8", torch.arange(7, dtype=torch.uint8))
    source.put("half", "BF16", torch.ones(3, dtype=torch.bfloat16))
    source.put("wide", "F32", torch.arange(5.0))
    path = write_checkpoint(source, tiny(), tmp_path / "ckpt", num_shards=1)
    data = (path / "model-00001-of-00001.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name in source.entries():
        offset = 8 + length + header[name]["data_offsets"][0]
        assert offset % source.read(name).element_size() == 0, name


class Failing(RandomSource):
    def __init__(self, error, last_good):
        super().__init__(tiny())
        self.error, self.left = error, last_good

    def read(self, name):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().read(name)


@pytest.mark.parametrize("error", [RuntimeError("disk"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("last_good", [0, 100])
def test_failure_leaves_nothing(tmp_path, error, last_good):
    with pytest.raises(type(error)):
        write_checkpoint(Failing(error, last_good), tiny(), tmp_path / "made" / "deep" / "ckpt")
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_an_empty_target(tmp_path):
    (tmp_path / "ckpt").mkdir()
    with pytest.raises(RuntimeError):
        write_checkpoint(Failing(RuntimeError("disk"), 3), tiny(), tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == [tmp_path / "ckpt"]
    assert list((tmp_path / "ckpt").iterdir()) == []


def test_empty_target_is_used(tmp_path):
    (tmp_path / "ckpt").mkdir()
    write_checkpoint(RandomSource(tiny()), tiny(), tmp_path / "ckpt")
    assert SafetensorsSource(tmp_path / "ckpt").entries()
    assert list(tmp_path.iterdir()) == [tmp_path / "ckpt"]


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_existing_target_is_refused(tmp_path, kind):
    target = tmp_path / "ckpt"
    if kind == "directory":
        target.mkdir()
        (target / "precious").write_text("keep")
    else:
        target.write_text("keep")
    with pytest.raises(ValueError, match="ckpt exists and is not an empty directory"):
        write_checkpoint(RandomSource(tiny()), tiny(), target)
    assert (target / "precious" if kind == "directory" else target).read_text() == "keep"
    assert list(tmp_path.iterdir()) == [target]


def test_vocabulary_too_small_for_the_tokenizer(tmp_path):
    config = tiny(vocab_size=200)
    with pytest.raises(ValueError, match="vocab_size is 200"):
        write_checkpoint(RandomSource(config), config, tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []


def test_other_token_ids(tmp_path):
    config = tiny(bos_token_id=7)
    with pytest.raises(ValueError, match="bos_token_id is 7"):
        write_checkpoint(RandomSource(config), config, tmp_path / "ckpt")


def test_source_that_breaks_its_word(tmp_path):
    source = MemorySource.of(RandomSource(tiny()))
    info, _ = source.tensors["norm.weight"]
    source.tensors["norm.weight"] = (info, torch.zeros(3))
    with pytest.raises(ValueError, match=r"norm\.weight has 12 bytes, its source announced 512"):
        write_checkpoint(source, tiny(), tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []
