"""Numbers, names and numpy arrays of a legacy pickle.

In: the bytes behind an opcode, or arguments on the stack.  Out: values on the stack.
Promise: four names of numpy are known, and they are compared, never looked up; a call of them makes
a value of ours (pickle_values.py) from whole numbers alone; anything else is refused.
Not here: lists and dicts (pickle_containers.py).
"""

from __future__ import annotations

from typing import Any

from shardmill.interop.packed.pickle_stack import PickleStack
from shardmill.interop.packed.pickle_values import (
    MOST_TOKENS,
    Array,
    DType,
    Global,
    Numbers,
    Sign,
    global_named,
)


class PickleCalls(PickleStack):
    """The opcodes that make values."""

    def _push_run(self) -> None:
        marked = len(self._stack) > 1 and self._stack[-1] is Sign.MARK
        target = self._stack[-2] if marked else None
        if not isinstance(target, Numbers):
            self._stack.append(self._data.number())
            return
        # they belong to the list already: nothing but APPENDS can follow in this format
        problem = target.add(self._data.numbers(is_new=target.is_empty))
        if problem:
            raise self._refused(problem)

    def _long(self) -> None:
        size = self._data.integer(1)
        self._stack.append(int.from_bytes(self._data.take(min(size, 9)), "little", signed=True))
        if size > 9:
            raise self._refused("a number of more than 64 bits")

    def _unicode(self, width: int) -> None:
        raw = self._data.take(self._checked_size(self._data.integer(width), 255, "a name"))
        try:
            self._stack.append(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self._damaged("a name that is no UTF-8") from error

    def _bytes(self, width: int) -> None:
        size = self._checked_size(self._data.integer(width), 8 * MOST_TOKENS, "bytes")
        self._stack.append(self._data.take(size))

    def _checked_size(self, size: int, most: int, what: str) -> int:
        if size > most:
            raise self._refused(f"{what} of {size:,} bytes (at most {most:,} are read)")
        return size

    def _global(self) -> None:
        module, name = self._data.line(), self._data.line()
        self._stack.append(self._known(module, name))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._stack.append(self._known(module, name))

    def _known(self, module: object, name: object) -> Global:
        found = global_named(module, name)
        if found is None:
            raise self._refused(f"the name {module!s:.60}.{name!s:.60}")
        return found

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(args, tuple):
            raise self._damaged("a call without arguments")
        if function is Global.RECONSTRUCT and args == (Global.NDARRAY, (0,), b"b"):
            self._stack.append(Array())
        elif function is Global.DTYPE and len(args) == 3 and args[1:] in ((False, True), (0, 1)):
            self._stack.append(self._dtype(args[0]))
        elif function is Global.SCALAR and len(args) == 2 and isinstance(args[0], DType):
            self._stack.append(self._scalar(args[0], args[1]))
        else:
            raise self._refused(f"the call {function!s:.60}{_shown(args)}")

    def _dtype(self, name: object) -> DType:
        found = DType.named(name)
        if found is None:
            raise self._refused(f"the dtype {name!r:.60} (wanted whole numbers)")
        return found

    def _scalar(self, dtype: DType, raw: object) -> int:
        found = dtype.numbers(raw, 1)
        if found is None:
            raise self._refused(f"a scalar of dtype {dtype.name}")
        return int(found[0])

    def _build(self) -> None:
        state, target = self._pop(), self._stack[-1] if self._stack else None
        if isinstance(target, DType) and isinstance(state, tuple) and target.build(state):
            return
        if not isinstance(target, Array) or not isinstance(state, tuple) or len(state) != 5:
            raise self._refused(f"a state for {type(target).__name__.lower()}: {_shown(state)}")
        if state[4] is self._outer and self._outer is not None:
            self._finish_outer(target, state)
        elif not target.build(state):
            raise self._refused(f"an array of {_shown(state[:4])}")

    def _finish_outer(self, target: Array, state: tuple[Any, ...]) -> None:
        version, shape, dtype, fortran, outer = state
        plain = version == 1 and fortran in (False, True)
        if not plain or not isinstance(dtype, DType) or not dtype.is_object:
            raise self._refused(f"an outer array of {_shown(state[:4])}")
        if shape != (outer.count,):
            raise self._damaged(f"{outer.count:,} bins in an array of shape {shape!r:.60}")
        if len(self._stack) != 1:
            raise self._refused("an array inside of something else")
        target.outer_count = outer.count


def _shown(value: object) -> str:
    plain = str | bytes | int | bool | None
    items = value if isinstance(value, tuple) else (value,)
    shown = [f"{i!r:.40}" if isinstance(i, plain) else type(i).__name__.lower() for i in items[:9]]
    return f"({', '.join(shown)})"
