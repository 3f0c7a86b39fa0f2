"""Batches made ahead of their use, in a thread, when that saves time.

Handing an item from thread to thread costs as much as making a small batch. So a consumer that
finds nothing ready makes the item itself, unless the thread is already at it, and the thread works
only while the consumer does something else: it looks, naps, and starts if there was no call in
between. A training step that computes finds every item ready; a loop that only reads is nearly as
fast as without a thread. (`shardmill.threads.read_ahead` is for iterators whose thread should work
all the time and can be interrupted.)

At most `depth` items are made early, never two at a time. An error is raised where it would have
been without a thread, and asking again tries again. Closing, dropping the object, the end of the
interpreter and a fork neither hang nor leave a thread behind.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from shardmill.errors import OptionError

log = logging.getLogger(__name__)

Item = TypeVar("Item")


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

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()


NAP, LONGEST_NAP = 0.5e-3, 4e-3
"""Seconds without a call after which the consumer counts as busy with something else. They grow
while it calls again and again, since every look of the thread disturbs it."""

PATIENCE = 10.0
"""Seconds that `close` waits for an item that is being made."""


class Ahead(Generic[Item]):
    """`get(0)`, `get(1)`, ... return `make(0)`, `make(1)`, ...; another order works, unaided."""

    _thread: threading.Thread | None
    _finalizer: weakref.finalize[..., Any]

    def __init__(
        self, make: Callable[[int], Item], *, num_items: int | None = None, depth: int = 2
    ) -> None:
        """`num_items`: where to stop making early; None: endless. `depth` 0: no thread."""
        self._make, self._num_items, self._depth = make, num_items, depth
        self._closed = False
        self._begin()
        _living.add(self)

    def get(self, number: int) -> Item:
        if not self._depth:
            return self._make(number)
        if self._process != os.getpid():
            self._finalizer.detach()
            self._begin()  # the thread is in the parent process and may hold the lock
        item = self._work.get(number)
        if not self._closed:
            self._wake()
        return item

    def close(self) -> None:
        """Stop making items early and wait for the thread; may be called again."""
        self._closed = True
        self._finalizer()
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread() or self._process != os.getpid():
            return
        thread.join(PATIENCE)
        if thread.is_alive():
            log.warning("an item is still being made after %g s; not waiting for it", PATIENCE)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._thread = None
        self._work = _Work(self._make, self._num_items, self._depth)
        # the collector may run it inside any other call, so it takes no lock
        self._finalizer = weakref.finalize(self, self._work.end)

    def _wake(self) -> None:
        if self._thread is None:
            # the thread refers to the work, not to this object, which can be dropped meanwhile
            run = self._work.run
            self._thread = threading.Thread(target=run, name="shardmill-ahead", daemon=True)
            self._thread.start()
        self._work.wake()


class _Work(Generic[Item]):
    """What the consumer and the thread share."""

    def __init__(self, make: Callable[[int], Item], num_items: int | None, depth: int) -> None:
        self._make, self._num_items, self._depth = make, num_items, depth
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ready: deque[tuple[int, Item]] = deque()
        self._number = 0  # of the next item to make
        self._maker: int | None = None  # the id of the thread that makes it now
        self._error: BaseException | None = None  # raised instead of that item
        self._ended = False
        self._signals: SimpleQueue[None] = SimpleQueue()  # a finalizer may put into it
        self._asleep = False
        self._calls = 0  # of the consumer

    def get(self, number: int) -> Item:
        """Item `number`, made early or made now. Called by the consumer."""
        me = threading.get_ident()
        self._calls += 1
        try:
            with self._lock:
                while not self._is_ready(number) and self._maker is not None:
                    self._changed.wait()
                if self._is_ready(number):
                    return self._ready.popleft()[1]
                self._raise_error()
                self._ready.clear()  # only filled after an interrupt lost the item before
                self._number, self._maker = number, me
            item = self._make(number)
            self._number = number + 1
            return item
        finally:
            if self._maker == me:  # also when interrupted anywhere above
                self._maker = None

    def run(self) -> None:
        """What the thread does."""
        seen, nap = -1, NAP
        while not self._ended:
            if self._is_done():
                self._asleep = True  # set before the second look, so that no call is missed
                if self._is_done():
                    self._signals.get()
            elif self._calls != seen or not self._make_one():
                seen = self._calls
                self._nap(nap)
                nap = min(2 * nap, LONGEST_NAP)
            else:
                nap = NAP
        self._ready.clear()

    def wake(self) -> None:
        """An item was taken. A thread that naps notices by itself."""
        if self._asleep:
            self._asleep = False
            self._signals.put(None)

    def end(self) -> None:
        """Make no more items. Takes no lock and does not wait."""
        self._ended = True
        self._signals.put(None)

    def _is_done(self) -> bool:
        """Whether nothing can be made early until the consumer takes something."""
        full = len(self._ready) >= self._depth or self._number == self._num_items
        return full or self._error is not None

    def _nap(self, seconds: float) -> None:
        with suppress(Empty):
            self._signals.get(timeout=seconds)

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
        """Make the next item, if there is one to make. Called by the thread."""
        with self._lock:
            if self._ended or self._is_done() or self._maker is not None:
                return False
            number, self._maker = self._number, threading.get_ident()
        try:
            made, error = (number, self._make(number)), None
        except BaseException as raised:  # noqa: BLE001 - raised where the item is asked for
            made, error = None, raised
        with self._lock:
            self._maker, self._error = None, error
            if made is not None:
                self._ready.append(made)
                self._number = number + 1
            self._changed.notify_all()
        return made is not None


_living: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """No thread may be copying when the interpreter shuts down."""
    for ahead in list(_living):
        ahead.close()
