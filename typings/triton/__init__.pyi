"""Names of Triton for pyright, all of type Any: device code follows the rules of Triton's compiler, not Python's."""

from typing import Any

def __getattr__(name: str) -> Any: ...
