"""Read ahead in a thread, so that parsing and tokenising overlap.

In: an iterator.  Out: the same items in the same order, up to `depth` of them made early.
Promise: an exception of the iterator comes out where it would have come out; closing the generator
ends the thread. The tokenizer engines let go of the interpreter while they work, so one process
uses the time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _End:
    """The iterator ended, well or with an error."""

    error: BaseException | None


def read_ahead(items: Iterator[Item], *, depth: int = 2) -> Generator[Item, None, None]:
    """The items, each made while the one before is being used."""
    made: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
    stop = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, made, stop), daemon=True)
    thread.start()
    try:
        while not isinstance(item := made.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        while thread.is_alive():  # it may be waiting for room
            _empty(made)
            thread.join(timeout=0.01)


def _fill(items: Iterator[Item], made: queue.Queue[Item | _End], stop: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            made.put(item)
            if stop.is_set():
                break
    except BaseException as raised:  # noqa: BLE001 - handed to the thread that asked
        error = raised
    made.put(_End(error))


def _empty(made: queue.Queue[Item | _End]) -> None:
    try:
        while True:
            made.get_nowait()
    except queue.Empty:
        return
