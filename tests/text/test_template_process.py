"""Chat templates of checkpoints: whatever one does ends in text or in one short message, in bounded time and memory."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2 import TemplateError

from deepseek_attn.text import template_process
from deepseek_attn.text.template import plain_messages, render
from deepseek_attn.text.template_process import TemplateProcess, render_untrusted
from tests.support.tiers import tiered
from tests.support.typed import required

HI = [{"role": "user", "content": "hi"}]
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
GROW = "{% set ns = namespace(s=START) %}{% for i in range(50) %}{% set ns.s = NEXT %}{% endfor %}{{ ns.s }}"


def growing(start: str, following: str) -> str:
    """A template that computes the following value 50 times."""
    return GROW.replace("START", start).replace("NEXT", following)


MEMORY, RECURSION = "it needs too much memory", "it calls itself, or nests, too deeply"
CHARACTERS = "it makes more than 16,777,216 characters"
FAILING = {
    "syntax": ("a\n{% if %}", r"Expected an expression.*\(line 2 of the template\)"),
    "filter": ("{{ 1 | nofilter }}", "No filter named 'nofilter'"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "brackets": ("{{ " + "(" * 100_000, RECURSION),
    "loops": ("{% for x in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
    "undefined": ("\n\n{{ x.y }}", r"'x' is undefined \(line 3 of the template\)"),
    "type": ("{{ 1 + 'a' }}", r"TypeError: unsupported operand.*\(line 1 of the template\)"),
    "division": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "overflow": ("{{ 2.0 ** 10000 }}", "OverflowError"),
    "range": ("{{ range(10**9) }}", "OverflowError: Range too big"),
    "lookup": ("{{ '{x}'.format() }}", "KeyError: 'x'"),
    "digits": ("{{ 10 ** 5000 }}", "ValueError: Exceeds the limit"),
    "raised": ("{{ raise_exception('no') }}", "no$"),
    "raised-long": ("{{ raise_exception('a' * 10**6) }}", r"a{2000}\.\.\. \(1,000,000 characters\)$"),
    "sandbox": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    "changes": ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", RECURSION),
    "recursive-loop": ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", RECURSION),
    "nested": (growing("[]", "[ns.s]").replace("50", "9999"), RECURSION),
    "times": ("{{ 'a' * 10**10 }}", MEMORY),
    "limit": ("{{ ('a' * (3 * 2**29)) | length }}", MEMORY),
    "list-times": ("{{ [0] * 10**10 }}", MEMORY),
    "center": ("{{ 'a' | center(10**10) }}", MEMORY),
    "format": ("{{ '{:>10000000000}'.format(1) }}", MEMORY),
    "printf": ("{{ '%*d' % (2**31 - 1, 1) }}", MEMORY),
    "indent": ("{{ messages | tojson(indent=10**10) }}", MEMORY),
    "batch": ("{{ [1] | batch(10**10, 'x') | list }}", MEMORY),
    "growing": (growing("'a'", "ns.s * 99"), MEMORY),
    "output": ("{{ 'a' * 2**25 }}", CHARACTERS),
    "output-in-parts": ("{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}", CHARACTERS),
}
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10**9) % 7 }}",
    "filters": "{% for i in range(99999) %}{{ range(99999) | map('string') | sort | list | length }}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "shared-lists": growing("[1]", "[ns.s, ns.s]").replace("{{ ns.s }}", "{{ ns.s | map('string') | list | length }}"),
    "comparison": growing("[[1], [1]]", "[[ns.s[0], ns.s[0]], [ns.s[1], ns.s[1]]]").replace(
        "{{ ns.s }}", "{{ ns.s[0] == ns.s[1] }}"
    ),
    "search": "{% set s = 'ab' * 10**6 %}{% for i in range(99999) %}{{ ('b' ~ s) in (s ~ s) }}{% endfor %}",
    "regular-expression": "{{ ('<!-- -->' * 10**7) | striptags }}",
}


@pytest.mark.parametrize("name", FAILING)
def test_failing_templates(name):
    template, message = FAILING[name]
    with pytest.raises(TemplateError, match=message) as caught:
        render_untrusted(template, HI)
    assert len(str(caught.value)) < 2100


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", tiered(ENDLESS, ["power"]))
def test_endless_templates(name, monkeypatch):
    """The time is the CPU's, so a busy machine allows no less of it."""
    monkeypatch.setattr(template_process, "MAX_CPU_SECONDS", 0.2)
    with pytest.raises(TemplateError, match=r"it takes more than 0\.2 seconds of CPU time|needs too much memory"):
        render_untrusted(ENDLESS[name], HI)
    assert render_untrusted(TURNS, HI) == "user: hi\n"


def test_long_conversations():
    """What the process renders is what is rendered here; the second conversation finds nothing of the first."""
    texts = ["hi", " a\nb ", "é 中文 🙂", "\ud800", "{{ 1 / 0 }}", '"\\u0000\0']
    messages = [{"role": "user", "content": texts[i % len(texts)] * (i % 40)} for i in range(10_000)]
    for length in (10_000, 1):
        assert render_untrusted(TURNS, messages[:length], thinking=True) == render(
            TURNS, messages[:length], thinking=True
        )


def test_messages_that_are_too_much():
    deep, own = [], []
    for _ in range(100_000):
        deep = [deep]
    own.append(own)
    for content in (deep, own):
        with pytest.raises(ValueError, match="nested too deeply, or in themselves"):
            plain_messages([{"role": "user", "content": content}])
    with pytest.raises(ValueError, match="messages must be a non-empty list"):
        plain_messages({"role": deep})
    with pytest.raises(TemplateError, match="cannot be written as JSON: Exceeds the limit"):
        render_untrusted(TURNS, [{"role": "user", "content": 10**5000}])
    with pytest.raises(TemplateError, match="bytes of JSON; at most 67,108,864 fit"):
        render_untrusted(TURNS, [{"role": "user", "content": "é" * 2**24}])


@pytest.fixture
def process():
    process = TemplateProcess()
    yield process
    process.stop()


def request(content: str, seconds: float = 10.0) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"template": TURNS, "messages": messages, "variables": {}, "seconds": seconds}).encode()


def test_a_dead_process_is_replaced(process):
    assert process.exchange(request("1")) == {"text": "user: 1\n"}
    os.kill(process._running.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process._running.pid, os.WEXITED | os.WNOWAIT)
    assert process.exchange(request("2")) == {"text": "user: 2\n"}
    process.stop()
    assert process.exchange(request("3")) == {"text": "user: 3\n"}


def test_a_process_that_dies_of_its_request(process):
    assert process.exchange(b"not JSON") == {"error": "the process that ran it ended with exit code 1"}
    assert process.exchange(request("2")) == {"text": "user: 2\n"}


def test_an_interrupted_exchange_leaves_no_reply_behind(process, monkeypatch):
    process.exchange(request("0"))

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(process._running.stdout, "readline", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        process.exchange(request("1"))
    assert process.exchange(request("2")) == {"text": "user: 2\n"}


def test_a_forked_process_starts_its_own():
    """Also when it is forked while another thread waits for a reply."""
    render_untrusted(TURNS, HI)
    pid = required(template_process._process._running).pid
    template_process._process._lock.acquire()
    child = os.fork()
    if not child:
        right = False
        try:
            signal.alarm(60)  # ends it if it hangs
            right = (
                render_untrusted(TURNS, HI) == "user: hi\n" and required(template_process._process._running).pid != pid
            )
        finally:
            os._exit(0 if right else 1)
    template_process._process._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render_untrusted(TURNS, HI) == "user: hi\n"
    assert required(template_process._process._running).pid == pid


def test_threads_get_their_own_replies(process):
    with ThreadPoolExecutor(4) as pool:
        replies = pool.map(process.exchange, [request(str(i)) for i in range(40)])
    assert [reply["text"] for reply in replies] == [f"user: {i}\n" for i in range(40)]


def test_a_process_that_cannot_be_started(process, monkeypatch):
    monkeypatch.setattr(template_process.sys, "executable", "/nowhere/python")
    assert "cannot be used: [Errno 2]" in process.exchange(request("1"))["error"]
