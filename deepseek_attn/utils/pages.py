"""HTML pages of one file, with the style that they share."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup


def page_templates(package: str) -> Environment:
    """Templates and styles in the folder of ``package``, and ``style.css`` of all pages. Values are escaped."""
    places = [PackageLoader(name, "") for name in (package, "deepseek_attn.utils")]
    return Environment(
        loader=ChoiceLoader(places), autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )


def script_data(value: Any) -> Markup:
    """``value`` as JSON for a ``<script type="application/json">``, which no text in it can end.

    Raises:
        ValueError: a number that is not finite, which JSON does not have.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: lone surrogates are escapes
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
