"""Read ahead: make items in a thread before they are needed.

An exception of the iterator is raised where it would have been raised without the thread. Closing
the generator stops the thread, which closes the iterator; waits in that thread through `pause` and
`wait_for` end with it. The interpreter does not exit while such a thread runs: foreign code that
returns into a dead interpreter would crash the process. Tokenizer engines release the GIL, so one
process uses the time.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar
from weakref import WeakSet

Item = TypeVar("Item")

_POLL = 0.1  # seconds between two looks at a stop
_LAST_WAIT = 15.0  # seconds for all threads together, at the end of the interpreter


class StoppedError(Exception):
    """Raised in a thread, or by `read_ahead`, when its stop was set."""


@dataclass(frozen=True, slots=True)
class _End:
    """The last entry of the queue."""

    error: BaseException | None


class _Local(threading.local):
    """State of a thread that reads ahead."""

    stop: threading.Event | None = None


_local = _Local()
_threads: WeakSet[threading.Thread] = WeakSet()


def read_ahead(
    items: Iterator[Item],
    *,
    depth: int = 2,
    stop: threading.Event | None = None,
    interrupt: threading.Event | None = None,
    patience: float | None = None,
) -> Generator[Item, None, None]:
    """The items in order, up to `depth` of them made early.

    `stop` is set on closing, and ends the thread after the item it is making. Iterators that wait
    for one another share one, and may check it themselves. `interrupt`, set from any thread, ends
    this generator with a StoppedError, also while it waits. Closing waits for the thread, at most
    `patience` seconds (None: as long as it takes); after that the thread ends with its item.
    """
    stop = stop or threading.Event()
    made: SimpleQueue[Item | _End] = SimpleQueue()
    slots = threading.Semaphore(depth)
    thread = threading.Thread(target=_fill, args=(items, made, slots, stop), daemon=True)
    thread.start()
    _threads.add(thread)
    try:
        while not isinstance(item := _next(made, interrupt), _End):
            slots.release()
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        slots.release()  # the thread may be waiting for one
        if thread is not threading.current_thread():  # the collector may close us in any thread
            thread.join(patience)


def current_stop() -> threading.Event | None:
    """The event that stops this thread, if it reads ahead."""
    return _local.stop


@contextmanager
def stopped_by(stop: threading.Event | None) -> Iterator[None]:
    """Let `stop` stop this thread too: for a foreign thread that works for one of ours."""
    before, _local.stop = _local.stop, stop
    try:
        yield
    finally:
        _local.stop = before


def pause(seconds: float) -> None:
    """Sleep. In a thread that reads ahead, a stop ends it with a StoppedError."""
    if _local.stop is None:
        time.sleep(seconds)
    elif _local.stop.wait(seconds):
        raise StoppedError


def wait_for(result: Future[Item]) -> Item:
    """The result of work in another thread; StoppedError as in `pause`."""
    while _local.stop is not None:
        try:
            return result.result(_POLL)
        except NotYet:
            if result.done():  # the work itself timed out
                return result.result()
            if _local.stop.is_set():
                raise StoppedError from None
    return result.result()


def _next(made: SimpleQueue[Item | _End], interrupt: threading.Event | None) -> Item | _End:
    if interrupt is None:
        return made.get()
    while not interrupt.is_set():
        try:
            return made.get(timeout=_POLL)
        except Empty:
            continue
    raise StoppedError


def _fill(
    items: Iterator[Item],
    made: SimpleQueue[Item | _End],
    slots: threading.Semaphore,
    stop: threading.Event,
) -> None:
    _local.stop = stop
    error: BaseException | None = None
    try:
        while slots.acquire() and not stop.is_set():
            made.put(next(items))
        if isinstance(items, Generator):
            items.close()
    except StopIteration:
        pass
    except BaseException as raised:  # noqa: BLE001 - raised in the other thread
        error = raised
    made.put(_End(error))


@atexit.register
def _wait_for_threads() -> None:
    until = time.monotonic() + _LAST_WAIT
    for thread in list(_threads):
        thread.join(max(until - time.monotonic(), 0.0))
