"""Signatures read from source text, without importing it, and the recorded one of FlashInfer's function."""

import ast
import importlib.util
import inspect
import json
from pathlib import Path

RECORD = Path(__file__).with_name("flashinfer_signature.json")


def parameters_of(source: str, function: str) -> list | None:
    """``[[name, default as source text or None], ...]`` of a top-level function; None if it is not there."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            names = [a.arg for a in node.args.posonlyargs + node.args.args]
            defaults = [None] * (len(names) - len(node.args.defaults)) + [ast.unparse(d) for d in node.args.defaults]
            keywords = [
                (a.arg, d and ast.unparse(d)) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            ]
            return [list(pair) for pair in [*zip(names, defaults, strict=True), *keywords]]
    return None


def signature_from(parameters: list) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is None else default)
            for name, default in parameters
        ]
    )


def recorded() -> dict:
    return json.loads(RECORD.read_text())


def installed(function: str) -> list | None:
    """The parameters in the installed package, wherever it defines the function; None if it is not installed."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        return None
    for root in spec.submodule_search_locations:
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if f"def {function}(" in text and (found := parameters_of(text, function)):
                return found
    return None
