"""The journal: tokenised documents in segments, each done when its receipt is there.

A segment is `NNNNNN.tokens` (raw, the store's dtype), `NNNNNN.lengths` (raw int64),
`NNNNNN.drops` (JSON lines), for conversations `.mask`, `.turns`, `.roles` and `.splits`, and
`NNNNNN.json`, the receipt, written last and atomically with the sha256 of all the others, the
source's cursor behind it, and a seal of its own. Segment borders are a matter of speed and never
show in the store.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardmill.atomic import HashedFile, atomic_write, sync_folder
from shardmill.build.portion import PARTS, Account, Portion, parts_of, portion_of
from shardmill.errors import BuildError
from shardmill.records import Cursor, OffsetArray

SEGMENT_TOKENS = 8 * 2**20
SEGMENT_SECONDS = 10.0
"""A segment is sealed at either, so a kill costs seconds even with a slow tokenizer."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finished segment: what is in it and where its source goes on."""

    number: int
    feed: int
    num_read: int
    num_documents: int
    num_tokens: int
    counts: dict[str, int]  # of the source: "empty", "invalid_utf8"
    dropped: dict[str, int]  # reason to number of rows
    cursor: dict[str, Any]  # a Cursor
    last: bool  # the feed ended with this segment
    sha256: dict[str, str]  # part to digest


class SegmentWriter:
    """One open segment. `seal` makes it count; without it the files are overwritten later."""

    def __init__(self, folder: Path, *, number: int, feed: int) -> None:
        self.num_documents = self.num_tokens = self.num_read = 0
        self._folder, self._number, self._feed = folder, number, feed
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._files = {part: self._begin(part) for part in PARTS}
        self._since = time.monotonic()

    def add(self, portion: Portion, account: Account) -> None:
        """The next portion; parts that it has and the others had not begin here."""
        for part, data in parts_of(portion, tokens=self.num_tokens):
            if part not in self._files:
                self._files[part] = self._begin(part)
            self._files[part].write(data)
        self._dropped.update(drop.reason for drop in portion.drops)
        self.num_tokens += len(portion.documents.values)
        self.num_documents += len(portion.documents)
        self.num_read += account.num_read
        self._counts.update(account.counts)

    @property
    def due(self) -> bool:
        old = time.monotonic() - self._since > SEGMENT_SECONDS
        return self.num_tokens >= SEGMENT_TOKENS or (old and self.num_read > 0)

    def seal(self, cursor: Cursor, *, last: bool) -> Receipt:
        sha256 = {part: file.finish() for part, file in self._files.items()}
        sync_folder(self._folder)
        receipt = Receipt(
            number=self._number,
            feed=self._feed,
            num_read=self.num_read,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            counts=dict(self._counts),
            dropped=dict(self._dropped),
            cursor=cursor,
            last=last,
            sha256=sha256,
        )
        data = msgspec.json.encode(receipt)
        with atomic_write(_path(self._folder, self._number, "json")) as file:
            file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        return receipt

    def abandon(self) -> None:
        """Close the files of an unsealed segment; harmless after `seal`."""
        for file in self._files.values():
            file.abort()

    def _begin(self, part: str) -> HashedFile:
        """What an unsealed segment of an earlier run left here is overwritten."""
        return HashedFile(_path(self._folder, self._number, part), replace=True)


def read_receipts(folder: Path, dtype: str) -> list[Receipt]:
    """The receipts in order, up to the first that is missing or does not match its files.

    What follows that one is removed, so that no leftover is ever taken for work done.
    """
    receipts: list[Receipt] = []
    while (path := _path(folder, len(receipts), "json")).exists():
        try:
            receipt = _read_receipt(path)
            load_segment(folder, receipt, dtype)
        except (BuildError, msgspec.MsgspecError, FileNotFoundError):
            break
        receipts.append(receipt)
    known = {
        _path(folder, receipt.number, part)
        for receipt in receipts
        for part in (*receipt.sha256, "json")
    }
    for path in folder.iterdir():
        if path not in known:
            path.unlink()
    return receipts


def _read_receipt(path: Path) -> Receipt:
    sha256, _, data = path.read_bytes().partition(b"\n")
    if hashlib.sha256(data).hexdigest().encode() != sha256:
        raise BuildError(f"{path}: changed after it was written")
    return msgspec.json.decode(data, type=Receipt)


def load_lengths(folder: Path, receipt: Receipt) -> OffsetArray:
    return np.fromfile(_path(folder, receipt.number, "lengths"), "<i8")


def load_segment(folder: Path, receipt: Receipt, dtype: str) -> Portion:
    """A segment from disk, checked against the receipt's hashes."""
    parts = receipt.sha256
    data = {part: np.fromfile(_path(folder, receipt.number, part), np.uint8) for part in parts}
    for part, array in data.items():
        if hashlib.sha256(array.data).hexdigest() != receipt.sha256[part]:
            raise BuildError(
                f"{folder}: segment {receipt.number:06d} ({part}) changed after it was written; "
                "--resume tokenises it and what follows again"
            )
    return portion_of(data, dtype)


def _path(folder: Path, number: int, part: str) -> Path:
    return folder / f"{number:06d}.{part}"
