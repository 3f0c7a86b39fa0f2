"""Which tokens of a store are not to be trained on: `exclude.json` beside the store.

The files of the store are never touched. The list is written atomically under a lock, so
concurrent commands lose nothing, and equal entries are equal bytes. A list that is damaged or
belongs to other tokens is an error: training never continues because a list could not be read.
Spans are half-open, in the token space of a split; merged spans are ascending and do not touch.
FORMAT.md describes the bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.errors import ManifestError, OptionError, StoreError
from shardmill.records import BoolArray, OffsetArray
from shardmill.storage.atomic import LockedFile, atomic_write, sync_folder
from shardmill.store.layout import EXCLUDE
from shardmill.store.manifest import (
    Count,
    Manifest,
    Sha256,
    SplitEntry,
    fingerprint,
    read_plain_file,
)
from shardmill.store.store import Store, document_spans, open_store

MAX_EXCLUDE_BYTES = 2**28
_MAX_REASON = 1000  # characters
_HEAD = re.compile(rb'\{"format":"shardmill-exclude","version":([0-9]+),"sha256":"([0-9a-f]{64})",')
_VERSION = 1
_NO_SEAL = b"0" * 64
_NEXT = "copy it again, or remove it and exclude again what must not be trained on"


class ExcludedSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The steps whose samples an entry excludes. For people: the spans decide."""

    source: str  # its name in the mixture
    start: Count
    stop: Count
    world: Count
    batch_size: Count  # samples of one rank at a step
    seq_len: Count
    seed: Annotated[int, msgspec.Meta(ge=0)]
    shuffle: str


class ExcludeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one command excluded, and why."""

    number: Count  # its name: from 1, ascending through the file
    split: str
    reason: str  # in words
    documents: tuple[Count, ...] | None  # their numbers, ascending; None: not by documents
    steps: ExcludedSteps | None  # None: not by steps
    spans: tuple[tuple[Count, Count], ...]  # start, stop; merged

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusions:
    """Everything that is excluded in a store."""

    store: str  # its fingerprint
    entries: tuple[ExcludeEntry, ...]  # none: nothing is excluded
    sha256: str | None  # the seal of the file; None when there is none

    def spans(self, split: str) -> OffsetArray:
        """(k, 2) the tokens that any entry excludes, merged."""
        found = [entry.spans for entry in self.entries if entry.split == split and entry.spans]
        return merge_spans(np.concatenate([as_spans(one) for one in found])) if found else NO_SPANS

    def num_tokens(self, split: str) -> int:
        """Tokens of a split that are excluded, each counted once."""
        return count_tokens(self.spans(split))

    def covers(self, other: Exclusions) -> bool:
        """Whether all that `other` excludes is excluded here."""
        splits = {entry.split for entry in other.entries}
        return all(cover_spans(self.spans(split), other.spans(split)) for split in splits)


NO_SPANS: OffsetArray = np.empty((0, 2), np.int64)
NO_SPANS.setflags(write=False)


def as_spans(spans: object) -> OffsetArray:
    """Pairs as an array of (n, 2)."""
    return np.asarray(spans, np.int64).reshape(-1, 2)


def merge_spans(spans: OffsetArray) -> OffsetArray:
    """The same tokens in ascending spans that do not touch; empty spans are dropped."""
    filled = spans[spans[:, 0] < spans[:, 1]]
    if not len(filled):
        return NO_SPANS
    ordered = filled[np.argsort(filled[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    # 0..4 1..2 4..6 8..9: reach 4 4 6 9; a new span begins where a start is beyond the reach
    first = np.flatnonzero(np.append(True, ordered[1:, 0] > reach[:-1]))
    last = np.append(first[1:], len(ordered)) - 1
    return np.stack((ordered[first, 0], reach[last]), axis=1)


def touched(spans: OffsetArray, starts: OffsetArray, stops: OffsetArray) -> BoolArray:
    """Which of the ranges start..stop have a token of these merged spans."""
    if not len(spans):
        return np.zeros(len(starts), np.bool_)
    candidate = spans[:, 1].searchsorted(starts, side="right")  # first span that ends after start
    begins = np.append(spans[:, 0], np.iinfo(np.int64).max)[candidate]
    met: BoolArray = (begins < stops) & (starts < stops)
    return met


def cover_spans(outer: OffsetArray, inner: OffsetArray) -> bool:
    """Whether every token of `inner` is in `outer`; both are merged."""
    both = merge_spans(np.concatenate((outer, inner)))
    return count_tokens(both) == count_tokens(outer)


def count_tokens(spans: OffsetArray) -> int:
    """In merged spans."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def _entry_problems(entries: tuple[ExcludeEntry, ...], manifest: Manifest) -> Iterator[str]:
    """What cannot be true of entries in a store with this manifest."""
    numbers = [entry.number for entry in entries]
    if not numbers or numbers[0] < 1 or sorted(set(numbers)) != numbers:
        yield f"entries are numbered {numbers[:8]}; wanted at least one, ascending from 1"
    for entry in entries:
        for problem in _problems_of(entry, manifest.splits.get(entry.split), manifest):
            yield f"entry {entry.number}: {problem}"


def _problems_of(
    entry: ExcludeEntry, split: SplitEntry | None, manifest: Manifest
) -> Iterator[str]:
    spans = as_spans(entry.spans)
    if split is None:
        yield f"split {entry.split!r}; the store has {list(manifest.splits)}"
        return
    if len(spans) and spans.max() > split.tokens:
        yield f"reaches token {spans.max():,} of {split.tokens:,}"
    if not np.array_equal(merge_spans(spans), spans):
        yield "its spans are empty, touch, or are not ascending"
    if not entry.reason.strip() or len(entry.reason) > _MAX_REASON:
        yield f"a reason of {len(entry.reason):,} characters; wanted 1 to {_MAX_REASON:,}"
    if entry.documents is not None and entry.steps is not None:
        yield "has both documents and steps; wanted one of them"
    numbers = np.array(entry.documents or (), np.int64)
    if (numbers[1:] <= numbers[:-1]).any():
        yield "its documents are not ascending"
    elif len(numbers) and numbers[-1] >= split.documents:
        yield f"document {numbers[-1]:,} of {split.documents:,}"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["shardmill-exclude"]
    version: Literal[1]
    sha256: Sha256
    store: Sha256
    entries: tuple[ExcludeEntry, ...]


def encode_exclusions(store: str, entries: Sequence[ExcludeEntry]) -> bytes:
    """exclude.json, to the byte: one line per entry, sealed with its own sha256."""
    head = f'{{"format":"shardmill-exclude","version":{_VERSION},"sha256":"'.encode()
    lines = b",\n".join(msgspec.json.encode(entry) for entry in entries)
    rest = f'","store":"{store}","entries":[\n'.encode() + lines + b"\n]}\n"
    return head + hashlib.sha256(head + _NO_SEAL + rest).hexdigest().encode() + rest


def decode_exclusions(data: bytes, manifest: Manifest, *, where: str) -> Exclusions:
    """What these bytes exclude in the store with this manifest; an error says what is wrong."""
    head = _HEAD.match(data)
    if head is None:
        raise ManifestError(f"{where}: not a list of exclusions of ours, or damaged; {_NEXT}")
    if int(head[1]) != _VERSION:
        raise ManifestError(
            f"{where}: version {int(head[1])}, but this shardmill reads version {_VERSION}; "
            "upgrade shardmill"
        )
    zeroed = data[: head.start(2)] + _NO_SEAL + data[head.end(2) :]
    if hashlib.sha256(zeroed).hexdigest() != head[2].decode():
        raise ManifestError(f"{where}: its sha256 is not the one it says: changed; {_NEXT}")
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{where}: {error}; {_NEXT}") from error
    own = fingerprint(manifest)
    if file.store != own:
        raise ManifestError(
            f"{where}: excludes tokens of another store, or of this one before it was built again "
            f"(fingerprint {file.store[:12]}, this store has {own[:12]}); {_NEXT}"
        )
    for problem in _entry_problems(file.entries, manifest):
        raise ManifestError(f"{where}: {problem}; {_NEXT}")
    return Exclusions(store=file.store, entries=file.entries, sha256=file.sha256)


def read_exclusions(store: Store | str | Path) -> Exclusions:
    """What is excluded in a store; nothing, if there is no list."""
    found = _opened(store)
    data = read_plain_file(found.folder / EXCLUDE, MAX_EXCLUDE_BYTES)
    if data is None:
        return Exclusions(store=found.fingerprint, entries=(), sha256=None)
    return decode_exclusions(data, found.manifest, where=str(found.folder / EXCLUDE))


def refuse_excluded(store: Store, split: str, who: str) -> None:
    """Refuse a split with excluded tokens, for readers that cannot leave anything out."""
    tokens = read_exclusions(store).num_tokens(split)
    if tokens:
        raise StoreError(
            f"{store.folder}: {tokens:,} tokens of split {split!r} are excluded, but {who} would "
            "give every token: list them with `shardmill exclude --list`; take them back with "
            "`shardmill exclude --remove`, or read a copy of the store without its exclude.json"
        )


def write_exclusions(store: Store | str | Path, entries: Sequence[ExcludeEntry]) -> Exclusions:
    """Replace all entries by these; without entries the file is removed."""
    found = _opened(store)
    with _locked(found.folder):
        return _replace(found, tuple(entries))


def exclude_documents(
    store: Store | str | Path, documents: npt.ArrayLike, *, reason: str, split: str = "train"
) -> ExcludeEntry:
    """Exclude whole documents or conversations of a split, by their numbers."""
    found = _opened(store)
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
    found = _opened(store)
    return add_exclusion(found, spans_entry(found, spans, reason=reason, split=split, steps=steps))


def add_exclusion(store: Store | str | Path, entry: ExcludeEntry) -> ExcludeEntry:
    """Add an entry; returns it with its number. An entry that is there already is not repeated."""
    found = _opened(store)
    with _locked(found.folder):
        old = read_exclusions(found).entries
        for one in old:
            if msgspec.structs.replace(one, number=entry.number) == entry:
                return one
        numbered = msgspec.structs.replace(entry, number=old[-1].number + 1 if old else 1)
        _replace(found, (*old, numbered))
    return numbered


def remove_exclusion(store: Store | str | Path, number: int) -> ExcludeEntry:
    """Take an entry back, by its number; what other entries exclude stays excluded."""
    found = _opened(store)
    with _locked(found.folder):
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
    """An entry for these documents, not written yet."""
    total, numbers = store.num_documents(split), np.unique(_whole(documents, "documents"))
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < total:
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise OptionError(f"{store.folder}: document {wrong:,} of {total:,} in split {split!r}")
    spans = spans_of_documents(store, split, numbers)
    entry = spans_entry(store, spans, reason=reason, split=split)
    return msgspec.structs.replace(entry, documents=tuple(numbers.tolist()))


def spans_entry(
    store: Store,
    spans: npt.ArrayLike,
    *,
    reason: str,
    split: str,
    steps: ExcludedSteps | None = None,
) -> ExcludeEntry:
    """An entry for these tokens, not written yet."""
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
        spans=tuple((start, stop) for start, stop in merge_spans(found).tolist()),
    )


def spans_of_documents(store: Store, split: str, documents: OffsetArray) -> OffsetArray:
    """The tokens of documents that the split has, merged."""
    spans = document_spans(store.document_starts(split), documents, store.num_tokens(split))
    return merge_spans(np.stack(spans, axis=1))


def _opened(store: Store | str | Path) -> Store:
    return store if isinstance(store, Store) else open_store(store)


def _replace(store: Store, entries: tuple[ExcludeEntry, ...]) -> Exclusions:
    path = store.folder / EXCLUDE
    data = encode_exclusions(store.fingerprint, entries)
    found = Exclusions(store=store.fingerprint, entries=(), sha256=None)
    if entries:
        found = decode_exclusions(data, store.manifest, where=str(path))  # what we can read
    if len(data) > MAX_EXCLUDE_BYTES:
        raise OptionError(
            f"{path}: would have {len(data):,} bytes, wanted at most {MAX_EXCLUDE_BYTES:,}"
        )
    try:
        for left in path.parent.glob(f".{EXCLUDE}.*.tmp"):  # of a killed command: we hold the lock
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
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock on the exclusions of this folder: there is no lock file that could look like
    part of the store."""
    try:
        lock = LockedFile(folder.resolve())
    except OSError as error:
        raise StoreError(f"{folder}: cannot be locked: {error.strerror}") from error
    with closing(lock):
        lock.lock()
        yield


def _whole(numbers: npt.ArrayLike, name: str) -> OffsetArray:
    found = np.asarray(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise OptionError(f"{{{name}}}: wanted whole numbers, found {found.dtype}", **{name: ...})
    return found.astype(np.int64)


def _checked_reason(reason: str) -> str:
    shown = reason[:80] if isinstance(reason, str) else reason
    if not isinstance(reason, str) or not reason.strip() or len(reason) > _MAX_REASON:
        raise OptionError(f"{{reason}}: wanted 1 to {_MAX_REASON:,} characters", reason=shown)
    try:
        reason.encode()
    except UnicodeEncodeError as error:
        raise OptionError("{reason}: not valid Unicode; wanted words", reason=shown) from error
    return reason
