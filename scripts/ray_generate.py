"""``deepseek-attn generate --prompts`` over several machines or GPUs: a Ray actor for each, with an LLM of its own.

    pip install 'deepseek-attn[ray]'
    python scripts/ray_generate.py --model DIR --prompts prompts.txt --out lines.jsonl --actors 8 --gpus 1 --resume

Prompts are independent, so nothing is exchanged but prompts and completions. This process reads the prompts and writes
the lines, by the code of the command: the same lines, rules and flags. Without ``--address`` or RAY_ADDRESS, Ray starts
on this machine. The checkpoint is read at the same path, or by its hub id, on every machine.
"""

from __future__ import annotations

import argparse
import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepseek_attn.cli.batch import PromptBatch, encoder, open_batch
from deepseek_attn.cli.generate import add_options, check_flags, default_checkpoint, sampling_params
from deepseek_attn.cli.options import Parser, check_bounds, check_files, runner_options
from deepseek_attn.cli.records import check_records, record_arguments
from deepseek_attn.engine.llm import LLM, IndexedCompletion, IndexedPrompt
from deepseek_attn.engine.sampling import SamplingParams


class Worker:
    """An actor of two threads: `put` takes prompts while `completions` runs.

    Ray runs the calls of such an actor in any order, so the end is a number of prompts, not the last call.
    """

    def __init__(self, model: str | Path, options: dict[str, Any], args: argparse.Namespace):
        self.llm = LLM(model, **options)
        self.args = args
        self.prompts: queue.SimpleQueue[IndexedPrompt] = queue.SimpleQueue()
        self.count: int | None = None

    def put(self, prompt: IndexedPrompt) -> None:
        """Queues a prompt."""
        self.prompts.put(prompt)

    def end(self, count: int) -> None:
        """Ends `completions` after ``count`` prompts, some of which may still have to arrive."""
        self.count = count

    def completions(self, params: SamplingParams) -> Iterator[IndexedCompletion]:
        record = record_arguments(self.llm, self.args.records)
        yield from self.llm.generate_iter(self._queued(), params, encode=encoder(self.args), **record)

    def _queued(self) -> Iterator[IndexedPrompt | None]:
        taken = 0
        while taken != self.count:
            try:
                prompt = self.prompts.get_nowait()
            except queue.Empty:
                yield None  # not there yet
            else:
                taken += 1
                yield prompt


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=(__doc__ or "").splitlines()[0].replace("``", ""))
    add_options(parser)
    group = parser.add_argument_group("actors")
    group.add_argument(
        "--actors", type=int, default=1, metavar="N", help="actors, each with the whole model (default: 1)"
    )
    group.add_argument("--gpus", type=float, default=0, metavar="N", help="GPUs of each actor (default: 0, on CPUs)")
    group.add_argument("--cpus", type=float, default=1, metavar="N", help="CPUs of each actor (default: 1)")
    group.add_argument("--address", help="of a running Ray cluster (default: RAY_ADDRESS, else a new one here)")
    parser.set_defaults(tensor_parallel=1)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a prompt or an actor failed, or a prompt has no line. ValueError: wrong flags, prompts or output."""
    check_flags(args)
    if args.prompts is None:
        raise ValueError("--prompts FILE is needed")
    try:
        import ray  # pyright: ignore[reportMissingImports]  # the extra ray
    except ImportError as error:
        raise ValueError(f"{error}: pip install 'deepseek-attn[ray]'") from error
    params = sampling_params(args)
    check_records(args, single=False)
    with open_batch(args, params) as batch:
        if batch.is_complete:
            return batch.finish()
        ray.init(args.address, include_dashboard=False)
        try:
            complete_all(batch, params, args)
        except ray.exceptions.RayError as error:
            print(f"an actor failed: {error}", file=sys.stderr)
            return batch.finish() or 1
        finally:
            ray.shutdown()
        return batch.finish()


def complete_all(batch: PromptBatch, params: SamplingParams, args: argparse.Namespace) -> None:
    """Gives each actor twice the prompts that it can run at a time, and writes the completions."""
    import ray  # pyright: ignore[reportMissingImports]  # the extra ray

    model = args.model or default_checkpoint()
    actor = ray.remote(num_gpus=args.gpus, num_cpus=args.cpus, max_concurrency=2)(Worker)
    options = runner_options(args) | {"speculate": args.speculate}
    workers = [actor.remote(model, options, args) for _ in range(args.actors)]
    streams = {worker.completions.options(num_returns="streaming").remote(params): worker for worker in workers}
    given, in_flight = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
    ended = False
    while streams:
        while not ended and min(in_flight.values()) < 2 * args.max_num_seqs:
            try:
                prompt = next(batch)
            except StopIteration:
                ended = True
                for worker in workers:
                    worker.end.remote(given[worker])
                break
            if prompt is None:
                break
            worker = min(workers, key=in_flight.__getitem__)
            worker.put.remote(prompt)
            given[worker] += 1
            in_flight[worker] += 1
        for stream in ray.wait(list(streams), num_returns=1, timeout=0.1)[0]:
            try:
                index, completion = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
                continue
            in_flight[streams[stream]] -= 1
            batch.write(index, completion)


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    try:
        check_bounds(args)
        check_files(args)
        return run(args)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
