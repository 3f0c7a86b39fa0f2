"""Iterators with a position as Grain datasets, which Grain can prefetch, save and restore.

The state is that of the wrapped iterator after the last element given, whatever Grain has read
ahead in its thread.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar
from weakref import WeakSet

from shardmill.errors import OptionError, StateMismatchError, missing_extra
from shardmill.loading.state import read_stream_state
from shardmill.loading.streaming import Counts, StreamStats, StreamTokenizer, TextStream
from shardmill.protocols import Closing
from shardmill.records import Batch, BoolArray, IntArray

_absl = logging.getLogger("absl")
_level = _absl.level
_absl.setLevel(logging.ERROR)  # Grain warns of a missing JAX, which is not needed here
try:
    import grain
    import grain.experimental
except ImportError as missing:
    raise missing_extra("grain", "grain") from missing
finally:
    _absl.setLevel(_level)

Element = TypeVar("Element")
Given = TypeVar("Given", covariant=True)


class BatchTuple(NamedTuple):
    """A batch as a tuple of arrays `[A, B, T]`, which JAX takes as it is into a compiled step."""

    input_ids: IntArray  # int32
    labels: IntArray  # int32; the token after each input, or IGNORE_INDEX
    attention_mask: BoolArray  # False: padding
    segment_ids: IntArray  # int32; 1, 2, ... for the documents of a row; 0: padding


class Checkpointed(Protocol[Given]):
    """An iterator with a position."""

    def __next__(self) -> Given: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...

    def interrupt(self) -> None:
        """Give up the element that is being made. Called from another thread than `__next__`."""

    def close(self) -> None: ...


class CheckpointedDataset(grain.IterDataset, Generic[Element]):  # type: ignore[misc]  # untyped
    """Each `iter` is one call of `make`."""

    def __init__(self, make: Callable[[], Checkpointed[Element]]) -> None:
        super().__init__()
        self._make = make

    def __iter__(self) -> CheckpointedIterator[Element]:
        return CheckpointedIterator(self._make())

    def __str__(self) -> str:  # Grain prints datasets, and would print addresses
        return "CheckpointedDataset"


class _State(dict[str, Any]):
    """Never changed once made, so the copy that Grain takes for every element can be itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return self


class CheckpointedIterator(grain.DatasetIterator, Generic[Element]):  # type: ignore[misc]  # untyped
    """The wrapped iterator under Grain's names; a `Batch` becomes a `BatchTuple`."""

    def __init__(self, inner: Checkpointed[Element]) -> None:
        super().__init__()
        self._inner = inner

    def __next__(self) -> Any:
        self._assert_not_closed()
        element = self._inner.__next__()
        return BatchTuple(**element.arrays()) if isinstance(element, Batch) else element

    def get_state(self) -> dict[str, Any]:
        return _State(self._inner.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        self._inner.set_state(state)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._inner.close()

    def __str__(self) -> str:
        return f"CheckpointedIterator({self._inner!r})"


class StreamIterator(grain.DatasetIterator, Closing):  # type: ignore[misc]  # untyped
    """Batches of a stream as tuples, `prefetch` of them made early in a thread of Grain (0: none).

    State and statistics are those of the batches given, whatever was made early. A refused state
    changes nothing. Closing does not wait for a batch that is being made. A forked process needs
    its own iterator.
    """

    tokenizer: StreamTokenizer
    config: Any  # a StreamConfig of chomp; its `model` has the vocabulary and the ids that are used
    _closed = True  # until `__init__` is done: Grain closes an iterator that is freed

    def __init__(self, make: Callable[[], TextStream], prefetch: int) -> None:
        dataset: grain.IterDataset = CheckpointedDataset(make)
        if prefetch:
            dataset = grain.experimental.ThreadPrefetchIterDataset(
                dataset, prefetch_buffer_size=prefetch
            )
        self._at_the_end: dict[str, Any] | None = None
        self._process = os.getpid()
        super().__init__(dataset.__iter__())
        _open.add(self)
        self._before = self._totals()

    def __next__(self) -> BatchTuple:
        self._assert_not_closed()
        before = self._totals()
        batch: BatchTuple = next(self._parent)
        self._before = before
        return batch

    def get_state(self) -> dict[str, Any]:
        """Also after closing."""
        if self._at_the_end is not None:
            return self._at_the_end
        state: dict[str, Any] = self._parent.get_state()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        self._assert_not_closed()
        before = self.get_state()
        try:
            self._parent.set_state(state)
        except StateMismatchError:
            # Grain has thrown away what was read ahead, and the reader is at a later position
            self._parent.set_state(before)
            raise
        self._before = self._totals()

    def stats(self) -> StreamStats:
        """Counts of the last batch given and of the run so far, for this process."""
        totals, fim = self._totals(), read_stream_state(self.get_state()).fim
        return StreamStats(batch=totals - self._before, total=totals, fim=fim)

    def _totals(self) -> Counts:
        return Counts(**self.get_state()["totals"])

    def close(self) -> None:
        if self._closed:
            return
        if self._process != os.getpid():
            self._closed = True  # the threads are in the parent process
            return
        self._at_the_end = self.get_state()
        for iterator in _checkpointed(self._parent):
            iterator.interrupt()
        grain.DatasetIterator.close(self)
        self._parents = ()  # else Grain closes them again when this is freed, perhaps after exit

    def _assert_not_closed(self) -> None:
        if self._closed:
            raise OptionError("this iterator was closed; make a new one and set its state")
        if self._process != os.getpid():
            raise OptionError(
                "this iterator was made before the process forked, and its thread is in the "
                "parent; make one in the child, and set its state there"
            )

    def __reduce__(self) -> NoReturn:
        raise OptionError(
            "an iterator with a thread cannot be pickled; make one where it is needed and give it "
            "the state of this one (get_state, set_state)"
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self._parents)) or 'closed'})"


def _checkpointed(iterator: Any) -> Iterator[CheckpointedIterator[Any]]:
    """The iterators of this module that this one reads from."""
    if isinstance(iterator, CheckpointedIterator):
        yield iterator
    for parent in iterator._parents:
        yield from _checkpointed(parent)


_open: WeakSet[StreamIterator] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Threads end before the interpreter does, also in a script that closes nothing."""
    for iterator in list(_open):
        iterator.close()
