"""A newcomer's mistakes on the command line: a message that says what is wrong, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from deepseek_attn.checkpoint import write
from deepseek_attn.checkpoint.safetensors_source import SafetensorsSource
from deepseek_attn.cli import COMMANDS, main
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.data import SMALL_CHECKPOINT
from deepseek_attn.runner import TokenRecords
from tests.support.exit_codes import exit_code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    config = ModelConfig.from_preset("tiny").replace(num_hidden_layers=1, compress_ratios=[4, 0], num_hash_layers=0)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    assert main(["make-checkpoint", "--config", str(folder / "config.json"), "--out", str(folder / "model")]) == 0
    return folder / "model"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, but for token ids, a file and a folder with something in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.json").write_text("[[1, 2, 3]]")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").write_text("")
    (tmp_path / "bytes").write_bytes(b"h\xe9llo\n")
    (tmp_path / "surrogate").write_text('"good"\n"a\\ud800"\n')
    (tmp_path / "link").symlink_to("link")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    return tmp_path


def refused(capsys, place, *command: str) -> str:
    """The message of a command that fails as wrong input should."""
    before = {path: path.lstat().st_mtime_ns for path in place.rglob("*")}
    code = exit_code(main, list(command))
    captured = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in captured.err
    assert captured.err.count("error: ") == 1
    assert {path: path.lstat().st_mtime_ns for path in place.rglob("*")} == before
    return captured.err


# Each flag that reads or writes a file or a folder, and each that takes JSON: a wrong one, and a part of the message.
# {MODEL} is a checkpoint.
FILES = {
    "generate": [
        ("--model broken --prompt x", "broken/config.json): not valid JSON at line 1"),
        ("--model unweighted --prompt x", "no safetensors checkpoint in unweighted"),
        ("--model tiny --prompt x", "'tiny' is a preset, a config without weights"),
        ("--model file --prompt x", "'file' is a file; a checkpoint is a directory"),
        ("--model {MODEL} --prompts file --out full", "'full' cannot be written: it is a folder"),
        ("--model {MODEL} --prompts keys", "--prompts keys: line 1: no such keys: bogus; there are prompt, token_ids"),
        ("--model {MODEL} --messages broken.json", "--messages broken.json: not valid JSON at line 1, column 7"),
        ("--model {MODEL} --messages object.json", "messages must be a non-empty list such as"),
        ("--model {MODEL} --messages full", "--messages full: Is a directory"),
        ("--model {MODEL} --messages king", "role 'king' is not supported (supported: system, developer"),
        ("--model {MODEL} --chat --prompt x --tools broken.json", "--tools broken.json: not valid JSON"),
        ("--model {MODEL} --chat --prompt x --tools object.json", "--tools object.json: expected a JSON list of"),
        ("--model {MODEL} --prompt x --json-schema broken.json", "--json-schema broken.json: not valid JSON at line 1"),
        ('--model {MODEL} --prompt x --json-schema {"a":', "--json-schema: not valid JSON at line 1, column 6"),
        ("--model {MODEL} --prompt x --json-schema none", "--json-schema none: No such file"),
        ("--model {MODEL} --prompt x --grammar bytes", "--grammar bytes: not UTF-8 text"),
        ("--model {MODEL} --prompt x --grammar empty", "grammar='': must be text that is not empty"),
        ("--model {MODEL} --prompt x --records file", "the folder 'file' cannot be made"),
        ("--model {MODEL} --prompt x --records no/o.safetensors", "the folder 'no' does not exist"),
        ("--model {MODEL} --prompt x --replay none", "--replay none: no such file or folder: write it with --records"),
        ("--model {MODEL} --prompt x --replay file", "'file' cannot be read as records"),
        ("--model {MODEL} --prompt x --profile full", "no trace can be written to full: it is a folder"),
        ("--model {MODEL} --prompts file --profile file", "--profile file would replace a file that --prompts reads"),
    ],
    "score": [
        ("--model full --token-ids ids.json --out o", "no config.json in directory 'full'"),
        ("--model {MODEL} --token-ids broken.json --out o", "--token-ids broken.json: not valid JSON at line 1"),
        ("--model {MODEL} --token-ids object.json --out o", "expected a non-empty list of token-id lists, such as"),
        ("--model {MODEL} --token-ids ids.json --out ids.json", "--out ids.json would replace a file that --token-ids"),
        ("--model {MODEL} --token-ids ids.json --out o --records file", "the folder 'file' cannot be made"),
        ("--model {MODEL} --token-ids ids.json --out o --replay none", "--replay none: no such file or folder"),
    ],
    "inspect": [
        ("--model broken --prompt x --out o.html", "broken/config.json): not valid JSON"),
        ("--model {MODEL} --prompt x --out full", "--out full: it is a folder"),
        ("--model {MODEL} --prompt x --out o.html --json no/o.json", "--json no/o.json: the folder 'no'"),
    ],
    "info": [
        ("--plans absent --gpu h100", "'absent' is not a directory, JSON file or preset"),
        ("--plans broken.json --gpu h100", "invalid config (broken.json): not valid JSON at line 1"),
        ("--plans full --gpu h100", "no config.json in directory 'full'"),
    ],
    "plan": [
        ("--model broken.json", "invalid config (broken.json): not valid JSON at line 1, column 7"),
        ("--model object.json", "model_type is None with architectures None, supported is"),
    ],
    "warmup": [("--model broken.json --gpu h100", "invalid config (broken.json): not valid JSON")],
    "make-checkpoint": [
        ("--config ids.json --out o", "invalid config (ids.json): expected a JSON object, got list"),
        ("--config bytes --out o", "invalid config (bytes): not UTF-8 text at byte 1"),
        ("--out full", "full exists and is not an empty directory"),
    ],
    "crop": [
        ("--model none --out o --layers 0", "no checkpoint at 'none'"),
        ("--model unweighted --out o --layers 0", "no safetensors checkpoint in unweighted"),
        ("--model {MODEL} --out full --layers 0", "full exists and is not an empty directory"),
        ("--model {MODEL} --out full --layers 0 --overwrite", "only what `deepseek-attn crop` wrote is overwritten"),
        ("--model {MODEL} --out {MODEL} --layers 0 --overwrite", "would replace a file that --model reads"),
        ("--model {MODEL} --out o --layers 7", "layers=[7]: deepseek_v4 has layers 0 to 0 here"),
        ("--model {MODEL} --out o --without wings", "without wings: supported are mtp, engram, vision"),
    ],
    "port-check": [
        ("v4_moe --outputs none", "none"),
        ("v4_moe --outputs file", "'file' is not a readable safetensors file"),
        ("file --list", "file is not a safetensors file"),
        ("banana --write o", "no fixture banana: there are v4_swa_layer"),
        ("--write file", "file is a file; choose another place"),
        ("--write o --model none --layers 0", "no checkpoint at 'none'"),
        ("--write o --model {MODEL} --layers 0,9", "layers [9] do not exist: the model has layers 0 to 0"),
    ],
    "bench": [
        ("op --plot no/o.svg", "--plot no/o.svg: the folder 'no' does not exist"),
        ("layer --model broken.json", "invalid config (broken.json): not valid JSON"),
        ("model --model full", "no config.json in directory 'full'"),
        ("tune linear --out no/o.json", "--out no/o.json: the folder 'no' does not exist"),
        ("tune banana", "no family of kernels 'banana': choose from attention"),
        ("engine --model broken.json", "invalid config (broken.json): not valid JSON"),
        ("structured --model full", "no tokenizer.json in full"),
        ("memory --model broken.json --limits 1:2", ""),
    ],
    "train": [
        ("--config broken.json --text bytes", "invalid config (broken.json): not valid JSON"),
        ("--config list.json --text bytes", "expected a JSON object, got list"),
        ("--device tpu --text bytes", "device 'tpu': supported are cpu, cuda and cuda:N"),
        ("--text file none", "--text none: No such file"),
        ("--task copy --out full", "full exists and is not an empty directory"),
    ],
    "experiment": [
        ("run broken.json", "experiment broken.json: not valid JSON at line 1, column 7"),
        ("run list.json", "expected a JSON object, got list"),
        ("run smoke --out file", "file exists and is not an empty directory"),
        ("resume smoke --out full", "'full' holds no results of experiment 'smoke'"),
        ("report smoke --out none --against none", "no results in 'none'"),
    ],
}


def test_every_command_has_wrong_files():
    assert FILES.keys() == COMMANDS.keys()


@pytest.mark.parametrize(
    ("command", "flags", "message"), [(command, *case) for command, cases in FILES.items() for case in cases]
)
def test_files(checkpoint, place, capsys, command, flags, message):
    (place / "broken.json").write_text('{"a": ')
    (place / "object.json").write_text('{"a": 1}')
    (place / "list.json").write_text("[1, 2]")
    (place / "king").write_text('[{"role": "king", "content": "x"}]')
    (place / "keys").write_text('{"prompt": "x", "bogus": 1}')
    for name in ("broken", "unweighted"):
        (place / name).mkdir()
        shutil.copy(checkpoint / "config.json", place / name)
    (place / "broken" / "config.json").write_text("{")
    words = [str(checkpoint) if word == "{MODEL}" else word for word in flags.split()]
    assert message in refused(capsys, place, command, *words)


SCORE = ("--token-ids", "ids.json", "--out", "o.safetensors")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--token-ids", "ids.json", "--out", "."), "--out .: it is a folder"),
        (("--token-ids", "ids.json", "--out", "no/o"), "the folder 'no' does not exist"),
        (("--token-ids", "ids.json", "--out", "file/o"), "the folder 'file' does not exist"),
        (("--token-ids", "full", "--out", "o"), "--token-ids full: Is a directory"),
        (("--token-ids", "none", "--out", "o"), "--token-ids none: No such file"),
        ((*SCORE, "--device", "banana"), "device 'banana': supported are cpu, cuda and cuda:N"),
        ((*SCORE, "--device", "meta"), "device 'meta': supported are cpu, cuda and cuda:N"),
        ((*SCORE, "--device", "cpu:3"), "device 'cpu:3': supported are cpu, cuda and cuda:N"),
        ((*SCORE, "--device", ""), "argument --device: it is empty"),
        ((*SCORE, "--model", ""), "argument --model: it is empty"),
        (("--token-ids", "ids.json", "--out", ""), "argument --out: it is empty"),
        ((*SCORE, "--kv-cache-bytes", "1e99"), "'1e99' is not an amount of memory"),
        ((*SCORE, "--kv-cache-bytes", "9" * 5000), "99' is not an amount of memory"),
        ((*SCORE, "--kv-cache-bytes", "0"), "'0' is not an amount of memory"),
        ((*SCORE, "--max-model-len", "9" * 25), f"argument --max-model-len: '{'9' * 25}' is not a 64-bit integer"),
        ((*SCORE, "--max-model-len", "9" * 5000), "is not a 64-bit integer"),
        ((*SCORE, "--max-model-len", "99999"), "max_model_len=99999 exceeds the model's"),
        ((*SCORE, "--prefill-workspace-rows", str(2**63 - 1)), "out of memory"),
        ((*SCORE, "--kv-cache-bytes", "1e400GB"), "'1e400GB' is not an amount of memory"),
        ((*SCORE, "--kv-cache-bytes", "1.2.3GB"), "'1.2.3GB' is not an amount of memory"),
        ((*SCORE, "--max-num-seqs", "99999999999"), "bytes of caches for max_num_seqs=99999999999"),
        ((*SCORE, "--max-num-seqs", "1", "--max-num-batched-tokens", "9999999999999"), "lower"),
    ],
)
def test_score(checkpoint, place, capsys, flags, message):
    assert message in refused(capsys, place, "score", "--model", str(checkpoint), *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompts", "full"), "--prompts full: Is a directory"),
        (("--prompts", "none"), "--prompts none: No such file"),
        (("--prompt", "x", "--device", "tpu"), "device 'tpu'"),
        (("--prompt", "x", "--speculate", "99"), "--speculate 99: must be 0 to 15"),
        (("--prompt", "x", "--speculate", "-1"), "--speculate -1: must be 0 to 15"),
        (("--prompt", "x" * 99, "--max-model-len", "20"), "a sequence of 100 tokens exceeds max_model_len=20"),
        (("--prompt", "x", "--profile", "no/trace.json"), "name a file in an existing, writable folder"),
        (("--prompt", "x", "--profile", "link"), "Too many levels of symbolic links"),
        (("--prompts", ""), "argument --prompts: it is empty"),
        (("--prompt", "\udc80"), "character 0 of the text is '\\udc80', a lone surrogate"),
        (("--chat", "--prompt", "x", "--system", "\udc80"), "a lone surrogate"),
        (("--prompts", "bytes"), "--prompts bytes: line 1: not UTF-8 text"),
        (("--prompts", "file", "--out", "no/o"), "'no/o' cannot be written: the folder 'no' does not exist"),
        (("--prompts", "file", "--out", "file"), "would replace a file that --prompts reads: name another place"),
        (("--prompts", "file", "--out", "bytes"), "'bytes' is not empty: go on from its lines (--resume), or name"),
        (
            ("--prompts", "file", "--out", "o", "--resume", "--top-k", "-1"),
            "--top-k -1: must be at least 0",
        ),
        (("--prompts", "file", "--out", "o", "--model", "none"), "none"),
        (("--prompt", "x", "--out", "o"), "--out is for the lines of --prompts"),
        (("--prompts", "file", "--resume"), "--resume goes on from the lines of --out: name that file"),
        (("--prompt", "x", "--system", ""), "--system needs --chat"),
        (("--prompt", "x", "--stop-token-id", "99999"), "stop_token_ids [99999]: the vocabulary has"),
        (("--prompt", "x", "--temperature", "nan"), "--temperature nan: must be at least 0 and finite"),
        (("--prompt", "x", "--n", "1000000"), "--n 1000000: must be 1 to 16384"),
        (("--prompt", "x", "--repetition-penalty", "1e-300"), "--repetition-penalty 1e-300: must be 0.001 to 1000"),
    ],
)
def test_generate(checkpoint, place, capsys, flags, message):
    assert message in refused(capsys, place, "generate", "--model", str(checkpoint), *flags)


INSPECT = ("--prompt", "x y z", "--out", "o.html")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt", "x", "--out", "full"), "--out full: it is a folder"),
        (("--prompt", "x", "--out", "no/o.html"), "the folder 'no' does not exist"),
        (("--prompt", "x", "--out", "o.json"), "--out o.json: the JSON is written to o.json"),
        (
            ("--prompt", "x", "--out", "/dev/null"),
            "--out /dev/null: it is not a regular file, so the numbers need a file name",
        ),
        ((*INSPECT, "--json", "no/o"), "--json no/o: the folder 'no' does not exist"),
        ((*INSPECT, "--json", "o.html"), "the JSON is written to o.html"),
        ((*INSPECT, "--queries", "5-2"), "--queries '5-2': write positions and ranges"),
        ((*INSPECT, "--queries", "1,,2"), "--queries '1,,2': write positions and ranges"),
        ((*INSPECT, "--queries", "9" * 5000), "write positions and ranges"),
        (
            (*INSPECT, "--queries", "0-999999999999"),
            "--queries: 999999999999 is not a position of a prompt of 6 tokens",
        ),
        ((*INSPECT, "--queries=-7"), "--queries: -7 is not a position"),
        ((*INSPECT, "--top", "0"), "--top 0: must be at least 1"),
        ((*INSPECT, "--top", str(2**63 - 1)), "and 200000 are kept: choose fewer layers than 1 or a smaller top"),
        ((*INSPECT, "--layers", "1"), "layers=[1]: there are layers [0]"),
        ((*INSPECT, "--model", "none"), "no checkpoint at 'none'"),
        ((*INSPECT, "--model", "full"), "config.json"),
        (("--out", "o.html", "--prompt", "\udc80"), "character 0 of the text is '\\udc80', a lone surrogate"),
        (("--out", "o.html", "--token-ids", "99999"), "token id 99999 is not in the vocabulary"),
        (("--out", "o.html", "--token-ids", ",".join(["5"] * 9999)), "max_model_len=9999 exceeds the model's"),
    ],
)
def test_inspect(checkpoint, place, capsys, flags, message):
    assert message in refused(capsys, place, "inspect", "--model", str(checkpoint), *flags)


@pytest.mark.gpu_memory(5)
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("make-checkpoint --out file/new", "is a file; choose another place"),
        ("make-checkpoint --out new --shards 0", "--shards 0: must be at least 1"),
        ("make-checkpoint --out new --shards 99999", "between 1 and"),
        ("make-checkpoint --out new --config none", "not a directory, JSON file or preset"),
        ("generate --token-ids 1,x", "argument --token-ids: '1,x': write integers with commas between them"),
        ("inspect --out o.html --layers 0,", "argument --layers: '0,': write integers with commas between them"),
        ("bench model --experts 1", "num_experts_per_tok 2 is above n_routed_experts 1"),
        ("bench model --batch 0", "--batch 0: must be at least 1"),
        ("bench layer --context 5,-1", "--context -1: must be at least 1"),
        ("bench layer --plot times.doc", "--plot times.doc: its name must end in one of"),
        ("bench layer --model tiny --backends auto,none", "unknown backend 'none': supported are auto"),
        ("bench layer --query-tokens 1,9 --context 64,4", "--query-tokens 9: --context 4 must be at least as long"),
        ("bench engine --drafts 1 --acceptance 0.5 --device cpu", "--acceptance needs steps that are CUDA graphs"),
        ("bench layer --backends ,", "argument --backends: ',': write names with commas between them"),
        (f"bench layer --batch 1,{'9' * 5000}", "write integers with commas between them"),
        (f"bench layer --context 5 --batch {2**62}", "out of memory"),
        ("bench structured --vocab 99999999999", "--vocab 99999999999: must be 1 to 4194304"),
        ("bench model --layers 0-99999", "14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, do not exist: the model"),
        ("plan --gpu h200 --ranks 0", "--ranks 0: must be 1 to 65536"),
        ("plan --gpu h200 --ranks -1", "--ranks -1: must be 1 to 65536"),
        ("plan --gpu h200 --context 0", "--context 0: must be at least 1"),
        ("plan --speculate 99", "--speculate 99: must be 0 to 15"),
        ("plan --kv-cache-bytes 1e18", f"--kv-cache-bytes {10**18}: must be 1 to {2**50}"),
        ("plan --memory 1e18", f"--memory {10**18}: must be 1 to {2**50}"),
        ("plan --context 9", "--context: name the GPUs with --gpu h100 or h200"),
        ("plan --layout dp", "--layout: name the GPUs"),
        ("plan --batch 1,32", "--batch: name the GPUs"),
        ("plan --gpu h200 --context 4097", "--context 4097: a sequence has at most 4096 tokens"),
        ("plan --gpu h200 --max-model-len 64 --prefill 65", "--prefill 65: a sequence has at most 64 tokens"),
        ("plan --speculate 3 --max-num-batched-tokens 3", "--speculate 3: supported are up to 2 drafts"),
        ("warmup --model tiny --gpu 9.0:132 --max-model-len 4097", "max_model_len=4097 exceeds the model's 4096"),
        ("warmup --model tiny --gpu 9.0:132 --jobs 0", "--jobs 0: must be 1 to 65536"),
        ("warmup --model tiny --gpu 9.0:0", "'9.0:0' is not a known GPU"),
        ("info --plans tiny --gpu h10", "'h10' is not a known GPU: choose from a100,"),
        ("info --plans tiny --gpu 7.5:80", "'7.5:80': kernels need compute capability 8.0 or later"),
        ("info --plans none --gpu h100", "none"),
        ("info --plans tiny --gpu h100 --batch 0", "--batch 0: must be at least 1"),
        ("info --plans tiny --gpu h100 --context 4097", "--context 4097: a sequence has at most 4096 tokens"),
        ("info --plans tiny --gpu h100 --prefill 9,4097", "--prefill 4097: a sequence has at most 4096 tokens"),
        ("info --plans tiny --gpu h100 --backend reference", "some ops of this model's steps run in plain torch"),
        ("info --plans tiny --gpu h100 --backend none", "'none'"),
        ("info --gpu h100", "--gpu: name the model with --plans MODEL"),
        ("info --index-keys fp4", "--index-keys: name the model"),
        ("train --task copy --budget 0", "--budget 0.0: must be 0.001 to 1000000000"),
        ("train --task copy --lr nan", "--lr nan: must be 0 to 1000000"),
        ("plan --memory 0", "argument --memory: '0' is not an amount of memory"),
        ("plan --memory 0.5", "argument --memory: '0.5' is not an amount of memory"),
        ("plan --kv-cache-bytes 1e99", "'1e99' is not an amount of memory"),
        ("train --text bytes", "--text bytes: not UTF-8 text"),
        ("train --text empty", "the text is empty"),
        ("train --task copy --lr 1e99", "--lr 1e+99: must be 0 to 1000000"),
        ("generate --prompts absent --device cuda:99", "device 'cuda:99'"),
        ("score --model absent --token-ids absent --out o.safetensors --device cuda:99", "device 'cuda:99'"),
        ("inspect --model absent --prompt x --device cuda:99 --out o.html", "device 'cuda:99'"),
        ("train --text absent --seq-len 9999", "seq_len 9999 exceeds the model's 4096 positions"),
        ("train --text absent --config tiny_v41", "DSpark drafters are not trained"),
        ("train --text absent --mtp-depth 600", "mtp.depth is 600: at least 1 is needed, and less than seq_len=512"),
        ("train --task copy --batch 9999999999999", "out of memory: use smaller sizes"),
        ("train --out file/new", "is a file; choose another place"),
        ("experiment run smoke --out full", "not an empty directory"),
        ("experiment resume smoke --out file", "not an empty directory"),
    ],
)
def test_other_commands(place, capsys, command, message):
    assert message in refused(capsys, place, *command.split())


def test_a_checkpoint_cannot_replace_a_mount_point(place, capsys, monkeypatch):
    (place / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == "volume")
    message = refused(capsys, place, "make-checkpoint", "--out", "volume")
    assert "volume is a mount point, which cannot appear as a whole: name a new folder in it" in message


@pytest.mark.parametrize("command", ["make-checkpoint --out new", "crop --model {MODEL} --out new --layers 0"])
def test_a_checkpoint_larger_than_the_disk(checkpoint, place, capsys, monkeypatch, command):
    usage = shutil.disk_usage(place)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(write, "_write_shard", lambda *args: pytest.fail("a shard is written"))
    message = refused(capsys, place, *command.replace("{MODEL}", str(checkpoint)).split())
    assert re.search(r"'new' cannot be written: it takes \S+ MB, and 1 KB are free", message)


def test_a_file_that_cannot_be_written(checkpoint, place, capsys, monkeypatch):
    """The folder is there, and says no only at the end."""
    from safetensors import SafetensorError

    from deepseek_attn.utils import files

    def full(*arguments):
        raise SafetensorError("no space left on device")

    monkeypatch.setattr(files, "save_file", full)
    message = refused(capsys, place, "score", "--model", str(checkpoint), *SCORE)
    assert "'o.safetensors' cannot be written: no space left on device" in message


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        pytest.param(
            {"TORCH_LOGS": "nonsense"},
            "TORCH_LOGS is 'nonsense', which torch refuses: TORCH_LOGS=help lists more",
            marks=pytest.mark.exhaustive,
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
            "MASTER_PORT is '99999': torchrun sets it to an integer from 0 to 65535",
        ),
    ],
    ids=["TORCH_LOGS", "MASTER_PORT"],
)
def test_environment(variables, message):
    command = [sys.executable, "-m", "deepseek_attn", "generate", "--prompt", "x"]
    command += ["--tensor-parallel", "2"] if "RANK" in variables else []
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert message in result.stderr


def test_a_folder_whose_name_is_not_utf8(checkpoint, place, capfd):
    name = os.fsdecode(b"m\xff")
    (place / "x").mkdir()
    shutil.copytree(checkpoint, place / "x" / name)
    message = refused(capfd, place, "score", "--model", f"x/{name}", *SCORE)
    assert "x/m" in message
    assert "the name of the folder is not UTF-8, which the package safetensors needs: rename it" in message
    planned = main(["plan", "--model", f"x/{name}"])
    assert planned == (2 if torch.cuda.is_available() else 0)  # memory of a GPU needs the headers of the shards


def test_no_standard_input(checkpoint, place, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it where the descriptor is closed
    command = ("generate", "--model", str(checkpoint), "--max-tokens", "1")
    assert "--prompt -: standard input is closed" in refused(capsys, place, *command, "--prompt", "-")
    assert "--messages -: standard input is closed" in refused(capsys, place, *command, "--messages", "-")
    assert main([*command, "--chat"]) == 0
    assert "prompt: Once upon a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("generate", "--prompt", "x", "--allowed-token-ids", "2,99999"), "allowed_token_ids has the ids [99999]"),
        (("generate", "--prompt", "x", "--stop-token-id", "99999"), "stop_token_ids [99999]"),
        (("generate", "--prompt", "x", "--min-tokens", "300"), "min_tokens=300: must be at most max_tokens=256"),
        (("generate", "--prompt", "x", "--json-schema", '{"type": 3}'), "type must be a string"),
        (("generate", "--prompt", "x" * 40, "--max-model-len", "20"), "exceeds max_model_len=20"),
        (("generate", "--token-ids", "1,99999"), "token id 99999 is not in the vocabulary"),
        (("generate", "--chat", "--prompt", "x", "--reasoning-effort", "some"), "reasoning_effort='some'"),
        (("generate", "--prompts", "lines", "--logit-bias", "99999=1"), "logit_bias has the ids [99999]"),
        (("generate", "--prompt", "x", "--speculate", "9", "--max-num-batched-tokens", "8"), "supported are 1 to 7"),
        (("generate", "--prompt", "x", "--profile", "full"), "no trace can be written to full"),
        (("generate", "--prompt", "x", "--kv-cache-bytes", "900TB"), "a smaller kv_cache_bytes"),
        (("generate", "--prompt", "x", "--max-num-batched-tokens", "9" * 12), f"max_num_batched_tokens={'9' * 12} and"),
        (
            ("generate", "--prompt", "x", "--prefill-workspace-rows", "9" * 12, "--fp8-mode", "separate"),
            f"max_num_batched_tokens=2048 and prefill_workspace_rows={'9' * 12}: lower these",
        ),
        (("generate", "--prompt", "x", "--max-snapshots", "9999999"), "--max-snapshots 9999999: must be 0 to 1048576"),
        (("score", "--token-ids", "far.json", "--out", "o"), "token id 99999 is not in the vocabulary"),
        (("score", "--token-ids", "ids.json", "--out", "o", "--records", "file"), "the folder 'file' cannot be made"),
        (("inspect", "--token-ids", "1,99999", "--out", "o.html"), "token id 99999 is not in the vocabulary"),
        (("generate", "--prompt", "x", "--replay", "file"), "'file' cannot be read as records"),
        (
            ("generate", "--token-ids", "1,2", "--replay", "other"),
            "token 1 of the prompt is 2, and that of the records",
        ),
        (("generate", "--token-ids", "1,3", "--replay", "other"), "experts have 1 columns per layer, and a token of"),
        (
            ("generate", "--prompts", "lines", "--replay", "full"),
            "--replay full: it has no i.safetensors of a prompt i",
        ),
        (("generate", "--prompts", "-", "--replay", "full"), "--replay full: it has no i.safetensors of a prompt i"),
        (("generate", "--prompts", "-", "--stop-token-id", "99999"), "stop_token_ids [99999]"),
        (("score", "--token-ids", "ids.json", "--out", "o", "--replay", "file"), "'file' cannot be read as records"),
        (("score", "--token-ids", "ids.json", "--out", "o", "--replay", "other"), "list 0: replay: token 1 of the"),
    ],
)
def test_wrong_input_is_refused_before_weights_are_read(place, capsys, monkeypatch, command, message):
    (place / "far.json").write_text("[[1, 99999]]")
    (place / "lines").write_text('{"prompt": "x", "n": 2}\nanother\n')
    experts = torch.zeros(3, 1, 1, dtype=torch.int64)
    TokenRecords(token_ids=torch.tensor([1, 3, 5]), experts=experts, route_layers=(0,)).save("other")
    monkeypatch.setattr(sys, "stdin", stream_of(place / "lines"))
    for method in ("read", "read_part", "read_shard", "view"):
        monkeypatch.setattr(SafetensorsSource, method, lambda *args: pytest.fail("weights were read"))
    assert message in refused(capsys, place, *command, "--model", str(SMALL_CHECKPOINT))


def stream_of(path):
    """Standard input that is a pipe with the text of a file."""
    ours, theirs = os.pipe()
    os.write(theirs, path.read_bytes())
    os.close(theirs)
    return os.fdopen(ours)


def test_lines_of_a_stream_that_have_arrived_are_checked_before_weights_are_read(place, capsys, monkeypatch):
    (place / "lines").write_text('a\n{"prompt": "x", "temperatur": 0}\n')
    monkeypatch.setattr(sys, "stdin", stream_of(place / "lines"))
    monkeypatch.setattr(SafetensorsSource, "read", lambda *args: pytest.fail("weights were read"))
    message = refused(capsys, place, "generate", "--prompts", "-", "--out", "o", "--model", str(SMALL_CHECKPOINT))
    assert "--prompts -: line 2: no such keys: temperatur" in message


def test_drafts_of_a_model_without_mtp_are_refused_before_weights_are_read(checkpoint, place, capsys, monkeypatch):
    config = ModelConfig.from_pretrained(checkpoint)
    shutil.copytree(checkpoint, "none", ignore=shutil.ignore_patterns("config.json"))
    (place / "none" / "config.json").write_text(json.dumps(config.replace(num_nextn_predict_layers=0).to_dict()))
    monkeypatch.setattr(SafetensorsSource, "read", lambda *args: pytest.fail("weights were read"))
    for command in (("score", *SCORE, "--mtp"), ("bench", "engine", "--drafts", "1")):
        message = refused(capsys, place, *command, "--model", "none")
        assert "drafts need an MTP layer or a DSpark drafter, and this model has none" in message


def test_parameters_of_a_line_replace_flags_that_the_model_refuses(place, capsys):
    (place / "lines").write_text('{"prompt": "x", "max_tokens": 1, "stop_token_ids": []}\n')
    flags = ("--model", str(SMALL_CHECKPOINT), "--prompts", "lines", "--stop-token-id", "99999")
    assert main(["generate", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "length"
