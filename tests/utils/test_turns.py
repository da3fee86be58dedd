"""Turns of threads: one at a time, in order; what is interrupted holds nobody up."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from deepseek_attn.utils.turns import Turns, in_turn
from tests.support.threads import PATIENCE, together
from tests.support.typed import required


class Counter:
    """Counts in two steps, between which other threads may run."""

    def __init__(self, turns: Turns):
        self.turns, self.count, self.order = turns, 0, []

    @in_turn
    def add(self) -> None:
        before = self.count
        self.read()
        self.count = before + 1

    @in_turn
    def read(self) -> int:
        return self.count

    @in_turn
    def call(self, function) -> None:
        function()


@pytest.fixture
def counter():
    return Counter(Turns(torch.device("cpu")))


def test_one_at_a_time(counter):
    other = Counter(counter.turns)
    other.__dict__ = counter.__dict__

    def add() -> None:
        for _ in range(300):
            counter.add()
            other.add()

    assert together(*[add] * 4) == [None] * 4
    assert counter.count == counter.turns.number == 2400
    assert counter.turns.thread is None


def test_a_thread_that_goes_on_waits_for_those_that_came_before(counter):
    """The order in which they came, and not the first again, which has the interpreter when its turn ends."""
    order, arrived = [], [threading.Event() for _ in range(3)]

    def wait_for(number: int) -> None:
        """Until a thread has come, whose lock is then the last one."""
        last = counter.turns.last
        arrived[number].set()
        for _ in range(10**7):
            if counter.turns.last is not last:
                return
        raise TimeoutError

    def first() -> None:
        counter.call(lambda: [wait_for(0), wait_for(1), order.append("first")])
        for _ in range(3):
            counter.call(lambda: order.append("again"))
        arrived[2].set()

    def second(number: int) -> None:
        assert arrived[number].wait(PATIENCE)
        counter.call(lambda: order.append(number))

    assert together(first, lambda: second(0), lambda: second(1)) == [None] * 3
    assert order == ["first", 0, 1, "again", "again", "again"]


def test_what_does_not_wait_runs_after_the_turn(counter):
    """At once without a turn; else in the thread whose turn it is, also if that ends by an exception."""
    ran = []

    def note() -> None:
        assert counter.turns.thread is None
        ran.append(threading.get_ident())

    counter.turns.after_this_turn(note)
    assert ran == [threading.get_ident()]

    def hold() -> None:
        assert together(lambda: counter.turns.after_this_turn(note)) == [None]  # it returns in this turn
        counter.turns.after_this_turn(note)
        assert len(ran) == 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        counter.call(hold)
    assert ran == [threading.get_ident()] * 3


def test_an_exception_ends_a_turn(counter):
    def fail() -> None:
        counter.read()
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        counter.call(fail)
    assert together(counter.add) == [None]


def test_a_thread_that_waits_can_be_interrupted(counter):
    """The main thread waits, and a signal ends that; the turns before and after it go on."""
    inside, interrupted, over = threading.Event(), threading.Event(), threading.Event()

    def interrupt(*_) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def hold() -> None:
        last = counter.turns.last
        inside.set()
        while counter.turns.last is last:  # the main thread is on its way
            pass
        while not interrupted.wait(0.01):  # a signal just before it waits is not seen
            signal.pthread_kill(required(threading.main_thread().ident), signal.SIGINT)
        over.wait(PATIENCE)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        holding = threading.Thread(target=lambda: counter.call(hold), daemon=True)
        holding.start()
        assert inside.wait(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            counter.add()
        late = threading.Thread(target=counter.add, daemon=True)
        late.start()
        assert counter.count == 0
        over.set()
        holding.join(PATIENCE)
        late.join(PATIENCE)
    finally:
        signal.signal(signal.SIGINT, before)
    assert counter.count == 1
    assert together(counter.add, counter.add) == [None, None]
    assert counter.count == 3
