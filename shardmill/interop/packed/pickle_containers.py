"""Lists, tuples and dicts of a legacy pickle.

In: values on the stack.  Out: lists of numbers, and bins as soon as they are complete.
Promise: the only list of anything but numbers is that of the bins, and the only dicts are bins,
with three keys, each once; a complete bin is given away and not kept.
Not here: numbers and arrays (pickle_calls.py).
"""

from __future__ import annotations

from typing import Any

from shardmill.interop.packed.pickle_stack import PickleStack
from shardmill.interop.packed.pickle_values import Array, Bin, Numbers, Outer, Sign

FIELDS = ("input_ids", "loss_mask", "seq_start_id")


class PickleContainers(PickleStack):
    """The opcodes that put values together."""

    def _empty_list(self) -> None:
        # [array, MARK, version, shape, dtype, fortran] and now the elements of the outer array
        if self._outer is None and len(self._stack) == 6 and self._stack[1] is Sign.MARK:
            self._outer = Outer()
            self._stack.append(self._outer)
        else:
            self._stack.append(Numbers())

    def _append(self) -> None:
        self._extend([self._pop()])

    def _appends(self) -> None:
        self._extend(self._above_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1] if self._stack else None
        if isinstance(target, Outer):
            if any(item is not Sign.DONE for item in items):
                raise self._refused("an element that is no complete bin (a dict of three lists)")
            target.count += len(items)
        elif isinstance(target, Numbers):
            problem = target.extend(items)
            if problem:
                raise self._refused(problem)
        else:
            raise self._damaged("elements, but no list to hold them")

    def _tuple(self, size: int) -> None:
        if len(self._stack) < size or size == 0:
            raise self._damaged("a tuple of things that are not there")
        items = tuple(self._stack[-size:])
        del self._stack[-size:]
        self._stack.append(self._checked_tuple(items))

    def _marked_tuple(self) -> None:
        self._stack.append(self._checked_tuple(tuple(self._above_mark())))

    def _checked_tuple(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        if not 0 < len(items) < 9 or any(isinstance(item, Sign) for item in items):
            raise self._refused(f"a tuple of {len(items):,} things")
        return items

    def _empty_dict(self) -> None:
        inside = self._stack and self._outer is not None
        if not inside or not (self._at_outer() or self._stack[-1] is Sign.DONE):
            raise self._refused("a dict that is no element of the array")
        self._stack.append(Bin())

    def _at_outer(self) -> bool:
        top = self._stack[-2] if self._stack[-1] is Sign.MARK and len(self._stack) > 1 else None
        return top is self._outer or self._stack[-1] is self._outer

    def _setitem(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _setitems(self) -> None:
        self._set_items(self._above_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1] if self._stack else None
        if not isinstance(target, Bin) or len(items) % 2:
            raise self._damaged("keys and values, but no open dict to hold them")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str) or key not in FIELDS or key in target.fields:
                raise self._refused(f"the key {key!r:.80} (wanted {', '.join(FIELDS)}, each once)")
            found = value.values() if isinstance(value, Numbers | Array) else None
            if found is None:
                raise self._refused(f"{key} is no list of numbers and no numpy array")
            target.fields[key] = found
        if len(target.fields) == len(FIELDS):
            self._stack[-1] = Sign.DONE
            self.ready = target
            self._memo.bin_done(target.nbytes)

    def _again(self, found: Bin) -> None:
        """A bin that was there before: np.save([one, one])."""
        if len(found.fields) < len(FIELDS) or not self._stack:
            raise self._refused("a dict inside of itself")
        if not (self._at_outer() or self._stack[-1] is Sign.DONE):
            raise self._refused("a dict that is no element of the array")
        self.ready = found
        self._stack.append(Sign.DONE)
