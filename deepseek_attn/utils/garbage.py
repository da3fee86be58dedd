"""Imports without Python's garbage collections."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """A context to import torch in, without garbage collections: they find nothing and take a tenth of the import.

    Does nothing once torch is imported.
    """
    if not gc.isenabled() or "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else there are objects that are meant to stay frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, as if all had been looked at twice
        gc.enable()
