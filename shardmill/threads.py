"""Items made before they are asked for, in a thread that can be told to stop.

In: an iterator.  Out: the same items in the same order, up to `depth` of them made early.
Promise: an exception of the iterator comes out where it would have come out; closing the generator
ends the thread, which closes the iterator; what such a thread waits for through `pause` and
`wait_for` ends with it. The interpreter does not end under a thread that was left behind: foreign
code that comes back into it then would take the whole process down. The tokenizer engines let go
of the interpreter while they work, so one process uses the time.
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

_LOOK = 0.1  # seconds between two looks at a stop
_LAST_WAIT = 15.0  # seconds for all threads together, at the end of the interpreter


class StoppedError(Exception):
    """In a thread, or out of `read_ahead`: its stop was set. Nobody waits for the result."""


@dataclass(frozen=True, slots=True)
class _End:
    """What stands at the end of the queue."""

    error: BaseException | None


class _Mine(threading.local):
    """Of a thread that reads ahead."""

    stop: threading.Event | None = None


_mine = _Mine()
_threads: WeakSet[threading.Thread] = WeakSet()


def read_ahead(
    items: Iterator[Item],
    *,
    depth: int = 2,
    stop: threading.Event | None = None,
    interrupt: threading.Event | None = None,
    patience: float | None = None,
) -> Generator[Item, None, None]:
    """The items, each made while the one before is being used.

    `stop` is set on closing, and ends the thread behind the item it makes: iterators that wait for
    one another share one, and may look at it themselves. `interrupt`, set from any thread, ends
    this generator with a StoppedError, also while it waits. Closing waits for the thread,
    `patience` seconds at most (None: as long as it takes); a thread left behind ends with its item.
    """
    stop = stop or threading.Event()
    made: SimpleQueue[Item | _End] = SimpleQueue()
    room = threading.Semaphore(depth)
    thread = threading.Thread(target=_fill, args=(items, made, room, stop), daemon=True)
    thread.start()
    _threads.add(thread)
    try:
        while not isinstance(item := _next(made, interrupt), _End):
            room.release()
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        room.release()  # it may be waiting for that
        if thread is not threading.current_thread():  # the collector may close us in any thread
            thread.join(patience)


def current_stop() -> threading.Event | None:
    """What stops this thread, if it reads ahead."""
    return _mine.stop


@contextmanager
def stopped_by(stop: threading.Event | None) -> Iterator[None]:
    """Let `stop` stop this thread too: for threads of foreign code that work for one of ours."""
    before, _mine.stop = _mine.stop, stop
    try:
        yield
    finally:
        _mine.stop = before


def pause(seconds: float) -> None:
    """Sleep; in a thread that reads ahead only until it is stopped: StoppedError."""
    if _mine.stop is None:
        time.sleep(seconds)
    elif _mine.stop.wait(seconds):
        raise StoppedError


def wait_for(result: Future[Item]) -> Item:
    """The result of work in another thread; StoppedError as in `pause`."""
    while _mine.stop is not None:
        try:
            return result.result(_LOOK)
        except NotYet:
            if result.done():  # then it is the work that timed out
                return result.result()
            if _mine.stop.is_set():
                raise StoppedError from None
    return result.result()


def _next(made: SimpleQueue[Item | _End], interrupt: threading.Event | None) -> Item | _End:
    if interrupt is None:
        return made.get()
    while not interrupt.is_set():
        try:
            return made.get(timeout=_LOOK)
        except Empty:
            continue
    raise StoppedError


def _fill(
    items: Iterator[Item],
    made: SimpleQueue[Item | _End],
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    _mine.stop = stop
    error: BaseException | None = None
    try:
        while room.acquire() and not stop.is_set():
            made.put(next(items))
        if isinstance(items, Generator):
            items.close()
    except StopIteration:
        pass
    except BaseException as raised:  # noqa: BLE001 - handed to the thread that asked
        error = raised
    made.put(_End(error))


@atexit.register
def _wait_for_threads() -> None:
    until = time.monotonic() + _LAST_WAIT
    for thread in list(_threads):
        thread.join(max(until - time.monotonic(), 0.0))
