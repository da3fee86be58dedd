"""The page: text is data whatever it is, numbers are those of the records, and nothing is loaded from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepseek_attn import inspect_attention
from deepseek_attn.cli.generate import default_checkpoint
from deepseek_attn.config.defaults import DEFAULT_TOP_READS
from deepseek_attn.lab.inspect import Inspection, page, token_texts, write_page
from deepseek_attn.text.tokenizer import Tokenizer
from deepseek_attn.utils.pages import script_data
from tests.support.small_models import prompt, small_config, small_runner
from tests.support.typed import required

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "]]>",
    "\"'&amp;&",
    "\ud800",
    "\u2028\u2029\0\x7f",
    "{{ 7 * 7 }}{% raw %}",
    "\\u003c/script\\",
]


class Parsed(HTMLParser):
    """Tags, attributes, and the text of each element."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append((self.tags[-1] if self.tags else "", data))

    @property
    def data(self):
        return next(data for tag, data in self.texts if tag == "script")


@pytest.fixture(scope="module")
def runner():
    return small_runner(small_config([0, 4, 16]), max_model_len=64, max_num_seqs=1)


@pytest.fixture(scope="module")
def inspection(runner):
    return inspect_attention(runner, prompt(runner.config, len(HOSTILE) * 5))


def test_text_of_tokens_is_data(inspection, tmp_path):
    text = HOSTILE * 5
    title = "</title><script>alert(1)</script>" + HOSTILE[3]
    write_page(inspection, tmp_path / "page.html", tmp_path / "page.json", text, title)
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    parsed = Parsed(written)
    assert parsed.tags.count("script") == 2
    assert ("title", title) in [(tag, data) for tag, data in parsed.texts]
    assert json.loads(parsed.data) == json.loads((tmp_path / "page.json").read_text()) == inspection.to_json(text)
    assert json.loads(parsed.data)["text"] == text
    assert not re.search(r"<[!/]|[^\x00-\x7f]", parsed.data)


def test_the_page_stands_alone(inspection):
    written = page.make_page(inspection, None, "title")
    parsed = Parsed(written)
    assert not {"link", "img", "iframe", "object"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:|fetch\(|innerHTML|eval\(", written)
    assert "default-src 'none'" in written
    assert "prefers-color-scheme: dark" in written
    assert ("name", "viewport") in parsed.attributes
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    named = re.findall(r'get\("([\w-]+)"\)|getElementById\("([\w-]+)"\)', written)
    assert {a or b for a, b in named} <= set(ids)


def opened(inspection: Inspection) -> tuple[int, int]:
    """Query and layer that the written page is told to show first."""
    attributes = dict(Parsed(page.make_page(inspection, None, "title")).attributes)
    return int(required(attributes["data-query"])), int(required(attributes["data-layer"]))


@pytest.mark.parametrize(("tokens", "layer"), [(40, 1), (9, 1), (3, 0)])
def test_the_page_opens_where_there_is_something_to_see(runner, tokens, layer):
    """On a selection, on entries without one, and on the window where there are no entries; the last such token."""
    found = inspect_attention(runner, prompt(runner.config, tokens))
    query, opened_layer = opened(found)
    read = found.queries[query].layers[opened_layer]
    assert (query, opened_layer) == (tokens - 1, layer)
    assert (read.index is not None) == (tokens == 40)
    assert (len(read.mean.entries) > 0) == (tokens > 3)
    if tokens == 40:
        before = dataclasses.replace(found, queries=found.queries[:-20])
        last = before.queries[opened(before)[0]]
        assert last is before.queries[-1]


def test_columns_stay_in_sight_and_maps_have_a_scale(inspection):
    """The text gives way, and two columns need room for the widest table, so that no other column is cut off."""
    written = page.make_page(inspection, None, "title")
    assert re.findall(r"\.split \{[^}]*grid-template-columns: ([^;]*);", written) == [
        "repeat(auto-fit, minmax(min(100%, 500px), 1fr))"
    ]
    assert re.search(r"max-width: 760px\) \{.*td\.name:first-child \{ white-space: normal", written, re.DOTALL)
    assert re.search(r"td\.text-of \{[^}]*max-width: 0;[^}]*text-overflow: ellipsis", written)
    headers = re.findall(r"<th[^>]*>([^<]+)</th>", written)
    assert headers[headers.index("score") :][:3] == ["score", "dense weight", "selected"]
    assert '"100 % of the attention"' in written


def test_json_has_the_records(inspection):
    found = inspection.to_json(None)
    assert found["text"] is None
    assert found["token_ids"] == inspection.token_ids
    read, record = found["queries"][-1]["layers"][1], inspection.queries[-1].layers[1]
    assert read["heads"][1]["entries"] == record.heads[1].entries
    assert read["heads"][1]["entry_weights"] == pytest.approx(record.heads[1].entry_weights, rel=1e-5)
    assert set(read["index"]) == set(vars(record.index))
    assert read["index"]["selected"] == record.index.selected
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_data(float("nan"))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_is_one(tmp_path):
    script = tmp_path / "page.js"
    script.write_bytes((Path(page.__file__).parent / "page.js").read_bytes())
    assert subprocess.run(["node", "--check", script]).returncode == 0


def test_texts_of_tokens_join_to_the_text():
    tokenizer = Tokenizer(default_checkpoint())
    ids = tokenizer.encode("naïve 你好 🎉\n end") + [len(tokenizer) + 5]  # an id that only the model knows
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == "naïve 你好 🎉\n end"
    partial = tokenizer.encode("🎉")[:1]
    assert token_texts(tokenizer, partial) == [tokenizer.decode(partial)]
    assert token_texts(tokenizer, []) == []


@pytest.mark.parametrize("length", [40, 60])
def test_a_page_is_bounded(runner, monkeypatch, length):
    """By the weights that are kept, and what each token's text takes."""
    monkeypatch.setattr("deepseek_attn.lab.inspect.inspection.MAX_WEIGHTS", 3000)
    found = inspect_attention(runner, prompt(runner.config, length))
    reads = [
        read for query in found.queries for layer in query.layers for read in [*layer.heads, layer.mean, layer.index]
    ]
    lists = [values for read in reads if read for values in vars(read).values() if isinstance(values, list)]
    assert 500 < sum(map(len, lists)) / 2 <= 3000
    assert max(map(len, lists)) <= 2 * DEFAULT_TOP_READS
    assert len(page.make_page(found, None, "t")) - len(page.make_page(EMPTY, None, "t")) < 30 * 3000 + 20 * length


EMPTY = Inspection("", 1, "", "", 1, [], [], [])


def test_nothing_is_left_where_one_file_cannot_be_written(inspection, tmp_path):
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(ValueError, match=r"'no/page\.json' cannot be written"):
        write_page(inspection, tmp_path / "page.html", Path("no/page.json"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page.html", "old")]
