"""An OpenAI-compatible endpoint over one `LLM`: an example, of one process and without authentication.

    pip install 'deepseek-attn[serve]'
    python scripts/serve_example.py --model DIR --port 8000

``/v1/completions`` and ``/v1/chat/completions``, also streamed; requests that come at the same time are batched. A body
has OpenAI's keys, the fields of `SamplingParams` by their names and, for chats, the options of `ChatOptions`. Reasoning
is ``reasoning_content`` of messages and deltas, as in DeepSeek's API.

Fleets belong to vLLM or SGLang, which run on this library's kernels by its plugins: docs/engines.md.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepseek_attn.cli.generate import default_checkpoint
from deepseek_attn.cli.options import Parser, add_runner_options, check_bounds, integer, runner_options
from deepseek_attn.engine.llm import LLM, TextStream
from deepseek_attn.engine.request import Completion, RequestFailed
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.runner.logprobs import TokenLogprobs
from deepseek_attn.text.chat import ChatOptions
from deepseek_attn.text.tokenizer import REPLACEMENT

SAMPLING = {field.name for field in fields(SamplingParams)} - {"logits_processors", "prompt_logprobs"}
IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls"}  # nothing follows from them


class Endpoint:
    """Answers the bodies of requests for the model ``name``."""

    def __init__(self, llm: LLM, name: str):
        self.llm, self.name = llm, name

    def completions(self, body: dict[str, Any]) -> tuple[list[Completion], TextStream | None]:
        """Completions of all prompts, or the stream of the only one. ValueError: the request is wrong."""
        params, prompt = self._params(body, {"prompt"}), body.get("prompt")
        if prompt is None:
            raise ValueError("prompt is missing")
        if not body.get("stream"):
            return self.llm.generate(prompt, params), None
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            [prompt] = prompt
        return [], self.llm.stream(prompt, params)

    def chat(self, body: dict[str, Any]) -> tuple[list[Completion], TextStream | None]:
        """The same for a conversation."""
        top = body.pop("top_logprobs", None) or 0
        body["logprobs"] = top if body.get("logprobs") else None
        params = self._params(body, {"messages", *ChatOptions.__annotations__})
        options = {key: body[key] for key in ChatOptions.__annotations__ if body.get(key) is not None}
        if isinstance(options.get("thinking"), dict):  # as in DeepSeek's API
            options["thinking"] = options["thinking"].get("type") == "enabled"
        messages: Any = body.get("messages")  # which `LLM` checks
        if body.get("stream"):
            return [], self.llm.chat(messages, params, stream=True, **options)
        return [self.llm.chat(messages, params, **options)], None

    def _params(self, body: dict[str, Any], keys: set[str]) -> SamplingParams:
        if body.get("model") not in (None, self.name):
            raise ValueError(f"model {body['model']!r:.80} is not here: the only one is {self.name!r}")
        known = {*SAMPLING, *keys, *IGNORED, "model", "stream", "stream_options", "max_completion_tokens"}
        unknown = sorted(key for key, value in body.items() if value and key not in known)
        if unknown:
            raise ValueError(f"not supported: {', '.join(unknown)}; supported are {', '.join(sorted(known))}")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        given: dict[str, Any] = {key: body[key] for key in SAMPLING if body.get(key) is not None}
        given["max_tokens"] = limit
        return SamplingParams(**given)

    def logprobs(self, found: TokenLogprobs | None, chat: bool) -> dict[str, Any] | None:
        """Log-probabilities in the form of chats, or of completions; a token that is no text by itself has its id."""
        tokenizer = self.llm.tokenizer
        if found is None or tokenizer is None:
            return None
        text = {i: tokenizer.decode([i]) for one in found for i in (one.token_id, *one.top)}
        parts = {i for i in text if not text[i] or REPLACEMENT in text[i]}
        text |= {i: f"token_id:{i}" for i in parts}
        if not chat:
            return {
                "tokens": [text[one.token_id] for one in found],
                "token_logprobs": [one.logprob for one in found],
                "top_logprobs": [{text[i]: logprob for i, logprob in one.top.items()} for one in found],
            }

        def entry(i: int, logprob: float) -> dict[str, Any]:
            return {"token": text[i], "logprob": logprob, "bytes": None if i in parts else list(text[i].encode())}

        tokens = [
            entry(one.token_id, one.logprob) | {"top_logprobs": [entry(*item) for item in one.top.items()]}
            for one in found
        ]
        return {"content": tokens, "refusal": None}


def head(kind: str, name: str) -> dict[str, Any]:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}


def usage(completions: list[Completion]) -> dict[str, Any]:
    prompt = sum(len(completion.prompt_token_ids) for completion in completions)
    generated = sum(len(output.token_ids) for completion in completions for output in completion.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def ended(completion: Completion, chat: bool) -> str:
    """OpenAI's reason for the end."""
    calls = chat and completion.finish_reason == "stop" and completion.tool_calls
    return "tool_calls" if calls else completion.finish_reason


def message(completion: Completion) -> dict[str, Any]:
    calls = completion.message.get("tool_calls", [])
    unique = [call | {"id": call_id()} for call in calls]
    return completion.message | ({"tool_calls": unique} if unique else {})


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def deltas(stream: TextStream) -> Iterator[dict[str, Any]]:
    """What each part of a chat's reply adds to the message."""
    yield {"role": "assistant", "content": ""}
    index = -1
    for part, piece in stream.parts():
        if part == "tool_call":
            index += 1
            function = {"name": piece, "arguments": ""}
            yield {"tool_calls": [{"index": index, "id": call_id(), "type": "function", "function": function}]}
        elif part == "arguments":
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
        else:
            yield {"reasoning_content" if part == "reasoning" else "content": piece}


def make_app(llm: LLM, name: str) -> Any:
    """The ASGI application."""
    from starlette.applications import Starlette  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.requests import Request  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.responses import JSONResponse, Response, StreamingResponse  # pyright: ignore[reportMissingImports]  # the extra serve
    from starlette.routing import Route  # pyright: ignore[reportMissingImports]  # the extra serve

    endpoint = Endpoint(llm, name)

    def refused(error: Exception, status: int) -> dict[str, Any]:
        kind = "invalid_request_error" if status == 400 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": None}}

    async def events(stream: TextStream, body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
        """Server-sent events of a stream; it is cancelled when the client goes away."""
        kind = "chat.completion.chunk" if chat else "text_completion"
        first, sent = head(kind, name), 0
        pieces = deltas(stream) if chat else stream

        def chunk(piece: Any, reason: str | None = None) -> str:
            nonlocal sent
            choice = {"index": 0, "delta" if chat else "text": piece, "finish_reason": reason, "logprobs": None}
            if (all_found := stream.completion.logprobs) is not None:
                found = all_found[sent:]
                choice["logprobs"], sent = endpoint.logprobs(found, chat), sent + len(found)
            return event(first | {"choices": [choice]})

        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield chunk(piece)
            completion = stream.completion
            yield chunk({} if chat else "", ended(completion, chat))
            if (body.get("stream_options") or {}).get("include_usage"):
                yield event(first | {"choices": [], "usage": usage([completion])})
        except RequestFailed as error:
            yield event(refused(error, 500))
        finally:
            stream.close()
        yield "data: [DONE]\n\n"

    def answer(chat: bool) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            try:
                body = await request.json()
                if not isinstance(body, dict):
                    raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
                asked = endpoint.chat if chat else endpoint.completions
                found, stream = await asyncio.to_thread(asked, dict(body))
            except (ValueError, TypeError, OverflowError) as error:
                return JSONResponse(refused(error, 400), 400)
            if stream is not None:
                return StreamingResponse(events(stream, body, chat), media_type="text/event-stream")
            outputs = [output for completion in found for output in completion.outputs]
            failed = [output.error for output in outputs if output.error]
            if failed:
                return JSONResponse(refused(RequestFailed(failed[0]), 500), 500)
            choices = [
                {
                    "index": i,
                    **({"message": message(output)} if chat else {"text": output.text}),
                    "logprobs": endpoint.logprobs(output.logprobs, chat),
                    "finish_reason": ended(output, chat),
                }
                for i, output in enumerate(outputs)
            ]
            kind = "chat.completion" if chat else "text_completion"
            return JSONResponse(head(kind, name) | {"choices": choices, "usage": usage(found)})

        return handle

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "deepseek-attn"}]})

    @asynccontextmanager
    async def threads(app: Starlette) -> AsyncIterator[None]:
        """A thread for each request that can run, and some for those that wait."""
        workers = 2 * llm.runner.layout.max_num_seqs + 4
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(workers, "request"))
        yield

    routes = [
        Route("/v1/models", models),
        Route("/v1/completions", answer(chat=False), methods=["POST"]),
        Route("/v1/chat/completions", answer(chat=True), methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=threads)


def event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n"


def main() -> int:
    parser = Parser(description="An OpenAI-compatible endpoint over one model: an example.")
    parser.add_argument("--model", metavar="DIR|ID", help="checkpoint (default: the small one in the package)")
    parser.add_argument("--name", help="name of the model in requests (default: that of the folder, or the id)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=integer, default=8000)
    parser.add_argument("--speculate", type=integer, default=0, metavar="N", help="draft tokens per step")
    add_runner_options(parser)
    args = parser.parse_args()
    try:
        check_bounds(args)
        missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
        if missing:
            raise ValueError(f"{' and '.join(missing)} not installed: pip install 'deepseek-attn[serve]'")
        import uvicorn  # pyright: ignore[reportMissingImports]  # the extra serve

        with LLM(args.model or default_checkpoint(), speculate=args.speculate, **runner_options(args)) as llm:
            hub = args.model is not None and not Path(args.model).exists()
            app = make_app(llm, str(args.name or (args.model if hub else llm.directory.name)))
            uvicorn.run(app, host=args.host, port=args.port)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
