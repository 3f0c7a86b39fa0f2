"""Read the pickle of a legacy packed `.npy` without unpickling it.

No module is imported, no class is looked up, no constructor is called. A small stack machine
interprets the opcodes of this one format, and refuses every other opcode, name or value before it
has any effect. The four names of numpy that the format needs are compared, never looked up. A bin
is yielded as soon as it is complete and then forgotten; memory is that of the largest bin and of
what the file shares between bins (at most 64 MiB), whatever the file's size.

The format: one object array whose elements are dicts of three lists of numbers, of three numpy
arrays, or of a mixture, as np.save writes them with pickle protocol 3 or 4; 5 is read for lists,
where it is the same.
"""

from __future__ import annotations

import pickletools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, BinaryIO, Final, Literal

import numpy as np

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.formats.packed.pickle_runs import NUMBERS, PickleBytes, PickleDamagedError
from shardmill.records import IntArray

FIELDS = ("input_ids", "loss_mask", "seq_start_id")
MAX_TOKENS: Final = 2**24
"""The length of the longest bin that is read: 16 million tokens."""

_MAX_KEPT = 2**16  # names and shared objects of a whole file
_MAX_SHARED = 2**26  # bytes of them
_MAX_RECENT = 2**25  # bytes of bins that may be referred to again
_MAX_OF_A_BIN = 2**20  # objects of one bin
_MAX_STACK = 2**16  # a thousand bins, and a dozen other things
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_OBJECT = ("O8", "O4", "O")
_OBJECT_FLAGS = 63  # of dtype("O"), in every numpy; those of whole numbers are 0
_OPCODE_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}


def read_bins(file: BinaryIO, size: int, where: str) -> Iterator[dict[str, IntArray]]:
    """The bins of a pickle of `size` bytes, which begins here, in order, as three arrays each.

    When it ends without an error, the array was complete and its end was read.
    """
    data = PickleBytes(file, size)
    machine = _Machine(data)
    while not machine.stopped:
        try:
            machine.step()
        except _RefusedError as error:
            raise StoreError(
                f"{where}, byte {data.position:,}: refused: {error}; a packed .npy holds dicts of "
                "numbers and nothing else. Nothing was run; do not load this file with pickle"
            ) from None
        except PickleDamagedError as error:
            raise DamagedStoreError(
                f"{where}, byte {data.position:,}: damaged: {error}; copy it again"
            ) from None
        if machine.ready is not None:
            ready, machine.ready = machine.ready, None
            yield ready


class _RefusedError(Exception):
    """A pickle of something else; the message says what was found."""


class _Sign(Enum):
    """Stack entries that hold no value."""

    MARK = "mark"
    DONE = "a bin that was yielded"


class _Global(Enum):
    RECONSTRUCT = "_reconstruct"
    NDARRAY = "ndarray"
    DTYPE = "dtype"
    SCALAR = "scalar"


_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")  # numpy 1 and numpy 2
_GLOBALS = {
    **{(module, "_reconstruct"): _Global.RECONSTRUCT for module in _MULTIARRAY},
    **{(module, "scalar"): _Global.SCALAR for module in _MULTIARRAY},
    ("numpy", "ndarray"): _Global.NDARRAY,
    ("numpy", "dtype"): _Global.DTYPE,
}


class _Outer:
    """The list of all elements of the array: only their number is kept."""

    count = 0


class _List:
    """A list of whole numbers that is being read."""

    def __init__(self) -> None:
        self._chunks: list[IntArray] = []
        self._is_used = False
        self.count = 0

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def add(self, chunk: IntArray) -> None:
        if self._is_used:
            raise _RefusedError("a list that grows after it was used")
        self.count += len(chunk)
        if self.count > MAX_TOKENS:
            raise _RefusedError(f"a list of more than {MAX_TOKENS:,} numbers")
        self._chunks.append(chunk)

    @property
    def values(self) -> IntArray:
        """All of them, as int32 or int64."""
        if not self._is_used:
            self._chunks = [np.concatenate([np.empty(0, np.int32), *self._chunks])]
            self._is_used = True
        return self._chunks[0]


@dataclass(eq=False, slots=True)
class _Array:
    """A numpy array that is being read."""

    values: IntArray | None = None  # come later, with its state

    @property
    def nbytes(self) -> int:
        return 0 if self.values is None else self.values.nbytes


@dataclass(eq=False, slots=True)
class _DType:
    """A dtype of whole numbers, or that of objects."""

    name: str
    order: Literal["<", ">", "|", "="] | None = None  # comes later, with its state

    @property
    def is_object(self) -> bool:
        return self.name in _OBJECT

    @property
    def rest_of_state(self) -> list[int | None]:
        """What follows the byte order: no subarrays, fields or metadata, and the usual flags."""
        return [None, None, None, -1, -1, _OBJECT_FLAGS if self.is_object else 0]

    def numbers(self, raw: bytes, count: int) -> IntArray | None:
        """`count` numbers in these bytes; None if they are not exactly that."""
        stored = np.dtype("u1" if self.name == "b1" else self.name)
        if self.is_object or count > MAX_TOKENS or len(raw) != count * stored.itemsize:
            return None
        found: IntArray = np.frombuffer(raw, stored.newbyteorder(self.order or "="))
        if self.name == "b1" and count and found.max() > 1:
            return None
        return found.astype(stored, copy=False)


class _Memo:
    """What a pickle may refer back to: names for ever, lists and bins for a while.

    Whatever is referred to once is kept from then on, so a list that all bins share stays.
    """

    def __init__(self) -> None:
        self.num_put = 0
        self._kept: dict[int, Any] = {}
        self._recent: dict[int, Any] = {}
        self._young: list[int] = []  # put since the last bin was complete
        self._old: deque[tuple[list[int], int]] = deque()
        self._recent_bytes = self._shared_bytes = 0

    def put(self, index: int, value: object) -> None:
        if index != self.num_put:  # every pickler counts
            raise _RefusedError(f"it keeps object {index:,} where {self.num_put:,} comes next")
        self.num_put += 1
        is_short = isinstance(value, bytes) and len(value) < 2
        if is_short or isinstance(value, str | _Global | _DType):
            self._keep(index, value)
        elif isinstance(value, _List | _Array | dict | int):
            if len(self._young) >= _MAX_OF_A_BIN:
                raise _RefusedError(f"more than {_MAX_OF_A_BIN:,} objects in a bin")
            self._young.append(index)
            self._recent[index] = value
        # numpy makes new tuples and long bytes each time: nothing refers to them

    def get(self, index: int) -> Any:
        if index in self._kept:
            return self._kept[index]
        value = self._recent.pop(index, None)
        if value is None:
            raise _RefusedError(
                f"it refers to object {index:,}, which does not exist or is no longer kept; save "
                "it with a copy for each bin"
            )
        self._shared_bytes += _nbytes(value)
        if self._shared_bytes > _MAX_SHARED:
            raise _RefusedError(f"more than {_MAX_SHARED:,} bytes shared between bins")
        self._keep(index, value)
        return value

    def bin_done(self, num_bytes: int) -> None:
        """A bin of `num_bytes` is complete: forget what is too far back."""
        self._old.append((self._young, num_bytes + 64 * len(self._young)))
        self._recent_bytes += self._old[-1][1]
        self._young = []
        while self._recent_bytes > _MAX_RECENT:
            indices, size = self._old.popleft()
            self._recent_bytes -= size
            for index in indices:
                self._recent.pop(index, None)

    def _keep(self, index: int, value: object) -> None:
        if len(self._kept) >= _MAX_KEPT:
            raise _RefusedError(f"more than {_MAX_KEPT:,} names and shared objects")
        self._kept[index] = value


def _nbytes(value: object) -> int:
    if isinstance(value, dict):
        return sum(array.nbytes for array in value.values())
    return value.nbytes if isinstance(value, _List | _Array) else 0


class _Machine:
    """A stack machine that has no way to run anything. A dict on the stack is an open bin."""

    def __init__(self, data: PickleBytes) -> None:
        self.stopped = False
        self.ready: dict[str, IntArray] | None = None  # the bin that the last step completed
        self._data, self._memo = data, _Memo()
        self._stack: list[Any] = []
        self._outer: _Outer | None = None
        self._whole: _Array | None = None  # the array around all bins, when it is complete
        self._frame_end = 0  # the byte after the current frame; already passed if there is none

    def step(self) -> None:
        """Interpret one opcode, or a run of numbers."""
        position, opcode = self._data.position, self._data.peek()
        if opcode in NUMBERS:
            self._push_run()
        elif opcode in _ACTIONS:
            self._data.take(1)
            action, *arguments = _ACTIONS[opcode]
            action(self, *arguments)
        else:
            raise _RefusedError(f"opcode {_OPCODE_NAMES.get(opcode, hex(opcode))}")
        if opcode != _FRAME and position < self._frame_end < self._data.position:
            raise PickleDamagedError("a frame that ends inside a value")
        if len(self._stack) > _MAX_STACK:
            raise _RefusedError(f"more than {_MAX_STACK:,} objects at a time")

    # the pickle as a whole

    def _protocol(self) -> None:
        version = self._data.integer(1)
        if not 3 <= version <= 5 or self._stack:
            raise _RefusedError(f"pickle protocol {version} (3 to 5 are read)")

    def _frame(self) -> None:
        """Frames carry no data, so an impossible one is damage: they follow one another and end
        with the file at the latest."""
        begin, size = self._data.position - 1, self._data.integer(8)
        if begin < self._frame_end:
            raise PickleDamagedError("a frame inside a frame")
        if size > self._data.left:
            raise PickleDamagedError(f"a frame of {size:,} bytes, but {self._data.left:,} are left")
        self._frame_end = self._data.position + size

    def _stop(self) -> None:
        if self._whole is None or self._stack != [self._whole]:
            raise PickleDamagedError("it ends without an array of bins")
        if self._data.left:
            raise PickleDamagedError(f"{self._data.left:,} bytes after its end")
        self.stopped = True

    # the stack and the memo

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _take(self, count: int | None) -> list[Any]:
        """The last `count` values, or those above the last mark."""
        if count is not None:
            if len(self._stack) < count:
                raise PickleDamagedError("it takes values that do not exist")
            items = self._stack[-count:]
            del self._stack[-count:]
            return items
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _Sign.MARK:
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise PickleDamagedError("the end of a list that has no beginning")

    def _put(self, width: int | None) -> None:
        """Keep the top of the stack, under the next number if none is given."""
        index = self._memo.num_put if width is None else self._data.integer(width)
        if not self._stack or isinstance(self._stack[-1], _Sign):
            raise PickleDamagedError("it keeps something that does not exist")
        self._memo.put(index, self._stack[-1])

    def _get(self, width: int) -> None:
        found = self._memo.get(self._data.integer(width))
        if isinstance(found, dict):  # a bin that was there before: np.save([one, one])
            if len(found) < len(FIELDS):
                raise _RefusedError("a dict inside itself")
            self._check_element()
            self.ready, found = found, _Sign.DONE
        self._stack.append(found)

    # numbers, names and numpy's arrays

    def _push_run(self) -> None:
        marked = len(self._stack) > 1 and self._stack[-1] is _Sign.MARK
        target = self._stack[-2] if marked else None
        if isinstance(target, _List):
            # they belong to the list already: nothing but APPENDS can follow in this format
            target.add(self._data.numbers(is_new=target.count == 0))
        else:
            self._stack.append(self._data.number())

    def _long(self) -> None:
        size = self._data.integer(1)
        if size > 9:
            raise _RefusedError("a number of more than 64 bits")
        self._stack.append(int.from_bytes(self._data.take(size), "little", signed=True))

    def _bytes(self, width: int, most: int) -> None:
        size = self._data.integer(width)
        if size > most:
            raise _RefusedError(f"{size:,} bytes in one value (at most {most:,} are read)")
        self._stack.append(self._data.take(size))

    def _unicode(self, width: int) -> None:
        self._bytes(width, 255)
        try:
            self._stack[-1] = self._stack[-1].decode("utf-8")
        except UnicodeDecodeError as error:
            raise PickleDamagedError("a name that is no UTF-8") from error

    def _global(self) -> None:
        self._stack += [self._data.line(), self._data.line()]
        self._stack_global()

    def _stack_global(self) -> None:
        module, name = self._take(2)
        found = None
        if isinstance(module, str) and isinstance(name, str):
            found = _GLOBALS.get((module, name))
        if found is None:
            raise _RefusedError(f"the name {module!s:.60}.{name!s:.60}")
        self._stack.append(found)

    def _reduce(self) -> None:
        match self._take(2):
            case _Global.RECONSTRUCT, (_Global.NDARRAY, (0,), b"b"):
                self._stack.append(_Array())
            case _Global.DTYPE, (name, 0, 1):
                if name not in (*_DTYPES, *_OBJECT):
                    raise _RefusedError(f"the dtype {name!r:.60} (wanted whole numbers)")
                self._stack.append(_DType(name))
            case _Global.SCALAR, (_DType() as dtype, bytes(raw)):
                scalar = dtype.numbers(raw, 1)
                if scalar is None:
                    raise _RefusedError(f"a scalar of dtype {dtype.name}")
                self._stack.append(int(scalar[0]))
            case function, tuple(args):
                raise _RefusedError(f"the call {function!s:.60}{_shown(args)}")
            case _:
                raise PickleDamagedError("a call without arguments")

    def _build(self) -> None:
        (state,) = self._take(1)
        match self._stack[-1] if self._stack else None, state:
            case _DType(order=None) as dtype, (3, order, *rest) if rest == dtype.rest_of_state:
                if order not in ("<", ">", "|", "="):
                    raise _RefusedError(f"the byte order {order!r:.60}")
                dtype.order = order
            case _Array() as array, (1, shape, _DType(is_object=True), 0 | 1, _Outer() as outer):
                if shape != (outer.count,):
                    raise PickleDamagedError(
                        f"{outer.count:,} bins in an array of shape {shape!r:.60}"
                    )
                if len(self._stack) != 1:
                    raise _RefusedError("an array inside something else")
                self._whole = array
            case _Array(None) as array, (1, (int(n),), _DType() as dtype, 0 | 1, bytes(raw)):
                array.values = dtype.numbers(raw, n)
                if array.values is None:
                    raise _RefusedError(f"an array of {_shown(state[:4])}")
            case target, _:
                raise _RefusedError(f"a state for {_kind(target)}: {_shown(state)}")

    # lists, tuples and dicts

    def _empty_list(self) -> None:
        # [array, MARK, version, shape, dtype, fortran] and now the elements of the outer array
        if self._outer is None and len(self._stack) == 6 and self._stack[1] is _Sign.MARK:
            self._outer = _Outer()
            self._stack.append(self._outer)
        else:
            self._stack.append(_List())

    def _extend(self, count: int | None) -> None:
        items = self._take(count)
        target = self._stack[-1] if self._stack else None
        if isinstance(target, _Outer):
            if any(item is not _Sign.DONE for item in items):
                raise _RefusedError("an element that is no complete bin (a dict of three lists)")
            target.count += len(items)
        elif isinstance(target, _List):
            if not all(isinstance(item, int) and -(2**63) <= item < 2**63 for item in items):
                raise _RefusedError("an element of a list that is no whole number of 64 bits")
            if items:
                target.add(np.array(items, np.int64))
        else:
            raise PickleDamagedError("elements, but no list to hold them")

    def _tuple(self, count: int | None) -> None:
        items = self._take(count)
        if not 0 < len(items) < 9 or any(isinstance(item, _Sign) for item in items):
            raise _RefusedError(f"a tuple of {len(items):,} things")
        self._stack.append(tuple(items))

    def _empty_dict(self) -> None:
        self._check_element()
        self._stack.append({})

    def _check_element(self) -> None:
        """Refuse a dict anywhere but among the elements of the outer array."""
        top = self._stack[-1] if self._stack else None
        below = self._stack[-2] if len(self._stack) > 1 and top is _Sign.MARK else None
        is_element = top is _Sign.DONE or self._outer in (top, below)
        if self._outer is None or not is_element:
            raise _RefusedError("a dict that is no element of the array")

    def _set_items(self, count: int | None) -> None:
        items = self._take(count)
        target = self._stack[-1] if self._stack else None
        if not isinstance(target, dict) or len(items) % 2:
            raise PickleDamagedError("keys and values, but no open dict to hold them")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str) or key not in FIELDS or key in target:
                raise _RefusedError(f"the key {key!r:.80} (wanted {', '.join(FIELDS)}, each once)")
            found = value.values if isinstance(value, _List | _Array) else None
            if found is None:
                raise _RefusedError(f"{key} is no list of numbers and no numpy array")
            target[key] = found
        if len(target) == len(FIELDS):
            self._stack[-1] = _Sign.DONE
            self.ready = target
            self._memo.bin_done(_nbytes(target))


def _shown(value: object) -> str:
    plain = str | bytes | int | bool | None
    items = value if isinstance(value, tuple) else (value,)
    short = [item[:40] if isinstance(item, bytes) else item for item in items[:9]]
    shown = [f"{item!r:.40}" if isinstance(item, plain) else _kind(item) for item in short]
    return f"({', '.join(shown)})"


def _kind(value: object) -> str:
    return type(value).__name__.strip("_").lower()


_FRAME = 0x95
_ACTIONS: dict[int, tuple[Any, ...]] = {  # opcode -> what to do, and the arguments
    0x80: (_Machine._protocol,),
    _FRAME: (_Machine._frame,),
    ord("."): (_Machine._stop,),
    ord("("): (_Machine._push, _Sign.MARK),
    ord("N"): (_Machine._push, None),
    ord(")"): (_Machine._push, ()),
    0x8A: (_Machine._long,),
    0x8C: (_Machine._unicode, 1),
    ord("X"): (_Machine._unicode, 4),
    ord("C"): (_Machine._bytes, 1, 8 * MAX_TOKENS),
    ord("B"): (_Machine._bytes, 4, 8 * MAX_TOKENS),
    0x8E: (_Machine._bytes, 8, 8 * MAX_TOKENS),
    ord("c"): (_Machine._global,),
    0x93: (_Machine._stack_global,),
    ord("]"): (_Machine._empty_list,),
    ord("a"): (_Machine._extend, 1),
    ord("e"): (_Machine._extend, None),
    ord("}"): (_Machine._empty_dict,),
    ord("s"): (_Machine._set_items, 2),
    ord("u"): (_Machine._set_items, None),
    0x85: (_Machine._tuple, 1),
    0x86: (_Machine._tuple, 2),
    0x87: (_Machine._tuple, 3),
    ord("t"): (_Machine._tuple, None),
    ord("q"): (_Machine._put, 1),
    ord("r"): (_Machine._put, 4),
    0x94: (_Machine._put, None),
    ord("h"): (_Machine._get, 1),
    ord("j"): (_Machine._get, 4),
    ord("R"): (_Machine._reduce,),
    ord("b"): (_Machine._build,),
}
