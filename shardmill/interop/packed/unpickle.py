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
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator

from shardmill.interop.packed.integer_runs import begins_run
from shardmill.interop.packed.pickle_bytes import PickleBytes
from shardmill.interop.packed.pickle_calls import PickleCalls
from shardmill.interop.packed.pickle_containers import PickleContainers
from shardmill.interop.packed.pickle_values import Array, Bin

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
