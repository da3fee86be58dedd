"""A mixed workload on the engine, against each request alone: tokens must be equal, and nothing may leak.

    python -m tests.engine.workload --requests 200 --longest 3000

Lengths from one token to the longest, prefixes that requests share, arrivals spread over the run, half of the requests
cancelled on the way. A cancelled request must have produced the beginning of what it produces alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_attn.cache.layout import make_layout
from deepseek_attn.cache.manager import SequenceCache
from deepseek_attn.cache.pages import NULL_PAGE
from deepseek_attn.config.model import AnyConfig
from deepseek_attn.config.numerics import numerics_for
from deepseek_attn.engine.engine import Engine
from deepseek_attn.engine.request import Request
from deepseek_attn.engine.sampling import SamplingParams
from deepseek_attn.engine.speculation import MTPSpeculation
from deepseek_attn.runner.graphs import DecodeGraphs
from deepseek_attn.runner.model_runner import ModelRunner
from tests.support.typed import required

SEQS = 8
PREEMPTED = ("preempted", "everything")  # variants in which requests lose their caches again and again


@dataclass(frozen=True)
class Job:
    """One request of the workload: when it comes, and after how many of its tokens it is cancelled (None: never)."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    cancel_after: int | None


def make_jobs(count: int, longest: int, vocab: int, seed: int, greedy: float = 0.8) -> list[Job]:
    """Half of the lengths are small on a logarithmic scale, half uniform; half of the prompts share a prefix.

    Args:
        greedy: share of requests that draw no random numbers.
    """
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(2, vocab) for _ in range(n)]

    prefixes = [tokens(max(1, int(longest * share))) for share in (0.05, 0.1, 0.25, 0.5)]
    jobs, arrival = [], 0
    for _ in range(count):
        length = rng.randint(1, longest) if rng.random() < 0.5 else int(longest ** rng.random())
        prefix = rng.choice(prefixes) if rng.random() < 0.5 else []
        prompt = (prefix + tokens(length))[: max(length, min(len(prefix) + 7, longest))]
        temperature = 0 if rng.random() < greedy else 0.8
        params = SamplingParams(temperature=temperature, max_tokens=rng.randint(1, 16), seed=7, ignore_eos=True)
        arrival += rng.randint(0, 3)
        jobs.append(
            Job(prompt, params, arrival, rng.randint(0, required(params.max_tokens)) if rng.random() < 0.5 else None)
        )
    return jobs


def alone(runner: ModelRunner, jobs: list[Job]) -> list[list[int]]:
    """Tokens of each request in an engine of its own, with nothing else on the machine."""
    found = []
    for index, job in enumerate(jobs):
        engine = Engine(runner)
        request = engine.add_request(job.prompt, job.params, index=index)
        while engine.has_unfinished:
            engine.step()
        found.append(request.completion().token_ids)
    return found


def together(engine: Engine, jobs: list[Job], preempt: bool = False) -> list[Request]:
    """All requests in one engine, as they arrive, with their cancellations.

    Args:
        preempt: take the caches of one running request in every third step.
    """
    requests: list[Request] = []
    step, rng = 0, random.Random(len(jobs))
    while len(requests) < len(jobs) or engine.has_unfinished:
        while len(requests) < len(jobs) and (jobs[len(requests)].arrival <= step or not engine.has_unfinished):
            job = jobs[len(requests)]
            requests.append(engine.add_request(job.prompt, job.params, index=len(requests)))
        engine.step()
        step += 1
        if preempt and step % 3 == 0 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running), engine.last_step)
            engine.stats.preempted += 1
        for request, job in zip(requests, jobs, strict=False):
            if job.cancel_after is not None and not request.finished:
                generated = len(request.sequence.token_ids) - request.prompt_length
                if generated >= job.cancel_after and (generated or step > job.arrival + 3):
                    engine.cancel(request)
    return requests


def differences(requests: list[Request], jobs: list[Job], expected: list[list[int]]) -> list[int]:
    """Requests whose tokens are not those they have alone; of cancelled ones, not the beginning of them."""
    wrong = []
    for index, (request, job, tokens) in enumerate(zip(requests, jobs, expected, strict=True)):
        actual = request.completion().token_ids
        whole = request.finish_reason == "length"
        if actual != (tokens if whole else tokens[: len(actual)]) or not (whole or job.cancel_after is not None):
            wrong.append(index)
    return wrong


def worse_tokens(single: ModelRunner, requests: list[Request], limit: float) -> int:
    """Generated tokens whose logit in their own text is below the best one by ``limit`` of the range of logits."""
    worse = 0
    for request in requests:
        text = request.sequence.token_ids
        first = request.prompt_length
        if len(text) > first:
            (logits,) = single.score([text])
            rows = logits[first - 1 : len(text) - 1].float()
            best, own = rows.amax(1), rows.gather(1, torch.tensor(text[first:])[:, None])[:, 0]
            worse += int(((best - own) / (best - rows.mean(1)) > limit).sum())
    return worse


def check_pages(engine: Engine, outside: Iterable[SequenceCache] = ()) -> None:
    """Every page in use has exactly the holders that are known: requests, kept prefixes and caches ``outside``."""
    scheduler, manager = engine.scheduler, engine.runner.manager
    caches = [request.sequence.cache for request in (*scheduler.running, *scheduler.waiting)]
    if engine.prefixes is not None:
        kept = [entry.snapshot for entry in engine.prefixes._entries.values()]
        caches += [snapshot.cache for snapshot in kept]
        rows = sorted([*manager.free_snapshots, *(required(snapshot.cache.carried) for snapshot in kept)])
        assert rows == list(range(manager.layout.max_snapshots))
    caches += outside
    for group, free in manager.available_pages().items():
        holders = Counter(page for cache in caches for page in cache.tables[group] if page != NULL_PAGE)
        assert len(holders) == manager.layout.pages[group] - 1 - free, group
        assert holders == {page: manager.references(group, page) for page in holders}, group


def leaked(engine: Engine) -> dict[str, int]:
    """Pages by group that are still held once the prefix cache is empty."""
    if engine.prefixes is not None:
        engine.prefixes.clear()
    free = engine.runner.manager.available_pages()
    return {group: left for group, pages in engine.runner.layout.pages.items() if (left := pages - 1 - free[group])}


def cache_bytes(config: AnyConfig, numerics: str, dtype: torch.dtype, tokens: int, sizes: dict[str, Any]) -> int:
    """Bytes of caches with pages for ``tokens`` tokens over all sequences, and one more for each sequence and snapshot.

    Args:
        sizes: ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``, and ``max_snapshots`` if there are any.
    """
    layout = make_layout(config, numerics_for(config, numerics), dtype, **sizes)
    pages = {
        group: 1 + layout.max_num_seqs + layout.max_snapshots + tokens // span for group, span in layout.growing.items()
    }
    surplus = sum(p.page_bytes * (layout.pages[p.group] - pages[p.group]) for p in layout.pools if p.group in pages)
    return layout.nbytes() - surplus


def variants(config, longest: int) -> dict[str, dict]:
    """Options of `ModelRunner` by what they switch on."""
    limits = {"max_model_len": min(config.max_position_embeddings, longest + 64), "max_num_seqs": SEQS}
    chunks, prefixes = {"max_num_batched_tokens": 96}, {"max_snapshots": 24}

    def pressure(chosen: dict) -> dict:
        """Caches of two sequences at their longest, for eight."""
        sizes: dict[str, Any] = {"max_num_batched_tokens": 1024} | limits | chosen
        return {"kv_cache_bytes": cache_bytes(config, "exact", torch.float32, 2 * sizes["max_model_len"], sizes)}

    base = {"max_num_batched_tokens": 1024} | limits
    everything = chunks | prefixes
    return {
        "batched": base,
        "chunks": base | chunks,
        "prefixes": base | prefixes,
        "pressure": base | pressure({}),
        "preempted": base,
        "everything": base | everything | pressure(everything),
    }


def use_buckets(runner: ModelRunner) -> None:
    """Decode steps over persistent tensors, for three sizes of batches."""
    batches = [1, 3, runner.layout.max_num_seqs]
    shape = runner.whole_model(), runner.layout, runner.device
    runner.graphs = DecodeGraphs(*shape, batches=batches, capture=False, engram=runner.tables)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=required(__doc__).split("\n")[0])
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", help="only these, with commas between them")
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens per request and step (default: none)")
    parser.add_argument("--greedy", type=float, default=0.8, help="share of greedy requests (default: 0.8)")
    parser.add_argument("--buckets", action="store_true", help="decode over persistent tensors, as CUDA graphs do")
    args = parser.parse_args()
    runner = ModelRunner.from_config(
        args.config, device="cpu", numerics="exact", max_num_seqs=1, max_model_len=args.longest + 64
    )
    config = runner.config
    jobs = make_jobs(args.requests, args.longest, config.vocab_size, args.seed, args.greedy)
    started = time.perf_counter()
    expected = alone(runner, jobs)
    print(f"{len(jobs)} requests, {sum(len(job.prompt) for job in jobs)} prompt tokens")
    print(f"{'one by one':<12}{time.perf_counter() - started:>8.1f} s", flush=True)
    failed = False
    for name, options in variants(config, args.longest).items():
        if args.variants and name not in args.variants.split(","):
            continue
        runner = ModelRunner.from_config(config, device="cpu", numerics="exact", **options)
        if args.buckets:
            use_buckets(runner)
        engine = Engine(runner, decoder=MTPSpeculation(runner, args.drafts) if args.drafts else None)
        started = time.perf_counter()
        requests = together(engine, jobs, preempt=name in PREEMPTED)
        stats, wrong, left = engine.stats, differences(requests, jobs, expected), leaked(engine)
        failed |= bool(wrong or left)
        print(
            f"{name:<12}{time.perf_counter() - started:>8.1f} s {stats.steps} steps, {stats.preempted} preemptions, "
            f"{stats.hit_rate:.0%} of prompt tokens from prefixes, {stats.evicted} evictions, "
            f"{stats.acceptance_rate:.0%} of {stats.drafted} drafts accepted, {dict(stats.finished)}; "
            f"different: {wrong or 'none'}; leaked: {left or 'nothing'}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
