"""An iterator is for one thread: a second one gets an error, never a lost batch. What is made ahead
ends where it ends, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice

import pytest

from shardmill.errors import OptionError
from shardmill.loading import Loader
from shardmill.threads import OneThread, StoppedError, read_ahead
from tests.loading.stores import open_stream


def slow_loader(stores, *, ahead: int, entered: threading.Event, go: threading.Event) -> Loader:
    """A loader whose first batch waits, in the call of `next`, for `go`."""
    stream = open_stream(stores, ["wiki"], seq_len=8)
    source = stream.sources[0]
    real = source.fill_unchecked

    def fill(*given) -> None:
        entered.set()
        assert go.wait(600)
        real(*given)

    source.fill_unchecked = fill
    return Loader(stream, batch_size=2, ahead=ahead)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_second_thread_in_an_iterator_is_refused_and_no_batch_is_lost(stores, ahead):
    entered, go = threading.Event(), threading.Event()
    loader = slow_loader(stores, ahead=ahead, entered=entered, go=go)
    batches = iter(loader)
    given = []
    thread = threading.Thread(target=lambda: given.append(next(batches)))
    thread.start()
    try:
        assert entered.wait(600)
        with pytest.raises(OptionError, match=r"two threads.*one Loader for each"):
            next(batches)
    finally:
        go.set()
        thread.join()
    given += islice(batches, 3)
    assert [batch.samples.start for batch in given] == [0, 2, 4, 6]
    assert loader.samples == 8


def test_many_threads_in_one_iterator_get_every_batch_once_or_an_error(stores):
    loader = Loader(open_stream(stores, ["wiki"], seq_len=8), batch_size=2, num_samples=2 * 400)
    batches: Iterator = iter(loader)
    got, lock = [], threading.Lock()

    def work() -> None:
        while True:
            try:
                batch = next(batches)
            except OptionError:
                continue
            except StopIteration:
                return
            with lock:
                got.append(batch.samples.start)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(0, 800, 2))


def test_a_call_inside_a_call_of_the_same_thread_leaves_the_iterator_usable():
    one = OneThread("Loader")
    with one, one:
        pass
    with one:
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_a_thread_makes_a_batch_may_iterate(stores):
    entered, go = threading.Event(), threading.Event()
    loader = slow_loader(stores, ahead=0, entered=entered, go=go)
    batches = iter(loader)
    thread = threading.Thread(target=lambda: next(batches))
    thread.start()
    assert entered.wait(600)
    go.set()
    child = os.fork()
    if not child:
        try:
            os._exit(next(batches).samples.start)
        except BaseException:  # noqa: BLE001 - no test may run in the child
            os._exit(99)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 2)


def test_a_stop_is_not_taken_for_the_end_of_the_items():
    """What was made is given. Then comes an error, or a build would take a part for the whole."""
    stop, made = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield from range(3)
        made.set()
        stop.wait(600)
        yield 3
        pytest.fail("made after the stop")

    ahead = read_ahead(items(), depth=4, stop=stop)
    got = [next(ahead)]
    assert made.wait(600)
    stop.set()
    with pytest.raises(StoppedError):
        got.extend(ahead)
    assert got == [0, 1, 2, 3]


EXITING = """
import atexit, sys, threading

def consume():
    try:
        for item in read_ahead(items()):
            going.set()
    except StoppedError:
        print("stopped", flush=True)
    else:
        print("ended as if that were all", flush=True)

consumer, going = threading.Thread(target=consume, daemon=True), threading.Event()
atexit.register(consumer.join)  # after what was registered later
from shardmill.threads import StoppedError, read_ahead

def items():
    while True:
        yield 0

consumer.start()
going.wait()
sys.exit(3)
"""


def test_the_end_of_the_interpreter_is_not_taken_for_the_end_of_the_items():
    """Ray ends a worker so while a thread of it still works: on SIGTERM, or without its node."""
    done = subprocess.run(
        [sys.executable, "-c", EXITING], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "stopped\n", "")
