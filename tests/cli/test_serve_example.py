"""``scripts/serve_example.py`` as the ``openai`` package sees it: an endpoint on a port of this machine."""

from __future__ import annotations

import importlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request as HTTPRequest, urlopen

import pytest
import torch

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.checkpoint import RandomSource, write_checkpoint
from deepseek_attn.text.tokenizer import REPLACEMENT
from tests.support.small_models import two_layers
from tests.support.tiers import exhaustive_on_cpu, tiered
from tests.support.typed import required

SCRIPTS = Path(__file__).parents[2] / "scripts"
NEEDED = "needs the openai package, starlette and uvicorn: pip install openai 'deepseek-attn[serve]'"
if not all(find_spec(name) for name in ("openai", "starlette", "uvicorn")):
    pytest.skip(NEEDED, allow_module_level=True)

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
CALLS = (
    "Hm.</think>I look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n"
    "<｜DSML｜parameter name=\"city\" string=\"true\">Łódź</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke "
    "name=\"weather\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
)  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    config = two_layers()
    path = write_checkpoint(RandomSource(config, seed=3), config, tmp_path_factory.mktemp("model") / "tiny")
    with LLM(path, device="cpu", progress=False, max_model_len=3000, max_num_seqs=4) as model:
        yield model


@pytest.fixture(scope="module")
def client(llm):
    import openai  # takes a second, in the process that runs these tests
    import uvicorn

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        app = importlib.import_module("serve_example").make_app(llm, "tiny")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as found:
        yield found
    server.should_exit = True
    thread.join()


@pytest.fixture
def writes(llm, monkeypatch):
    """Has the model write a text, token by token."""
    make = llm._make_request

    def write(text: str) -> None:
        tokens = llm.tokenizer.encode(text)

        def forced(output, row):
            allowed = torch.full_like(row, -torch.inf)
            allowed[tokens[len(output)]] = 0
            return allowed

        forcing = {"logits_processors": (forced,), "max_tokens": len(tokens)}
        monkeypatch.setattr(
            llm,
            "_make_request",
            lambda prompt, params, *others: make(prompt, replace(params, **forcing), *others),
        )

    return write


def test_models(client):
    import openai  # takes a second

    [model] = client.models.list()
    assert (model.id, client.models.retrieve("tiny")) == ("tiny", model)
    assert model.created <= time.time()
    for ask in (client.models.retrieve, lambda name: client.completions.create(model=name, prompt="a")):
        with pytest.raises(openai.NotFoundError, match="'other/model' does not exist: the only one is 'tiny'") as found:
            ask("other/model")
        assert (found.value.type, found.value.code) == ("invalid_request_error", "model_not_found")


def test_completions(client, llm):
    found = client.completions.create(model="tiny", prompt="Hello", max_tokens=6, temperature=0, logprobs=2)
    [expected] = llm.generate("Hello", replace(GREEDY, logprobs=2))
    [choice] = found.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert choice.logprobs.token_logprobs == list(expected.logprobs.logprobs)
    texts = [llm.tokenizer.decode([i]) for i in expected.token_ids]
    ids = [f"token_id:{i}" for i in expected.token_ids]
    shown = [i if not text or REPLACEMENT in text else text for i, text in zip(ids, texts, strict=True)]
    assert choice.logprobs.tokens == shown
    assert REPLACEMENT in "".join(texts)
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 6
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(expected.prompt_token_ids), 6)
    several = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=3, seed=4, n=2, extra_body={"top_k": 9, "min_p": 0.1}
    )
    params = SamplingParams(max_tokens=3, seed=4, n=2, top_k=9, min_p=0.1)
    outputs = [output.text for completion in llm.generate(["a", "b"], params) for output in completion.outputs]
    assert [choice.text for choice in several.choices] == outputs
    assert several.usage.prompt_tokens == 4


def test_usage_names_tokens_of_the_prefix_cache(llm):
    completions = [replace(found, cached_tokens=2) for found in llm.generate(["Hello", "a"], GREEDY)]
    found = importlib.import_module("serve_example").usage(completions)
    assert found["prompt_tokens_details"] == {"cached_tokens": 4}
    assert found["total_tokens"] == found["prompt_tokens"] + 12


def test_streamed_completions(client, llm):
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0, "stream": True, "logprobs": 1}
    chunks = list(client.completions.create(prompt=["Hello"], stream_options={"include_usage": True}, **options))
    [expected] = llm.generate("Hello", replace(GREEDY, logprobs=1))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected.text
    logprobs = [logprob for chunk in chunks[:-1] for logprob in chunk.choices[0].logprobs.token_logprobs]
    assert logprobs == list(expected.logprobs.logprobs)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 6


@exhaustive_on_cpu
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chats(client, llm, stream):
    expected = llm.chat(HI, replace(GREEDY, logprobs=1), reasoning_effort="max")
    found = client.chat.completions.create(
        model="tiny", messages=HI, max_completion_tokens=6, temperature=0, reasoning_effort="max", stream=stream,
        logprobs=True, top_logprobs=1,
    )  # fmt: skip
    if not stream:
        assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert found.choices[0].message.reasoning_content == expected.reasoning
        logprobs = found.choices[0].logprobs.content
    else:
        chunks = [chunk.choices[0] for chunk in found]
        texts = [getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks]
        assert "".join(texts) == expected.reasoning
        assert chunks[0].delta.role == "assistant"
        assert chunks[-1].finish_reason == "length"
        logprobs = [token for chunk in chunks for token in chunk.logprobs.content]
    assert [token.logprob for token in logprobs] == list(expected.logprobs.logprobs)
    assert all(len(token.top_logprobs) == 1 for token in logprobs)


@exhaustive_on_cpu
@pytest.mark.parametrize("stream", tiered([False, True], [True]))
def test_tools(client, llm, writes, stream):
    writes(CALLS)
    options = {"model": "tiny", "tools": [TOOL], "reasoning_effort": "high"}
    found = client.chat.completions.create(messages=HI, stream=stream, **options)
    if stream:
        chunks = [chunk.choices[0] for chunk in found]
        reason = chunks[-1].finish_reason
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        calls = []
        for piece in (piece for chunk in chunks for piece in chunk.delta.tool_calls or []):
            if piece.id:
                calls.append([piece.id, piece.function.name, ""])
            calls[piece.index][2] += piece.function.arguments
        assert len(chunks) > 20
    else:
        [choice] = found.choices
        reason, content = choice.finish_reason, choice.message.content
        calls = [[call.id, call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in choice.message.tool_calls]
        asked = [*HI, choice.message.model_dump(exclude_none=True), *results]
        writes("Hm.</think>I look.<｜end▁of▁sentence｜>")
        again = client.chat.completions.create(messages=asked, **options)
        assert again.choices[0].message.content == "I look."
    assert (reason, content) == ("tool_calls", "I look.")
    assert [(name, json.loads(text)) for _, name, text in calls] == [("weather", {"city": "Łódź"}), ("weather", {})]
    assert len({number for number, _, _ in calls}) == 2


@pytest.mark.parametrize("text", [CALLS, CALLS[: CALLS.rindex("</")]], ids=["whole", "within the second call"])
@pytest.mark.parametrize("stream", [False, True])
def test_one_call(client, writes, stream, text):
    """Without parallel calls a reply ends behind its first call; streamed, the second is not even computed."""
    writes(text)
    options = {"model": "tiny", "tools": [TOOL], "reasoning_effort": "high", "max_tokens": 400}
    found = client.chat.completions.create(messages=HI, stream=stream, parallel_tool_calls=False, **options)
    if stream:
        chunks = [chunk.choices[0] for chunk in found]
        pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
        assert {piece.index for piece in pieces} == {0}
        reason, arguments = chunks[-1].finish_reason, "".join(piece.function.arguments for piece in pieces)
    else:
        [choice] = found.choices
        [call] = choice.message.tool_calls
        reason, arguments = choice.finish_reason, call.function.arguments
    assert (reason, json.loads(arguments)) == ("tool_calls", {"city": "Łódź"})


@exhaustive_on_cpu
@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs pip install 'deepseek-attn[structured]'")
def test_structured_output(client):
    """By OpenAI's response format, and by the fields of SamplingParams."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema |= {"additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = client.chat.completions.create(model="tiny", messages=HI, max_tokens=200, seed=1, response_format=wanted)
    assert set(json.loads(found.choices[0].message.content)) == {"ok"}
    fields = {"model": "tiny", "max_tokens": 9, "extra_body": {"choices": ["yes", "no"]}}
    assert client.completions.create(prompt="Is it?", **fields).choices[0].text in ("yes", "no")
    chunks = client.completions.create(prompt="Is it?", stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in chunks) in ("yes", "no")


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs pip install 'deepseek-attn[structured]'")
@pytest.mark.parametrize("thinking", [False, True])
def test_a_required_call(client, llm, thinking):
    """Of the function that is named, with arguments of its schema, whole and streamed."""
    schema = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "boolean"}}}
    tools = [TOOL, {"type": "function", "function": {"name": "f", "parameters": schema | {"required": ["kind", "n"]}}}]
    ends = {str(llm.tokenizer.encode_plain("/")[0]): 5} | (
        {str(llm.tokenizer.token_id("</think>")): 20} if thinking else {}
    )
    options = {"model": "tiny", "messages": HI, "tools": tools, "max_tokens": 800, "seed": 1, "logit_bias": ends}
    options |= {"extra_body": {"thinking": {"type": "enabled"}}} if thinking else {}
    for choice, names in (({"type": "function", "function": {"name": "f"}}, {"f"}), ("required", {"f", "weather"})):
        [found] = client.chat.completions.create(tool_choice=choice, **options).choices
        calls = [(call.function.name, call.function.arguments) for call in found.message.tool_calls]
        assert found.finish_reason == "tool_calls"
        assert {name for name, _ in calls} <= names
        for name, text in calls:
            values = json.loads(text)
            assert (values["kind"] in ("a", "b") and type(values["n"]) is bool) if name == "f" else values == {}
        streamed: list[tuple[str, str]] = []
        for chunk in client.chat.completions.create(tool_choice=choice, stream=True, **options):
            for piece in chunk.choices[0].delta.tool_calls or []:
                if piece.id:
                    streamed.append((piece.function.name, ""))
                streamed[-1] = (streamed[-1][0], streamed[-1][1] + piece.function.arguments)
        assert streamed == calls


@pytest.mark.exhaustive
def test_requests_at_the_same_time(client, llm):
    def ask(i: int) -> str:
        found = client.completions.create(
            model="tiny", prompt=f"word {i}", max_tokens=6, temperature=0, stream=bool(i % 2)
        )
        return "".join(chunk.choices[0].text for chunk in found) if i % 2 else found.choices[0].text

    with ThreadPoolExecutor(9) as threads:
        found = list(threads.map(ask, range(9)))
    assert found == [completion.text for completion in llm.generate([f"word {i}" for i in range(9)], GREEDY)]


@pytest.mark.parametrize("stream", tiered([False, True], [False]))
def test_a_client_that_goes_away(client, llm, stream):
    """Its requests end, of an answer as a whole too."""
    prompts = ["a"] if stream else ["a", "b"]
    body = {"prompt": prompts, "max_tokens": 2900, "ignore_eos": True, "stream": stream}
    stats, content = llm.engine.stats, json.dumps(body).encode()
    before, generated = stats.finished["abort"], stats.generated  # requests that no step has computed are never aborted
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        waits_until(lambda: stats.generated > generated and len(llm.engine.scheduler.running) == len(prompts))
    waits_until(lambda: stats.finished["abort"] == before + len(prompts))
    assert not llm.engine.has_unfinished


def waits_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{}", "prompt is missing"),
        ("[1]", "must be a JSON object, got list"),
        ("{", "Expecting property name"),
        ('{"prompt": ' + "[" * 5000 + "]" * 5000 + "}", "more than 64 objects or lists inside one another"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' is repeated"),
        ('{"prompt": []}', "prompt is an empty list"),
        ('{"prompt": ["a", [99999]]}', "prompt 1: token id 99999 is not in the vocabulary"),
        ('{"prompt": ["a", "b"], "stream": true}', "2 prompts: a stream is one text"),
        ('{"prompt": "a", "n": 1000000}', "n=1000000: must be an integer from 1 to"),
    ],
    ids=lambda value: value[:40],
)
def test_wrong_bodies(client, llm, body, message):
    status, _, error = refused(client, "completions", body.encode())
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", None)
    assert message in error["message"]
    assert not llm.engine.has_unfinished


def post(url: str, body: bytes, kind: str = "application/json") -> HTTPRequest:
    return HTTPRequest(url, body, {"Content-Type": kind})


def refused(client, path: str, body: bytes | None = None, kind: str = "application/json") -> tuple:
    """Status, headers and error of a request that is refused, by GET without a body."""
    with pytest.raises(HTTPError) as error:
        urlopen(post(f"{client.base_url}{path}", body, kind) if body else f"{client.base_url}{path}")
    found = json.load(error.value)
    assert found.keys() == {"error"}
    assert found["error"].keys() == {"message", "type", "param", "code"}
    return error.value.code, error.value.headers, found["error"]


def test_other_paths_and_methods(client):
    status, _, error = refused(client, "engines")
    assert (status, error["code"]) == (404, None)
    assert error["message"].startswith("GET /v1/engines: Not Found; there are /v1/models, /v1/models/{name}, /v1/comp")
    status, headers, error = refused(client, "chat/completions")
    assert (status, headers["Allow"], error["code"]) == (405, "POST", "method_not_supported")
    assert error["message"] == "GET /v1/chat/completions: Method Not Allowed; the path takes POST"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types(client, kind):
    """A page of another site may send them from a browser on this machine."""
    status, _, error = refused(client, "completions", b'{"prompt": "a"}', kind)
    assert (status, error["code"]) == (400, "unsupported_content_type")
    assert f"the header Content-Type is {kind!r}: it must be application/json" in error["message"]


def test_a_large_body(client, monkeypatch):
    monkeypatch.setattr(importlib.import_module("serve_example"), "MAX_BODY_BYTES", 1000)
    assert client.completions.create(model="tiny", prompt="a" * 800, max_tokens=1).choices
    status, _, error = refused(client, "completions", json.dumps({"prompt": "a" * 1000}).encode())
    assert (status, error["type"]) == (413, "invalid_request_error")
    assert "the body is larger than 1000 bytes" in error["message"]


def test_interrupted_where_a_shell_ignores_ctrl_c(llm):
    """As of background processes: uvicorn takes the signal all the same."""
    words = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, SCRIPTS / "serve_example.py"]
    words += ["--model", llm.directory, "--device", "cpu", "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            log = required(process.stderr)
            address = next(found[0] for line in log if (found := re.search(r"http://\S+(?= until)", line)))
            urlopen(f"{address}/models").close()
            process.send_signal(signal.SIGINT)
            shown = log.read()
        except BaseException:
            process.kill()
            raise
    assert (process.returncode, "Traceback" in shown) == (128 + signal.SIGINT, False)


def test_interrupted(llm):
    """Twice, while requests run, of which one streams: no traceback."""
    words = [sys.executable, SCRIPTS / "serve_example.py", "--model", llm.directory, "--device", "cpu", "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    with process, process.stderr as log, ThreadPoolExecutor() as threads:
        try:
            address = next(found[0] for line in log if (found := re.search(r"http://\S+(?= until)", line)))
            body = json.dumps({"prompt": "hi", "max_tokens": 2900, "ignore_eos": True, "stream": False})
            single = threads.submit(urlopen, post(f"{address}/completions", body.encode()))
            streamed = urlopen(post(f"{address}/completions", body.replace("false", "true").encode()))
            assert streamed.readline().startswith(b"data: {")
            process.send_signal(signal.SIGINT)
            shown = [next(line for line in log if "Waiting for connections" in line)]
            process.send_signal(signal.SIGINT)
            shown += log
        except BaseException:
            process.kill()
            raise
        streamed.close()
        assert isinstance(single.exception(), OSError)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in "".join(shown)


@pytest.mark.parametrize(("host", "message"), [("127.0.0.1", "in use"), ("192.0.2.1", "192.0.2.1"), ("x" * 70, "xxx")])
def test_an_address_that_cannot_be_used(monkeypatch, capsys, host, message):
    """It is refused before a model is loaded."""
    monkeypatch.syspath_prepend(SCRIPTS)
    serve = importlib.import_module("serve_example")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["serve_example.py", "--model", "none", "--host", host, "--port", str(port)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            serve.main()
    shown = capsys.readouterr().err
    assert end.value.code == 2
    assert f"--host {host} --port {port}: " in shown
    assert message in shown
    assert "checkpoint" not in shown


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": 5}, "model=5: must be text"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "there is no function 'f' among tools: 'weather'",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function"}},
            "tool_choice={'type': 'function'}: supported are 'auto'",
        ),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"temperature": -1}, "temperature"),
        ({"echo": True}, "not supported: echo; supported are "),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]: expected"),
        ({"reasoning_effort": "huge"}, "reasoning_effort='huge' is not supported"),
        ({"n": 2, "stream": True}, "n=2"),
        ({"stream": "false"}, "stream='false': must be true or false"),
        ({"stream": True, "stream_options": "x"}, "stream_options='x': expected"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_tokens=0: must be an integer >= 1"),
        ({"logprobs": 5}, "logprobs=5: must be true or false"),
        ({"top_logprobs": 5}, "top_logprobs=5 needs logprobs: true"),
        ({"thinking": {"type": "on"}}, "its type must be 'enabled' or 'disabled'"),
        ({"thinking": "no"}, "thinking='no': must be True or False"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls='no': must be true or false"),
    ],
)
def test_wrong_requests(client, body, message):
    import openai

    fields = {"model": "tiny", "messages": HI} | body
    known = {key: fields.pop(key) for key in ("model", "messages")}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**known, extra_body=fields)
    assert message in error.value.message
