"""Hooks of mkdocs.yml: pages of the site that are not Markdown files of docs/.

The start page is README.md; CHANGELOG.md and CONTRIBUTING.md follow. The page of the notebook shows its code and the
text that the code printed. The API reference has the names that `deepseek_attn` exports and the contracts of the
kernels. It is read from the source, so that torch is not needed.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "docs_source"  # the packages in one tree: `kernels` and `models` are folders of their own
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
OTHERS = [
    "deepseek_attn.flash_mla_api.decode.flash_mla_with_kvcache",
    "deepseek_attn.flash_mla_api.prefill.flash_mla_sparse_fwd",
    "deepseek_attn.attention.layer.DeepseekV4MLAAttention",
    "deepseek_attn.impls.register_impl",
    "deepseek_attn.impls.base.SparseMLAAttentionImpl",
    "deepseek_attn.cache.record.Record",
    "deepseek_attn.cache.record.register_record",
    "deepseek_attn.models.families.register_family",
]


def link_packages() -> None:
    """Makes `SOURCE`/deepseek_attn of links to the rooms, as pyproject.toml maps them."""
    package = SOURCE / "deepseek_attn"
    package.mkdir(parents=True, exist_ok=True)
    for old in package.iterdir():
        old.unlink()
    rooms = [path for path in (ROOT / "deepseek_attn").iterdir() if path.name != "__pycache__"]
    for path in [*rooms, *(ROOT / name for name in ("kernels", "models", "configs"))]:
        (package / path.name).symlink_to(os.path.relpath(path, package))


def exported() -> list[str]:
    """Full names of the exports of `deepseek_attn`."""
    for node in ast.parse((ROOT / "deepseek_attn" / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            return [f"{home}.{name}" for name, home in ast.literal_eval(node.value).items()]
    raise ValueError("deepseek_attn/__init__.py has no _HOMES")


def families() -> list[str]:
    """Folders of kernels with contracts."""
    return sorted(file.parent.name for file in (ROOT / "kernels").glob("*/__init__.py") if file.parent.name != "common")


def library_page() -> str:
    names = "\n".join(f"::: {name}\n" for name in [*exported(), *OTHERS])
    head = "What `deepseek_attn` exports, and what packages of impls and records start from."
    return f"# Library\n\n{head}\n\n{names}"


def kernels_page() -> str:
    options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
    parts = "\n".join(f"## {name}\n\n::: deepseek_attn.kernels.{name}\n{options}" for name in families())
    head = "Each op by its contract, family by family. [The structure](../structure.md) names the kernels behind them."
    return f"# Kernels\n\n{head}\n\n{parts}"


def tour_page() -> str:
    """docs/tour.ipynb: its texts, its code and the text that the code printed."""
    parts = []
    for cell in json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        printed = ["".join(output["text"]) for output in cell.get("outputs", ())]
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [f"```text\n{text.rstrip()}\n```" for text in printed]
    return "\n\n".join([*parts, "This page is a [notebook](tour.ipynb) of the repository."])


def moved(text: str) -> str:
    """A page of the repository's root, with links as a page of docs/ has them; the notebook by its page."""
    text = re.sub(r"\]\(docs/", "](", text).replace("](tour.ipynb", "](tour.md")
    return re.sub(r"\]\(README\.md", "](index.md", text)


def on_startup(command: str, dirty: bool) -> None:
    link_packages()  # before mkdocstrings reads its configuration, which leaves out folders that do not exist


def on_files(files, config):
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  # the extra docs

    pages = {page: moved((ROOT / source).read_text(encoding="utf-8")) for source, page in FROM_ROOT.items()}
    pages |= {"api/library.md": library_page(), "api/kernels.md": kernels_page(), "tour.md": tour_page()}
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    for config_file in (ROOT / "configs" / "experiments").glob("*.json"):
        uri = f"configs/experiments/{config_file.name}"
        files.append(File.generated(config, uri, abs_src_path=str(config_file)))
    return files


def on_page_markdown(markdown, page, **_):
    """Links of docs/ that leave the folder."""
    return markdown.replace("](../README.md", "](index.md").replace("](../configs/", "](configs/")
