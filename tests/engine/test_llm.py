"""LLM and the generation loop: what comes out equals running each request alone, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import deepseek_attn.engine.engine
import deepseek_attn.engine.llm
import deepseek_attn.engine.request
import deepseek_attn.engine.stopping
import deepseek_attn.text.tokenizer
from deepseek_attn import LLM, ModelRunner, SamplingParams, inspect_attention
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.engine.completion import RequestFailed
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.llm import IndexedPrompt, TextStream
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.stats import StepStats
from deepseek_attn.text.tokenizer import Tokenizer
from tests.support.interruptions import InterruptBefore
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required, untyped

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 200,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
    "progress": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **OPTIONS)


@pytest.fixture
def free_pages(llm):
    """Every page is back when a test is over."""
    before = llm.runner.manager.available_pages()
    yield before
    assert llm.runner.manager.available_pages() == before


def prompts(*lengths):
    return [torch.randint(10, 260, (n,)).tolist() for n in lengths]


def greedy_by_scoring(llm, prompt, count):
    """Independent of the loop: the argmax of a full teacher-forced run, token after token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(llm.runner.score([ids])[0][-1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_scoring(llm, free_pages):
    [prompt] = prompts(61)
    [completion] = llm.generate([prompt], replace(GREEDY, max_tokens=5))
    assert completion.token_ids == greedy_by_scoring(llm, prompt, 5)
    assert completion.prompt_token_ids == prompt
    assert completion.finish_reason == "length"


def test_batch_equals_each_alone(llm, free_pages):
    """More requests than fit at once, prompts longer than a step, different lengths and parameters."""
    batch = prompts(1, 97, 5, 41, 40, 130, 3)
    params = [
        SamplingParams(temperature=t, top_k=k, seed=7, max_tokens=m, ignore_eos=True)
        for t, k, m in [(0, 0, 3), (1, 0, 2), (0.7, 5, 4), (0, 0, 1), (1.3, 0, 3), (0, 0, 5), (1, 3, 2)]
    ]
    together = llm.generate(batch, params)
    for index, (prompt, p) in enumerate(zip(batch, params, strict=True)):
        request = Request.create(llm.runner, llm.tokenizer, prompt, p, index)
        for _ in llm.engine.run([llm.engine.submit(request)]):
            pass
        assert together[index] == request.completion()
        assert len(together[index].token_ids) == p.max_tokens


@exhaustive_on_cpu
@pytest.mark.exhaustive
def test_each_prompt_as_soon_as_it_is_done(llm, free_pages):
    """With the index that it would have in a list, or its own; the same tokens as in a list."""
    batch = prompts(1, 97, 5, 41, 40, 130, 3)
    params = SamplingParams(temperature=1, seed=7, max_tokens=3, ignore_eos=True)
    found = list(llm.generate_iter(iter(batch), params))
    found.sort(key=lambda done: done.index)
    assert [done.completion for done in found] == llm.generate(batch, params)
    own = [IndexedPrompt(5, batch[5]), IndexedPrompt(2, batch[2])]
    assert list(llm.generate_iter(own, params)) == [found[5], found[2]]


@exhaustive_on_cpu
@pytest.mark.parametrize("max_in_flight", tiered([None, 1, 5], [None]))
def test_prompts_are_taken_as_there_is_room_and_not_kept(llm, free_pages, max_in_flight):
    taken, limit = [], max_in_flight or OPTIONS["max_num_seqs"]

    def requests() -> int:
        return sum(type(value) is Request for value in gc.get_objects())

    gc.collect()
    before = requests()

    def source():
        for length in (5, 9, 3, 6, 4, 8, 7):
            taken.append(length)
            yield [10] * length

    for done, _ in enumerate(llm.generate_iter(source(), replace(GREEDY, max_tokens=2), max_in_flight=max_in_flight)):
        assert done < len(taken) <= done + limit
        assert requests() - before <= limit
    assert len(taken) == 7


def test_a_prompt_that_is_not_there_yet_keeps_no_other_waiting(llm, free_pages):
    """As from a producer that sends the next prompt when it has the answer to the last one."""
    answered = []

    def source():
        for number in range(3):
            while len(answered) < number:
                yield None
            yield [10 + number]

    for index, completion in llm.generate_iter(source(), replace(GREEDY, max_tokens=2)):
        assert completion.prompt_token_ids == [10 + index]
        answered.append(index)
    assert answered == [0, 1, 2]


def test_a_prompt_that_cannot_be_run_is_an_error_of_its_own(llm, free_pages):
    def encode(item):
        if item == "refused":
            raise ValueError("not this one")
        return item

    params = replace(GREEDY, max_tokens=2)
    wrong = {
        "refused": "not this one",
        "": "empty prompt",
        (512,): "token id 512",
        (0,) * 201: "max_model_len",
        5: "got 5",
    }
    found = dict(llm.generate_iter([*wrong, [7, 8], *list(wrong) * 3, "abc"], params, encode=encode))
    assert sorted(found) == list(range(22))
    for index, message in enumerate(wrong.values()):
        assert found[index].finish_reason == "error"
        assert message in found[index].error
    assert [found[5], found[21]] == llm.generate([[7, 8], "abc"], params)


def test_closing_an_iteration_frees_its_pages(llm, free_pages):
    with contextlib.closing(llm.generate_iter([[5] * 30, [6] * 60, [7], [8]], replace(GREEDY, max_tokens=2))) as found:
        assert next(found).index == 0
        assert llm.runner.manager.available_pages() != free_pages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "abc"}, "an iterable of prompts is needed, got 'abc'"),
        ({"prompts": 5}, "an iterable of prompts is needed, got 5"),
        ({"prompts": [], "max_in_flight": 0}, "max_in_flight=0: must be an integer of at least 1"),
        ({"prompts": [], "max_in_flight": 1.5}, r"max_in_flight=1\.5"),
        ({"prompts": [], "params": [SamplingParams()]}, "params: SamplingParams, got"),
    ],
)
def test_wrong_arguments_of_an_iteration(llm, arguments, message):
    with pytest.raises(ValueError, match=message):
        llm.generate_iter(**arguments)


def test_stream_pieces_are_the_completion(llm, free_pages):
    pieces = list(llm.stream("Grüße, 世界", GREEDY))
    [completion] = llm.generate("Grüße, 世界", GREEDY)
    assert "".join(pieces) == completion.text
    assert completion.prompt_token_ids[0] == llm.tokenizer.bos_token_id


def test_closing_a_stream_frees_its_pages(llm, free_pages):
    stream = llm.stream("abc", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(piece for piece in stream if piece)
    assert llm.runner.manager.available_pages() != free_pages
    stream.close()


@pytest.mark.exhaustive
def test_two_streams_at_once(llm, free_pages):
    """A step computes both; each still yields all of its own text."""
    params = GREEDY
    texts = [llm.generate(prompt, params)[0].text for prompt in ("abc", "xyz")]
    first, second = llm.stream("abc", params), llm.stream("xyz", params)
    pieces = [[], []]
    pieces[0].append(next(first))
    pieces[1] += list(second)
    pieces[0] += list(first)
    assert ["".join(part) for part in pieces] == texts


SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
USES = {
    "generate": lambda llm: [c.token_ids for c in llm.generate([[5, 6, 7], [8] * 45], SHORT)],
    "generate_iter": lambda llm: [c.token_ids for _, c in llm.generate_iter([[5], [8] * 45, [512], [6]], SHORT)],
    "stream": lambda llm: list(llm.stream("abc", SHORT)),
}


@pytest.mark.parametrize("use", tiered(USES, list(USES)[-1:]))
def test_interrupted_and_used_again(llm, free_pages, use):
    """Before some line of the calls and of the engine: the calls' requests are gone, and others give the same."""
    files = (deepseek_attn.engine.llm.__file__, deepseek_attn.engine.engine.__file__)
    with InterruptBefore(files=files) as whole:
        expected = USES[use](llm)
    for line in list(whole.lines)[3::17]:
        with InterruptBefore(line, files) as trace:
            USES[use](llm)
        assert trace.fired
        assert not llm.engine.scheduler.running
        assert not llm.engine.scheduler.waiting
        assert llm.runner.manager.available_pages() == free_pages
    assert USES[use](llm) == expected
    assert not llm.engine.has_unfinished


@pytest.mark.exhaustive
def test_text_of_interrupted_steps(llm, free_pages):
    """Before lines that make text of tokens, which a stop string holds back in part."""
    modules = (deepseek_attn.engine.request, deepseek_attn.engine.stopping, deepseek_attn.text.tokenizer)
    files = tuple(required(module.__file__) for module in modules)
    whole = llm.generate("abc", GREEDY)[0].text
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(whole[1:4] + "no", whole[-1] + "no"))

    def request():
        return llm.engine.submit(Request.create(llm.runner, llm.tokenizer, llm.tokenizer.encode_prompt("abc"), params))

    def generate(lines):
        engine, found, pieces, steps = llm.engine, request(), [], []
        while not found.finished:
            with InterruptBefore(lines.pop(0) if lines else None, files) as trace:
                pieces += [output.text for output in engine.step()]
            steps.append(trace)
        pieces += [output.text for output in engine.step()] if engine.has_unfinished else []
        assert "".join(pieces) == found.completion().text == whole
        return steps

    lines = list(dict.fromkeys(line for step in generate([]) for line in step.lines))[::2]
    assert len(lines) > 20
    fired = 0
    while lines:
        fired += sum(step.fired for step in generate(lines))
    assert fired > 15


def test_a_request_that_fails_on_the_way_fails_alone(llm, free_pages, monkeypatch):
    batch = prompts(30, 20, 10)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = [completion.token_ids for completion in llm.generate(batch, params)]
    step = llm.runner.step

    def broken(work, options):
        if any(len(sequence.token_ids) == 22 for sequence, _ in work):
            raise RuntimeError("no more than 21 tokens of this one")
        return step(work, options)

    monkeypatch.setattr(llm.runner, "step", broken)
    completions = llm.generate(batch[1:2] + batch[2:], params)
    assert [c.finish_reason for c in completions] == ["error", "length"]
    assert completions[0].error == "RuntimeError: no more than 21 tokens of this one"
    assert completions[0].token_ids == expected[1][:2]
    assert completions[1].token_ids == expected[2]
    stream = llm.stream(batch[1], params)
    with pytest.raises(RequestFailed, match="no more than 21"):
        list(stream)


@pytest.mark.exhaustive
def test_prefixes_are_kept_between_calls(llm, tmp_path):
    options: dict[str, Any] = OPTIONS | {"max_snapshots": 2, "max_num_batched_tokens": 200}
    warm = LLM(llm.directory, **options)
    [prompt] = prompts(150)
    found = [warm.generate([prompt], GREEDY)[0] for _ in range(2)]
    assert [completion.cached_tokens for completion in found] == [0, 128]
    assert [completion.token_ids for completion in found] == [llm.generate([prompt], GREEDY)[0].token_ids] * 2
    assert warm.engine.stats.hit_rate == 128 / 300


def test_stop_token_and_eos(llm, free_pages):
    [prompt] = prompts(20)
    tokens = llm.generate([prompt], GREEDY)[0].token_ids
    stop = tokens[4]
    first = tokens.index(stop)
    [completion] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,)))
    assert completion.token_ids == tokens[: first + 1]
    assert completion.finish_reason == "stop"


def test_generation_ends_at_max_model_len(llm, free_pages):
    [prompt] = prompts(190)
    [completion] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert completion.finish_reason == "length"
    assert len(prompt) + len(completion.token_ids) == OPTIONS["max_model_len"]


def test_decodes_come_before_prompts(llm, free_pages):
    scheduler = Engine(llm.runner).scheduler
    scheduler.running = [Request.create(llm.runner, None, prompt, GREEDY) for prompt in prompts(60, 1)]
    first, second = scheduler.running
    assert scheduler.plan(1, StepStats()) == [(second, 1), (first, 39)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty prompt"),
        ([], "empty prompt"),
        ([0, 512], "token id 512"),
        ([0, -1], "token id -1"),
        ([0] * 201, "201 tokens exceeds max_model_len=200"),
    ],
    ids=["empty-text", "empty-ids", "id-too-large", "negative-id", "too-long"],
)
def test_a_bad_prompt_is_named_and_nothing_runs(llm, free_pages, prompt, message):
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        llm.generate([[0, 1], prompt], GREEDY)


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
def test_a_token_that_stands_for_an_image_is_refused(llm, free_pages, monkeypatch, as_ids):
    monkeypatch.setattr(deepseek_attn.text.tokenizer, "IMAGE", "<｜title｜>")
    prompt = llm.tokenizer.encode("see <｜title｜>") if as_ids else "see <｜title｜>"
    with pytest.raises(ValueError, match=r"prompt 1: token \d+ \(<｜title｜>\) stands for an image.* leave images out"):
        llm.generate([[0, 1], prompt], GREEDY)
    assert llm.generate([[0, 1]], GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (5, None, "token ids of a prompt are a list or a one-dimensional array of integers, got 5"),
        ("x", {}, "params: SamplingParams, or a list of them, got {}"),
        ("x", {"temperature": 0}, "params: SamplingParams, or a list of them, got {'temperature': 0}"),
        (["x", "y"], [SamplingParams()], "1 sampling parameters for 2 prompts"),
    ],
)
def test_what_is_no_prompt_or_parameter(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)


IDS = [61, 7, 200]


@pytest.mark.parametrize(
    "prompt",
    [
        np.array(IDS),
        np.array(IDS, dtype=np.uint8),
        np.array([61, 0, 7, 0, 200])[::2],
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        [np.int64(61), 7, np.int32(200)],
        list(torch.tensor(IDS)),
        range(61, 62),
        iter(IDS),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_arrays_and_tensors_are_prompts(llm, free_pages, prompt):
    [completion] = llm.generate(prompt, replace(GREEDY, max_tokens=1))
    assert completion.prompt_token_ids in (IDS, [61])
    assert {type(token) for token in completion.prompt_token_ids} == {int}


@pytest.mark.parametrize("texts", [np.array(["abc", "de"]), np.array(["abc", "de"], dtype=object), ("abc", "de")])
def test_an_array_of_texts_is_a_list_of_prompts(llm, free_pages, texts):
    one = replace(GREEDY, max_tokens=1)
    assert llm.generate(texts, one) == llm.generate(["abc", "de"], one)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_each_row_of_a_matrix_is_a_prompt(llm, free_pages, make):
    one = replace(GREEDY, max_tokens=1)
    completions = llm.generate(make([[1, 2, 3], [4, 5, 6]]), one)
    assert (
        completions
        == llm.generate([[1, 2, 3], [4, 5, 6]], one)
        == llm.generate([make([1, 2, 3]), make([4, 5, 6])], one)
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.array([1.0, 2.0]), "array of integers, got an array of float64"),
        (torch.tensor([1.0]), r"array of integers, got a tensor of torch\.float32"),
        (torch.tensor([True]), r"array of integers, got a tensor of torch\.bool"),
        ([1.0, 2.0], r"token id 1\.0 .*integers"),
        (np.array([-1]), "token id -1 "),
        (np.array(5), r"one-dimensional array of integers, got the shape \[\]"),
        (np.zeros((1, 2, 2), int), r"got the shape \[2, 2\]"),
        (b"text", "got b'text'"),
        ({1, 2}, "got {1, 2}"),
        ({"role": "user", "content": "x"}, "messages go to LLM.chat"),
        ([{"role": "user", "content": "x"}], "messages go to LLM.chat"),
    ],
    ids=repr,
)
def test_values_that_are_no_prompts(llm, free_pages, prompt, message):
    with pytest.raises(ValueError, match=f"prompt 0: .*{message}"):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("make", [lambda ids: ids.to("meta"), lambda ids: [ids[0].to("meta")], torch.Tensor.float])
def test_every_entry_refuses_a_tensor_without_token_ids(llm, free_pages, make):
    prompt, refusal = make(torch.tensor([5, 6])), "token ids of a prompt are a list or a one-dimensional array"
    for entry in (llm.generate, llm.stream, llm.runner.sequence, partial(inspect_attention, llm.runner)):
        with pytest.raises(ValueError, match=refusal):
            entry(prompt)
    for entry in (llm.generate, llm.runner.score, llm.runner.score_mtp):
        with pytest.raises(ValueError, match=refusal):
            entry([[5], prompt])
    assert refusal in dict(llm.generate_iter([[5], prompt], GREEDY))[1].error
    request = llm.engine.add_request(prompt)
    assert refusal in request.error
    assert [output.request for output in llm.engine.step()] == [request]
    if isinstance(prompt, torch.Tensor):
        with pytest.raises(ValueError, match="an iterable of prompts is needed, got a tensor"):
            llm.generate_iter(prompt)
    with pytest.raises(ValueError, match=r"messages must be a non-empty list|message 0: expected a dict"):
        llm.chat(prompt)


def test_a_stream_refuses_its_prompt_at_once_and_knows_its_completion(llm, free_pages):
    with pytest.raises(ValueError, match="token id 512"):
        llm.stream([512])
    stream = llm.stream("abc", GREEDY)
    first = next(stream)
    assert stream.completion.finish_reason == "abort", "it has not ended"
    assert stream.completion.text == first
    rest = list(stream)
    assert stream.completion == llm.generate("abc", GREEDY)[0]
    assert first + "".join(rest) == stream.completion.text


def test_a_chat_streams(llm, free_pages):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    messages.append({"role": "user", "content": "and?"})
    stream = llm.chat(messages, GREEDY, stream=True)
    pieces = list(stream)
    assert len(pieces) > 1
    assert stream.completion == llm.chat(messages, GREEDY)
    assert "".join(pieces) == stream.completion.text


def test_closed(llm):
    with LLM(llm.directory, **OPTIONS) as model:
        expected = f"LLM({str(llm.directory)!r}, {model.runner!r}, Tokenizer({str(llm.directory)!r}, 271 tokens, "
        assert repr(model).startswith(expected)
        stream = model.stream("abc", GREEDY)
        next(stream)
    model.close()
    for use in (lambda: model.generate("abc"), lambda: model.stream([1]), lambda: next(stream)):
        with pytest.raises(RuntimeError, match="this model was closed, and its weights and caches are freed"):
            use()
    stream.close()
    assert "closed" in repr(model)


def test_chat(llm, free_pages):
    ids, explanation = llm.chat_prompt([{"role": "user", "content": "hi"}])
    assert llm.tokenizer.decode(ids) == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"
    assert "built-in" in explanation
    completion = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert completion.prompt_token_ids == ids


def test_a_tokenizer_of_a_larger_vocabulary(llm, tmp_path, monkeypatch):
    """Refused before weights are read."""
    monkeypatch.setattr(ModelRunner, "from_source", lambda *args, **options: pytest.fail("weights were read"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llm.directory / file, tmp_path)
    config = llm.runner.config.replace(vocab_size=200)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ValueError, match=r"gives .* the id \d+, and the model's vocab_size is 200"):
        LLM(tmp_path, **OPTIONS)


def test_without_a_tokenizer_only_ids(llm, free_pages, tmp_path):
    directory = tmp_path / "bare"
    config = llm.runner.config
    write_checkpoint(RandomSource(config, seed=3), config, directory)
    (directory / "tokenizer.json").unlink()
    bare = LLM(directory, **OPTIONS)
    [prompt] = prompts(9)
    assert bare.generate([prompt], GREEDY)[0].token_ids == llm.generate([prompt], GREEDY)[0].token_ids
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        bare.generate("text", GREEDY)


def reply(llm, prompt: str, parts: list[str | tuple[str]], params: SamplingParams = GREEDY) -> TextStream:
    """A request whose tokens are those of the parts: strings are ordinary tokens, tuples name an added one."""
    request = Request.create(llm.runner, llm.tokenizer, llm.tokenizer.encode_prompt(prompt), params)

    def pieces():
        for part in parts:
            plain = isinstance(part, str)
            for token in llm.tokenizer.encode_plain(part) if plain else [llm.tokenizer.token_id(*part)]:
                if not request.finished:
                    request.push(token)
                    yield from filter(None, request.text[-1:])

    return TextStream(llm.engine, request, pieces())


REASONING_ENDS = list(product([(), ("zz", "</thinks", "\n\nx")], [False, True]))


@pytest.mark.parametrize(
    ("stop", "special"),
    tiered(REASONING_ENDS, [REASONING_ENDS[0], REASONING_ENDS[3]], quick_on_gpu=REASONING_ENDS),
    ids=["-text", "-special", "stop-strings-text", "stop-strings-special"],
)
def test_reasoning_ends_at_the_token_alone(llm, tmp_path, special, stop):
    """Whole and streamed, for a tokenizer that has the token as text and for one that has it as special."""
    path = shutil.copytree(llm.directory, tmp_path / "model")
    data = json.loads((path / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["special"] = token["special"] or special
    (path / "tokenizer.json").write_text(json.dumps(data))
    with LLM(path, **OPTIONS) as own:
        params = replace(GREEDY, max_tokens=100, stop=stop)
        for prompt, parts, expected in [
            ("<think>", ["write </think> tag\n", ("</think>",), "\n\nanswer"], ("write </think> tag", "answer")),
            ("<think>\n", ["a", ("</think>",), "b", ("</think>",), "c"], ("a", "bc")),
            ("<think>x</think>", ["say </think> twice"], ("", "say </think> twice")),
            ("hi", [("</think>",), "def"], ("", "def")),
            ("<think>", ["ab\n\nxy"], ("ab", "") if stop else ("ab\n\nxy", "")),
        ]:
            stream = reply(own, prompt, parts, params)
            streamed = list(stream.parts())
            completion = stream.completion
            if completion.finish_reason == "abort":  # as if cut off here: what is held back for a stop string comes out
                stream._request.end("abort")
                completion = stream.completion
            assert (completion.reasoning, completion.answer) == expected
            for part, whole in zip(("reasoning", "answer"), expected, strict=True):
                assert whole.startswith("".join(piece for name, piece in streamed if name == part))
            if not stop:
                assert (
                    tuple("".join(p for n, p in streamed if n == name) for name in ("reasoning", "answer")) == expected
                )


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
DSML = ("｜DSML｜",)
CALLING = [
    "\n\n<", DSML, "tool_calls>\n<", DSML, 'invoke name="weather">\n<', DSML,
    'parameter name="city" string="true">a</｜DSML｜parameter>b</', DSML, "parameter>\n<", DSML,
    'parameter name="days" string="false">[1, 2]</', DSML, "parameter>\n</", DSML, "invoke>\n</", DSML, "tool_calls>",
]  # fmt: skip


@pytest.mark.parametrize("stop", [pytest.param((), marks=pytest.mark.exhaustive), ("zz",)], ids=["", "stop-strings"])
def test_tool_calls(llm, stop):
    """Whole and streamed, and back into the next prompt; markup that is spelled in ordinary tokens is text."""
    params = replace(GREEDY, max_tokens=500, stop=stop, ignore_eos=True)
    options: dict[str, Any] = OPTIONS | {"max_model_len": 3000}
    with LLM(llm.directory, **options) as own:
        messages = [{"role": "user", "content": "hi"}]
        prompt, _ = own.chat_prompt(messages, tools=[TOOL], thinking=True)
        text = required(own.tokenizer).decode(prompt)
        stream = reply(own, text, ["why", ("</think>",), "I look.", *CALLING], params)
        assert stream._request.prompt_token_ids == prompt
        deltas = list(stream.deltas())
        stream._request.end("abort")
        completion = stream.completion
        assert joined(deltas) == completion.message
        assert (completion.reasoning, completion.answer) == ("why", "I look.")
        [call] = completion.tool_calls
        assert (call.name, call.values) == ("weather", {"city": "a</｜DSML｜parameter>b", "days": [1, 2]})
        assert sum("tool_calls" in delta for delta in deltas) > 20, "arguments come in pieces"
        [asked] = completion.message["tool_calls"]
        result = {"role": "tool", "tool_call_id": asked["id"], "content": "12"}
        going_on, _ = own.chat_prompt([*messages, completion.message, result], tools=[TOOL], thinking=True)
        eos = required(own.tokenizer).eos_token_id
        assert going_on[: len(prompt) + len(completion.token_ids) + 1] == [*prompt, *completion.token_ids, eos]
        assert (
            own.chat(
                messages, replace(params, max_tokens=1, ignore_eos=False), tools=[TOOL], tool_choice="required"
            ).prompt_token_ids[-1]
            == (required(own.tokenizer).encode("\n")[0])
        )
        for call in (partial(own.chat, messages), partial(own.generate, "a"), partial(own.stream, "a")):
            with pytest.raises(ValueError, match=r"sampling_params \(vLLM's name; it is params here\)"):
                untyped(call)(sampling_params=GREEDY)
        with pytest.raises(ValueError, match="no such options of a chat: tool; there are thinking, reasoning_effort, "):
            untyped(own).chat(messages, tool=[TOOL])


def joined(deltas: list[dict]) -> dict:
    """The message of a stream's deltas, put together as the `openai` package does."""
    message = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({key: call[key] for key in ("id", "type", "function")})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_an_answer_that_is_continued(llm, free_pages):
    """Its beginning is of the prompt, and newlines behind that are kept."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    ids, _ = llm.chat_prompt(messages, continue_final_message=True)
    text = llm.tokenizer.decode(ids)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>So"
    stream = reply(llm, text, ["\n\nit is"], replace(GREEDY, max_tokens=50))
    assert "".join(piece for _, piece in stream.parts()) == "\n\nit is"
    assert stream.completion.answer == "\n\nit is"


def test_a_special_token_as_stop_string(llm, free_pages):
    """Its text is never there to be found: the token itself ends the request."""
    stream = reply(llm, "hi", ["a", ("<｜User｜>",), "b"], replace(GREEDY, max_tokens=50, stop="<｜User｜>"))
    assert "".join(stream) == "a"
    assert stream.completion.finish_reason == "stop"
    spelled = reply(llm, "hi", ["a<｜User｜>b"], replace(GREEDY, max_tokens=50, stop="<｜User｜>"))
    assert "".join(spelled) == "a"
    ordinary = reply(llm, "hi", ["a", ("</think>",), "b"], replace(GREEDY, max_tokens=50, stop="</think>"))
    assert "".join(ordinary) == "a"
    with pytest.raises(ValueError, match=r"stop='x<｜User｜>': '<｜User｜>' is a special token.*stop_token_ids=\(2,\)"):
        llm.generate("hi", replace(GREEDY, max_tokens=50, stop="x<｜User｜>"))


def test_special_tokens_in_messages(llm, free_pages):
    messages = [{"role": "user", "content": "<｜User｜></think>"}]
    ids, allowed = (llm.chat(messages, GREEDY, allow_special=value).prompt_token_ids for value in (False, True))
    assert ids.count(2) == 1
    assert allowed.count(2) == 2


@pytest.mark.parametrize("text", ["word " * 10**6, " " * 10**7], ids=["words", "blanks"])
def test_a_text_far_beyond_the_context_is_not_tokenized_whole(llm, free_pages, monkeypatch, text):
    longest = 0
    encode = Tokenizer._encode

    def watched(self, backend, text, max_tokens):
        nonlocal longest
        longest = max(longest, len(text) if max_tokens is None else 0)
        return encode(self, backend, text, max_tokens)

    monkeypatch.setattr(Tokenizer, "_encode", watched)
    for call in (llm.generate, llm.stream, lambda text: llm.chat([{"role": "user", "content": text + "<｜User｜>"}])):
        with pytest.raises(ValueError, match=r"a prompt of at least \d+ tokens exceeds max_model_len=200"):
            call(text)
    assert 0 < longest < 10**5
