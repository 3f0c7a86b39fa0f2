"""One source over many files, whatever their kind.

In: listed files and a reader for one file.  Out: a `Source`.
Promise: files in order; the cursor names the file and the place in it, so that a fresh source
goes on exactly there; a file that changed since it was listed is refused. A source can be divided
into its files, and into parts of files where their kind allows it; and cut into pieces of about one
size, which are runs of files or parts of one.
Not here: formats. A reader knows one file at a time and nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources.batches import BatchLimits, check_num_bytes, coalesce, fields_of, runs
from shardmill.storage.files import InputFile, check_unchanged, fingerprint_files, stamp_of_file

_SIZE_THREADS = 8


class FileReader(Protocol):
    """How one kind of file becomes batches."""

    @property
    def kind(self) -> str: ...

    @property
    def part(self) -> str:
        """What it reads of a file, for names: "" when all of it."""

    @property
    def continues(self) -> bool:
        """Whether its rows are counted on from the part before it; see `FilePart`."""

    def options(self) -> dict[str, JSON]:
        """Every option that changes the documents, for `describe`."""

    def size_hint(self, file: InputFile) -> int:
        """About how many bytes of text the file holds."""

    def bytes_before(self, file: InputFile, position: JSON) -> int:
        """About how many bytes of `size_hint` lie before a position; may unpack them."""

    def read(self, file: InputFile, position: JSON) -> Iterator[TextBatch]:
        """Batches from `position` on (None: the start); their cursors are positions."""

    def with_limits(self, limits: BatchLimits) -> FileReader:
        """The same reader with other limits."""

    def settled(self) -> FileReader:
        """The same reader with every choice made that takes a look at the files: small to send,
        and right for any one of them alone."""

    def divide(self, file: InputFile) -> Sequence[FileReader]:
        """Readers which, one behind the other, give the file: the finest parts it has."""

    def cut(self, file: InputFile, num_bytes: int) -> Sequence[FileReader]:
        """Readers which, one behind the other, give the file: each of about `num_bytes`, as far as
        it has such parts."""


class WholeFiles:
    """For readers of files that can only be read whole, and that look at one file alone."""

    part = ""
    continues = False

    def settled(self) -> Self:
        return self

    def divide(self, file: InputFile) -> Sequence[Self]:  # noqa: ARG002 - of any file
        return (self,)

    def cut(self, file: InputFile, num_bytes: int) -> Sequence[Self]:  # noqa: ARG002 - of any size
        return (self,)


class FileSource:
    """Files of one kind, read one behind the other."""

    def __init__(
        self, files: tuple[InputFile, ...], reader: FileReader, *, name: str, limits: BatchLimits
    ) -> None:
        self._files = files
        self._reader = reader
        self._name = name
        self._limits = limits
        self._description: dict[str, JSON] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, files={len(self._files):,})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def continues(self) -> bool:
        return self._reader.continues

    @property
    def part(self) -> str:
        """What it reads of its file: "" when all of it."""
        return self._reader.part

    @property
    def files(self) -> tuple[InputFile, ...]:
        return self._files

    @property
    def settings(self) -> dict[str, JSON]:
        """How the files are read: their kind, and every option that changes the documents."""
        return {"kind": self._reader.kind, **self._reader.options()}

    def of_files(self, files: tuple[InputFile, ...]) -> FileSource:
        """The same source of some of its files, in this order."""
        return FileSource(files, self._reader.settled(), name=self._name, limits=self._limits)

    def describe(self) -> dict[str, JSON]:
        """Reads the files once (their ends, when large) to fingerprint them; then remembers."""
        if self._description is None:
            self._description = {
                "kind": self._reader.kind,
                "name": self._name,
                **self._reader.options(),
                "files": fingerprint_files(self._files),
            }
        return dict(self._description)

    def stamp(self) -> JSON:
        """When each file was written, for one machine: a build is not resumed on other input."""
        return [[file.name, stamp_of_file(file)] for file in self._files]

    def size_hint(self) -> int | None:
        return sum(self._sizes(self._reader))

    def bytes_before(self, cursor: Cursor) -> int:
        """About how many bytes of `size_hint` lie before a cursor. Reads to there what is packed,
        so it is for cursors near the start."""
        first, position = self._locate(cursor)
        before = [self._reader.size_hint(file) for file in self._files[:first]]
        return sum(before) + self._reader.bytes_before(self._files[first], position)

    def limited(self, num_bytes: int) -> Self:
        """The same source, which refuses a document over `num_bytes` before it is read whole."""
        return self.with_limits(self._limits.refusing(num_bytes))

    @property
    def limits(self) -> BatchLimits:
        return self._limits

    def with_limits(self, limits: BatchLimits) -> Self:
        """The same documents in other batches."""
        source = copy(self)
        source._limits, source._reader = limits, self._reader.with_limits(limits)
        return source

    def reordered(self, key: Callable[[InputFile], str]) -> Self:
        """The same files, sorted by `key`."""
        return self._with_files(sorted(self._files, key=key), self._name)

    def each_file(self) -> list[Self]:
        """A source for each file. They look together for what none of them was told."""
        return [self._with_files((file,), f"{self._name}/{file.name}") for file in self._files]

    def _with_files(self, files: Sequence[InputFile], name: str) -> Self:
        source = copy(self)
        source._files, source._name = tuple(files), name
        source._description = None
        return source

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        first, position = self._locate(cursor)
        return coalesce(self._read(first, position), self._limits)

    def divide(self, at_least: int) -> Sequence[FileSource]:
        """One source per file; when there are fewer than `at_least`, one per part of a file (which
        then reads the footers of Parquet files). Nothing is fingerprinted."""
        check_at_least(at_least)
        reader = self._reader.settled()
        if len(self._files) >= at_least:
            return [self._piece((file,), reader) for file in self._files]
        return [self._piece((file,), part) for file in self._files for part in reader.divide(file)]

    def cut(self, num_bytes: int) -> Sequence[FileSource]:
        """Runs of files, and parts of a file that is larger. Reads the footers of Parquet files,
        and what `field=None` takes; nothing is fingerprinted."""
        check_num_bytes(num_bytes)
        reader = self._reader.settled()
        pieces: list[FileSource] = []
        for start, stop in runs(self._sizes(reader), num_bytes):
            files = self._files[start:stop]
            parts = reader.cut(files[0], num_bytes) if len(files) == 1 else (reader,)
            pieces += [self._piece(files, part) for part in parts]
        return pieces

    def _sizes(self, reader: FileReader) -> list[int]:
        """Of each file; on object storage a size may take a request, so several are asked for."""
        if all(isinstance(file.place, Path) for file in self._files):
            return [reader.size_hint(file) for file in self._files]
        with ThreadPoolExecutor(_SIZE_THREADS) as pool:
            return list(pool.map(reader.size_hint, self._files))

    def _piece(self, files: tuple[InputFile, ...], reader: FileReader) -> FileSource:
        last = "" if len(files) == 1 else f" to {files[-1].name}"
        name = f"{self._name}/{files[0].name}{last}{reader.part}"
        return FileSource(files, reader, name=name, limits=self._limits)

    def _locate(self, cursor: Cursor | None) -> tuple[int, JSON]:
        if cursor is None:
            return 0, None
        name, position = fields_of(cursor, ("file", "position"), self._name)
        for index, file in enumerate(self._files):
            if file.name == name:
                return index, position
        raise SourceError(
            f"source {self._name!r}: the cursor stands in {name!r}, which is not among its "
            f"{len(self._files):,} files; resume with the input the cursor came from"
        )

    def _read(self, first: int, position: JSON) -> Iterator[TextBatch]:
        for file in self._files[first:]:
            check_unchanged(file)
            for batch in self._reader.read(file, position):
                yield replace(batch, cursor={"file": file.name, "position": batch.cursor})
            check_unchanged(file)
            position = None


def check_at_least(at_least: int) -> None:
    if at_least < 1:
        raise OptionError(f"at_least={at_least}: wanted how many pieces are needed, 1 or more")
