"""Read the pickle of a legacy packed `.npy` without unpickling it.

In: a `PickleBytes` at the first opcode.  Out: the bins, one after another, as three arrays each.
Promise: no module is imported, no class is looked up, no constructor is called: the opcodes of this
one format are interpreted here, and every other opcode, name or value is refused before anything
could come of it. A bin is given as soon as it is complete and forgotten; memory is that of the
largest bin and of what the file shares between bins (at most 64 MiB), whatever the file's size.
Not here: the header of the file, what a bin must look like (legacy_reader.py); what opcodes do to
the stack (pickle_calls.py, pickle_containers.py).

The format: one object array whose elements are dicts of three lists of numbers, of three numpy
arrays, or of a mixture, as np.save writes them with pickle protocol 3 or 4; 5 is
read for lists, where it is the same.

Numbers, names and numpy arrays of a legacy pickle.

In: the bytes behind an opcode, or arguments on the stack.  Out: values on the stack.
Promise: four names of numpy are known, and they are compared, never looked up; a call of them makes
a value of ours (pickle_values.py) from whole numbers alone; anything else is refused.
Not here: lists and dicts (pickle_containers.py).

Lists, tuples and dicts of a legacy pickle.

In: values on the stack.  Out: lists of numbers, and bins as soon as they are complete.
Promise: the only list of anything but numbers is that of the bins, and the only dicts are bins,
with three keys, each once; a complete bin is given away and not kept.
Not here: numbers and arrays (pickle_calls.py).

The stack of the machine that reads a legacy pickle.

In: the bytes of the pickle.  Out: what lies on the stack, and the two ways to refuse it.
Promise: nothing is taken from where nothing is; an error says which byte of which file.
Not here: what is put there (pickle_calls.py, pickle_containers.py), opcodes (unpickle.py).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from typing import Any

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.formats.packed.pickle_values import (
    MOST_TOKENS,
    Array,
    Bin,
    DType,
    Global,
    Memo,
    Numbers,
    Outer,
    PickleBytes,
    Sign,
    begins_run,
    global_named,
)


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


FRAME = 0x95
_DEEPEST = 2**16  # things on the stack: a thousand bins, and a dozen others
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}


def read_bins(data: PickleBytes) -> Iterator[Bin]:
    """Every bin of the pickle, in order. Afterwards the array was complete and its end was read."""
    machine = _Machine(data)
    while not machine.stopped:
        machine.step()
        if machine.ready is not None:
            ready, machine.ready = machine.ready, None
            yield ready


class _Machine(PickleCalls, PickleContainers):
    """A stack machine that knows no way to run anything."""

    def __init__(self, data: PickleBytes) -> None:
        super().__init__(data)
        self.stopped = False
        self._frame_end = 0  # the byte behind the frame we are in; behind us when in none

    def step(self) -> None:
        """One opcode, or a run of numbers."""
        place, opcode = self._data.place, self._data.peek()
        if begins_run(opcode):
            self._push_run()
        else:
            self._data.skip(1)
            action = _ACTIONS.get(opcode)
            if action is None:
                raise self._refused(f"opcode {_NAMES.get(opcode, hex(opcode))}")
            action(self)
            if opcode == FRAME:
                return
        if place < self._frame_end < self._data.place:
            raise self._damaged("a frame that ends inside of a value")
        if len(self._stack) > _DEEPEST:
            raise self._refused(f"more than {_DEEPEST:,} things at a time")

    # the memo

    def _put(self, width: int) -> None:
        index = self._data.integer(width)
        self._memo.put(index, self._top())

    def _memoize(self) -> None:
        self._memo.put(self._memo.num_put, self._top())

    def _get(self, width: int) -> None:
        found = self._memo.get(self._data.integer(width))
        if isinstance(found, Bin):
            self._again(found)
        else:
            self._stack.append(found)

    # the frame around it

    def _protocol(self) -> None:
        version = self._data.integer(1)
        if not 3 <= version <= 5 or self._stack:
            raise self._refused(f"pickle protocol {version} (3 to 5 are read)")

    def _frame(self) -> None:
        """Frames carry nothing, so one that cannot be is damage, not data: they follow one another
        and end with the file at the latest."""
        begin, size = self._data.place - 1, self._data.integer(8)
        if begin < self._frame_end:
            raise self._damaged("a frame inside of a frame")
        if size > self._data.left:
            raise self._damaged(f"a frame of {size:,} bytes, but {self._data.left:,} are left")
        self._frame_end = self._data.place + size

    def _stop(self) -> None:
        outer = self._stack[0] if len(self._stack) == 1 else None
        if not isinstance(outer, Array) or outer.outer_count is None:
            raise self._damaged("it ends without an array of bins")
        if self._data.left:
            raise self._damaged(f"{self._data.left:,} bytes behind its end")
        self.stopped = True


def _push(value: bool | tuple[()] | None) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(value)


_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine._protocol,
    FRAME: _Machine._frame,
    ord("."): _Machine._stop,
    ord("("): _Machine._mark,
    ord("N"): _push(None),
    ord(")"): _push(()),
    0x8A: _Machine._long,
    0x8C: lambda machine: machine._unicode(1),
    ord("X"): lambda machine: machine._unicode(4),
    ord("C"): lambda machine: machine._bytes(1),
    ord("B"): lambda machine: machine._bytes(4),
    0x8E: lambda machine: machine._bytes(8),
    ord("c"): _Machine._global,
    0x93: _Machine._stack_global,
    ord("]"): _Machine._empty_list,
    ord("a"): _Machine._append,
    ord("e"): _Machine._appends,
    ord("}"): _Machine._empty_dict,
    ord("s"): _Machine._setitem,
    ord("u"): _Machine._setitems,
    0x85: lambda machine: machine._tuple(1),
    0x86: lambda machine: machine._tuple(2),
    0x87: lambda machine: machine._tuple(3),
    ord("t"): _Machine._marked_tuple,
    ord("q"): lambda machine: machine._put(1),
    ord("r"): lambda machine: machine._put(4),
    0x94: _Machine._memoize,
    ord("h"): lambda machine: machine._get(1),
    ord("j"): lambda machine: machine._get(4),
    ord("R"): _Machine._reduce,
    ord("b"): _Machine._build,
}
