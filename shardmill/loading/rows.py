"""Sources of rows: what every source is, and windows of token files.

Every `RowSource` can be mixed, shuffled, resumed and divided over ranks with every other
source. The files of a folder without a manifest are read as one run of tokens, sorted by name: a
window may begin in one file and end in the next.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.loading.exclusion import ExcludedItems, excluded_windows
from shardmill.records import (
    BoolArray,
    IntArray,
    OffsetArray,
    PreferenceKind,
    write_next_token_pairs,
)
from shardmill.store import Exclusions, Manifest, Store, read_exclusions
from shardmill.store.branches import refuse_preferences
from shardmill.store.readers import TokenSpace, Windows, open_token_folder, open_tokens
from shardmill.store.readers.documents import Borders, borders_after, checked_starts, find_borders
from shardmill.store.readers.foreign import TokenFolder, folder_fingerprint
from shardmill.store.readers.token_space import ReaderName, find_split, held_by, item_numbers

log = logging.getLogger(__name__)

_BLOCK_BYTES = 256 * 1024
_LOOK_FOR_EOS = 2**20  # tokens among which the end of a document should be found

Documents: TypeAlias = tuple[tuple[int, int, int], ...]
"""(number in the split, start, stop) of each, in the order of the row."""


class RowSpan(NamedTuple):
    """The tokens of one row, as positions in its split."""

    start: int
    stop: int
    documents: Documents | None  # None when it is not known where documents begin


class RowSource(ABC):
    """A read-only sequence of rows without a state. Threads may share it; it pickles by path."""

    path: Path  # the store's folder, or the folder of tokens
    split: str | None  # None: the folder is not a store
    name: str  # part of the order: the same rows under another name come in another order
    seq_len: int  # inputs per row
    fingerprint: str  # equal fingerprints, equal rows
    num_tokens: int  # in all rows
    window_bytes: int  # of one row on disk, about
    reader: str  # "mapped" or "pread"
    excluded: ExcludedItems | None = None  # rows that a stream must not give
    special_token_ids: Mapping[str, int] = MappingProxyType({})  # by name, where they are known
    vocab_size: int | None = None
    kind: Literal["rows", "packed"] | PreferenceKind = "rows"
    # what it gives: rows, packed pairs, pairs ("ranks"), labelled answers ("labels")
    _unit = "row"  # what a row is called in messages

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def borders(self, items: OffsetArray) -> Borders:
        """Where documents begin in these rows of `seq_len + 1` tokens; an OptionError when that is
        not known, also for no items."""

    def whole_documents(self, items: OffsetArray) -> tuple[OffsetArray, OffsetArray]:
        """Where the documents that lie whole inside these rows start and stop: positions
        `row * (seq_len + 1) + column`, ascending. An OptionError when that is not known, also for
        no items."""
        opens, closes = self._closed(items)
        borders = self.borders(items)
        length = borders.length
        edges = np.arange(len(items) + 1) * length
        starts = np.concatenate((edges[:-1], borders.positions))
        starts.sort()
        stops = np.append(starts[1:], edges[-1])[: len(starts)]
        whole = np.ones(len(starts), np.bool_)
        whole[starts.searchsorted(edges[:-1])] = opens
        whole[stops.searchsorted(edges[1:])] &= closes
        return starts[whole], stops[whole]

    def _closed(self, items: OffsetArray) -> tuple[BoolArray, BoolArray]:  # noqa: ARG002
        """Whether a document begins with the first token of each row, and whether one ends with
        its last token."""
        raise OptionError(
            f"{{fim}}: source {self.name!r} is not of documents ({type(self).__name__}, "
            f"{self.path}), so there is nothing to fill in; give shares to the other sources "
            "alone, such as fim={'code': 0.5}",
            fim=...,
        )

    @abstractmethod
    def span(self, item: int) -> RowSpan: ...

    @abstractmethod
    def prefetch(self, items: npt.ArrayLike) -> None:
        """Ask the kernel to read these rows ahead, with system calls; returns at once."""

    @abstractmethod
    def close(self) -> None:
        """Release the token files; may be called again."""

    @abstractmethod
    def _read(self, items: OffsetArray) -> tuple[IntArray, BoolArray | None]:
        """These rows, (n, seq_len + 1), and which of their tokens are trained; None: all."""

    def fill(
        self,
        items: npt.ArrayLike,
        input_ids: OffsetArray,
        labels: OffsetArray,
        rows: OffsetArray | None = None,
    ) -> None:
        """Row `items[i]` becomes row `i`, or row `rows[i]`, of both: (n, seq_len), int64."""
        numbers = item_numbers(items, len(self), self._unit)
        for array in (input_ids, labels):
            if array.dtype != "int64" or array.shape[1:] != (self.seq_len,):
                raise OptionError(
                    f"rows of {array.dtype} {array.shape}; wanted int64 (n, {self.seq_len:,})"
                )
        self.fill_unchecked(numbers, input_ids, labels, rows)

    def fill_unchecked(
        self,
        items: OffsetArray,
        input_ids: OffsetArray,
        labels: OffsetArray,
        rows: OffsetArray | None = None,
    ) -> None:
        for part in self._parts(len(items)):
            ids, trained = self._read(items[part])
            where = part if rows is None else rows[part]
            write_next_token_pairs(ids, trained, input_ids, labels, where)

    def _parts(self, num_rows: int) -> Iterator[slice]:
        """Some rows at a time: narrow ids on their way to int64 stay in a core's own cache."""
        size = max(1, _BLOCK_BYTES // self.window_bytes)
        for start in range(0, num_rows, size):
            yield slice(start, min(start + size, num_rows))


def checked_name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise OptionError("{name}: wanted a name for this source, such as 'wiki'", name=name)
    return name


class TokenStore(Protocol):
    """A store that opens its own tokens, such as a remote one (`shardmill.remote.open_remote`)."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path: ...

    @property
    def is_chat(self) -> bool: ...

    @property
    def exclusions(self) -> Exclusions: ...

    @property
    def manifest(self) -> Manifest: ...

    splits: tuple[str, ...]
    dtype: str
    fingerprint: str

    def open_tokens(self, split: str) -> TokenSpace: ...

    def document_starts(self, split: str) -> OffsetArray: ...


class SplitTokens:
    """The tokens of a split, or of a folder that is no store, and where documents begin in them."""

    _space: TokenSpace
    _of: tuple[Store | TokenStore, str] | None  # the store and the split
    _documents: OffsetArray | None = None  # mapped at first use, in every process

    def document_starts(self) -> OffsetArray | None:
        """Where documents begin in the split; None for a folder, which does not say."""
        if self._of is not None and self._documents is None:
            store, split = self._of
            starts = checked_starts(store.document_starts(split), self._space.num_tokens)
            self._documents = held_by(self._space.reader, starts)
        return self._documents

    def close(self) -> None:
        """Release the token files; may be called again."""
        self._space.close()
        self._documents = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_documents": None}  # a mapped array would pickle by value

    def _excluded_spans(self) -> OffsetArray:
        if self._of is None:
            return np.empty((0, 2), np.int64)
        store, split = self._of
        listed = read_exclusions(store) if isinstance(store, Store) else store.exclusions
        return listed.spans(split)


class TokenSource(SplitTokens, RowSource):
    """Every whole window of a split or a folder: a read-only sequence without a state.

    Window `i` begins at token `i * seq_len`; its inputs are `seq_len` tokens, its labels the same
    one further, so every transition is trained once per epoch. `excluded` holds the windows that a
    stream must not give, as they were when the source was opened; `fill` gives any window.

    `path` is a store or a folder of .npy files, an open remote store, or an `open_token_folder` of
    other files. `split` None: the only split of the store, or the one that `path` names. `name` is
    part of the order: the same data under another name comes in another order; None: the name of
    the folder. `eos_token_id` is for folders that are not stores: with the token that ends every
    document a loader can keep documents apart. `reader`: "mapped" maps the files, "pread" reads
    them with system calls (docs/loading.md says when), "auto" is "pread" on network file systems.
    The attribute `reader` holds the choice; no token depends on it. A remote store reads through
    its cache: "auto" only.
    """

    _unit = "window"

    def __init__(
        self,
        path: str | Path | TokenFolder | TokenStore,
        *,
        seq_len: int,
        split: str | None = "train",
        name: str | None = None,
        eos_token_id: int | None = None,
        reader: ReaderName = "auto",
    ) -> None:
        self._of = _split_of(path, split)
        self.split: str | None = None  # None: a folder that is not a store
        if self._of is not None:
            store, found = self._of
            check_store(store, eos_token_id)
            space = _open_space(store, found, reader)
            self.path, self.split = store.folder, found
            self.fingerprint = f"{store.fingerprint}/{found}"
            self.special_token_ids = store.manifest.special_token_ids
            self.vocab_size = store.manifest.vocab_size
        else:
            assert isinstance(path, str | Path | TokenFolder), "anything else is a store"
            folder = path if isinstance(path, TokenFolder) else open_token_folder(path)
            space = TokenSpace(folder.files, reader=reader)
            self.path = folder.folder
            self.fingerprint = folder_fingerprint(folder, space)
        self._space, self._windows = space, Windows(space, seq_len=seq_len)
        self.reader = space.reader
        self.seq_len = self._windows.seq_len
        own = self.path.name if isinstance(path, str | Path | TokenFolder) else path.name
        self.name = checked_name(own if name is None else name)
        self.num_tokens = space.num_tokens
        self.window_bytes = (self.seq_len + 1) * space.dtype.itemsize
        self.eos_token_id = check_eos(space, eos_token_id, self.name)
        if self.eos_token_id is not None:
            self.special_token_ids = {"eos": self.eos_token_id}
        self.excluded = self._excluded_by(self._excluded_spans())

    def __len__(self) -> int:
        return len(self._windows)

    def _read(self, items: OffsetArray) -> tuple[IntArray, None]:
        return self._windows.gather_unchecked(items), None

    def borders(self, items: OffsetArray) -> Borders:
        """Where documents begin in these windows: by a store's index, or after every end token of
        a folder. A folder without `eos_token_id` is an error."""
        starts = self.document_starts()
        if starts is not None:
            return find_borders(starts, items * self.seq_len, self.seq_len + 1)
        if self.eos_token_id is None:
            raise self._unknown_documents(documents=True)
        length = self.seq_len + 1
        places = [np.empty(0, np.int64)]
        for part in self._parts(len(items)):  # read just before, so cached
            ids = self._windows.gather_unchecked(items[part])
            places.append(borders_after(ids, self.eos_token_id).positions + part.start * length)
        return Borders(len(items), length, np.concatenate(places))

    def _closed(self, items: OffsetArray) -> tuple[BoolArray, BoolArray]:
        first, stop = items * self.seq_len, items * self.seq_len + self.seq_len + 1
        starts = self.document_starts()
        if starts is not None:
            at, last = starts.searchsorted(first), starts.searchsorted(stop)
            edges = np.append(starts, self.num_tokens)  # the last document ends with the tokens
            return edges[at] == first, edges[last] == stop
        eos = self.eos_token_id
        if eos is None:
            raise self._unknown_documents(fim=...)
        before = self._space.gather_unchecked(np.maximum(first - 1, 0), 1)[:, 0]
        last_ids = self._space.gather_unchecked(stop - 1, 1)[:, 0]
        return (first == 0) | (before == eos), last_ids == eos

    def spans(self, items: OffsetArray) -> OffsetArray:
        """(n, 2) the tokens of these windows, start and stop."""
        return np.stack((items * self.seq_len, items * self.seq_len + self.seq_len + 1), axis=1)

    def windows_of(self, spans: OffsetArray) -> tuple[int, int]:
        """How many windows have a token of these merged spans, of how many."""
        found = self._excluded_by(spans)
        return 0 if found is None else found.num_excluded, len(self)

    def span(self, item: int) -> RowSpan:
        """Documents without tokens are left out."""
        start = item * self.seq_len
        stop = start + self.seq_len + 1
        starts = self.document_starts()
        return RowSpan(start, stop, None if starts is None else _cut_out(starts, start, stop))

    def prefetch(self, items: npt.ArrayLike) -> None:
        self._windows.prefetch(items)

    def _unknown_documents(self, **asked: Any) -> OptionError:
        (option,) = asked
        return OptionError(
            f"{{{option}}}, but it is not known where the documents of source {self.name!r} "
            f"begin: {self.path} is a folder of tokens, not a store. Name the token that ends "
            f"a document, TokenSource(..., eos_token_id=...), or build a store",
            **asked,
        )

    def _excluded_by(self, spans: OffsetArray) -> ExcludedItems | None:
        return excluded_windows(
            spans,
            name=self.name,
            num_items=len(self),
            stride=self.seq_len,
            length=self.seq_len + 1,
        )

    def __repr__(self) -> str:
        split = "" if self.split is None else f", split={self.split!r}"
        return (
            f"TokenSource({str(self.path)!r}{split}, name={self.name!r}, "
            f"seq_len={self.seq_len:,}, windows={len(self):,}, reader={self.reader!r})"
        )


def _open_space(store: Store | TokenStore, split: str, reader: ReaderName) -> TokenSpace:
    if isinstance(store, Store):
        return open_tokens(store, split, reader=reader)
    if reader != "auto":
        raise OptionError(
            f"{{reader}}: {store!r} is read through its cache; wanted 'auto'. A copy on this "
            f"machine (`shardmill pull`) can be read with any reader",
            reader=reader,
        )
    return store.open_tokens(split)


def _cut_out(starts: OffsetArray, start: int, stop: int) -> Documents:
    """The documents with tokens in start..stop, cut to it."""
    first = int(starts.searchsorted(start, side="right")) - 1
    last = int(starts.searchsorted(stop, side="left"))
    edges = np.append(starts[first:last], stop).clip(start, stop).tolist()
    spans = zip(range(first, last), edges[:-1], edges[1:], strict=True)
    return tuple(span for span in spans if span[1] < span[2])


def _split_of(
    path: str | Path | TokenFolder | TokenStore, split: str | None
) -> tuple[Store | TokenStore, str] | None:
    if isinstance(path, TokenFolder):
        return None
    if isinstance(path, str | Path):
        return find_split(path, split)
    named = path.splits[0] if split is None and len(path.splits) == 1 else split
    if named not in path.splits:
        raise OptionError(f"{path!r}: its splits are {list(path.splits)}; none is {split!r}")
    return path, named


def check_eos(space: TokenSpace, eos_token_id: int | None, name: str) -> int | None:
    """The id that ends a document, if these tokens can hold it; a warning when none does."""
    if eos_token_id is None:
        return None
    eos = whole_number(eos_token_id, "eos_token_id", least=0)
    if eos > np.iinfo(space.dtype).max:
        raise OptionError(
            f"{name}: {{eos_token_id}} cannot occur in {space.dtype} tokens; these tokens come "
            f"from another tokenizer",
            eos_token_id=eos,
        )
    looked_at = min(space.num_tokens, _LOOK_FOR_EOS)
    if not (space.read(0, looked_at) == eos).any():
        log.warning(
            "%s: eos_token_id=%d is not among the first %s tokens; is it the right id?",
            *(name, eos, f"{looked_at:,}"),
        )
    return eos


def check_store(store: Store | TokenStore, eos_token_id: int | None) -> None:
    if isinstance(store, Store):
        refuse_preferences(store, "a window would hold parts of both")
    if store.is_chat:
        raise OptionError(
            f"{store.folder}: a store of conversations. Here every token would be trained; read it "
            f"with shardmill.ChatRows, or packed with shardmill.PackSource: both follow its loss "
            f"mask"
        )
    if eos_token_id is not None:
        raise OptionError(
            f"{{eos_token_id}}, but {store.folder} is a store, whose index says where documents "
            f"begin; leave it out",
            eos_token_id=eos_token_id,
        )
