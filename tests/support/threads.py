"""Calls in several threads at once, which change places as often as they can."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

PATIENCE = 60  # seconds until a thread that does not end fails its test


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Runs each call in a thread of its own, all from the same moment on; what they return or raise, in their order."""
    results: list[Any] = [TimeoutError("the thread has not ended")] * len(calls)
    start, interval = threading.Barrier(len(calls)), sys.getswitchinterval()

    def run(place: int) -> None:
        start.wait(PATIENCE)
        try:
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    finally:
        sys.setswitchinterval(interval)
    return results
