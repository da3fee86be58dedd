#!/usr/bin/env python3
"""Writes docs/results.md, the newest measurements, one table per subject, from the files in docs/data.

    python scripts/results.py docs

A subject is a function of `SUBJECTS`: it names its data files and its command, and returns the rows of its table.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_attn.utils.files import write_text

HEAD = """# Results

The newest measurements, written by `python scripts/results.py docs` from the files in `docs/data/`; nothing here is
typed by hand. [method.md](method.md) says how each is measured, [notebook.md](notebook.md) has targets, what limits
each result, earlier versions and what was tried. An empty cell was not measured. "x floor": the time over the
[floor](method.md#floors). A ratio below 1: this library is faster.
"""
NO_COMMAND = "a program with both libraries in one process, which the data files describe"
BESIDE_VLLM = "h200_beside_vllm.json", "h100_beside_vllm.json", "h200_beside_vllm33.json"
MODELS = {"flash": "V4-Flash", "pro": "V4-Pro", "v4_flash": "V4-Flash", "v4_pro": "V4-Pro", "v32": "V3.2",
          "v41_flash": "V4.1-Flash"}  # fmt: skip
KINDS = {"swa": "SWA", "c4a": "C4A", "c128a": "C128A"}
Row = dict[str, Any]


def links(*names: str) -> str:
    return ", ".join(f"[{name}](data/{name})" for name in names)


@dataclass(frozen=True)
class Subject:
    """One table: its title, a description, its source and its cells; the first row is the header.

    ``data`` is empty where the rows name their own files.
    """

    title: str
    text: str
    data: list[str]
    command: str
    table: list[list[str]]

    def page(self) -> str:
        command = self.command if self.command == NO_COMMAND else f"`{self.command}`"
        source = f" Data: {links(*self.data)}. Command: {command}." if self.data else ""
        header, *rows = self.table
        lines = [header, ["---"] * len(header), *rows]
        table = "\n".join("| " + " | ".join(row) + " |" for row in lines)
        return f"## {self.title}\n\n{self.text}{source}\n\n{table}\n"


class Data:
    """JSON files of a folder by name."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


def find(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The last row with these values, or None."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    return found[-1] if found else None


def beside(row: Row | None, ours: str, theirs: str, scale: float = 1.0, digits: int = 1) -> str:
    """``ours / theirs (ratio)``, or an empty cell."""
    if row is None:
        return ""
    a, b = row[ours], row[theirs]
    return f"{a / scale:.{digits}f} / {b / scale:.{digits}f} ({a / b:.2f})"


def time(us: float | None) -> str:
    """Microseconds with three digits, or an empty cell."""
    if us is None:
        return ""
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def times(found: list[Any]) -> str:
    """Microseconds of several sizes, ``-`` where one was not measured; an empty cell if none was."""
    return ", ".join(time(us) or "-" for us in found) if any(found) else ""


def size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 2**20 else f"{tokens // 2**20}M"


def attention_decode(data: Data) -> Subject:
    h200, h100, newer = (data(name)["layers"] for name in BESIDE_VLLM)
    batches, cards = (1, 8, 32, 128), {"H200": h200, "H200, vLLM 0.33": newer, "H100": h100}
    rows = [["model", "kind", "context", *(f"{card}, B = {b}" for card in cards for b in batches)]]
    points = dict.fromkeys((r["model"], r["kind"], r["context"]) for r in h200 if r["phase"] == "decode")
    for model, kind, context in sorted(points, key=lambda p: (p[0], list(KINDS).index(p[1]), p[2])):
        cells = [
            beside(find(card, phase="decode", model=model, kind=kind, context=context, batch=b), "ours_us", "vllm_us")
            for card in cards.values()
            for b in batches
        ]
        rows.append([MODELS[model], KINDS[kind], size(context), *cells])
    return Subject(
        "Attention layers beside vLLM, decode",
        "One attention layer, microseconds, ours / vLLM 0.26 or 0.33 (ratio); `serving` numerics.",
        list(BESIDE_VLLM),
        NO_COMMAND,
        rows,
    )


def attention_prefill(data: Data) -> Subject:
    h200, h100, newer = (data(name)["layers"] for name in BESIDE_VLLM)
    points = [(4096, 8192), (8192, 8192), (4096, 131072), (8192, 131072)]
    names = [f"{tokens} : {size(context)}" for tokens, context in points]
    cards = {"H200": h200, "H200, vLLM 0.33": newer, "H100": h100}
    rows = [["model", "kind", *(f"{card}, {n}" for card in cards for n in names)]]
    for model, kind in [(m, k) for m in ("flash", "pro") for k in KINDS if (m, k) != ("pro", "swa")]:
        wanted = {"phase": "prefill", "model": model, "kind": kind}
        cells = [
            beside(find(card, **wanted, tokens=tokens, context=context), "ours_us", "vllm_us", 1000, 2)
            for card in cards.values()
            for tokens, context in points
        ]
        rows.append([MODELS[model], KINDS[kind], *cells])
    return Subject(
        "Attention layers beside vLLM, prefill",
        "Milliseconds, ours / vLLM 0.26 or 0.33 (ratio); tokens computed : length after them.",
        list(BESIDE_VLLM),
        NO_COMMAND,
        rows,
    )


def with_floor(row: Row | None) -> str:
    """Microseconds and their ratio to the floor, or an empty cell."""
    return f"{time(row['microseconds'])} ({row['microseconds'] / row['floor_us']:.2f})" if row else ""


def step_name(row: Row) -> str:
    return f"prefill {row['tokens']}" if row["tokens"] > 1 else f"B = {row['batch']}"


def whole_step(data: Data) -> Subject:
    cards = {"H200": data("h200_model.json")["rows"], "H100": data("h100_model.json")["rows"]}
    steps = [row for measured in cards.values() for row in measured]
    rows = [["", *(f"{card}, {step_name(row)}" for card, measured in cards.items() for row in measured)]]
    rows.append(["**whole step**", *map(with_floor, steps)])
    rows.append(["tokens/s", *(f"{row['tokens_per_second']:,.0f}" for row in steps)])
    for stage in [part["stage"] for part in steps[0]["stages"]]:
        rows.append([stage, *(with_floor(find(row["stages"], stage=stage)) for row in steps)])
    return Subject(
        "A whole step",
        "Eight layers of V4-Flash with all 256 experts, from token ids to logits, decode of B requests at a context of "
        "8192 as a CUDA graph, and its stages timed alone, all blocks; microseconds (x floor).",
        ["h200_model.json", "h100_model.json"],
        "deepseek-attn bench model --model v4_flash --layers 0,1,2,3,4,5,6,7 --graph --batch 1,8,32,128 --context 8192 "
        "--prefill 4096,8192",
        rows,
    )


def experts(data: Data) -> Subject:
    h200, h100 = data("h200_flashinfer.json")["rows"], data("h100_experts.json")["humming"]
    columns = ("H200, FlashInfer", "H200, Humming", "H100, Humming")
    rows = [["tokens", *(f"{MODELS[model]}, {column}" for model in ("v4_flash", "v4_pro") for column in columns)]]
    for tokens in (1, 8, 32, 128, 512, 4096, 8192):
        cells = []
        for model in ("v4_flash", "v4_pro"):
            point = {"model": model, "tokens": tokens}
            here, there = find(h200, **point), find(h100["rows_since"], **point) or find(h100["rows"], **point)
            cells += [beside(here, "ours_us", "flashinfer_us"), beside(here, "ours_us", "humming_us")]
            cells += [beside(there, "ours_us", "humming_us")]
        rows.append([str(tokens), *cells])
    return Subject(
        "Routed experts beside FlashInfer and Humming",
        "FP4 experts with FP8 inputs: grouping, quantising, both products, SwiGLU and the sum; microseconds, ours / "
        "theirs (ratio), on each GPU in one run. FlashInfer 0.7.2.post1: the fastest of a part of its kernels; "
        "humming-kernels 0.1.19. No other tiles of this kernel are more than 0.8 % faster.",
        ["h200_flashinfer.json", "h100_experts.json", "h200_expert_tiles.json"],
        "python scripts/bench_flashinfer.py --module fused_moe_90.so",
        rows,
    )


def index_scores(data: Data) -> Subject:
    first = data("h200_index_scores.json")["rows"]
    few = [row for row in data("h200_few_scores.json")["rows"] if row["run"] == 5]
    names = [f"{what}, {keys} keys" for keys in ("FP8", "FP4") for what in ("scores", "scores and top-512")]
    rows = [["requests x queries", "entries", *(f"H200, {name}" for name in names)]]
    for steps, entries in (
        (((1, 1), (8, 1)), 262144),
        (((32, 1), (128, 1), (16, 4)), 32768),
        (((1, 512), (1, 4096)), 32768),
        (((1, 4096),), 2048),
    ):
        cells = []
        for keys in ("fp8", "fp4"):
            scores, selections = [], []
            for requests, queries in steps:
                shape = f"{keys} {requests}x{queries} queries, {entries} entries"
                score, selected = (
                    find(first, op=op, version="after", shape=shape) for op in ("index_scores", "index_select")
                )
                point = {"keys": keys, "requests": requests, "queries": queries, "entries": entries}
                newest = find(few, **point, variant="own") or find(few, **point, variant="base")
                scores.append(newest["us"] if newest else score and score["microseconds"])
                selections.append(selected and selected["microseconds"])
            cells += [times(scores), times(selections)]
        rows.append([", ".join(f"{requests} x {queries}" for requests, queries in steps), f"{entries:,}", *cells])
    return Subject(
        "Index scores",
        "`paged_index_scores` of 64 heads, and `index_select` before the kernel for few tokens; microseconds.",
        ["h200_index_scores.json", "h200_few_scores.json"],
        "deepseek-attn bench op --ops index",
        rows,
    )


def flash_mla(data: Data) -> Subject:
    measured = data("h200_attention_decode.json")["results"]
    batches = (1, 8, 32, 128, 256)
    rows = [["layer", "heads", "keys", *(f"H200, B = {b}" for b in batches)]]
    for name, heads, keys in dict.fromkeys((r["row"], r["heads"], "+".join(map(str, r["keys"]))) for r in measured):
        cells = []
        for batch in batches:
            row = find(measured, row=name, heads=heads, batch=batch)
            both = row and {"a": row["triton"]["us"], "b": row["flashmla"]["us"]}
            cells.append(beside(both, "a", "b"))
        rows.append([name, str(heads), keys, *cells])
    v32 = [row for row in data("h200_v32_ops.json")["rows"] if row["op"] == "sparse_attention"]
    for heads in (128, 16):
        cells = []
        for batch in batches:
            label = f"V3.2 H={heads} B={batch} tokens=1"
            ours, theirs = (find(v32, label=label, implementation=name) for name in ("triton", "flashmla"))
            both = {"a": ours["microseconds"], "b": theirs["microseconds"]} if ours and theirs else None
            cells.append(beside(both, "a", "b"))
        rows.append(["V3.2" if heads == 128 else "V3.2, 16 of 128 heads", str(heads), "2048", *cells])
    return Subject(
        "Decode attention beside FlashMLA",
        "Attention over 584-byte records alone, of V3.2 over 656-byte records with the kernels before "
        "`attend_v32_hopper`; microseconds, ours / FlashMLA (ratio).",
        ["h200_attention_decode.json", "h200_v32_ops.json"],
        "deepseek-attn bench op --ops sparse_attention",
        rows,
    )


def other_layers(data: Data) -> Subject:
    """Layers of V3.2 and V4.1."""
    v32, v41, newest = data("h200_v32_layers.json"), data("h200_v41.json"), data("h200_v41_layers.json")
    kept = [row for row in newest["rows"] if (row["model"], row["numerics"]) == ("v41_flash", "serving")]
    serving = v41["serving"] + kept
    batches = (1, 8, 32, 128)
    points = [(length, batch) for length in ("8K", "long") for batch in batches]
    prompts = [(length, tokens) for length in ("8K", "long") for tokens in (4096, 8192)]
    names = [*(f"{length}, B = {batch}" for length, batch in points), *(f"{n}, prefill {t}" for n, t in prompts)]
    rows = [["layer", "long", *names]]
    decode = [find(v32["decode"], context=8192 if n == "8K" else 131072, batch=b) for n, b in points]
    prefill = [find(v32["prefill"], context=8192 if n == "8K" else 131072, tokens=t) for n, t in prompts]
    cells = [f"{time(r['microseconds'])} ({r['over_floor']:.1f})" if r else "" for r in decode + prefill]
    rows.append(["V3.2", "128K", *cells])
    for layer, kind in dict.fromkeys((r["layer"], r["kind"]) for r in serving):
        point = {"layer": layer, "kind": kind}
        found = [find(serving, **point, context=8192 if n == "8K" else 65536, batch=b) for n, b in points]
        prompt = find(newest["prefill"], **point, numerics="serving")
        found += [prompt if (n, t) == ("8K", 4096) else None for n, t in prompts]
        cells = [f"{time(r['microseconds'])} ({r['microseconds'] / r['floor_us']:.1f})" if r else "" for r in found]
        rows.append([f"V4.1-Flash, {kind} (`{layer}`)", "64K", *cells])
    return Subject(
        "Attention layers of V3.2 and V4.1",
        "One attention layer on an H200, decode of B requests as a CUDA graph and prefill that ends at the context, "
        "microseconds (x floor); V3.2 with 128 heads.",
        ["h200_v32_layers.json", "h200_v41.json", "h200_v41_layers.json"],
        "`; `".join((v32["commands"]["decode"], v41["commands"]["serving"])),
        rows,
    )


def ops(data: Data) -> Subject:
    """Ops that are not in a table of their own: hyper-connections, routing, top-k, cache writes, V3.2's projections."""
    rows = [["op", "sizes", "H200, us", "H100, us", "H200, share of a copy"]]
    narrow, h100 = data("h200_narrow_products.json"), data("h100_model.json")["hc_post_pre_us"]["rows"]
    widths = {"v4_flash": 4096, "v4_pro": 7168}
    tokens = (1, 32, 128, 512, 4096, 8192)
    sizes = ", ".join(map(str, tokens)) + " tokens"
    for model, width in widths.items():
        us, other = [], []
        for count in tokens:
            whole = find(narrow["rows_of_groups"], D=width, T=count, product=4096, collapse=4096)
            row = whole or find(narrow["rows"], what="hc_post_pre", name="new", D=width, T=count)
            us.append(row and row["us"])
            row = find(h100, model=model, T=count)
            other.append(row and row["separate"])
        rows.append([f"`hc_post_pre`, {MODELS[model]}", sizes, times(us), times(other), ""])
    route = {"what": "moe_route", "name": "new", "weight": "torch.bfloat16"}
    for model in (*widths, "v32"):
        found = [find(narrow["rows"], **route, model=model, T=count) for count in tokens]
        rows.append([f"`moe_route`, {MODELS[model]}", sizes, times([row and row["us"] for row in found]), "", ""])
    h200 = [row for row in data("h200_topk.json")["rows"] if row.get("run") == 2 and row["kernel"] == "topk_kernel"]
    h100 = data("h100_topk.json")["rows"]
    topk: list[list[str]] = []
    for width, counts in ((2048, (1, 4096)), (32768, (64, 256, 4096)), (131072, (32,)), (262144, (1, 8))):
        ours = [find(h200, T=count, W=width, k=512, scores="normal") for count in counts]
        theirs = [find(h100, T=count, W=width, k=512, kind="n") for count in counts]
        cells = [times([row and row["us"] for row in ours]), times([row and row["orig"] for row in theirs])]
        topk.append([f"{', '.join(map(str, counts))} x {width:,}", *cells])
    rows.append(["`topk_indices`", *("; ".join(column) for column in zip(*topk, strict=True)), ""])
    v4 = [row for part in data("h200_ops.json") for row in part["rows"] if row["implementation"] == "triton"]
    v32 = [row for row in data("h200_v32_ops.json")["rows"] if row["implementation"] == "triton"]
    for measured, names in (
        (v4, ("hc_post", "hc_pre", "query_norm_rope", "gather", "index_query", "norm_rope_insert", "compress")),
        (v32, ("absorb_queries", "project_values", "insert_latents")),
    ):
        for name in names:
            row = max((row for row in measured if row["op"] == name), key=lambda r: r["share"])
            share = f"{100 * row['share']:.0f} %"
            rows.append([f"`{name}`", row["label"].replace("v4_pro", "V4-Pro"), time(row["microseconds"]), "", share])
    return Subject(
        "Single ops",
        "`hc_post_pre` updates the streams with one sublayer's output and collapses them for the next; `moe_route` has "
        "a bfloat16 weight; `topk_indices` selects the best 512 of random scores. Of ops with a share of the rate of a "
        "copy (4.28 TB/s), the size with the largest. T: tokens.",
        ["h200_narrow_products.json", "h100_model.json", "h200_topk.json", "h100_topk.json", "h200_ops.json",
         "h200_v32_ops.json"],
        "deepseek-attn bench op --repeats 6 --ops hc_,moe_route,topk,linear,index,compress,insert,gather,quer",
        rows,
    )  # fmt: skip


def engine(data: Data) -> Subject:
    measured = data("h200_engine.json")["rows"]
    columns = ("step, us", "device, us", "host", "tokens/s", "prompt tokens/s")
    rows = [["mode", *(f"B = {batch}: {name}" for batch in (1, 32) for name in columns)]]
    for mode in dict.fromkeys(row["mode"] for row in measured):
        cells = []
        for row in [find(measured, mode=mode, batch=batch) for batch in (1, 32)]:
            if row is None:
                cells += [""] * len(columns)
                continue
            host = "" if row["host_share"] is None else f"{100 * row['host_share']:.1f} %"
            rates = [f"{row[key]:,.0f}" for key in ("decode_tokens_per_second", "prompt_tokens_per_second")]
            cells += [time(row["step_us"]), time(row["device_us"]), host, *rates]
        rows.append([mode, *cells])
    return Subject(
        "The engine",
        "Eight layers of V4-Flash with 128 experts on an H200, greedy, prompts of 1024 tokens. `eager` prompts include "
        "compilation; `waiting` waits for the tokens of each step; `graphs` does not; the last two add prefix reuse "
        "and one draft of the MTP layer.",
        ["h200_engine.json"],
        "python scripts/bench_engine.py --layers 8 --experts 128 --batch 1 32 --prompt 1024 --tokens 40",
        rows,
    )


def drafts(data: Data) -> Subject:
    cards = {"H200": data("h200_drafts.json")["small"], "CPU": data("cpu_drafts.json")["rows"]}
    points = [(card, batch) for card in cards for batch in (1, 8, 32) if find(cards[card], batch=batch)]
    whole = data("h200_speculation.json")["rows"]
    lots = [(batch, rate) for batch in sorted({row["batch"] for row in whole}) for rate in (0.6, 0.85)]
    titles = [f"V4-Flash, H200, B = {batch}, {rate:.0%} right" for batch, rate in lots]
    rows = [["drafts", *(f"{card}, B = {batch}" for card, batch in points), *titles]]
    for count in range(4):
        found = [find(cards[card], batch=batch, drafts=count) for card, batch in points]
        found += [find(whole, batch=batch, drafts=count, acceptance=rate if count else None) for batch, rate in lots]
        cells = [f"{r['tokens_per_second']:,.0f} ({r['speedup']:.2f}; {r['tokens_per_step']:.2f})" for r in found if r]
        rows.append([str(count), *cells])
    return Subject(
        "Drafts of the MTP layer",
        "The package's checkpoint, greedy: tokens/s (ratio to no drafts; tokens per step); H200 in bfloat16, CPU in "
        "float32 on one thread. V4-Flash: 43 layers with 192 random experts each; drafts count as right by lot, with "
        "this probability if those before are.",
        ["h200_drafts.json", "cpu_drafts.json", "h200_speculation.json"],
        "deepseek-attn bench engine --batch 1,8,32 --drafts 1,2,3 --prompt 64 --tokens 192 --repeats 3",
        rows,
    )


def expected_tokens(rate: float, drafts: int) -> float:
    """Expected tokens of a step with drafts that are right with probability ``rate`` if those before are."""
    return sum(rate**n for n in range(drafts + 1))


def ranks(data: Data) -> Subject:
    runs = sorted(data("h200_ranks.json")["runs"], key=lambda run: run["date"])  # the newest of each case counts
    measured = [row for run in runs for row in run["rows"] if row["step"] == "prefill" or row.get("sums") == "as it is"]
    batches = sorted({row["batch"] for row in measured if row["step"] == "decode"})
    rows = [["layout", "prefill of 8192 for each group of ranks", *(f"decode, {batch} requests" for batch in batches)]]
    for layout, name in (("tp", "tensor parallel"), ("dp", "data-parallel attention")):
        found = [find(measured, step="prefill", layout=layout)]
        found += [find(measured, step="decode", layout=layout, batch=batch) for batch in batches]
        rows.append([name, *(f"{row['ms']:.2f} ({row['tokens_per_second']:,.0f})" if row else "" for row in found)])
    return Subject(
        "Two GPUs",
        "All 43 layers of V4-Flash on two H200s, random FP4 experts, contexts of 8192 tokens; decode as CUDA graphs; "
        "ms (tokens/s).",
        ["h200_ranks.json"],
        "torchrun --nproc-per-node 2 scripts/bench_parallel.py --model v4_flash --steps prefill,decode "
        "--batch 1,8,32,128,256 --context 8192 --prefill 8192 --out FILE",
        rows,
    )


def cold_start(data: Data) -> Subject:
    h100 = data("h100_cold_start.json")
    before, after = [row for row in h100["few_threads"]["rows"] if row["prompt"] == 3000]  # of code, on one host
    cards = {
        "H200": [row for row in data("h200_cold_start.json")["asked_first"]["rows"] if row["code"] == "after"],
        "H100": [*h100["rows"], after],
        "H100, another": h100["another_machine"],
    }
    stages = ("model", "first token", "second token", "all kernels compiled")
    kinds = dict.fromkeys((row["model"], row["cache"]) for measured in cards.values() for row in measured)
    rows = [["model", "kernel cache", *(f"{card}: {stage}" for card in cards for stage in stages)]]
    for model, cache in kinds:
        runs = [[row["stages"] for row in measured if (row["model"], row["cache"]) == (model, cache)]
                for measured in cards.values()]  # fmt: skip
        cells = [", ".join(f"{run[stage]:.1f}" for run in of_card) for of_card in runs for stage in stages]
        rows.append([MODELS.get(model, str(model)), "empty" if cache == "ahead" else str(cache), *cells])
    return Subject(
        "Cold start",
        "Seconds from the start of the process, all runs; V4-Flash's shapes with 6 layers and 32 experts, and the "
        "small model. V4-Flash ran on a slower H100 host than the small model: in an older version, second tokens "
        f"came there after {before['stages']['second token']:.1f} s.",
        ["h200_cold_start.json", "h100_cold_start.json"],
        "python scripts/bench_cold_start.py --out FILE",
        rows,
    )


def other_programs(data: Data) -> Subject:
    """On a CPU, beside transformers and fastllm."""
    rows = [["beside", "threads", "prefill 1024, ms", "decode 64, ms"]]
    measured = data("cpu_transformers.json")
    for threads in dict.fromkeys(run["threads"] for run in measured):
        runs = [run["seconds"] for run in measured if run["threads"] == threads]
        cells = [
            "; ".join(beside({"a": r["deepseek-attn"][p], "b": r["transformers"][p]}, "a", "b", 0.001, 0) for r in runs)
            for p in ("prefill", "decode")
        ]
        rows.append(["transformers", str(threads), *cells])
    run = data("cpu_fastllm.json")
    for one in (run, *run["pinned"]):
        steps = {"prefill": 1, "decode": run["decode"] - 1}  # decode: seconds a token
        both = {p: {"a": n * one["seconds"]["deepseek-attn"][p], "b": n * one["seconds"]["fastllm"][p]}
                for p, n in steps.items()}  # fmt: skip
        name = f"fastllm {run['versions']['fastllm']}, {one['cores']}"
        rows.append([name, str(one["threads"]), *(beside(both[p], "a", "b", 0.001, 0) for p in both)])
    logits = run["logits"]["rows"]
    far = {name: statistics.median(row[name] for row in logits) for name in ("fastllm", "official")}
    same = sum(row["same_first"][0] for row in logits)
    return Subject(
        "CPU beside transformers and fastllm",
        "Ours / theirs (ratio). transformers: the tiny preset in float32 with `exact` numerics, two cores. fastllm "
        "(`python scripts/bench_fastllm.py`; its weights float16, ours float32): the package's checkpoint on other "
        "machines, as many cores as threads: its threads stall where other work takes a core. Both compute the same: "
        f"after {len(logits)} prompts fastllm's logits are {far['fastllm']:.1%} of the norm from ours (median), those "
        f"of `official` numerics {far['official']:.1%}; {same} have the same argmax.",
        ["cpu_transformers.json", "cpu_fastllm.json"],
        "python scripts/bench_transformers.py",
        rows,
    )


def host_experts(data: Data) -> Subject:
    small, large = data("h200_host_80gb.json"), data("h200_host_model.json")
    h100 = data("h100_host_model.json")
    parts = [("experts", data("h200_host_experts.json")), ("model", small), ("model", large), ("model", h100)]
    columns = ("ms (x bus)", "tokens/s", "hit rate", "all there, ms")
    names = [f"{part}, {found[part]['cached']} of 256" for part, found in parts]
    names[-1] += ", H100"
    shares = [0.5, 0.8, 1.0]
    ahead = [f"{names[-1]}, {share} predicted: ms (x bus)" for share in shares]
    rows = [["routing", *(f"{name}: {column}" for name in names for column in columns), *ahead]]
    for point in (key for key, value in large["model"].items() if isinstance(value, dict) and "over_bus" in value):
        cells = []
        for part, found in parts:
            row, tokens = found[part][point], int(point.split()[-1])
            cells += [f"{row['seconds'] * 1000:.1f} ({row['over_bus']:.2f})", f"{tokens / row['seconds']:,.0f}"]
            cells += [f"{row['hit_rate']:.3f}" if "hit_rate" in row else ""]
            cells += [f"{row['seconds_all_there'] * 1000:.1f}" if "seconds_all_there" in row else ""]
        predicted = [h100["model"].get(f"{point}, ahead {share}") for share in shares]
        cells += [f"{row['seconds'] * 1000:.1f} ({row['over_bus']:.2f})" if row else "" for row in predicted]
        rows.append([point, *cells])
    steps = [(found[part]["uniform, batch 1"], found[part]["expert_bytes"]) for part, found in parts]
    rates = [row["copied"] * nbytes / row["bus_seconds"] / 1e9 for row, nbytes in steps]
    return Subject(
        "Experts in host memory",
        "V4-Flash with random weights on one H200 or one H100. Its 43 layers read the same three layers of experts "
        "from pinned host memory. The GPU caches as many experts of each layer as fit into its memory, or into 80 GB. "
        "The columns show the routed experts alone, and the whole model. "
        f'The bus: copied experts at cudaMemcpy\'s rate ({min(rates):.1f} to {max(rates):.1f} GB/s). "All there": the '
        "same step again. Residents followed Zipf's law for 400 steps before the steps at 118, for at most 150 before "
        "the others. At 118 and on the H100 32 programs copy, in the others 8. Predicted: this "
        "part of the experts that are copied ahead of the routing is right; other steps predict none.",
        ["h200_host_experts.json", "h200_host_80gb.json", "h200_host_model.json", "h100_host_model.json"],
        "python scripts/bench_host_experts.py --parts copies,experts,model --cache-bytes BYTES --out FILE",
        rows,
    )


def prompts(data: Data) -> Subject:
    measured = data("h200_prompts.json")
    lengths = list(dict.fromkeys(row["length"] for row in measured["results"]))
    names = [f"{n} tokens: {what}" for n in lengths for what in ("s (of all rows)", "error", "equal tokens")]
    rows = [["rows of upper layers", *names]]
    for mode in dict.fromkeys(row["mode"] for row in measured["results"]):
        cells = []
        for row in (find(measured["results"], mode=mode, length=length) for length in lengths):
            if row is None:
                cells += [""] * 3
                continue
            rounding = f"; other chunks {row['rounding']:.1e}" if row["rounding"] else ""
            cells += [f"{row['seconds']:.3f} ({row['of_full']:.3f})", f"{row['error']:.1e}{rounding}"]
            cells += [f"{row['equal_tokens']} of {measured['tokens']}"]
        rows.append([mode, *cells])
    return Subject(
        "Prompts of DeepSeek-V4.1",
        "V4.1-Flash's 40 layers on an H200, which share one layer's random experts, by the portable kernel; error: of "
        "the last token's logits, relative. [Modes](v41.md#measure-it).",
        ["h200_prompts.json"],
        "python scripts/bench_prompts.py --lengths 8192 32768 131072",
        rows,
    )


def targets(data: Data) -> Subject:
    """What was aimed at, in ratios of times, a row each: measured, met, and what limits it."""
    cards: list[str] = ["H200", "H100", "H200, vLLM 0.33"]
    peers = {card: data(name)["layers"] for card, name in zip(cards, BESIDE_VLLM, strict=True)}
    counters = data("h100_counters.json")["rows"]
    rows = [["what", "target", "measured", "met", "what limits it", "data"]]

    def add(
        what: str, target: float, found: Mapping[str, Sequence[float | None]], limit: str, *files: str,
        least: bool = False, spread: bool = False, case: str = "",
    ) -> None:  # fmt: skip
        """``found``: ratios by card; ``case``: a row of the counters, whose busy units precede ``limit``."""
        known = {card: [round(one, 2) for one in ratios if one is not None] for card, ratios in found.items()}
        known = {card: ratios for card, ratios in known.items() if ratios}
        shown = {
            card: f"{min(ratios):.2f} to {max(ratios):.2f}" if spread else ", ".join(f"{one:.2f}" for one in ratios)
            for card, ratios in known.items()
        }
        met = [one >= target if least else one <= target for ratios in known.values() for one in ratios]
        busy = find(counters, case=case)
        parts = {"tensor": "tensor cores", "issue": "issue slots", "dram": "DRAM"}
        units = (
            [f"an H100 is busy: {', '.join(f'{name} {busy[k]:.0f} %' for k, name in parts.items())}"] if busy else []
        )
        cells = [
            what,
            f"{'at least' if least else 'at most'} {target:.2f}",
            "; ".join(f"{card} {text}" for card, text in shown.items()),
            f"{sum(met)} of {len(met)}",
            "; ".join([*units, *([limit] if limit else [])]),
        ]
        rows.append([*cells, links(*files, *(["h100_counters.json"] if busy else []))])

    def of_vllm(card: str, **point: object) -> float | None:
        row = find(peers[card], **point)
        return row["ours_us"] / row["vllm_us"] if row else None

    found = data("h200_flashinfer.json")["rows"]
    sizes = list(dict.fromkeys(row["tokens"] for row in found))
    fastest: dict[str, list[float | None]] = {}
    for model in ("v4_flash", "v4_pro"):
        of_model = [find(found, model=model, tokens=tokens) for tokens in sizes]
        fastest[MODELS[model]] = [
            row["ours_us"] / min(row["flashinfer_us"], row["humming_us"]) if row else None for row in of_model
        ]
    add(f"Routed experts over the faster of FlashInfer and Humming, H200, {', '.join(map(str, sizes))} tokens", 1.0,
        fastest, "theirs have one scale for a row of inputs; a scale for 128 channels, as published, costs 96 cycles "
        "of float32 additions beside 192 of products", "h200_flashinfer.json", "h200_expert_tiles.json")  # fmt: skip
    sglang = [row for row in data("h200_prefill_fp8.json")["rows"] if "sglang_fp8_us" in row]
    wrong = [row["sglang_fp8_error"] for row in sglang]
    speed = {
        f"{heads} heads": [r["flash_mla_over_fp8"] for r in sglang if (r["queries"], r["heads"]) == (4096, heads)]
        for heads in (64, 128)
    }
    add("FP8 prefill attention: FlashMLA's time over SGLang's, 4096 queries, H200", 1.15, speed,
        f"so no FP8 switch: casting queries takes longer than it saves, outputs are {min(wrong):.1%} to "
        f"{max(wrong):.1%} from float32", "h200_prefill_fp8.json", least=True)  # fmt: skip
    steps = {
        phase: {
            card: [row["ours_us"] / row["vllm_us"] for row in layers if row["phase"] == phase]
            for card, layers in peers.items()
        }
        for phase in ("prefill", "decode")
    }
    limit = (
        "C4A at 128K: index scores; elsewhere FP8 products and FlashMLA's attention, which both have, take two thirds"
    )
    add("All prefill layers over vLLM's time", 0.85, steps["prefill"], limit, *BESIDE_VLLM, spread=True)
    prompt = {"phase": "prefill", "model": "flash", "kind": "c4a", "tokens": 4096, "context": 131072}
    scores = "index_scores FP8, {}, 32768 entries"
    add("V4-Flash's C4A, 4096 tokens of a prompt at 128K, over vLLM's time", 0.85,
        {card: [of_vllm(card, **prompt)] for card in peers},
        "scores at 80 % of the FP8 product with a free selection: [0.86](notebook.md#what-missed-targets-would-take)",
        *BESIDE_VLLM, case=scores.format("1024 queries of one request"))  # fmt: skip
    limit = "reading index keys (next row) or weights: V4-Pro's at copy speed are 64 % of its C4A layer"
    add("All decode layers over vLLM's time", 0.80, steps["decode"], limit, *BESIDE_VLLM, spread=True)
    points = (("flash", 131072, 128), ("flash", 1 << 20, 8), ("pro", 131072, 1))
    keys = ("model", "context", "batch")
    decode = {
        card: [of_vllm(card, phase="decode", kind="c4a", **dict(zip(keys, one, strict=True))) for one in points]
        for card in peers
    }
    add("C4A over vLLM's time: V4-Flash, 128K x 128 and 1M x 8; V4-Pro, 128K x 1", 0.80, decode,
        "index keys are read at 90 % of a copy's rate", *BESIDE_VLLM,
        case=scores.format("128 requests"))  # fmt: skip
    copies = {"H200": data("h200_model.json")["ceilings"]["copy"], "H100": data("h100_model.json")["ceilings"]["copy"]}
    h200 = [row for row in data("h200_topk.json")["rows"] if row.get("run") == 2 and row["kernel"] == "topk_kernel"]
    reads: dict[str, list[float | None]] = {}
    for count, width in ((1, 262144), (8, 262144), (64, 32768)):
        ours = find(h200, T=count, W=width, k=512, scores="normal")
        other = find(data("h100_topk.json")["rows"], T=count, W=width, k=512, kind="n")
        for card, us in (("H200", ours and ours["us"]), ("H100", other and other["orig"])):
            reads.setdefault(card, []).append(us / (5 + 2 * 4 * count * width / copies[card] * 1e6) if us else None)
    add("`topk_indices` of 1 and 8 x 262,144 and 64 x 32,768 over two reads and 5 us", 1.0, reads,
        "rounds of a search, one after the other", "h200_topk.json", "h100_topk.json",
        case="topk 8x262144 k=512")  # fmt: skip
    v41 = data("h200_v41_layers.json")["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in v41 if row["model"] == "v41_flash"))
    over: dict[str, list[float | None]] = {}
    both = [kind for kind in kinds if find(v41, kind=kind, numerics="official")]
    for batch, kind in [(batch, kind) for batch in (1, 8, 32, 128, 0) for kind in both]:
        at = {"model": "v41_flash", "kind": kind} | ({"batch": batch} if batch else {})
        found = v41 if batch else data("h200_v41_layers.json")["prefill"]
        pair = [find(found, **at, numerics=numerics) for numerics in ("official", "serving")]
        ratio = pair[0]["microseconds"] / pair[1]["microseconds"] if pair[0] and pair[1] else None
        over.setdefault(f"H200, B = {batch}" if batch else "H200, prefill 4096", []).append(ratio)
    add(f"V4.1-Flash's layers, `official` over `serving`: {', '.join(both)}", 1.5, over,
        "keys of 528 and 288 bytes, decoded in both formats by 2,804 instructions for 64 keys, take 99 us of C2 "
        "reuse's 218 for 128 requests, `serving`'s 43; linears: 32 cycles of the tensor cores for 32 channels beside "
        "68 instructions", "h200_v41_layers.json", "h200_v41_linears.json")  # fmt: skip
    points = {"model": "v41_flash", "numerics": "serving", "batch": 1}
    alone = find(data("h200_v41.json")["v4"], kind="C4A", batch=1, context=8192)
    c4a = find(peers["H200"], phase="decode", model="flash", kind="c4a", context=8192, batch=1)
    swa = find(v41, model="v4_flash", kind="SWA", batch=1)
    like = {
        "SWA": swa and swa["microseconds"] / swa["floor_us"],
        "C4A": alone and c4a and c4a["ours_us"] / alone["floor_us"],
    }
    floors: list[float | None] = []
    for kind in kinds:
        row, other = find(v41, **points, kind=kind), like["C4A" if kind.endswith(("full", "reindex")) else "SWA"]
        floors.append(row["microseconds"] / row["floor_us"] / other if row and other else None)
    add(f"x floor of V4.1-Flash's {', '.join(kinds)} over that of V4-Flash's SWA or C4A, B = 1, 8K", 1.0,
        {"H200": floors}, "launches one after the other: a selection adds 26 us, making entries 14",
        "h200_v41_layers.json", "h200_v41.json", "h200_beside_vllm.json")  # fmt: skip
    run = data("cpu_fastllm.json")
    pairs = {one["cores"]: list(one["ratio"].values()) for one in (*run["pinned"], run)}
    add("Small model on a CPU, prefill of 1024 tokens and decode, over fastllm's time", 1.0, pairs,
        "decode: 22 MB of float32 weights a token, 1.1 ms at 20 GB/s, where fastllm has float16; 813 "
        "[recorded](notebook.md#cpu-recorded-decode-steps) calls, 1.5 to 2 us each; on a quiet host 4.4 ms beside 3.0, "
        "of two runs",
        "cpu_fastllm.json")  # fmt: skip
    two, goals = data("h200_ranks.json")["runs"][0]["rows"], ((1, 4.8), (32, 12.0))
    alone = [row for row in two if row.get("sums") == "as it is"]
    pairs = {"no drafts": [min(row["ms"] for row in alone if row["batch"] == n) / most for n, most in goals]}
    for rate in (0.6, 0.85):
        ms = [(row["batch"], row["step_us"] / 1e3 / expected_tokens(rate, row["drafts"])) for row in two
              if row.get("acceptance") == rate]  # fmt: skip
        pairs[f"{rate:.0%} right"] = [min(one for batch, one in ms if batch == n) / most for n, most in goals]
    add("V4-Flash on two H200s, ms a token of one request over 4.8, of 32 over 12; with the best of 1 to 3 drafts", 1.0,
        pairs, "32 requests, of 15 ms: 9.3 read experts at 4.2 TB/s, 31 other launches a layer take 5.7",
        "h200_ranks.json")  # fmt: skip
    lots = [row for row in data("h200_speculation.json")["rows"] if row["drafts"]]
    gains: dict[str, list[float | None]] = {}
    for batch, rate in sorted({(row["batch"], row["acceptance"]) for row in lots}):
        found = [row["speedup"] for row in lots if (row["batch"], row["acceptance"]) == (batch, rate)]
        gains.setdefault(f"B = {batch}", []).append(max(found))
    add("V4-Flash's tokens/s with the best of 1 to 3 drafts over none, 60, then 85 % right, H200", 1.0, gains,
        "experts that only drafts choose: the first adds 1.5 ms to a step of 5.3 at B = 1, 5.2 to 11.2 at 8, 8.2 to "
        "22.9 at 32",
        "h200_speculation.json", least=True)  # fmt: skip
    return Subject(
        "Targets of speed",
        "Ratios, an entry for each case, and the number of entries that meet the target; vLLM is 0.26 where no version "
        "is named. The [notebook](notebook.md#targets) has earlier targets.",
        [],
        "",
        rows,
    )


def checks(data: Data) -> Subject:
    """Checks, soaks and comparisons of choices, a row each."""
    rows = [["measurement", "result", "data"]]

    def add(name: str, result: str, *files: str) -> None:
        rows.append([name, result, links(*files)])

    rates = [f"{row['tokens_per_second']:.1f}" for row in data("h200_engine_features.json")["rows"]]
    add(
        "V4-Flash's 43 layers with 16 random experts each, one request, tokens/s, H200",
        f"{rates[0]}; with 5 log-probabilities {rates[1]}, with a JSON schema {rates[2]}",
        "h200_engine_features.json",
    )
    masks = {"H200": data("h200_structured.json")["rows"], "a CPU": data("cpu_structured.json")["rows"]}
    ways = []
    for structure in (row["structure"] for row in masks["H200"]):
        found = [find(measured, structure=structure) for measured in masks.values()]
        parts = [f"{time(row['microseconds'])} + {time(row['apply_us'])}" for row in found if row]
        ways.append(f"{structure}: {', '.join(parts)}")
    add(
        "Structured output: making a mask and applying it, us, with an H200 and on a CPU, 129,280 tokens",
        "; ".join(ways),
        "h200_structured.json",
        "cpu_structured.json",
    )
    mla = data("h100_flash_mla_tests.json")
    failed = f"{mla['wrong']} wrong, {mla['out of memory']} did not fit into their part of the memory"
    add(
        "FlashMLA's own tests, H100",
        f"{mla['passed']:,} of {mla['cases']:,} passed, {failed}",
        "h100_flash_mla_tests.json",
    )
    layers = data("h200_attention_check.json")["summary"]
    many = f"{layers['cases']:,} checks, {len(layers['failed'])} above its limit, which the data file explains"
    add("Attention layers beside float32, H200", many, "h200_attention_check.json")
    two = data("h200_parallel.json")
    parts = [
        two[key][part]["error"] for key in ("check_float32", "check_data_parallel") for part in ("prompts", "steps")
    ]
    add(
        "Two H200s beside one, float32, relative error",
        "tensor parallel: prompts {:.1e}, steps {:.1e}; data-parallel attention: {:.1e}, {:.1e}".format(*parts),
        "h200_parallel.json",
    )
    soaks = ("soak_v4.json", "soak_v32.json", "soak_v32_no_drafts.json", "soak_h200.json")
    ends = []
    for soak in map(data, soaks):
        name = "a CPU" if soak["device"] == "x86_64" else "an H200"
        ends.append(f"{soak['model']} on {name}: {soak['counts']['step']:,} steps, {soak['growth']['rss']:+.1%}")
    add("Random requests, forks and failures: growth of the process's memory", "; ".join(ends), *soaks)
    memory = data("h200_memory.json")["rows"]
    off = ", ".join(f"{row['predicted_driver'] / row['driver'] - 1:+.1%}" for row in memory)
    add("Memory that `plan` counts, beside the driver's peak, H200, three limits", off, "h200_memory.json")
    versions = ("h200_checkouts.json", "h200_checkouts_plans.json", "h200_checkouts_rings.json")
    pairs = [data(name) for name in versions]
    ratios = []
    for pair in pairs:
        over = [row["after_us"] / row["before_us"] for row in pair["rows"]]
        name = f"{MODELS[pair['model']]}, {pair['after']} over {pair['before'][:7]}"
        ratios.append(f"{name}: {statistics.geometric_mean(over):.3f}, worst {max(over):.3f}")
    add(
        "Versions side by side, decode layers, H200",
        "; ".join(ratios),
        *versions,
    )
    tables = (
        "h100_tune_v4_flash.json",
        "h100_tune_v4_pro.json",
        "h200_tune_v4_pro.json",
        "h100_tune_v32.json",
        "h200_tune_v41_flash.json",
    )
    fastest: dict[str, list[float]] = {}
    for tune in map(data, tables):
        fastest.setdefault(MODELS[tune["model"]], []).extend(
            row["taken"]["microseconds"] / min(other["microseconds"] for other in (row["taken"], *row["others"]))
            for key, found in tune.items() if key != "environment" and isinstance(found, list) for row in found
        )  # fmt: skip
    shares = [
        f"{model}: {sum(ratio < 1.03 for ratio in over)} of {len(over)}, worst {max(over):.2f}"
        for model, over in fastest.items()
    ]
    add("Rows of launch tables within 3 % of the fastest row", "; ".join(shares), *tables)
    exact = data("h200_deterministic.json")
    rates = [exact[key][0]["tokens_per_second"] for key in ("deterministic", "default")]
    many = f"{rates[0]:.0f} tokens/s, {rates[1]:.0f} without"
    add("`deterministic=True`, 6 layers, one request, H200", many, "h200_deterministic.json")
    found = data("h200_v41_experts.json")["experts"]
    many = ", ".join(f"{row['tokens']}: {time(row['us'])} ({row['us'] / row['portable_us']:.2f})" for row in found)
    name = f"V4.1-Flash's routed experts by tokens, us (over the portable kernel), `{found[0]['kernel']}`, H200"
    add(name, many, "h200_v41_experts.json")
    tried = ("h200_few_tokens.json", "h200_layer_choices.json", "h200_layer_linears.json", "h200_attend_heads.json",
             "h200_wide_linears.json", "h100_counters.json", "h200_experts.json",
             "h200_hyper_connections.json")  # fmt: skip
    alone = ("h200_layers_decode.json", "h200_layers_prefill.json")
    count = sum(len(data(name)["rows"]) for name in tried) + sum(len(p["rows"]) for name in alone for p in data(name))
    many = f"{count:,} rows ([notebook](notebook.md))"
    add(
        "Other tiles, splits and versions, hardware counters, attention layers alone with their kernels",
        many,
        *tried,
        *alone,
    )
    studies = ("h200_schedules.json", "h200_study_recall.json", "h200_study_rates.json", "cpu_width_rates.json",
               "h200_checkpoint_layers.json")  # fmt: skip
    count = sum(len(data(name)["rows"]) for name in studies)
    add("Costs and recall of compress-ratio schedules", f"{count} rows ([experiments](experiments.md))", *studies)
    return Subject(
        "Checks, soaks and choices",
        "One row for each; the data files have commands and details.",
        [],
        "",
        rows,
    )


SUBJECTS: list[Callable[[Data], Subject]] = [
    attention_decode, attention_prefill, whole_step, experts, ops, index_scores, flash_mla, other_layers, prompts,
    engine, drafts, ranks, host_experts, cold_start, other_programs, targets, checks,
]  # fmt: skip


def page(folder: Path) -> str:
    """The text of results.md; ``folder``: docs/data."""
    data = Data(folder)
    return "\n".join([HEAD, *(make(data).page() for make in SUBJECTS)])


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("docs", type=Path, help="the folder docs: reads its data, writes results.md")
    docs = parser.parse_args().docs
    try:
        text = page(docs / "data")
    except FileNotFoundError as error:
        parser.error(f"{error.filename}: no such file; expected the folder docs of a checkout, with all of its data")
    write_text(docs / "results.md", text)


if __name__ == "__main__":
    main()
