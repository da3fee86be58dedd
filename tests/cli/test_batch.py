"""``generate --prompts``: a line for each prompt as soon as it is done, and ``--resume`` after any end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.cli import batch, main
from deepseek_attn.cli.prompts import PromptLines
from deepseek_attn.config.model import ModelConfig
from deepseek_attn.engine.llm import LLM
from deepseek_attn.engine.sampling import SamplingParams
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import untyped

PROMPTS = [
    "Hello there",
    "[5, 9, 17]",
    '"two\\nlines"',
    "Grüße",
    "[1, 9999]",
    "x",
    "the last one",
]  # the fifth is wrong


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = ModelConfig.from_preset("tiny").replace(num_hidden_layers=1, compress_ratios=[4, 0], num_hash_layers=0)
    return write_checkpoint(RandomSource(config, 5), config, tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def command(checkpoint, tmp_path, monkeypatch):
    """Arguments of the command in an empty folder with `PROMPTS`, whose tokens differ by the index of a prompt."""
    monkeypatch.chdir(tmp_path)
    write_prompts("prompts", PROMPTS)
    return [
        "generate", "--model", str(checkpoint), "--device", "cpu", "--max-tokens", "5", "--seed", "3", "--ignore-eos",
        "--max-num-seqs", "2", "--max-model-len", "100", "--prompts", "prompts", "--out", "out",
    ]  # fmt: skip


def write_prompts(path: str, prompts: list[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(prompts))


def lines_of(path: str = "out") -> list[str]:
    with open(path, encoding="utf-8") as file:
        return file.readlines()


def by_index(lines: list[str]) -> list[dict]:
    """Lines as values, in the order of the prompts; the first field of each is its index."""
    assert all(line.startswith('{"index": ') and line.endswith("\n") for line in lines)
    return sorted(map(json.loads, lines), key=lambda record: record["index"])


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """The lines of a run that nothing interrupts."""
    with pytest.MonkeyPatch.context() as patch:
        run = untyped(command).__wrapped__(checkpoint, tmp_path_factory.mktemp("whole"), patch)
        assert main(run) == 1
        return lines_of()


def test_lines_and_what_is_printed(command, whole, capsys):
    assert main(command) == 1, "one prompt is wrong"
    assert capsys.readouterr().out == "7 prompts, 1 failed -> out\n"
    assert lines_of() == whole
    records = by_index(whole)
    assert [record["index"] for record in records] == list(range(7))
    assert [record["index"] for record in records if "error" in record] == [4]
    assert "token id 9999 is not in the vocabulary" in records[4]["error"]
    assert main(command[:-2]) == 1
    assert capsys.readouterr().out == "".join(whole)


@pytest.mark.parametrize("where", tiered(["nothing", 0, 1, 7, 80, 230, 500, 900, -1, "all"], [80, "all"]))
def test_resumed_after_a_kill_at_any_byte(command, whole, capsys, where):
    """As many bytes as a killed process may have written."""
    text = "".join(whole).encode()
    if where != "nothing":
        with open("out", "wb") as file:
            file.write(text if where == "all" else text[:where])
    assert main([*command, "--resume"]) == 1
    assert by_index(lines_of()) == by_index(whole)
    assert capsys.readouterr().out == "7 prompts, 1 failed -> out\n"


def test_any_lines_may_be_there(command, whole):
    """Their order, and which prompts have none, are all the same: lines with an error can be removed, to try again."""
    with open("out", "w", encoding="utf-8") as file:
        file.writelines(line for line in whole[::-1] if '"error"' not in line)
    write_prompts("prompts", [*PROMPTS, "one more"])
    assert main([*command, "--resume"]) == 1
    assert by_index(lines_of())[:7] == by_index(whole)
    assert [record["index"] for record in map(json.loads, lines_of()[6:])] == [4, 7]


ONE = '{"index": 0, "request": "0", "text": ""}\n'


@pytest.mark.parametrize(
    ("prompts", "out", "flags", "message"),
    [
        (PROMPTS, None, [], "'out' is not empty: go on from its lines (--resume)"),
        (["Hello", *PROMPTS[1:]], None, ["--resume"], "the line of prompt 0 in out is of another prompt"),
        (PROMPTS, None, ["--resume", "--top-k", "3"], "or was made with other flags for chat, sampling or --replay"),
        (PROMPTS, None, ["--resume", "--chat"], "or was made with other flags for chat, sampling or --replay"),
        (PROMPTS[:3], None, ["--resume"], "out has a line of prompt 3, and there are 3 prompts"),
        (PROMPTS, ONE * 2, ["--resume"], "--out out: line 2: prompt 0 has another line already"),
        (PROMPTS, ONE + ONE[:20] + "\n", ["--resume"], "--out out: line 2: not valid JSON"),
        (PROMPTS, '{"index": 0}\n', ["--resume"], "--out out: line 1: not a line of this command"),
        (PROMPTS, ONE + "[0, 1]\n", ["--resume"], "--out out: line 2: not a line of this command"),
        (PROMPTS, ONE.replace("0,", "-1,"), ["--resume"], "out has a line of prompt -1"),
        (PROMPTS, "my notes", ["--resume"], "has a line that does not begin with"),
    ],
)
def test_an_output_of_other_prompts_is_kept(command, whole, capsys, monkeypatch, prompts, out, flags, message):
    monkeypatch.setattr("deepseek_attn.engine.llm.LLM.__init__", lambda *args, **options: pytest.fail("a model loads"))
    write_prompts("prompts", prompts)
    text = "".join(whole) if out is None else out
    with open("out", "w", encoding="utf-8") as file:
        file.write(text)
    assert main([*command, *flags]) == 2
    assert message in capsys.readouterr().err
    with open("out", encoding="utf-8") as file:
        assert file.read() == text


def take(lines: PromptLines) -> list:
    """What can be taken; ends with None where the next prompt is not there yet."""
    found = []
    for line in lines:
        found.append(line and line.prompt)
        if line is None:
            break
    return found


def test_prompts_of_a_stream_come_line_by_line(monkeypatch):
    ours, theirs = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(ours))
    with PromptLines("-", SamplingParams()) as lines:
        assert not lines.regular
        assert take(lines) == [None]
        os.write(theirs, b"eins\r\n\n[1, 2]\nGr")
        assert take(lines) == ["eins", [1, 2], None]
        os.write(theirs, "üße".encode()[:1])
        assert take(lines) == [None]
        os.write(theirs, "üße".encode()[1:] + b"\n" + b"x" * 9000)
        assert take(lines) == ["Grüße", None]
        os.close(theirs)
        assert take(lines) == ["x" * 9000]
        assert take(lines) == []
    sys.stdin.close()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_producer_that_waits_for_each_answer(command, whole, monkeypatch, resumed):
    ours, theirs = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(ours))
    if resumed:
        with open("out", "w", encoding="utf-8") as file:
            file.writelines(line for line in whole if json.loads(line)["index"] < 3)
    waited = []

    def produce() -> None:
        for count, prompt in enumerate(PROMPTS):
            deadline = time.monotonic() + 120
            while count and (not os.path.exists("out") or len(lines_of()) < count) and time.monotonic() < deadline:
                time.sleep(0.002)
            waited.append(time.monotonic() < deadline)
            os.write(theirs, f"{prompt}\n".encode())
        os.close(theirs)

    producer = threading.Thread(target=produce)
    producer.start()
    command[command.index("prompts")] = "-"
    assert main([*command, "--resume"]) == 1
    producer.join()
    assert waited
    assert all(waited)
    assert by_index(lines_of()) == by_index(whole)
    sys.stdin.close()


@pytest.mark.parametrize("prompts", [PROMPTS[:2], [*PROMPTS[:2], "other", *PROMPTS[3:]]])
def test_other_prompts_in_a_stream_are_noticed_when_they_come(command, whole, capsys, monkeypatch, prompts):
    write_prompts("prompts", prompts)
    with open("prompts") as file:
        monkeypatch.setattr(sys, "stdin", file)
        with open("out", "w", encoding="utf-8") as out:
            out.writelines(line for line in whole if json.loads(line)["index"] > 1)
        command[command.index("prompts")] = "-"
        assert main([*command, "--resume"]) == 2
    assert "--resume: " in capsys.readouterr().err
    assert [record for record in by_index(lines_of()) if record not in by_index(whole)] == []


TURNS = [{"role": "user", "content": "hi"}]
OBJECTS = [
    {"prompt": "Hello there", "id": "a"},
    {"token_ids": [5, 9, 17], "id": 1, "max_tokens": 2},
    {"messages": TURNS, "id": "1", "temperature": 0, "ignore_eos": True, "seed": None},
    {"prompt": "x", "temperature": 0.5, "top_k": 9, "top_p": 0.9, "max_tokens": 4, "seed": 8, "stop": "q", "id": None},
    TURNS,
    {"prompt": "y", "stop_token_ids": [9999], "id": "wrong"},
    {"prompt": '{"prompt": "x"}', "stop": ["q", "r"]},
]


@exhaustive_on_cpu
def test_objects_with_an_id_and_parameters_of_their_own(command, checkpoint):
    """Each as `LLM.generate` completes it with those parameters, and where it gives none, with those of the flags."""
    write_prompts("prompts", [json.dumps(prompt) for prompt in OBJECTS] + ["plain text"])
    assert main(command) == 1
    first, *records = by_index(lines_of())
    assert list(first) == ["index", "id", "request", "text", "token_ids", "finish_reason"]
    records = [first, *records]
    assert [record.get("id") for record in records] == ["a", 1, "1", None, None, "wrong", None, None]
    assert ["id" in record for record in records] == [True, True, True, False, False, True, False, False]
    [error] = [record.pop("error") for record in records if "error" in record]
    assert error == "stop_token_ids [9999]: the vocabulary has 512 tokens"
    flags = SamplingParams(max_tokens=5, seed=3, ignore_eos=True)
    own = {"temperature": 0.5, "top_k": 9, "top_p": 0.9, "max_tokens": 4, "seed": 8, "stop": ("q",)}
    with LLM(checkpoint, device="cpu", max_model_len=100, progress=False) as llm:
        turns, _ = llm.chat_prompt(TURNS)
        prompts = ["Hello there", [5, 9, 17], turns, "x", turns, [1], '{"prompt": "x"}', "plain text"]
        changes = [{}, {"max_tokens": 2}, {"temperature": 0}, own, {}, {}, {"stop": ("q", "r")}, {}]
        expected = llm.generate(prompts, [replace(flags, **change) for change in changes])
    for index, (record, completion) in enumerate(zip(records, expected, strict=True)):
        if index != 5:
            assert (record["text"], record["token_ids"]) == (completion.text, completion.token_ids)


def test_messages_are_conversations_with_and_without_chat(command, checkpoint):
    write_prompts("prompts", [json.dumps(TURNS), json.dumps({"messages": TURNS}), '"hi"', '{"prompt": "hi"}'])
    assert main([*command, "--chat", "--temperature", "0"]) == 0
    assert len({tuple(record["token_ids"]) for record in by_index(lines_of())}) == 1


def test_resumed_objects(command, capsys, monkeypatch):
    write_prompts("prompts", [json.dumps(prompt) for prompt in OBJECTS])
    assert main(command) == 1
    whole = lines_of()
    write_lines(whole[2:])
    assert main([*command, "--resume"]) == 1
    assert by_index(lines_of()) == by_index(whole)
    for change in ({"id": "b"}, {"max_tokens": 3}, {"prompt": "Hello"}):
        write_prompts("prompts", [json.dumps(prompt) for prompt in (OBJECTS[0] | change, *OBJECTS[1:])])
        assert main([*command, "--resume"]) == 2
        assert "the line of prompt 0 in out is of another prompt" in capsys.readouterr().err
    write_prompts("prompts", [json.dumps(prompt) for prompt in ({**OBJECTS[0], "top_k": None}, *OBJECTS[1:])])
    assert main([*command, "--resume"]) == 1, "null is the same as an absent key"


def test_nothing_left_loads_no_model(command, whole, capsys):
    """The model that is named then need not exist; with a prompt left, its absence is an error."""
    write_lines(whole)
    place = command.index("--model") + 1
    without = [*command[:place], "no-such-folder", *command[place + 1 :], "--resume"]
    status = main(without)
    out = capsys.readouterr().out
    assert status == any("error" in json.loads(line) for line in whole)
    assert f"{len(whole)} prompts, " in out
    write_lines(whole[1:])
    assert main(without) == 2
    assert lines_of() == whole[1:]


def write_lines(lines: list[str]) -> None:
    with open("out", "w", encoding="utf-8") as file:
        file.writelines(lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"custom_id": "1", "method": "POST", "url": "/v1", "body": {}}',
            'OpenAI batch: write {"id": ..., "',
        ),
        (
            '{"text": "x"}',
            "no such keys: text; there are prompt, token_ids, messages (one of them), id, and ",
        ),
        ('{"prompt": "x", "temprature": 0}', "no such keys: temprature;"),
        ("{}", "one of prompt, token_ids, messages is needed, got none"),
        ('{"id": 3, "prompt": null}', "is needed, got none"),
        ('{"prompt": "x", "token_ids": [1]}', "got prompt and token_ids"),
        ('{"prompt": [1, 2]}', "prompt is [1, 2]: expected text; token ids are token_ids"),
        ('{"token_ids": [1, "x"]}', "token_ids is [1, 'x']: expected a list of integers"),
        ('{"token_ids": 5}', "token_ids is 5: expected a list of integers"),
        ('{"messages": "hi"}', "messages must be a non-empty list"),
        ('{"messages": ["hi"]}', "['hi'] is neither a list of token ids nor a list of messages"),
        ('{"prompt": "x", "id": 1.5}', "id is 1.5: expected text or an integer"),
        ('{"prompt": "x", "id": true}', "id is True: expected"),
        ('{"prompt": "x", "id": "a"}', "line 1 has the id 'a' too"),
        ('{"prompt": "x", "temperature": -1, "top_p": 2}', "temperature=-1: must be a finite number"),
        ('{"prompt": "x", "temperature": NaN}', "temperature=nan: must be a finite number"),
        ('{"prompt": "x", "max_tokens": "5"}', "max_tokens='5': must be an integer"),
        (
            '{"prompt": "x", "prompt": "y"}',
            "'prompt' is repeated in one object; to complete the line as it stands",
        ),
        ('{"prompt": "x",}', "not valid JSON at line 1, column 16"),
        ('[{"role": "user"', "not valid JSON"),
        (
            '[1, "x"]',
            "[1, 'x'] is neither a list of token ids nor a list of messages; to complete the line as it stands",
        ),
        ("[1.5]", "[1.5] is neither a list of token ids"),
        ("[[1, 2], [3]]", "is neither a list of token ids"),
        ("[true]", "[True] is neither a list of token ids"),
        ("[" * 1000 + "]" * 1000, "more than 64 objects or lists"),
        ("[1" + "0" * 5000 + "]", "an integer of thousands of digits"),
    ],
)
def test_other_json_is_refused_with_its_line(command, capsys, monkeypatch, line, message):
    monkeypatch.setattr(LLM, "__init__", lambda *args, **options: pytest.fail("a model loads"))
    write_prompts("prompts", ['{"prompt": "y", "id": "a"}', "", line])
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "--prompts prompts: line 3: " in err
    assert message in err
    assert not os.path.exists("out")


def test_other_json_in_a_stream_leaves_what_was_written(command, monkeypatch, capsys):
    monkeypatch.setattr(batch, "CHECKED_AHEAD", 2)
    prompts = ["one", "two", "three", "four", "five"]
    write_prompts("prompts", [*prompts, '{"text": "x"}'])
    with open("prompts") as file:
        monkeypatch.setattr(sys, "stdin", file)
        command[command.index("prompts")] = "-"
        assert main(command) == 2
    assert "--prompts -: line 6: no such keys: text" in capsys.readouterr().err
    done = lines_of()
    assert done
    write_prompts("prompts", [*prompts, '{"prompt": "x"}'])
    command[command.index("-")] = "prompts"
    assert main([*command, "--resume"]) == 0
    assert lines_of()[: len(done)] == done
    assert [record["index"] for record in by_index(lines_of())] == list(range(6))


def test_lines_have_log_probabilities(command):
    write_prompts("prompts", ["It is", json.dumps({"prompt": "She was", "logprobs": 0})])
    assert main([*command, "--logprobs", "2", "--prompt-logprobs", "1"]) == 0
    first, second = by_index(lines_of())
    for line, top in ((first, 2), (second, 0)):
        assert line["logprobs"]["token_ids"] == line["token_ids"]
        assert all(value <= 0 for value in line["logprobs"]["logprobs"])
        assert [len(ids) for ids in line["logprobs"]["top_ids"]] == [top] * len(line["token_ids"])
        assert len(line["prompt_logprobs"]["logprobs"]) >= 1


def test_a_system_message_is_written_into_the_messages(command, capsys):
    write_prompts("prompts", ["hi", json.dumps(TURNS)])
    assert main([*command, "--chat", "--system", "be brief"]) == 2
    assert "--prompts prompts: line 2: --system beside messages" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_again_and_again(command, number):
    """A process that a signal ends at random times loses no line, and the lines of all runs are those of one."""
    write_prompts("prompts", [f"prompt number {i}" for i in range(40)])
    assert main(command) == 0
    expected = by_index(lines_of())
    os.rename("out", "expected")
    start, times = [sys.executable, "-m", "deepseek_attn", *command, "--resume"], random.Random(int(number))
    code, ended = None, 0
    while code != 0:
        before = len(lines_of()) if os.path.exists("out") else 0
        process = subprocess.Popen(
            start, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        while ended < 2 and process.poll() is None and (len(lines_of()) if os.path.exists("out") else 0) <= before:
            time.sleep(0.005)
        time.sleep(times.random() / 4)
        if ended < 2:
            process.send_signal(number)
            ended += 1
        _, err = process.communicate(timeout=900)
        code = process.returncode
        assert b"Traceback" not in err
        assert code in (0, 128 + number, -number), "the last one: while Python starts or ends, and handles no signals"
    assert by_index(lines_of()) == expected


@pytest.mark.exhaustive
def test_the_same_lines_from_actors(command, capfd):
    """And the same rule for what is there already."""
    pytest.importorskip("ray", reason="the package ray is not installed")
    write_prompts("prompts", [*PROMPTS, *(f"prompt number {number}" for number in range(7, 200))])
    place = command.index("--max-num-seqs")
    command = [*command[:place], *command[place + 2 :]]
    assert main(command) == 1
    expected = lines_of()
    with open("out", "w", encoding="utf-8") as file:
        file.writelines([*expected[:3], expected[3][:20]])
    script = Path(__file__).parents[2] / "scripts" / "ray_generate.py"
    start = [sys.executable, str(script), *command[1:], "--actors", "2", "--cpus", "0", "--resume"]
    assert subprocess.run(start, timeout=900, check=False).returncode == 1, capfd.readouterr().err
    assert by_index(lines_of()) == by_index(expected)
    write_prompts("prompts", PROMPTS[::-1])
    assert subprocess.run(start, timeout=900, check=False).returncode == 2
    assert "is of another prompt" in capfd.readouterr().err
    assert by_index(lines_of()) == by_index(expected)
