"""Make items in a thread before they are needed, and stop such threads.

`Prefetcher` is the one prefetcher: loaders use it with numbered items, `read_ahead` with an
iterator. An error is raised where it would have been raised without a thread. Closing, dropping the
object, the end of the interpreter and a fork neither hang nor leave a thread running. The
interpreter waits for running threads: foreign code that returns into a dead interpreter would crash
the process. Tokenizer engines release the GIL, so one process uses the time.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from shardmill.errors import OptionError

log = logging.getLogger(__name__)

Item = TypeVar("Item")

PATIENCE = 10.0
"""Seconds that closing a prefetcher waits for an item that is being made."""
_NAP, _LONGEST_NAP = 0.5e-3, 4e-3
# Seconds without a call after which the consumer counts as busy with something else. They grow
# while it calls again and again, since every look of the thread disturbs it.
_POLL = 0.1  # seconds between two looks at a stop
_LAST_WAIT = 15.0  # seconds for all threads together, at the end of the interpreter


# stops


class StoppedError(Exception):
    """Raised in a thread, or by `read_ahead`, when its stop was set."""


class _Local(threading.local):
    """State of a thread that reads ahead."""

    stop: threading.Event | None = None


_local = _Local()


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


class OneThread:
    """A `with` block for one thread at a time. Another thread gets an error at once: both would
    move the same position, and batches would be lost."""

    def __init__(self, what: str) -> None:
        self._what = what  # what each thread should open for itself
        self._begin()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._begin()  # the thread that held it is in the parent process
        if not self._lock.acquire(blocking=False):
            raise OptionError(
                f"two threads use this iterator at the same time, and a batch would be lost; let "
                f"one thread read and pass batches on, or open one {self._what} for each thread, "
                f"each with its own rank and world"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def waiting(self) -> AbstractContextManager[object]:
        """A `with` block that waits until no other thread is inside."""
        if self._process != os.getpid():
            self._begin()
        return self._lock

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()


# prefetching


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
    for one another share one, and may check it themselves. After a stop from elsewhere, also by the
    end of the interpreter, what is ready is given; unless that was all, a StoppedError follows.
    `interrupt`, set from any thread, ends this generator with a StoppedError, also while it waits.
    Closing waits for the thread, at most `patience` seconds (None: as long as it takes); after that
    the thread ends with its item.
    """
    ahead = Prefetcher(
        lambda _: next(items),
        depth=depth,
        stop=stop or threading.Event(),
        interrupt=interrupt,
        finish=items.close if isinstance(items, Generator) else None,
    )
    try:
        with suppress(StopIteration):
            for number in count():
                yield ahead.get(number)
    finally:
        ahead.close(patience)


class Prefetcher(Generic[Item]):
    """`get(0)`, `get(1)`, ... return `make(0)`, `make(1)`, ...; another order works, unaided.

    At most `depth` items are made early, never two at a time, none from `num_items` on. Asking
    again after an error tries again. `depth` 0: no thread.

    Handing an item from thread to thread costs as much as making a small batch. So a consumer that
    finds nothing ready makes the item itself, unless the thread is already at it, and the thread
    works only while the consumer does something else: it looks, naps, and starts if there was no
    call in between. A training step that computes finds every item ready; a loop that only reads is
    nearly as fast as without a thread.

    With `stop` it is the other way round, for items that take long: the thread alone makes them and
    works all the time. `stop` ends it, `finish` is the last thing that it calls, and `interrupt`
    ends a consumer that waits.
    """

    _thread: threading.Thread | None
    _finalizer: weakref.finalize[..., Any]

    def __init__(
        self,
        make: Callable[[int], Item],
        *,
        num_items: int | None = None,
        depth: int = 2,
        stop: threading.Event | None = None,
        interrupt: threading.Event | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._make, self._depth, self._stop = make, depth, stop
        self._new_work = partial(_Work, make, num_items, depth, stop, interrupt, finish)
        self._closed = False
        self._begin()
        _living.add(self)

    def get(self, number: int) -> Item:
        if not self._depth:
            return self._make(number)
        if self._process != os.getpid():
            self._finalizer.detach()
            self._begin()  # the thread is in the parent process and may hold the lock
        if self._stop is not None:
            self._start()  # the consumer waits for it
        item = self._work.get(number)
        if not self._closed:
            self._start()
            self._work.wake()
        return item

    def close(self, patience: float | None = PATIENCE) -> None:
        """Stop making items early and wait for the thread; may be called again."""
        self.end()
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread() or self._process != os.getpid():
            return
        thread.join(patience)
        if thread.is_alive() and self._stop is None:
            log.warning("an item is still being made after %g s; not waiting for it", patience)

    def end(self) -> None:
        """Stop making items early; returns at once."""
        self._closed = True
        if self._stop is not None:
            self._stop.set()
        self._finalizer()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._thread = None
        self._work: _Work[Item] = self._new_work()
        # the collector may run it inside any other call, so it takes no lock
        self._finalizer = weakref.finalize(self, self._work.end)

    def _start(self) -> None:
        if self._thread is None:
            # the thread refers to the work, not to this object, which can be dropped meanwhile
            run = self._work.run
            self._thread = threading.Thread(target=run, name="shardmill-ahead", daemon=True)
            self._thread.start()


class _Work(Generic[Item]):
    """What the consumer and the thread share."""

    def __init__(
        self,
        make: Callable[[int], Item],
        num_items: int | None,
        depth: int,
        stop: threading.Event | None,
        interrupt: threading.Event | None,
        finish: Callable[[], None] | None,
    ) -> None:
        self._make, self._num_items, self._depth = make, num_items, depth
        self._stop, self._interrupt, self._finish = stop, interrupt, finish
        self._making = threading.Lock()  # held by the thread that makes an item
        self._changed = threading.Condition()
        self._ready: deque[tuple[int, Item]] = deque()  # only the consumer takes from it
        self._number = 0  # of the next item to make
        self._error: BaseException | None = None  # raised instead of that item
        self._ended = False
        self._signals: SimpleQueue[None] = SimpleQueue()  # a finalizer may put into it
        self._asleep = False
        self._calls = 0  # of the consumer

    def get(self, number: int) -> Item:
        """Item `number`, made early or made now. Called by the consumer."""
        self._calls += 1
        if self._stop is not None:
            self._wait_for(number)
        if not self._is_ready(number):
            with self._making:  # waits for the item that the thread makes
                if not self._is_ready(number):
                    self._raise_error()
                    self._ready.clear()  # only filled after an interrupt lost the item before
                    self._number = number
                    item = self._make(number)
                    self._number = number + 1
                    return item
        return self._ready.popleft()[1]

    def run(self) -> None:
        """What the thread does."""
        _local.stop = self._stop
        seen, nap = -1, _NAP
        while not (self._ended or (self._stop is not None and self._stop.is_set())):
            if self._is_done():
                self._asleep = True  # set before the second look, so that no call is missed
                if self._is_done():
                    self._signals.get()
            elif (self._stop is None and self._calls != seen) or not self._make_one():
                seen = self._calls
                with suppress(Empty):
                    self._signals.get(timeout=nap)
                nap = min(2 * nap, _LONGEST_NAP)
            else:
                nap = _NAP
        if self._stop is None:
            self._ready.clear()  # after a stop, what is ready is still taken
        if self._finish is not None:
            try:
                self._finish()
            except BaseException as raised:  # noqa: BLE001 - raised in the other thread
                self._error = self._error or raised
        if self._stop is not None:  # a consumer that is stopped too may wait for the next item
            # Not a StopIteration: to the consumer the items would seem complete.
            self._error = self._error or StoppedError()
            self._tell()

    def wake(self) -> None:
        """An item was taken. A thread that naps notices by itself."""
        if self._asleep:
            self._asleep = False
            self._signals.put(None)

    def end(self) -> None:
        """Make no more items. Takes no lock and does not wait."""
        self._ended = True
        self._signals.put(None)

    def _wait_for(self, number: int) -> None:
        """Until the thread has made this item, or failed to."""
        with self._changed:
            while self._interrupt is None or not self._interrupt.is_set():
                if self._is_ready(number) or self._error is not None:
                    return
                self._changed.wait(None if self._interrupt is None else _POLL)
        raise StoppedError

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _is_done(self) -> bool:
        """Whether nothing can be made early until the consumer takes something."""
        full = len(self._ready) >= self._depth or self._number == self._num_items
        return full or self._error is not None

    def _is_ready(self, number: int) -> bool:
        return bool(self._ready) and self._ready[0][0] == number

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its own traceback would keep alive everything the item held

    def _make_one(self) -> bool:
        """Make the next item, unless the consumer does. Called by the thread."""
        if not self._making.acquire(blocking=False):
            return False
        try:
            if not self._is_done():
                self._ready.append((self._number, self._make(self._number)))
                self._number += 1
        except BaseException as raised:  # noqa: BLE001 - raised where the item is asked for
            self._error = raised
        finally:
            self._making.release()
        if self._stop is not None:
            self._tell()
        return self._error is None


_living: weakref.WeakSet[Prefetcher[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """No thread may be copying or encoding when the interpreter shuts down."""
    until = time.monotonic() + _LAST_WAIT
    living = list(_living)
    for one in living:
        one.end()
    for one in living:
        one.close(max(until - time.monotonic(), 0.0))
