"""An inspection as one HTML file, without network, and as JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepseek_attn.lab.inspect.records import RECENT, Inspection
from deepseek_attn.text.tokenizer import IncrementalDecoder, Tokenizer
from deepseek_attn.utils.files import appearing
from deepseek_attn.utils.pages import page_templates, script_data


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; joined, they give the whole text. A character of several tokens belongs to the last."""
    decoder = IncrementalDecoder(tokenizer)
    texts = [decoder.push(token) for token in token_ids]
    if texts:
        texts[-1] += decoder.flush()
    return texts


class Opening(NamedTuple):
    """Indices of the query and the layer that the page shows first."""

    query: int
    layer: int


def opening_of(inspection: Inspection) -> Opening:
    """The last query of the first layer whose indexer had to select; else of the first layer that has entries to read.

    Where no query read an entry: the last query of the first layer.
    """
    for shows in (lambda read: read.index is not None, lambda read: len(read.mean.entries) > 0):
        for layer in range(len(inspection.layers)):
            for query in reversed(range(len(inspection.queries))):
                if shows(inspection.queries[query].layers[layer]):
                    return Opening(query, layer)
    return Opening(len(inspection.queries) - 1, 0)


def make_page(inspection: Inspection, text: list[str] | None, title: str) -> str:
    """The whole page, by ``page.html.jinja``.

    Args:
        text: of each token (`token_texts`), any strings; None shows token ids.
    """
    template = page_templates("deepseek_attn.lab.inspect").get_template("page.html.jinja")
    facts = {"recent": RECENT, "opening": opening_of(inspection), "data": script_data(inspection.to_json(text))}
    return template.render(title=title, found=inspection, **facts)


def write_page(
    inspection: Inspection, path: Path, json_path: Path, text: list[str] | None = None, title: str = "What tokens read"
) -> None:
    """Writes the page and its JSON. Each file appears complete; if either cannot be written, neither appears.

    Raises:
        ValueError: a file cannot be written; the message names it and the reason.
    """
    data = json.dumps(inspection.to_json(text), allow_nan=False, separators=(",", ":"))
    with appearing(path) as page_file:
        page_file.write_text(make_page(inspection, text, title), encoding="utf-8", errors="replace")
        with appearing(json_path) as json_file:
            json_file.write_text(data, encoding="utf-8")
