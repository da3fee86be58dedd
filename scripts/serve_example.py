"""An OpenAI-compatible endpoint over one `LLM`: an example, of one process and without authentication.

    pip install 'deepseek-attn[serve]'
    python scripts/serve_example.py --model DIR --port 8000

Serves ``/v1/completions`` and ``/v1/chat/completions``, also streamed; simultaneous requests are batched. A body has
OpenAI's keys, the fields of `SamplingParams` by their names and, for chats, the options of `ChatOptions`. Reasoning is
``reasoning_content`` of messages and deltas, as in DeepSeek's API. Fleets belong to vLLM or SGLang: docs/engines.md.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from itertools import chain
from typing import Any

from deepseek_attn import LLM, SamplingParams
from deepseek_attn.cli.generate import default_checkpoint
from deepseek_attn.cli.options import Parser, add_runner_options, check_bounds, runner_options
from deepseek_attn.engine.completion import Completion, RequestFailed
from deepseek_attn.engine.llm import TextStream
from deepseek_attn.text.chat import ChatOptions
from deepseek_attn.text.tokenizer import REPLACEMENT

try:
    import uvicorn  # pyright: ignore[reportMissingImports]  # the extra serve
    from anyio.to_thread import current_default_thread_limiter
    from starlette.applications import Starlette  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.concurrency import iterate_in_threadpool, run_in_threadpool  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.requests import Request  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.responses import JSONResponse, Response, StreamingResponse  # pyright: ignore[reportMissingImports]  # the extra serve
except ImportError as missing:
    sys.exit(f"{missing}: pip install 'deepseek-attn[serve]'")

SAMPLING = {field.name for field in fields(SamplingParams)} - {"logits_processors", "prompt_logprobs"}
CHAT = ChatOptions.__annotations__.keys()
OTHERS = {"model", "stream", "stream_options", "max_completion_tokens", "top_logprobs"}
OTHERS |= {"user", "metadata", "store", "service_tier", "parallel_tool_calls"}  # these change no answer


def ask(llm: LLM, body: dict[str, Any], chat: bool) -> Any:
    """A list of completions, or the `TextStream` of a single one. ValueError: the request is wrong."""
    known = SAMPLING | OTHERS | ({"messages", *CHAT} if chat else {"prompt"})
    given = {key: value for key, value in body.items() if value is not None}
    if unknown := sorted(key for key, value in given.items() if value and key not in known):
        raise ValueError(f"not supported: {', '.join(unknown)}; supported are {', '.join(sorted(known))}")
    stream, given["max_tokens"] = bool(given.get("stream")), body.get("max_completion_tokens") or body.get("max_tokens")
    if chat:
        given["logprobs"] = given.get("top_logprobs", 0) if given.get("logprobs") else None
    params = SamplingParams(**{key: given[key] for key in SAMPLING & given.keys()})
    if chat:
        options: Any = {key: given[key] for key in CHAT & given.keys()}
        if isinstance(thinking := options.get("thinking"), dict):  # as in DeepSeek's API
            options["thinking"] = thinking.get("type") == "enabled"
        found = llm.chat(given.get("messages", []), params, stream=stream, **options)
        return found if stream else [found]
    if (prompt := given.get("prompt")) is None:
        raise ValueError("prompt is missing")
    single = isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int)
    return llm.stream(prompt[0] if single else prompt, params) if stream else llm.generate(prompt, params)


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


def finish_reason(completion: Completion, chat: bool) -> str:
    called = chat and completion.finish_reason == "stop" and completion.tool_calls
    return "tool_calls" if called else completion.finish_reason


def usage(completions: list[Completion]) -> dict[str, int]:
    prompt = sum(len(completion.prompt_token_ids) for completion in completions)
    generated = sum(len(output.token_ids) for completion in completions for output in completion.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def refusal(error: Exception) -> dict[str, Any]:
    kind = "server_error" if isinstance(error, RequestFailed) else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": None}}


def make_app(llm: LLM, name: str) -> Starlette:
    """The ASGI application; ``name``: of the model."""

    def head(kind: str) -> dict[str, Any]:
        return {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}

    def chunks(stream: TextStream, chat: bool, with_usage: bool) -> Iterator[dict[str, Any]]:
        first, sent = head("chat.completion.chunk" if chat else "text_completion"), 0
        try:
            for piece in chain(stream.deltas() if chat else stream, [None]):  # None: the end
                now, part = stream.completion, {"index": 0, "delta" if chat else "text": piece or ({} if chat else "")}
                reason = finish_reason(now, chat) if piece is None else None
                part |= {"finish_reason": reason, "logprobs": show_logprobs(llm, now, chat, sent)}
                sent = len(now.token_ids)
                yield first | {"choices": [part]}
            if with_usage:
                yield first | {"choices": [], "usage": usage([stream.completion])}
        except RequestFailed as error:
            yield refusal(error)

    async def events(stream: TextStream, *options: bool) -> AsyncIterator[str]:
        """Server-sent events; the request is cancelled when the client goes away."""
        try:
            async for chunk in iterate_in_threadpool(chunks(stream, *options)):
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            stream.close()

    async def answer(request: Request) -> Response:
        # a thread for each request that can run, and some for those that wait
        current_default_thread_limiter().total_tokens = 2 * llm.runner.layout.max_num_seqs + 4
        body, chat = await request.json(), "chat" in request.url.path
        if not isinstance(body, dict):
            raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
        if body.get("model") not in (None, name):
            raise ValueError(f"model {body['model']!r:.80} is not here: the only one is {name!r}")
        found = await run_in_threadpool(ask, llm, body, chat)
        if isinstance(found, TextStream):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(events(found, chat, with_usage), media_type="text/event-stream")
        choices = []
        for index, output in enumerate(output for completion in found for output in completion.outputs):
            if output.error:
                raise RequestFailed(output.error)
            part = {"message": output.message} if chat else {"text": output.text}
            part |= {"finish_reason": finish_reason(output, chat), "logprobs": show_logprobs(llm, output, chat)}
            choices.append({"index": index, **part})
        kind = "chat.completion" if chat else "text_completion"
        return JSONResponse(head(kind) | {"choices": choices, "usage": usage(found)})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "deepseek-attn"}]})

    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse(refusal(error), 500 if isinstance(error, RequestFailed) else 400)

    app = Starlette(exception_handlers=dict.fromkeys((ValueError, TypeError, OverflowError, RequestFailed), refuse))
    app.add_route("/v1/models", models)
    for path in ("/v1/completions", "/v1/chat/completions"):
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
        with LLM(args.model or default_checkpoint(), speculate=args.speculate, **runner_options(args)) as llm:
            uvicorn.run(make_app(llm, args.name or args.model or llm.directory.name), host=args.host, port=args.port)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
