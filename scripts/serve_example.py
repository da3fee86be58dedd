"""An OpenAI-compatible endpoint over one `LLM`: an example, of one process and without authentication.

    pip install 'deepseek-attn[serve]'
    python scripts/serve_example.py --model DIR --port 8000

``/v1/completions`` and ``/v1/chat/completions``, also streamed; requests that come at the same time are batched. A body
has OpenAI's keys, the fields of `SamplingParams` by their names and, for chats, the options of `ChatOptions`. Reasoning
is ``reasoning_content`` of messages and deltas, as in DeepSeek's API.

Fleets belong to vLLM or SGLang, which run on this library's kernels by its plugins: docs/engines.md.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

from deepseek_attn.cli.generate import default_checkpoint
from deepseek_attn.cli.options import Parser, add_runner_options, check_bounds, integer, runner_options
from deepseek_attn.engine.llm import LLM, TextStream
from deepseek_attn.engine.request import Completion, RequestFailed
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.runner.logprobs import TokenLogprobs
from deepseek_attn.text.chat import ChatOptions
from deepseek_attn.text.tokenizer import REPLACEMENT, Tokenizer

try:
    import uvicorn  # pyright: ignore[reportMissingImports]  # the extra serve
    from anyio.to_thread import current_default_thread_limiter, run_sync
    from starlette.applications import Starlette  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.requests import Request  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.responses import JSONResponse, Response, StreamingResponse  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.routing import Route  # pyright: ignore[reportMissingImports]  # the extra serve
except ImportError as missing:
    sys.exit(f"{missing}: pip install 'deepseek-attn[serve]'")

SAMPLING = {field.name for field in fields(SamplingParams)} - {"logits_processors", "prompt_logprobs"}
OTHERS = {"model", "stream", "stream_options", "max_completion_tokens", "top_logprobs"}
IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls"}  # nothing follows from them


def ask(llm: LLM, name: str, body: dict[str, Any], chat: bool) -> list[Completion] | TextStream:
    """All completions, or the stream of a single one. ValueError: the request is wrong."""
    if body.get("model") not in (None, name):
        raise ValueError(f"model {body['model']!r:.80} is not here: the only one is {name!r}")
    known = SAMPLING | OTHERS | IGNORED | ({"messages", *ChatOptions.__annotations__} if chat else {"prompt"})
    given = {key: value for key, value in body.items() if value is not None}
    if unknown := sorted(key for key, value in given.items() if value and key not in known):
        raise ValueError(f"not supported: {', '.join(unknown)}; supported are {', '.join(sorted(known))}")
    if chat:
        given["logprobs"] = given.get("top_logprobs", 0) if given.get("logprobs") else None
    given["max_tokens"] = given.get("max_completion_tokens") or given.get("max_tokens")
    params, stream = SamplingParams(**{key: given[key] for key in SAMPLING & given.keys()}), bool(given.get("stream"))
    if chat:
        options: Any = {key: given[key] for key in ChatOptions.__annotations__.keys() & given.keys()}
        if isinstance(options.get("thinking"), dict):  # as in DeepSeek's API
            options["thinking"] = options["thinking"].get("type") == "enabled"
        found: Any = llm.chat(given.get("messages", []), params, stream=stream, **options)
        return found if stream else [found]
    if (prompt := given.get("prompt")) is None:
        raise ValueError("prompt is missing")
    single = isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int)
    return llm.stream(prompt[0] if single else prompt, params) if stream else llm.generate(prompt, params)


def logprobs(found: TokenLogprobs | None, tokenizer: Tokenizer | None, chat: bool) -> dict[str, Any] | None:
    """Log-probabilities in the form of chats, or of completions; a token that is no text by itself has its id."""
    if found is None or tokenizer is None:
        return None

    def entry(i: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([i])
        part = not text or REPLACEMENT in text
        encoded = None if part else list(text.encode())
        return {"token": f"token_id:{i}" if part else text, "logprob": logprob, "bytes": encoded}

    tops = [[entry(*item) for item in one.top.items()] for one in found]
    tokens = [entry(one.token_id, one.logprob) for one in found]
    if chat:
        return {"content": [token | {"top_logprobs": top} for token, top in zip(tokens, tops, strict=True)]}
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [{one["token"]: one["logprob"] for one in top} for top in tops],
    }


def deltas(stream: TextStream) -> Iterator[dict[str, Any]]:
    """What each part of a chat's reply adds to the message."""
    yield {"role": "assistant", "content": ""}
    index = -1
    for part, piece in stream.parts():
        if part == "tool_call":
            index += 1
            named = {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
            yield {"tool_calls": [named | {"function": {"name": piece, "arguments": ""}}]}
        elif part == "arguments":
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
        else:
            yield {"reasoning_content" if part == "reasoning" else "content": piece}


def message(completion: Completion) -> dict[str, Any]:
    calls = [call | {"id": f"call_{uuid.uuid4().hex}"} for call in completion.message.get("tool_calls", [])]
    return completion.message | ({"tool_calls": calls} if calls else {})


def ended(completion: Completion, chat: bool) -> str:
    """OpenAI's reason for the end."""
    calls = chat and completion.finish_reason == "stop" and completion.tool_calls
    return "tool_calls" if calls else completion.finish_reason


def usage(completions: list[Completion]) -> dict[str, int]:
    prompt = sum(len(completion.prompt_token_ids) for completion in completions)
    generated = sum(len(output.token_ids) for completion in completions for output in completion.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def refused(error: Exception) -> dict[str, Any]:
    kind = "server_error" if isinstance(error, RequestFailed) else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": None}}


def make_app(llm: LLM, name: str) -> Starlette:
    """The ASGI application; ``name``: of the model."""

    def head(kind: str) -> dict[str, Any]:
        return {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}

    async def events(stream: TextStream, with_usage: bool, chat: bool) -> AsyncIterator[str]:
        """Server-sent events; the stream is cancelled when the client goes away."""
        first, sent = head("chat.completion.chunk" if chat else "text_completion"), 0

        def chunk(piece: Any, reason: str | None = None) -> dict[str, Any]:
            nonlocal sent
            known = stream.completion.logprobs
            new, sent = None if known is None else known[sent:], 0 if known is None else len(known)
            choice = {"index": 0, "finish_reason": reason, "logprobs": logprobs(new, llm.tokenizer, chat)}
            return first | {"choices": [choice | {"delta" if chat else "text": piece}]}

        def chunks() -> Iterator[dict[str, Any]]:
            try:
                yield from map(chunk, deltas(stream) if chat else stream)
            except RequestFailed as error:
                yield refused(error)
                return
            yield chunk({} if chat else "", ended(stream.completion, chat))
            if with_usage:
                yield first | {"choices": [], "usage": usage([stream.completion])}

        try:
            found = chunks()
            while (each := await run_sync(next, found, None)) is not None:
                yield f"data: {json.dumps(each, ensure_ascii=False)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            stream.close()

    async def answer(request: Request) -> Response:
        body, chat = await request.json(), "chat" in request.url.path
        if not isinstance(body, dict):
            raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
        found = await run_sync(ask, llm, name, body, chat)
        if isinstance(found, TextStream):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(events(found, with_usage, chat), media_type="text/event-stream")
        outputs = [output for completion in found for output in completion.outputs]
        if failed := [output.error for output in outputs if output.error]:
            raise RequestFailed(failed[0])
        choices = [
            {
                "index": i,
                **({"message": message(output)} if chat else {"text": output.text}),
                "logprobs": logprobs(output.logprobs, llm.tokenizer, chat),
                "finish_reason": ended(output, chat),
            }
            for i, output in enumerate(outputs)
        ]
        kind = "chat.completion" if chat else "text_completion"
        return JSONResponse(head(kind) | {"choices": choices, "usage": usage(found)})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "deepseek-attn"}]})

    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse(refused(error), 500 if isinstance(error, RequestFailed) else 400)

    @asynccontextmanager
    async def threads(app: Starlette) -> AsyncIterator[None]:
        """A thread for each request that can run, and some for those that wait."""
        current_default_thread_limiter().total_tokens = 2 * llm.runner.layout.max_num_seqs + 4
        yield

    routes = [Route(f"/v1/{path}completions", answer, methods=["POST"]) for path in ("", "chat/")]
    handlers = dict.fromkeys((ValueError, TypeError, OverflowError, RequestFailed), refuse)
    return Starlette(routes=[Route("/v1/models", models), *routes], exception_handlers=handlers, lifespan=threads)


def main() -> int:
    parser = Parser(description="An OpenAI-compatible endpoint over one model: an example.")
    parser.add_argument("--model", metavar="DIR|ID", help="checkpoint (default: the small one in the package)")
    parser.add_argument("--name", help="name of the model in requests (default: --model)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=integer, default=8000)
    parser.add_argument("--speculate", type=integer, default=0, metavar="N", help="draft tokens per step")
    add_runner_options(parser)
    args = parser.parse_args()
    try:
        check_bounds(args)
        with LLM(args.model or default_checkpoint(), speculate=args.speculate, **runner_options(args)) as llm:
            app = make_app(llm, args.name or args.model or llm.directory.name)
            uvicorn.run(app, host=args.host, port=args.port)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
