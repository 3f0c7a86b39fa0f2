"""Read ahead in a thread, so that parsing and tokenising overlap.

In: an iterator.  Out: the same items in the same order, up to `depth` of them made early.
Promise: an exception of the iterator comes out where it would have come out; closing the generator
ends the thread, which closes the iterator. The tokenizer engines let go of the interpreter while
they work, so one process uses the time.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _End:
    """The iterator ended, well or with an error."""

    error: BaseException | None


def read_ahead(
    items: Iterator[Item],
    *,
    depth: int = 2,
    stop: threading.Event | None = None,
    patience: float | None = None,
) -> Generator[Item, None, None]:
    """The items, each made while the one before is being used.

    `stop` is set on closing, and ends the thread behind the item it makes: iterators that wait for
    one another share one, and may look at it themselves. Closing waits for the thread, `patience`
    seconds at most (None: as long as it takes); a thread left behind ends with its item.
    """
    stop = stop or threading.Event()
    made: SimpleQueue[Item | _End] = SimpleQueue()
    room = threading.Semaphore(depth)
    thread = threading.Thread(target=_fill, args=(items, made, room, stop), daemon=True)
    thread.start()
    try:
        while not isinstance(item := made.get(), _End):
            room.release()
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        room.release()  # it may be waiting for that
        thread.join(patience)


def _fill(
    items: Iterator[Item],
    made: SimpleQueue[Item | _End],
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
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
