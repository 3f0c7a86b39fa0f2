"""Many files at a time, and an end at the first error.

In: a function and its items.  Out: the results, in order.
Promise: at most `workers` at once; after an error nothing new is begun.
Not here: trying again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    workers: int, function: Callable[[Item], Result], items: Iterable[Item]
) -> list[Result]:
    """`function` of every item; the first error, in the order of the items, ends it."""
    stop = threading.Event()

    def guarded(item: Item) -> Result:
        if stop.is_set():
            raise CancelledError
        is_done = False
        try:
            result = function(item)
            is_done = True
            return result
        finally:
            if not is_done:
                stop.set()

    with ThreadPoolExecutor(workers, thread_name_prefix="shardmill-remote") as pool:
        futures = [pool.submit(guarded, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    for future in futures:
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, CancelledError):
            raise error
    return [future.result() for future in futures]
