"""Items made early in a thread: order, errors, and every way to end."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.loading import Loader
from shardmill.threads import Prefetcher
from tests import helpers
from tests.loading.stores import open_stream

pytestmark = pytest.mark.slow  # all garbage is collected after each test
PAUSE = 0.005  # a consumer that leaves time: the thread works
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks")


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "shardmill-ahead"]


def wait_for(condition) -> bool:
    helpers.wait_for(condition)
    return True


@pytest.fixture(autouse=True, scope="module")
def _what_was_there_before_is_not_looked_at():
    """So that collecting takes a millisecond, not half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert wait_for(lambda: not threads()), "a thread is left"


class Recorder:
    """Makes number ** 2, and remembers who made what when."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.made: list[int] = []
        self.by_thread: set[int] = set()
        self.fail_at = fail_at
        self.at_once = 0
        self.most_at_once = 0

    def __call__(self, number: int) -> int:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if threading.current_thread().name == "shardmill-ahead":
            self.by_thread.add(number)
        time.sleep(0)
        self.at_once -= 1
        if number == self.fail_at:
            raise ValueError(f"no item {number}")
        self.made.append(number)
        return number**2


@given(
    depth=st.integers(0, 4),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 0.0003, 0.002]), max_size=30),
    num_items=st.none() | st.integers(30, 40),
)
@settings(max_examples=30, deadline=None)
def test_items_come_in_order_each_made_once_and_never_two_at_a_time(depth, pauses, num_items):
    make = Recorder()
    items = Prefetcher(make, num_items=num_items, depth=depth)
    for number, pause in enumerate(pauses):
        assert items.get(number) == number**2
        assert len(make.made) <= number + 1 + depth
        time.sleep(pause)
    items.close()
    assert make.made == list(range(len(make.made)))
    assert len(pauses) <= len(make.made) <= len(pauses) + depth
    assert make.most_at_once <= 1


def test_a_consumer_that_leaves_time_finds_items_ready():
    make = Recorder()
    items = Prefetcher(make, depth=2)
    assert items.get(0) == 0
    for number in range(1, 20):
        assert wait_for(lambda number=number: len(make.made) == number + 2)
        assert items.get(number) == number**2
    assert make.by_thread >= set(range(1, 20))
    items.close()


def test_a_consumer_that_only_reads_makes_nearly_every_item_itself():
    make = Recorder()
    items = Prefetcher(make, depth=2)
    for number in range(2000):
        items.get(number)
    assert len(make.by_thread) < 500
    items.close()


def test_the_thread_keeps_away_from_an_item_the_consumer_is_making():
    """An item that takes long, so that the thread naps, wakes and looks meanwhile."""

    class Slow(Recorder):
        def __call__(self, number: int) -> int:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            time.sleep(0.01)
            self.at_once -= 1
            self.made.append(number)
            return number

    items = Prefetcher(make := Slow(), depth=3)
    assert [items.get(number) for number in range(12)] == list(range(12))
    items.close()
    assert make.most_at_once == 1
    assert make.made == list(range(len(make.made)))


def test_bursts_between_long_pauses_find_the_thread_at_work():
    """Four batches at once and then a long step: gradients that are accumulated."""
    make = Recorder()
    items = Prefetcher(make, depth=4)
    for step in range(8):
        for number in range(4 * step, 4 * step + 4):
            items.get(number)
        assert wait_for(lambda step=step: len(make.made) == 4 * step + 8)
    assert len(make.by_thread) >= 28
    items.close()


def test_depth_zero_has_no_thread():
    items = Prefetcher(Recorder(), depth=0)
    for number in range(5):
        items.get(number)
        time.sleep(PAUSE)
    assert threads() == []


def test_nothing_is_made_after_the_last_item():
    make = Recorder()
    items = Prefetcher(make, num_items=3, depth=5)
    for number in range(3):
        items.get(number)
        time.sleep(PAUSE)
    assert make.made == [0, 1, 2]
    items.close()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("pause", [0.0, PAUSE])
def test_an_error_comes_where_it_would_have_and_asking_again_tries_again(depth, pause):
    make = Recorder(fail_at=4)
    items = Prefetcher(make, depth=depth)
    for number in range(4):
        assert items.get(number) == number**2
        time.sleep(pause)
    for _ in range(2):
        with pytest.raises(ValueError, match="no item 4"):
            items.get(4)
        time.sleep(pause)
    make.fail_at = None
    assert [items.get(number) for number in (4, 5)] == [16, 25]
    items.close()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_error_that_happens_once_is_raised_once(depth):
    """Also when the thread met it: an error is never dropped because it did not last."""

    class Once(Recorder):
        def __call__(self, number: int) -> int:
            if number == 4 and self.fail_at is None:
                self.fail_at = -1
                raise ValueError("this time")
            return super().__call__(number)

    items = Prefetcher(make := Once(), depth=depth)
    for number in range(4):
        assert items.get(number) == number**2
        time.sleep(PAUSE)
    assert depth == 0 or wait_for(lambda: make.fail_at == -1)  # the thread has met it
    with pytest.raises(ValueError, match="this time"):
        items.get(4)
    assert [items.get(4), items.get(5)] == [16, 25]
    items.close()


def test_an_item_lost_to_an_interrupt_is_made_again():
    make = Recorder()
    items = Prefetcher(make, depth=2)
    items.get(0)
    assert wait_for(lambda: len(make.made) == 3)
    assert items._work._ready.popleft() == (1, 1)  # taken, but the consumer never got it
    assert items.get(1) == 1
    assert items.get(2) == 4
    items.close()


def test_an_interrupted_consumer_asks_again_and_does_not_wait_for_itself():
    interrupts = [2]

    def make(number: int) -> int:
        if [number] == interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        return number

    items = Prefetcher(make, depth=1)
    assert [items.get(0), items.get(1)] == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        items.get(2)
    assert items.get(2) == 2
    items.close()


def test_dropping_a_prefetcher_ends_its_thread():
    items = Prefetcher(Recorder(), depth=2)
    items.get(0)
    assert wait_for(lambda: len(threads()) == 1)
    del items
    assert wait_for(lambda: not threads())


def test_closing_ends_the_thread_at_once_and_may_be_repeated():
    items = Prefetcher(Recorder(), depth=2)
    items.get(0)
    items.close()
    assert threads() == []
    items.close()


def test_closing_does_not_wait_forever(monkeypatch, caplog):
    monkeypatch.setattr(Prefetcher.close, "__defaults__", (0.05,))
    begun, held = threading.Event(), threading.Event()

    def make(number: int) -> int:
        if number == 1:
            begun.set()
            held.wait(600)
        return number

    items = Prefetcher(make, depth=1)
    items.get(0)
    assert begun.wait(600)
    with caplog.at_level(logging.WARNING):
        items.close()
    assert "still being made" in caplog.text
    held.set()


def test_an_abandoned_loop_over_a_loader_leaves_no_thread(stores):
    loader = Loader(open_stream(stores, ["wiki"], seq_len=8), batch_size=2)
    for _ in loader:
        time.sleep(PAUSE)
        if loader.samples == 6:
            break
    assert wait_for(lambda: not threads())
    assert loader.samples == 6


def test_a_loader_in_a_cycle_is_collected_with_its_thread(stores):
    loader = Loader(open_stream(stores, ["wiki"], seq_len=8), batch_size=2)
    batches = iter(loader)
    next(batches)
    loader.own = batches  # type: ignore[attr-defined]
    assert wait_for(lambda: len(threads()) == 1)
    del loader, batches
    gc.collect()
    assert wait_for(lambda: not threads())


SCRIPT = """
import sys, time
from shardmill.loading import Loader, SampleStream, TokenSource
stream = SampleStream([TokenSource(sys.argv[1], seq_len=8)])
batches = iter(Loader(stream, batch_size=2, ahead=3))
for _ in range(3):
    next(batches)
    time.sleep(0.01)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("sys.exit(3)", 3), ("raise RuntimeError('x')", 1), ("del stream", 0)],
)
def test_the_interpreter_ends_while_an_iterator_lives(stores, end, code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(end=end), stores["wiki"].folder],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr == "" or code == 1
    assert "Fatal" not in done.stderr


def send_next(batches, connection) -> None:
    connection.send([next(batches).samples for _ in range(3)])


@linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("depth", [0, 3])
def test_a_forked_child_continues_by_itself(stores, depth):
    """Forked often while the parent's thread is at work, perhaps while it holds a lock."""
    context = multiprocessing.get_context("fork")
    loader = Loader(open_stream(stores, ["wiki", "web"], seq_len=8), batch_size=2, ahead=depth)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
        time.sleep(0.0005)
        at = loader.samples
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=send_next, args=(batches, sender))
        child.start()
        answer = receiver.recv() if receiver.poll(600) else "the child hangs"
        child.kill()
        child.join()
        assert answer == [range(at + 2 * k, at + 2 * k + 2) for k in range(3)]
    assert next(batches).samples == range(loader.samples - 2, loader.samples)


@linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_an_item_does_not_wait_for_it():
    at_work, go = threading.Event(), threading.Event()
    parent = os.getpid()

    def make(number: int) -> int:
        if number == 1 and os.getpid() == parent:
            at_work.set()
            go.wait(600)
        return number

    items = Prefetcher(make, depth=1)
    items.get(0)
    assert at_work.wait(600)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send([items.get(1), items.get(2)]))
    child.start()
    answer = receiver.recv() if receiver.poll(600) else "the child hangs"
    child.kill()
    child.join()
    go.set()
    assert answer == [1, 2]
    assert items.get(1) == 1
    items.close()
