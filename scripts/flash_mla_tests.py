"""Runs FlashMLA's own test functions, from a checkout of FlashMLA, on this library's functions of the same names.

    git clone https://github.com/deepseek-ai/FlashMLA
    python scripts/flash_mla_tests.py FlashMLA                  # on a CPU the small cases
    python scripts/flash_mla_tests.py FlashMLA --slice 0/40     # every 40th case
    python scripts/flash_mla_tests.py FlashMLA --processes 14   # on a GPU: all cases, 14 at once

Only the folder ``tests`` of the checkout is read. ``import flash_mla`` gives `deepseek_attn.flash_mla_api`. Each file
of tests runs as a program of its own, with one change: its test function notes the cases that it is called with. The
cases then run in worker processes, which share the memory of the GPU in equal parts. A case that does not fit its part
runs again among fewer processes, in the end alone. Timings are left out: they look for FlashMLA's kernels by name.

Without a GPU, tensors that these tests place on ``cuda`` are placed on the CPU, and cases of more than `SMALL`
multiplications are skipped. Counts are printed as cases end. The last line on standard output is one JSON document.
Exit status: 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import gc
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

FILES = {  # the test function of each file
    "test_flash_mla_sparse_decoding.py": "test_flash_mla",
    "test_flash_mla_sparse_prefill.py": "run_test",
    "test_flash_mla_dense_decoding.py": "test_flash_mla",
}
UNTIMED = {"num_runs": 0, "test_performance": False}  # fields of a case that request timings
SMALL = 2**30  # upper bound of a case's multiplications on a CPU
CONTEXT = 700 * 2**20  # bytes of GPU memory of a process without tensors
OUTCOMES = ("passed", "wrong", "out of memory", "skipped")


class Noted:
    """Stands for the result of a test function that has not run: correct, in no time."""

    is_correct = True

    def __getattr__(self, name: str) -> float:
        return 0.0


class Program:
    """One file of tests, run as a program whose test function only notes its cases.

    Attributes:
        cases: arguments of the test function, in order; function: the test function itself.
        precision: of float32 products, as the program sets it.
    """

    def __init__(self, path: Path, name: str):
        import torch

        self.path, self.cases = path, []
        torch.set_float32_matmul_precision("highest")
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        main: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.If)]  # if __name__ == "__main__"
        definitions = [node for node in tree.body if node not in main]
        self.globals: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
        self._run(definitions)
        self.function: Callable[[Any], Any] = self.globals[name]
        self.globals[name] = self._note
        sys.argv = [str(path)]
        hopper = patch("torch.cuda.get_device_capability", return_value=(9, 0))  # dense tests refuse other GPUs
        with contextlib.redirect_stdout(io.StringIO()), hopper:
            self._run(main)
        self.precision = torch.get_float32_matmul_precision()

    def _run(self, body: list[ast.stmt]) -> None:
        exec(compile(ast.Module(body, []), str(self.path), "exec"), self.globals)

    def _note(self, case: Any) -> Any:
        changes = {name: value for name, value in UNTIMED.items() if hasattr(case, name)}
        if getattr(case, "seed", 0) == -1:  # the test function would count its calls
            changes["seed"] = len(self.cases)
        self.cases.append(dataclasses.replace(case, **changes))
        return Noted()

    def run(self, number: int) -> tuple[str, str]:
        """Runs a case; returns its outcome and its output."""
        import torch

        torch.set_float32_matmul_precision(self.precision)
        torch.use_deterministic_algorithms(False)  # a case that ended early may have left this on
        printed, outcome = io.StringIO(), "passed"
        try:
            with contextlib.redirect_stdout(printed):
                result = self.function(self.cases[number])
            if not getattr(result, "is_correct", result is None or result):
                outcome = "wrong"
        except torch.OutOfMemoryError:
            outcome = "out of memory"
        except Exception as error:  # an assertion of the test, or whatever else a wrong function leads to
            outcome = "wrong"
            printed.write(f"{type(error).__name__}: {error}")
        return outcome, printed.getvalue()


def multiplications(case: Any) -> int:
    """Multiplications of a case, about: queries times keys times channels."""
    decode = getattr(case, "decode", None) or case
    keys = case.topk + (getattr(decode, "extra_topk", None) or 0) if hasattr(case, "topk") else case.s_k
    return 2 * getattr(decode, "b", 1) * case.s_q * case.h_q * keys * 512


def use_cpu() -> None:
    """Redirects the device ``cuda`` to the CPU."""
    import torch

    set_default_device = torch.set_default_device
    torch.set_default_device = lambda device: set_default_device("cpu")
    tensor_class: Any = torch.Tensor
    tensor_class.cuda = lambda tensor, *args, **options: tensor
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)


def work(tests: Path, device: str, processes: int) -> None:
    """A worker: prints the number of multiplications of all cases, then runs the cases whose numbers it reads."""
    import torch

    from deepseek_attn import flash_mla_api

    sys.modules["flash_mla"] = flash_mla_api
    for name in ("rich", "rich.console", "rich.table"):  # FlashMLA's table of times
        sys.modules[name] = MagicMock()
    sys.path.insert(0, str(tests))
    os.environ["NO_COOLDOWN"] = "1"
    if device == "cpu":
        use_cpu()
    else:
        memory = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1 / processes - CONTEXT / memory)
    replies = sys.stdout
    programs = [Program(tests / name, function) for name, function in FILES.items()]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    cases = [(program, number) for program in programs for number in range(len(program.cases))]
    about = [
        {"file": program.path.name, "multiplications": multiplications(program.cases[number])}
        for program, number in cases
    ]
    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    print(json.dumps({"cases": about, "device": name, "torch": torch.__version__}), file=replies, flush=True)
    for line in sys.stdin:
        program, number = cases[int(line)]
        outcome, printed = program.run(number)
        if outcome == "out of memory":
            gc.collect()
        reply = {"outcome": outcome, "case": str(program.cases[number]), "printed": printed[-2000:]}
        print(json.dumps(reply), file=replies, flush=True)


class Worker:
    """A process that runs cases one at a time.

    Attributes:
        about: facts of the worker: all cases, the device, the version of torch.
    """

    def __init__(self, tests: Path, device: str, processes: int):
        command = [sys.executable, __file__, str(tests.parent), "--device", device, "--processes", str(processes)]
        self.process = subprocess.Popen(
            [*command, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        pipes = self.process.stdin, self.process.stdout, self.process.stderr
        self.stdin, self.stdout, self.stderr = (pipe for pipe in pipes if pipe is not None)
        self.errors = ""
        self.reader = threading.Thread(target=self._read_errors, daemon=True)
        self.reader.start()
        line = self.stdout.readline()
        if not line:
            raise RuntimeError(self.end())
        self.about: dict[str, Any] = json.loads(line)

    def _read_errors(self) -> None:
        for line in self.stderr:
            self.errors = (self.errors + line)[-2000:]

    def run(self, number: int) -> dict[str, str]:
        """Outcome and output of a case; a process that ends instead of a reply got it wrong."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(f"{number}\n")
            self.stdin.flush()
        line = self.stdout.readline()
        if line:
            return json.loads(line)
        return {"outcome": "wrong", "case": str(number), "printed": f"the process ended: {self.end()}"}

    def end(self) -> str:
        """Ends the process; returns the end of its standard error."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.process.wait()
        self.reader.join()
        return self.errors.strip()


class Run:
    """Outcomes of cases, printed as they come.

    Attributes:
        until: no case starts later than this; idle: workers of the first phase that run already.
        outcomes: by the number of a case; wrong: the replies of wrong cases.
    """

    def __init__(self, tests: Path, device: str, until: float, idle: list[Worker]):
        self.tests, self.device, self.until, self.idle = tests, device, until, idle
        self.outcomes: dict[int, str] = {}
        self.wrong: list[dict[str, Any]] = []
        self.lock, self.printed = threading.Lock(), time.monotonic()

    def phase(self, numbers: list[int], processes: int) -> None:
        """Runs cases in ``processes`` workers until they are done or time is up."""
        left = list(reversed(numbers))
        threads = [threading.Thread(target=self._drive, args=(left, processes)) for _ in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _drive(self, left: list[int], processes: int) -> None:
        worker = self.idle.pop() if self.idle else None
        while time.monotonic() < self.until:
            try:
                number = left.pop()
            except IndexError:
                break
            try:
                worker = worker or Worker(self.tests, self.device, processes)
            except RuntimeError as error:  # no memory for one more process
                left.append(number)
                print(f"a process did not start: {error}", flush=True)
                return
            reply = worker.run(number)
            self._note(number, reply)
            if reply["outcome"] == "wrong":  # an error of a kernel leaves a process that cannot launch others
                worker.end()
                worker = None
        if worker is not None:
            worker.end()

    def _note(self, number: int, reply: dict[str, str]) -> None:
        with self.lock:
            self.outcomes[number] = reply["outcome"]
            if reply["outcome"] == "wrong":
                self.wrong.append({"number": number, **reply})
                print(f"wrong: case {number}, {reply['case']}\n{reply['printed'].rstrip()}", flush=True)
            if time.monotonic() - self.printed > 5:
                self.printed = time.monotonic()
                print(counts_line(Counter(self.outcomes.values())), flush=True)


def counts_line(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)


def parse_slice(text: str) -> tuple[int, int]:
    """``i/n`` as two numbers."""
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be i/n with i below n: 0/10 is every tenth case from the first"
        )
    return int(first), int(step)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog=Path(__file__).name, description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("checkout", type=Path, help="folder of FlashMLA, of which tests/ is read")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where torch has a GPU")
    parser.add_argument("--processes", type=int, default=1, help="cases at the same time (default 1)")
    parser.add_argument("--slice", type=parse_slice, default=(0, 1), metavar="I/N", help="cases I, I + N, I + 2 N, ...")
    parser.add_argument("--minutes", type=float, default=1e6, help="no case starts later than this")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    tests = args.checkout.resolve() / "tests"
    for name in FILES:
        if not (tests / name).is_file():
            parser.error(f"{tests / name} does not exist: give a checkout of https://github.com/deepseek-ai/FlashMLA")
    if args.processes < 1:
        parser.error(f"--processes {args.processes}: must be at least 1")
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.worker:
        work(tests, args.device, args.processes)
        return
    start = time.monotonic()
    try:
        first = Worker(tests, args.device, args.processes)
    except RuntimeError as error:
        parser.error(f"the tests of {tests} cannot be read:\n{error}")
    run = Run(tests, args.device, start + 60 * args.minutes, [first])
    cases, (offset, step) = first.about["cases"], args.slice
    chosen = range(offset, len(cases), step)
    numbers = [n for n in chosen if args.device == "cuda" or cases[n]["multiplications"] <= SMALL]
    print(f"{len(chosen)} of {len(cases)} cases on {first.about['device']}, {len(chosen) - len(numbers)} too large")
    for processes in sorted({args.processes, min(4, args.processes), 1}, reverse=True):
        run.phase([n for n in numbers if run.outcomes.get(n, "out of memory") == "out of memory"], processes)
    outcomes = {number: run.outcomes.get(number, "skipped") for number in chosen}
    files = {name: Counter(o for n, o in outcomes.items() if cases[n]["file"] == name) for name in FILES}
    for name, counts in files.items():
        print(f"{name}: {counts_line(counts)}")
    total = Counter(outcomes.values())
    print(f"all: {counts_line(total)}")
    print(
        json.dumps(
            {
                "device": first.about["device"],
                "torch": first.about["torch"],
                "cases": len(cases),
                "slice": f"{offset}/{step}",
                "seconds": round(time.monotonic() - start, 1),
                **{outcome: total[outcome] for outcome in OUTCOMES},
                "files": files,
                "wrong_cases": run.wrong,
            }
        )
    )
    sys.exit(1 if total["wrong"] else 0)


if __name__ == "__main__":
    main()
