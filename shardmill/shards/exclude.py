"""What of a store is not to be trained on, recorded beside its tokens.

In: a store, spans of tokens or numbers of documents, a reason.  Out: the file, or `Exclusions`.
Promise: the store's own files are never touched; the file appears whole or not at all; equal
entries are equal bytes; two commands at a time lose nothing; what is read is what was written, to
the byte, and of this very store. A file that is damaged or of other tokens is an error: nobody
trains on because a list cannot be read.
Not here: the bytes of the file (exclude_file.py), which samples that concerns (loading).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.atomic import atomic_write, sync_folder
from shardmill.errors import OptionError, StoreError
from shardmill.records import OffsetArray
from shardmill.shards.exclude_entries import (
    MOST_REASON,
    ExcludedSteps,
    ExcludeEntry,
    Exclusions,
    as_spans,
    merge_spans,
)
from shardmill.shards.exclude_file import (
    EXCLUDE,
    MOST_BYTES,
    decode_exclusions,
    encode_exclusions,
    read_bytes,
)
from shardmill.shards.store import Store, open_store


def read_exclusions(store: Store | str | Path) -> Exclusions:
    """What is excluded in a store; without a file, nothing."""
    found = store if isinstance(store, Store) else open_store(store)
    data = read_bytes(found.folder / EXCLUDE)
    if data is None:
        return Exclusions(store=found.fingerprint, entries=(), sha256=None)
    return decode_exclusions(data, found.manifest, where=str(found.folder / EXCLUDE))


def refuse_excluded(store: Store, split: str, who: str) -> None:
    """For readers that cannot leave anything out: refuse a split with excluded tokens."""
    tokens = read_exclusions(store).num_tokens(split)
    if tokens:
        raise StoreError(
            f"{store.folder}: {tokens:,} tokens of split {split!r} are excluded, and {who} gives "
            "every token: see them with `shardmill exclude --list`; take them back with `shardmill "
            "exclude --remove`, or read a copy of the store without its exclude.json"
        )


def write_exclusions(store: Store | str | Path, entries: Sequence[ExcludeEntry]) -> Exclusions:
    """Put these entries in the place of all that are there; without entries the file goes."""
    found = store if isinstance(store, Store) else open_store(store)
    with _alone(found.folder):
        return _replace(found, tuple(entries))


def exclude_documents(
    store: Store | str | Path, documents: npt.ArrayLike, *, reason: str, split: str = "train"
) -> ExcludeEntry:
    """Exclude whole documents or conversations of a split, by their numbers."""
    found = store if isinstance(store, Store) else open_store(store)
    return add_exclusion(found, documents_entry(found, documents, reason=reason, split=split))


def exclude_spans(
    store: Store | str | Path,
    spans: npt.ArrayLike,
    *,
    reason: str,
    split: str = "train",
    steps: ExcludedSteps | None = None,
) -> ExcludeEntry:
    """Exclude tokens: pairs of start and stop in the token space of a split."""
    found = store if isinstance(store, Store) else open_store(store)
    return add_exclusion(found, spans_entry(found, spans, reason=reason, split=split, steps=steps))


def add_exclusion(store: Store | str | Path, entry: ExcludeEntry) -> ExcludeEntry:
    """Write an entry behind those that are there; returns it with its number.

    The same entry, found there already, is not written again.
    """
    found = store if isinstance(store, Store) else open_store(store)
    with _alone(found.folder):
        old = read_exclusions(found).entries
        for one in old:
            if msgspec.structs.replace(one, number=entry.number) == entry:
                return one
        numbered = msgspec.structs.replace(entry, number=old[-1].number + 1 if old else 1)
        _replace(found, (*old, numbered))
    return numbered


def remove_exclusion(store: Store | str | Path, number: int) -> ExcludeEntry:
    """Take an entry back, by its number; what others exclude too stays excluded."""
    found = store if isinstance(store, Store) else open_store(store)
    with _alone(found.folder):
        old = read_exclusions(found).entries
        gone = [entry for entry in old if entry.number == number]
        if not gone:
            known = ", ".join(str(entry.number) for entry in old) or "none"
            raise OptionError(f"{found.folder}: no entry {number}; its entries are: {known}")
        _replace(found, tuple(entry for entry in old if entry.number != number))
    return gone[0]


def documents_entry(
    store: Store, documents: npt.ArrayLike, *, reason: str, split: str
) -> ExcludeEntry:
    """The entry of these documents, not written yet."""
    total, numbers = store.num_documents(split), np.unique(_whole(documents, "documents"))
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < total:
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise OptionError(f"{store.folder}: document {wrong:,} of {total:,} in split {split!r}")
    return ExcludeEntry(
        number=1,
        split=split,
        reason=_checked_reason(reason),
        documents=tuple(numbers.tolist()),
        steps=None,
        spans=_pairs(document_spans(store, split, numbers)),
    )


def spans_entry(
    store: Store,
    spans: npt.ArrayLike,
    *,
    reason: str,
    split: str,
    steps: ExcludedSteps | None = None,
) -> ExcludeEntry:
    """The entry of these tokens, not written yet."""
    found, size = as_spans(_whole(spans, "spans")), store.num_tokens(split)
    if len(found) and not 0 <= found.min() <= found.max() <= size:
        raise OptionError(
            f"{store.folder}: spans of {found.min():,}..{found.max():,}, but split {split!r} has "
            f"{size:,} tokens"
        )
    return ExcludeEntry(
        number=1,
        split=split,
        reason=_checked_reason(reason),
        documents=None,
        steps=steps,
        spans=_pairs(merge_spans(found)),
    )


def document_spans(store: Store, split: str, documents: OffsetArray) -> OffsetArray:
    """The tokens of documents that the split has, merged."""
    starts = store.document_starts(split)
    stops = np.full(len(documents), store.num_tokens(split), np.int64)
    inner = documents < len(starts) - 1
    stops[inner] = starts[documents[inner] + 1]
    return merge_spans(np.stack((starts[documents], stops), axis=1))


def _replace(store: Store, entries: tuple[ExcludeEntry, ...]) -> Exclusions:
    path = store.folder / EXCLUDE
    data = encode_exclusions(store.fingerprint, entries)
    if entries:
        read_back = decode_exclusions(data, store.manifest, where=str(path))  # we can read it
    else:
        read_back = Exclusions(store=store.fingerprint, entries=(), sha256=None)
    if len(data) > MOST_BYTES:
        raise OptionError(f"{path}: would have {len(data):,} bytes, wanted at most {MOST_BYTES:,}")
    try:
        for left in path.parent.glob(f".{EXCLUDE}.*.tmp"):  # by a killed one: we hold the lock
            left.unlink(missing_ok=True)
        if entries:
            with atomic_write(path) as file:
                file.write(data)
        else:
            path.unlink(missing_ok=True)
            sync_folder(path.parent)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot write: {error.strerror}; the exclusions are as they were"
        ) from error
    return read_back


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else changes the exclusions of this folder meanwhile. The kernel drops the lock at
    death, and no file is left behind that could look like part of the store."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be locked: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _whole(numbers: npt.ArrayLike, name: str) -> OffsetArray:
    found = np.asarray(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise OptionError(f"{name} of dtype {found.dtype}; wanted whole numbers")
    return found.astype(np.int64)


def _checked_reason(reason: str) -> str:
    if not isinstance(reason, str) or not reason.strip() or len(reason) > MOST_REASON:
        raise OptionError(f"reason={reason!r:.80}: wanted 1 to {MOST_REASON:,} characters")
    try:
        reason.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"reason={reason!r:.80}: not valid Unicode; wanted words") from error
    return reason


def _pairs(spans: OffsetArray) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in spans.tolist())
