"""Reading safetensors directories: every dtype, every way in which they can be broken."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepseek_attn.checkpoint import SafetensorsSource, read_float32, read_weight
from deepseek_attn.kernels.common.quant import decode_e8m0, dequantize_fp4, dequantize_fp8_block
from deepseek_attn.layers.weights import Shard
from tests.checkpoint.fabricate import MemorySource, random_source, same_bits


def raw(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


TENSORS = {
    "e8m0": raw(3, 5).view(torch.float8_e8m0fnu),
    "e4m3": raw(7, 3).view(torch.float8_e4m3fn),
    "f4": raw(4, 6).view(torch.float4_e2m1fn_x2),
    "i8": raw(3, 1).view(torch.int8),
    "u8": raw(11),
    "f32": raw(3, 20).view(torch.float32),
    "bf16": raw(5, 6).view(torch.bfloat16),
    "f16": raw(5, 2).view(torch.float16),
    "i64": raw(2, 24).view(torch.int64),
    "i32": raw(3, 8).view(torch.int32),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
}
AS_BYTES = ("e8m0", "f4", "i8", "u8")


@pytest.fixture
def directory(tmp_path):
    """Two shards and an index; ``a.weight`` and ``b.weight`` in the first."""
    first = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(5, dtype=torch.bfloat16)}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c.weight": torch.zeros(4)}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, {"a.weight": 1, "b.weight": 1, "c.weight": 2})
    return tmp_path


def write_index(directory, shards):
    weight_map = {name: f"model-{number:05d}-of-00002.safetensors" for name, number in shards.items()}
    text = json.dumps({"metadata": {"total_size": 50}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("name", TENSORS)
def test_reads_what_safetensors_wrote(tmp_path, name):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with SafetensorsSource(tmp_path) as source:
        got, expected = source.read(name), TENSORS[name]
    if name in AS_BYTES:
        expected = expected.view(torch.uint8)
    assert same_bits(got, expected)


def test_header_shape_of_fp4_counts_values(tmp_path):
    save_file({"f4": TENSORS["f4"]}, tmp_path / "model.safetensors")
    info = SafetensorsSource(tmp_path).entries()["f4"]
    assert (info.dtype, info.shape, info.nbytes) == ("F4", (4, 12), 24)


def test_shards_in_order(directory):
    source = SafetensorsSource(directory)
    assert sorted(source.entries()) == ["a.weight", "b.weight", "c.weight"]
    assert list(source.entries())[-1] == "c.weight"
    assert torch.equal(source.read("a.weight"), torch.arange(6.0).reshape(2, 3))
    assert torch.equal(source.read("c.weight"), torch.zeros(4))
    with pytest.raises(ValueError, match=r"no tensor d\.weight in"):
        source.read("d.weight")


def test_a_part_reads_like_a_slice(tmp_path):
    tensor = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
    save_file({"before": torch.ones(3), "x": tensor}, tmp_path / "model.safetensors")
    memory = MemorySource({})
    memory.put("x", "F32", tensor)
    for index in range(8):
        expected = tensor.reshape(8, 3, 5)[index]
        assert torch.equal(SafetensorsSource(tmp_path).read_part("x", index, 8), expected)
        assert torch.equal(memory.read_part("x", index, 8), expected)


def remove_directory(path):
    return path / "absent"


def give_a_file(path):
    return path / "model-00001-of-00002.safetensors"


def remove_index(path):
    (path / "model.safetensors.index.json").unlink()


def empty_directory(path):
    for file in path.iterdir():
        file.unlink()


def break_index(path):
    (path / "model.safetensors.index.json").write_text('{"weight_map": {')


def index_without_map(path):
    (path / "model.safetensors.index.json").write_text("[]")


def index_pointing_outside(path):
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')


def remove_shard(path):
    (path / "model-00002-of-00002.safetensors").unlink()


def absent_tensor(path):
    write_index(path, {"a.weight": 1, "b.weight": 1, "c.weight": 2, "d.weight": 2})


def unlisted_tensor(path):
    write_index(path, {"a.weight": 1, "c.weight": 2})


def edit_shard(edit):
    def do(path):
        shard = path / "model-00001-of-00002.safetensors"
        shard.write_bytes(edit(shard.read_bytes()))

    return do


BROKEN = {
    "no directory": (remove_directory, r"checkpoint directory .*absent does not exist"),
    "a file": (give_a_file, r"model-00001-of-00002.safetensors is not a directory"),
    "no index": (
        remove_index,
        r"no safetensors checkpoint in .*: .* 2 other .safetensors files, whose index is missing",
    ),
    "empty": (empty_directory, r"no safetensors checkpoint in .*neither model.safetensors.index.json nor"),
    "broken index": (break_index, r"broken index .*index.json: not valid JSON at line 1"),
    "index without map": (index_without_map, r"broken index .*index.json: expected a JSON object"),
    "index outside": (index_pointing_outside, r"broken index .* outside the checkpoint directory"),
    "missing shard": (remove_shard, r"shard .*model-00002-of-00002.safetensors is missing: .* puts 1 tensors in it"),
    "absent tensor": (absent_tensor, r"puts d.weight in .*model-00002-of-00002.safetensors, but it is not there"),
    "unlisted tensor": (unlisted_tensor, r"model-00001-of-00002.safetensors holds 1 tensors .* b.weight"),
    "data cut": (edit_shard(lambda b: b[:-3]), r"truncated shard .*model-00001.*: expected \d+ bytes .* found \d+"),
    "header cut": (edit_shard(lambda b: b[:40]), r"truncated shard .*model-00001.*: expected at least \d+ .* found 40"),
    "no bytes": (edit_shard(lambda b: b""), r"truncated shard .*model-00001.*: expected at least 8 bytes, found 0"),
    "too long": (edit_shard(lambda b: b + b"x"), r"bytes after the last tensor of shard .*: expected \d+ .* found \d+"),
    "no JSON": (edit_shard(lambda b: b[:8] + b"#" + b[9:]), r"broken header of shard .*model-00001"),
    "other shape": (edit_shard(lambda b: b.replace(b"[2,3]", b"[2,4]")), r"broken header .* 24 bytes for F32 \[2, 4\]"),
    "no safetensors": (edit_shard(lambda b: b"\xff" * 64), r"broken shard .*is it a safetensors file"),
    "lfs pointer": (edit_shard(lambda b: b"version https://git-lfs"), r"is a Git LFS pointer.*git lfs pull"),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_checkpoints(directory, damage, message):
    path = damage(directory) or directory
    with pytest.raises(ValueError, match=message) as raised:
        SafetensorsSource(path)
    assert "\n" not in str(raised.value)


def entry(begin, end, dtype="F32", shape=None):
    shape = [(end - begin) // 4] if shape is None else shape
    return f'{{"dtype": "{dtype}", "shape": {json.dumps(shape)}, "data_offsets": [{begin}, {end}]}}'


@pytest.mark.parametrize(
    ("tensors", "size", "message"),
    [
        (f'"a": {entry(0, 8)}, "b": {entry(4, 12)}', 12, r"invalid offset for tensor `b`.*without gaps or overlaps"),
        (f'"a": {entry(0, 4)}, "b": {entry(0, 4)}', 4, r"invalid offset for tensor `[ab]`.*without gaps or overlaps"),
        (f'"a": {entry(0, 4)}, "b": {entry(8, 12)}', 12, r"invalid offset for tensor `b`.*without gaps or overlaps"),
        (f'"a": {entry(4, 8)}', 8, r"invalid offset for tensor `a`.*without gaps or overlaps"),
        (f'"a": {entry(-4, 0)}', 0, r"invalid value: integer `-4`"),
        (f'"a": {entry(4, 0, shape=[-1])}, "b": {entry(4, 8)}', 8, r"invalid value: integer `-1`"),
        (f'"a": {entry(0, 4, shape=[-1])}', 4, r"invalid value: integer `-1`"),
        (f'"a": {entry(0, 4)}, "a": {entry(4, 8)}', 8, r"invalid offset for tensor `a`"),
        (f'"a": {entry(0, 4)}, "a": {entry(0, 4, "I32", [1])}', 4, r"'a' is repeated"),
        ('"a": {"dtype": "F32", "shape": [1]}', 4, r"data_offsets"),
    ],
    ids=[
        "overlap",
        "same-place",
        "hollow",
        "hollow-start",
        "negative-offset",
        "backwards",
        "negative-shape",
        "twice",
        "twice-in-one-place",
        "without-offsets",
    ],
)
def test_tensors_that_do_not_fill_the_file_one_by_one(tmp_path, tensors, size, message):
    header = f"{{{tensors}}}".encode()
    data = len(header).to_bytes(8, "little") + header + bytes(size)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=rf"broken header of shard .*model\.safetensors: .*{message}"):
        SafetensorsSource(tmp_path)


def test_a_tensor_in_two_shards(directory):
    second = directory / "model-00002-of-00002.safetensors"
    save_file({"c.weight": torch.zeros(4), "a.weight": torch.zeros(6)}, second)
    with pytest.raises(ValueError, match=r"00002.safetensors holds 1 tensors .* does not put there, such as a.weight"):
        SafetensorsSource(directory)


@pytest.mark.parametrize("name", ["f32", "e8m0", "f4", "i8"])
def test_what_was_read_is_the_readers_own(tmp_path, name):
    """Files are mapped: neither a change of a tensor nor the end of the source may reach another tensor."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    with SafetensorsSource(tmp_path) as source:
        whole, part, shard = source.read(name), source.read_part(name, 1, 2), source.read_shard(name, Shard(0, 1, 2))
        expected = whole.clone()
        for tensor in (whole, part, shard):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "the rest of the file is kept alive"
            tensor.view(torch.uint8).zero_()
        assert same_bits(source.read(name), expected)


@pytest.mark.parametrize("name", ["e8m0", "e4m3", "f4", "f32", "bf16", "i64", "u8"])
def test_a_shard_reads_like_a_slice(tmp_path, name):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with SafetensorsSource(tmp_path) as source:
        whole = source.read(name)
        for dim in range(whole.dim()):
            shard = source.read_shard(name, Shard(dim, 1, whole.shape[dim] - 2))
            assert same_bits(shard, whole.narrow(dim, 1, whole.shape[dim] - 2).contiguous())
            assert shard.is_contiguous()


def advised_random(tensor: torch.Tensor) -> bool:
    """Whether the mapping that holds a tensor is marked for random reads."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= tensor.data_ptr() < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "rr" in line.split()
    raise AssertionError("the tensor is in no mapping")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="mappings are listed on Linux only")
def test_rows_are_read_without_their_surroundings(tmp_path):
    tensors = {name: torch.randint(0, 120, (3000, 40), dtype=torch.uint8) for name in ("by_row", "whole")}
    save_file(tensors | {"by_row": tensors["by_row"].view(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    rows = torch.tensor([2999, 0, 17, 17])
    with SafetensorsSource(tmp_path) as source:
        assert not advised_random(source.view("by_row"))
        for _ in range(2):
            found = source.read_rows("by_row", rows)
            assert torch.equal(found.view(torch.uint8), tensors["by_row"][rows])
            assert advised_random(source.view("by_row"))
            source.close()
    assert torch.equal(source.read_rows("whole", rows), tensors["whole"][rows])


def test_truncation_says_how_much(directory):
    shard = directory / "model-00001-of-00002.safetensors"
    full = shard.read_bytes()
    shard.write_bytes(full[:-10])
    with pytest.raises(ValueError, match=f"expected {len(full)} bytes by its header, found {len(full) - 10}"):
        SafetensorsSource(directory)


def test_unsupported_dtype_is_listed_but_not_read(tmp_path):
    save_file({"x": torch.ones(4).to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.entries()["x"].dtype == "F8_E5M2"
    with pytest.raises(ValueError, match=r"x has dtype F8_E5M2: supported are F64, F32"):
        source.read("x")


@pytest.mark.parametrize("stored", ["F8_E8M0", "U8", "F32", "BF16"])
def test_scale_bytes_are_exponents_whatever_they_are_stored_as(stored):
    name = "layers.0.attn.wq_b.weight"
    source = random_source()
    weight, byte = source.read(name), source.read("layers.0.attn.wq_b.scale")
    exponents = byte.int() - 127
    expected = weight.float() * (2.0 ** exponents.float()).repeat_interleave(128, 0).repeat_interleave(128, 1)
    number = {"F32": torch.float32, "BF16": torch.bfloat16}.get(stored)
    source.put("layers.0.attn.wq_b.scale", stored, byte if number is None else decode_e8m0(byte).to(number))
    assert exponents.float().mean() < -5, "the scales must be far from byte values"
    assert torch.equal(read_float32(source, name), expected)


@pytest.mark.parametrize("stored", ["F8_E8M0", "U8", "F32"])
def test_fp4_scales(stored):
    name = "layers.0.ffn.experts.1.w2.weight"
    source = random_source()
    packed, byte = source.read(name), source.read("layers.0.ffn.experts.1.w2.scale")
    source.put("layers.0.ffn.experts.1.w2.scale", stored, decode_e8m0(byte) if stored == "F32" else byte)
    weight, scale = read_weight(source, name)
    assert same_bits(weight, packed)
    assert same_bits(scale, byte)
    assert torch.equal(read_float32(source, name), dequantize_fp4(packed, decode_e8m0(byte)))


def test_fp4_scale_that_is_no_power_of_two():
    source = random_source()
    shape = source.read("layers.0.ffn.experts.1.w2.scale").shape
    source.put("layers.0.ffn.experts.1.w2.scale", "F32", torch.full(shape, 0.3))
    with pytest.raises(ValueError, match="powers of two"):
        read_weight(source, "layers.0.ffn.experts.1.w2.weight")


def test_read_float32_of_plain_tensors():
    source = random_source()
    ape = read_float32(source, "layers.1.attn.compressor.ape")
    assert torch.equal(ape, source.read("layers.1.attn.compressor.ape"))
    norm = read_float32(source, "norm.weight")
    assert norm.dtype == torch.float32
    assert torch.equal(norm, source.read("norm.weight").float())
    with pytest.raises(ValueError, match=r"tid2eid is stored as I64"):
        read_float32(source, "layers.0.ffn.gate.tid2eid")


def test_ragged_fp8_blocks():
    source = MemorySource({})
    weight = raw(130, 200).clamp(0, 100).view(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    source.put("x.weight", "F8_E4M3", weight)
    source.put("x.scale", "F32", scale)
    values = read_float32(source, "x.weight")
    assert torch.equal(values, dequantize_fp8_block(weight, scale))
    assert torch.equal(values[129, 199], weight[129, 199].float() * 8)
