"""Joining ranks: what is refused, and the command line as ranks, started by itself and by torchrun."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch

from deepseek_attn.checkpoint import RandomSource, SafetensorsSource, TensorInfo, read_weight, write_checkpoint
from deepseek_attn.checkpoint.stored_weights import stored_shards
from deepseek_attn.cli import main
from deepseek_attn.config.model import AnyConfig, ModelConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.impls.options import AttentionOptions
from deepseek_attn.kernels.linear.formats import dequantize_weight
from deepseek_attn.layers.launch import RankFailed, check_launch, listen_on
from deepseek_attn.layers.parallel import Parallel, launched
from deepseek_attn.layers.split import check_split
from deepseek_attn.layers.weights import Shard, checkpoint_slots
from deepseek_attn.models.families import get_family
from deepseek_attn.runner.model_runner import ModelRunner
from tests.layers.parallel import cases
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required


def torchrun(world: int, *command: str) -> list[str]:
    """``--standalone`` finds a free port."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return [*run, *command]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = cases.v4_config()
    return write_checkpoint(RandomSource(config, 4), config, tmp_path_factory.mktemp("checkpoint") / "model")


@exhaustive_on_cpu
@pytest.mark.parametrize("launcher", tiered(["own", "torchrun"], ["own"]))
def test_the_command_line_as_ranks(checkpoint, capfd, launcher):
    flags = ["generate", "--model", str(checkpoint), "--token-ids", "5,9,17,4,200", "--max-tokens", "4", "--ignore-eos"]
    flags += ["--device", "cpu", "--temperature", "0"]
    assert main(flags) == 0
    alone = capfd.readouterr().out
    assert alone.strip()
    flags += ["--tensor-parallel", "2"]
    if launcher == "own":
        with pytest.raises(SystemExit) as end:
            main(flags)
        assert end.value.code == 0
    else:
        command = torchrun(2, "-m", "deepseek_attn", *flags)
        subprocess.run(command, timeout=900, check=True, stdin=subprocess.DEVNULL)
    assert capfd.readouterr().out == alone


def test_a_preset_that_two_ranks_can_share():
    """docs/parallel.md names it."""
    numerics, ranks = numerics_for(ModelConfig.from_preset("tiny_gpu"), "exact", None), Parallel(0, 2, False)
    check_split(ModelConfig.from_preset("tiny_gpu"), numerics, ranks)
    with pytest.raises(ValueError, match="cannot be split over 2 ranks"):
        check_split(ModelConfig.from_preset("tiny"), numerics, ranks)


@pytest.mark.exhaustive
def test_a_preset_over_two_ranks(tmp_path, capsys):
    """Lines with the token ids: the text of random weights may be empty."""
    assert main(["make-checkpoint", "--config", "tiny_gpu", "--out", str(tmp_path / "model")]) == 0
    (tmp_path / "prompts").write_text("[5, 9, 17, 4, 200]\n[7, 8]\n")
    capsys.readouterr()
    flags = ["generate", "--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts")]
    flags += ["--device", "cpu", "--temperature", "0", "--max-tokens", "8", "--ignore-eos"]
    assert main(flags) == 0
    alone = capsys.readouterr().out
    command = [sys.executable, "-m", "deepseek_attn", *flags, "--tensor-parallel", "2"]
    shared = subprocess.run(command, capture_output=True, timeout=900, check=True, text=True).stdout
    assert shared == alone
    assert shared.count('"token_ids": [') == 2


@pytest.mark.exhaustive
def test_two_nodes(checkpoint, capsys):
    """torchrun on each of two nodes, joined over the loopback."""
    flags = ["generate", "--model", str(checkpoint), "--token-ids", "5,9,17,4,200", "--max-tokens", "8", "--ignore-eos"]
    flags += ["--device", "cpu", "--temperature", "0"]
    assert main(flags) == 0
    alone = capsys.readouterr().out.encode()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    interface = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    run += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = ["-m", "deepseek_attn", *flags, "--tensor-parallel", "2", "--rank-interface", interface]
    nodes = [
        subprocess.Popen([*run, "--node-rank", str(rank), *command], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        for rank in range(2)
    ]
    assert [node.communicate(timeout=900)[0] for node in nodes] == [alone, b""]
    assert [node.returncode for node in nodes] == [0, 0]


@pytest.mark.exhaustive
def test_the_prompts_of_rank_0(checkpoint, tmp_path, capsys):
    """Ranks take each prompt at the same step; the first one writes the lines."""
    lines = ["[5, 9, 17]", "[4, 200]", "[999]", '{"token_ids": [7], "id": "x", "max_tokens": 2}', "[8, 8, 8, 8]", "[1]"]
    (tmp_path / "prompts").write_text("\n".join(lines))
    flags = ["generate", "--model", str(checkpoint), "--max-tokens", "6", "--ignore-eos", "--device", "cpu"]
    flags += ["--temperature", "0", "--max-num-seqs", "2"]
    assert main([*flags, "--prompts", str(tmp_path / "prompts"), "--out", str(tmp_path / "alone")]) == 1
    lines = (tmp_path / "alone").read_text().splitlines()
    (tmp_path / "ranks").write_text(f"{lines[1]}\n")
    command = [sys.executable, "-m", "deepseek_attn", *flags, "--tensor-parallel", "2", "--prompts", "-", "--resume"]
    with (tmp_path / "prompts").open() as prompts:
        found = subprocess.run(
            [*command, "--out", str(tmp_path / "ranks")], capture_output=True, timeout=900, check=False, stdin=prompts
        )
    assert (found.returncode, found.stderr) == (1, b"")
    assert found.stdout.decode() == capsys.readouterr().out.replace("alone", "ranks")
    assert sorted((tmp_path / "ranks").read_text().splitlines()) == sorted(lines)


def check(config: AnyConfig, world: int, dp_attention: bool = False, numerics: str = "serving") -> None:
    check_split(config, numerics_for(config, numerics), Parallel(0, world, dp_attention))


def test_impossible_splits_are_listed_together():
    config = ModelConfig.from_preset("v4_flash")
    for world in (1, 2, 4, 8):
        check(config, world)
        check(ModelConfig.from_preset("v41_flash"), world)
    with pytest.raises(ValueError, match=r"split over 3 ranks(.*\n)+.*n_routed_experts = 256.*(.*\n)+.*o_groups = 8"):
        check(config, 3)
    with pytest.raises(ValueError, match=r"2048 would leave 64 per rank, which FP8 blocks of 128") as raised:
        check(config, 32)
    assert "o_groups = 8 is not a multiple of 32" in str(raised.value)
    check(config.replace(o_groups=1), 4, dp_attention=True)
    with pytest.raises(ValueError, match="o_groups = 1"):
        check(config.replace(o_groups=1), 4)
    for world in (16, 64):
        check(ModelConfig.from_preset("v4_pro"), world, dp_attention=True)
    v32 = ModelConfig.from_preset("v32")
    check(v32, 8)
    with pytest.raises(ValueError, match=r"moe_intermediate_size \* n_shared_experts = 2048 would leave 64"):
        check(v32, 32)
    tiny = ModelConfig.from_preset("tiny_v41").replace(moe_intermediate_size=96)
    check(tiny, 2, numerics="official")
    with pytest.raises(ValueError, match="FP8 blocks of 128"):
        check(tiny, 2)
    with pytest.raises(ValueError, match="dspark_n_routed_experts = 4 is not a multiple of 8"):
        check(tiny, 8)


@pytest.mark.parametrize(("total", "unit", "world"), [(2304, 128, 8), (2304, 128, 4), (2304, 32, 8), (60, 1, 5)])
def test_shards_of_all_ranks_are_the_whole(total, unit, world):
    shards = [Parallel(rank, world).shard(1, total, unit) for rank in range(world)]
    sizes = [required(shard).size for shard in shards]
    assert [required(shard).start for shard in shards] == [sum(sizes[:rank]) for rank in range(world)]
    assert sum(sizes) == total
    assert all(size % unit == 0 for size in sizes)
    assert max(sizes) - min(sizes) == (unit if total % (world * unit) else 0)


def test_a_runner_refuses_before_it_loads(checkpoint):
    with pytest.raises(ValueError, match="num_attention_heads = 4 is not a multiple of 3"):
        ModelRunner.from_pretrained(checkpoint, parallel=Parallel(0, 3), device="cpu")


def test_launches_that_do_not_fit(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert check_launch(1, "cpu") == (0, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"2 ranks were asked for, and 1 processes.*torchrun --nproc-per-node 2"):
        check_launch(2, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="1 ranks were asked for, and 2 processes"):
        check_launch(1, "cpu")
    with pytest.raises(ValueError, match="each has a GPU of its own"):
        check_launch(2, "cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "-1")
    with pytest.raises(ValueError, match=r"LOCAL_RANK is '-1': torchrun sets it"):
        check_launch(2, "cpu")
    seconds: Any
    for seconds in (0, -1, float("nan"), float("inf"), True, "9"):
        with pytest.raises(ValueError, match="supported are 1 to 604800"), launched(2, "cpu", timeout_seconds=seconds):
            pass
    with pytest.raises(ValueError, match=r"no network interface 'eth99': this machine has .*lo"):
        listen_on("eth99")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["65"], "up to 64 ranks run on one machine"),
        (["2", "--rank-timeout", "nan"], "--rank-timeout nan: must be 1 to 604800"),
        (["2", "--rank-interface", "eth99"], "no network interface 'eth99'"),
    ],
)
def test_ranks_that_are_not_started(monkeypatch, capsys, flags, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["generate", "--token-ids", "5", "--tensor-parallel", *flags]) == 2
    assert message in capsys.readouterr().err


def test_alone_nothing_is_exchanged(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with launched(1, "cpu") as (parallel, device):
        x = torch.randn(3, 4)
        assert parallel.sum(x) is x
        assert parallel.gather_columns(x) is x
        assert parallel.share(5) == 5
        assert parallel.shard(0, 10) is None
        assert parallel.fresh_seed() is None
        assert device == torch.device("cpu")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", "bf16"])
def test_a_part_is_that_part_of_the_whole(tmp_path, expert_dtype):
    config = cases.v4_config()
    source = RandomSource(config, 1, expert_dtype=expert_dtype)
    directory = write_checkpoint(source, source.config, tmp_path / "model")
    with SafetensorsSource(directory) as files:
        for name in ("layers.0.ffn.experts.1.w2.weight", "layers.0.attn.wo_b.weight", "embed.weight"):
            whole = dequantize_weight(*read_weight(files, name))
            for dim, size in enumerate(whole.shape):
                for reader in (files, source):
                    if size % 128 == 0 or name == "embed.weight":
                        unit = size // (size // 128 or 4) if size % 128 == 0 else size // 4
                        shard = Shard(dim, size - unit, unit)
                        part = dequantize_weight(*read_weight(reader, name, shard))
                        assert torch.equal(part, whole.narrow(dim, size - unit, unit))


def test_an_error_within_a_step_ends_one_of_several_ranks():
    """Engines go on after any Exception; the other ranks would wait for ever."""
    for parallel, kind in ((Parallel.single(), MemoryError), (Parallel(1, 2), RankFailed)):
        with pytest.raises(kind, match="full"), parallel.together():
            raise MemoryError("memory is full")
    assert not issubclass(RankFailed, Exception)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 8])
def test_ranks_have_all_of_v41_by_its_headers(world):
    """Each tensor of the published checkpoint in whole blocks: on all ranks, split over them, or an expert of one."""
    config = ModelConfig.from_preset("v41_flash")
    headers, parts, numerics = RandomSource(config).entries(), defaultdict(list), numerics_for(config, "serving")
    for rank in range(world):
        ranks = Parallel(rank, world)
        family = get_family(
            config, numerics, torch.bfloat16, torch.device("meta"), AttentionOptions("reference"), ranks
        )
        for name, slot in checkpoint_slots(family.build(None, False, 16)).items():
            if not slot.elsewhere:
                parts[name].append(slot)
    assert {name for name in headers if not name.endswith(".scale")} == set(parts)
    for name, slots in parts.items():
        shards = [slot.shard for slot in slots]
        assert len(slots) == (1 if ".experts." in name else world)
        if shards[0] is not None:
            assert sum(shard.size for shard in shards) == slots[0].shape[shards[0].dim]
            for shard in shards:
                stored_shards(headers[name], shard, slots[0].block)
    split = {re.sub(r"\.\d+\.", ".N.", name) for name, slots in parts.items() if slots[0].shard is not None}
    attention = {f"attn.{part}" for part in ("attn_sink", "wo_a.weight", "wo_b.weight", "wq_b.weight")}
    block = attention | {f"ffn.shared_experts.w{i}.weight" for i in (1, 2, 3)}
    assert split == {f"{part}.N.{name}" for part in ("layers", "mtp") for name in block} | {
        "embed.weight", "head.weight", "mtp.N.markov_head.embed.weight", "mtp.N.markov_head.head.weight"
    }  # fmt: skip


def test_parts_that_cut_a_block():
    with pytest.raises(ValueError, match=r"64 rows or columns from 64 on.*whole blocks of 128"):
        stored_shards(TensorInfo("F8_E4M3", (256, 256), 256 * 256), Shard(0, 64, 64))
    assert stored_shards(TensorInfo("F8_E4M3", (256, 256), 256 * 256), Shard(0, 64, 64), 32).scale == Shard(0, 2, 2)
    with pytest.raises(ValueError, match="whole blocks of 32"):
        stored_shards(TensorInfo("I8", (256, 128), 256 * 128), Shard(1, 16, 16))
    assert stored_shards(TensorInfo("I8", (256, 128), 256 * 128), Shard(0, 3, 5)) == (Shard(0, 3, 5), Shard(0, 3, 5))
    assert stored_shards(TensorInfo("I8", (256, 128), 256 * 128), Shard(1, 64, 32)) == (
        Shard(1, 32, 16),
        Shard(1, 2, 1),
    )
