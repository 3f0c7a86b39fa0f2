"""The stack of the machine that reads a legacy pickle.

In: the bytes of the pickle.  Out: what lies on the stack, and the two ways to refuse it.
Promise: nothing is taken from where nothing is; an error says which byte of which file.
Not here: what is put there (pickle_calls.py, pickle_containers.py), opcodes (unpickle.py).
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.interop.packed.pickle_bytes import Memo, PickleBytes
from shardmill.interop.packed.pickle_values import Bin, Outer, Sign


class PickleStack:
    """What every part of the machine works on."""

    def __init__(self, data: PickleBytes) -> None:
        self.ready: Bin | None = None  # the bin that the last step completed
        self._data, self._memo = data, Memo(data.where)
        self._stack: list[Any] = []
        self._outer: Outer | None = None

    def _mark(self) -> None:
        self._stack.append(Sign.MARK)

    def _above_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is Sign.MARK:
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise self._damaged("the end of a list that has no beginning")

    def _pop(self) -> Any:
        if not self._stack:
            raise self._damaged("it takes from an empty stack")
        return self._stack.pop()

    def _top(self) -> Any:
        if not self._stack or isinstance(self._stack[-1], Sign):
            raise self._damaged("it keeps something that is not there")
        return self._stack[-1]

    def _refused(self, what: str) -> StoreError:
        return StoreError(
            f"{self._data.where}, byte {self._data.place:,}: refused: {what}; a packed .npy holds "
            "dicts of numbers and nothing else. Nothing was run; do not load this file with pickle"
        )

    def _damaged(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(
            f"{self._data.where}, byte {self._data.place:,}: damaged: {what}; copy it again"
        )
