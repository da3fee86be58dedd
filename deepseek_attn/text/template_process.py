"""Chat templates of checkpoints, rendered in a process with little memory and CPU time; and trials of tokenizers.

Jinja's sandbox restricts the objects that a template can read and change. It does not prevent nested loops,
``'a' * 10**10`` or regular expressions that take hours, and no count of operations covers all that its
filters and Python's methods can do. The operating system does, wherever the time or memory is spent. The process is
started when first used, and renders one template after the other, so that only the first waits for it.

The regular expressions of a tokenizer can take hours too. A text takes the same time in both processes, so a text that
was tokenized here within the limits may be tokenized in the caller's process.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from deepseek_attn.text.template import render
from deepseek_attn.utils.processes import Pipes

try:
    import resource
except ImportError:  # Windows
    resource = None

MAX_CPU_SECONDS = 10.0  # for one conversation
MAX_MEMORY = 1 << 30  # bytes of address space of the process
MAX_REQUEST = 1 << 26  # bytes of template and messages as JSON
UNBOUNDED = "this system cannot limit the time and memory that a checkpoint's own template or patterns take"
START = "import sys; sys.path[:] = sys.argv[1:]; from deepseek_attn.text.template_process import serve; serve()"


def render_untrusted(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """`template.render`, with bounds on time and memory.

    Raises:
        jinja2.TemplateError: as `template.render`; or it needs more than `MAX_CPU_SECONDS` or `MAX_MEMORY`.
    """
    if resource is None:
        raise TemplateError(f"{UNBOUNDED}: pass a plain prompt, or remove the template to use DeepSeek's encoding")
    try:
        job = {"template": template, "messages": messages, "variables": variables, "seconds": MAX_CPU_SECONDS}
        request = json.dumps(job).encode()  # ASCII, on one line
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"the messages cannot be written as JSON: {error}") from error
    if len(request) > MAX_REQUEST:
        raise TemplateError(f"template and messages are {len(request):,} bytes of JSON; at most {MAX_REQUEST:,} fit")
    reply = _process.exchange(request)
    if "error" in reply:
        raise TemplateError(reply["error"])
    return reply["text"]


def try_tokenizer(tokenizer: str, text: str) -> None:
    """Tokenizes ``text`` and forgets the tokens, with bounds on time and memory.

    Args:
        tokenizer: ``tokenizer.json`` with a small model.

    Raises:
        ValueError: it fails, or needs more than `MAX_CPU_SECONDS` or `MAX_MEMORY`.
    """
    if resource is None:
        raise ValueError(f"{UNBOUNDED}: pass token ids")
    request = json.dumps({"tokenizer": tokenizer, "text": text, "seconds": MAX_CPU_SECONDS}).encode()
    reply = _process.exchange(request)
    if "error" in reply:
        raise ValueError(reply["error"])


class TemplateProcess:
    """A child process behind two pipes: a request is one line of JSON, and so is its reply."""

    def __init__(self):
        self._lock = threading.Lock()
        self._running: subprocess.Popen | None = None

    def exchange(self, request: bytes) -> dict[str, str]:
        """Sends a request and waits for its ``text`` or ``error``."""
        with self._lock:
            try:
                if self._running is None or self._running.poll() is not None:
                    self.stop()
                    self._running = self._start()
                pipes = Pipes.of(self._running)
                pipes.stdin.write(request + b"\n")
                pipes.stdin.flush()
                line = pipes.stdout.readline()
            except OSError as error:
                self.stop()
                return {"error": f"the process that renders chat templates cannot be used: {error}"}
            except BaseException:  # an interrupted exchange leaves half a reply in the pipe
                self.stop()
                raise
            return json.loads(line) if line else {"error": self._cause_of_death(self._running)}

    def stop(self) -> None:
        """Ends the process; the next request starts another."""
        running, self._running = self._running, None
        if running is not None:
            running.kill()
            running.communicate()

    def _start(self) -> subprocess.Popen:
        path = [*sys.path, str(Path(__file__).parents[2])]  # an editable installation may be on no path
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, *path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,  # a session of its own gets no Ctrl-C
        )  # fmt: skip

    def _cause_of_death(self, process: subprocess.Popen) -> str:
        code = process.wait()
        self.stop()
        if code == -signal.SIGPROF:
            return f"it takes more than {MAX_CPU_SECONDS:g} seconds of CPU time"
        return f"the process that ran it ended with exit code {code}"


def serve() -> None:
    """Answers requests from stdin until it is closed."""
    if resource is None:
        raise RuntimeError(f"{UNBOUNDED}: this process is not started")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_MEMORY, hard)
    with suppress(OSError, ValueError):  # where a system has no such limit, CPU time alone bounds a template
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    for request in sys.stdin.buffer:
        job = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])  # SIGPROF ends the process, whatever it is doing
        reply = _answer(job)
        line = json.dumps(reply).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


def _answer(job: dict[str, Any]) -> dict[str, str]:
    try:
        if "tokenizer" not in job:
            return {"text": render(job["template"], job["messages"], **job["variables"])}
        from tokenizers import Tokenizer  # templates need none

        Tokenizer.from_str(job["tokenizer"]).encode(job["text"], add_special_tokens=False)
        return {"text": ""}
    except TemplateError as error:
        return {"error": error.message or type(error).__name__}
    except BaseException as error:  # a failed assertion in the tokenizers library is not an Exception
        return {"error": str(error)[:300]}


_process = TemplateProcess()
atexit.register(_process.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.__init__)  # a forked process must not read the replies to its parent
