"""Saved sequences: going on from one equals having computed it all, and what is wrong with a file is named."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from deepseek_attn.cache import files
from deepseek_attn.cache.files import make_digest
from deepseek_attn.cache.pages import OutOfPages
from deepseek_attn.layers.parallel import Parallel
from tests.cache.runner_cases import NUMERICS, compute, poison_free_pages, runner_of
from tests.support.small_models import experts_by_token, prompt
from tests.support.tiers import tiered

SAVED = [(family, n, q) for q in NUMERICS for family, n in (("mixed", 3), ("mixed", 150), ("window", 90), ("v32", 70))]
SAVED += [("v41", 71, numerics) for numerics in ("exact", "official")]


@pytest.mark.parametrize(
    ("family", "length", "numerics"),
    tiered(
        SAVED,
        [("mixed", 150, "exact")],
        quick_on_gpu=[("window", 90, "serving")],
    ),
)
def test_a_saved_sequence_goes_on_in_another_runner(family, length, numerics, tmp_path):
    runner = runner_of(family, numerics)
    tokens = prompt(runner.config, length + 20)
    sequence = runner.sequence(tokens)
    compute(runner, sequence, length)
    sequence.save(tmp_path / "s.safetensors")
    sizes = (7, 1, 1, 11)
    expected = compute(runner, sequence, *sizes)
    sequence.free()
    other = runner_of(family, numerics, max_num_seqs=2, max_model_len=300)
    loaded = other.load_sequence(tmp_path / "s.safetensors")
    assert (loaded.token_ids, loaded.num_computed) == (tokens, length)
    poison_free_pages(other, [loaded.cache])
    assert torch.equal(compute(other, loaded, *sizes), expected)
    loaded.free()
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]
    for pool in other.pools:
        pool.tensor.zero_()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "another model:"),
        ({"numerics": "serving"}, "another model and another numerics and another layout:"),
        ({"max_rollback": 3}, "another layout:"),
        ({"family": "overlap"}, "another model and another layout:"),
    ],
    ids=["weights", "numerics", "rollback", "config"],
)
def test_what_does_not_fit_is_refused(change, named, tmp_path):
    runner = runner_of("mixed")
    sequence = runner.sequence(prompt(runner.config, 70))
    compute(runner, sequence, 70, mtp=False)
    sequence.save(tmp_path / "s")
    sequence.free()
    other = runner_of(**{"family": "mixed"} | change)
    before = other.manager.available_pages()
    with pytest.raises(ValueError, match=named):
        other.load_sequence(tmp_path / "s")
    assert other.manager.available_pages() == before


def test_no_room_to_load(tmp_path):
    runner = runner_of("mixed")
    sequence = runner.sequence(prompt(runner.config, 70))
    compute(runner, sequence, 70, mtp=False)
    sequence.save(tmp_path / "s")
    others = [runner.sequence([5]) for _ in range(3)]
    runner.step([(other, 1) for other in others])
    before = runner.manager.available_pages()
    with pytest.raises(OutOfPages, match="the state pool has 0 free pages"):
        runner.load_sequence(tmp_path / "s")
    assert runner.manager.available_pages() == before
    for other in [sequence, *others]:
        other.free()


# Altered files. Whoever alters one on purpose writes the right digest too: `Contents.to_bytes` does.

LENGTHS = {"mixed": 150, "v32": 130, "v41": 71}  # computed tokens of the saved sequences
PENDING = 20  # tokens more that they have


@dataclass
class Contents:
    """A saved sequence in parts."""

    metadata: dict[str, str]
    tensors: dict[str, torch.Tensor]

    def to_bytes(self) -> bytes:
        metadata = {name: text for name, text in self.metadata.items() if name != "digest"}
        if "digest" in self.metadata:
            metadata["digest"] = make_digest(metadata, sorted(self.tensors.items()))
        return save(self.tensors, metadata)


@lru_cache
def saved_bytes(family: str) -> bytes:
    runner = runner_of(family)
    sequence = runner.sequence(prompt(runner.config, LENGTHS[family] + PENDING))
    compute(runner, sequence, LENGTHS[family])
    with TemporaryDirectory() as directory:
        sequence.save(Path(directory) / "s")
        sequence.free()
        return (Path(directory) / "s").read_bytes()


def contents_of(path: Path) -> Contents:
    with safe_open(path, framework="pt") as file:
        return Contents(file.metadata(), {name: tensor.clone() for name, tensor in load_file(path).items()})


@pytest.fixture
def contents(family: str, tmp_path: Path) -> Contents:
    (tmp_path / "whole").write_bytes(saved_bytes(family))
    return contents_of(tmp_path / "whole")


def assert_refused(family: str, path: Path, message: str) -> None:
    """ValueError of that message with the path, and nothing is held."""
    runner = runner_of(family)
    before = runner.manager.available_pages()
    with pytest.raises(ValueError, match=message) as caught:
        runner.load_sequence(path)
    assert str(path) in str(caught.value)
    assert type(caught.value) is ValueError
    assert len(str(caught.value)) < 1000
    assert runner.manager.available_pages() == before


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Contents], None]:
    def alter(contents: Contents) -> None:
        contents.tensors[name] = change(contents.tensors[name]).contiguous()

    return alter


def ids(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Contents], None]:
    return tensor("token_ids", change)


def last_id(token: int) -> Callable[[Contents], None]:
    return ids(lambda given: torch.cat([given[:-1], torch.tensor([token])]))


def field(name: str, text: str) -> Callable[[Contents], None]:
    return lambda contents: contents.metadata.update({name: text})


ALTERED = {
    "id-99999": (last_id(99999), r"token_ids holds 99999, expected ids in \[0, 96\)"),
    "id-negative": (last_id(-1), "token_ids holds -1"),
    "id-vocab_size": (last_id(96), "token_ids holds 96"),
    "ids-float": (ids(torch.Tensor.double), r"token_ids is F64 \[170\], expected I64 \[n\]"),
    "ids-int32": (ids(torch.Tensor.int), "token_ids is I32"),
    "ids-2d": (ids(lambda given: given[None]), r"token_ids is I64 \[1, 170\]"),
    "ids-scalar": (ids(lambda given: given[0]), r"token_ids is I64 \[\]"),
    "ids-many": (ids(lambda given: given.repeat(1000)), "170000 tokens exceed max_model_len=640; raise max_model_len"),
    "ids-few": (ids(lambda given: given[:149]), "num_tokens is '150', expected a whole number from 0 to 149"),
    "ids-none": (lambda contents: contents.tensors.pop("token_ids"), "missing 'token_ids'"),
    **{
        f"num_tokens-{text[:12]}": (field("num_tokens", text), "num_tokens is .*, expected .* from 0 to 170")
        for text in (
            "1000000000000", "171", "-1", "150.0", "1.5e2", "true", "null", "", "[150]", " 150", "150\n", "\u0661",
            "1_5", "nan", "[" * 100_000, "9" * 5000,
        )
    },
    "num_tokens-of-fewer-pages": (
        lambda contents: contents.metadata.update(num_tokens="126", low_water="110"), "for num_tokens=126"
    ),
    "low_water-behind-the-window": (field("low_water", "0"), "low_water is '0', expected .* from 134 to 150"),
    "low_water-ahead": (field("low_water", "151"), "low_water is '151'"),
    "one-page-for-all": (
        tensor("layers.0/window", lambda pages: pages[:1]),
        r"layers.0/window is U8 \[1, 32768\], expected U8 \[2, 32768\] for num_tokens=150",
    ),
    "pages-more": (tensor("layers.1/index", lambda pages: pages.repeat(2, 1)), r"layers.1/index is U8 \[2, "),
    "pages-none": (tensor("layers.1/state", lambda pages: pages[:0]), r"layers.1/state is F32 \[0, "),
    "pages-short": (tensor("mtp.0/window", lambda pages: pages[:, :-1]), r"mtp.0/window is U8 \[2, 32767\]"),
    "pages-flat": (tensor("layers.3/state", torch.flatten), r"layers.3/state is F32 \[8192\]"),
    "pages-int8": (tensor("layers.2/compressed", lambda pages: pages.view(torch.int8)), "layers.2/compressed is I8"),
    "pages-float64": (tensor("layers.2/state", torch.Tensor.double), "layers.2/state is F64"),
    "pool-absent": (lambda contents: contents.tensors.pop("layers.2/state"), "tensors .*missing 'layers.2/state'"),
    "pool-unknown": (
        lambda contents: contents.tensors.update({"layers.99/window": torch.zeros(3)}), "unknown 'layers.99/window'"
    ),
    "field-unknown": (field("page_size", "64"), "metadata .*unknown 'page_size'"),
    **{
        f"{name}-absent": (lambda contents, name=name: contents.metadata.pop(name), f"missing '{name}'|format is None")
        for name in ("format", "num_tokens", "low_water", "digest", "model", "numerics", "layout", "rank")
    },
    "format-other": (field("format", "deepseek-attn sequence 1"), "its format is 'deepseek-attn sequence 1'"),
    "model-other": (field("model", "0" * 64), "saved with another model"),
    "rank-other": (field("rank", "0 of 2"), "saved with another rank"),
}  # fmt: skip


@pytest.mark.parametrize("family", ["mixed"])
@pytest.mark.parametrize("name", ALTERED)
def test_altered_contents(name, family, contents, tmp_path):
    alter, message = ALTERED[name]
    alter(contents)
    (tmp_path / "altered").write_bytes(contents.to_bytes())
    assert_refused(family, tmp_path / "altered", message)


@pytest.mark.parametrize("family", ["v32"])
@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (last_id(512), r"token_ids holds 512, expected ids in \[0, 512\)"),
        (field("num_tokens", "128"), r"layers.0/latent is U8 \[3, .* expected U8 \[2, .* for num_tokens=128"),
        (field("low_water", "1"), "low_water is '1', expected a whole number from 0 to 0"),
        (tensor("layers.0/latent", lambda pages: pages[:1]), "layers.0/latent is U8"),
        (tensor("mtp.0/index", lambda pages: pages[:, :1]), r"mtp.0/index is U8 \[3, 1\]"),
    ],
    ids=["id", "pages", "low_water", "one-page", "width"],
)
def test_altered_contents_of_v32(alter, message, family, contents, tmp_path):
    alter(contents)
    (tmp_path / "altered").write_bytes(contents.to_bytes())
    assert_refused(family, tmp_path / "altered", message)


def header(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """The file with another header, whatever it says of the bytes behind it."""

    def alter(whole: bytes) -> bytes:
        end = 8 + struct.unpack("<Q", whole[:8])[0]
        parsed = json.loads(whole[8:end])
        change(parsed)
        text = json.dumps(parsed).encode()
        return struct.pack("<Q", len(text)) + text + whole[end:]

    return alter


class Command:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def zip_of(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Command()))
    return path.read_bytes()


CONTAINERS = {
    "empty": lambda whole: b"",
    "text": lambda whole: b"not safetensors",
    "pickle": lambda whole: pickle.dumps(Command()),
    "longer": lambda whole: whole + b"x",
    "header-of-2**63-bytes": lambda whole: struct.pack("<Q", 2**63) + whole[8:],
    "brackets": lambda whole: struct.pack("<Q", 100_000) + b"[" * 100_000,
    "negative-offset": header(lambda parsed: parsed["token_ids"].update(data_offsets=[-8, 8])),
    "shared-bytes": header(lambda parsed: parsed["token_ids"].update(parsed["layers.0/window"])),
    "shape-of-1e12": header(lambda parsed: parsed["token_ids"].update(shape=[10**12])),
    "shape-overflows": header(lambda parsed: parsed["token_ids"].update(shape=[2**33, 2**33])),
    "metadata-not-strings": header(lambda parsed: parsed["__metadata__"].update(num_tokens=150)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_altered_containers(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").write_bytes(CONTAINERS[name](saved_bytes("mixed")))
    assert_refused("mixed", tmp_path / "s", "cannot be read as safetensors")
    assert not (tmp_path / "executed").exists()


def test_what_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "fifo"):
        assert_refused("mixed", path, "no saved sequence at")
    zip_of(tmp_path / "zip")
    assert_refused("mixed", tmp_path / "zip", "cannot be read as safetensors")
    assert_refused("mixed", tmp_path / ("x" * 300), "cannot be read")
    assert not (tmp_path / "executed").exists()


def test_damage_anywhere(tmp_path):
    """One bit of the header, of a number or of a page; a part of the file."""
    whole, rng = saved_bytes("mixed"), random.Random(0)
    header_bits = [rng.randrange(8 * (8 + struct.unpack("<Q", whole[:8])[0])) for _ in range(40)]
    for bit in header_bits + [rng.randrange(8 * len(whole)) for _ in range(20)]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "s").write_bytes(damaged)
        assert_refused("mixed", tmp_path / "s", "cannot be (read|loaded)")
    for length in (0, 7, 8, 9, 1000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "s").write_bytes(whole[:length])
        assert_refused("mixed", tmp_path / "s", "cannot be read as safetensors")


@pytest.mark.parametrize("family", tiered(["mixed", "v32", "v41"], ["mixed", "v32"]))
@experts_by_token()
def test_nan_in_pages_stays_in_its_sequence(family, contents, tmp_path):
    """A page holds any values, as a model's may: other sequences of the step, and the pages' next owners, see none."""
    runner = runner_of(family)
    for name, tensor in contents.tensors.items():
        if name != "token_ids":
            tensor.view(torch.uint8).fill_(0xFF)
    (tmp_path / "nan").write_bytes(contents.to_bytes())
    tokens = prompt(runner.config, 40, seed=1)

    def compute_beside(path: Path) -> list[torch.Tensor]:
        loaded, other = runner.load_sequence(path), runner.sequence(tokens)
        rows = [runner.step([(loaded, n), (other, 20)]).rows for n in (PENDING - 1, 1)]
        loaded.free()
        other.free()
        after = runner.sequence(tokens)
        last = compute(runner, after, 40, mtp=False)
        after.free()
        assert rows[0][0].isnan().any() == (path.name == "nan")
        return [rows[0][1], rows[1][1], last]

    for actual, expected in zip(compute_beside(tmp_path / "nan"), compute_beside(tmp_path / "whole"), strict=True):
        assert torch.equal(actual, expected)
    for one in runner.pools:
        one.tensor.zero_()


def test_an_interrupted_load_holds_nothing(tmp_path, monkeypatch):
    runner = runner_of("mixed")
    (tmp_path / "s").write_bytes(saved_bytes("mixed"))
    before, calls = runner.manager.available_pages(), []

    def interrupt(*args):
        calls.append(runner.manager.available_pages())
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    original = files._page_index
    monkeypatch.setattr(files, "_page_index", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.load_sequence(tmp_path / "s")
    assert calls[0] != before  # it had begun
    assert runner.manager.available_pages() == before


def test_a_full_disk_leaves_the_older_file(tmp_path):
    runner = runner_of("mixed")
    (tmp_path / "s").write_bytes(saved_bytes("mixed"))
    sequence = runner.load_sequence(tmp_path / "s")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ValueError, match="cannot be written"):
            sequence.save(tmp_path / "s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "s").read_bytes() == saved_bytes("mixed")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    sequence.save(tmp_path / "again")
    sequence.free()
    assert contents_of(tmp_path / "again").metadata == contents_of(tmp_path / "s").metadata


def test_each_rank_has_a_file_of_its_own(tmp_path, monkeypatch):
    runner = runner_of("window")
    monkeypatch.setattr(runner, "parallel", replace(runner.parallel, rank=1, world=2))
    sequence = runner.sequence([1, 2, 3])
    sequence.save(tmp_path / "s")
    runner.load_sequence(tmp_path / "s").free()
    monkeypatch.setattr(runner, "parallel", Parallel(rank=0, world=2))
    assert_refused("window", tmp_path / "s", "saved with another rank")


@pytest.mark.parametrize("length", [0, 1])
def test_sequences_without_computed_tokens(length, tmp_path):
    runner = runner_of("mixed")
    sequence = runner.sequence([5])
    sequence.truncate(length)
    sequence.save(tmp_path / "s")
    loaded = runner.load_sequence(tmp_path / "s")
    assert (loaded.token_ids, loaded.num_computed) == ([5][:length], 0)


def test_pages_beyond_the_computed_tokens_are_not_saved(tmp_path):
    """As after a step that ran ahead: the file is that of a sequence which never had them."""
    runner = runner_of("mixed")
    (tmp_path / "s").write_bytes(saved_bytes("mixed"))
    sequence = runner.load_sequence(tmp_path / "s")
    runner.manager.reserve([(sequence.cache, 200)])
    sequence.save(tmp_path / "ahead")
    sequence.free()
    assert contents_of(tmp_path / "ahead").metadata == contents_of(tmp_path / "s").metadata  # with the digest
