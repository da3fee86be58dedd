#!/usr/bin/env python3
"""Timelines for the documents: the work of warps or processors over time, and the barriers between them.

    python scripts/timelines.py docs/pictures

writes one SVG file for each of `TIMELINES`. Times are in proportion, not to scale.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from deepseek_attn.utils.files import write_text

WIDTH, LEFT, LANE, BOX = 1040, 190, 76, 34  # pixels: of the picture, of lane names, of a lane, of a box
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.name { font-weight: 600 } .note { fill: #59636e } .label { fill: #59636e; font-size: 11px }
.lane { stroke: #d1d9e0 } .arrow { stroke: #59636e; fill: none; marker-end: url(#head) } .head { fill: #59636e }
rect { stroke: #59636e; stroke-width: .5 }
.c0 { fill: #b6d7ff } .c1 { fill: #ffd8a8 } .c2 { fill: #b7e4c7 } .c3 { fill: #e5dbff } .c4 { fill: #eceff2 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .note, .label { fill: #9198a1 } .lane { stroke: #3d444d }
  .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
  .c0 { fill: #1f4b7a } .c1 { fill: #7a4a12 } .c2 { fill: #1f5c38 } .c3 { fill: #4b3a7a } .c4 { fill: #2b3138 }
}
"""


@dataclass(frozen=True)
class Box:
    """Work of a lane from ``start`` to ``end``; ``colour``: 0 to 4."""

    lane: int
    start: float
    end: float
    text: str
    colour: int = 4


@dataclass(frozen=True)
class Arrow:
    """A lane at one time releases another lane that waits for ``barrier``."""

    source: int
    start: float
    target: int
    end: float
    barrier: str = ""


@dataclass
class Timeline:
    """Lanes by name, their work, their waits, and a line of text below."""

    title: str
    lanes: list[str]
    note: str
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)

    def svg(self) -> str:
        """The picture, for light and dark screens."""
        end = max(box.end for box in self.boxes)
        scale = (WIDTH - LEFT - 20) / end
        lines = [*self.note.split("\n")]
        height = 40 + LANE * len(self.lanes) + 18 * len(lines)

        def x(time: float) -> float:
            return round(LEFT + time * scale, 1)

        def middle(lane: int) -> float:
            return 40 + LANE * lane + LANE / 2 - 6

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(self.title)}"><style>{STYLE}</style>',
            '<defs><marker id="head" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="head" d="M0 0L6 3L0 6z"/></marker></defs>',
            f'<text class="name" x="10" y="20">{escape(self.title)}</text>',
        ]
        for lane, name in enumerate(self.lanes):
            y = middle(lane)
            parts.append(f'<line class="lane" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
            for row, text in enumerate(name.split("\n")):
                style = "name" if row == 0 else "note"
                parts.append(f'<text class="{style}" x="10" y="{y + 15 * row}">{escape(text)}</text>')
        for box in self.boxes:
            left, right, y = x(box.start), x(box.end), middle(box.lane)
            parts.append(
                f'<rect class="c{box.colour}" x="{left}" y="{y - BOX / 2}" width="{right - left:.1f}" height="{BOX}" '
                'rx="3"/>'
            )
            rows = box.text.split("\n")
            for row, text in enumerate(rows):
                at = y + 4 + 13 * (row - (len(rows) - 1) / 2)
                parts.append(f'<text text-anchor="middle" x="{(left + right) / 2:.1f}" y="{at}">{escape(text)}</text>')
        for arrow in self.arrows:
            down = 1 if arrow.target > arrow.source else -1
            y1, y2 = middle(arrow.source) + down * BOX / 2, middle(arrow.target) - down * BOX / 2
            parts.append(f'<path class="arrow" d="M{x(arrow.start)} {y1}L{x(arrow.end)} {y2}"/>')
            if arrow.barrier:
                part = 0.5 if abs(arrow.target - arrow.source) == 1 else 0.2  # not over the lane between
                at = x(arrow.start + part * (arrow.end - arrow.start)) + 5, y1 + part * (y2 - y1) + 4
                parts.append(f'<text class="label" x="{at[0]:.1f}" y="{at[1]}">{escape(arrow.barrier)}</text>')
        for row, text in enumerate(lines):
            y = 40 + LANE * len(self.lanes) + 18 * row + 4
            parts.append(f'<text class="note" x="10" y="{y}">{escape(text)}</text>')
        return "\n".join([*parts, "</svg>", ""])


def attend_hopper() -> Timeline:
    """The three roles of `attend_hopper_kernel` over the first tiles of a query."""
    picture = Timeline(
        "attend_hopper_kernel: one program, 64 heads of a query over tiles of 64 keys",
        ["accumulate\n8 warps, output in registers", "weigh\n4 warps, logits in registers", "decode\n4 warps, pages"],
        "Two stages: tile i uses stage i mod 2. full: keys are in shared memory. ready: weights are. empty: keys and "
        "weights of the stage were read.\nqueried: queries are in shared memory. final: normalisers are. The decoding "
        "warps set the pace: they wait for loads from pages.",
    )
    pace, boxes, arrows = 4.7, picture.boxes, picture.arrows
    boxes.append(Box(0, 0, 2.6, "queries: load,\nnorm, rotate", 3))
    arrows.append(Arrow(0, 2.6, 1, 4.6, "queried"))
    tiles = 4
    for i in range(tiles):
        start = 0.2 + pace * i
        boxes.append(Box(2, start, start + 4.4, f"keys {i}: load,\nFP8 to float16", i % 2))
        weigh = start + 4.7
        arrows.append(Arrow(2, start + 4.4, 1, weigh, f"full {i % 2}"))
        boxes.append(Box(1, weigh, weigh + 2.1, f"q k {i},\nsoftmax", i % 2))
        total = weigh + 2.4
        arrows.append(Arrow(1, weigh + 2.1, 0, total, f"ready {i % 2}"))
        boxes.append(Box(0, total, total + 1.7, f"rescale,\n+ w k {i}", i % 2))
        if i + 2 < tiles:
            arrows.append(Arrow(0, total + 1.7, 2, 0.2 + pace * (i + 2), f"empty {i % 2}"))
    last = 0.2 + pace * (tiles - 1) + 4.7
    boxes.append(Box(1, last + 2.4, last + 4.6, "sink,\nLSE", 3))
    arrows.append(Arrow(1, last + 4.6, 0, last + 5.0, "final"))
    boxes.append(Box(0, last + 5.0, last + 8.2, "normalise, rotate\nback, FP8, store", 3))
    return picture


def experts_hopper() -> Timeline:
    """The roles of `experts_hopper_kernel` over the blocks of channels of one job."""
    picture = Timeline(
        "experts_hopper_kernel: one job, 64 weight rows a warpgroup by a tile of routed rows",
        ["load weights\n1 warp, TMA", "multiply\n1 to 3 warpgroups", "load rows\n1 warp, TMA"],
        "A ring of stages (three drawn; as many as shared memory holds). full: both loads of a stage have arrived. "
        "empty: every warpgroup has used the stage.\nWeights do not depend on the kernel before this one and are "
        "loaded at once; rows wait for it. The loaders go on with the next job while a tile is stored.",
    )
    boxes, arrows, stages, blocks, step = picture.boxes, picture.arrows, 3, 5, 2.8
    for i in range(blocks + 2):
        freed = 3.4 + step * (i - stages + 1)  # when the stage's block before was used
        weights, rows = (0.2 + 1.6 * i, 1.5 + 1.5 * i) if i < stages else (freed + 0.7, freed + 0.7)
        name = str(i) if i < blocks else f"{i - blocks}, next job"
        boxes.append(Box(0, weights, weights + 1.4, f"w {name}".replace(", ", "\n"), i % stages))
        boxes.append(Box(2, rows, rows + 1.3, f"x {name}".replace(", ", "\n"), i % stages))
        if i >= stages:
            arrows += [Arrow(1, freed - 0.1, 0, weights, f"empty {i % stages}"), Arrow(1, freed - 0.1, 2, rows)]
        if i < blocks:
            start = 3.4 + step * i
            arrows += [Arrow(0, weights + 1.4, 1, start), Arrow(2, rows + 1.3, 1, start, f"full {i % stages}")]
            boxes.append(Box(1, start, start + 1.2, "FP4\nto FP8", i % stages))
            boxes.append(Box(1, start + 1.2, start + 2.6, f"w x {i},\n+ scaled", i % stages))
    boxes.append(Box(1, 17.5, 20.6, "SwiGLU or row\nexponents, store", 3))
    return picture


def prelaunched_step() -> Timeline:
    """The host and the GPU over three greedy decode steps."""
    picture = Timeline(
        "Greedy decoding: step n + 1 is launched before the tokens of step n have reached the host",
        ["GPU\none CUDA graph a step", "host\nEngine.step"],
        "The launched step takes its tokens from GPU memory. Its results are used if the scheduler plans the same "
        "requests or a part of them; otherwise they are dropped,\nwhich is safe: a step writes only behind the "
        "computed tokens of its sequences. With drafts, the step also counts the accepted ones on the GPU.",
    )
    boxes, arrows, length = picture.boxes, picture.arrows, 6.0
    for i in range(3):
        start, name = 0.6 + length * i, "n" if i == 0 else f"n + {i}"
        boxes.append(Box(0, start, start + length - 0.1, f"step {name}", i % 2))
        launch = start + 1.7 if i else start + 0.3
        boxes.append(Box(1, launch, launch + 1.3, f"launch\nn + {i + 1}", (i + 1) % 2))
        boxes.append(Box(1, launch + 1.4, start + length + 0.2, f"wait for {name}", 4))
        boxes.append(Box(1, start + length + 0.2, start + length + 1.6, f"accept\n{name}", 3))
        arrows.append(Arrow(0, start + length - 0.1, 1, start + length + 0.2, "tokens"))
        arrows.append(Arrow(1, launch + 1.3, 0, start + length, "queued"))
    boxes.append(Box(0, 18.6, 21.6, "step n + 3", 1))
    return picture


def cache_of_a_sequence() -> Timeline:
    """The pages, ring rows and snapshot of one sequence of 600 tokens; lanes run over token positions."""
    picture = Timeline(
        "Caches of one V4 sequence after 600 tokens, by token position",
        [
            "window\npages of 64 tokens",
            "ratio4\npages of 64 entries",
            "ratio128\npages of 32 entries",
            "state\none ring a sequence",
            "snapshot at 512\na kept prefix",
        ],
        "Grey: freed, or not yet written. The next token reads the last 128 tokens of the window, entries of "
        "ratio 4 that "
        "its indexer selects,\nand every entry of ratio 128. An entry exists from the last token of its window "
        "on. The ring "
        "holds raw projections of open windows,\nof the window before where windows overlap, and rows for truncate. A "
        "snapshot is taken where no window is open:\nit keeps two window pages, shares all entries by reference "
        "count, and "
        "copies the ring's rows of overlapping windows.",
    )
    boxes, arrows, page, length, edge = picture.boxes, picture.arrows, 64, 600, 512
    for number in range(10):
        start = number * page
        if start + page <= length - 2 * page:
            boxes.append(Box(0, start, start + page - 2, "freed", 4))
        else:
            boxes.append(Box(0, start, min(start + page - 2, length), str(number), 0))
    for number in range(3):
        start, end = 256 * number, min(256 * (number + 1), length)
        boxes.append(Box(1, start, end - 2, f"page {number}: {(end - start) // 4}", 1))
    for entry in range(4):
        boxes.append(Box(2, 128 * entry, 128 * (entry + 1) - 2, f"entry {entry}", 2))
    boxes.append(Box(2, edge, length, "not yet", 4))
    boxes.append(Box(3, edge, length, "88 rows of\nthe open window", 3))
    boxes.append(Box(4, edge - 2 * page, edge - 2, "window pages\n6 and 7", 0))
    boxes.append(Box(4, 0, edge - 2 * page - 2, "entries 0 to 127 of ratio 4, 0 to 3 of ratio 128: shared", 1))
    arrows.append(Arrow(3, edge + 8, 2, edge + 8, "entry 4 at 640"))
    return picture


def c4a_layer() -> Timeline:
    """The launches of a decode step in one C4A layer."""
    picture = Timeline(
        "A C4A attention layer in a decode step: each box is a launch, in order",
        [
            "project\nmulti_linear",
            "insert\ninsert_tokens",
            "select\nindexer",
            "attend\nattention",
            "output\ngrouped_linear",
        ],
        "The token's own key is in the window before any query reads it. A launch may start before the one "
        "ahead has ended "
        "(programmatic dependent launch);\nsmall linears read their first weights meanwhile. SWA layers have "
        "neither the "
        "selection nor index keys; C128A layers attend to every entry.",
    )
    launches = [
        Box(0, 0.0, 4.2, "x: latent, K = V,\ncompressors", 0),
        Box(1, 4.4, 9.2, "norm, RoPE, store;\nclose windows", 1),
        Box(0, 6.0, 9.4, "queries, index\nqueries", 0),
        Box(2, 9.6, 13.2, "norm, RoPE,\nHadamard, FP8", 2),
        Box(2, 13.4, 15.8, "index\nscores", 2),
        Box(2, 16.0, 18.0, "top-k", 2),
        Box(3, 18.2, 22.6, "window + selected,\none softmax", 3),
        Box(3, 22.8, 25.6, "add shares\nof keys", 3),
        Box(4, 25.8, 29.2, "inverse RoPE,\nwo_a", 1),
        Box(4, 29.4, 31.0, "wo_b", 1),
    ]
    picture.boxes.extend(launches)
    waits = [(0, 1, "kv"), (2, 3, "q, index q"), (1, 4, "index keys"), (5, 6, "indices"), (7, 8, "values")]
    for source, target, label in waits:
        first, second = launches[source], launches[target]
        if first.lane != second.lane:
            picture.arrows.append(Arrow(first.lane, first.end - 0.1, second.lane, second.start + 0.2, label))
    return picture


TIMELINES = {
    "attend_hopper": attend_hopper,
    "experts_hopper": experts_hopper,
    "prelaunched_step": prelaunched_step,
    "cache_of_a_sequence": cache_of_a_sequence,
    "c4a_layer": c4a_layer,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the SVG files are written")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder")
    for name, make in TIMELINES.items():
        write_text(folder / f"{name}.svg", make().svg())


if __name__ == "__main__":
    main()
