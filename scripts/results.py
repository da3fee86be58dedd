#!/usr/bin/env python3
"""Writes docs/results.md, the newest measurements, one table per subject, from the files in docs/data.

    python scripts/results.py docs

A subject is a function of `SUBJECTS`: it names its data files and its command, and returns the rows of its table.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
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
NO_COMMAND = "a program with both libraries in one process, which the data file describes"
MODELS = {"flash": "V4-Flash", "pro": "V4-Pro", "v4_flash": "V4-Flash", "v4_pro": "V4-Pro", "v32": "V3.2"}
KINDS = {"swa": "SWA", "c4a": "C4A", "c128a": "C128A"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """One table: its title, a description, its source and its cells; the first row is the header."""

    title: str
    text: str
    data: list[str]
    command: str
    table: list[list[str]]

    def page(self) -> str:
        files = ", ".join(f"[{name}](data/{name})" for name in self.data)
        command = self.command if self.command == NO_COMMAND else f"`{self.command}`"
        header, *rows = self.table
        lines = [header, ["---"] * len(header), *rows]
        table = "\n".join("| " + " | ".join(row) + " |" for row in lines)
        return f"## {self.title}\n\n{self.text} Data: {files}. Command: {command}.\n\n{table}\n"


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


def size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 2**20 else f"{tokens // 2**20}M"


def attention_decode(data: Data) -> Subject:
    h200, h100 = data("h200_beside_vllm.json")["layers"], data("h100_beside_vllm.json")["layers"]
    batches = (1, 8, 32, 128)
    rows = [["model", "kind", "context", *(f"H200, B = {b}" for b in batches), *(f"H100, B = {b}" for b in batches)]]
    points = dict.fromkeys((r["model"], r["kind"], r["context"]) for r in h200 if r["phase"] == "decode")
    for model, kind, context in sorted(points, key=lambda p: (p[0], list(KINDS).index(p[1]), p[2])):
        cells = [
            beside(find(card, phase="decode", model=model, kind=kind, context=context, batch=b), "ours_us", "vllm_us")
            for card in (h200, h100)
            for b in batches
        ]
        rows.append([MODELS[model], KINDS[kind], size(context), *cells])
    return Subject(
        "Attention layers beside vLLM, decode",
        "One attention layer, microseconds, ours / vLLM 0.26 (ratio); `serving` numerics.",
        ["h200_beside_vllm.json", "h100_beside_vllm.json"],
        NO_COMMAND,
        rows,
    )


def attention_prefill(data: Data) -> Subject:
    h200, h100 = data("h200_beside_vllm.json")["layers"], data("h100_beside_vllm.json")["layers"]
    points = [(4096, 8192), (8192, 8192), (4096, 131072), (8192, 131072)]
    names = [f"{tokens} : {size(context)}" for tokens, context in points]
    rows = [["model", "kind", *(f"H200, {n}" for n in names), *(f"H100, {n}" for n in names)]]
    for model, kind in [(m, k) for m in ("flash", "pro") for k in KINDS if (m, k) != ("pro", "swa")]:
        wanted = {"phase": "prefill", "model": model, "kind": kind}
        cells = [
            beside(find(card, **wanted, tokens=tokens, context=context), "ours_us", "vllm_us", 1000, 2)
            for card in (h200, h100)
            for tokens, context in points
        ]
        rows.append([MODELS[model], KINDS[kind], *cells])
    return Subject(
        "Attention layers beside vLLM, prefill",
        "Milliseconds, ours / vLLM 0.26 (ratio); tokens computed : length after them.",
        ["h200_beside_vllm.json", "h100_beside_vllm.json"],
        NO_COMMAND,
        rows,
    )


def with_floor(row: Row | None) -> str:
    """Microseconds and their ratio to the floor, or an empty cell."""
    return f"{time(row['microseconds'])} ({row['microseconds'] / row['floor_us']:.2f})" if row else ""


def step_name(row: Row) -> str:
    return f"prefill {row['tokens']}" if row["tokens"] > 1 else f"decode, batch {row['batch']}"


def whole_step(data: Data) -> Subject:
    cards = {"H200": data("h200_model.json")["rows"], "H100": data("h100_model.json")["rows"]}
    rows = [["", "GPU", *map(step_name, cards["H200"])]]
    for card, measured in cards.items():
        rows.append(["**whole step**", card, *(with_floor(row) for row in measured)])
    for card, measured in cards.items():
        rows.append(["tokens/s", card, *(f"{row['tokens_per_second']:,.0f}" for row in measured)])
    for stage in [part["stage"] for part in cards["H200"][0]["stages"]]:
        for card, measured in cards.items():
            rows.append([stage, card, *(with_floor(find(row["stages"], stage=stage)) for row in measured)])
    return Subject(
        "A whole step",
        "Eight layers of V4-Flash with all 256 experts, from token ids to logits, as a CUDA graph, context 8192, and "
        "its stages timed alone, all blocks; microseconds (x floor).",
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
        "humming-kernels 0.1.19.",
        ["h200_flashinfer.json", "h100_experts.json"],
        "python scripts/bench_flashinfer.py --module fused_moe_90.so",
        rows,
    )


def between_sublayers(data: Data) -> Subject:
    narrow = data("h200_narrow_products.json")
    h100 = data("h100_model.json")["hc_post_pre_us"]["rows"]
    route = {"what": "moe_route", "name": "new", "weight": "torch.bfloat16"}
    widths = {"v4_flash": 4096, "v4_pro": 7168}
    names = [f"`hc_post_pre`, {MODELS[m]}, {card}" for m in widths for card in ("H200", "H100")]
    rows = [["tokens", *names, *(f"`moe_route`, {MODELS[m]}, H200" for m in (*widths, "v32"))]]
    for tokens in (1, 32, 128, 512, 1024, 4096, 8192):
        us = []
        for model, width in widths.items():
            whole = find(narrow["rows_of_groups"], D=width, T=tokens, product=4096, collapse=4096)
            row = whole or find(narrow["rows"], what="hc_post_pre", name="new", D=width, T=tokens)
            us += [row and row["us"]]
            row = find(h100, model=model, T=tokens)
            us += [row and row["separate"]]
        for model in (*widths, "v32"):
            row = find(narrow["rows"], **route, model=model, T=tokens)
            us += [row and row["us"]]
        rows.append([str(tokens), *map(time, us)])
    return Subject(
        "Hyper-connections and routing",
        "`hc_post_pre` updates the streams with one sublayer's output and collapses them for the next; `moe_route` has "
        "a bfloat16 weight. Microseconds.",
        ["h200_narrow_products.json", "h100_model.json"],
        "deepseek-attn bench op --ops hc_post_pre,moe_route",
        rows,
    )


def topk(data: Data) -> Subject:
    h200 = [row for row in data("h200_topk.json")["rows"] if row.get("run") == 2 and row["kernel"] == "topk_kernel"]
    h100 = data("h100_topk.json")["rows"]
    points = [(1, 2048), (4096, 2048), (64, 32768), (256, 32768), (4096, 32768), (32, 131072), (1, 262144), (8, 262144)]
    rows = [["rows x scores", "H200", "H100"]]
    for tokens, width in points:
        a = find(h200, T=tokens, W=width, k=512, scores="normal")
        b = find(h100, T=tokens, W=width, k=512, kind="n")
        rows.append(
            [f"{tokens} x {width:,}", time(None if a is None else a["us"]), time(None if b is None else b["orig"])]
        )
    return Subject(
        "Top-k",
        "`topk_indices`, the best 512 of random scores, microseconds.",
        ["h200_topk.json", "h100_topk.json"],
        "deepseek-attn bench op --ops topk",
        rows,
    )


def index_scores(data: Data) -> Subject:
    first = data("h200_index_scores.json")["rows"]
    few = [row for row in data("h200_few_scores.json")["rows"] if row["run"] == 5]
    names = [f"{what}, {keys} keys" for keys in ("FP8", "FP4") for what in ("scores", "scores and top-512")]
    rows = [["requests x queries", "entries", *(f"H200, {name}" for name in names)]]
    for requests, queries, entries in ((1, 1, 262144), (8, 1, 262144), (32, 1, 32768), (128, 1, 32768), (16, 4, 32768),
                                       (1, 512, 32768), (1, 4096, 32768), (1, 4096, 2048)):  # fmt: skip
        us = []
        for keys in ("fp8", "fp4"):
            shape = f"{keys} {requests}x{queries} queries, {entries} entries"
            scores, selected = (
                find(first, op=op, version="after", shape=shape) for op in ("index_scores", "index_select")
            )
            point = {"keys": keys, "requests": requests, "queries": queries, "entries": entries}
            newest = find(few, **point, variant="own") or find(few, **point, variant="base")
            us += [newest["us"] if newest else scores and scores["microseconds"]]
            us += [selected and selected["microseconds"]]
        rows.append([f"{requests} x {queries}", f"{entries:,}", *map(time, us)])
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
    return Subject(
        "Decode attention beside FlashMLA",
        "Attention over 584-byte records alone, microseconds, ours / FlashMLA (ratio).",
        ["h200_attention_decode.json"],
        "deepseek-attn bench op --ops sparse_attention",
        rows,
    )


def prefill_fp8(data: Data) -> Subject:
    measured = data("h200_prefill_fp8.json")["rows"]
    casts = [row["cast_queries_us"] for row in measured if row["queries"] == 4096]
    names = [f"{queries} queries, {heads} heads" for heads in (64, 128) for queries in (512, 4096)]
    rows = [["keys", *names, "error, FP8 / bfloat16"]]
    for keys in (128, 512, 640, 2048):
        places = [(heads, queries) for heads in (64, 128) for queries in (512, 4096)]
        found = [row for h, q in places if (row := find(measured, heads=h, queries=q, keys=keys))]
        cells = [
            f"{r['sglang_fp8_us']:.0f} / {r['flash_mla_us']:.0f} ({1 / r['flash_mla_over_fp8']:.2f})" for r in found
        ]
        errors = f"{found[1]['sglang_fp8_error']:.1%} / {found[1]['flash_mla_error']:.1%}"
        rows.append([str(keys), *cells, errors])
    return Subject(
        "Prefill attention in FP8",
        "Not of this library: SGLang 0.5.23's `sparse_mla_q8kv8_prefill_sm90` beside FlashMLA in bfloat16, which "
        "prefill takes here; kernels alone on an H200, microseconds (ratio). Casting 4096 queries to FP8 takes "
        f"{min(casts):.0f} to {max(casts):.0f} more. Error against float32.",
        ["h200_prefill_fp8.json"],
        "python scripts/bench_prefill_fp8.py --module sparse_mla_q8kv8_prefill_sm90.so",
        rows,
    )


def v32_layers(data: Data) -> Subject:
    measured = data("h200_v32_layers.json")
    rows = [["context", *(f"decode, B = {b}, us" for b in (1, 8, 32, 128)), "prefill 4096, ms", "prefill 8192, ms"]]
    for context in (8192, 131072):
        decode = [find(measured["decode"], context=context, batch=b) for b in (1, 8, 32, 128)]
        prefill = [find(measured["prefill"], context=context, tokens=t) for t in (4096, 8192)]
        cells = [f"{time(r['microseconds'])} ({r['over_floor']:.2f})" for r in decode if r]
        cells += [f"{r['microseconds'] / 1000:.1f} ({r['over_floor']:.2f})" for r in prefill if r]
        rows.append([size(context), *cells])
    return Subject(
        "DeepSeek-V3.2",
        "One attention layer of 128 heads on an H200 (x floor); decode as a CUDA graph.",
        ["h200_v32_layers.json"],
        measured["commands"]["decode"],
        rows,
    )


def v41_layers(data: Data) -> Subject:
    measured = data("h200_v41.json")
    points = [(b, c) for c in (8192, 65536) for b in (1, 8, 32)]
    rows = [["layer", *(f"H200, B = {b}, {size(c)}" for b, c in points)]]
    for layer, kind in dict.fromkeys((r["layer"], r["kind"]) for r in measured["serving"]):
        found = [find(measured["serving"], layer=layer, kind=kind, batch=b, context=c) for b, c in points]
        cells = [f"{time(r['microseconds'])} ({r['microseconds'] / r['floor_us']:.1f})" if r else "" for r in found]
        rows.append([f"{kind} (`{layer}`)", *cells])
    return Subject(
        "DeepSeek-V4.1",
        "One attention layer of V4.1-Flash, decode, microseconds (x floor).",
        ["h200_v41.json"],
        measured["commands"]["serving"],
        rows,
    )


def ops(data: Data) -> Subject:
    measured = [row for part in data("h200_ops.json") for row in part["rows"] if row["implementation"] == "triton"]
    rows = [["op", "size", "H200, us", "share of the copy"]]
    names = (
        "hc_post",
        "hc_pre",
        "query_norm_rope",
        "gather",
        "index_query",
        "norm_rope_insert",
        "compress",
    )
    for name in names:
        rows_of = [row for row in measured if row["op"] == name]
        if rows_of:
            row = max(rows_of, key=lambda r: r["share"])
            rows.append([f"`{name}`", row["label"], time(row["microseconds"]), f"{100 * row['share']:.0f} %"])
    return Subject(
        "Ops that are bound by memory",
        "The size with the largest share of the rate of a copy (4.28 TB/s).",
        ["h200_ops.json"],
        "deepseek-attn bench op --repeats 6 --ops linear,index,topk,compress,norm_rope,insert,hc_,gather,quer",
        rows,
    )


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
    rows = [["drafts", *(f"{card}, B = {batch}" for card, batch in points)]]
    for count in range(4):
        found = [find(cards[card], batch=batch, drafts=count) for card, batch in points]
        cells = [f"{r['tokens_per_second']:,.0f} ({r['speedup']:.2f}; {r['tokens_per_step']:.2f})" for r in found if r]
        rows.append([str(count), *cells])
    return Subject(
        "Drafts of the MTP layer",
        "The package's checkpoint, greedy: tokens/s (ratio to no drafts; tokens per step); H200 in bfloat16, CPU in "
        "float32 on one thread.",
        ["h200_drafts.json", "cpu_drafts.json"],
        "deepseek-attn bench engine --batch 1,8,32 --drafts 1,2,3 --prompt 64 --tokens 192 --repeats 3",
        rows,
    )


def ranks(data: Data) -> Subject:
    measured = data("h200_ranks.json")["runs"][0]["rows"]
    rows = [["step", "2 x H200, ms", "tokens/s"]]
    for row in measured:
        if row["step"] == "prefill" or (row["step"] == "decode" and row["sums"] == "as it is"):
            layout = {"tp": "tensor parallel", "dp": "data-parallel attention"}[row["layout"]]
            name = f"prefill {row['tokens']}" if row["step"] == "prefill" else f"decode, {row['batch']} requests"
            rows.append([f"{name}, {layout}", f"{row['ms']:.2f}", f"{row['tokens_per_second']:,.0f}"])
    return Subject(
        "Two GPUs",
        "All 43 layers of V4-Flash, random FP4 experts, contexts of 8192 tokens; decode as CUDA graphs.",
        ["h200_ranks.json"],
        "torchrun --nproc-per-node 2 scripts/bench_parallel.py --model v4_flash --steps prefill,decode "
        "--batch 1,8,32,128,256 --context 8192 --prefill 8192 --out FILE",
        rows,
    )


def memory(data: Data) -> Subject:
    measured = data("h200_memory.json")
    parts = ("weights", "caches", "buffers", "graphs", "step", "allocator", "context")
    rows = [["limits", *parts, "driver, H200", "off"]]
    for row in measured["rows"]:
        limits = f"{row['max_model_len']}:{row['max_num_seqs']}:{row['max_num_batched_tokens']}"
        cells = [f"{row['predicted'][p] / 1e6:.0f} / {row['measured'][p] / 1e6:.0f}" for p in parts]
        a, b = row["predicted_driver"], row["driver"]
        rows.append([limits, *cells, f"{a / 1e6:.0f} / {b / 1e6:.0f}", f"{100 * (a / b - 1):+.1f} %"])
    return Subject(
        "Memory that `plan` counts",
        "MB, counted / measured; limits are `max_model_len:max_num_seqs:max_num_batched_tokens`.",
        ["h200_memory.json"],
        "deepseek-attn bench memory --model v4_flash --layers 6 --experts 64",
        rows,
    )


def cold_start(data: Data) -> Subject:
    h100 = data("h100_cold_start.json")
    cards = {
        "H200": [row for row in data("h200_cold_start.json")["asked_first"]["rows"] if row["code"] == "after"],
        "H100": h100["rows"],
        "H100, another": h100["another_machine"],
    }
    stages = ("model", "first token", "second token", "all kernels compiled")
    rows = [["GPU", "model", "kernel cache", *stages]]
    for card, measured in cards.items():
        for model, cache in dict.fromkeys((row["model"], row["cache"]) for row in measured):
            runs = [row["stages"] for row in measured if (row["model"], row["cache"]) == (model, cache)]
            cells = [", ".join(f"{run[stage]:.1f}" for run in runs) for stage in stages]
            rows.append([card, MODELS.get(model, str(model)), "empty" if cache == "ahead" else str(cache), *cells])
    return Subject(
        "Cold start",
        "Seconds from the start of the process, all runs; V4-Flash's shapes with 6 layers and 32 experts, and the "
        "small model.",
        ["h200_cold_start.json", "h100_cold_start.json"],
        "python scripts/bench_cold_start.py --out FILE",
        rows,
    )


def other_programs(data: Data) -> Subject:
    """On a CPU, beside transformers and fastllm."""
    rows = [["beside", "threads", "prefill 1024, ms", "decode 64, ms"]]
    for run in data("cpu_transformers.json"):
        ours, theirs = run["seconds"]["deepseek-attn"], run["seconds"]["transformers"]
        both = {p: {"a": ours[p], "b": theirs[p]} for p in ("prefill", "decode")}
        rows.append(["transformers", str(run["threads"]), *(beside(both[p], "a", "b", 0.001, 0) for p in both)])
    run = data("cpu_fastllm.json")
    for one in (run, *run["pinned"]):
        steps = {"prefill": 1, "decode": run["decode"] - 1}  # decode: seconds a token
        both = {p: {"a": n * one["seconds"]["deepseek-attn"][p], "b": n * one["seconds"]["fastllm"][p]}
                for p, n in steps.items()}  # fmt: skip
        name = f"fastllm {run['versions']['fastllm']}{'' if one is run else ', pinned'}"
        rows.append([name, str(one["threads"]), *(beside(both[p], "a", "b", 0.001, 0) for p in both)])
    logits = run["logits"]["rows"]
    far = {name: statistics.median(row[name] for row in logits) for name in ("fastllm", "official")}
    same = sum(row["same_first"][0] for row in logits)
    return Subject(
        "CPU beside transformers and fastllm",
        "Ours / theirs (ratio). transformers: the tiny preset in float32 with `exact` numerics, two cores. fastllm "
        "(`python scripts/bench_fastllm.py`; its weights float16, ours float32): the package's checkpoint on other "
        "machines; pinned: to as many busy cores. Both compute the same: "
        f"after {len(logits)} prompts fastllm's logits are {far['fastllm']:.1%} of the norm from ours (median), those "
        f"of `official` numerics {far['official']:.1%}; {same} have the same argmax.",
        ["cpu_transformers.json", "cpu_fastllm.json"],
        "python scripts/bench_transformers.py",
        rows,
    )


def features(data: Data) -> Subject:
    measured = data("h200_engine_features.json")["rows"]
    cards = {"H200": data("h200_structured.json")["rows"], "CPU": data("cpu_structured.json")["rows"]}
    rows = [["", "H200: tokens/s (ratio)", *(f"{card}: {what}, us" for card in cards for what in ("mask", "applying"))]]
    for row in measured:
        name = f"{row['logprobs']} log-probabilities" if row["logprobs"] else "JSON schema" if row["structured"] else ""
        rows.append([name or "neither", f"{row['tokens_per_second']:.1f} ({row['speedup']:.2f})", *[""] * 4])
    for structure in (row["structure"] for row in cards["H200"]):
        cells = []
        for card in cards.values():
            row = find(card, structure=structure)
            spread = f"{time(row['microseconds'])} ({row['low']:.0f} to {row['high']:.0f})" if row else ""
            cells += [spread, time(row["apply_us"]) if row else ""]
        rows.append([f"mask: {structure}", "", *cells])
    return Subject(
        "Log-probabilities and structured output",
        "One request of V4-Flash's 43 layers with 16 random experts each, as CUDA graphs. Masks are made on the host "
        "(median, 10 to 90 %; the CPU: another machine and tokenizer), over 129,280 tokens, while the device computes.",
        ["h200_engine_features.json", "h200_structured.json", "cpu_structured.json"],
        data("h200_engine_features.json")["command"],
        rows,
    )


def host_experts(data: Data) -> Subject:
    small, large = data("h200_host_80gb.json"), data("h200_host_model.json")
    parts = [("experts", data("h200_host_experts.json")), ("model", small), ("model", large)]
    columns = ("ms (x bus)", "tokens/s", "hit rate", "all there, ms")
    names = [f"{part}, {found[part]['cached']} of 256" for part, found in parts]
    rows = [["routing", *(f"{name}: {column}" for name in names for column in columns)]]
    for point in (key for key, value in large["model"].items() if isinstance(value, dict) and "over_bus" in value):
        cells = []
        for part, found in parts:
            row, tokens = found[part][point], int(point.split()[-1])
            cells += [f"{row['seconds'] * 1000:.1f} ({row['over_bus']:.2f})", f"{tokens / row['seconds']:,.0f}"]
            cells += [f"{row['hit_rate']:.3f}" if "hit_rate" in row else ""]
            cells += [f"{row['seconds_all_there'] * 1000:.1f}" if "seconds_all_there" in row else ""]
        rows.append([point, *cells])
    steps = [(found[part]["uniform, batch 1"], found[part]["expert_bytes"]) for part, found in parts]
    rates = [row["copied"] * nbytes / row["bus_seconds"] / 1e9 for row, nbytes in steps]
    return Subject(
        "Experts in host memory",
        "V4-Flash on one H200: experts of three layers in pinned host memory stand for those of all 43, of which the "
        "GPU holds as many as fit, or as fit on a card of 80 GB; experts alone, and a whole model. The bus: copied "
        f'experts at cudaMemcpy\'s rate ({min(rates):.1f} to {max(rates):.1f} GB/s). "All there": the same step again. '
        "Residents followed Zipf's law for 400 steps before the steps at 118, for at most 150 before the others. At "
        "118 32 programs copy, in the others 8.",
        ["h200_host_experts.json", "h200_host_80gb.json", "h200_host_model.json"],
        "python scripts/bench_host_experts.py --parts copies,experts,model --cache-bytes BYTES --out FILE",
        rows,
    )


def prompts(data: Data) -> Subject:
    measured = data("h200_prompts.json")
    rows = [["rows of upper layers", "tokens", "s (of all rows)", "error", "equal tokens"]]
    for row in measured["results"]:
        rounding = f"; other chunks {row['rounding']:.1e}" if row["rounding"] else ""
        cells = [f"{row['seconds']:.3f} ({row['of_full']:.3f})", f"{row['error']:.1e}{rounding}"]
        rows.append([row["mode"], str(row["length"]), *cells, f"{row['equal_tokens']} of {measured['tokens']}"])
    return Subject(
        "Prompts of DeepSeek-V4.1",
        "V4.1-Flash's 40 layers on an H200, which share one layer's random experts; error: of the last token's logits, "
        "relative. [Modes](v41.md#measure-it).",
        ["h200_prompts.json"],
        "python scripts/bench_prompts.py --lengths 8192 32768 131072",
        rows,
    )


SUBJECTS: list[Callable[[Data], Subject]] = [
    attention_decode, attention_prefill, whole_step, experts, between_sublayers, topk, index_scores,
    flash_mla, prefill_fp8, v32_layers, v41_layers, prompts, ops, engine, drafts, features, ranks, memory, host_experts,
    cold_start, other_programs,
]  # fmt: skip


def page(folder: Path) -> str:
    """The text of results.md; ``folder``: docs/data."""
    data = Data(folder)
    return "\n".join([HEAD, *(make(data).page() for make in SUBJECTS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("docs", type=Path, help="the folder docs: reads its data, writes results.md")
    docs = parser.parse_args().docs
    write_text(docs / "results.md", page(docs / "data"))


if __name__ == "__main__":
    main()
