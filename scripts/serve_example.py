"""An OpenAI-compatible endpoint over one `LLM`: an example, of one process and without authentication.

    pip install 'deepseek-attn[serve]'
    python scripts/serve_example.py --model DIR --port 8000

Serves ``/v1/completions`` and ``/v1/chat/completions``, also streamed; simultaneous requests are batched. A body has
OpenAI's keys, the fields of `SamplingParams` by their names and, for chats, the options of `ChatOptions`. Reasoning is
``reasoning_content`` of messages and deltas, as in DeepSeek's API. Fleets belong to vLLM or SGLang: docs/engines.md.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, suppress
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.cli.generate import default_checkpoint
from deepseek_attn.cli.options import Parser, add_runner_options, check_bounds, runner_options
from deepseek_attn.cli.terminal import say
from deepseek_attn.engine.completion import Completion, RequestFailed
from deepseek_attn.engine.llm import TextStream
from deepseek_attn.runner.prompts import prompt_list
from deepseek_attn.text.chat import ChatOptions
from deepseek_attn.text.conversation import Chat
from deepseek_attn.text.tokenizer import REPLACEMENT
from deepseek_attn.utils.json_files import parse_json

try:
    import uvicorn  # pyright: ignore[reportMissingImports]  # the extra serve
    from anyio.to_thread import current_default_thread_limiter
    from starlette.applications import Starlette  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.concurrency import iterate_in_threadpool, run_in_threadpool  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.exceptions import HTTPException  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.requests import Request  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.responses import JSONResponse, Response, StreamingResponse  # pyright: ignore[reportMissingImports]  # the extra serve
except ImportError as missing:
    sys.exit(f"{missing}: pip install 'deepseek-attn[serve]'")

SAMPLING = {field.name for field in fields(SamplingParams)} - {"logits_processors", "prompt_logprobs"}
CHAT = ChatOptions.__annotations__.keys()
REFUSED = (ValueError, TypeError, OverflowError)  # of a wrong request
OTHERS = {"model", "stream", "stream_options", "max_completion_tokens", "top_logprobs", "parallel_tool_calls"}
OTHERS |= {"user", "metadata", "store", "service_tier"}  # these change no answer


PATHS = ("/v1/models", "/v1/models/{name:path}", "/v1/completions", "/v1/chat/completions")
MAX_BODY_BYTES = 1 << 26
GONE_SECONDS = 0.1  # between two checks whether a client is still connected
SHUTDOWN_SECONDS = 5  # after Ctrl-C, for requests that run


class Refusal(HTTPException):
    """A request that is refused with the status and, where OpenAI's API has one, the code of that API."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(status, message)
        self.code = code


class Asked(NamedTuple):
    """A checked request.

    Attributes:
        prompts, params: arguments of `LLM.generate`.
        stream: answer with server-sent events; with_usage: end them with the numbers of tokens.
        one_call: end a reply behind its first tool call.
    """

    prompts: list[Any]
    params: SamplingParams
    stream: bool
    with_usage: bool
    one_call: bool = False


def read_body(llm: LLM, body: dict[str, Any], chat: bool) -> Asked:
    """The request of a body. ValueError: it is wrong."""
    known = SAMPLING | OTHERS | ({"messages", *CHAT} if chat else {"prompt"})
    given = {key: value for key, value in body.items() if value is not None}
    if unknown := sorted(key for key, value in given.items() if value and key not in known):
        raise ValueError(f"not supported: {', '.join(unknown)}; supported are {', '.join(sorted(known))}")
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool):
        raise ValueError(f"stream={stream!r:.80}: must be true or false")
    if not isinstance(options, dict) or not isinstance(with_usage := options.get("include_usage", False), bool):
        raise ValueError(f'stream_options={options!r:.80}: expected {{"include_usage": true or false}}')
    if "max_completion_tokens" in given:
        given["max_tokens"] = given["max_completion_tokens"]
    if chat:
        given["logprobs"] = chat_logprobs(given)
    params = SamplingParams(**{key: given[key] for key in SAMPLING & given.keys()})
    if chat:
        choices: Any = {key: given[key] for key in CHAT & given.keys()}
        if isinstance(thinking := choices.get("thinking"), dict):  # as in DeepSeek's API
            if (kind := thinking.get("type")) not in ("enabled", "disabled"):
                raise ValueError(f"thinking={thinking!r:.80}: its type must be 'enabled' or 'disabled'")
            choices["thinking"] = kind == "enabled"
        if not isinstance(several := given.get("parallel_tool_calls", True), bool):
            raise ValueError(f"parallel_tool_calls={several!r:.80}: must be true or false")
        messages = given.get("messages", [])
        prompt, params = llm.prompts.of_chat(Chat(messages, choices), params)
        return Asked([prompt], params, stream, with_usage, one_call=not several)
    if (prompt := given.get("prompt")) is None:
        raise ValueError("prompt is missing")
    prompts = prompt_list(prompt)
    if not prompts:
        raise ValueError("prompt is an empty list: write text, token ids, or a list of these")
    if stream and len(prompts) > 1:
        raise ValueError(f"{len(prompts)} prompts: a stream is one text; send a request for each")
    return Asked(prompts, params, stream, with_usage)


def chat_logprobs(given: dict[str, Any]) -> int | None:
    """`SamplingParams.logprobs` of a chat."""
    wanted = given.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise ValueError(f"logprobs={wanted!r:.80}: must be true or false; top_logprobs is the number of alternatives")
    if "top_logprobs" in given and not wanted:
        raise ValueError(f"top_logprobs={given['top_logprobs']!r:.80} needs logprobs: true")
    return given.get("top_logprobs", 0) if wanted else None


def complete(llm: LLM, asked: Asked, gone: threading.Event) -> list[Completion]:
    """Completions of all prompts; none once ``gone`` is set, and then nothing of them runs on.

    Raises:
        ValueError: a prompt cannot be run.
    """
    found: dict[int, Completion] = {}

    def prompts() -> Iterator[Any]:
        yield from asked.prompts
        while len(found) < len(asked.prompts):  # called again before each step
            if gone.is_set():
                raise ClientGoneError
            yield None

    room = len(asked.prompts) * asked.params.n + 1  # one more than there are, so that `prompts` is called
    try:
        with closing(llm.generate_iter(prompts(), asked.params, max_in_flight=room)) as completions:
            for index, completion in completions:
                if completion.error and not completion.prompt_token_ids:
                    raise ValueError(f"prompt {index}: {completion.error}")
                found[index] = completion
    except ClientGoneError:
        return []
    return [found[index] for index in range(len(asked.prompts))]


class ClientGoneError(Exception):
    """The client of a request has closed its connection, or the server stops."""


def show_logprobs(llm: LLM, completion: Completion, chat: bool, start: int = 0) -> dict[str, Any] | None:
    """Log-probabilities from token number ``start`` on; a token that is not text by itself is named by its id."""
    if completion.logprobs is None or (tokenizer := llm.tokenizer) is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        whole = bool(text) and REPLACEMENT not in text
        encoded = list(text.encode()) if whole else None
        return {"token": text if whole else f"token_id:{token}", "logprob": logprob, "bytes": encoded}

    found = completion.logprobs[start:]
    tokens = [entry(one.token_id, one.logprob) for one in found]
    tops = [[entry(*other) for other in one.top.items()] for one in found]
    if chat:
        return {"content": [token | {"top_logprobs": top} for token, top in zip(tokens, tops, strict=True)]}
    shown = {"tokens": [token["token"] for token in tokens], "token_logprobs": [token["logprob"] for token in tokens]}
    return shown | {"top_logprobs": [{other["token"]: other["logprob"] for other in top} for top in tops]}


def finish_reason(completion: Completion, chat: bool, one_call: bool) -> str:
    """OpenAI's word for the end; with ``one_call`` the reply ends where a second call begins."""
    calls = len(completion.tool_calls) if chat else 0
    ended = completion.finish_reason == "stop" or (one_call and calls > 1)
    return "tool_calls" if calls and ended else completion.finish_reason


def usage(completions: list[Completion]) -> dict[str, Any]:
    prompt = sum(len(completion.prompt_token_ids) for completion in completions)
    generated = sum(len(output.token_ids) for completion in completions for output in completion.outputs)
    cached = {"cached_tokens": sum(completion.cached_tokens for completion in completions)}
    totals = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return totals | {"prompt_tokens_details": cached}


def refusal(error: Exception, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if isinstance(error, REFUSED) else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


async def json_of(request: Request) -> dict[str, Any]:
    """The body of a request. Refusal, or ValueError: it is not a JSON object."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":  # others need no consent across sites in browsers
        raise Refusal(
            400, f"the header Content-Type is {kind!r:.80}: it must be application/json", "unsupported_content_type"
        )
    received = bytearray()
    async for part in request.stream():
        received += part
        if len(received) > MAX_BODY_BYTES:
            raise Refusal(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send fewer prompts in a request")
    body = await run_in_threadpool(parse_json, bytes(received), "the body")
    if not isinstance(body, dict):
        raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def make_app(llm: LLM, name: str) -> Starlette:
    """The ASGI application; ``name``: of the model."""
    started = int(time.time())

    def head(kind: str) -> dict[str, Any]:
        return {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}

    def chunks(stream: TextStream, chat: bool, asked: Asked) -> Iterator[dict[str, Any]]:
        first, sent = head("chat.completion.chunk" if chat else "text_completion"), 0
        try:
            for piece in chain(stream.deltas() if chat else stream, [None]):  # None: the end
                calls = piece.get("tool_calls", []) if isinstance(piece, dict) else []
                if asked.one_call and any(call["index"] > 0 for call in calls):
                    piece = None
                now, part = stream.completion, {"index": 0, "delta" if chat else "text": piece or ({} if chat else "")}
                reason = finish_reason(now, chat, asked.one_call) if piece is None else None
                part |= {"finish_reason": reason, "logprobs": show_logprobs(llm, now, chat, sent)}
                sent = len(now.token_ids)
                yield first | {"choices": [part]}
                if piece is None:
                    break
            if asked.with_usage:
                yield first | {"choices": [], "usage": usage([stream.completion])}
        except RequestFailed as error:
            yield refusal(error)

    async def events(stream: TextStream, chat: bool, asked: Asked) -> AsyncIterator[str]:
        """Server-sent events; the request is cancelled when the client goes away."""
        try:
            async for chunk in iterate_in_threadpool(chunks(stream, chat, asked)):
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            stream.close()

    async def completed(request: Request, asked: Asked) -> list[Completion]:
        """The completions; none if the client went away."""
        gone = threading.Event()
        work = asyncio.ensure_future(run_in_threadpool(complete, llm, asked, gone))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=GONE_SECONDS)
                if await request.is_disconnected():
                    return []
            return work.result()
        except asyncio.CancelledError:
            raise RequestFailed("the server was stopped") from None
        finally:
            gone.set()

    async def answer(request: Request) -> Response:
        # a thread for each request that can run, and some for those that wait
        current_default_thread_limiter().total_tokens = 2 * llm.runner.layout.max_num_seqs + 4
        body, chat = await json_of(request), "chat" in request.url.path
        model = body.get("model")
        if not isinstance(model, str | None):
            raise ValueError(f"model={model!r:.80}: must be text")
        check_model(model)
        asked = await run_in_threadpool(read_body, llm, body, chat)
        if asked.stream:
            stream = await run_in_threadpool(llm.stream, asked.prompts[0], asked.params)
            return StreamingResponse(events(stream, chat, asked), media_type="text/event-stream")
        found = await completed(request, asked)
        choices = []
        for index, output in enumerate(output for completion in found for output in completion.outputs):
            if output.error:
                raise RequestFailed(output.error)
            part: dict[str, Any] = {"message": output.message} if chat else {"text": output.text}
            if asked.one_call and "tool_calls" in part["message"]:
                part["message"]["tool_calls"] = part["message"]["tool_calls"][:1]
            reason = finish_reason(output, chat, asked.one_call)
            part |= {"finish_reason": reason, "logprobs": show_logprobs(llm, output, chat)}
            choices.append({"index": index, **part})
        kind = "chat.completion" if chat else "text_completion"
        return JSONResponse(head(kind) | {"choices": choices, "usage": usage(found)})

    def check_model(model: str | None) -> None:
        if model not in (None, name):
            raise Refusal(404, f"the model {model!r:.80} does not exist: the only one is {name!r}", "model_not_found")

    async def models(request: Request) -> Response:
        found = {"id": name, "object": "model", "created": started, "owned_by": "deepseek-attn"}
        wanted = request.path_params.get("name")
        check_model(wanted)
        return JSONResponse({"object": "list", "data": [found]} if wanted is None else found)

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, Refusal):
            return JSONResponse(refusal(ValueError(error.detail), error.code), error.status_code)
        if isinstance(error, HTTPException):  # another path or method
            message, code = f"{request.method} {request.url.path}: {error.detail}", None
            if error.status_code == 404:
                message += f"; there are {', '.join(PATHS).replace(':path', '')}"
            elif error.status_code == 405:
                code, allowed = "method_not_supported", (error.headers or {}).get("Allow")
                message += f"; the path takes {allowed}"
            return JSONResponse(refusal(ValueError(message), code), error.status_code, error.headers)
        return JSONResponse(refusal(error), 400 if isinstance(error, REFUSED) else 500)

    app = Starlette(exception_handlers=dict.fromkeys((*REFUSED, RequestFailed, HTTPException, Exception), refuse))
    for path in PATHS[:2]:
        app.add_route(path, models)
    for path in PATHS[2:]:
        app.add_route(path, answer, methods=["POST"])
    return app


def main() -> None:
    parser = Parser(description="An OpenAI-compatible endpoint over one model: an example.")
    parser.add_argument("--model", metavar="DIR|ID", help="checkpoint (default: the small one in the package)")
    parser.add_argument("--name", help="name of the model in requests (default: --model)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--speculate", type=int, default=0, metavar="N", help="draft tokens per step")
    add_runner_options(parser)
    args = parser.parse_args()
    try:
        check_bounds(args)
        with (
            listening(args.host, args.port) as place,  # before the model is loaded
            LLM(args.model or default_checkpoint(), speculate=args.speculate, **runner_options(args)) as llm,
        ):
            app = make_app(llm, args.name or args.model or llm.directory.name)
            host, port = place.getsockname()[:2]
            place.listen()  # clients that read the address wait for uvicorn
            say(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/v1 until Ctrl-C")
            settings = uvicorn.Config(stoppable(app), lifespan="off", timeout_graceful_shutdown=SHUTDOWN_SECONDS)
            server = uvicorn.Server(settings)
            server.run(sockets=[place])
            if server.started:
                raise KeyboardInterrupt  # uvicorn stops at Ctrl-C, but only returns where a shell ignores the signal
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(128 + signal.SIGINT)


def stoppable(app: Starlette) -> Callable[..., Awaitable[None]]:
    """The app, whose tasks end without an exception when the server stops: uvicorn prints a traceback of any."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return call


def listening(host: str, port: int) -> socket.socket:
    """A socket at an address. ValueError: it is taken, or not of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, kind, protocol)
        try:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind(address)
        except OSError:
            place.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--host {host} --port {port}: {reason}; name another address, or port 0 for a free one"
        ) from None
    return place


if __name__ == "__main__":
    main()
