"""Times the attention layers of two checkouts of this library in one process, CUDA-graph replays alternating.

    git worktree add ../before COMMIT
    python scripts/compare_checkouts.py ../before . --out ratios.json

Both checkouts are imported into one process, each with modules of its own. For every row, each builds ``--copies``
layers of a kind with the same random weights (so that the L2 holds little of them) and caches of their own, captures
one graph of a decode step through all of them, and the replays alternate. A ratio below 1 means that the second
checkout is faster.

The last line on standard output is one JSON document; ``--out`` keeps it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

RATIOS = {"swa": 0, "c4a": 4, "c128a": 128}
FOLDERS = {"deepseek_attn.kernels": "kernels", "deepseek_attn.models": "models", "deepseek_attn.configs": "configs"}


class Checkout:
    """One version of the library: a finder for its files, and its modules while another version is active."""

    def __init__(self, folder: Path):
        self.folder, self.modules = folder.resolve(), {}

    def find_spec(self, name: str, path: object = None, target: object = None):
        """The spec of the package itself and of the folders that an install maps below it."""
        place = "deepseek_attn" if name == "deepseek_attn" else FOLDERS.get(name)
        if place is None:
            return None
        root = self.folder / place
        return importlib.util.spec_from_file_location(
            name, root / "__init__.py", submodule_search_locations=[str(root)]
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes ``import deepseek_attn...`` find this version, imports inside functions included."""
        others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "deepseek_attn"}
        sys.modules.update(self.modules)
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            names = [name for name in sys.modules if name.split(".")[0] == "deepseek_attn"]
            self.modules = {name: sys.modules.pop(name) for name in names}
            sys.modules.update(others)


def layer_bench():
    """The module that times layers: the first of its paths, from the newest to the oldest, that a checkout has."""
    for path in ("lab.bench.layer", "bench.layer"):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(f"deepseek_attn.{path}")
    return importlib.import_module("deepseek_attn.bench")


class Layers:
    """Layers of one kind of one checkout, with filled caches."""

    def __init__(self, checkout: Checkout, model: str, kind: str, copies: int, batch: int, context: int):
        self.checkout = checkout
        with checkout.active():
            library = importlib.import_module("deepseek_attn")
            config = library.ModelConfig.from_pretrained(model).replace(
                num_hidden_layers=copies,
                compress_ratios=[RATIOS[kind]] * copies,
                num_nextn_predict_layers=0,
                num_hash_layers=0,
            )
            self.runner = library.ModelRunner.from_config(
                config, seed=1, device="cuda", dtype="bfloat16", numerics="serving", attention_only=True,
                max_model_len=context, max_num_seqs=batch, max_num_batched_tokens=max(256, batch),
            )  # fmt: skip
            layer_bench().fill_caches(self.runner)

    def decode_graph(self, x: torch.Tensor, context: int) -> torch.cuda.CUDAGraph:
        """One decode step of ``len(x)`` sequences of ``context`` tokens through all layers, captured."""
        with self.checkout.active(), torch.inference_mode():
            bench = layer_bench()
            caches = [bench.past(self.runner, context - 1) for _ in range(len(x))]
            self.runner.manager.reserve([(cache, 1) for cache in caches])
            step = bench.static_metadata(self.runner, caches)
            blocks = list(self.runner.model.layers.values())
            graph = bench.captured([lambda block=block: block.attn(x, step.positions, step) for block in blocks])
            for cache in caches:
                self.runner.manager.free(cache)
        return graph


def replay_times(graphs: list[torch.cuda.CUDAGraph], repeats: int) -> list[list[float]]:
    """Microseconds of each replay of each graph, alternately."""
    times: list[list[float]] = [[] for _ in graphs]
    for index in range(repeats + 3):
        for graph, found in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if index >= 3:
                found.append(start.elapsed_time(end) * 1e3)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", default="v4_flash")
    parser.add_argument("--kinds", default="swa,c4a,c128a")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--contexts", default="8192,131072")
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("layers are timed on a GPU, and there is none")
    checkouts = [Checkout(args.before), Checkout(args.after)]
    rows = []
    for kind in args.kinds.split(","):
        for context in map(int, args.contexts.split(",")):
            batches = [int(batch) for batch in args.batches.split(",")]
            layers = [Layers(checkout, args.model, kind, args.copies, max(batches), context) for checkout in checkouts]
            for batch in batches:
                x = torch.randn(batch, layers[0].runner.config.hidden_size, device="cuda", dtype=torch.bfloat16)
                graphs = [side.decode_graph(x, context) for side in layers]
                before, after = (statistics.median(times) / args.copies for times in replay_times(graphs, args.repeats))
                rows.append({"kind": kind, "context": context, "batch": batch, "before_us": before, "after_us": after})
                print(
                    f"{kind:6s} {context:8d} x {batch:4d}: {before:8.1f} {after:8.1f} us  {after / before:.3f}",
                    flush=True,
                )
            del layers, graphs
            torch.cuda.empty_cache()
    ratios = [row["after_us"] / row["before_us"] for row in rows]
    result = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": args.model, "rows": rows,
        "geometric_mean": statistics.geometric_mean(ratios), "worst": max(ratios),
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
