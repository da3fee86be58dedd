"""Reads JSON from outside the library: every problem is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepseek_attn.utils.other_formats import LFS_POINTER

MAX_BYTES = 4 * 2**20  # of a config and the like: decoded, JSON takes up to 25 times its bytes
MAX_DEPTH = 64  # far below the recursion limit, since decoded values are copied and printed recursively


def read_json(path: Path, origin: str, max_bytes: int | None = MAX_BYTES) -> Any:
    """Decodes a file; see `parse_json`.

    Args:
        max_bytes: size of the largest file that is read; None: any.

    Raises:
        ValueError: the file is larger or is not valid JSON; OSError: it cannot be read.
    """
    size = path.stat().st_size
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"{origin}: {size} bytes, at most {max_bytes} are read; is it the right file?")
    content = path.read_bytes()
    if content.startswith(LFS_POINTER):
        raise ValueError(f"{origin}: a Git LFS pointer, not the file itself: fetch it with `git lfs pull`")
    return parse_json(content, origin)


def parse_json(text: str | bytes, origin: str) -> Any:
    """Decodes JSON; ``origin`` begins the message of each error.

    Raises:
        JSONSyntaxError: broken JSON, with its place.
        ValueError: not UTF-8 text, a repeated key in an object, an integer of
            thousands of digits, or more than `MAX_DEPTH` objects and lists inside one another.
    """
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, object_pairs_hook=_unique)
        too_deep = _deeper_than(value, MAX_DEPTH)
    except RecursionError:
        too_deep = True
    except UnicodeDecodeError as error:
        raise ValueError(f"{origin}: not UTF-8 text at byte {error.start}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise JSONSyntaxError(f"{origin}: not valid JSON at {place}: {error.msg}") from None
    except _RepeatedKeyError as error:
        raise ValueError(f"{origin}: {error.args[0][:200]!r} is repeated in one object") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise ValueError(f"{origin}: an integer of thousands of digits") from None
    if too_deep:
        raise ValueError(f"{origin}: more than {MAX_DEPTH} objects or lists inside one another; is it the right file?")
    return value


class JSONSyntaxError(ValueError):
    """The text is not JSON."""


class _RepeatedKeyError(ValueError):
    """An object repeats a key, which is the only argument."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKeyError(key)
            seen.add(key)
    return found


def _deeper_than(value: Any, depth: int) -> bool:
    level: list[Any] = [[value]]
    for _ in range(depth + 1):
        inside = (item for parent in level for item in (parent.values() if isinstance(parent, dict) else parent))
        level = [item for item in inside if isinstance(item, (dict, list))]
        if not level:
            return False
    return True
