"""``--stats`` prints statistics of engine steps, ``--profile`` writes a trace."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from deepseek_attn.cli.terminal import say
from deepseek_attn.utils.clock import seconds_since

if TYPE_CHECKING:
    from deepseek_attn.engine.engine import Engine
    from deepseek_attn.engine.stats import EngineStats, StepStats


def add_observe_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("statistics and traces")
    group.add_argument(
        "--stats",
        nargs="?",
        type=float,
        const=0.0,
        metavar="SECONDS",
        help="print statistics to standard error after every step, or every SECONDS",
    )
    group.add_argument("--profile", metavar="FILE", help="write a Chrome trace with a range per stage, for Perfetto")


@contextmanager
def observed(engine: Engine, args: argparse.Namespace) -> Iterator[None]:
    """Context that prints statistics (``--stats``) and writes a trace (``--profile``) of the engine's steps."""
    from deepseek_attn.utils.tracing import profile

    lines = stats_printer(args.stats, say) if args.stats is not None else None
    engine.on_step = lines
    try:
        with profile(args.profile) if args.profile else nullcontext():
            yield
    finally:
        engine.on_step = None
        caches = engine.runner.expert_files or engine.runner.expert_rows
        if engine.stats.steps and (args.profile or lines or engine.decoder.mtp or caches):
            say(describe_run(engine.stats))
            if caches is not None:
                say(caches.describe())


def stats_printer(interval: float, write: Callable[[str], object]) -> Callable[[StepStats], None]:
    """A step callback that writes a line about the steps since the last line, at most every ``interval`` seconds."""
    from deepseek_attn.engine.stats import EngineStats

    sums, steps, last = EngineStats(), 0, time.perf_counter()

    def watch(step: StepStats) -> None:
        nonlocal sums, steps, last
        sums.add(step)
        steps += 1
        if seconds_since(last) >= interval:
            write(describe_steps(steps, sums, step))
            sums, last = EngineStats(), time.perf_counter()

    return watch


def describe_steps(number: int, sums: EngineStats, last: StepStats) -> str:
    """One line: throughput and tokens since the last line, and the current load of batch and pools."""
    parts = [
        f"step {number}: {sums.tokens_per_second:.0f} tok/s",
        f"{sums.prefill_tokens} prompt + {sums.decode_tokens} decode tokens",
        f"{last.running} running, {last.waiting} waiting",
        f"pools {last.pool_use:.0%}",
    ]
    if sums.cached_tokens:
        parts.append(f"prefix hits {sums.hit_rate:.0%}")
    if sums.drafted:
        parts.append(f"acceptance rate {sums.acceptance_rate:.0%}")
    if sums.preempted:
        parts.append(f"{sums.preempted} preempted")
    return ", ".join(parts)


def describe_run(stats: EngineStats) -> str:
    """One line about all steps of an engine, prompts included."""
    text = f"{stats.generated} tokens in {stats.steps} steps and {stats.seconds:.2f} s"
    if stats.seconds:
        text += f", {stats.generated / stats.seconds:.1f} tokens/s"
    if stats.drafted:
        text += (
            f"; {stats.accepted} of {stats.drafted} draft tokens accepted ({stats.acceptance_rate:.0%}), "
            f"{stats.tokens_per_step:.2f} tokens per request and step"
        )
    return text
