"""Turns: a fair lock with which several threads use one model, one at a time, in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from threading import RLock, get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch


class Turns:
    """Whose turn it is to use a model, its caches and its scratch memory.

    Args:
        device: of the model. On a GPU, the work of a turn is ordered after the previous turn's work even if the two
            threads launch on different streams, and the model's GPU is the current device.

    Attributes:
        thread: the thread whose turn it is; None between turns. number: of turns so far, this one included.
        lock: held during a turn, by its thread only.
        last: lock of the thread that arrived last; the next thread waits for it.
        later: calls that wait for the end of the turn (`after_this_turn`).
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.thread: int | None = None
        self.number = 0
        self.lock, self.last = RLock(), RLock()
        self.later: deque[Callable[[], object]] = deque()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def after_this_turn(self, call: Callable[[], object]) -> None:
        """Runs ``call`` at once between turns; during a turn, its thread runs ``call`` when the turn ends.

        Never waits for another thread, so that finalizers may use it: the garbage collector may run while its thread
        holds a lock that another thread needs to end its turn.
        """
        self.later.append(call)
        if self.thread is None:
            self.run_later()

    def run_later(self) -> None:
        """Runs the calls that waited for the end of a turn."""
        while self.later:
            try:
                call = self.later.popleft()
            except IndexError:  # another thread has just taken it
                return
            call()

    def order_streams(self) -> None:
        """Makes the current stream wait for the stream of the previous turn."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream = stream


class TakesTurns(Protocol):
    """An object whose methods run `in_turn`; all that share a model share its turns."""

    @property
    def turns(self) -> Turns: ...


Self = TypeVar("Self", bound=TakesTurns)
P = ParamSpec("P")
T = TypeVar("T")


def in_turn(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """Runs a method while no other thread runs a method of an object with the same turns. Such methods may nest.

    A plain lock starves the waiting threads: a thread that makes one step after another takes the lock again before
    they wake up. Here each thread waits until its predecessor holds ``turns.lock`` or has given up.

    Locks are held by ``with`` alone: Python takes and releases them between two points at which a signal handler may
    raise, so that a `KeyboardInterrupt` leaves none behind. A waiting thread can be interrupted, too.
    """

    @wraps(method)
    def call(self: Self, *args: P.args, **kwargs: P.kwargs) -> T:
        turns, me = self.turns, get_ident()
        if turns.thread == me:
            return method(self, *args, **kwargs)
        mine = RLock()
        try:
            with mine:
                before, turns.last = turns.last, mine
                with before:
                    pass
                with turns.lock:
                    turns.thread, turns.number = me, turns.number + 1
                    try:
                        if turns.device.type != "cuda":
                            return method(self, *args, **kwargs)
                        with torch.cuda.device(turns.device):
                            turns.order_streams()
                            return method(self, *args, **kwargs)
                    finally:
                        turns.thread = None
        finally:
            if turns.later:
                turns.run_later()

    return call
